# SPDX-License-Identifier: Apache-2.0
"""The pipeline that this switch realises: the contract p4/p4info.txtpb, indexed by ID."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Protocol, TypeVar

from finsy.proto import p4i
from google.protobuf import text_format

from .errors import Code, P4RuntimeError


@dataclass(frozen=True)
class Field:
    """A match field. `ranged`: a range match (inclusive), else exact."""

    id: int
    name: str
    bitwidth: int
    ranged: bool


@dataclass(frozen=True)
class Action:
    """An action and its parameters (id, name, bit width) in the order of the p4info."""

    id: int
    name: str
    params: tuple[tuple[int, str, int], ...]


@dataclass(frozen=True)
class Table:
    """A match-action table. `name` has no control prefix: `job`, not `AtpIngress.job`."""

    id: int
    name: str
    fields: tuple[Field, ...]
    actions: tuple[Action, ...]
    size: int

    @property
    def ternary(self) -> bool:
        """Entries need a priority."""
        return any(field.ranged for field in self.fields)


@dataclass(frozen=True)
class Counter:
    """An indirect counter. `counts_bytes`: unit bytes, else packets."""

    id: int
    name: str
    size: int
    counts_bytes: bool


@dataclass(frozen=True)
class Register:
    """A read-only register array."""

    id: int
    name: str
    size: int


@dataclass(frozen=True)
class Pipeline:
    """A p4info that this switch can realise, and its index."""

    p4info: p4i.P4Info
    tables: Mapping[int, Table]
    counters: Mapping[int, Counter]
    registers: Mapping[int, Register]

    def table(self, name: str) -> Table:
        """The table of that short name; KeyError if there is none."""
        for table in self.tables.values():
            if table.name == name:
                return table
        raise KeyError(name)


def contract_path() -> Path:
    """The contract: beside this package when installed, in p4/ in a source tree."""
    packaged = Path(str(resources.files(__package__))) / "p4info.txtpb"
    if packaged.exists():
        return packaged
    return Path(__file__).resolve().parents[2] / "p4" / "p4info.txtpb"


def load_p4info(path: Path) -> p4i.P4Info:
    """Read a p4info in protobuf text format. OSError or text_format.ParseError when it cannot be read."""
    return text_format.Parse(path.read_text(encoding="utf-8"), p4i.P4Info())


def _short(preamble: p4i.Preamble) -> str:
    return preamble.alias or preamble.name.rsplit(".", 1)[-1]


def build(p4info: p4i.P4Info) -> Pipeline:
    """Index a p4info. The caller has verified it against the contract."""
    actions = {
        action.preamble.id: Action(
            action.preamble.id,
            _short(action.preamble),
            tuple((param.id, param.name, param.bitwidth) for param in action.params),
        )
        for action in p4info.actions
    }
    tables: dict[int, Table] = {}
    for table in p4info.tables:
        tables[table.preamble.id] = Table(
            id=table.preamble.id,
            name=_short(table.preamble),
            fields=tuple(
                Field(field.id, field.name, field.bitwidth, field.match_type == p4i.MatchField.RANGE)
                for field in table.match_fields
            ),
            actions=tuple(actions[ref.id] for ref in table.action_refs if ref.scope != p4i.ActionRef.DEFAULT_ONLY),
            size=table.size,
        )
    counters = {
        counter.preamble.id: Counter(
            counter.preamble.id,
            _short(counter.preamble),
            counter.size,
            counter.spec.unit == p4i.CounterSpec.BYTES,
        )
        for counter in p4info.counters
    }
    registers = {
        register.preamble.id: Register(register.preamble.id, _short(register.preamble), register.size)
        for register in p4info.registers
    }
    return Pipeline(p4info, tables, counters, registers)


class _Named(Protocol):
    @property
    def preamble(self) -> p4i.Preamble: ...


_N = TypeVar("_N", bound=_Named)


def _by_name(objects: Iterable[_N]) -> dict[str, _N]:
    return {item.preamble.name: item for item in objects}


def _without_notes(p4info: p4i.P4Info) -> p4i.P4Info:
    """A copy without what has no effect: documentation and annotations."""
    copy = p4i.P4Info()
    copy.CopyFrom(p4info)
    for items in (copy.tables, copy.actions, copy.counters, copy.registers):
        for item in items:
            item.preamble.ClearField("doc")
            item.preamble.ClearField("annotations")
    for table in copy.tables:
        for field in table.match_fields:
            field.ClearField("doc")
            field.ClearField("annotations")
        for ref in table.action_refs:
            ref.ClearField("annotations")
    for action in copy.actions:
        for param in action.params:
            param.ClearField("doc")
            param.ClearField("annotations")
    return copy


def verify(pushed: p4i.P4Info, contract: p4i.P4Info) -> Pipeline:
    """The pipeline of a pushed p4info, or INVALID_ARGUMENT with the objects that this switch cannot realise.

    The software switch realises one program. Documentation, annotations and package information may differ.
    """
    have, want = _without_notes(pushed), _without_notes(contract)
    wrong: list[str] = []
    pairs = (
        (_by_name(have.tables), _by_name(want.tables)),
        (_by_name(have.actions), _by_name(want.actions)),
        (_by_name(have.counters), _by_name(want.counters)),
        (_by_name(have.registers), _by_name(want.registers)),
    )
    for mine, theirs in pairs:
        for name in sorted(set(mine) | set(theirs)):
            if name not in mine:
                wrong.append(f"{name} is missing")
            elif name not in theirs:
                wrong.append(f"{name} is not part of this switch")
            elif mine[name] != theirs[name]:
                wrong.append(f"{name} differs")
    for kind in (
        "direct_counters",
        "meters",
        "direct_meters",
        "action_profiles",
        "value_sets",
        "digests",
        "externs",
    ):
        if getattr(have, kind):
            wrong.append(f"{kind} are not part of this switch")
    if wrong:
        raise P4RuntimeError(
            Code.INVALID_ARGUMENT,
            "the p4info is not the ATP contract (p4/p4info.txtpb): " + ", ".join(wrong[:8]),
        )
    return build(pushed)
