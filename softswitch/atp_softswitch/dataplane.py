# SPDX-License-Identifier: Apache-2.0
"""What the P4Runtime server needs of a data path. `library.SwitchLibrary` is the real one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

ENV_LIBRARY = "ATP_SWITCH_LIBRARY"
ENV_OBJECT_DIR = "ATP_SWITCH_OBJECT_DIR"

PROFILES = (62, 350, 870)
REGIONS_MAX = 4
GROUP_MAX = 1023
REPLICAS_MAX = 64
SOURCES_MAX = 8
"""Addresses of one pod that are known."""
DROP_PORTS_MAX = 1024
"""Ports whose drops are counted apart."""


@dataclass(frozen=True)
class Region:
    """Aggregator indexes start .. start + size - 1."""

    start: int
    size: int


@dataclass(frozen=True)
class JobConfig:
    """Table `job` joined with the job's regions. See struct atp_job_config."""

    values: int
    full0: int
    full1: int
    group: int
    regions: tuple[Region, ...]


@dataclass(frozen=True)
class Replica:
    """One copy of an ACK: egress port, and the destination written into it. `dst_port` 0 leaves the UDP port."""

    port: int
    dst_mac: int
    dst_ip: int
    dst_port: int


@dataclass(frozen=True)
class Host:
    """One host of a job, see struct atp_host; `role` is 1 for a worker, 2 for a PS."""

    port: int
    mark: int
    role: int
    bitmap0: int
    bitmap1: int
    edge: int


@dataclass(frozen=True)
class PortDrops:
    """What was dropped of the packets that came in at one port, by reason (enum atp_drop).

    `address`: of the pod behind the port; `last_source`: what the last packet said. IPv4, host order, 0: not known.
    """

    port: int
    address: int
    last_source: int
    dropped: Mapping[str, int]


@dataclass(frozen=True)
class AggregatorState:
    """One aggregator. `job_id` 0: free. `timestamp_ns` is the data path's clock."""

    job_id: int
    sequence: int
    level: int
    bitmap: int
    complete: bool
    ecn: bool
    timestamp_ns: int


class Dataplane(Protocol):
    """A data path of the software switch. Every method raises DataplaneError when the data path refuses."""

    @property
    def target(self) -> str:
        """`software-bpf` or `software-relay`."""

    @property
    def aggregators(self) -> int:
        """Number of aggregators."""

    @property
    def values(self) -> int:
        """Largest number of values per packet."""

    def set_job(self, job_id: int, config: JobConfig) -> None: ...
    def delete_job(self, job_id: int) -> None: ...
    def set_admission(self, job_id: int, port: int, edge: int, bitmap: int) -> None: ...
    def delete_admission(self, job_id: int, port: int, edge: int, bitmap: int) -> None: ...
    def set_transit(self, job_id: int, port: int, bitmap1: int, mask0: int) -> None: ...
    def delete_transit(self, job_id: int, port: int, bitmap1: int) -> None: ...
    def set_ps_port(self, job_id: int, port: int) -> None: ...
    def delete_ps_port(self, job_id: int, port: int) -> None: ...
    def set_host(self, job_id: int, address: int, host: Host) -> None: ...
    def delete_host(self, address: int) -> None: ...
    def set_group(self, group: int, replicas: Sequence[Replica]) -> None: ...
    def read_counters(self, job_id: int) -> Mapping[str, int]: ...
    def read_drops(self) -> Sequence[PortDrops]: ...
    def read_aggregator(self, index: int) -> AggregatorState: ...
    def occupancy(self, job_id: int) -> int: ...
    def sweep(self) -> int: ...
