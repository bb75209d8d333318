# SPDX-License-Identifier: Apache-2.0
"""Reasons are an interface: each is a constant with a meaning, and no module says one of its own."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from atp_operator import conditions, reasons

SOURCE = Path(reasons.__file__).parent
SAID_BY = {
    "tell": 1,
    "condition": 2,
    "now_is": 1,
    "put": 2,
    "Refusal": 0,
    "Event": 1,
    "hold_back": 2,
    "end": 2,
    "restart": 1,
}
"""By call: which argument is the reason."""


def constants(module: Path) -> dict[str, tuple[str, str]]:
    """(value, meaning) of the module's text constants, by name."""
    body = ast.parse(module.read_text()).body
    found = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            meaning = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            found[ast.unparse(target)] = (value.value, meaning)
    return found


def test_each_is_camel_case_and_has_a_meaning() -> None:
    for module in (reasons, conditions):
        found = constants(Path(module.__file__))
        assert found
        for name, (value, meaning) in found.items():
            assert re.fullmatch(r"[A-Z][A-Za-z0-9]+", value), name
            assert meaning, name
        assert len({value for value, _ in found.values()}) == len(found)


def test_no_module_gives_a_reason_of_its_own() -> None:
    literal = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            place = SAID_BY.get(called)
            if place is None or len(node.args) <= place:
                continue
            said = node.args[place]
            if isinstance(said, ast.Constant) and isinstance(said.value, str):
                literal.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {said.value!r}")
    assert not literal
