# SPDX-License-Identifier: Apache-2.0
"""Which switches a job gets, and what it holds on them."""

from __future__ import annotations

from dataclasses import dataclass

from atp_api import wire

from .. import conditions, reasons
from ..allocation import Allocation, Refusal
from ..conditions import drop_condition
from ..model import HOST_ONLY_JOB_ID, SCALE_AUTO, Job, JobStatus, Region, Switch
from .plan import JobPlan, World


@dataclass(frozen=True)
class Network:
    """What a job is to hold of the switches; no switch in mode HostOnly, and then why it fell back to that."""

    switches: tuple[str, ...]
    job_id: int
    regions: tuple[Region, ...]
    values: int
    mode: str
    fallback: Refusal | None = None


def no_switch(job: Job, fallback: Refusal | None) -> Network:
    """Runs without a switch; `fallback` is why, when it asked for one."""
    return Network((), HOST_ONLY_JOB_ID, (), job.spec.values or wire.VALUES_LARGE, "HostOnly", fallback)


def allocate(names: tuple[str, ...], job: Job, world: World) -> Allocation | Refusal:
    """What the switches `names` can give the job together; changes nothing."""
    spec = job.spec
    return world.ledger.allocate(names, spec.mode, spec.request, spec.values, job.uid, spec.floor)


def choose_network(job: Job, world: World, *, patient: bool) -> Network | Refusal:
    """Switches that the job may hold before its pods have nodes: all allowed ones with room."""
    if job.spec.mode == "HostOnly":
        return no_switch(job, None)
    unknown = [name for name in job.spec.switches if name not in world.switches]
    if unknown:
        return Refusal(
            reasons.UNKNOWN_SWITCH,
            f"spec.switches names {', '.join(unknown)}, which does not exist; there are: "
            f"{', '.join(sorted(world.switches)) or 'none at all'}. Create it or change the list",
        )
    allowed = job.spec.switches or tuple(sorted(world.switches))
    silent = unasked(job, world)
    if silent:
        return Refusal(reasons.WAITING_FOR_SWITCH, f"waits for a first word from switch {', '.join(silent)}")
    usable = [name for name in allowed if world.switches[name].usable]
    away = [name for name in allowed if name not in usable]
    if away and patient and (job.spec.switches or not usable):
        since = max(job.created, *(world.switches[name].view.since for name in away))
        if world.now < since + world.limits.switch_wait:
            return Refusal(
                reasons.WAITING_FOR_SWITCH, f"waits for switch {', '.join(away)}: {_why_away(world.switches[away[0]])}"
            )
    if not allowed and patient and world.now < job.created + min(world.limits.switch_wait, 10.0):
        return Refusal(reasons.WAITING_FOR_SWITCH, "there is no ATPSwitch yet; the job starts without one soon")
    if not usable:
        text = "; ".join(f"{name}: {_why_away(world.switches[name])}" for name in allowed) or "there is no ATPSwitch"
        return no_switch(job, Refusal(reasons.NO_USABLE_SWITCH, text))

    most = sum(min(wire.FAN_IN_MAX, c.fan_in_max) for n in usable if (c := world.switches[n].capacity))
    if job.spec.workers > most:
        return Refusal(
            reasons.FAN_IN_EXCEEDED,
            f"{job.spec.workers} workers need a fan-in of {job.spec.workers}: {most} is what "
            f"{'switch' if len(usable) == 1 else 'switches'} {', '.join(usable)} can do (32 a rack); use more "
            f"switches, fewer workers, or mode HostOnly",
        )
    fitting, refusals = [], []
    for name in usable:
        refusal = world.quotas.refuse_switch(job, name)
        if refusal is None:
            one = allocate((name,), job, world)
            refusal = one if isinstance(one, Refusal) else None
        if refusal is None:
            fitting.append(name)
        else:
            refusals.append(refusal)
    # A list in the spec means "on these"; without one, switches without room are simply not used.
    if not fitting or (job.spec.switches and refusals):
        return refusals[0]
    chosen = tuple(fitting)
    allocation = allocate(chosen, job, world)
    if isinstance(allocation, Refusal):
        return allocation
    return Network(chosen, allocation.job_id, allocation.regions, allocation.values, job.spec.mode)


def unasked(job: Job, world: World) -> list[str]:
    """Switches the job may use whose agents were not asked yet, as after a restart of the operator.

    Nothing may be concluded from their silence; the first answer, or failure, comes within seconds.
    """
    if job.spec.mode == "HostOnly":
        return []
    allowed = job.spec.switches or tuple(sorted(world.switches))
    return [name for name in allowed if name in world.switches and not world.switches[name].view.known]


def _why_away(switch: Switch) -> str:
    return switch.fault[1] if switch.fault else "its agent answers"


def take(plan: JobPlan, network: Network, world: World, epoch: int) -> None:
    """The job begins epoch `epoch` with what it holds from now on; nothing of the epoch before is left."""
    status = plan.status
    forget_epoch(status)
    status.epoch = epoch
    status.revision = 1
    status.mode = network.mode
    status.job_id = network.job_id
    status.switches = network.switches
    status.regions = network.regions
    status.values = network.values
    status.epoch_time = world.now
    world.ledger.release(plan.job.uid)
    if network.switches:
        world.ledger.take(
            plan.job.uid,
            network.switches,
            network.job_id,
            status.regions,
            network.mode == "Reserved",
            plan.job.spec.request,
        )
    for kind in (conditions.PODS_READY, conditions.SWITCH_PROGRAMMED, conditions.NETWORK_AGGREGATION):
        drop_condition(status.conditions, kind)


def release(plan: JobPlan, world: World) -> None:
    """Give back switches and quota; mode, job ID and epoch stay readable in a finished job."""
    world.ledger.release(plan.job.uid)
    world.quotas.leave(plan.job)


def forget_epoch(status: JobStatus) -> None:
    """Clear all that belongs to one epoch."""
    status.job_id = None
    status.switches, status.regions, status.values = (), (), None
    status.placement = None
    status.mode = None
    status.placed_time = status.not_before = None
    status.aggregation = {}


def scale_text(job: Job) -> str:
    """`spec.scale` as it is written."""
    return str((job.raw.get("spec") or {}).get("scale", SCALE_AUTO))


def fell_back(plan: JobPlan, refusal: Refusal, now: float) -> None:
    """Say that the job asked for switches and runs without."""
    text = f"the parameter server sums everything: {refusal.message}"
    plan.condition(conditions.NETWORK_AGGREGATION, False, refusal.reason, text, now)
    plan.tell("Warning", reasons.HOST_ONLY, f"runs HostOnly, {text}")
