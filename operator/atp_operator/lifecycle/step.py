# SPDX-License-Identifier: Apache-2.0
"""One job's next step, from what is there now: pending, admitted, suspended, ended or deleted."""

from __future__ import annotations

from collections.abc import Sequence

from .. import ROLE_WORKER, conditions, reasons
from ..conditions import STALLED, drop_condition
from ..model import TERMINAL_PHASES, Job, Pod
from .ending import finished
from .epoch import advance
from .network import forget_epoch, release, scale_text
from .plan import JobPlan, World, live


def step(job: Job, pods: Sequence[Pod], world: World) -> JobPlan:
    """The next step of a job, all but its admission from the queue (see `admit`)."""
    plan = JobPlan(job, job.status.copy())
    status = plan.status
    status.observed_generation = job.generation
    stalled = status.condition(STALLED)
    if stalled and stalled["reason"] in (reasons.WRITE_FAILED, reasons.PLAN_FAILED):
        drop_condition(status.conditions, STALLED)
    if job.distrust and job.deleting is None:
        _begin_again(plan, pods, world)
        return plan
    if status.admitted_time is not None and status.scale is None:
        status.scale = scale_text(job)  # admitted by an earlier version
    _count(plan, pods)
    if job.deleting is not None:
        _delete(plan, pods, world)
    elif status.phase in TERMINAL_PHASES:
        finished(plan, pods, world)
    elif job.spec.suspend:
        _suspend(plan, pods, world)
    elif status.phase == "Suspended":
        plan.now_is("Pending", reasons.RESUMED, "waits in the queue again")
    elif status.admitted:
        advance(plan, pods, world)
    return plan


def _begin_again(plan: JobPlan, pods: Sequence[Pod], world: World) -> None:
    """Of a job whose status is not the operator's own nothing is believed: it gives all back and queues again.

    Its epoch goes on from the highest that a ledger or a pod knows, so that no pod of before is taken for a new one.
    """
    job, status = plan.job, plan.status
    known = [holder.epoch for s in world.switches.values() for holder in s.holders if holder.uid == job.uid]
    status.epoch = max([0, *known, *(pod.epoch for pod in pods)])
    plan.delete_pods += live(pods)
    text = (
        f"{job.distrust}: only the operator writes an ATPJob's status. The job gives everything back and begins again"
    )
    plan.now_is("Pending", reasons.STATUS_REJECTED, text)
    plan.condition(STALLED, True, reasons.STATUS_REJECTED, text, world.now)
    plan.condition(conditions.ADMITTED, False, reasons.STATUS_REJECTED, text, world.now)
    plan.tell("Warning", reasons.STATUS_REJECTED, text)
    plan.wake(world.now)


def _count(plan: JobPlan, pods: Sequence[Pod]) -> None:
    workers = [p for p in pods if p.role == ROLE_WORKER and p.epoch == plan.status.epoch]
    if plan.status.phase in TERMINAL_PHASES and not workers:
        return  # the pods were deleted since; what was counted stays
    plan.status.ready = sum(p.ready and not p.deleting for p in workers)
    plan.status.succeeded = sum(p.phase == "Succeeded" for p in workers)
    plan.status.failed = sum(p.phase == "Failed" for p in workers)


def _delete(plan: JobPlan, pods: Sequence[Pod], world: World) -> None:
    release(plan, world)
    if not plan.job.finalized:
        return
    plan.delete_pods += live(pods)
    assert plan.job.deleting is not None
    holding = [s.name for s in world.switches.values() if s.view.reachable and plan.job.uid in s.view.jobs]
    overdue = world.now >= plan.job.deleting + world.limits.release_wait
    if pods and not overdue:
        plan.status.message = f"waits for {len(pods)} pods to end"
    elif holding and not overdue:
        plan.status.message = f"waits for switches to release the job: {', '.join(holding)}"
    else:
        # A switch that is away keeps nothing for long: its desired state has no such job when it comes back.
        plan.remove_finalizer = True
        return
    plan.wake(plan.job.deleting + world.limits.release_wait)


def _suspend(plan: JobPlan, pods: Sequence[Pod], world: World) -> None:
    plan.delete_pods += live(pods)
    if plan.status.phase == "Suspended":
        return
    release(plan, world)
    forget_epoch(plan.status)
    plan.status.admitted_time = plan.status.scale = None
    plan.now_is("Suspended", reasons.SUSPENDED, "spec.suspend is true: pods are deleted, switches and quota given back")
    plan.condition(conditions.ADMITTED, False, reasons.SUSPENDED, plan.status.message, world.now)
    for kind in (conditions.PODS_READY, conditions.SWITCH_PROGRAMMED, conditions.NETWORK_AGGREGATION):
        drop_condition(plan.status.conditions, kind)
    plan.tell("Normal", reasons.SUSPENDED, plan.status.message)
