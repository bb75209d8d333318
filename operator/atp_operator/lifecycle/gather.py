# SPDX-License-Identifier: Apache-2.0
"""From admitted to placed: the pods are made, all are waited for (gang), and their places in the tree are frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .. import ROLE_PARAMETER_SERVER, ROLE_WORKER, conditions, reasons
from ..allocation import Refusal, addend_limit
from ..model import Placement, Pod
from ..pods import wanted_objects
from ..topology import Located, host_only, place
from .ending import end
from .network import allocate, unasked
from .plan import JobPlan, World
from .restart import restart
from .switches import to_host_only


def gather(plan: JobPlan, current: Mapping[str, Pod], leaving: set[str], world: World) -> None:
    """Make the pods, wait for all of them (gang), then freeze who sits where."""
    job, status, now = plan.job, plan.status, world.now
    wanted = wanted_objects(job)
    missing = [w for w in wanted if w.kind == "Service" or (w.name not in current and w.name not in leaving)]
    if job.problems and any(w.kind == "Pod" for w in missing):
        end(plan, "Failed", reasons.INVALID_SPEC, "; ".join(job.problems), list(current.values()), world)
        return
    plan.create += missing
    total = sum(w.kind == "Pod" for w in wanted)
    here = [p for p in current.values() if p.address and p.node and p.sidecar_started and not p.trouble]
    if len(here) < total:
        trouble = sorted((p.name, *p.trouble) for p in current.values() if p.trouble)
        began = max(status.epoch_time or now, status.not_before or 0.0)
        if job.uid in world.create_errors:
            reason, message = reasons.POD_CREATE_FAILED, world.create_errors[job.uid]
        elif trouble:
            name, reason, text = trouble[0]
            message = f"{len(here)} of {total} pods are there; pod {name}: {text}"
        else:
            reason, message = (
                reasons.WAITING_FOR_PODS,
                f"{len(here)} of {total} pods have an address and a running sidecar",
            )
        if now >= began + world.limits.start_timeout:
            restart(
                plan,
                reasons.PODS_NOT_READY,
                f"{message} after {world.limits.start_timeout:.0f} s",
                list(current.values()),
                world,
            )
            return
        plan.now_is("Starting", reason, message)
        plan.condition(conditions.PODS_READY, False, reason, message, now)
        plan.wake(began + world.limits.start_timeout)
        return

    if status.mode != "HostOnly" and unasked(job, world):
        plan.wake(now + 1.0)
        return
    plan.condition(
        conditions.PODS_READY,
        True,
        reasons.ALL_PODS_READY,
        f"all {total} pods have an address and a running sidecar",
        now,
    )
    workers = [_located(p) for p in here if p.role == ROLE_WORKER]
    servers = [_located(p) for p in here if p.role == ROLE_PARAMETER_SERVER]
    placement, refusal = seat_pods(plan, workers, servers, world)
    if refusal:
        to_host_only(plan, refusal, world)
    status.placement = placement
    status.placed_time = now
    plan.now_is("Starting", reasons.PLACED, "all pods are there")
    plan.wake(now)


def _located(pod: Pod) -> Located:
    return Located(pod.rank, pod.node, pod.address, pod.uid)


def seat_pods(
    plan: JobPlan, workers: list[Located], servers: list[Located], world: World
) -> tuple[Placement, Refusal | None]:
    """The tree over the switches that the job may use; keeps its job ID when the tree lies inside what it holds."""
    job, status = plan.job, plan.status
    without = host_only(workers, servers)
    if status.mode == "HostOnly":
        return without, None
    allowed = job.spec.switches or tuple(world.switches)
    usable = {name: world.switches[name] for name in allowed if name in world.switches and world.switches[name].usable}
    tree = place(workers, servers, usable)
    if isinstance(tree, Refusal):
        return without, tree
    names = tree.switches
    if set(names) <= set(status.switches):
        world.ledger.release(job.uid)
    else:
        # Pods landed below a switch that was full, or not there, at admission. Nothing was told to anyone yet.
        world.ledger.release(job.uid)
        for name in names:
            over_quota = world.quotas.refuse_switch(job, name)
            if over_quota:
                return without, over_quota
        allocation = allocate(names, job, world)
        if isinstance(allocation, Refusal):
            return without, allocation
        status.job_id, status.regions, status.values = (
            allocation.job_id,
            allocation.regions,
            allocation.values,
        )
    status.switches = names
    tree = replace(tree, addend_limit=addend_limit((usable[name] for name in names), job.spec.workers))
    assert status.job_id is not None
    world.ledger.take(job.uid, names, status.job_id, status.regions, status.mode == "Reserved", job.spec.request)
    return tree, None
