# SPDX-License-Identifier: Apache-2.0
"""Whether the switches serve a placed job: the gate opens, and what happens when one goes away and comes back."""

from __future__ import annotations

from .. import conditions, reasons
from ..allocation import Refusal
from ..conditions import drop_condition
from ..model import HOST_ONLY_JOB_ID, SCALE_AUTO, parse_time
from ..topology import Located, host_only
from .network import fell_back
from .plan import JobPlan, World


def switch_trouble(plan: JobPlan, world: World) -> tuple[Refusal | None, bool]:
    """(what keeps the switches from serving this epoch, whether an agent has refused it for good)."""
    job, status = plan.job, plan.status
    assert status.placement is not None
    for name in status.placement.switches:
        switch = world.switches.get(name)
        if switch is None:
            return Refusal(reasons.SWITCH_DELETED, f"ATPSwitch {name} was deleted"), False
        if not switch.view.known:
            return Refusal(reasons.SWITCH_UNKNOWN, f"switch {name}: its agent was not asked yet"), False
        if switch.fault and switch.fault[0] != reasons.NO_CAPACITY:
            reason = reasons.SWITCH_UNREACHABLE if not switch.view.reachable else switch.fault[0]
            return Refusal(reason, f"switch {name}: {switch.fault[1]}"), False
        report = switch.view.jobs.get(job.uid)
        if report is None or report.epoch != status.epoch or report.job_id != status.job_id:
            if switch.view.refused:
                return Refusal(reasons.AGENT_REFUSED, f"switch {name}: the agent refused: {switch.view.refused}"), True
            return Refusal(reasons.NOT_PROGRAMMED, f"switch {name} does not hold this epoch yet"), False
        if report.state == "FAILED":
            return Refusal(
                report.reason or reasons.AGENT_REFUSED, f"switch {name}: {report.message or report.reason}"
            ), True
        if report.state != "PROGRAMMED":
            return Refusal(
                report.reason or reasons.NOT_PROGRAMMED, f"switch {name}: {report.message or report.reason}"
            ), False
    return None, False


def aggregating_text(plan: JobPlan, names: str) -> str:
    """The message of condition NetworkAggregation while the switches sum."""
    text = f"gradients are summed on {names}"
    placement = plan.status.placement
    limit = placement.addend_limit if placement else None
    scale = plan.job.spec.scale
    if limit is None or scale == SCALE_AUTO:
        return text  # Auto: the ranks agree on a scale with which every finite value is within the limit
    value = limit / scale
    return f"{text}; values of magnitude above {value:.3g} take the slower raw path (status.addendLimit / spec.scale)"


def open_gate(plan: JobPlan, world: World) -> None:
    """Starting -> Running once every switch has confirmed, or HostOnly when one will not."""
    status, now = plan.status, world.now
    assert status.placement is not None
    if status.mode != "HostOnly":
        trouble, final = switch_trouble(plan, world)
        if trouble is not None:
            until = (status.placed_time or now) + world.limits.switch_wait
            if trouble.reason == reasons.SWITCH_UNKNOWN:
                until = now + 1.0
            if not final and now < until:
                plan.now_is("Starting", trouble.reason, trouble.message)
                plan.condition(conditions.SWITCH_PROGRAMMED, False, trouble.reason, trouble.message, now)
                plan.wake(until)
                return
            to_host_only(plan, trouble, world)
        else:
            names = ", ".join(status.placement.switches)
            plan.condition(
                conditions.SWITCH_PROGRAMMED,
                True,
                reasons.PROGRAMMED,
                f"switches {names} hold job ID {status.job_id}",
                now,
            )
            plan.condition(
                conditions.NETWORK_AGGREGATION, True, reasons.AGGREGATING, aggregating_text(plan, names), now
            )
    elif plan.job.spec.mode == "HostOnly":
        plan.condition(conditions.NETWORK_AGGREGATION, False, reasons.HOST_ONLY_REQUESTED, "spec.mode is HostOnly", now)
    status.start_time = status.start_time or now
    trains(plan)
    plan.tell(
        "Normal",
        reasons.GATE_OPEN,
        f"epoch {status.epoch}: job ID {status.job_id}, mode {status.mode}, training begins",
    )


def watch_network(plan: JobPlan, world: World) -> None:
    """A running job whose switch is away runs on; after a while it is called HostOnly until the switch is back."""
    status, now = plan.status, world.now
    if status.placement is None or not status.placement.switches:
        return
    trouble, _ = switch_trouble(plan, world)
    if trouble is not None and trouble.reason == reasons.SWITCH_UNKNOWN:
        return
    before = status.condition(conditions.SWITCH_PROGRAMMED)
    names = ", ".join(status.placement.switches)
    if trouble is None:
        plan.condition(
            conditions.SWITCH_PROGRAMMED, True, reasons.PROGRAMMED, f"switches {names} hold job ID {status.job_id}", now
        )
        if status.mode == "HostOnly":
            status.mode, status.revision = plan.job.spec.mode, status.revision + 1
            plan.condition(
                conditions.NETWORK_AGGREGATION, True, reasons.AGGREGATING, aggregating_text(plan, names), now
            )
            plan.tell("Normal", reasons.AGGREGATING, f"switches {names} are back")
            trains(plan)
        return
    plan.condition(conditions.SWITCH_PROGRAMMED, False, trouble.reason, trouble.message, now)
    if status.mode == "HostOnly":
        return
    entry = status.condition(conditions.SWITCH_PROGRAMMED)
    assert entry is not None
    since = now if before is None or before["status"] != "False" else parse_time(entry["lastTransitionTime"]) or now
    if now < since + world.limits.switch_loss:
        plan.wake(since + world.limits.switch_loss)
        return
    status.mode, status.revision = "HostOnly", status.revision + 1
    fell_back(plan, trouble, now)
    trains(plan)


def to_host_only(plan: JobPlan, refusal: Refusal, world: World) -> None:
    """Give the switches back before the gate opens: this epoch runs without them."""
    status = plan.status
    world.ledger.release(plan.job.uid)
    status.mode, status.job_id, status.switches, status.regions = "HostOnly", HOST_ONLY_JOB_ID, (), ()
    if status.placement is not None:
        seats = [Located(s.rank, s.node, s.address, s.pod_uid) for s in status.placement.seats]
        servers = [Located(s.shard, s.node, s.address, s.pod_uid) for s in status.placement.servers]
        status.placement = host_only(seats, servers)
    drop_condition(status.conditions, conditions.SWITCH_PROGRAMMED)
    fell_back(plan, refusal, world.now)


def trains(plan: JobPlan) -> None:
    """Running; the reason of a job that wanted switches and has none is what keeps them from it."""
    status = plan.status
    network = status.condition(conditions.NETWORK_AGGREGATION) or {}
    text = f"epoch {status.epoch} trains in mode {status.mode}"
    if status.mode == "HostOnly" and plan.job.spec.mode != "HostOnly" and network.get("status") == "False":
        plan.now_is("Running", network["reason"], f"{text}: {network['message']}")
    else:
        plan.now_is("Running", reasons.GATE_OPEN, text)
