# SPDX-License-Identifier: Apache-2.0
"""The level-triggered loop: desired state and port answers in, the switch's entries out, and what really holds."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field, replace

from atp_api import reasons
from atp_api.switchagent.v1alpha1 import switchagent_pb2 as api

from . import __version__
from .codec import Codec
from .driver import Driver, Facts, Refusal, SwitchLost
from .entries import GUARD, Entry, Key
from .forwarding import Tuning, managed
from .forwarding import diff as diff_forwarding
from .forwarding import plan as plan_forwarding
from .planner import (
    CannotHold,
    Diff,
    EndpointKey,
    Limits,
    Port,
    can_guard,
    combine,
    diff,
    endpoints,
    guard_endpoints,
    job_of,
    jobs_of,
    plan_guard,
    plan_job,
    validate,
    without_room,
)
from .resolver import PortResolver, Resolution, Unresolved
from .targets import STICKY_TARGETS

log = logging.getLogger("atp_switch_agent.reconciler")

_PROGRAMMED, _PENDING, _FAILED = (
    api.JobStatus.PROGRAMMED,
    api.JobStatus.PENDING,
    api.JobStatus.FAILED,
)


class StaleGeneration(Exception):
    """A desired state older than the one in force."""


@dataclass
class Settings:
    """Of one agent. `facts` are what the command line says of the switch; the switch's own word comes second."""

    switch_name: str
    facts: Facts = field(default_factory=Facts)
    audit_seconds: float = 30.0
    retry_first: float = 0.5
    retry_last: float = 10.0
    apply_seconds: float = 10.0
    tuning: Tuning = field(default_factory=Tuning)


@dataclass(frozen=True)
class _Outcome:
    state: api.JobStatus.State.ValueType
    reason: str = ""
    message: str = ""


class _Ports:
    """Answers of the resolver for one pass, as the planner wants them."""

    def __init__(self, answers: Mapping[EndpointKey, Resolution]) -> None:
        self._answers = answers

    def __call__(self, key: EndpointKey) -> Port:
        answer = self._answers[key]
        assert isinstance(answer, Port)
        return answer

    def missing(self, keys: Iterable[EndpointKey]) -> list[Unresolved]:
        """Why some of these end points have no port."""
        answers = [self._answers[key] for key in keys]
        return [answer for answer in answers if isinstance(answer, Unresolved)]


class Reconciler:
    """One switch. All methods run in one event loop."""

    def __init__(self, settings: Settings, driver: Driver, resolver: PortResolver) -> None:
        self.settings = settings
        self.driver = driver
        self._resolver = resolver
        self._facts = settings.facts
        self._facts_session = 0
        self._desired: api.DesiredState | None = None
        self._outcomes: dict[int, _Outcome] = {}
        self._in_sync = False
        self._checked_session = 0
        self._reason, self._message = reasons.NO_DESIRED_STATE, "the operator has sent no desired state yet"
        self._wake = asyncio.Event()
        self._passes_wanted = 0
        self._passes_done = 0
        self._done = asyncio.Condition()
        self._changed = asyncio.Condition()
        self._answers: dict[EndpointKey, Resolution] = {}
        self._announced: api.ObservedState | None = None
        self._last: api.Telemetry | None = None

    # -- what callers see --------------------------------------------------------------------------

    def poke(self) -> None:
        """Something changed: run a pass soon."""
        self._passes_wanted += 1
        self._wake.set()

    @property
    def facts(self) -> Facts:
        """Target and limits: the command line's first, then the switch's own word, then its p4info."""
        told, given = self._facts, self.settings.facts
        codec = self.driver.codec
        read = codec.target if codec else None
        return Facts(
            given.target or told.target or (read.name if read else ""),
            Limits(
                given.limits.aggregators or told.limits.aggregators or (read.aggregators if read else 0),
                given.limits.values or told.limits.values or (read.values if read else ()),
                min(given.limits.multicast_groups, told.limits.multicast_groups),
                min(given.limits.port_bits, read.port_bits) if read else given.limits.port_bits,
            ),
        )

    @property
    def generation(self) -> int:
        """Of the desired state in force; 0 if there is none."""
        return self._desired.generation if self._desired else 0

    @property
    def last_telemetry(self) -> api.Telemetry | None:
        """The newest counters that were read."""
        return self._last

    def capabilities(self) -> api.Capabilities:
        """What the switch is and can hold, as far as it is known."""
        facts = self.facts
        return api.Capabilities(
            switch_name=self.settings.switch_name,
            target=facts.target,
            aggregators=facts.limits.aggregators,
            values=facts.limits.values,
            multicast_groups=facts.limits.multicast_groups,
            job_ids=255,
            fan_in_max=32,
            pipeline=self.driver.codec.name if self.driver.codec else "",
            version=__version__,
            # A target that is not known is not trusted to show an overflow.
            sticky_saturation=facts.target in STICKY_TARGETS,
        )

    def observed(self) -> api.ObservedState:
        """What the switch holds, as of the last pass and the stream's state now."""
        link = self.driver.link
        state = api.ObservedState(
            switch_name=self.settings.switch_name,
            generation=self.generation,
            connected=link.connected and link.primary,
            in_sync=self._in_sync and link.primary,
            reason=self._reason,
            message=self._message,
        )
        # What was found before the stream was lost, or another controller came, says nothing of the switch now.
        unknown: _Outcome | None = None
        if not link.primary:
            unknown = _Outcome(_PENDING, link.reason, link.message)
        elif self._checked_session != link.session:
            unknown = _Outcome(_PENDING, reasons.PROGRAMMING, "the agent looks at what the switch holds")
        if unknown:
            state.in_sync, state.reason, state.message = False, unknown.reason, unknown.message
        for job in self._desired.jobs if self._desired else ():
            outcome = self._outcomes.get(job.job_id, _Outcome(_PENDING, reasons.PROGRAMMING, "not programmed yet"))
            outcome = unknown or outcome
            state.jobs.add(
                job_id=job.job_id,
                epoch=job.epoch,
                uid=job.uid,
                state=outcome.state,
                reason=outcome.reason,
                message=outcome.message,
                advice=reasons.AGENT_ADVICE.get(outcome.reason, ""),
            )
        state.advice = reasons.AGENT_ADVICE.get(state.reason, "")
        return state

    async def apply(self, desired: api.DesiredState) -> api.ObservedState:
        """Take a desired state, and wait (bounded) for one pass over it.

        Raises InvalidState or StaleGeneration; nothing is changed then.
        """
        validate(desired, self.settings.switch_name, self.facts.limits)
        current = self._desired
        if current is not None and current.writer == desired.writer:
            if desired.generation < current.generation:
                raise StaleGeneration(
                    f"generation {desired.generation} is older than {current.generation} of the same writer "
                    f"{desired.writer!r}"
                )
            if desired.generation == current.generation and desired != current:
                log.warning("the same generation with other content", extra={"generation": desired.generation})
        kept = api.DesiredState()
        kept.CopyFrom(desired)
        self._desired = kept
        known = {(job.job_id, job.uid, job.epoch) for job in current.jobs} if current else set()
        fresh = {job.job_id for job in kept.jobs if (job.job_id, job.uid, job.epoch) not in known}
        self._outcomes = {job_id: outcome for job_id, outcome in self._outcomes.items() if job_id not in fresh}
        self.poke()
        target = self._passes_wanted
        try:
            async with asyncio.timeout(self.settings.apply_seconds):
                async with self._done:
                    await self._done.wait_for(lambda: self._passes_done >= target)
        except TimeoutError:
            log.warning("apply returns before the pass is done")
        return self.observed()

    # -- the loop ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Reconcile until cancelled."""
        watcher = asyncio.create_task(self._watch_ports())
        retry = self.settings.retry_first
        try:
            while True:
                self._wake.clear()
                target = self._passes_wanted
                await self._pass()
                async with self._done:
                    self._passes_done = target
                    self._done.notify_all()
                if self._settled():
                    retry = self.settings.retry_first
                    delay = self.settings.audit_seconds
                else:
                    delay, retry = retry, min(retry * 2, self.settings.retry_last)
                try:
                    await asyncio.wait_for(self._wake.wait(), delay)
                except TimeoutError:
                    continue
        finally:
            watcher.cancel()

    def _settled(self) -> bool:
        if self._desired is None or not self.driver.link.primary:
            return True  # what comes next wakes the loop
        return self._in_sync and all(o.state == _PROGRAMMED for o in self._outcomes.values())

    async def _watch_ports(self) -> None:
        known = self._resolver.forwarding()
        while True:
            try:
                await self._resolver.changed()
                answers = dict(await self._resolver.resolve(self._endpoints()))
            except (OSError, ValueError) as error:
                log.error("ports: %s", error)
                await asyncio.sleep(1.0)
                continue
            # Hosts are restless; only another answer is worth a pass.
            told = self._resolver.forwarding()
            if answers != self._answers or told != known:
                known = told
                self._wake.set()

    def _endpoints(self) -> set[EndpointKey]:
        """All that need a port."""
        if self._desired is None:
            return set()
        wanted = {key for job in self._desired.jobs for key in endpoints(job)}
        return wanted | {key for guard in self._guards(self._desired) for key in guard_endpoints(guard)}

    def _guards(self, desired: api.DesiredState) -> list[api.Guard]:
        """Those that this switch can hold: one whose program has no tables of hosts admits by port and bit alone."""
        codec = self.driver.codec
        return list(desired.guards) if codec is not None and can_guard(codec.table_sizes) else []

    async def _pass(self) -> None:
        session = self.driver.link.session
        try:
            await self._reconcile()
        except SwitchLost as error:
            self._in_sync = False
            self._reason, self._message = error.reason, error.message
            for job in self._desired.jobs if self._desired else ():
                self._outcomes[job.job_id] = _Outcome(_PENDING, error.reason, error.message)
        self._checked_session = session
        # The link may have changed between passes, so what counts is what was said last.
        observed = self.observed()
        if observed != self._announced:
            self._announced = observed
            states = {job.job_id: api.JobStatus.State.Name(job.state) for job in observed.jobs}
            log.info(
                "observed",
                extra={
                    "generation": observed.generation,
                    "connected": observed.connected,
                    "in_sync": observed.in_sync,
                    "reason": observed.reason,
                    "jobs": states,
                },
            )
            async with self._changed:
                self._changed.notify_all()

    async def _reconcile(self) -> None:
        link = self.driver.link
        if not link.primary:
            self._in_sync = False
            return
        if self._facts_session != link.session:
            self._facts = await self.driver.facts()
            self._facts_session = link.session
        await self.driver.ensure_pipeline()
        codec = self.driver.codec
        assert codec is not None
        desired = self._desired
        if desired is None:
            await self._forward(codec)
            self._in_sync = False
            self._reason, self._message = reasons.NO_DESIRED_STATE, "the operator has sent no desired state yet"
            return
        outcomes: dict[int, _Outcome] = {}
        plans, guards = await self._plan(desired, outcomes)
        trouble, exposed = await self._forward(codec), ""
        now = await self.driver.read()
        for job_id, error in without_room(plans, codec.table_sizes, jobs_of(now)).items():
            outcomes[job_id] = _Outcome(_FAILED, error.reason, error.message)
            del plans[job_id]
        owners = {job.uid: job.job_id for job in desired.jobs}

        def unguarded(uid: str, outcome: _Outcome) -> None:
            """A job that cannot be guarded is not programmed; of one that is not here anyway the switch says so."""
            nonlocal exposed
            guards.pop(uid, None)
            if owners.get(uid) in plans:
                outcomes[owners[uid]] = outcome
                del plans[owners[uid]]
            exposed = exposed or f"the hosts of a job are not guarded: {outcome.message}"

        for uid, full in without_room(guards, codec.table_sizes, ()).items():
            unguarded(uid, _Outcome(_FAILED, full.reason, full.message))
        # One round writes, the next finds nothing to do; more only for jobs that the switch refuses.
        rounds = 3 + len(plans) + len(guards)
        while True:
            changes = diff(now, combine(plans, guards))
            if changes.empty:
                break
            rounds -= 1
            if rounds < 0:
                entry = changes.batches[0][0].entry
                raise SwitchLost(
                    reasons.NOT_CONVERGING, f"the switch does not keep what is written, for example {entry.key}"
                )
            refused = await self._execute(changes)
            before, now = now, await self.driver.read()
            if not refused:
                continue
            blamed = self._blame(refused, plans, before)
            hosts = {refusal.entry.key: refusal for refusal in refused if refusal.entry.table in GUARD}
            bad = [(uid, hosts[e.key]) for uid, held in guards.items() for e in held if e.key in hosts]
            for uid, refusal in bad:
                unguarded(uid, _Outcome(_FAILED, refusal.reason, refusal.message))
            if not blamed and not bad:
                first = refused[0]
                raise SwitchLost(reasons.SWITCH_REFUSED, f"{first.entry.key}: {first.message}")
            for job_id, outcome in blamed.items():
                outcomes[job_id] = outcome
                plans.pop(job_id, None)
        for job_id in plans:
            outcomes[job_id] = _Outcome(_PROGRAMMED)
        if self._desired is not desired:
            return  # another one came in meanwhile; its own pass reports
        self._outcomes = outcomes
        self._in_sync, self._reason, self._message = _summary(desired, outcomes)
        if self._in_sync and trouble:
            self._in_sync, self._reason, self._message = False, reasons.FORWARDING_REFUSED, trouble
        if self._in_sync and exposed:
            self._in_sync, self._reason, self._message = False, reasons.HOSTS_UNGUARDED, exposed

    async def _forward(self, codec: Codec) -> str:
        """Tables for ordinary traffic and the program's numbers, where the switch has them; what the switch refuses.

        They do not wait for the operator: the hosts need the network before there is a job.
        """
        told, tuning = self._resolver.forwarding(), self.settings.tuning
        tables = managed(codec.forwarding_tables, told, tuning)
        if not tables:
            return ""
        macs = {
            answer.mac: answer.number
            for key, answer in self._answers.items()
            if isinstance(answer, Port) and answer.number >> codec.target.port_bits == 0
        }
        if told is not None:
            told = replace(told, macs=macs | dict(told.macs))
        wanted = plan_forwarding(codec.forwarding_tables, told, tuning)
        for batch in diff_forwarding(await self.driver.read_forwarding(tables), wanted):
            refused = await self.driver.write(batch)
            if refused:
                first = refused[0]
                return f"ordinary traffic: the switch refuses {first.entry.table} {first.entry.match}: {first.message}"
        return ""

    async def _plan(
        self, desired: api.DesiredState, outcomes: dict[int, _Outcome]
    ) -> tuple[dict[int, list[Entry]], dict[str, list[Entry]]]:
        """Entries of each job by job ID, and those that guard its hosts by uid.

        A job waits until all its hosts have a port: those that had none yet could not send anything.
        """
        self._answers = dict(await self._resolver.resolve(self._endpoints()))
        ports = _Ports(self._answers)
        plans: dict[int, list[Entry]] = {}
        guarded = {guard.uid: guard for guard in self._guards(desired)}
        tables = self.driver.codec.table_sizes if self.driver.codec else ()
        known = {job.uid for job in desired.jobs}
        guards = {
            uid: plan_guard(guard, ports, tables, known=uid in known)
            for uid, guard in guarded.items()
            if not ports.missing(guard_endpoints(guard))
        }
        for job in desired.jobs:
            needed = [*endpoints(job), *(guard_endpoints(guarded[job.uid]) if job.uid in guarded else ())]
            missing = ports.missing(needed)
            wrong = [answer.message for answer in missing if answer.wrong]
            if wrong:
                outcomes[job.job_id] = _Outcome(_FAILED, reasons.PORT_NOT_FOUND, "; ".join(wrong[:3]))
                continue
            if missing:
                text = "; ".join(answer.message for answer in missing[:3])
                outcomes[job.job_id] = _Outcome(_PENDING, reasons.PORT_UNRESOLVED, text)
                continue
            try:
                plans[job.job_id] = plan_job(job, ports, self.facts.limits)
            except CannotHold as error:
                outcomes[job.job_id] = _Outcome(_FAILED, error.reason, error.message)
        return plans, guards

    async def _execute(self, changes: Diff) -> list[Refusal]:
        for batch in changes.removals:
            refused = await self.driver.write(batch)
            if refused:
                return refused
        await self.driver.reset_counters(sorted(changes.resets))
        for batch in changes.additions:
            refused = await self.driver.write(batch)
            if refused:
                return refused
        return []

    @staticmethod
    def _blame(
        refused: list[Refusal], plans: Mapping[int, list[Entry]], now: Mapping[Key, Entry]
    ) -> dict[int, _Outcome]:
        blamed: dict[int, _Outcome] = {}
        for refusal in refused:
            job_id = job_of(refusal.entry, (combine(plans), now))
            if job_id is not None and job_id in plans:
                text = f"the switch refuses {refusal.entry.table} {refusal.entry.match}: {refusal.message}"
                blamed.setdefault(job_id, _Outcome(_FAILED, refusal.reason, text))
        return blamed

    # -- telemetry ---------------------------------------------------------------------------------

    async def telemetry(self) -> api.Telemetry:
        """Counters and occupancy now; without counters while the switch is away."""
        told = api.Telemetry(switch_name=self.settings.switch_name, time_seconds=time.time(), observed=self.observed())
        jobs = {job.job_id: job for job in self._desired.jobs} if self._desired else {}
        try:
            counters = await self.driver.counters((0, *jobs))
            occupied = await self.driver.occupancy((0, *jobs))
            dropped = await self.driver.drops()
        except SwitchLost:
            return told
        for job_id, cells in counters.items():
            job = jobs.get(job_id)
            in_use = occupied.get(job_id, 0) if occupied is not None else _estimate(cells, job)
            told.jobs.add(
                job_id=job_id,
                epoch=job.epoch if job else 0,
                uid=job.uid if job else "",
                counters=cells,
                aggregators_in_use=in_use if job_id else 0,
            )
        told.aggregators_in_use = (
            occupied.get(0, 0) if occupied is not None else sum(job.aggregators_in_use for job in told.jobs)
        )
        for cell in sorted(dropped, key=lambda cell: cell["port"]):
            port, address, source = (cell.pop(name) for name in ("port", "address", "last_source"))
            told.drops.add(port=port, address=_address(address), last_source=_address(source), dropped=cell)
        self._last = told
        return told

    async def stream(self, period: float) -> AsyncIterator[api.Telemetry]:
        """Telemetry at least every `period` seconds, and at once when the observed state changes."""
        while True:
            told = await self.telemetry()
            yield told
            try:
                await asyncio.wait_for(self._differs_from(told.observed), period)
            except TimeoutError:
                continue

    async def _differs_from(self, sent: api.ObservedState) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self.observed() != sent)

    async def sample(self, period: float) -> None:
        """Read the counters now and then for the metrics, until cancelled."""
        while True:
            await self.telemetry()
            await asyncio.sleep(period)

    def job_names(self) -> dict[int, str]:
        """namespace/name by job ID."""
        return {job.job_id: job.name for job in self._desired.jobs} if self._desired else {}


def _summary(desired: api.DesiredState, outcomes: Mapping[int, _Outcome]) -> tuple[bool, str, str]:
    """In sync, reason and message of the whole switch. Jobs that it refuses come before those that wait."""
    names = {job.job_id: job.name or f"job ID {job.job_id}" for job in desired.jobs}
    left = [(outcome.state != _FAILED, job_id) for job_id, outcome in outcomes.items() if outcome.state != _PROGRAMMED]
    if not left:
        return True, "", ""
    first = min(left)[1]
    others = f"; {len(left) - 1} more of {len(names)} jobs are not programmed" if len(left) > 1 else ""
    return False, outcomes[first].reason, f"{names.get(first, first)}: {outcomes[first].message}{others}"


def _address(number: int) -> str:
    return str(ipaddress.IPv4Address(number)) if number else ""


def _estimate(cells: Mapping[str, int], job: api.Job | None) -> int:
    """Aggregators in use from counters alone: an upper bound, as sweeps are not counted."""
    gone = ("released", "resend_partials", "stale_takeovers")
    used = cells.get("allocated", 0) - sum(cells.get(name, 0) for name in gone)
    most = sum(region.size for region in job.regions) if job else 0
    return max(0, min(used, most))
