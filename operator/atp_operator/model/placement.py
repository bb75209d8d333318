# SPDX-License-Identifier: Apache-2.0
"""Where an epoch's pods are, and what of the switches it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atp_api import wire

from .read import number, text_of
from .types import Object


@dataclass(frozen=True, order=True)
class Region:
    """A contiguous range of aggregator indexes: `start` .. `start + size - 1`."""

    start: int
    size: int
    floor: bool = False  # of a job in mode Shared: its own all the same

    @property
    def end(self) -> int:
        """One past the last index."""
        return self.start + self.size

    def to_dict(self) -> Object:
        return {"start": self.start, "size": self.size, **({"floor": True} if self.floor else {})}

    def overlaps(self, other: Region) -> bool:
        """True when both hold an index in common."""
        return self.start < other.end and other.start < self.end


@dataclass(frozen=True)
class Seat:
    """One worker's place in the aggregation tree of an epoch."""

    rank: int
    node: str
    address: str
    pod_uid: str
    rack: int  # bit number in bitmap1
    bit: int  # bit number in bitmap0
    edge: bool  # enters level 1 directly, as a rack of one
    switch: str | None  # switch that serves this worker's rack at level 0, or its edge bit at level 1

    def to_dict(self) -> Object:
        return {
            "rank": self.rank,
            "node": self.node,
            "address": self.address,
            "podUid": self.pod_uid,
            "rack": self.rack,
            "bit": self.bit,
            "edge": self.edge,
            "switch": self.switch or "",
        }

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> Seat:
        return Seat(
            rank=number(value["rank"], 0, wire.WORKERS_MAX - 1),
            node=text_of(value["node"]),
            address=text_of(value["address"]),
            pod_uid=text_of(value["podUid"]),
            rack=number(value["rack"], 0, wire.WORKERS_MAX - 1),
            bit=number(value["bit"], 0, wire.WORKERS_MAX - 1),
            edge=bool(value["edge"]),
            switch=text_of(value["switch"]) or None,
        )


@dataclass(frozen=True)
class Server:
    """One parameter server's place."""

    shard: int
    node: str
    address: str
    pod_uid: str

    def to_dict(self) -> Object:
        return {"shard": self.shard, "node": self.node, "address": self.address, "podUid": self.pod_uid}

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> Server:
        return Server(
            shard=number(value["shard"], 0, wire.WORKERS_MAX - 1),
            node=text_of(value["node"]),
            address=text_of(value["address"]),
            pod_uid=text_of(value["podUid"]),
        )


@dataclass(frozen=True)
class Placement:
    """Where an epoch's pods are, with their bits: frozen once all pods are there, so a switch's state never flaps."""

    seats: tuple[Seat, ...]
    servers: tuple[Server, ...]
    level1: str | None  # switch of the parameter servers, when the job has several racks
    addend_limit: int | None = None  # greatest |round(x * scale)| of a value that travels as an integer
    tagged: bool = True  # raw packets have tags; an epoch that an older operator began goes on without

    @property
    def switches(self) -> tuple[str, ...]:
        """Names of all switches of the tree, sorted; empty for HostOnly."""
        names = {seat.switch for seat in self.seats if seat.switch}
        if self.level1:
            names.add(self.level1)
        return tuple(sorted(names))

    def to_dict(self) -> Object:
        limit = {} if self.addend_limit is None else {"addendLimit": self.addend_limit}
        return {
            "workers": [seat.to_dict() for seat in self.seats],
            "parameterServers": [server.to_dict() for server in self.servers],
            "level1": self.level1 or "",
            "tagged": self.tagged,
            **limit,
        }

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> Placement:
        limit = value.get("addendLimit")
        return Placement(
            seats=tuple(Seat.from_dict(seat) for seat in value["workers"]),
            servers=tuple(Server.from_dict(server) for server in value["parameterServers"]),
            level1=text_of(value["level1"]) or None,
            addend_limit=None if limit is None else number(limit, 1, 2**31 - 1),
            tagged=value.get("tagged") is True,
        )
