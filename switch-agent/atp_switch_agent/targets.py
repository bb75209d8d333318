# SPDX-License-Identifier: Apache-2.0
"""What differs between the software switch, bmv2 and Tofino, found from the p4info that a switch runs.

A pipeline is recognised by its objects, not by a setting: the tables and actions of the contract (p4/p4info.txtpb) must
be there, the rest says which target it is. See docs/p4.md, "Differences from the software switch".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from finsy.proto import p4i

from atp_api.counters import DROPS, SWITCH

from .entries import ACTIONS, FIELDS, GUARDED, HOST_PIECES, OPTIONAL

SOFTWARE_TARGETS = frozenset({"software-bpf", "software-relay"})
STICKY_TARGETS = SOFTWARE_TARGETS | {"bmv2"}
"""Targets whose sums stay at the end of int32 once there."""

# The architecture of a compiled P4 program; the contract's own is "any", which only the software switch realises.
_TARGET_OF_ARCH: Mapping[str, str] = {"v1model": "bmv2", "tna": "tofino", "t2na": "tofino2"}

# Every P4 program of the project has 62 values (31 pairs); the software switch tells its own profiles.
_HARDWARE_VALUES = (62,)

EVENTS: Mapping[str, tuple[int, ...]] = {each.name: each.tna for each in SWITCH if each.tna}
"""Counter -> the events that make it on a Tofino, which counts those, in one array by event and job."""
EVENT_CODES = 32
EVENT_SHIFT = 8
"""A cell of the array is event << 8 | job ID."""


# What a P4 program drops of and for hosts, by the low three bits of a kind (K_ codes), in words of the software switch.
DROP_REASONS = (*DROPS, *DROPS[-1:] * (8 - len(DROPS)))
DROP_SHIFT = 9
"""A cell of the counter `drops` is reason << 9 | port."""


@dataclass(frozen=True)
class Target:
    """What the p4info says of the switch that runs it. 0 or empty: it does not say."""

    name: str
    port_bits: int
    aggregators: int = 0
    values: tuple[int, ...] = ()


def is_software(name: str) -> bool:
    """Whether a target, as its switch names itself, is the software switch, which needs no compiled program."""
    return name in SOFTWARE_TARGETS


def short(preamble: p4i.Preamble) -> str:
    """Name without the names of control and pipe: `job` of `pipe.AtpIngress.job`."""
    return preamble.alias or preamble.name.rsplit(".", 1)[-1]


def recognise(p4info: p4i.P4Info) -> Target:
    """The target of a p4info without problems."""
    name = _TARGET_OF_ARCH.get(p4info.pkg_info.arch, "")
    admission = next(table for table in p4info.tables if short(table.preamble) == "admission")
    port_bits = next(field.bitwidth for field in admission.match_fields if field.name == "ingress_port")
    if not name:
        return Target("", port_bits)
    # Each aggregator has a cell in every register of the state; `missing` exists in both programs.
    cells = [item.size for item in p4info.registers if short(item.preamble) == "missing"]
    return Target(name, port_bits, cells[0] if cells else 0, _HARDWARE_VALUES)


class _Named(Protocol):
    @property
    def preamble(self) -> p4i.Preamble: ...


_N = TypeVar("_N", bound=_Named)


def _by_name(objects: Iterable[_N]) -> dict[str, _N]:
    return {short(item.preamble): item for item in objects}


def problems(p4info: p4i.P4Info, contract: p4i.P4Info) -> list[str]:
    """What of the contract a p4info lacks or has otherwise; empty: an ATP pipeline that the agent can program.

    Names, match kinds and widths count. Ports may be narrower than the contract's, tables may be smaller, further
    objects may be there. Counters are needed by name, or as the array `events`.
    """
    wrong: list[str] = []
    tables, actions = _by_name(p4info.tables), _by_name(p4info.actions)
    wanted_tables, wanted_actions = _by_name(contract.tables), _by_name(contract.actions)
    pieces = {*HOST_PIECES, GUARDED}
    for name, fields in FIELDS.items():
        table = tables.get(name)
        if table is None:
            # A guard is whole or not there.
            needed = name not in OPTIONAL or (name in pieces and pieces & tables.keys())
            wrong += [f"table {name} is missing"] if needed else []
            continue
        wanted = wanted_tables.get(name)
        if wanted is None:
            wrong += _problems_of_piece(name, table, actions)
            continue
        have = {field.name: field for field in table.match_fields}
        want = {field.name: field for field in wanted.match_fields}
        for field_name in fields:
            mine, theirs = have.pop(field_name, None), want[field_name]
            if mine is None:
                wrong.append(f"{name}.{field_name} is missing")
            elif mine.match_type != theirs.match_type:
                kind = p4i.MatchField.MatchType.Name(theirs.match_type)
                wrong.append(f"{name}.{field_name} is no {kind} match")
            elif mine.bitwidth != theirs.bitwidth and not (
                theirs.type_name.name == "PortId_t" and mine.bitwidth < theirs.bitwidth
            ):
                wrong.append(f"{name}.{field_name} has {mine.bitwidth} bits, not {theirs.bitwidth}")
        wrong += [f"{name}.{other} is not in the contract" for other in have]
        action_name, params = ACTIONS[name]
        action = actions.get(action_name)
        if action is None or action.preamble.id not in {ref.id for ref in table.action_refs}:
            wrong.append(f"action {name}.{action_name} is missing")
            continue
        widths = {param.name: param.bitwidth for param in action.params}
        wanted_widths = {param.name: param.bitwidth for param in wanted_actions[action_name].params}
        if widths != wanted_widths:
            wrong.append(f"action {action_name} has the parameters {widths}, not {wanted_widths}")
        assert set(params) == set(wanted_widths)
    counters = _by_name(p4info.counters)
    if "events" not in counters:
        missing = [name for name in EVENTS if name not in counters]
        if missing and any("Counter" in extern.extern_type_name for extern in p4info.externs):
            wrong.append("its counters are target externs: compile with --p4runtime-force-std-externs")
        elif missing:
            wrong.append(f"counters are missing: {', '.join(missing[:4])}")
    elif counters["events"].size < EVENT_CODES << EVENT_SHIFT:
        wrong.append(f"counter events has {counters['events'].size} cells, not {EVENT_CODES << EVENT_SHIFT}")
    return wrong


def _problems_of_piece(name: str, table: p4i.Table, actions: Mapping[str, p4i.Action]) -> list[str]:
    """The same of a table that the contract has in another form: names count, widths are the target's."""
    action_name, params = ACTIONS[name]
    action = actions.get(action_name)
    fields = {(field.name, field.match_type) for field in table.match_fields}
    if fields != {(field, p4i.MatchField.EXACT) for field in FIELDS[name]}:
        return [f"table {name} has other fields than {', '.join(FIELDS[name])}"]
    if action is None or {param.name for param in action.params} != set(params):
        return [f"action {name}.{action_name} is missing, or has other parameters"]
    return []
