# SPDX-License-Identifier: Apache-2.0
"""Job IDs and aggregator ranges on switches.

One packet carries one job ID and one aggregatorIndex through its whole tree, so both must be free on every switch.
A job's multicast group has the number of its job ID: groups and IDs are unique on the same switches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from atp_api import wire

from . import reasons
from .model import JOB_ID_LAST, Job, Region, Switch

INT32_MAX = 2**31 - 1
RESERVE_PARTS = 4
"""The last fourth of a switch's job IDs is for namespaces with few jobs there, so that nobody can take them all."""
FEW_PARTS = 32
"""Few is fewer than this part of all IDs, 7 of 254."""


@dataclass(frozen=True)
class Allocation:
    """What a job gets, the same on all its switches."""

    job_id: int
    regions: tuple[Region, ...]
    values: int


@dataclass(frozen=True)
class Refusal:
    """Why it gets nothing; the message names what is needed and what is free."""

    reason: str
    message: str


@dataclass
class SwitchLedger:
    """What is taken on one switch."""

    switch: Switch
    ids: dict[int, str] = field(default_factory=dict)  # job ID -> uid
    resting: set[int] = field(default_factory=set)
    reserved: dict[str, tuple[Region, ...]] = field(default_factory=dict)  # exclusive ranges: Reserved jobs, floors
    shared: dict[str, tuple[Region, ...]] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)  # aggregators requested, by uid
    # Given back in this plan, by uid: others get it in the next one, when the holder's status says so.
    leaving_reserved: dict[str, tuple[Region, ...]] = field(default_factory=dict)
    leaving_shared: dict[str, tuple[Region, ...]] = field(default_factory=dict)
    leaving_requests: dict[str, int] = field(default_factory=dict)

    @property
    def id_limit(self) -> int:
        """Job IDs 1..limit may be given out here."""
        capacity = self.switch.capacity
        return min(JOB_ID_LAST, capacity.job_ids, capacity.multicast_groups) if capacity else 0

    @property
    def free_ids(self) -> int:
        """How many of them nobody holds and that do not rest."""
        return self.id_limit - sum(job_id <= self.id_limit for job_id in self.ids.keys() | self.resting)


class Ledger:
    """What every switch has given out; changed only by `take` and `release`.

    What a job gives back is for others in the next plan only. So what a job gains in a plan never rests on the write of
    another job's status, and one that cannot be written keeps nobody else waiting.
    """

    def __init__(self, switches: Mapping[str, Switch], jobs: Iterable[Job], now: float) -> None:
        self.switches = {name: SwitchLedger(switch) for name, switch in switches.items()}
        self.namespaces: dict[str, str] = {}  # by uid
        holding: set[tuple[str, int, int]] = set()  # (uid, job ID, epoch)
        for job in jobs:
            self.namespaces[job.uid] = job.namespace
            status = job.status
            if status.holds_switches and job.deleting is None:
                assert status.job_id is not None
                holding.add((job.uid, status.job_id, status.epoch))
                self.take(
                    job.uid,
                    status.switches,
                    status.job_id,
                    status.regions,
                    # Of the spec: while its switch is away the status says HostOnly, but the range is kept.
                    job.spec.mode == "Reserved",
                    job.spec.request,
                )
        for ledger in self.switches.values():
            ledger.resting |= {job_id for job_id, until in ledger.switch.quarantine if until > now}
            # A holder that is gone but not yet written into quarantine rests all the same.
            ledger.resting |= {h.job_id for h in ledger.switch.holders if (h.uid, h.job_id, h.epoch) not in holding}

    def take(
        self,
        uid: str,
        names: Iterable[str],
        job_id: int,
        regions: tuple[Region, ...],
        exclusive: bool,
        request: int,
    ) -> None:
        """Record that the job `uid` holds these on the switches `names` (unknown names are ignored).

        `exclusive`: all regions are, as in mode Reserved; else a floor alone is.
        """
        own = tuple(region for region in regions if exclusive or region.floor)
        others = tuple(region for region in regions if region not in own)
        for name in names:
            ledger = self.switches.get(name)
            if ledger is None:
                continue
            ledger.ids[job_id] = uid
            for held, ranges in ((ledger.reserved, own), (ledger.shared, others)):
                held.pop(uid, None)
                if ranges:
                    held[uid] = ranges
            ledger.requests[uid] = request

    def release(self, uid: str) -> None:
        """Give back all that the job holds; for others it rests for the remainder of this plan."""
        for ledger in self.switches.values():
            for job_id in [i for i, holder in ledger.ids.items() if holder == uid]:
                del ledger.ids[job_id]
                ledger.resting.add(job_id)
            for held, leaving in (
                (ledger.reserved, ledger.leaving_reserved),
                (ledger.shared, ledger.leaving_shared),
            ):
                if uid in held:
                    leaving.setdefault(uid, held.pop(uid))
            if uid in ledger.requests:
                ledger.leaving_requests.setdefault(uid, ledger.requests.pop(uid))

    def allocate(
        self, names: tuple[str, ...], mode: str, request: int, values: int | None, uid: str = "", floor: int = 0
    ) -> Allocation | Refusal:
        """Find a job ID, ranges and a packet size that all switches `names` can give job `uid`; changes nothing.

        `floor`: so much of what a Shared job requests is a range of its own, the last of its regions.
        """
        ledgers = [self.switches[name] for name in sorted(names)]
        profile = self._values(ledgers, values)
        if isinstance(profile, Refusal):
            return profile
        job_id = self._job_id(ledgers, uid)
        if isinstance(job_id, Refusal):
            return job_id
        own: tuple[Region, ...] = ()
        size = request if mode == "Reserved" else floor
        if size:
            found = self._reserved(ledgers, size, uid)
            if isinstance(found, Refusal):
                return found if mode == "Reserved" else replace(found, message=f"the floor {found.message}")
            own = (found if mode == "Reserved" else replace(found, floor=True),)
        if mode == "Reserved":
            return Allocation(job_id, own, profile)
        shared = self._shared(ledgers, max(1, request - floor), uid, own)
        if isinstance(shared, Refusal):
            return shared
        return Allocation(job_id, (shared, *own), profile)

    @staticmethod
    def _values(ledgers: list[SwitchLedger], values: int | None) -> int | Refusal:
        common: set[int] | None = None
        for ledger in ledgers:
            offered = set(ledger.switch.capacity.values) if ledger.switch.capacity else set()
            if values is not None and values not in offered:
                return Refusal(
                    reasons.VALUES_UNSUPPORTED,
                    f"spec.valuesPerPacket is {values}, but switch {ledger.switch.name} aggregates "
                    f"{', '.join(map(str, sorted(offered))) or 'nothing'} values per packet",
                )
            common = offered if common is None else common & offered
        if values is not None:
            return values
        if not common:
            names = ", ".join(ledger.switch.name for ledger in ledgers)
            return Refusal(reasons.VALUES_UNSUPPORTED, f"switches {names} have no packet size in common")
        return max(common)

    def _job_id(self, ledgers: list[SwitchLedger], uid: str) -> int | Refusal:
        namespace = self.namespaces.get(uid, "")
        for ledger in ledgers:
            kept, few = ledger.id_limit // RESERVE_PARTS, max(1, ledger.id_limit // FEW_PARTS)
            held = sum(self.namespaces.get(holder, "") == namespace for holder in ledger.ids.values() if holder != uid)
            if 0 < ledger.free_ids <= kept and held >= few:
                return Refusal(
                    reasons.JOB_IDS_EXHAUSTED,
                    f"needs 1 job ID (and multicast group) on switch {ledger.switch.name}: the last {kept} of "
                    f"{ledger.id_limit} are kept for namespaces with fewer than {few} jobs there",
                )
        limit = min(ledger.id_limit for ledger in ledgers)
        taken = set[int]().union(*(ledger.ids.keys() | ledger.resting for ledger in self._beside(ledgers)))
        for job_id in range(1, limit + 1):
            if job_id not in taken:
                return job_id
        worst = max(ledgers, key=lambda entry: (len(entry.ids) + len(entry.resting), -entry.id_limit))
        elsewhere = len({i for i in taken if i <= limit} - worst.ids.keys() - worst.resting)
        return Refusal(
            reasons.JOB_IDS_EXHAUSTED,
            f"needs 1 job ID (and multicast group) on switch {worst.switch.name}: 0 free of {worst.id_limit}, "
            f"{len(worst.ids)} in use and {len(worst.resting - worst.ids.keys())} resting"
            + (f", {elsewhere} on other switches above the same nodes" if elsewhere else ""),
        )

    def _beside(self, ledgers: list[SwitchLedger]) -> list[SwitchLedger]:
        """These switches and all others above a node of theirs: whatever of the job passes those, too.

        A switch that knows the job ID as another job's would drop its packets.
        """
        nodes = {node for ledger in ledgers for node in ledger.switch.nodes}
        return [ledger for ledger in self.switches.values() if not nodes.isdisjoint(ledger.switch.nodes)]

    @staticmethod
    def _shared(ledgers: list[SwitchLedger], request: int, uid: str, own: tuple[Region, ...] = ()) -> Region | Refusal:
        """A range that jobs share, beside the job's `own`."""

        def room(entry: SwitchLedger) -> tuple[int, list[Region]]:
            return entry.switch.shared_pool, [*own, *_of_others(uid, entry.reserved, entry.leaving_reserved)]

        return _fit(ledgers, request, room, largest=True)

    @staticmethod
    def _reserved(ledgers: list[SwitchLedger], request: int, uid: str) -> Region | Refusal:
        def room(entry: SwitchLedger) -> tuple[int, list[Region]]:
            total = entry.switch.capacity.aggregators if entry.switch.capacity else 0
            held = (entry.reserved, entry.leaving_reserved, entry.shared, entry.leaving_shared)
            return min(total, wire.AGGREGATOR_INDEX_MAX + 1), _of_others(uid, *held)

        return _fit(ledgers, request, room, largest=False)


def addend_limit(switches: Iterable[Switch], workers: int) -> int | None:
    """Greatest magnitude of an integer addend, so that no partial sum of `workers` of them leaves int32.

    None when every switch keeps a sum that overflows at the end of int32, where the parameter server sees it. An adder
    that is not sticky can bring an overflow back unseen: the next addend of the other sign moves the sum off the end.
    """
    if all(switch.capacity is not None and switch.capacity.sticky_saturation for switch in switches):
        return None
    return INT32_MAX // workers


_Room = Callable[[SwitchLedger], tuple[int, list[Region]]]


def _of_others(uid: str, *held: Mapping[str, tuple[Region, ...]]) -> list[Region]:
    """The distinct ranges that jobs other than `uid` hold: jobs that share a range count once."""
    return list({region for by_uid in held for holder, found in by_uid.items() if holder != uid for region in found})


def gaps(limit: int, taken: Iterable[Region]) -> list[Region]:
    """The free ranges of [0, limit), ascending."""
    free, start = [], 0
    for region in sorted(taken):
        if region.start >= limit:
            break
        if region.start > start:
            free.append(Region(start, region.start - start))
        start = max(start, region.end)
    if start < limit:
        free.append(Region(start, limit - start))
    return free


def _fit(
    ledgers: list[SwitchLedger],
    request: int,
    room: _Room,
    *,
    largest: bool,
) -> Region | Refusal:
    """One range free on all switches: the largest whole gap, or `request` slots from the top of the highest gap."""
    limit, taken = wire.AGGREGATOR_INDEX_MAX + 1, []
    for ledger in ledgers:
        top, here = room(ledger)
        best = max((gap.size for gap in gaps(top, here)), default=0)
        if best < request:
            total = ledger.switch.capacity.aggregators if ledger.switch.capacity else 0
            return Refusal(
                reasons.AGGREGATORS_EXHAUSTED,
                f"needs {request} aggregators on switch {ledger.switch.name}: {best} free of {total}",
            )
        limit = min(limit, top)
        taken += here
    free = [gap for gap in gaps(limit, taken) if gap.size >= request]
    if not free:
        names = ", ".join(ledger.switch.name for ledger in ledgers)
        best = max((gap.size for gap in gaps(limit, taken)), default=0)
        return Refusal(
            reasons.NO_COMMON_RANGE,
            f"needs {request} aggregators at the same indexes on switches {names}: each has them, but together "
            f"{best} are free; name fewer switches in spec.switches or set sharedAggregators alike",
        )
    if largest:
        return max(free, key=lambda gap: (gap.size, -gap.start))
    gap = free[-1]
    return Region(gap.end - request, request)
