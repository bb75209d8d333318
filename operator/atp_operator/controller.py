# SPDX-License-Identifier: Apache-2.0
"""The loop: look at everything, plan, carry out. One pass at a time, only on the leader."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import time
from collections.abc import Mapping

from . import (
    API_VERSION,
    FINALIZER,
    LABEL_JOB,
    LABEL_MANAGED_BY,
    LABEL_ROLE,
    ROLE_PARAMETER_SERVER,
    ROLE_WORKER,
)
from .agent import AgentSession
from .cache import Store, key_of
from .desired import desired_jobs
from .injection import InjectionError
from .kube import ATP, ApiError, Kube, path
from .leader import LeaderElection
from .lifecycle import JobPlan
from .metrics import Metrics
from .model import AgentView, Event, Job, Object, Pod, Quota, Switch, rfc3339, stored_fraction
from .planning import Snapshot, plan_cluster
from .pods import job_pods
from .settings import Settings

log = logging.getLogger(__name__)

SOFTSWITCH_LABEL = ("app.kubernetes.io/component", "softswitch")
DEBOUNCE_SECONDS = 0.1
RELIST_SECONDS = 300.0

# Kind -> (API root, plural, label selector of the list). Pods are listed twice, by what the operator cares for.
SOURCES: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "jobs": ((ATP, "atpjobs", ""),),
    "switches": ((ATP, "atpswitches", ""),),
    "quotas": ((ATP, "atptenantquotas", ""),),
    "namespaces": (("api/v1", "namespaces", ""),),
    "nodes": (("api/v1", "nodes", ""),),
    "pods": (("api/v1", "pods", LABEL_JOB), ("api/v1", "pods", "=".join(SOFTSWITCH_LABEL))),
}


class Controller:
    """Holds the caches and the agents' sessions, and runs the passes."""

    def __init__(self, settings: Settings, kube: Kube, metrics: Metrics) -> None:
        self.settings = settings
        self.kube = kube
        self.metrics = metrics
        self.stores = {kind: Store() for kind in SOURCES}
        self.sessions: dict[str, tuple[AgentSession, asyncio.Task[None]]] = {}
        self._wake = asyncio.Event()
        self._leading = False
        self._listed_at = -RELIST_SECONDS
        self._passed_at = time.monotonic()
        self._create_errors: dict[str, str] = {}
        self._services: set[str] = set()  # UIDs of jobs whose Service is there
        self._draining: set[asyncio.Task[None]] = set()
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

    def seen(self, kind: str, event: str | None, obj: Object) -> None:
        """A watch event (or a listed object) of one kind."""
        store = self.stores[kind]
        if event == "DELETED":
            store.drop(obj)
            self.wake()
        elif store.put(obj):
            self.wake()

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

    async def try_pods(self, raw: Object) -> tuple[list[str], list[str]]:
        """Ask the API server whether it would take the job's pods, without making them.

        Returns (what it can never take, what it would not take now). A template with a mistake is told at once, to
        the person who made it, instead of holding quota until the job gives up.
        """
        refused: list[str] = []
        doubts: list[str] = []
        try:
            pods = job_pods(Job.from_object(raw), 1, self.settings.sidecar)
        except (InjectionError, KeyError, ValueError) as error:
            return [str(error)], []
        fields = {ROLE_PARAMETER_SERVER: "spec.parameterServers.template", ROLE_WORKER: "spec.workers.template"}
        for role, where in fields.items():
            pod = next(p for p in pods if p["metadata"]["labels"][LABEL_ROLE] == role)  # the others differ in names
            pod["metadata"].pop("name")
            pod["metadata"].pop("ownerReferences")
            pod["metadata"]["generateName"] = "atp-dry-run-"
            url = path("api/v1", "pods", raw["metadata"]["namespace"])
            try:
                query = {"dryRun": "All", "fieldValidation": "Strict"}
                await self.kube.request("POST", url, pod, query=query, timeout=5.0)
            except ApiError as error:
                text = f"{where}: {error.message or error}"
                (refused if error.code in (400, 422) else doubts).append(text)
            except (OSError, TimeoutError) as error:
                log.warning("dry run of the pods of %s: %s", raw["metadata"].get("name"), error)
        return refused, doubts

    # --- the loop --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled."""
        election = asyncio.create_task(self.election.run())
        try:
            wait = 0.0
            while True:
                try:
                    await asyncio.wait_for(self._wake.wait(), wait)
                    await asyncio.sleep(DEBOUNCE_SECONDS)
                except TimeoutError:
                    pass
                self._wake.clear()
                self._passed_at = time.monotonic()
                if election.done():
                    election.result()
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
        finally:
            self._stop_sessions()
            election.cancel()
            await asyncio.gather(election, return_exceptions=True)

    async def _list_all(self) -> None:
        for kind, sources in SOURCES.items():
            objects: list[Object] = []
            versions = []
            for root, plural, selector in sources:
                query = {"labelSelector": selector} if selector else None
                items, version = await self.kube.list(path(root, plural), query)
                objects += items
                versions.append(version)
            self.stores[kind].fill(objects, min(versions))
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
        jobs = []
        for raw in self.stores["jobs"].items.values():
            try:
                jobs.append(Job.from_object(raw))
            except (KeyError, TypeError, ValueError) as error:
                # Only a status that somebody else wrote can be unreadable. Acting without knowing what the job holds
                # could give its job ID away, so nothing is done until it is repaired.
                raise RuntimeError(
                    f"ATPJob {'/'.join(key_of(raw))} has an unreadable spec or status: {error!r}"
                ) from error
        return jobs

    def snapshot(self) -> Snapshot:
        """What is known now."""
        jobs = self._jobs()
        uids = {job.uid: job.key for job in jobs}
        self._create_errors = {uid: text for uid, text in self._create_errors.items() if uid in uids}
        self._services &= uids.keys()
        pods: dict[str, list[Pod]] = {}
        for raw in self.stores["pods"].items.values():
            owner = next((o["uid"] for o in raw["metadata"].get("ownerReferences") or () if o.get("controller")), "")
            if owner in uids:
                pods.setdefault(uids[owner], []).append(Pod.from_object(raw))
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
        )

    async def _pass(self) -> float | None:
        if time.monotonic() - self._listed_at > RELIST_SECONDS:
            await self._list_all()
        if self.settings.manage_software_switches:
            await self._manage_software_switches()
        self._follow_switches()
        await self._quote_fractions()
        snapshot = self.snapshot()
        plan = plan_cluster(snapshot, self.settings.sidecar, self.settings.limits, time.time())
        # Order matters for a crash in between: first who holds what, then that the job has it, then the switches.
        for name, status in plan.switch_statuses.items():
            raw = snapshot.switches[name].raw
            await self._write_status("switches", "atpswitches", raw, status)
            for event in plan.switch_events[name]:
                await self._tell("ATPSwitch", raw, event)
        failures: list[ApiError] = []
        written: list[tuple[JobPlan, Object]] = []
        for entry in plan.write_order:
            self._check_leading()
            if failures and entry.gains:
                continue
            try:
                written.append((entry, await self._write_job(entry)))
            except ApiError as error:
                failures.append(error)
        for entry, raw in written:
            self._check_leading()
            try:
                await self._carry_out(entry, raw)
            except ApiError as error:
                log.warning("ATPJob %s: %s", entry.job.key, error)
                failures.append(error)
        for quota in snapshot.quotas:
            await self._write_status("quotas", "atptenantquotas", quota.raw, plan.quota_statuses[quota.name])
        self._check_leading()
        jobs = self._jobs()  # as written: a job whose status write failed is not programmed
        switches = self._switches()
        for name, (session, _) in self.sessions.items():
            if name in switches:
                session.want(desired_jobs(switches[name], jobs))
        self.metrics.record(snapshot, plan)
        if failures:
            raise failures[0]
        if self._create_errors:
            return min(time.time() + 2.0, plan.wake_at or math.inf)
        return plan.wake_at

    def _check_leading(self) -> None:
        if not self.election.leading:
            raise RuntimeError("leadership was lost during the pass")

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
                    name, address, server_name, self.settings.agent_tls_dir, self.settings.identity, self.wake
                )
                task = asyncio.create_task(session.run(), name=f"agent-{name}")
                self.sessions[name] = (session, task)

    def _drain(self, session: AgentSession, task: asyncio.Task[None]) -> None:
        """An ATPSwitch was deleted: its switch is told, if it listens, to hold nothing."""

        async def last_words() -> None:
            session.want([])
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
        for raw in self.stores["pods"].items.values():
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
                store.put(await self.kube.create(path(ATP, "atpswitches"), body))
                log.info("ATPSwitch %s made for the software switch of node %s", name, node)
            elif (old["metadata"].get("labels") or {}).get(LABEL_MANAGED_BY) == "operator" and any(
                (old.get("spec") or {}).get(part) != spec[part] for part in spec
            ):
                store.put(await self.kube.merge(path(ATP, "atpswitches", name=name), {"spec": spec}))
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
        self.stores[kind].put(answer)

    async def _quote_fractions(self) -> None:
        """Writes a `spec.scale` that was stored as a fraction as the schema wants it now, so that updates work."""
        for raw in list(self.stores["jobs"].items.values()):
            text = stored_fraction((raw.get("spec") or {}).get("scale"))
            if text is None:
                continue
            namespace, name = key_of(raw)
            body = {"metadata": {"resourceVersion": raw["metadata"]["resourceVersion"]}, "spec": {"scale": text}}
            try:
                self.stores["jobs"].put(await self.kube.merge(path(ATP, "atpjobs", namespace, name), body))
                log.info("ATPJob %s/%s: spec.scale is now written as %r", namespace, name, text)
            except ApiError as error:
                # Where the definition is still an earlier one, the number is right as it is.
                log.debug("ATPJob %s/%s: %s", namespace, name, error)

    async def _write_job(self, plan: JobPlan) -> Object:
        """Finalizer and status; the object as it is then."""
        raw = plan.job.raw
        if plan.add_finalizer:
            raw = await self._finalizers(raw, add=True)
        if not plan.remove_finalizer:
            await self._write_status("jobs", "atpjobs", raw, plan.status.to_dict(plan.job.spec.workers))
        return raw

    async def _carry_out(self, plan: JobPlan, raw: Object) -> None:
        job = plan.job
        for event in plan.events:
            await self._tell("ATPJob", job.raw, event)
        for pod in plan.delete_pods:
            await self.kube.delete(path("api/v1", "pods", job.namespace, pod.name), uid=pod.uid)
        await self._create(plan)
        for name, changes in plan.annotate.items():
            try:
                answer = await self.kube.merge(
                    path("api/v1", "pods", job.namespace, name),
                    {"metadata": {"annotations": changes}},
                )
                self.stores["pods"].put(answer)
            except ApiError as error:
                if error.code != 404:
                    raise
        if plan.delete_job:
            log.info("ATPJob %s: ttlSecondsAfterFinished is over, deleted", job.key)
            await self.kube.delete(path(ATP, "atpjobs", job.namespace, job.name), uid=job.uid)
        if plan.remove_finalizer:
            await self._finalizers(raw, add=False)
            log.info("ATPJob %s: released", job.key)

    async def _finalizers(self, raw: Object, *, add: bool) -> Object:
        namespace, name = key_of(raw)
        current = list(raw["metadata"].get("finalizers") or ())
        wanted = [*current, FINALIZER] if add else [f for f in current if f != FINALIZER]
        body = {"metadata": {"resourceVersion": raw["metadata"]["resourceVersion"], "finalizers": wanted}}
        try:
            answer = await self.kube.merge(path(ATP, "atpjobs", namespace, name), body)
        except ApiError as error:
            if error.code == 404 and not add:
                return raw
            raise
        self.stores["jobs"].put(answer)
        return answer

    async def _create(self, plan: JobPlan) -> None:
        job = plan.job
        for body in plan.create:
            kind, name = body["kind"], body["metadata"]["name"]
            plural = {"Pod": "pods", "Service": "services"}[kind]
            if kind == "Service" and job.uid in self._services:
                continue
            try:
                answer = await self.kube.create(path("api/v1", plural, job.namespace), body)
            except ApiError as error:
                if error.code == 409 and error.reason == "AlreadyExists":
                    if await self._adopt(plan, plural, name):
                        continue
                    return
                # Quota, PodSecurity, a webhook or a bad template: the words of the API server tell the user what to do.
                await self._create_failed(
                    plan, f"{kind} {name} was refused by the API server: {error.message or error}"
                )
                return
            if kind == "Pod":
                self.stores["pods"].put(answer)
            else:
                self._services.add(job.uid)
        if plan.create and job.uid in self._create_errors:
            del self._create_errors[job.uid]
            self.wake()

    async def _adopt(self, plan: JobPlan, plural: str, name: str) -> bool:
        """The object is there already: ours from before the cache knew it (True), or somebody else's."""
        job = plan.job
        raw = await self.kube.get(path("api/v1", plural, job.namespace, name))
        owners = [o.get("uid") for o in raw["metadata"].get("ownerReferences") or ()]
        if job.uid in owners:
            if plural == "pods":
                self.stores["pods"].put(raw)
            else:
                self._services.add(job.uid)
            return True
        kind = plural[:-1].capitalize()
        ours_once = any(o.get("kind") == "ATPJob" for o in raw["metadata"].get("ownerReferences") or ())
        text = (
            f"waits until {kind} {name} of an earlier ATPJob of this name is gone"
            if raw["metadata"].get("deletionTimestamp") or ours_once
            else f"{kind} {name} exists in namespace {job.namespace} and is not this job's: delete it or rename the job"
        )
        await self._create_failed(plan, text)
        return False

    async def _create_failed(self, plan: JobPlan, message: str) -> None:
        job = plan.job
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
        involved = {"apiVersion": API_VERSION, "kind": kind, "name": meta["name"], "uid": meta["uid"]}
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
