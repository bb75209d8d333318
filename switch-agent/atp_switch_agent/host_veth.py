# SPDX-License-Identifier: Apache-2.0
"""Ports of pods on this host: address -> route -> neighbour -> bridge port, or the interface of the route itself.

Read only. A pod behind a bridge (bridge, flannel CNI) is found by its MAC in the bridge's forwarding table; a pod
with a /32 route (ptp, Calico) is behind the interface of that route; an address elsewhere is behind the uplink.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pyroute2 import IPRoute, NetlinkError

from .planner import EndpointKey, Port
from .resolver import Resolution, Unresolved

RTMGRP_LINK, RTMGRP_NEIGH, RTMGRP_IPV4_ROUTE = 0x1, 0x4, 0x40
NUD_USABLE = 0x02 | 0x04 | 0x08 | 0x10 | 0x40 | 0x80  # reachable, stale, delay, probe, noarp, permanent
RTN_LOCAL = 2
DISCARD_PORT = 9
_SETTLE_SECONDS = 0.5

log = logging.getLogger("atp_switch_agent.host_veth")


@dataclass(frozen=True)
class Route:
    """Way to an address: interface, next hop, and whether the address is this host's own."""

    interface: int
    next_hop: str
    local: bool


@dataclass(frozen=True)
class Neighbour:
    """A resolved next hop: link-layer address as a 48-bit number."""

    interface: int
    address: str
    mac: int


@dataclass(frozen=True)
class ForwardingEntry:
    """Bridge `bridge` reaches `mac` through port `interface`."""

    bridge: int
    interface: int
    mac: int


@dataclass(frozen=True)
class HostView:
    """What the host knows, read at one time."""

    kinds: Mapping[int, str]
    neighbours: Mapping[tuple[int, str], int]
    forwarding: Mapping[tuple[int, int], int]

    @classmethod
    def of(
        cls,
        kinds: Mapping[int, str],
        neighbours: Collection[Neighbour],
        forwarding: Collection[ForwardingEntry],
    ) -> HostView:
        """Index the three tables."""
        return cls(
            kinds,
            {(item.interface, item.address): item.mac for item in neighbours},
            {(item.bridge, item.mac): item.interface for item in forwarding},
        )

    def locate(self, key: EndpointKey, route: Route | None) -> tuple[Resolution, bool]:
        """The port of an address, and whether provoking the neighbour may help."""
        if route is None:
            return Unresolved(f"no route to {key.address} on this host"), False
        if route.local:
            return Unresolved(f"{key.address} is an address of this host itself, not of a pod"), False
        mac = key.mac if key.mac is not None else self.neighbours.get((route.interface, route.next_hop))
        if mac is None:
            return Unresolved(f"{key.address} has not answered ARP yet; is its pod running?"), True
        if self.kinds.get(route.interface) != "bridge":
            return Port(route.interface, mac), False
        port = self.forwarding.get((route.interface, mac))
        if port is None:
            return Unresolved(f"the bridge does not know yet where {key.address} is"), True
        return Port(port, mac), False


def _mac(text: str) -> int:
    return int(text.replace(":", ""), 16)


def read_view(netlink: Any) -> HostView:
    """Dump links, neighbours and bridge forwarding entries."""
    kinds = {int(link["index"]): str((link.get("linkinfo") or {}).get("kind") or "") for link in netlink.link("dump")}
    neighbours = [
        Neighbour(int(item["ifindex"]), str(item.get("dst")), _mac(item.get("lladdr")))
        for item in netlink.neigh("dump", family=socket.AF_INET)
        if item["state"] & NUD_USABLE and item.get("lladdr") and item.get("dst")
    ]
    forwarding = [
        ForwardingEntry(int(item.get("master")), int(item["ifindex"]), _mac(item.get("lladdr")))
        for item in netlink.fdb("dump")
        if item.get("master") and item.get("lladdr") and int(item.get("master")) != int(item["ifindex"])
    ]
    return HostView.of(kinds, neighbours, forwarding)


def read_route(netlink: Any, address: str) -> Route | None:
    """The host's route to an address; None if there is none."""
    try:
        found = next(iter(netlink.route("get", dst=address)), None)
    except NetlinkError:
        return None
    interface = found.get("oif") if found is not None else None  # an attribute: get finds it, [] only header fields
    if found is None or interface is None:
        return None
    return Route(int(interface), str(found.get("gateway") or address), found["type"] == RTN_LOCAL)


def provoke(addresses: Collection[str]) -> None:
    """Send one datagram to the discard port of each address: the host then asks ARP, and the bridge learns."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        for address in addresses:
            try:
                sender.sendto(b"", (address, DISCARD_PORT))
            except OSError as error:
                log.debug("cannot provoke", extra={"address": address, "reason": str(error)})


@contextmanager
def _netlink() -> Iterator[Any]:
    with IPRoute() as netlink:
        yield netlink


class HostVethPorts:
    """Resolves with the tables of this network namespace (run with hostNetwork). Port numbers are ifindexes.

    An end point's own `port` comes first. While a neighbour entry is gone (it aged out) the last answer holds, as
    long as the interface does and the bridge does not say otherwise.
    """

    def __init__(self) -> None:
        self._last: dict[EndpointKey, Port] = {}

    async def resolve(self, endpoints: Collection[EndpointKey]) -> Mapping[EndpointKey, Resolution]:
        return await asyncio.to_thread(self._resolve, tuple(endpoints))

    def _resolve(self, endpoints: tuple[EndpointKey, ...]) -> dict[EndpointKey, Resolution]:
        answers: dict[EndpointKey, Resolution] = {}
        provoked: list[str] = []
        with _netlink() as netlink:
            view = read_view(netlink)
            for key in endpoints:
                if key.port and key.port not in view.kinds:
                    text = f"port {key.port} of {key.address}: this host has no interface with that index"
                    answers[key] = Unresolved(text, wrong=True)
                    continue
                if key.port and key.mac is not None:
                    answers[key] = Port(key.port, key.mac)
                    continue
                route = read_route(netlink, key.address)
                answer, ask = view.locate(key, route)
                if ask:
                    provoked.append(key.address)
                    last = self._last.get(key)
                    if last is not None and last.number in view.kinds:
                        answer = last
                if isinstance(answer, Port):
                    if key.port:
                        answer = Port(key.port, answer.mac)
                    self._last[key] = answer
                answers[key] = answer
        for key in set(self._last) - set(endpoints):
            del self._last[key]
        provoke(provoked)
        return answers

    def forwarding(self) -> None:
        """The host forwards ordinary traffic itself."""
        return None

    async def changed(self) -> None:
        """A link, neighbour or route changed; at most twice a second."""
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()
        events = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, socket.NETLINK_ROUTE)
        try:
            events.bind((0, RTMGRP_LINK | RTMGRP_NEIGH | RTMGRP_IPV4_ROUTE))
            loop.add_reader(events, changed.set)
            await changed.wait()
            await asyncio.sleep(_SETTLE_SECONDS)
        finally:
            loop.remove_reader(events)
            events.close()
