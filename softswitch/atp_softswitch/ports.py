# SPDX-License-Identifier: Apache-2.0
"""Which interfaces the software switch takes packets from, kept up to date as pods come and go."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pyroute2 import IPRoute

from .dataplane import SOURCES_MAX
from .errors import DataplaneError
from .pod_addresses import pod_addresses

RTMGRP_LINK = 1
_RESCAN_SECONDS = 10.0
_SETTLE_SECONDS = 0.05
_ADDRESS_SECONDS = 0.2
"""How long a new pod's address may go unnoticed: it raises no event on this side."""
_ADDRESS_LOOKS = 25
"""How often a pod without an address is looked at so soon; one that has none for long may have none at all."""

log = logging.getLogger("atp_softswitch.ports")


@dataclass(frozen=True)
class Link:
    """One interface. `foreign_peer`: the other end of this link is in another network namespace.

    `addresses`: the IPv4 addresses there, host order; None: not a pod's, or the kernel does not say. `uplink`: it leads
    to a router.
    """

    ifindex: int
    name: str
    kind: str
    foreign_peer: bool
    addresses: tuple[int, ...] | None = None
    uplink: bool = False


@dataclass(frozen=True)
class Selection:
    """`veth`: the host end of every pod's veth. `used`: what table entries name. `names`: interfaces by name.

    `never`: interfaces by name that another hook has.
    """

    veth: bool
    names: frozenset[str]
    used: bool = False
    never: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, words: Iterable[str], never: Iterable[str] = ()) -> Selection:
        """From the words of --attach, also joined by commas: `veth`, `none`, or interface names.

        Unless it is `none`, ports that table entries name are attached, too: an uplink to a PS on another node.
        """
        words = [word for item in words for word in item.split(",") if word]
        names = frozenset(word for word in words if word not in ("veth", "none"))
        return cls("veth" in words, names, words != ["none"], frozenset(never))

    def wanted(self, links: Iterable[Link], used: Container[int]) -> dict[int, str]:
        """ifindex -> name of the interfaces to attach; `used` are the ports of the tables."""
        return {
            link.ifindex: link.name
            for link in links
            if link.name not in self.never
            and (
                link.name in self.names
                or (self.veth and link.kind == "veth" and link.foreign_peer)
                or (self.used and link.ifindex in used)
            )
        }


def list_links() -> list[Link]:
    """Interfaces of this network namespace. Blocks for netlink dumps."""
    with IPRoute() as netlink:
        uplinks = _uplinks(netlink.route("dump", family=socket.AF_INET))
        return [_link(message, uplinks) for message in netlink.link("dump")]


def _uplinks(routes: Iterable[Any]) -> set[int]:
    """Interfaces that lead to a router. A pod is no router; a veth may be an uplink where the node is a container."""
    found: set[int] = set()
    for route in routes:
        hops = [route, *(route.get("multipath") or ())]
        found |= {int(hop.get("oif") or 0) for hop in hops if hop.get("gateway") or hop.get("via")}
    return found


def _link(message: Any, uplinks: Container[int]) -> Link:
    ifindex = int(message["index"])
    kind = str((message.get("linkinfo") or {}).get("kind") or "")
    netnsid = message.get("link_netnsid")
    addresses = None
    if kind == "veth" and netnsid is not None and ifindex not in uplinks:
        try:
            addresses = pod_addresses(int(netnsid))
        except OSError as error:
            log.warning(
                "addresses of a pod unknown", extra={"interface": message.get("ifname"), "reason": error.strerror}
            )
    return Link(ifindex, str(message.get("ifname")), kind, netnsid is not None, addresses, ifindex in uplinks)


def no_interface(port: int) -> str | None:
    """Why a number is no port of a switch whose ports are this namespace's interfaces; None if it is one."""
    try:
        socket.if_indextoname(port)
    except (OSError, OverflowError):
        return f"port {port} does not exist: this host has no interface with that index"
    return None


def no_neighbour(port: int) -> str | None:
    """Why a number is no port of the relay, whose ports are IPv4 addresses of hosts; None if it is one."""
    address = ipaddress.IPv4Address(port)
    if address.is_unspecified or address.is_multicast or address.is_reserved:
        return f"port {port} does not exist: ports of the relay are IPv4 addresses, and no host is {address}"
    return None


class Hook(Protocol):
    """Attach and detach one interface; both raise DataplaneError."""

    def attach(self, ifindex: int) -> None: ...
    def detach(self, ifindex: int) -> None: ...


class Sources(Protocol):
    """What the data path is told of the addresses of pods; raises DataplaneError."""

    def set_sources(self, ifindex: int, addresses: Sequence[int]) -> None: ...
    def delete_sources(self, ifindex: int) -> None: ...


class PortKeeper:
    """Keeps one hook (tc or XDP) attached to exactly the selected interfaces.

    Netlink link messages are a hint to look again; what counts is the dump. A dump also runs every 10 s.
    """

    def __init__(
        self,
        label: str,
        hook: Hook,
        sources: Sources,
        selection: Selection,
        used: Callable[[], Container[int]] = frozenset,
        left: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        """`used` tells the ports that table entries name now, `left` what an earlier switch left attached."""
        self._left = left
        self.label = label
        self._used = used
        self._changed = asyncio.Event()
        self._hook = hook
        self._data_path = sources
        self._selection = selection
        self._attached: dict[int, str] = {}
        self._sources: dict[int, tuple[int, ...]] = {}
        self._looks: dict[int, int] = {}  # at ports of pods without an address
        self._refused: dict[int, str] = {}
        self._stopped = False

    @property
    def attached(self) -> Mapping[int, str]:
        """ifindex -> name of the attached interfaces."""
        return self._attached

    @property
    def missing(self) -> list[str]:
        """Interfaces selected by name that are not attached."""
        return sorted(self._selection.names - set(self._attached.values()))

    def reconcile(self, links: Sequence[Link]) -> None:
        """Attach what is selected and there, forget what is gone.

        A pod's port is checked before it is attached: until its address is known, nothing leaves it for the ATP port.
        """
        wanted = self._selection.wanted(links, self._used())
        for ifindex in sorted(set(self._attached) - set(wanted)):
            name = self._attached.pop(ifindex)
            self._detach(ifindex, name)
        for ifindex in sorted(set(self._refused) - set(wanted)):
            del self._refused[ifindex]
        known = {link.ifindex: link for link in links}
        for ifindex, name in sorted(wanted.items()):
            try:
                self._tell_sources(known[ifindex])
                if ifindex in self._attached:
                    continue
                self._hook.attach(ifindex)
            except DataplaneError as error:
                gone = error.errno in (errno.ENODEV, errno.ENXIO)
                if not gone and self._refused.get(ifindex) != str(error):
                    self._refused[ifindex] = str(error)
                    log.error("cannot attach", extra={"hook": self.label, "interface": name, "reason": str(error)})
                continue
            self._attached[ifindex] = name
            self._refused.pop(ifindex, None)
            log.info("attached", extra={"hook": self.label, "interface": name, "ifindex": ifindex})
        for ifindex in sorted(set(self._left()) - set(wanted)):
            self._detach(ifindex, known[ifindex].name if ifindex in known else "")

    @property
    def waiting(self) -> bool:
        """Whether a new pod has no address yet."""
        return any(looks < _ADDRESS_LOOKS for looks in self._looks.values())

    def _tell_sources(self, link: Link) -> None:
        addresses = link.addresses
        if link.uplink and self._sources.pop(link.ifindex, None) is not None:
            self._data_path.delete_sources(link.ifindex)
        if addresses == ():
            self._looks[link.ifindex] = self._looks.get(link.ifindex, 0) + 1
        else:
            self._looks.pop(link.ifindex, None)
        if addresses is None or self._sources.get(link.ifindex) == addresses:
            return  # what was known last holds while the kernel does not say
        if len(addresses) > SOURCES_MAX:
            log.warning("a pod has too many addresses", extra={"interface": link.name, "used": SOURCES_MAX})
        self._data_path.set_sources(link.ifindex, addresses[:SOURCES_MAX])
        self._sources[link.ifindex] = addresses

    def _detach(self, ifindex: int, name: str) -> None:
        self._looks.pop(ifindex, None)
        known = self._sources.pop(ifindex, None) is not None
        for step in (self._hook.detach, *([self._data_path.delete_sources] if known else [])):
            try:
                step(ifindex)
            except DataplaneError as error:
                # An interface that vanished took its hook with it.
                log.debug("detach", extra={"hook": self.label, "interface": name, "reason": str(error)})
        log.info("detached", extra={"hook": self.label, "interface": name, "ifindex": ifindex})

    def close(self) -> None:
        """Detach from every interface."""
        self._stopped = True
        for ifindex, name in list(self._attached.items()):
            self._detach(ifindex, name)
        self._attached.clear()

    def poke(self) -> None:
        """Table entries changed: look again."""
        self._changed.set()

    async def run(self) -> None:
        """Follow the interfaces until cancelled."""
        loop = asyncio.get_running_loop()
        changed = self._changed
        events = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, socket.NETLINK_ROUTE)
        events.bind((0, RTMGRP_LINK))

        def drain() -> None:
            try:
                while events.recv(65536):
                    changed.set()
            except BlockingIOError:
                pass
            except OSError:
                changed.set()  # messages were lost: look again

        loop.add_reader(events, drain)
        try:
            while not self._stopped:
                changed.clear()
                self.reconcile(await asyncio.to_thread(list_links))
                try:
                    wait = _ADDRESS_SECONDS if self.waiting else _RESCAN_SECONDS
                    await asyncio.wait_for(changed.wait(), wait)
                    await asyncio.sleep(_SETTLE_SECONDS)
                except TimeoutError:
                    pass
        finally:
            loop.remove_reader(events)
            events.close()
