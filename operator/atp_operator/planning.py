# SPDX-License-Identifier: Apache-2.0
"""The whole plan: (jobs, pods, switches, quotas, time) -> what every object becomes. Pure and deterministic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from . import reasons
from .allocation import Ledger
from .claims import doubt, seal
from .faults import set_switch_conditions, switch_events
from .injection import SidecarConfig
from .lifecycle import JobPlan, World, admit, hold_back, put_off, step, waits_in_queue
from .model import Event, Holder, Job, JobStatus, Limits, Object, Pod, Quota, Switch, parse_time, rfc3339
from .quota import QuotaBook

ADMISSIONS = 16
"""Jobs that one plan lets in at most: what a pass can write at once, so that nobody waits long for the next."""


@dataclass(frozen=True)
class Snapshot:
    """All that is known of the cluster."""

    jobs: Sequence[Job]
    pods: Mapping[str, Sequence[Pod]]  # by job key
    switches: Mapping[str, Switch]
    quotas: Sequence[Quota] = ()
    namespaces: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # name -> labels
    create_errors: Mapping[str, str] = field(default_factory=dict)  # by ATPJob uid: why its pods could not be made
    # By ATPJob uid: what failed with it, and until when (Unix seconds) it is left alone.
    held_back: Mapping[str, tuple[str, float]] = field(default_factory=dict)


@dataclass
class ClusterPlan:
    """What is to be done. Switch statuses are written first: they say who holds what, which job statuses rely on.

    The jobs may be written in any order, and any of them may fail: see `Ledger`.
    """

    jobs: list[JobPlan]
    switch_statuses: dict[str, Object]
    switch_events: dict[str, list[Event]]
    quota_statuses: dict[str, Object]
    wake_at: float | None


def plan_cluster(snapshot: Snapshot, sidecar: SidecarConfig, limits: Limits, now: float) -> ClusterPlan:
    """One reconcile of everything.

    Jobs that hold something are stepped first, then the queue is served: namespaces in turn, those that hold the fewest
    jobs first, and within a namespace in order of creation. A job that does not fit does not hold up those behind it.
    One that fails, or whose status is somebody else's, is dealt with alone.
    """
    ordered = [_believed(job, snapshot) for job in sorted(snapshot.jobs, key=lambda job: job.queue_key)]
    ledger = Ledger(snapshot.switches, ordered, now)
    quotas = QuotaBook(snapshot.quotas, snapshot.namespaces, ordered, ledger)
    world = World(snapshot.switches, ledger, quotas, sidecar, limits, now, snapshot.create_errors)
    plans = [_guarded_step(job, snapshot, world) for job in ordered]
    admitted = 0
    for plan in in_turn(plans):
        if admitted < ADMISSIONS:
            admitted += admit(plan, world)
        else:
            put_off(plan, world)
    wakes = [plan.wake_at for plan in plans if plan.wake_at is not None]
    if any(plan.moves for plan in plans):
        wakes.append(now)  # what was given back is for others once the statuses say so
    switch_statuses, claims = {}, _claims(plans)
    for name, switch in snapshot.switches.items():
        switch_statuses[name], look = switch_status(switch, plans, claims, ledger, limits, now)
        wakes += [look] if look is not None else []
    events = {
        name: switch_events(
            (switch.raw.get("status") or {}).get("conditions") or (), switch_statuses[name]["conditions"]
        )
        for name, switch in snapshot.switches.items()
    }
    quota_statuses = {quota.name: _quota_status(quota, plans, quotas, snapshot) for quota in snapshot.quotas}
    return ClusterPlan(plans, switch_statuses, events, quota_statuses, min(wakes, default=None))


def _believed(job: Job, snapshot: Snapshot) -> Job:
    """The job with the status that it may be taken to have: a fresh one when somebody else wrote it."""
    why = doubt(job, snapshot.switches, snapshot.pods.get(job.key, ()))
    return replace(job, status=JobStatus(), distrust=why) if why else job


def _guarded_step(job: Job, snapshot: Snapshot, world: World) -> JobPlan:
    """The job's next step; a job that cannot be planned keeps what it holds, and others do not notice."""
    if job.uid in snapshot.held_back and job.deleting is None:
        why, until = snapshot.held_back[job.uid]
        if until > world.now:
            return hold_back(job, why, reasons.WRITE_FAILED, world, until)
    try:
        return step(job, snapshot.pods.get(job.key, ()), world)
    except Exception as error:  # whatever it is: it is one job's
        status = job.status
        if status.holds_switches and status.job_id is not None and job.deleting is None:
            world.ledger.take(
                job.uid, status.switches, status.job_id, status.regions, job.spec.mode == "Reserved", job.spec.request
            )
        if status.admitted and job.deleting is None:
            world.quotas.admit(job)
        return hold_back(job, f"the operator cannot plan this job: {error!r}"[:1024], reasons.PLAN_FAILED, world, None)


def in_turn(plans: Sequence[JobPlan]) -> list[JobPlan]:
    """The queue: each namespace's next job by how many it has before it, admitted ones too; ties by age."""
    before = Counter(plan.job.namespace for plan in plans if plan.status.admitted)
    turns: list[tuple[int, JobPlan]] = []
    for plan in plans:  # in order of creation
        if waits_in_queue(plan):
            turns.append((before[plan.job.namespace], plan))
            before[plan.job.namespace] += 1
    return [plan for _, plan in sorted(turns, key=lambda turn: turn[0])]


def _claims(plans: Sequence[JobPlan]) -> list[tuple[JobStatus, str, str, str]]:
    """(status, seal, UID, namespace/name) of all that holds switches after this plan, or did before it.

    A status that cannot be written stays as it was: until it is read with the new contents, its old claim holds, too.
    """
    return [
        (status, seal(plan.job, status), plan.job.uid, plan.job.key)
        for plan in plans
        for status in (plan.job.status, plan.status)
        if status.holds_switches and plan.job.deleting is None
    ]


def _ledger(name: str, claims: Sequence[tuple[JobStatus, str, str, str]]) -> list[Holder]:
    """Who holds which job ID on one switch."""
    held: dict[tuple[int, str, int, str], set[str]] = {}
    for status, sealed, uid, key in claims:
        if name in status.switches and status.job_id is not None:
            held.setdefault((status.job_id, uid, status.epoch, key), set()).add(sealed)
    return [Holder(i, uid, epoch, key, tuple(sorted(seals))) for (i, uid, epoch, key), seals in sorted(held.items())]


def switch_status(
    switch: Switch,
    plans: Sequence[JobPlan],
    claims: Sequence[tuple[JobStatus, str, str, str]],
    ledger: Ledger,
    limits: Limits,
    now: float,
) -> tuple[Object, float | None]:
    """`ATPSwitch.status`: who holds what, what rests, and how the agent is; and when to look again, or None."""
    view, old = switch.view, switch.raw.get("status") or {}
    entry = ledger.switches[switch.name]
    holders = _ledger(switch.name, claims)
    held = {(h.job_id, h.uid, h.epoch) for h in holders}
    resting = {job_id: until for job_id, until in switch.quarantine if until > now}
    for holder in switch.holders:
        if (holder.job_id, holder.uid, holder.epoch) not in held:
            resting[holder.job_id] = max(resting.get(holder.job_id, 0.0), now + limits.quarantine)
    status: Object = {
        "observedGeneration": (switch.raw.get("metadata") or {}).get("generation", 0),
        "jobs": [
            {"jobId": h.job_id, "uid": h.uid, "epoch": h.epoch, "name": h.name, "seals": list(h.seals)} for h in holders
        ],
        "quarantine": [{"jobId": i, "until": rfc3339(until + 1.0)} for i, until in sorted(resting.items())],
        "conditions": [dict(c) for c in old.get("conditions") or ()],
    }
    # A deadline is rounded up once, when it is written; one that is there already stays as it is.
    kept = {q["jobId"]: q["until"] for q in old.get("quarantine") or ()}
    for rest in status["quarantine"]:
        before = kept.get(rest["jobId"])
        if before is not None and (parse_time(before) or 0.0) >= resting[rest["jobId"]]:
            rest["until"] = before
    generation = view.generation or old.get("generation")
    if generation:
        status["generation"] = generation
    if switch.capacity is not None:
        status["capacity"] = switch.capacity.to_dict()
    reserved = sum(region.size for regions in entry.reserved.values() for region in regions)
    usage: Object = {"jobs": len(entry.ids), "reservedAggregators": reserved}
    before = old.get("inUse") or {}
    updated = parse_time(before.get("updatedTime")) or 0.0
    if view.known and (now >= updated + limits.usage_period or "aggregators" not in before):
        changed = before.get("aggregators") != view.aggregators_in_use
        usage["aggregators"] = view.aggregators_in_use
        usage["updatedTime"] = rfc3339(now) if changed or not updated else before["updatedTime"]
    else:
        usage.update({key: before[key] for key in ("aggregators", "updatedTime") if key in before})
    status["inUse"] = usage
    names = {plan.job.uid: plan.job.key for plan in plans}
    return status, set_switch_conditions(status["conditions"], switch, names, now)


def _quota_status(quota: Quota, plans: Sequence[JobPlan], book: QuotaBook, snapshot: Snapshot) -> Object:
    pending = sum(waits_in_queue(plan) and any(q.name == quota.name for q in book.of(plan.job)) for plan in plans)
    return {
        "observedGeneration": (quota.raw.get("metadata") or {}).get("generation", 0),
        "admittedJobs": len(book.members[quota.name]),
        "pendingJobs": pending,
        "usage": [
            {"switch": name, "aggregators": used}
            for name in sorted(snapshot.switches)
            if (used := book.used(quota, name))
        ],
    }
