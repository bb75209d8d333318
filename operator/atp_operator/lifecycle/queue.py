# SPDX-License-Identifier: Apache-2.0
"""The queue: who is admitted, and what the others wait for."""

from __future__ import annotations

from .. import conditions, reasons
from ..conditions import STALLED, drop_condition
from .network import Network, choose_network, fell_back, scale_text, take
from .plan import JobPlan, World

SHAPED = frozenset(
    {
        reasons.QUOTA_EXCEEDED,
        reasons.AGGREGATORS_EXHAUSTED,
        reasons.JOB_IDS_EXHAUSTED,
        reasons.NO_COMMON_RANGE,
        reasons.VALUES_UNSUPPORTED,
        reasons.FAN_IN_EXCEEDED,
    }
)
"""Refusals that every job of the same namespace and the same wants gets: within a plan, room only becomes less."""


def waits_in_queue(plan: JobPlan) -> bool:
    """True when the job wants to be admitted."""
    return (
        not plan.held_back
        and not plan.job.distrust
        and plan.job.deleting is None
        and plan.status.phase == "Pending"
        and not plan.job.spec.suspend
    )


def admit(plan: JobPlan, world: World) -> bool:
    """Let a job of the queue in when quota and switches have room, or say why not; True when it was let in.

    A job without our finalizer gets that first, and a place in the next plan: an object that takes no finalizer never
    gets into a switch's ledger.
    """
    job, now = plan.job, world.now
    if job.problems:
        _pending(plan, reasons.INVALID_SPEC, "; ".join(job.problems), now)
        return False
    spec = job.spec
    shape = (job.namespace, spec.workers, spec.mode, spec.switches, spec.request, spec.floor, spec.values)
    refusal = world.refused.get(shape) or world.quotas.refuse_job(job)
    if refusal is None:
        choice = choose_network(job, world, patient=True)
        if isinstance(choice, Network) and not job.finalized:
            plan.add_finalizer = True
            _pending(
                plan, reasons.ADMITTING, "there is room: admitted once the object carries the operator's finalizer", now
            )
            plan.wake(now)
            return True
        if isinstance(choice, Network):
            take(plan, choice, world, epoch=plan.status.epoch + 1)
            plan.status.admitted_time, plan.status.scale = now, scale_text(job)
            drop_condition(plan.status.conditions, STALLED)
            where = f"on {', '.join(choice.switches)}" if choice.switches else "without a switch"
            plan.now_is("Admitted", reasons.ADMITTED, f"admitted in mode {plan.status.mode} {where}")
            plan.condition(conditions.ADMITTED, True, reasons.ADMITTED, plan.status.message, now)
            plan.tell("Normal", reasons.ADMITTED, plan.status.message)
            if choice.fallback:
                fell_back(plan, choice.fallback, now)
            world.quotas.admit(job)
            plan.wake(now)
            return True
        refusal = choice
        if refusal.reason == reasons.WAITING_FOR_SWITCH:
            plan.wake(now + 1.0)
    if refusal.reason in SHAPED:
        world.refused[shape] = refusal
    _pending(plan, refusal.reason, refusal.message, now)
    return False


def put_off(plan: JobPlan, world: World) -> None:
    """A job that has its turn in one of the next plans: each lets in a few, of all namespaces in turn."""
    if plan.status.reason in ("", reasons.RESUMED):
        _pending(plan, reasons.QUEUED, "waits for its turn", world.now)
    plan.wake(world.now)


def _pending(plan: JobPlan, reason: str, message: str, now: float) -> None:
    if plan.status.reason != reason:
        plan.tell("Warning" if reason in (reasons.INVALID_SPEC, reasons.UNKNOWN_SWITCH) else "Normal", reason, message)
    plan.now_is("Pending", reason, message)
    plan.condition(conditions.ADMITTED, False, reason, message, now)
