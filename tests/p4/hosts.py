# SPDX-License-Identifier: Apache-2.0
"""Hosts of the conformance vectors as P4 programs have them, and what they drop (``p4/include/guard.p4``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from conformance.switches import address_of, ip_number

from atp_switch_agent.entries import ACTIONS, GUARDED, Entry
from atp_switch_agent.planner import host_pieces
from atp_switch_agent.targets import DROP_REASONS, DROP_SHIFT

Piece = tuple[str, list[int], str, dict[str, int]]
"""Table, key, action, parameters by name."""


def pieces_of(job: int, host: str, port: int, role: str, bitmap0: int, bitmap1: int, edge: int) -> Iterator[Piece]:
    """What the agent writes for a host, and that its job is guarded."""
    address = ip_number(address_of(host))
    pieces = host_pieces(job, address, port, role == "ps", bitmap0, bitmap1, edge)
    for entry in [*pieces, Entry(GUARDED, (job,))]:
        action, names = ACTIONS[entry.table]
        key = [entry.number(i) for i in range(len(entry.match))]
        yield entry.table, key, action, dict(zip(names, entry.params, strict=True))


def drops_of(cells: Mapping[int, int], ports: Mapping[int, str]) -> dict[str, dict[str, int]]:
    """The counter ``drops`` by port and reason; what is 0 left out."""
    found: dict[str, dict[str, int]] = {}
    for cell, number in cells.items():
        if number:
            counted = found.setdefault(ports[cell & (1 << DROP_SHIFT) - 1], {})
            reason = DROP_REASONS[cell >> DROP_SHIFT]
            counted[reason] = counted.get(reason, 0) + number
    return found
