# SPDX-License-Identifier: Apache-2.0
"""From an end point's address to the switch port it is behind."""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .forwarding import Forwarding
from .planner import EndpointKey, Port


@dataclass(frozen=True)
class Unresolved:
    """Why there is no port (yet), and what to do. `wrong`: what was said names a port that does not exist."""

    message: str
    wrong: bool = False


Resolution = Port | Unresolved


class PortResolver(Protocol):
    """Answers where end points are. An answer may change; `changed` returns when it is worth to ask again."""

    async def resolve(self, endpoints: Collection[EndpointKey]) -> Mapping[EndpointKey, Resolution]:
        """One answer for each end point. Does not raise for an unknown one."""

    def forwarding(self) -> Forwarding | None:
        """What is known of the switch's ports for ordinary traffic; None: the agent leaves that alone."""

    async def changed(self) -> None:
        """Waits until an answer may differ."""


class RelayPorts:
    """The UDP relay: an end point's port is its IPv4 address."""

    async def resolve(self, endpoints: Collection[EndpointKey]) -> Mapping[EndpointKey, Resolution]:
        return {key: Port(key.port or int(ipaddress.IPv4Address(key.address)), key.mac or 0) for key in endpoints}

    def forwarding(self) -> None:
        return None

    async def changed(self) -> None:
        await asyncio.Event().wait()


class StaticPorts:
    """Ports from a JSON file, read again when it changes.

    {"ports": [1, 2, 3, 49],
     "addresses": {"10.0.0.5": {"port": 3, "mac": "02:00:00:00:00:05"}},
     "nodes": {"node-a": {"port": 1, "mac": "02:00:00:00:00:0a"}},
     "macs": {"02:00:00:00:00:99": 49}}

    An end point's own `port` and `mac` come first, then its address, then its node. `ports` are those that the switch
    has; with them, another one is refused, and the agent forwards ordinary traffic: to the addresses of the file and of
    jobs, and broadcast and the unknown to all ports. `macs` are further hosts and routers.
    """

    POLL_SECONDS = 2.0

    def __init__(self, path: Path | None = None) -> None:
        """Raises OSError or ValueError if the file cannot be read."""
        self._path = path
        self._stamp = self._stat()
        self._addresses: dict[str, Port] = {}
        self._nodes: dict[str, Port] = {}
        self._macs: dict[int, int] = {}
        self._ports: frozenset[int] = frozenset()
        self._load()

    def _stat(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat() if self._path else None
        except OSError:
            return None
        return (status.st_mtime_ns, status.st_size) if status else None

    def _load(self) -> None:
        if self._path is None:
            return
        try:
            raw = json.loads(self._path.read_text(encoding="utf-8"))
            ports = frozenset(int(number) for number in raw.get("ports", ()))
            addresses = {name: _port(value) for name, value in raw.get("addresses", {}).items()}
            nodes = {name: _port(value) for name, value in raw.get("nodes", {}).items()}
            macs = {_mac(name): int(number) for name, number in raw.get("macs", {}).items()}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{self._path}: not a table of ports: {error}") from error
        named = macs | {port.mac: port.number for port in nodes.values()}
        named |= {port.mac: port.number for port in addresses.values()}
        unknown = sorted(set(named.values()) - ports) if ports else []
        if unknown:
            raise ValueError(f"{self._path}: port {unknown[0]} is not among its `ports`")
        self._ports, self._addresses, self._nodes, self._macs = ports, addresses, nodes, named

    async def resolve(self, endpoints: Collection[EndpointKey]) -> Mapping[EndpointKey, Resolution]:
        return {key: self._one(key) for key in endpoints}

    def _one(self, key: EndpointKey) -> Resolution:
        known = self._addresses.get(key.address) or self._nodes.get(key.node)
        number = key.port or (known.number if known else 0)
        mac = key.mac if key.mac is not None else (known.mac if known else None)
        if number == 0:
            where = f" (node {key.node})" if key.node else ""
            return Unresolved(f"no port for {key.address}{where}; add it to {self._path or '--port-file'}")
        if self._ports and number not in self._ports:
            return Unresolved(
                f"port {number} of {key.address} is not one of the switch's; correct it, or add it to `ports` in "
                f"{self._path}",
                wrong=True,
            )
        if mac is None:
            return Unresolved(f"no MAC address for {key.address}; add it to {self._path or '--port-file'}")
        return Port(number, mac)

    def forwarding(self) -> Forwarding | None:
        return Forwarding(dict(self._macs), self._ports) if self._ports else None

    async def changed(self) -> None:
        while True:
            await asyncio.sleep(self.POLL_SECONDS)
            stamp = self._stat()
            if stamp is not None and stamp != self._stamp:
                self._stamp = stamp
                self._load()
                return


def _mac(text: str) -> int:
    return int(text.replace(":", ""), 16)


def _port(raw: Mapping[str, object]) -> Port:
    return Port(int(str(raw["port"])), _mac(str(raw["mac"])))
