# SPDX-License-Identifier: Apache-2.0
"""The assignment: what the operator tells one pod about its place in the job.

It arrives as the annotation `atp.dev/assignment`, mounted as a file by the downward API. Nothing here reads a
clock or a socket; `read_assignment` reads one file.
"""

import ipaddress
import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.alias_generators import to_camel

Mode = Literal["Shared", "Reserved", "HostOnly"]
Role = Literal["worker", "parameterServer"]
API_VERSION = "atp.dev/v1alpha1"


class AssignmentError(ValueError):
    """The assignment cannot be used; the text names each wrong field and why it is wrong."""


class _Model(BaseModel):
    # Unknown fields are kept for the transport: an operator that is newer than this package may add some.
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="allow", frozen=True)


def _ipv4(value: str) -> str:
    try:
        ipaddress.IPv4Address(value)
    except ValueError:
        raise ValueError(f"{value!r} is not an IPv4 address") from None
    return value


class Region(_Model):
    """A range of aggregators the job may use: indexes start .. start + size - 1."""

    start: Annotated[int, Field(ge=0, le=65535)]
    size: Annotated[int, Field(ge=1, le=65536)]
    floor: bool = False
    """In mode Shared: no other job may use them."""


class WorkerPlace(_Model):
    """Where one worker is in the aggregation tree: rack, bit, and whether it enters level 1 directly."""

    rank: Annotated[int, Field(ge=0)]
    address: str
    rack: Annotated[int, Field(ge=0, le=31)] = 0
    bit: Annotated[int, Field(ge=0, le=31)] = 0
    edge: bool = False
    port: Annotated[int | None, Field(ge=1, le=65535)] = None

    _check_address = field_validator("address")(_ipv4)


class ParameterServerPlace(_Model):
    """One shard of the parameter server."""

    shard: Annotated[int, Field(ge=0)]
    address: str
    port: Annotated[int | None, Field(ge=1, le=65535)] = None

    _check_address = field_validator("address")(_ipv4)


class Assignment(_Model):
    """One pod's assignment. Field names in JSON are in camelCase."""

    api_version: Literal["atp.dev/v1alpha1"]
    job: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?/[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
    uid: str = ""
    epoch: Annotated[int, Field(ge=1)]
    revision: Annotated[int, Field(ge=1)] = 1
    job_id: Annotated[int, Field(ge=1, le=255)]
    mode: Mode
    role: Role
    rank: Annotated[int, Field(ge=0)]
    values_per_packet: Annotated[int, Field(ge=1, le=16384)] = 62
    scale: Literal["Auto"] | float = "Auto"
    port: Annotated[int, Field(ge=1, le=65535)] = 10800
    regions: tuple[Region, ...] = ()
    index_table_size: Annotated[int, Field(ge=1, le=65536)] = 1024
    max_window: Annotated[int, Field(ge=1)] = 1024
    stall_timeout_seconds: Annotated[float, Field(gt=0)] = 60
    workers: Annotated[tuple[WorkerPlace, ...], Field(min_length=1, max_length=1024)]
    parameter_servers: Annotated[tuple[ParameterServerPlace, ...], Field(min_length=1)]
    key: Annotated[str | None, Field(pattern=r"^[0-9a-f]{32}$", repr=False)] = None
    switch_address: str | None = None
    addend_limit: Annotated[int | None, Field(ge=1, le=2**31 - 1)] = None

    @field_validator("scale", mode="plain")
    @classmethod
    def _scale(cls, value: object) -> Literal["Auto"] | float:
        if value == "Auto":
            return "Auto"
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f'must be "Auto" or a finite number above 0, it is {value!r}')
        return float(value)

    @field_validator("stall_timeout_seconds")
    @classmethod
    def _finite(cls, value: float) -> float:
        if not math.isfinite(value):
            raise ValueError("must be finite")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        ranks = sorted(worker.rank for worker in self.workers)
        if ranks != list(range(len(ranks))):
            raise ValueError(f"workers: ranks must be 0..{len(ranks) - 1}, each once; they are {ranks}")
        shards = sorted(server.shard for server in self.parameter_servers)
        if shards != list(range(len(shards))):
            raise ValueError(f"parameterServers: shards must be 0..{len(shards) - 1}, each once; they are {shards}")
        places = [(worker.rack, worker.bit) for worker in self.workers if not worker.edge]
        if len(set(places)) != len(places):
            raise ValueError("workers: two workers have the same rack and bit; each needs a bit of its own")
        addresses = {(worker.address, worker.port) for worker in self.workers}
        if len(addresses) != len(self.workers):
            raise ValueError("workers: two workers have the same address; each needs a pod of its own")
        members = len(ranks) if self.role == "worker" else len(shards)
        if self.rank >= members:
            raise ValueError(f"rank: {self.rank} is not among the {members} of role {self.role}")
        if self.mode != "HostOnly" and not self.regions:
            raise ValueError(f"regions: mode {self.mode} needs at least one region of aggregators")
        if self.index_table_size < self.max_window:
            raise ValueError(
                f"indexTableSize: {self.index_table_size} is less than maxWindow {self.max_window}; "
                "two packets in flight would share a slot"
            )
        for region in self.regions:
            if region.start + region.size > 65536:
                raise ValueError(f"regions: {region.start}+{region.size} ends beyond the 16-bit aggregatorIndex")
        floors = [region for region in self.regions if region.floor]
        if floors and self.mode == "Reserved":
            raise ValueError("regions: a floor is for mode Shared; in mode Reserved every region is the job's alone")
        if len(floors) > 1:
            raise ValueError("regions: two of them are the floor, there is one at most")
        others = [region for region in self.regions if not region.floor]
        if any(
            f.start < other.start + other.size and other.start < f.start + f.size for f in floors for other in others
        ):
            raise ValueError("regions: the floor overlaps another region")
        if self.mode == "Shared" and not others:
            raise ValueError("regions: beside its floor a job of mode Shared needs a region that it shares")
        return self

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self.workers)

    @property
    def own_address(self) -> str:
        """Address of this pod."""
        if self.role == "worker":
            return next(worker.address for worker in self.workers if worker.rank == self.rank)
        return next(server.address for server in self.parameter_servers if server.shard == self.rank)

    @property
    def master_address(self) -> str:
        """Address of the worker of rank 0, where torch's rendezvous store runs."""
        return next(worker.address for worker in self.workers if worker.rank == 0)

    def same_transport(self, other: "Assignment") -> bool:
        """Whether both describe the same transport: everything but mode and revision is equal."""
        return self.model_copy(update={"mode": other.mode, "revision": other.revision}) == other

    def to_json(self) -> str:
        """The assignment as the transport takes it (JSON, camelCase)."""
        return self.model_dump_json(by_alias=True, exclude_none=True)


def _name(location: tuple[Any, ...]) -> str:
    name = ""
    for part in location:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else str(part)
    return name


def parse_assignment(text: str, role: Role, pod_ip: str | None = None) -> Assignment:
    """Parses and checks an assignment.

    Args:
        text: the JSON.
        role: the role this pod was started in.
        pod_ip: the pod's own IPv4 address; the assignment must name it. None: not checked.

    Raises:
        AssignmentError: with every wrong field and the reason.
    """
    try:
        assignment = Assignment.model_validate_json(text)
    except ValidationError as error:
        parts = []
        for item in error.errors(include_url=False, include_context=False, include_input=False):
            name, message = _name(item["loc"]), item["msg"].removeprefix("Value error, ")
            parts.append(f"{name}: {message}" if name else message)
        raise AssignmentError("the assignment is not valid: " + "; ".join(parts)) from None
    if assignment.role != role:
        raise AssignmentError(
            f"the assignment is not valid: role: it says {assignment.role}, but this sidecar runs as {role} (ATP_ROLE)"
        )
    if pod_ip and assignment.own_address != pod_ip:
        raise AssignmentError(
            f"the assignment is not valid: it gives {role} {assignment.rank} the address "
            f"{assignment.own_address}, but this pod has {pod_ip} (POD_IP); the operator has to write it "
            "again for this pod"
        )
    return assignment


def read_assignment(path: Path) -> str | None:
    """The text of the assignment file, or None if it is missing or blank (the gate is closed).

    Raises:
        AssignmentError: the file is there but cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise AssignmentError(f"the assignment file {path} cannot be read: {error}") from error
    return text if text.strip() else None
