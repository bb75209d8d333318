# SPDX-License-Identifier: Apache-2.0
"""Pure planning: desired state -> checked jobs -> entries -> ordered updates. No clock, no switch, no network."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from atp_api import reasons, wire
from atp_api.switchagent.v1alpha1 import switchagent_pb2 as api

from .entries import (
    ADMISSION,
    DESTINATION,
    GROUP,
    GUARD,
    GUARDED,
    HOST,
    HOST_PIECES,
    JOB,
    OWN,
    PLACE,
    PS_PORT,
    REGION,
    REPLICA,
    SOURCE,
    TRANSIT,
    Entry,
    Key,
    State,
    state,
)

REGIONS_MAX = 4
REPLICAS_MAX = 64
GROUP_MAX = 1023
RACK_INSTANCES = 0x8000
WORKER, PARAMETER_SERVER = 1, 2
"""Roles of table `host`."""

_MAC = re.compile(r"[0-9a-fA-F]{2}(:[0-9a-fA-F]{2}){5}")


class InvalidState(ValueError):
    """A desired state that can never hold; the text says which part and why."""


class CannotHold(Exception):
    """A job that this switch cannot hold, though another one might. `reason` is CamelCase."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True)
class Limits:
    """What the switch can hold. 0 or empty: not known (yet)."""

    aggregators: int = 0
    values: tuple[int, ...] = ()
    multicast_groups: int = GROUP_MAX
    port_bits: int = 32


@dataclass(frozen=True)
class Port:
    """Where an end point is: switch port, and the MAC address its copies are sent to (48-bit number)."""

    number: int
    mac: int


@dataclass(frozen=True)
class EndpointKey:
    """What a port is resolved from. `port` 0 and `mac` None: to be resolved."""

    address: str
    port: int = 0
    mac: int | None = None
    node: str = ""

    @classmethod
    def of(cls, endpoint: api.Endpoint) -> EndpointKey:
        """From a checked message."""
        mac = int(endpoint.mac.replace(":", ""), 16) if endpoint.mac else None
        return cls(endpoint.address, endpoint.port, mac, endpoint.node)


# -- validation ------------------------------------------------------------------------------------


def validate(desired: api.DesiredState, switch_name: str, limits: Limits) -> None:
    """Raises InvalidState with the first thing that can never hold."""
    if desired.switch_name != switch_name:
        raise InvalidState(f"switch_name is {desired.switch_name!r}; this agent serves {switch_name!r}")
    if desired.generation == 0:
        raise InvalidState("generation is 0; it starts at 1 and grows with every change")
    jobs: dict[int, str] = {}
    groups: dict[int, str] = {}
    for job in desired.jobs:
        label = f"job {job.name or job.uid} (ID {job.job_id})"
        if not 1 <= job.job_id <= wire.JOB_ID_MAX:
            raise InvalidState(f"{label}: job_id must be 1..{wire.JOB_ID_MAX}")
        if job.job_id in jobs:
            raise InvalidState(f"{label}: job_id is also that of {jobs[job.job_id]}")
        jobs[job.job_id] = label
        if job.multicast_group:
            if job.multicast_group in groups:
                raise InvalidState(f"{label}: multicast_group is also that of {groups[job.multicast_group]}")
            groups[job.multicast_group] = label
        _validate_job(job, label, limits)
    addresses: dict[str, str] = {}
    for guard in desired.guards:
        _validate_guard(guard, addresses)


def _validate_guard(guard: api.Guard, addresses: dict[str, str]) -> None:
    """`addresses`: whose each address is so far."""
    label = f"guard of {guard.name or guard.uid}"
    if not guard.uid:
        raise InvalidState(f"{label}: uid is empty")
    if not 1 <= guard.job_id <= wire.JOB_ID_MAX:
        raise InvalidState(f"{label}: job_id must be 1..{wire.JOB_ID_MAX}")
    for host in guard.hosts:
        _validate_endpoint(host.endpoint, label)
        if host.bit >= wire.FAN_IN_MAX or host.rack >= wire.FAN_IN_MAX:
            raise InvalidState(f"{label}: {host.endpoint.address}: a bit is above {wire.FAN_IN_MAX - 1}")
        other = addresses.setdefault(host.endpoint.address, label)
        if other != label:
            raise InvalidState(f"{label}: {host.endpoint.address} is also a host in the {other}")


def _validate_job(job: api.Job, label: str, limits: Limits) -> None:
    if not job.uid:
        raise InvalidState(f"{label}: uid is empty")
    if job.values == 0:
        raise InvalidState(f"{label}: values is 0")
    if job.multicast_group > GROUP_MAX:
        raise InvalidState(f"{label}: multicast_group must be at most {GROUP_MAX}")
    _validate_regions(job, label, limits)
    if not job.members and not job.racks:
        raise InvalidState(f"{label}: no member and no rack; a switch without both is not in the job's tree")
    if not job.parameter_servers:
        raise InvalidState(f"{label}: no parameter server")
    ranks: set[int] = set()
    bits: dict[tuple[bool, int], str] = {}

    def take(level1: bool, bit: int, who: str) -> None:
        if bit >= wire.FAN_IN_MAX:
            raise InvalidState(f"{label}: {who}: bit {bit} is above {wire.FAN_IN_MAX - 1}")
        other = bits.setdefault((level1, bit), who)
        if other != who:
            raise InvalidState(f"{label}: {who} and {other} both have bit {bit} of bitmap{int(level1)}")

    for member in job.members:
        who = f"worker {member.rank}"
        if member.rank in ranks or member.rank >= wire.WORKERS_MAX:
            raise InvalidState(f"{label}: {who}: ranks are unique and below {wire.WORKERS_MAX}")
        ranks.add(member.rank)
        take(member.edge, member.bit, who)
        _validate_endpoint(member.endpoint, f"{label}: {who}")
    for index, rack in enumerate(job.racks):
        who = f"racks[{index}]"
        take(True, rack.bit, who)
        if not 1 <= rack.workers <= wire.FAN_IN_MAX:
            raise InvalidState(f"{label}: {who}: workers must be 1..{wire.FAN_IN_MAX}")
        _validate_endpoint(rack.uplink, f"{label}: {who}")
    for index, server in enumerate(job.parameter_servers):
        _validate_endpoint(server, f"{label}: parameter_servers[{index}]")


def _validate_regions(job: api.Job, label: str, limits: Limits) -> None:
    if not job.regions:
        raise InvalidState(f"{label}: no region; a job without aggregators is HostOnly and stays out of the state")
    end = 0
    for region in sorted(job.regions, key=lambda region: region.start):
        text = f"region {region.start}+{region.size}"
        if region.size == 0:
            raise InvalidState(f"{label}: {text} is empty")
        if region.start < end:
            raise InvalidState(f"{label}: {text} overlaps another region of the job")
        end = region.start + region.size
        most = limits.aggregators or wire.AGGREGATOR_INDEX_MAX + 1
        if end > most:
            raise InvalidState(f"{label}: {text} is outside the switch, which has {most} aggregators")


def _validate_endpoint(endpoint: api.Endpoint, label: str) -> None:
    try:
        ipaddress.IPv4Address(endpoint.address)
    except ipaddress.AddressValueError as error:
        raise InvalidState(f"{label}: address {endpoint.address!r} is not IPv4") from error
    if endpoint.mac and not _MAC.fullmatch(endpoint.mac):
        raise InvalidState(f"{label}: mac {endpoint.mac!r} is not like 02:00:00:00:00:01")


# -- one job -> entries ----------------------------------------------------------------------------


def owner_mark(job: api.Job) -> bytes:
    """Metadata of the job entry: whose it is. Another uid or epoch is another job, also with equal entries."""
    return f"{job.uid}/{job.epoch}".encode()


def endpoints(job: api.Job) -> list[EndpointKey]:
    """Every end point of a job whose port must be known."""
    raw = [
        *(member.endpoint for member in job.members),
        *(rack.uplink for rack in job.racks),
        *job.parameter_servers,
    ]
    return [EndpointKey.of(endpoint) for endpoint in raw]


def plan_job(job: api.Job, ports: Callable[[EndpointKey], Port], limits: Limits) -> list[Entry]:
    """All entries of one validated job. Raises CannotHold with what this switch lacks."""
    if limits.values and job.values not in limits.values:
        offered = ", ".join(map(str, limits.values))
        raise CannotHold(
            reasons.VALUES_UNSUPPORTED,
            f"{job.values} values a packet; this switch aggregates {offered}: set valuesPerPacket to one of them",
        )
    if len(job.regions) > REGIONS_MAX:
        raise CannotHold(reasons.TOO_MANY_REGIONS, f"{len(job.regions)} regions; a switch takes {REGIONS_MAX} a job")
    for region in job.regions:
        if limits.aggregators and region.start + region.size > limits.aggregators:
            raise CannotHold(
                reasons.REGION_OUTSIDE_SWITCH,
                f"region {region.start}+{region.size}; the switch has {limits.aggregators} aggregators",
            )
    if job.multicast_group > limits.multicast_groups:
        raise CannotHold(reasons.SWITCH_FULL, f"the switch has {limits.multicast_groups} multicast groups")
    if len(job.members) + len(job.racks) > REPLICAS_MAX:
        raise CannotHold(reasons.FAN_IN_EXCEEDED, f"an ACK would need more than {REPLICAS_MAX} copies at one switch")
    for key in endpoints(job):
        number = ports(key).number
        if number >> limits.port_bits:
            raise CannotHold(
                reasons.PORT_NOT_FOUND,
                f"port {number} of {key.address} does not exist: ports of this switch are numbers of "
                f"{limits.port_bits} bits; correct it in the ATPSwitch or in the agent's port file",
            )
    job_id = job.job_id
    full0 = full1 = 0
    entries: set[Entry] = set()
    copies: list[tuple[int, int, int, int]] = []  # port, instance, MAC, IP
    for member in job.members:
        port = ports(EndpointKey.of(member.endpoint))
        bitmap = 1 << member.bit
        if member.edge:
            full1 |= bitmap
        else:
            full0 |= bitmap
        entries.add(Entry(ADMISSION, (job_id, port.number, int(member.edge), bitmap)))
        copies.append((port.number, member.rank + 1, port.mac, _ip(member.endpoint.address)))
    for rack in job.racks:
        port = ports(EndpointKey.of(rack.uplink))
        bitmap = 1 << rack.bit
        full1 |= bitmap
        entries.add(Entry(ADMISSION, (job_id, port.number, 1, bitmap)))
        entries.add(Entry(TRANSIT, (job_id, port.number, bitmap), ((1 << rack.workers) - 1,)))
        copies.append((port.number, RACK_INSTANCES + rack.bit, port.mac, _ip(rack.uplink.address)))
    for server in job.parameter_servers:
        entries.add(Entry(PS_PORT, (job_id, ports(EndpointKey.of(server)).number)))
    for region in job.regions:
        entries.add(Entry(REGION, (job_id, (region.start, region.start + region.size - 1))))
    group = job.multicast_group
    if group:
        members: list[int] = []
        for number, instance, mac, address in sorted(copies):
            members += (number, instance)
            entries.add(Entry(REPLICA, (group, number, instance), (mac, address, wire.UDP_PORT)))
        entries.add(Entry(GROUP, (group,), tuple(members)))
    entries.add(Entry(JOB, (job_id,), (job.values, full0, full1, group), owner_mark(job)))
    return list(entries)


def can_guard(tables: Container[str]) -> bool:
    """Whether a switch with these tables can hold hosts."""
    return HOST in tables or all(table in tables for table in (*HOST_PIECES, GUARDED))


def plan_guard(
    guard: api.Guard, ports: Callable[[EndpointKey], Port], tables: Container[str] = (HOST,), *, known: bool = True
) -> list[Entry]:
    """The hosts of one job, as entries of table `host` or of its pieces, by what tables the switch has.

    `known`: the job has aggregators here, so that its job ID is its own on this switch. Pieces without a job ID are by
    address, and an address has one job at a time.
    """
    mark = _mark(guard)
    entries = []
    for host in guard.hosts:
        address, port = _ip(host.endpoint.address), ports(EndpointKey.of(host.endpoint)).number
        place = (0, 0, 0) if host.parameter_server else (1 << host.bit, 1 << host.rack, int(host.edge))
        if HOST in tables:
            role = PARAMETER_SERVER if host.parameter_server else WORKER
            entries.append(Entry(HOST, (guard.job_id, address), (port, mark, role, *place)))
        else:
            entries += host_pieces(guard.job_id, address, port, host.parameter_server, *place)
    if HOST not in tables and known:
        entries.append(Entry(GUARDED, (guard.job_id,)))
    return entries


def host_pieces(
    job_id: int, address: int, port: int, server: bool, bitmap0: int = 0, bitmap1: int = 0, edge: int = 0
) -> list[Entry]:
    """A host as a P4 program has it."""
    entries = [
        Entry(SOURCE, (address,), (int(server), port, job_id)),
        Entry(DESTINATION, (address,), (int(server), job_id)),
    ]
    if not server:
        entries += [Entry(PLACE, (address, bitmap1)), Entry(OWN, (address, bitmap0, edge))]
    return entries


def guard_endpoints(guard: api.Guard) -> list[EndpointKey]:
    """Every end point of a guard whose port must be known."""
    return [EndpointKey.of(host.endpoint) for host in guard.hosts]


def _mark(guard: api.Guard) -> int:
    """What tells the hosts of this epoch of this job from others: 32 bits, never 0. Nobody chooses a uid."""
    digest = hashlib.sha256(f"{guard.uid}/{guard.epoch}".encode()).digest()
    return int.from_bytes(digest[:4], "big") or 1


def _ip(address: str) -> int:
    return int(ipaddress.IPv4Address(address))


# -- entries -> updates ----------------------------------------------------------------------------


class Op(Enum):
    """Kind of an update."""

    INSERT = "insert"
    MODIFY = "modify"
    DELETE = "delete"


@dataclass(frozen=True)
class Update:
    """One update of one entry; of a DELETE, the entry as it is now."""

    op: Op
    entry: Entry


Batch = tuple[Update, ...]
_Job = TypeVar("_Job", int, str)


@dataclass(frozen=True)
class Diff:
    """Batches in order; a server may reorder within a batch. `resets`: job IDs that start anew after `removals`."""

    removals: tuple[Batch, ...]
    additions: tuple[Batch, ...]
    resets: frozenset[int]

    @property
    def empty(self) -> bool:
        """Nothing to do."""
        return not self.removals and not self.additions

    @property
    def batches(self) -> tuple[Batch, ...]:
        """All batches in order."""
        return self.removals + self.additions


_PER_JOB = (JOB, REGION, ADMISSION, TRANSIT, PS_PORT, HOST, GUARDED)
_RIGHTS = (ADMISSION, TRANSIT, PS_PORT)


def jobs_of(entries: State) -> dict[int, Entry]:
    """The entries of table `job` by job ID."""
    return {entry.number(0): entry for entry in entries.values() if entry.table == JOB}


def _kept_jobs(now: State, wanted: State) -> dict[int, Entry]:
    """Jobs that stay known throughout: same owner and parameters, and at least one region and host, if any, stays."""
    before, after = jobs_of(now), jobs_of(wanted)

    def holders(tables: tuple[str, ...], *states: State) -> set[int]:
        """Jobs with an entry that is in all of these states."""
        return {e.number(0) for key, e in states[0].items() if e.table in tables and all(key in s for s in states)}

    guard = (HOST, GUARDED)
    regions = holders((REGION,), now, wanted)
    bare = (holders(guard, now) & holders(guard, wanted)) - holders(guard, now, wanted)
    return {
        job_id: entry
        for job_id, entry in before.items()
        if after.get(job_id) == entry and job_id in regions and job_id not in bare
    }


def diff(now: State, wanted: State) -> Diff:
    """Updates that turn `now` into `wanted`.

    In every state in between, in whatever order a server takes a batch:
    - admission, transit and PS ports of a job exist only while the job does, and belong to the job (owner, epoch)
      that the job entry names;
    - a job has no region that it does not have in `now` or in `wanted`, and none of `now` after its owner changed;
    - the multicast group that a job names exists with all its rewrites, and no group of one job serves another;
    - a job that has hosts has them before it is known and until it is forgotten: it is never known unguarded (in
      pieces: without its entry of `guarded`).
    """
    kept = _kept_jobs(now, wanted)
    kept_groups = {entry.params[3] for entry in kept.values()}

    def stays(entry: Entry) -> bool:
        if entry.table in GUARD:
            return True  # it says itself whose it is; several jobs may have its job ID
        if entry.table in (GROUP, REPLICA):
            return entry.number(0) in kept_groups
        return entry.number(0) in kept

    removals: list[list[Update]] = [[], [], [], []]
    additions: list[list[Update]] = [[], [], [], []]
    gone: dict[Key, Entry] = {}
    for key, entry in now.items():
        if stays(entry) and key in wanted:
            continue
        gone[key] = entry
        update = Update(Op.DELETE, entry)
        if entry.table in _RIGHTS:
            removals[0].append(update)
        elif entry.table == JOB:
            removals[1].append(update)
        elif entry.table in (REGION, GROUP, *GUARD):
            removals[2].append(update)
        elif not stays(entry):
            removals[3].append(update)
        else:
            additions[2].append(update)  # a copy's address goes only after its group has let go of the copy
    for key, entry in wanted.items():
        held = now.get(key) if key not in gone else None
        if held == entry:
            continue
        update = Update(Op.INSERT if held is None else Op.MODIFY, entry)
        if entry.table in (REPLICA, REGION, *GUARD):
            additions[0].append(update)
        elif entry.table == GROUP:
            additions[1].append(update)
        elif entry.table == JOB:
            additions[2].append(update)
        else:
            additions[3].append(update)
    return Diff(
        tuple(tuple(batch) for batch in removals if batch),
        tuple(tuple(batch) for batch in additions if batch),
        frozenset(jobs_of(wanted)) - frozenset(kept),
    )


def job_of(entry: Entry, states: Iterable[State]) -> int | None:
    """The job that an entry belongs to; a group's by the job that names it in one of the states; None: not told."""
    if entry.table in _PER_JOB:
        return entry.number(0)
    if entry.table in HOST_PIECES:
        return None
    group = entry.number(0)
    for entries in states:
        for job_id, job in jobs_of(entries).items():
            if job.params[3] == group:
                return job_id
    return None


def without_room(
    plans: Mapping[_Job, Iterable[Entry]], sizes: Mapping[str, int], seated: Container[_Job]
) -> dict[_Job, CannotHold]:
    """Jobs (by whatever names them) whose entries do not fit into the tables of the switch any more.

    `sizes`: entries that each table holds (p4info); a table without a size is not limited. Jobs of `seated`, which the
    switch holds now, have their place before others, then the lower name. bmv2 answers UNKNOWN when a table is full,
    so this is found before anything is written.
    """
    used: dict[str, int] = {}
    refused: dict[_Job, CannotHold] = {}
    for job in sorted(plans, key=lambda job: (job not in seated, job)):
        needed: dict[str, int] = {}
        for entry in plans[job]:
            needed[entry.table] = needed.get(entry.table, 0) + 1
        for table, count in sorted(needed.items()):
            size = sizes.get(table, 0)
            if size and used.get(table, 0) + count > size:
                refused[job] = CannotHold(
                    reasons.SWITCH_FULL,
                    f"table {table} of the switch holds {size} entries, {size - used.get(table, 0)} are free, the job "
                    f"needs {count}: it runs HostOnly, or wait until another job of this switch ends",
                )
                break
        else:
            for table, count in needed.items():
                used[table] = used.get(table, 0) + count
    return refused


def combine(*plans: Mapping[Any, Iterable[Entry]]) -> dict[Key, Entry]:
    """The entries of all jobs together."""
    return state(entry for some in plans for entries in some.values() for entry in entries)
