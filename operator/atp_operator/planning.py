# SPDX-License-Identifier: Apache-2.0
"""The whole plan: (jobs, pods, switches, quotas, time) -> what every object becomes. Pure and deterministic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .allocation import Ledger
from .faults import set_switch_conditions, switch_events
from .injection import SidecarConfig
from .lifecycle import JobPlan, World, admit, step, waits_in_queue
from .model import Event, Job, Limits, Object, Pod, Quota, Switch, parse_time, rfc3339
from .quota import QuotaBook


@dataclass(frozen=True)
class Snapshot:
    """All that is known of the cluster."""

    jobs: Sequence[Job]
    pods: Mapping[str, Sequence[Pod]]  # by job key
    switches: Mapping[str, Switch]
    quotas: Sequence[Quota] = ()
    namespaces: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # name -> labels
    create_errors: Mapping[str, str] = field(default_factory=dict)  # by ATPJob uid: why its pods could not be made


@dataclass
class ClusterPlan:
    """What is to be done. Switch statuses are written first: they hold the quarantine that job statuses rely on."""

    jobs: list[JobPlan]
    switch_statuses: dict[str, Object]
    switch_events: dict[str, list[Event]]
    quota_statuses: dict[str, Object]
    wake_at: float | None

    @property
    def write_order(self) -> list[JobPlan]:
        """The order in which job statuses are to be written: those that give back before those that gain.

        What one job gains may be what another gave back in the same plan. Written in this order, and no gain after a
        write that failed, the statuses never promise the same thing twice, wherever the operator stops.
        """
        return sorted(self.jobs, key=lambda plan: plan.gains)


def plan_cluster(snapshot: Snapshot, sidecar: SidecarConfig, limits: Limits, now: float) -> ClusterPlan:
    """One reconcile of everything.

    Jobs that hold something are stepped first (what they give back rests, but ranges and quota are free at once), then
    the queue is served in order of creation. A job that does not fit does not hold up those behind it.
    """
    ordered = sorted(snapshot.jobs, key=lambda job: job.queue_key)
    ledger = Ledger(snapshot.switches, ordered, now)
    quotas = QuotaBook(snapshot.quotas, snapshot.namespaces, ordered, ledger)
    world = World(snapshot.switches, ledger, quotas, sidecar, limits, now, snapshot.create_errors)
    plans = [step(job, snapshot.pods.get(job.key, ()), world) for job in ordered]
    for plan in plans:
        if waits_in_queue(plan):
            admit(plan, world)
    wakes = [plan.wake_at for plan in plans if plan.wake_at is not None]
    switch_statuses = {}
    for name, switch in snapshot.switches.items():
        switch_statuses[name], look = switch_status(switch, plans, ledger, limits, now)
        wakes += [look] if look is not None else []
    events = {
        name: switch_events(
            (switch.raw.get("status") or {}).get("conditions") or (), switch_statuses[name]["conditions"]
        )
        for name, switch in snapshot.switches.items()
    }
    quota_statuses = {quota.name: _quota_status(quota, plans, quotas, snapshot) for quota in snapshot.quotas}
    return ClusterPlan(plans, switch_statuses, events, quota_statuses, min(wakes, default=None))


def switch_status(
    switch: Switch, plans: Sequence[JobPlan], ledger: Ledger, limits: Limits, now: float
) -> tuple[Object, float | None]:
    """`ATPSwitch.status`: who holds what, what rests, and how the agent is; and when to look again, or None."""
    view, old = switch.view, switch.raw.get("status") or {}
    entry = ledger.switches[switch.name]
    epochs = {plan.job.uid: (plan.status.epoch, plan.job.key) for plan in plans}
    holders = [
        {"jobId": job_id, "uid": uid, "epoch": epochs[uid][0], "name": epochs[uid][1]}
        for job_id, uid in sorted(entry.ids.items())
    ]
    held = {(h["jobId"], h["uid"], h["epoch"]) for h in holders}
    resting = {job_id: until for job_id, until in switch.quarantine if until > now}
    for job_id, uid, epoch, _ in switch.holders:
        if (job_id, uid, epoch) not in held:
            resting[job_id] = max(resting.get(job_id, 0.0), now + limits.quarantine)
    status: Object = {
        "observedGeneration": (switch.raw.get("metadata") or {}).get("generation", 0),
        "jobs": holders,
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
    usage: Object = {"jobs": len(holders), "reservedAggregators": reserved}
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
