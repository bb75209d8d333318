# SPDX-License-Identifier: Apache-2.0
"""What keeps a switch from its jobs: conditions that say what to do, events told once, jobs that run on and return."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
from operator_simulation import LIMITS, SIDECAR, Simulation, job_object, running_job

from atp_api.reasons import OPERATOR_ADVICE
from atp_operator.faults import GRACE_SECONDS
from atp_operator.model import AgentView, JobReport
from atp_operator.planning import plan_cluster

Object = dict[str, Any]
KINDS = ("Reachable", "Connected", "PipelineMatches", "InSync", "Ready")

# reason -> (how the agent is, what Reachable, Connected, PipelineMatches, InSync and Ready are)
WHOLE_SWITCH: dict[str, tuple[dict[str, Any], str]] = {
    "SwitchUnreachable": ({"connected": False}, "True False Unknown Unknown False"),
    "DeviceNotFound": ({"connected": False}, "True False Unknown Unknown False"),
    "NotMaster": ({"connected": False}, "True False Unknown Unknown False"),
    "PipelineMismatch": ({}, "True True False False False"),
    "PipelineMissing": ({}, "True True False False False"),
    "PipelineRefused": ({}, "True True False False False"),
    "PipelineUnknown": ({}, "True True False False False"),
    "NotConverging": ({}, "True True True False True"),
}
ONE_JOB = {"SwitchFull": "FAILED", "PortUnresolved": "PENDING", "PortNotFound": "FAILED", "SwitchRefused": "FAILED"}


def conditions(item: Object) -> dict[str, Object]:
    return {c["type"]: c for c in item["status"]["conditions"]}


def look(sim: Simulation) -> list[tuple[str, str, str]]:
    """One pass in which the switch stays as its view says; the events on it."""
    kept = sim.views["s0"]
    plan = sim.step()
    sim.views["s0"] = kept
    return [(e.kind, e.reason, e.message) for e in plan.switch_events["s0"]]


def advice(reason: str) -> str:
    return f"advice of the agent on {reason}"


def report(view: AgentView, state: str, reason: str, message: str) -> AgentView:
    job = view.jobs["u1"]
    return replace(view, jobs={"u1": JobReport(job.job_id, job.epoch, state, reason, message, advice(reason))})


def broken(sim: Simulation, reason: str) -> AgentView:
    """The view of an agent that says this of its switch."""
    view = sim.views["s0"]
    text = f"words of the agent on {reason}"
    if reason in WHOLE_SWITCH:
        changes = WHOLE_SWITCH[reason][0]
        view = report(view, "PENDING", reason, text)
        return replace(view, in_sync=False, reason=reason, message=text, advice=advice(reason), **changes)
    return replace(report(view, ONE_JOB[reason], reason, text), in_sync=False, reason=reason, message=text)


@pytest.mark.parametrize("reason", [*WHOLE_SWITCH, *ONE_JOB])
def test_condition_and_event_say_what_to_do_and_the_job_runs_on_and_comes_back(reason: str) -> None:
    sim = running_job()
    good = sim.views["s0"]
    assert look(sim) == []
    sim.views["s0"] = broken(sim, reason)
    events = look(sim)
    status = sim.jobs["u1"]["status"]
    assert (status["phase"], status["mode"]) == ("Running", "Shared"), "a short absence changes nothing"
    if reason == "PortUnresolved":
        condition = conditions(sim.switches["s0"])["InSync"]
        assert events == [] and condition["reason"] == "Programming", "new pods take a moment to show"
        assert "words of the agent" in condition["message"]
        plan = plan_cluster(sim.snapshot(), SIDECAR, LIMITS, sim.now)
        assert plan.wake_at is not None and plan.wake_at <= sim.now + GRACE_SECONDS
        sim.now += GRACE_SECONDS
        events = look(sim)
    (event,) = events
    assert event[:2] == ("Warning", reason)
    switch = conditions(sim.switches["s0"])
    for condition in switch.values():
        if condition["status"] == "False":
            assert condition["reason"] == reason
            assert f"words of the agent on {reason}" in condition["message"]
            assert condition["message"].endswith(f"What to do: advice of the agent on {reason}")
            assert condition["message"] == event[2]
    expected = WHOLE_SWITCH[reason][1] if reason in WHOLE_SWITCH else "True True True False True"
    assert " ".join(switch[kind]["status"] for kind in KINDS) == expected
    if reason in ONE_JOB:
        assert "job team-a/j is not on the switch" in switch["InSync"]["message"]

    sim.now += LIMITS.switch_loss
    assert look(sim) == [], "told once"
    status = sim.jobs["u1"]["status"]
    assert (status["phase"], status["mode"], status["reason"]) == ("Running", "HostOnly", reason)
    network = conditions(sim.jobs["u1"])["NetworkAggregation"]
    assert (network["status"], network["reason"]) == ("False", reason)
    assert "switch s0" in network["message"] and f"words of the agent on {reason}" in network["message"]
    assert {pod.assignment.count('"mode":"HostOnly"') for pod in sim.pods["team-a/j"]} == {1}

    sim.views["s0"] = good
    back = look(sim)
    assert {e[0] for e in back} == {"Normal"} and all(f"{reason} is over" in e[2] for e in back)
    status = sim.jobs["u1"]["status"]
    assert (status["mode"], status["reason"], status["epoch"]) == ("Shared", "GateOpen", 1)
    assert {c["status"] for c in conditions(sim.switches["s0"]).values()} == {"True"}
    assert look(sim) == []


def test_agent_that_does_not_answer() -> None:
    sim = running_job()
    sim.views["s0"] = replace(
        sim.views["s0"], reachable=False, connected=False, in_sync=False, since=sim.now, error="refused", jobs={}
    )
    ((kind, reason, message),) = look(sim)
    assert (kind, reason) == ("Warning", "AgentUnreachable") and "s0:1 does not answer (refused)" in message
    assert message.endswith(f"What to do: {OPERATOR_ADVICE[reason]}")
    assert [conditions(sim.switches["s0"])[k]["status"] for k in KINDS] == ["False", *["Unknown"] * 3, "False"]


def test_what_passes_by_itself_is_no_event() -> None:
    sim = running_job()
    sim.views["s0"] = replace(
        report(sim.views["s0"], "PENDING", "Programming", "not programmed yet"), in_sync=False, reason="Programming"
    )
    assert look(sim) == []
    assert conditions(sim.switches["s0"])["InSync"]["reason"] == "Programming"


def test_a_restarted_operator_that_asked_nobody_yet_says_nothing_and_keeps_what_was_known() -> None:
    sim = running_job()
    before = copy.deepcopy(sim.switches["s0"]["status"]["conditions"])
    sim.views["s0"] = AgentView(since=sim.now)
    assert look(sim) == [] and sim.switches["s0"]["status"]["conditions"] == before


@pytest.mark.parametrize("reason", [r for r in WHOLE_SWITCH if WHOLE_SWITCH[r][1].endswith("False")])
def test_no_new_job_is_put_on_a_switch_that_serves_none(reason: str) -> None:
    sim = running_job()
    sim.views["s0"] = broken(sim, reason)
    sim.jobs["u2"] = job_object("late", sim.now, "u2")
    look(sim)
    status = sim.jobs["u2"]["status"]
    assert status["reason"] == "WaitingForSwitch" and f"words of the agent on {reason}" in status["message"]
    sim.now += LIMITS.switch_wait
    for _ in range(2):  # its finalizer comes first
        look(sim)
    status = sim.jobs["u2"]["status"]
    assert (status["mode"], status["jobId"]) == ("HostOnly", 255)
    network = conditions(sim.jobs["u2"])["NetworkAggregation"]
    assert network["reason"] == "NoUsableSwitch" and f"words of the agent on {reason}" in network["message"]


def test_a_job_that_the_switch_refuses_is_named_first_and_the_others_are_counted() -> None:
    sim = running_job()
    for uid, name in (("u2", "a"), ("u3", "b")):
        sim.jobs[uid] = job_object(name, sim.now, uid)
    for _ in range(6):
        sim.step()
        sim.kubelet(random.Random(1))
    view = sim.views["s0"]
    states = {"u1": ("FAILED", "SwitchFull"), "u2": ("PENDING", "PortUnresolved"), "u3": ("PROGRAMMED", "")}
    jobs = {u: JobReport(view.jobs[u].job_id, 1, state, reason, "no") for u, (state, reason) in states.items()}
    sim.views["s0"] = replace(view, jobs=jobs, in_sync=False, reason="PortUnresolved", message="no")
    look(sim)
    condition = conditions(sim.switches["s0"])["InSync"]
    assert condition["reason"] == "SwitchFull"
    assert condition["message"].startswith("job team-a/j is not on the switch: no (and 1 more job)")


def test_faults_settle() -> None:
    """A second pass over the same fault changes nothing and tells nothing."""
    for reason in (*WHOLE_SWITCH, *ONE_JOB):
        sim = running_job()
        sim.views["s0"] = broken(sim, reason)
        look(sim)
        plan = plan_cluster(sim.snapshot(), SIDECAR, LIMITS, sim.now)
        assert plan.switch_statuses["s0"] == sim.switches["s0"]["status"] and not plan.switch_events["s0"]
