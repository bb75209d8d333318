# SPDX-License-Identifier: Apache-2.0
"""What keeps a switch from serving its jobs: the conditions of an ATPSwitch, with what to do, and their events.

The agent says what it meets (a reason in CamelCase and a text) and what an admin can do about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atp_api.reasons import OPERATOR_ADVICE, TRANSIENT

from . import conditions, reasons
from .model import AgentView, Event, JobReport, Object, Switch, of_pipeline, parse_time

PASSING = TRANSIENT | {""}
"""Reasons of which no event tells."""

UNRESOLVED = reasons.PORT_UNRESOLVED
GRACE_SECONDS = 5.0
"""A port that is not known yet is nothing to tell of for so long: the neighbours of new pods take a moment to show."""


def advice(view: AgentView, reason: str) -> str:
    """What an admin can do about a reason, in the words of whoever found it; empty: nobody said."""
    if reason in OPERATOR_ADVICE:
        return OPERATOR_ADVICE[reason]
    if reason == view.reason and view.advice:
        return view.advice
    return next((job.advice for job in view.jobs.values() if job.reason == reason), "")


def told(message: str, reason: str, what_to_do: str) -> str:
    """The message with what to do, once."""
    text = message.strip().rstrip(".;") or reason
    return f"{text}. What to do: {what_to_do}" if what_to_do else text


def _unheld(reports: Mapping[str, JobReport], names: Mapping[str, str]) -> tuple[str, str] | None:
    """(reason, message) of the jobs that the switch does not hold; those that the agent gave up come first."""
    missing = sorted(
        (report.state != "FAILED", names.get(uid, uid), report)
        for uid, report in reports.items()
        if report.state != "PROGRAMMED"
    )
    if not missing:
        return None
    _, name, first = missing[0]
    reason = first.reason or reasons.PROGRAMMING
    others = len(missing) - 1
    more = f" (and {others} more job{'s' if others > 1 else ''})" if others else ""
    return reason, f"job {name} is not on the switch: {first.message or reason}{more}"


def _since(entries: Sequence[Object], kind: str, now: float) -> float:
    """Since when the condition is False; now, if it is not."""
    entry = next((c for c in entries if c["type"] == kind and c["status"] == "False"), None)
    return (parse_time(entry["lastTransitionTime"]) or now) if entry else now


def set_switch_conditions(entries: list[Object], switch: Switch, names: Mapping[str, str], now: float) -> float | None:
    """Write the conditions of a switch in place; when to look again, or None.

    `names`: namespace/name of ATPJobs by uid.
    """
    view = switch.view
    generation = (switch.raw.get("metadata") or {}).get("generation", 0)

    def put(kind: str, value: bool | None, reason: str, message: str) -> None:
        text = message if value else told(message, reason, advice(view, reason))
        conditions.set_condition(entries, kind, value, reason, text, generation, now)

    fault = switch.fault
    if not view.known:
        if not entries and fault:
            put(conditions.READY, None, *fault)
        return None
    if fault and not view.reachable:
        put(conditions.REACHABLE, False, *fault)
        for kind in (conditions.CONNECTED, conditions.PIPELINE_MATCHES, conditions.IN_SYNC):
            put(kind, None, *fault)
        put(conditions.READY, False, *fault)
        return None
    put(conditions.REACHABLE, True, reasons.AGENT_ANSWERS, f"the agent at {switch.address} answers")
    if fault and not view.connected:
        put(conditions.CONNECTED, False, *fault)
        for kind in (conditions.PIPELINE_MATCHES, conditions.IN_SYNC):
            put(kind, None, *fault)
        put(conditions.READY, False, *fault)
        return None
    put(conditions.CONNECTED, True, reasons.PRIMARY, "the agent is the primary P4Runtime controller of the switch")
    if fault and of_pipeline(fault[0]):
        put(conditions.PIPELINE_MATCHES, False, *fault)
    else:
        put(conditions.PIPELINE_MATCHES, True, reasons.MATCHES, "the switch runs the P4 program of the agent")
    look = None
    if view.refused:
        put(conditions.IN_SYNC, False, reasons.AGENT_REFUSED, view.refused)
    elif view.in_sync:
        put(
            conditions.IN_SYNC,
            True,
            reasons.IN_SYNC,
            f"the switch holds exactly what it should ({len(view.jobs)} jobs)",
        )
    else:
        trouble = None if fault and of_pipeline(fault[0]) else _unheld(view.jobs, names)
        reason, message = trouble or (view.reason or reasons.PROGRAMMING, view.message or "the agent is at it")
        grace = _since(entries, conditions.IN_SYNC, now) + GRACE_SECONDS
        if reason == UNRESOLVED and now < grace:
            reason, look = reasons.PROGRAMMING, grace
        put(conditions.IN_SYNC, False, reason, message)
    if fault:
        put(conditions.READY, False, *fault)
    elif switch.capacity is not None:
        put(
            conditions.READY,
            True,
            reasons.READY,
            f"{switch.capacity.aggregators} aggregators, {switch.capacity.target}",
        )
    return look


def switch_events(old: Sequence[Object], new: Sequence[Object]) -> list[Event]:
    """What changed from one list of conditions to the next that an admin wants to know, once per reason."""
    before = {c["type"]: c for c in old}
    events: list[Event] = []
    told_reasons: set[str] = set()
    for condition in new:
        was, reason = before.get(condition["type"]), condition["reason"]
        if condition["status"] != "False" or reason in PASSING or reason in told_reasons:
            continue
        if was is None or (was["status"], was["reason"]) != ("False", reason):
            told_reasons.add(reason)
            events.append(Event("Warning", reason, condition["message"]))
    for condition in new:
        was = before.get(condition["type"])
        if (
            condition["type"] not in (conditions.READY, conditions.IN_SYNC)
            or condition["status"] != "True"
            or was is None
        ):
            continue
        if was["status"] != "True" and was["reason"] not in PASSING:
            events.append(Event("Normal", condition["type"], f"{condition['message']}; {was['reason']} is over"))
    return events
