# SPDX-License-Identifier: Apache-2.0
"""The loop: look at everything, plan, carry out. One pass at a time, only on the leader.

A pass has bounded work. Jobs are served namespace by namespace in turn, some at once; what does not fit into the pass
is done in the next. A job whose object fails is left alone for a while, and no other notices.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence

from .apply import FAILURES, Applier, tested
from .caches import Caches
from .creation import PodMaker
from .events import Recorder
from .fair import Backoff, interleave
from .intruders import Intruders
from .kube import ATP, ApiError, Kube, path
from .leader import LeaderElection
from .lifecycle import JobPlan
from .metrics import Metrics
from .model import Object
from .planning import Snapshot, plan_cluster
from .sessions import AgentSessions
from .settings import Settings
from .softswitches import manage

log = logging.getLogger(__name__)

DEBOUNCE_SECONDS = (0.1, 0.5)
"""Between news and the pass: at least, and as long as the pass before took, up to the second. A flood of news is then
looked at together.
"""
RELIST_SECONDS = 300.0
AT_ONCE = 16
"""Jobs that are written or carried out at the same time."""
PASS_SECONDS = 1.0
"""After so long a pass begins with no further job, except with those whose holdings change."""
FAILED_SECONDS = (1.0, 300.0)
"""Pause after a job's object failed: the first, and the longest."""
STUCK_SECONDS = 120.0
"""So long may the loop stand still before the health check says so: above what one call of the API server may take."""
BUSY_SECONDS = 15.0
"""The longest pause when the API server did not say that it is the object's fault."""


class LeadershipLost(Exception):
    """Another replica acts from now on."""


class Controller:
    """Runs the passes: from the caches to a plan, and from the plan to the API server and the agents."""

    def __init__(self, settings: Settings, kube: Kube, metrics: Metrics) -> None:
        self.settings = settings
        self.kube = kube
        self.metrics = metrics
        self.caches = Caches(kube, settings, self.wake)
        self._events = Recorder(kube, settings.identity)
        self._maker = PodMaker(kube, self.caches, self._events, settings.sidecar, self.wake)
        self._applier = Applier(kube, self.caches, self._events, self._maker, self.wake)
        self.intruders = Intruders(kube, metrics, self._events.tell)
        self._sessions = AgentSessions(settings, self.wake, self.intruders.seen)
        self._wake = asyncio.Event()
        self._listed_at = -RELIST_SECONDS
        self._moved_at = time.monotonic()
        self._turn = 0
        self._failures = Backoff(*FAILED_SECONDS)  # by ATPJob uid, Unix seconds
        self._missed: set[str] = set()  # UIDs of jobs for which something went wrong in this pass
        self.election = LeaderElection(
            kube,
            settings.namespace,
            settings.lease_name,
            settings.identity,
            settings.lease_seconds,
            self._lead,
        )

    # --- inputs ----------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Something may have changed."""
        self._wake.set()

    def _lead(self, leading: bool) -> None:
        self.metrics.leader.set(1 if leading else 0)
        if leading:
            self._listed_at = -RELIST_SECONDS  # a new leader looks at everything before it acts
        self.wake()

    def problem(self) -> str:
        """What is wrong with this replica, for the health check; empty when nothing is."""
        stuck = time.monotonic() - self._moved_at
        return f"the loop has not moved for {stuck:.0f} s" if stuck > STUCK_SECONDS else ""

    def _moved(self) -> None:
        """The loop got further. A pass may be long, with many objects to write: it is well while it goes on."""
        self._moved_at = time.monotonic()

    # --- the loop --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled."""
        election = asyncio.create_task(self.election.run())
        watches = [asyncio.create_task(watch) for watch in self.caches.watches()]
        watches.append(asyncio.create_task(self.intruders.run()))
        try:
            wait = took = 0.0
            while True:
                try:
                    await asyncio.wait_for(self._wake.wait(), wait)
                    await asyncio.sleep(min(DEBOUNCE_SECONDS[1], max(DEBOUNCE_SECONDS[0], took)))
                except TimeoutError:
                    pass
                self._wake.clear()
                began = time.monotonic()
                self._moved()
                for task in (election, *watches):
                    if task.done():
                        task.result()
                if not self.election.leading:
                    self._sessions.stop()
                    wait = self.settings.resync_seconds
                    continue
                try:
                    with self.metrics.reconcile_seconds.time():
                        wake_at = await self._pass()
                    wait = self.settings.resync_seconds
                    if wake_at is not None:
                        wait = min(wait, max(0.2, wake_at - time.time()))
                except asyncio.CancelledError:
                    raise
                except Exception as error:
                    self.metrics.reconcile_errors.inc()
                    conflict = isinstance(error, ApiError) and error.code == 409
                    if conflict:
                        log.info("pass interrupted by a newer object, looking again: %s", error)
                    else:
                        log.exception("pass failed")
                    self._listed_at = -RELIST_SECONDS
                    wait = 0.2 if conflict else 2.0
                took = time.monotonic() - began
        finally:
            self._sessions.stop()
            for task in (election, *watches):
                task.cancel()
            await asyncio.gather(election, *watches, return_exceptions=True)

    def snapshot(self, now: float) -> Snapshot:
        """What is known now."""
        jobs = self.caches.jobs()
        uids = {job.uid for job in jobs}
        self._maker.keep(uids)
        self._failures.keep(uids)
        return Snapshot(
            jobs=jobs,
            pods=self.caches.pods(jobs),
            switches=self.caches.switches(self._sessions.view),
            quotas=self.caches.quotas(),
            create_errors=dict(self._maker.errors),
            namespaces=self.caches.namespaces(),
            held_back={str(uid): (f.why, f.until) for uid, f in self._failures.all().items() if f.until > now},
        )

    async def _pass(self) -> float | None:
        """One look at everything; when to look again, Unix seconds, or None."""
        if time.monotonic() - self._listed_at > RELIST_SECONDS:
            await self.caches.list_all(self._moved)
            self._listed_at = time.monotonic()
        if self.settings.manage_software_switches:
            await manage(self.kube, self.caches, self.settings)
        self._sessions.follow(self.caches.stores["switches"].items.values())
        await self._applier.quote_fractions()
        now = time.time()
        snapshot = self.snapshot(now)
        # In a thread: webhooks and probes are answered meanwhile.
        plan = await asyncio.to_thread(plan_cluster, snapshot, self.settings.sidecar, self.settings.limits, now)
        self._moved()
        # Order matters for a crash in between: first who holds what, then that the job has it, then the switches.
        for name, status in plan.switch_statuses.items():
            raw = snapshot.switches[name].raw
            await self._applier.write_status("switches", "atpswitches", raw, status)
            for event in plan.switch_events[name]:
                await self._events.tell("ATPSwitch", raw, event)
            self._moved()
        for quota in snapshot.quotas:
            await self._applier.write_status("quotas", "atptenantquotas", quota.raw, plan.quota_statuses[quota.name])
            self._moved()
        end = time.monotonic() + PASS_SECONDS
        self._missed.clear()
        await self._in_turn([p for p in plan.jobs if p.moves], self._applier.write, math.inf)
        self._check_leading()
        # As written: a job whose status write failed, or that somebody else wrote since, is not programmed.
        self._sessions.program(self.caches.switches(self._sessions.view), self.caches.jobs(), snapshot.pods)
        self.metrics.record(snapshot, plan)
        rest = [
            p
            for p in plan.jobs
            if (p.acts or (not p.moves and self._differs(p)))
            # What a status does not say yet is not carried out.
            and p.job.uid not in self._missed
            and (p.held_back or not self._failures.waits(p.job.uid, time.time()))
        ]
        whole = await self._in_turn(rest, self._finish, end)
        wakes = [] if plan.wake_at is None else [plan.wake_at]
        wakes += self._failures.retries(now) + self._maker.retries(now)
        return min(wakes, default=None) if whole else time.time()

    def _check_leading(self) -> None:
        if not self.election.leading:
            raise LeadershipLost("leadership was lost during the pass")

    async def _in_turn(self, plans: Sequence[JobPlan], act: Callable[[JobPlan], Awaitable[None]], end: float) -> bool:
        """Act for the jobs, namespaces in turn, some at once; none is begun after `end` (monotonic seconds).

        What fails is the job's own: it is left alone for a while. True when all had their turn.
        """
        self._turn += 1
        queue = interleave(plans, lambda plan: plan.job.namespace, self._turn)
        queue.reverse()

        async def work() -> None:
            while queue and time.monotonic() < end:
                self._check_leading()
                plan = queue.pop()
                try:
                    await act(plan)
                except LeadershipLost:
                    raise
                except Exception as error:
                    if not isinstance(error, FAILURES):
                        log.exception("ATPJob %s", plan.job.key)
                    await self._failed(plan, error)
                self._moved()

        results = await asyncio.gather(*(work() for _ in range(min(AT_ONCE, len(queue)))), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return not queue

    async def _failed(self, plan: JobPlan, error: BaseException) -> None:
        """Leave the job alone for a while; its object says so, if it can be written at all.

        Unless it changed since it was planned: then what is known of it is renewed, and the next pass looks again.
        """
        job = plan.job
        self._missed.add(job.uid)
        raw: Object = {}
        try:
            raw = await self.kube.get(path(ATP, "atpjobs", job.namespace, job.name))
            self.caches.put("jobs", raw)
        except ApiError as gone:
            if gone.code == 404:
                self.caches.stores["jobs"].drop(job.raw)
                return
        except FAILURES as also:
            log.debug("ATPJob %s: %s", job.key, also)
        if isinstance(error, ApiError) and error.code in (409, 422) and raw and tested(raw) != tested(job.raw):
            self.wake()
            return
        blame = isinstance(error, ApiError) and 400 <= error.code < 500 and error.code not in (401, 403, 408, 409, 429)
        why = f"the API server does not take what the operator writes: {error}"[:1024]
        failure = self._failures.fail(job.uid, why, time.time(), None if blame else BUSY_SECONDS)
        log.warning("ATPJob %s: %s; tried again in %.0f s", job.key, error or repr(error), failure.until - time.time())
        self.metrics.job_errors.inc()

    def _differs(self, plan: JobPlan) -> bool:
        """True when the job's status is to be written; of a job that is left alone, once a failure."""
        failure = self._failures.all().get(plan.job.uid)
        if plan.held_back and failure is not None and failure.told:
            return False
        return bool(plan.job.distrust) or plan.job.raw.get("status") != plan.status.to_dict(plan.job.spec.workers)

    async def _finish(self, plan: JobPlan) -> None:
        failure = self._failures.all().get(plan.job.uid)
        if plan.held_back and failure is not None:
            failure.told = True
        await self._applier.finish(plan)
        if not plan.held_back:
            self._failures.done(plan.job.uid)
