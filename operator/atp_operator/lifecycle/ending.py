# SPDX-License-Identifier: Apache-2.0
"""A job that has ended: what it gives back, and what goes with it."""

from __future__ import annotations

from collections.abc import Sequence

from .. import ROLE_PARAMETER_SERVER, conditions, reasons
from ..model import Pod
from .counters import count_packets
from .network import release
from .plan import ENDED, JobPlan, World, live


def end(plan: JobPlan, phase: str, reason: str, message: str, pods: Sequence[Pod], world: World) -> None:
    """The job ends in this phase; the counters of its switches are read for the last time."""
    count_packets(plan, world, final=True)
    plan.now_is(phase, reason, message)
    plan.status.completion_time = world.now
    plan.condition(conditions.COMPLETE if phase == "Succeeded" else conditions.FAILED, True, reason, message, world.now)
    plan.condition(conditions.PODS_READY, False, reasons.FINISHED, "the job has ended", world.now)
    if plan.status.condition(conditions.SWITCH_PROGRAMMED):
        plan.condition(
            conditions.SWITCH_PROGRAMMED,
            False,
            reasons.FINISHED,
            "the job has ended; the switches release it",
            world.now,
        )
    plan.tell("Normal" if phase == "Succeeded" else "Warning", phase, message)
    plan.delete_pods = []
    finished(plan, pods, world)


def finished(plan: JobPlan, pods: Sequence[Pod], world: World) -> None:
    """What is left of an ended job: pods that go, and the object itself after its time to live."""
    release(plan, world)
    plan.delete_pods += [p for p in live(pods) if p.role == ROLE_PARAMETER_SERVER or p.phase not in ENDED]
    if plan.job.spec.ttl is not None and plan.status.completion_time is not None:
        at = plan.status.completion_time + plan.job.spec.ttl
        if world.now >= at:
            plan.delete_job = True
        else:
            plan.wake(at)
