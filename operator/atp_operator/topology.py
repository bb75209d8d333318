# SPDX-License-Identifier: Apache-2.0
"""From "which pod is on which node" to racks, bits and levels.

The switch that serves a node is the most specific one above it (a node's own software switch before its ToR): all that
a pod of the node sends or gets passes it. Workers of one such switch are a rack. With one rack, its switch is level 0
and no level 1 exists. With several, the switch of the parameter servers is level 1; workers directly below it, or
below no switch, enter level 1 as racks of one, so that level 0 and level 1 of one sequence never meet in one switch. A
packet has one place in the tree whichever shard its sequence is for, so all parameter servers must be below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from atp_api import wire

from . import reasons
from .allocation import Refusal
from .model import Placement, Seat, Server, Switch


@dataclass(frozen=True)
class Located:
    """A pod that has a node and an address."""

    index: int  # rank or shard
    node: str
    address: str
    pod_uid: str


def switch_of(node: str, switches: Iterable[Switch]) -> Switch | None:
    """The most specific switch above a node: fewest nodes, software before hardware, then by name."""
    above = [switch for switch in switches if node in switch.nodes]
    return min(above, key=lambda s: (len(s.nodes), s.kind != "Software", s.name), default=None)


def host_only(workers: Iterable[Located], servers: Iterable[Located]) -> Placement:
    """A placement without any switch. Bits are still given, 32 workers a rack in rank order, to tell coverage alike."""
    seats = tuple(
        Seat(
            w.index,
            w.node,
            w.address,
            w.pod_uid,
            w.index // wire.FAN_IN_MAX,
            w.index % wire.FAN_IN_MAX,
            False,
            None,
        )
        for w in sorted(workers, key=lambda w: w.index)
    )
    return Placement(seats, _servers(servers), None)


def place(
    workers: Iterable[Located], servers: Iterable[Located], switches: Mapping[str, Switch]
) -> Placement | Refusal:
    """The aggregation tree over `switches` (those that may be used), or why there is none."""
    ordered = sorted(workers, key=lambda w: w.index)
    placed_servers = _servers(servers)
    racks: dict[str | None, list[Located]] = {}
    for worker in ordered:
        switch = switch_of(worker.node, switches.values())
        racks.setdefault(switch.name if switch else None, []).append(worker)
    if set(racks) == {None}:
        nodes = ", ".join(sorted({w.node for w in ordered}))
        return Refusal(reasons.NO_SWITCH_ON_PATH, f"no usable switch is above any worker (nodes {nodes})")

    if len(racks) == 1:
        name = next(iter(racks))
        assert name is not None
        refusal = _rack_too_large(switches[name], len(ordered))
        if refusal:
            return refusal
        seats = [Seat(w.index, w.node, w.address, w.pod_uid, 0, bit, False, name) for bit, w in enumerate(ordered)]
        return Placement(tuple(seats), placed_servers, None)

    home = {
        switch.name if switch else None for switch in (switch_of(s.node, switches.values()) for s in placed_servers)
    }
    root = next(iter(home)) if len(home) == 1 else None
    if root is None:
        nodes = ", ".join(sorted({s.node for s in placed_servers}))
        if len(home) == 1:
            text = f"no usable switch is above the parameter server (node {nodes})"
        else:
            above = ", ".join(sorted(name or "none" for name in home))
            text = (
                f"the parameter servers are below different switches ({above}; nodes {nodes}): give "
                f"spec.parameterServers.template a node selector or an affinity that keeps them below one"
            )
        return Refusal(reasons.NO_LEVEL1_SWITCH, f"the workers are in {len(racks)} racks, but {text}")
    direct = sorted(racks.pop(root, []) + racks.pop(None, []), key=lambda w: w.index)
    names = sorted(name for name in racks if name is not None)
    for name in names:
        refusal = _rack_too_large(switches[name], len(racks[name]))
        if refusal:
            return refusal
    total, most = len(names) + len(direct), _fan_in(switches[root])
    if total > most:
        return Refusal(
            reasons.FAN_IN_EXCEEDED,
            f"needs {total} level-1 bits on switch {root} ({len(names)} racks and {len(direct)} workers that enter it "
            f"directly): {most} exist; put the parameter server below a switch with fewer workers of this job",
        )
    seats = []
    for rack, name in enumerate(names):
        seats += [
            Seat(w.index, w.node, w.address, w.pod_uid, rack, bit, False, name) for bit, w in enumerate(racks[name])
        ]
    for offset, w in enumerate(direct):
        seats.append(Seat(w.index, w.node, w.address, w.pod_uid, len(names) + offset, 0, True, root))
    return Placement(tuple(sorted(seats, key=lambda seat: seat.rank)), placed_servers, root)


def _servers(servers: Iterable[Located]) -> tuple[Server, ...]:
    return tuple(Server(s.index, s.node, s.address, s.pod_uid) for s in sorted(servers, key=lambda s: s.index))


def _fan_in(switch: Switch) -> int:
    return min(wire.FAN_IN_MAX, switch.capacity.fan_in_max if switch.capacity else 0)


def _rack_too_large(switch: Switch, workers: int) -> Refusal | None:
    most = _fan_in(switch)
    if workers <= most:
        return None
    return Refusal(
        reasons.FAN_IN_EXCEEDED,
        f"needs a fan-in of {workers} on switch {switch.name}: {most} is its most; spread the workers over more "
        f"switches",
    )
