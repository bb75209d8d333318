# SPDX-License-Identifier: Apache-2.0
"""Generated sections of Markdown files, between two comments. Called by the generators of tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def renewed(name: str, sections: Mapping[str, str], source: str) -> dict[Path, str]:
    """A file of docs/ with these sections renewed, by path.

    Raises:
        ValueError: a section is missing.
    """
    path = DOCS / name
    text = path.read_text(encoding="utf-8")
    for section, table in sections.items():
        before, begin, rest = text.partition(f"<!-- {section}: generated from proto/{source} -->\n")
        _, end, after = rest.partition(f"<!-- end of {section} -->\n")
        if not begin or not end:
            raise ValueError(f"{path.name} has no section {section}")
        text = f"{before}{begin}\n{table}\n\n{end}{after}"
    return {path: text}
