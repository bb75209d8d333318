# SPDX-License-Identifier: Apache-2.0
"""A gate that the kubelet is slow to show, and containers that cannot start."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace

from operator_simulation import LIMITS, Simulation, job_object, running_job

from atp_operator import ANNOTATION_ASSIGNMENT, ANNOTATION_REFRESH
from atp_operator.model import Pod
from atp_operator.planning import ClusterPlan


def addend_limits(sim: Simulation) -> set[int | None]:
    return {json.loads(pod.assignment).get("addendLimit") for pod in sim.pods["team-a/j"]}


def test_addend_limit_is_that_of_the_switches_in_the_tree_and_stays_for_the_epoch() -> None:
    sim = Simulation({"s0": 4096, "s1": 4096}, {"s0": ["n0", "n1", "n2", "n3"], "s1": ["elsewhere"]}, [])
    view = sim.views["s0"]
    assert view.capacity is not None
    for name, sticky in (("s0", False), ("s1", True)):
        sim.views[name] = replace(view, capacity=replace(view.capacity, sticky_saturation=sticky))
    sim.jobs["u1"] = job_object("j", sim.now, "u1", workers=3, scale=100000000)
    for _ in range(6):
        sim.step()
        sim.kubelet(random.Random(1))
    assert sim.jobs["u1"]["status"]["mode"] == "Shared"
    assert addend_limits(sim) == {(2**31 - 1) // 3} == {sim.jobs["u1"]["status"]["addendLimit"]}
    network = next(c for c in sim.jobs["u1"]["status"]["conditions"] if c["type"] == "NetworkAggregation")
    assert network["status"] == "True" and "above 7.16 take the slower raw path" in network["message"]
    sim.views["s0"] = replace(sim.views["s0"], reachable=False, connected=False, since=sim.now, jobs={})
    for _ in range(3):
        sim.now += LIMITS.switch_loss
        sim.step()
    assert sim.jobs["u1"]["status"]["mode"] == "HostOnly"
    assert addend_limits(sim) == {(2**31 - 1) // 3}, "a sidecar takes no other limit within an epoch"


def test_no_addend_limit_on_sticky_switches_or_without_a_switch() -> None:
    assert addend_limits(running_job()) == {None}
    sim = Simulation({"s0": 4096}, {"s0": ["elsewhere"]}, [])
    view = sim.views["s0"]
    assert view.capacity is not None
    sim.views["s0"] = replace(view, capacity=replace(view.capacity, sticky_saturation=False))
    sim.jobs["u1"] = job_object("j", sim.now, "u1")
    for _ in range(6):
        sim.step()
        sim.kubelet(random.Random(1))
    assert sim.jobs["u1"]["status"]["mode"] == "HostOnly" and addend_limits(sim) == {None}
    assert "addendLimit" not in sim.jobs["u1"]["status"]


def change(sim: Simulation, how: Callable[[Pod], Pod]) -> None:
    sim.pods["team-a/j"] = [how(pod) for pod in sim.pods["team-a/j"]]


def told(plan: ClusterPlan) -> dict[str, dict[str, str]]:
    return plan.jobs[0].annotate


def test_a_pod_that_does_not_see_its_assignment_is_touched_until_it_does() -> None:
    sim = running_job()
    change(sim, lambda pod: replace(pod, sidecar_ready=pod.name != "j-worker-1"))
    seen = []
    for _ in range(4):
        sim.now += LIMITS.refresh_period
        plan = sim.step()
        assert set(told(plan)) == {"j-worker-1"}
        assert ANNOTATION_ASSIGNMENT not in told(plan)["j-worker-1"]
        value = told(plan)["j-worker-1"][ANNOTATION_REFRESH]
        assert value not in seen
        seen.append(value)
        assert plan.wake_at is not None and plan.wake_at <= sim.now + LIMITS.refresh_period
        change(sim, lambda pod, value=value: replace(pod, refresh=value) if pod.name == "j-worker-1" else pod)
        assert told(sim.step()) == {}, "touched once a period"
    change(sim, lambda pod: replace(pod, sidecar_ready=True))
    sim.now += LIMITS.refresh_period
    assert told(sim.step()) == {}


def test_touching_ends() -> None:
    sim = running_job()
    change(sim, lambda pod: replace(pod, sidecar_ready=False))
    sim.now += LIMITS.refresh_limit + 1
    assert told(sim.step()) == {}


def test_a_container_that_cannot_start_is_the_running_jobs_reason() -> None:
    sim = running_job()
    trouble = ("ImagePullBackOff", "container trainer: no such image")
    change(sim, lambda pod: replace(pod, trouble=trouble if pod.name == "j-worker-0" else None))
    sim.step()
    status = sim.jobs["u1"]["status"]
    assert (status["phase"], status["reason"]) == ("Running", "ImagePullBackOff")
    assert "j-worker-0" in status["message"] and "no such image" in status["message"]
    change(sim, lambda pod: replace(pod, trouble=None))
    sim.step()
    status = sim.jobs["u1"]["status"]
    assert (status["phase"], status["reason"]) == ("Running", "GateOpen")
    ready = next(c for c in status["conditions"] if c["type"] == "PodsReady")
    assert ready["status"] == "True"


def test_no_pod_of_a_new_epoch_before_the_last_of_the_old_has_ended() -> None:
    """A trainer that ignores SIGTERM still listens; one of the new epoch would join it and break."""
    sim = running_job()
    change(sim, lambda pod: replace(pod, phase="Failed") if pod.name == "j-worker-1" else pod)
    sim.step()
    assert sim.jobs["u1"]["status"]["epoch"] == 2
    leaving = [replace(pod, deleting=True) for pod in sim.pods["team-a/j"] if pod.name == "j-worker-0"]
    sim.pods["team-a/j"] = list(leaving)
    for _ in range(5):
        sim.now += 5
        sim.step()
        assert sim.pods["team-a/j"] == leaving
        assert sim.jobs["u1"]["status"]["reason"] == "WaitingForOldPods"
    sim.pods["team-a/j"] = []
    sim.step()
    assert sorted(pod.name for pod in sim.pods["team-a/j"]) == ["j-ps-0", "j-worker-0", "j-worker-1"]
    assert {pod.epoch for pod in sim.pods["team-a/j"]} == {2}
