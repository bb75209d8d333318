# SPDX-License-Identifier: Apache-2.0
"""Ordinary traffic of a hardware switch: what makes it a usable top-of-rack switch. Pure, as `planner`.

Destination to port, flooding of broadcast (ARP) and of destinations that nobody knows; and the numbers of the program
that can be set: T, and the queue length from which on sums leave with ECN set. The software switch has none of these
tables: there the host forwards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from .entries import CONGESTION, ECN, GROUP, L2, STALE, Entry, Key, State, state
from .planner import GROUP_MAX, Batch, Op, Update

BROADCAST = 0xFFFFFFFFFFFF
FLOOD_GROUP = GROUP_MAX + 1
"""The multicast group of all ports: the first above those of jobs."""
_FLOOD_INSTANCE = 1
# Events of packets that leave as sums or after the decision (p4/include/codes.p4, V_ALLOCATED to V_PARTIAL_DONE).
_MARKED_EVENTS = range(1, 15)
_QUEUE_DEPTH_MAX = (1 << 19) - 1


@dataclass(frozen=True)
class Forwarding:
    """What the administrator says of the switch's ports.

    `macs`: port by Ethernet address (48-bit number). `ports`: every port of the switch that has a link; broadcast and
    unknown destinations go to all of them.
    """

    macs: Mapping[int, int] = field(default_factory=dict)
    ports: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Tuning:
    """Numbers of the P4 program that the agent may set. 0: the program's own.

    `ecn_threshold`: queue length, in packets on bmv2 and in cells of 80 bytes on Tofino. `stale_ms`: T.
    """

    ecn_threshold: int = 0
    stale_ms: int = 0


def managed(tables: Collection[str], forwarding: Forwarding | None, tuning: Tuning) -> frozenset[str]:
    """Those of the pipeline's tables that the agent writes; it leaves others as they are."""
    wanted = set()
    if forwarding is not None:
        wanted.add(L2)
    if tuning.ecn_threshold:
        wanted |= {ECN, CONGESTION}
    if tuning.stale_ms:
        wanted.add(STALE)
    return frozenset(wanted & set(tables))


def plan(tables: Collection[str], forwarding: Forwarding | None, tuning: Tuning) -> dict[Key, Entry]:
    """Entries of the managed tables, and the group that they flood to."""
    entries: list[Entry] = []
    written = managed(tables, forwarding, tuning)
    if L2 in written and forwarding is not None:
        entries += [Entry(L2, (mac,), (port,), action="forward") for mac, port in forwarding.macs.items()]
        copies: list[int] = []
        for port in sorted(forwarding.ports):
            copies += (port, _FLOOD_INSTANCE)
        entries.append(Entry(GROUP, (FLOOD_GROUP,), tuple(copies)))
        entries += [Entry(L2, match, (FLOOD_GROUP,), action="flood") for match in ((BROADCAST,), ())]
    if ECN in written:
        entries.append(Entry(ECN, (), (tuning.ecn_threshold,), action="set_ecn_threshold"))
    if CONGESTION in written:
        depths = (tuning.ecn_threshold, _QUEUE_DEPTH_MAX)
        entries += [Entry(CONGESTION, (event, depths), action="mark_congestion") for event in _MARKED_EVENTS]
    if STALE in written:
        entries.append(Entry(STALE, (), (tuning.stale_ms * 1000,), action="set_stale_time"))
    return state(entries)


def diff(now: State, wanted: State) -> tuple[Batch, ...]:
    """Updates that turn `now` into `wanted`, in batches: the group is there whenever something floods to it.

    A default action is never deleted, only set; where `wanted` does not name one, the switch keeps its own.
    """
    first: list[Update] = []
    tables: list[Update] = []
    last: list[Update] = []
    for key, entry in wanted.items():
        held = now.get(key)
        if held == entry:
            continue
        op = Op.MODIFY if held is not None or not entry.match else Op.INSERT
        (first if entry.table == GROUP else tables).append(Update(op, entry))
    for key, entry in now.items():
        if key in wanted or not entry.match:
            continue
        (last if entry.table == GROUP else tables).append(Update(Op.DELETE, entry))
    return tuple(tuple(batch) for batch in (first, tables, last) if batch)
