# SPDX-License-Identifier: Apache-2.0
"""The loop: look at everything, plan, carry out. One pass at a time, only on the leader.

A pass has bounded work. Jobs are served namespace by namespace in turn, some at once; what does not fit into the pass
is done in the next. A job whose object fails is left alone for a while, and no other notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from . import API_VERSION, FINALIZER, LABEL_JOB, LABEL_MANAGED_BY
from .agent import AgentSession
from .cache import Store, key_of
from .claims import doubt, vouched
from .desired import desired_guards, desired_jobs
from .fair import Backoff, interleave
from .injection import InjectionError
from .intake import JobKeeper, keep_labels, keep_pod, keep_whole
from .intruders import Intruders
from .kube import ATP, CALL_FAILED, ApiError, Kube, path
from .leader import LeaderElection
from .lifecycle import JobPlan
from .metrics import Metrics
from .model import AgentView, Event, Job, Object, Pod, Quota, Switch, rfc3339, stored_fraction
from .planning import Snapshot, plan_cluster
from .pods import Wanted, manifest
from .settings import Settings
from .watching import Source, Watcher

log = logging.getLogger(__name__)

SOFTSWITCH_LABEL = ("app.kubernetes.io/component", "softswitch")
DEBOUNCE_SECONDS = (0.1, 0.5)
"""Between news and the pass: at least, and as long as the pass before took, up to the second. A flood of news is then
looked at together.
"""
RELIST_SECONDS = 300.0
AT_ONCE = 16
"""Jobs that are written or carried out at the same time."""
CALLS_AT_ONCE = 8
"""Objects of one job that are made or deleted at the same time."""
OBJECTS_A_PASS = 64
"""Objects of one job that one pass makes or deletes at most."""
PASS_SECONDS = 1.0
"""After so long a pass begins with no further job, except with those whose holdings change."""
FAILED_SECONDS = (1.0, 300.0)
"""Pause after a job's object failed: the first, and the longest."""
BUSY_SECONDS = 15.0
"""The longest pause when the API server did not say that it is the object's fault."""
CREATE_SECONDS = (2.0, 60.0)
"""Pause after a job's pods could not be made: the first, and the longest."""


class LeadershipLost(Exception):
    """Another replica acts from now on."""


FAILURES = (*CALL_FAILED, ValueError, KeyError, TypeError)
"""What can go wrong with one object."""


TESTED = ("phase", "epoch", "jobId", "revision")
"""Of a status: what must be as it was planned from when the next one is written."""


def _tested(raw: Object) -> tuple[object, ...]:
    """What the write of a status rests on."""
    meta, status = raw["metadata"], raw.get("status") or {}
    return (meta.get("uid"), meta.get("generation"), *(status.get(key) for key in TESTED))


FED_BY_KOPF = ("switches", "quotas", "namespaces")
"""Kinds whose events come from kopf; they are listed here all the same, when a pass must know all."""


def _sources(settings: Settings) -> Mapping[str, Source]:
    return {
        "jobs": Source(ATP, "atpjobs", JobKeeper(settings.sidecar)),
        "switches": Source(ATP, "atpswitches", keep_whole),
        "quotas": Source(ATP, "atptenantquotas", keep_whole),
        "namespaces": Source("api/v1", "namespaces", keep_labels, metadata_only=True),
        # Metadata alone, which kopf cannot watch: 5,000 whole nodes take 120 MB and 11 s of it, these 10 MB and 0.7 s.
        "nodes": Source("api/v1", "nodes", keep_labels, metadata_only=True),
        "pods": Source("api/v1", "pods", keep_pod, LABEL_JOB),
        # Of the installation's own namespace: anybody may label a pod in another.
        "switch_pods": Source("api/v1", "pods", keep_pod, "=".join(SOFTSWITCH_LABEL), namespace=settings.namespace),
    }


class Controller:
    """Holds the caches and the agents' sessions, and runs the passes."""

    def __init__(self, settings: Settings, kube: Kube, metrics: Metrics) -> None:
        self.settings = settings
        self.kube = kube
        self.metrics = metrics
        sources = _sources(settings)
        self.stores = {kind: Store() for kind in sources}
        self._keep = {kind: source.keep for kind, source in sources.items()}
        self._watchers = {kind: Watcher(kube, source, self.stores[kind], self.wake) for kind, source in sources.items()}
        self.sessions: dict[str, tuple[AgentSession, asyncio.Task[None]]] = {}
        self._wake = asyncio.Event()
        self._leading = False
        self._listed_at = -RELIST_SECONDS
        self._passed_at = time.monotonic()
        self._turn = 0
        self._parsed: dict[str, Job] = {}
        self._failures = Backoff(*FAILED_SECONDS)  # by ATPJob uid, Unix seconds
        self._creations = Backoff(*CREATE_SECONDS)  # the same, of pods that could not be made
        self._missed: set[str] = set()  # UIDs of jobs for which something went wrong in this pass
        self._create_errors: dict[str, str] = {}
        self._services: set[str] = set()  # UIDs of jobs whose Service is there
        self._draining: set[asyncio.Task[None]] = set()
        self.intruders = Intruders(kube, metrics, self._tell)
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

    def seen(self, kind: str, event: str | None, raw: Object) -> None:
        """An event of kopf's watches; see FED_BY_KOPF."""
        self._watchers[kind].see(event, raw)

    def _put(self, kind: str, raw: Object) -> None:
        """An object as the API server answered it."""
        kept = self._keep[kind](raw)
        if kept is not None:
            self.stores[kind].put(kept)

    def _lead(self, leading: bool) -> None:
        self._leading = leading
        self.metrics.leader.set(1 if leading else 0)
        if leading:
            self._listed_at = -RELIST_SECONDS  # a new leader looks at everything before it acts
        self.wake()

    def problem(self) -> str:
        """What is wrong with this replica, for the health check; empty when nothing is."""
        stuck = time.monotonic() - self._passed_at
        return f"no pass for {stuck:.0f} s" if stuck > 120 else ""

    # --- the loop --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled."""
        election = asyncio.create_task(self.election.run())
        watches = [
            asyncio.create_task(watcher.run()) for kind, watcher in self._watchers.items() if kind not in FED_BY_KOPF
        ]
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
                self._passed_at = time.monotonic()
                for task in (election, *watches):
                    if task.done():
                        task.result()
                if not self.election.leading:
                    self._stop_sessions()
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
                took = time.monotonic() - self._passed_at
        finally:
            self._stop_sessions()
            for task in (election, *watches):
                task.cancel()
            await asyncio.gather(election, *watches, return_exceptions=True)

    async def _list_all(self) -> None:
        for watcher in self._watchers.values():
            await watcher.list()
        self._listed_at = time.monotonic()

    def _view(self, name: str) -> AgentView:
        entry = self.sessions.get(name)
        return entry[0].view if entry else AgentView()

    def _switches(self) -> dict[str, Switch]:
        labels = {key[1]: (node["metadata"].get("labels") or {}) for key, node in self.stores["nodes"].items.items()}
        return {
            key[1]: Switch.from_object(raw, labels, self._view(key[1]))
            for key, raw in sorted(self.stores["switches"].items.items())
        }

    def _jobs(self) -> list[Job]:
        """All jobs; each is read once a version."""
        before, self._parsed = self._parsed, {}
        for raw in self.stores["jobs"].items.values():
            uid = raw["metadata"].get("uid", "")
            job = before.get(uid)
            self._parsed[uid] = job if job is not None and job.raw is raw else Job.from_object(raw)
        return list(self._parsed.values())

    def snapshot(self, now: float) -> Snapshot:
        """What is known now."""
        jobs = self._jobs()
        uids = {job.uid: job for job in jobs}
        self._create_errors = {uid: text for uid, text in self._create_errors.items() if uid in uids}
        self._services &= uids.keys()
        for backoff in (self._failures, self._creations):
            backoff.keep(set(uids))
        pods: dict[str, list[Pod]] = {}
        for raw in self.stores["pods"].items.values():
            owner = uids.get(next((o["uid"] for o in raw["metadata"]["ownerReferences"]), ""))
            # An owner reference is what the pod's maker wrote: it counts in the job's own namespace only.
            if owner is not None and owner.namespace == raw["metadata"].get("namespace"):
                pods.setdefault(owner.key, []).append(Pod.from_object(raw))
        return Snapshot(
            jobs=jobs,
            pods=pods,
            switches=self._switches(),
            quotas=[Quota.from_object(raw) for raw in self.stores["quotas"].items.values()],
            create_errors=dict(self._create_errors),
            namespaces={
                key[1]: {"kubernetes.io/metadata.name": key[1], **(raw["metadata"].get("labels") or {})}
                for key, raw in self.stores["namespaces"].items.items()
            },
            held_back={str(uid): (f.why, f.until) for uid, f in self._failures.all().items() if f.until > now},
        )

    async def _pass(self) -> float | None:
        """One look at everything; when to look again, Unix seconds, or None."""
        if time.monotonic() - self._listed_at > RELIST_SECONDS:
            await self._list_all()
        if self.settings.manage_software_switches:
            await self._manage_software_switches()
        self._follow_switches()
        await self._quote_fractions()
        now = time.time()
        snapshot = self.snapshot(now)
        # In a thread: webhooks and probes are answered meanwhile.
        plan = await asyncio.to_thread(plan_cluster, snapshot, self.settings.sidecar, self.settings.limits, now)
        # Order matters for a crash in between: first who holds what, then that the job has it, then the switches.
        for name, status in plan.switch_statuses.items():
            raw = snapshot.switches[name].raw
            await self._write_status("switches", "atpswitches", raw, status)
            for event in plan.switch_events[name]:
                await self._tell("ATPSwitch", raw, event)
        for quota in snapshot.quotas:
            await self._write_status("quotas", "atptenantquotas", quota.raw, plan.quota_statuses[quota.name])
        end = time.monotonic() + PASS_SECONDS
        self._missed.clear()
        await self._in_turn([p for p in plan.jobs if p.moves], self._write, math.inf)
        self._check_leading()
        switches = self._switches()
        # As written: a job whose status write failed, or that somebody else wrote since, is not programmed.
        jobs = [job for job in self._jobs() if not doubt(job, switches, snapshot.pods.get(job.key, ()))]
        vouched_for = [job for job in jobs if vouched(job, switches, snapshot.pods.get(job.key, ()))]
        for name, (session, _) in self.sessions.items():
            if name in switches:
                session.want(desired_jobs(switches[name], jobs), desired_guards(switches[name], vouched_for))
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
        for backoff in (self._failures, self._creations):
            wakes += [failure.until for failure in backoff.all().values() if failure.until > now]
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
            self._put("jobs", raw)
        except ApiError as gone:
            if gone.code == 404:
                self.stores["jobs"].drop(job.raw)
                return
        except FAILURES as also:
            log.debug("ATPJob %s: %s", job.key, also)
        if isinstance(error, ApiError) and error.code in (409, 422) and raw and _tested(raw) != _tested(job.raw):
            self.wake()
            return
        blame = isinstance(error, ApiError) and 400 <= error.code < 500 and error.code not in (401, 403, 408, 409, 429)
        why = f"the API server does not take what the operator writes: {error}"[:1024]
        failure = self._failures.fail(job.uid, why, time.time(), None if blame else BUSY_SECONDS)
        log.warning("ATPJob %s: %s; tried again in %.0f s", job.key, error or repr(error), failure.until - time.time())
        self.metrics.job_errors.inc()

    # --- switches and their agents -----------------------------------------------------------------------------------

    def _follow_switches(self) -> None:
        wanted = {}
        for (_, name), raw in self.stores["switches"].items.items():
            agent = (raw.get("spec") or {}).get("agent") or {}
            if not raw["metadata"].get("deletionTimestamp"):
                wanted[name] = (agent.get("address", ""), agent.get("serverName", ""))
        for name in list(self.sessions):
            session, task = self.sessions[name]
            if wanted.get(name) != (session.address, session.server_name) or task.done():
                del self.sessions[name]
                if name in wanted or task.done():
                    task.cancel()
                else:
                    self._drain(session, task)
        for name, (address, server_name) in wanted.items():
            if name not in self.sessions:
                session = AgentSession(
                    name,
                    address,
                    server_name,
                    self.settings.agent_tls_dir,
                    self.settings.identity,
                    self.wake,
                    self.intruders.seen,
                )
                task = asyncio.create_task(session.run(), name=f"agent-{name}")
                self.sessions[name] = (session, task)

    def _drain(self, session: AgentSession, task: asyncio.Task[None]) -> None:
        """An ATPSwitch was deleted: its switch is told, if it listens, to hold nothing."""

        async def last_words() -> None:
            session.want([], [])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(session.settled(), 10.0)
            task.cancel()

        drain = asyncio.create_task(last_words())
        self._draining.add(drain)
        drain.add_done_callback(self._draining.discard)

    def _stop_sessions(self) -> None:
        for _, task in self.sessions.values():
            task.cancel()
        self.sessions.clear()

    async def _manage_software_switches(self) -> None:
        """An ATPSwitch for every node with a ready software switch; gone when the node is."""
        key, value = SOFTSWITCH_LABEL
        wanted: dict[str, Object] = {}
        present: set[str] = set()
        for raw in self.stores["switch_pods"].items.values():
            if (raw["metadata"].get("labels") or {}).get(key) != value:
                continue
            node, status = (raw.get("spec") or {}).get("nodeName") or "", raw.get("status") or {}
            if not node:
                continue
            present.add(node)
            ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ())
            if ready and status.get("hostIP") and not raw["metadata"].get("deletionTimestamp"):
                wanted[node] = {
                    "type": "Software",
                    "nodes": [node],
                    "agent": {
                        "address": f"{status['hostIP']}:{self.settings.agent_port}",
                        "serverName": self.settings.agent_server_name,
                    },
                }
        nodes = {name for _, name in self.stores["nodes"].items}
        store = self.stores["switches"]
        for node, spec in wanted.items():
            name = f"software-{node}"
            old = store.items.get(("", name))
            if old is None:
                body = {
                    "apiVersion": API_VERSION,
                    "kind": "ATPSwitch",
                    "metadata": {"name": name, "labels": {LABEL_MANAGED_BY: "operator"}},
                    "spec": spec,
                }
                self._put("switches", await self.kube.create(path(ATP, "atpswitches"), body))
                log.info("ATPSwitch %s made for the software switch of node %s", name, node)
            elif (old["metadata"].get("labels") or {}).get(LABEL_MANAGED_BY) == "operator" and any(
                (old.get("spec") or {}).get(part) != spec[part] for part in spec
            ):
                self._put("switches", await self.kube.merge(path(ATP, "atpswitches", name=name), {"spec": spec}))
        for (_, name), old in list(store.items.items()):
            managed = (old["metadata"].get("labels") or {}).get(LABEL_MANAGED_BY) == "operator"
            below = set((old.get("spec") or {}).get("nodes") or ())
            if managed and not below & nodes and not below & present and not old["metadata"].get("deletionTimestamp"):
                await self.kube.delete(path(ATP, "atpswitches", name=name), uid=old["metadata"]["uid"])
                log.info("ATPSwitch %s removed: its node is gone", name)

    # --- carrying out ------------------------------------------------------------------------------------------------

    async def _write_status(self, kind: str, plural: str, raw: Object, status: Object) -> None:
        if (raw.get("status") or {}) == status:
            return
        namespace, name = key_of(raw)
        body = {**raw, "status": status}
        try:
            answer = await self.kube.replace(path(ATP, plural, namespace or None, name, "status"), body)
        except ApiError as error:
            if error.code == 404:
                self.stores[kind].drop(raw)
                return
            raise
        self._put(kind, answer)

    async def _quote_fractions(self) -> None:
        """Writes a `spec.scale` that was stored as a fraction as the schema wants it now, so that updates work."""
        for raw in list(self.stores["jobs"].items.values()):
            text = stored_fraction((raw.get("spec") or {}).get("scale"))
            if text is None:
                continue
            namespace, name = key_of(raw)
            body = {"metadata": {"resourceVersion": raw["metadata"]["resourceVersion"]}, "spec": {"scale": text}}
            try:
                self._put("jobs", await self.kube.merge(path(ATP, "atpjobs", namespace, name), body))
                log.info("ATPJob %s/%s: spec.scale is now written as %r", namespace, name, text)
            except FAILURES as error:
                # Where the definition is still an earlier one, the number is right as it is.
                log.debug("ATPJob %s/%s: %s", namespace, name, error)

    def _differs(self, plan: JobPlan) -> bool:
        """True when the job's status is to be written; of a job that is left alone, once a failure."""
        failure = self._failures.all().get(plan.job.uid)
        if plan.held_back and failure is not None and failure.told:
            return False
        return bool(plan.job.distrust) or plan.job.raw.get("status") != plan.status.to_dict(plan.job.spec.workers)

    async def _write(self, plan: JobPlan) -> None:
        """Status, and the events that go with it."""
        if not plan.remove_finalizer:
            await self._write_job_status(plan)
        for event in plan.events:
            await self._tell("ATPJob", plan.job.raw, event)

    async def _write_job_status(self, plan: JobPlan) -> None:
        """Only if it is still the one that was planned from, whatever else of the object changed meanwhile."""
        job, old = plan.job, plan.job.raw.get("status") or {}
        status = plan.status.to_dict(job.spec.workers)
        if old == status and not job.distrust:
            return
        operations: list[Object] = [{"op": "test", "path": "/metadata/uid", "value": job.uid}]
        if not job.distrust:
            operations += [{"op": "test", "path": f"/status/{key}", "value": old[key]} for key in TESTED if key in old]
        if plan.moves:
            # What it gets was weighed by what it asked for.
            operations.append({"op": "test", "path": "/metadata/generation", "value": job.generation})
        operations.append({"op": "add", "path": "/status", "value": status})
        try:
            answer = await self.kube.patch(path(ATP, "atpjobs", job.namespace, job.name, "status"), operations)
        except ApiError as error:
            if error.code != 404:
                raise
            self.stores["jobs"].drop(job.raw)
            return
        self._put("jobs", answer)

    async def _finish(self, plan: JobPlan) -> None:
        """All but what `_write` did already."""
        job = plan.job
        failure = self._failures.all().get(job.uid)
        if plan.held_back and failure is not None:
            failure.told = True
        if plan.add_finalizer:
            await self._finalizers(job, add=True)
        if not plan.moves:
            await self._write(plan)
        if plan.held_back:
            return
        await self._some(
            [
                partial(self.kube.delete, path("api/v1", "pods", job.namespace, pod.name), uid=pod.uid)
                for pod in plan.delete_pods
            ]
        )
        if plan.create and not self._creations.waits(job.uid, time.time()):
            await self._create(plan)
        await self._some([partial(self._annotate, job, name, changes) for name, changes in plan.annotate.items()])
        if plan.delete_job:
            log.info("ATPJob %s: ttlSecondsAfterFinished is over, deleted", job.key)
            await self.kube.delete(path(ATP, "atpjobs", job.namespace, job.name), uid=job.uid)
        if plan.remove_finalizer:
            await self._finalizers(job, add=False)
            log.info("ATPJob %s: released", job.key)
        self._failures.done(job.uid)

    async def _some(self, calls: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """Make the calls for one job, a few at once; what is more than a pass allows waits for the next."""
        gate = asyncio.Semaphore(CALLS_AT_ONCE)

        async def one(call: Callable[[], Awaitable[None]]) -> None:
            async with gate:
                await call()

        if len(calls) > OBJECTS_A_PASS:
            self.wake()
        results = await asyncio.gather(*(one(call) for call in calls[:OBJECTS_A_PASS]), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _annotate(self, job: Job, name: str, changes: dict[str, str]) -> None:
        try:
            answer = await self.kube.merge(
                path("api/v1", "pods", job.namespace, name), {"metadata": {"annotations": changes}}
            )
        except ApiError as error:
            if error.code != 404:
                raise
            return
        self._put("pods", answer)

    async def _finalizers(self, job: Job, *, add: bool) -> None:
        url = path(ATP, "atpjobs", job.namespace, job.name)
        current = list(job.raw["metadata"].get("finalizers") or ())
        wanted = [*current, FINALIZER] if add else [f for f in current if f != FINALIZER]
        body = {"metadata": {"resourceVersion": job.raw["metadata"]["resourceVersion"], "finalizers": wanted}}
        try:
            answer = await self.kube.merge(url, body)
        except ApiError as error:
            if error.code == 404 and not add:
                return
            if error.code != 409:
                raise
            # Somebody else changed the object: once more with what it is now.
            raw = await self.kube.get(url)
            if raw["metadata"].get("uid") != job.uid:
                raise
            current = list(raw["metadata"].get("finalizers") or ())
            wanted = [*current, FINALIZER] if add else [f for f in current if f != FINALIZER]
            if wanted == current or (add and FINALIZER in current):
                self._put("jobs", raw)
                return
            body = {"metadata": {"resourceVersion": raw["metadata"]["resourceVersion"], "finalizers": wanted}}
            answer = await self.kube.merge(url, body)
        self._put("jobs", answer)

    async def _create(self, plan: JobPlan) -> None:
        """Make what is missing. The templates are read now, for this job alone."""
        job = plan.job
        missing = [w for w in plan.create if w.kind != "Service" or job.uid not in self._services]
        if not missing:
            return
        whole = await self.kube.get(path(ATP, "atpjobs", job.namespace, job.name))
        if whole["metadata"].get("uid") != job.uid or whole["metadata"].get("generation") != job.generation:
            self._put("jobs", whole)
            self.wake()
            return
        gate = asyncio.Semaphore(CALLS_AT_ONCE)
        refused = ""

        async def one(wanted: Wanted) -> str:
            async with gate:
                return "" if refused else await self._create_one(plan, wanted, whole.get("spec") or {})

        # The Service first: a pod that starts looks up names in it.
        for batch in ([w for w in missing if w.kind == "Service"], [w for w in missing if w.kind == "Pod"]):
            if len(batch) > OBJECTS_A_PASS:
                self.wake()
            for start in range(0, min(len(batch), OBJECTS_A_PASS), CALLS_AT_ONCE):
                said = await asyncio.gather(*(one(w) for w in batch[start : start + CALLS_AT_ONCE]))
                refused = refused or next(filter(None, said), "")
        if refused:
            await self._create_failed(plan, refused)
        else:
            self._creations.done(job.uid)
            if self._create_errors.pop(job.uid, None) is not None:
                self.wake()

    async def _create_one(self, plan: JobPlan, wanted: Wanted, spec: Object) -> str:
        """Make one object; what keeps it from being made, for people, or nothing."""
        job, plural = plan.job, {"Pod": "pods", "Service": "services"}[wanted.kind]
        try:
            body = manifest(wanted, job, spec, plan.status.epoch, self.settings.sidecar)
            answer = await self.kube.create(path("api/v1", plural, job.namespace), body)
        except InjectionError as error:
            return f"{wanted.kind} {wanted.name}: {error}"
        except ApiError as error:
            if error.code == 409 and error.reason == "AlreadyExists":
                return await self._adopt(job, plural, wanted.name)
            # Quota, PodSecurity, a webhook or a bad template: the words of the API server tell the user what to do.
            return f"{wanted.kind} {wanted.name} was refused by the API server: {error.message or error}"
        if wanted.kind == "Pod":
            self._put("pods", answer)
        else:
            self._services.add(job.uid)
        return ""

    async def _adopt(self, job: Job, plural: str, name: str) -> str:
        """The object is there already: ours from before the cache knew it (nothing to say), or somebody else's."""
        raw = await self.kube.get(path("api/v1", plural, job.namespace, name))
        owners = [o.get("uid") for o in raw["metadata"].get("ownerReferences") or ()]
        if job.uid in owners:
            if plural == "pods":
                self._put("pods", raw)
            else:
                self._services.add(job.uid)
            return ""
        kind = plural[:-1].capitalize()
        ours_once = any(o.get("kind") == "ATPJob" for o in raw["metadata"].get("ownerReferences") or ())
        return (
            f"waits until {kind} {name} of an earlier ATPJob of this name is gone"
            if raw["metadata"].get("deletionTimestamp") or ours_once
            else f"{kind} {name} exists in namespace {job.namespace} and is not this job's: delete it or rename the job"
        )

    async def _create_failed(self, plan: JobPlan, message: str) -> None:
        job = plan.job
        self._creations.fail(job.uid, message, time.time())
        if self._create_errors.get(job.uid) != message:
            log.warning("ATPJob %s: %s", job.key, message)
            await self._tell("ATPJob", job.raw, Event("Warning", "PodCreateFailed", message))
            self._create_errors[job.uid] = message
            self.wake()  # the next plan puts it into the status

    async def _tell(self, kind: str, raw: Object, event: Event) -> None:
        """A core/v1 Event on an object; the same said again raises the count of the one there is."""
        meta = raw["metadata"]
        key = hashlib.sha256(f"{meta['uid']}{event.reason}{event.message}".encode()).hexdigest()[:16]
        # The name has 253 characters at most. Events of cluster-wide objects are in namespace default.
        name, namespace = f"{meta['name'][:200].rstrip('.-')}.{key}", meta.get("namespace") or "default"
        now = rfc3339(time.time())
        version = "v1" if kind == "Pod" else API_VERSION
        involved = {"apiVersion": version, "kind": kind, "name": meta["name"], "uid": meta["uid"]}
        if meta.get("namespace"):
            involved["namespace"] = namespace
        body: Object = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": involved,
            "type": event.kind,
            "reason": event.reason,
            "message": event.message[:1024],
            "source": {"component": "atp-operator"},
            "reportingComponent": "atp.dev/operator",
            "reportingInstance": self.settings.identity,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        log.log(
            logging.WARNING if event.kind == "Warning" else logging.INFO,
            "%s %s: %s: %s",
            kind,
            "/".join(filter(None, key_of(raw))),
            event.reason,
            event.message,
        )
        try:
            await self.kube.create(path("api/v1", "events", namespace), body)
        except ApiError as error:
            if error.code == 409:
                try:
                    old = await self.kube.get(path("api/v1", "events", namespace, name))
                    change = {"count": int(old.get("count") or 1) + 1, "lastTimestamp": now}
                    await self.kube.merge(path("api/v1", "events", namespace, name), change)
                except ApiError as again:
                    log.warning("event not written: %s", again)
            else:
                log.warning("event not written: %s", error)
