# SPDX-License-Identifier: Apache-2.0
"""The next step of an admitted job."""

from __future__ import annotations

from collections.abc import Sequence

from .. import reasons
from ..model import Pod
from .counters import count_packets
from .ending import end
from .gather import gather
from .network import unasked
from .plan import JobPlan, World, live
from .restart import find_failure, restart
from .running import tell_pods, watch_pods
from .switches import open_gate, watch_network


def advance(plan: JobPlan, pods: Sequence[Pod], world: World) -> None:
    """One step of the epoch: end it, restart it, wait for its pods, open its gate, or watch it run."""
    job, status = plan.job, plan.status
    plan.add_finalizer = not job.finalized
    current = {p.name: p for p in pods if p.epoch == status.epoch and not p.deleting}
    stale = [p for p in pods if p.epoch != status.epoch]
    plan.delete_pods += live(stale)

    if status.phase == "Running" and status.succeeded == job.spec.workers:
        end(
            plan, "Succeeded", reasons.ALL_WORKERS_SUCCEEDED, f"all workers succeeded ({job.spec.workers})", pods, world
        )
        return
    deadline = (status.start_time or world.now) + job.spec.deadline if job.spec.deadline else None
    if deadline is not None and status.start_time is not None:
        if world.now >= deadline:
            text = f"ran longer than spec.activeDeadlineSeconds ({job.spec.deadline} s)"
            end(plan, "Failed", reasons.DEADLINE_EXCEEDED, text, pods, world)
            return
        plan.wake(deadline)
    failure = find_failure(job, status, current)
    if failure and unasked(job, world):
        plan.wake(world.now + 1.0)
        return
    if failure:
        restart(plan, failure[0], failure[1], pods, world)
        return
    if status.not_before is not None and world.now < status.not_before:
        plan.wake(status.not_before)
        return
    if status.placement is None and stale:
        # A trainer of the old epoch that still runs would meet those of the new one, and break them.
        text = f"epoch {status.epoch} begins when the last {len(stale)} pods of the one before have ended"
        plan.now_is("Admitted", reasons.WAITING_FOR_OLD_PODS, text)
        return
    if status.placement is None:
        gather(plan, current, {p.name for p in pods} - set(current), world)
    if status.placement is not None and status.phase != "Running":
        open_gate(plan, world)
    if status.phase == "Running":
        watch_network(plan, world)
        count_packets(plan, world, final=False)
        watch_pods(plan, current, world)
        tell_pods(plan, current, world)
