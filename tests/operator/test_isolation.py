# SPDX-License-Identifier: Apache-2.0
"""What one tenant's objects may do to others, without a cluster: nothing."""

from __future__ import annotations

import copy
import json
import random
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_simulation import LIMITS, NODES, SIDECAR, Simulation, job_object

from atp_operator import intake, planning, sizes
from atp_operator.admission import (
    CHECK_JOB,
    CHECKS,
    INJECT,
    NAMED_ELSEWHERE,
    BadReview,
    read_review,
    review_answer,
    tells_of_the_pod,
    uid_of,
)
from atp_operator.claims import doubt, seal, vouched
from atp_operator.conditions import STALLED
from atp_operator.desired import desired_guards, desired_jobs
from atp_operator.fair import Backoff, interleave
from atp_operator.model import Job, Pod, Switch
from atp_operator.planning import ADMISSIONS, Snapshot, plan_cluster
from atp_operator.reasons import PLAN_FAILED, STATUS_REJECTED, WRITE_FAILED

Object = dict[str, Any]


def settle(sim: Simulation, passes: int = 8) -> None:
    for _ in range(passes):
        sim.step()
        sim.kubelet(random.Random(1))


def two_tenants() -> Simulation:
    """Victim v (team-a/v) and forger f (team-b/f), both running below switch s0."""
    sim = Simulation({"s0": 4096}, {"s0": list(NODES)}, [])
    sim.jobs["v"] = job_object("v", sim.now, "v")
    sim.jobs["f"] = job_object("f", sim.now + 1, "f", namespace="team-b")
    settle(sim)
    for uid in ("v", "f"):
        assert (sim.jobs[uid]["status"]["phase"], sim.jobs[uid]["status"]["mode"]) == ("Running", "Shared")
    return sim


def programmed(sim: Simulation, uid: str) -> list[tuple[int, int, bytes]]:
    """(job ID, epoch, what the switch is told) of one job, from what is stored now."""
    switches = {n: Switch.from_object(raw, {}, sim.views[n]) for n, raw in sim.switches.items()}
    return [
        (job.job_id, job.epoch, job.SerializeToString(deterministic=True))
        for job in desired_jobs(switches["s0"], sim.believed())
        if job.uid == uid
    ]


def placement(change: Any) -> Any:
    def how(status: Object, _: Object) -> None:
        status["placement"] = change(copy.deepcopy(status["placement"]))

    return how


FORGERIES: dict[str, Any] = {
    "unreadable placement": placement(lambda p: {"workers": 7}),
    "placement that is a text": lambda status, _: status.update(placement="x"),
    "placement without servers": placement(lambda p: {**p, "parameterServers": [{}]}),
    "numbers out of range": placement(lambda p: {**p, "workers": [{**p["workers"][0], "bit": 2**70}]}),
    "an address of somebody else": placement(
        lambda p: {**p, "workers": [{**w, "address": "10.9.9.9"} for w in p["workers"]]}
    ),
    "a seat more": placement(lambda p: {**p, "workers": [*p["workers"], {**p["workers"][0], "rank": 1, "bit": 9}]}),
    "another job's ID": lambda status, victim: status.update(jobId=victim["jobId"]),
    "a free job ID": lambda status, _: status.update(jobId=200),
    "the ID of all HostOnly jobs": lambda status, _: status.update(jobId=255),
    "a job ID beyond": lambda status, _: status.update(jobId=70_000),
    "all aggregators": lambda status, _: status.update(regions=[{"start": 0, "size": 4096}]),
    "a range outside": lambda status, _: status.update(regions=[{"start": 65_536, "size": 2**40}]),
    "another job's whole status": lambda status, victim: (status.clear(), status.update(copy.deepcopy(victim))),
    "an epoch to overflow": lambda status, _: status.update(epoch=2**63 - 1),
    "another epoch": lambda status, _: status.update(epoch=status["epoch"] + 1),
    "not admitted": lambda status, _: status.pop("admittedTime"),
    "a time that is none": lambda status, _: status.update(startTime="9999-99-99T00:00:00Z"),
    "larger than any": lambda status, _: status.update(message="x" * sizes.STATUS_BYTES_MAX),
}


@pytest.mark.parametrize("how", FORGERIES)
def test_a_forged_status_stops_its_own_job_alone(how: str) -> None:
    sim = two_tenants()
    before, own = programmed(sim, "v"), programmed(sim, "f")
    assert len(before) == len(own) == 1
    FORGERIES[how](sim.jobs["f"]["status"], sim.jobs["v"]["status"])
    assert programmed(sim, "v") == before
    assert programmed(sim, "f") in ([], own), "nothing that was forged reaches a switch"
    sim.jobs["n"] = job_object("n", sim.now, "n", namespace="team-c")
    plan = sim.step()
    forger = next(p for p in plan.jobs if p.job.uid == "f")
    assert [e.reason for e in forger.events] == [STATUS_REJECTED]
    stalled = next(c for c in sim.jobs["f"]["status"]["conditions"] if c["type"] == STALLED)
    assert stalled["status"] == "True" and "only the operator writes" in stalled["message"]
    assert programmed(sim, "v") == before and programmed(sim, "f") == []
    settle(sim)
    assert programmed(sim, "v") == before, "the victim's switch never heard of it"
    assert sim.jobs["v"]["status"]["epoch"] == 1
    assert sim.jobs["n"]["status"]["phase"] == "Running", "others are admitted"
    again = sim.jobs["f"]["status"]
    assert again["phase"] == "Running" and again["epoch"] == 2, "the forger begins again, as a new epoch"
    assert not [c for c in again["conditions"] if c["type"] == STALLED]
    assert {i for i, _, _ in programmed(sim, "f")}.isdisjoint({before[0][0], own[0][0]})


def test_a_forged_place_without_a_switch_reaches_no_guard() -> None:
    """A job without aggregators has no entry in a ledger: its hosts count only as far as its pods are there."""
    sim = Simulation({"s0": 4096}, {"s0": list(NODES)}, [])
    sim.jobs["v"] = job_object("v", sim.now, "v")
    sim.jobs["f"] = job_object("f", sim.now + 1, "f", namespace="team-b", mode="HostOnly")
    settle(sim)
    address = sim.jobs["v"]["status"]["placement"]["workers"][0]["address"]

    def guarded() -> dict[str, set[str]]:
        snapshot = sim.snapshot()
        jobs = [j for j in snapshot.jobs if not doubt(j, snapshot.switches, snapshot.pods.get(j.key, ()))]
        jobs = [j for j in jobs if vouched(j, snapshot.switches, snapshot.pods.get(j.key, ()))]
        return {g.uid: {h.endpoint.address for h in g.hosts} for g in desired_guards(snapshot.switches["s0"], jobs)}

    before = guarded()
    assert set(before) == {"v", "f"} and address in before["v"] and address not in before["f"]
    placement = sim.jobs["f"]["status"]["placement"]
    for change in ({"address": address}, {"address": address, "podUid": "nobody"}, {"podUid": "nobody"}):
        forged = copy.deepcopy(placement)
        forged["workers"][0].update(change)
        sim.jobs["f"]["status"]["placement"] = forged
        assert guarded() == {"v": before["v"]}
    forged = copy.deepcopy(placement)
    forged["workers"].append({**placement["workers"][0], "rank": 2, "address": address, "podUid": "nobody"})
    sim.jobs["f"]["status"]["placement"] = forged
    assert guarded() == {"v": before["v"]}
    settle(sim)
    sim.now += 10
    settle(sim)
    after = guarded()
    assert after["v"] == before["v"] and address not in after["f"], "it begins again with its own pods"
    assert sim.jobs["f"]["status"]["epoch"] == 2


def test_an_old_status_of_ones_own_is_no_claim() -> None:
    """What the job had in an epoch before is somebody else's by now."""
    sim = two_tenants()
    old = copy.deepcopy(sim.jobs["f"]["status"])
    sim.jobs["f"]["spec"]["suspend"] = True
    settle(sim)
    sim.now += LIMITS.quarantine + 2
    sim.jobs["n"] = job_object("n", sim.now, "n", namespace="team-c")
    settle(sim)
    (heir,) = programmed(sim, "n")
    assert heir[0] == old["jobId"], "the job ID has rested and was given away"
    sim.jobs["f"]["status"] = old
    assert programmed(sim, "f") == [] and programmed(sim, "n") == [heir]
    settle(sim)
    assert programmed(sim, "n") == [heir]


def test_what_was_asked_for_cannot_grow_behind_a_status_that_comes_back() -> None:
    """Without its status a job is not admitted, so its spec may change; with it again the old claim would be larger."""
    sim = two_tenants()
    sim.jobs["f"]["spec"]["mode"] = "Reserved"
    assert programmed(sim, "f") == []
    sim.jobs["n"] = job_object("n", sim.now, "n", namespace="team-c")
    settle(sim)
    assert sim.jobs["n"]["status"]["mode"] == "Shared", "the range that all share is still shared"


def test_an_entry_without_seals_is_of_an_earlier_version_and_is_sealed_in_the_next_pass() -> None:
    sim = two_tenants()
    kept = {uid: programmed(sim, uid) for uid in ("v", "f")}
    for entry in sim.switches["s0"]["status"]["jobs"]:
        del entry["seals"]
    settle(sim)
    assert {uid: programmed(sim, uid) for uid in ("v", "f")} == kept
    for entry in sim.switches["s0"]["status"]["jobs"]:
        job = next(j for j in sim.snapshot().jobs if j.uid == entry["uid"])
        assert entry["seals"] == [seal(job, job.status)]
        switches = sim.snapshot().switches
        assert doubt(job, switches) == ""


def test_a_job_that_cannot_be_planned_keeps_what_it_holds_and_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = two_tenants()
    before = {uid: programmed(sim, uid) for uid in ("v", "f")}
    real = planning.step

    def fails(job: Job, pods: Any, world: Any) -> Any:
        if job.uid == "f":
            world.ledger.release(job.uid)
            raise ZeroDivisionError("a fault of the planner")
        return real(job, pods, world)

    monkeypatch.setattr(planning, "step", fails)
    sim.jobs["n"] = job_object("n", sim.now, "n", namespace="team-c")
    settle(sim)
    assert sim.jobs["n"]["status"]["phase"] == "Running"
    assert {uid: programmed(sim, uid) for uid in ("v", "f")} == before
    stalled = next(c for c in sim.jobs["f"]["status"]["conditions"] if c["type"] == STALLED)
    assert stalled["reason"] == PLAN_FAILED and "a fault of the planner" in stalled["message"]
    monkeypatch.undo()
    settle(sim)
    assert not [c for c in sim.jobs["f"]["status"]["conditions"] if c["type"] == STALLED]


def test_jobs_that_cannot_be_written_keep_nobody_from_being_admitted() -> None:
    sim = Simulation({"s0": 4096}, {"s0": list(NODES)}, [])
    for i in range(40):
        sim.jobs[f"f{i}"] = job_object(f"f{i}", sim.now, f"f{i}", namespace="team-b")
    sim.unwritable = set(sim.jobs)
    sim.jobs["v"] = job_object("v", sim.now + 10, "v")
    settle(sim)
    assert sim.jobs["v"]["status"]["phase"] == "Running"
    assert sim.switches["s0"]["status"]["jobs"][0]["uid"] == "v" and len(sim.switches["s0"]["status"]["jobs"]) == 1
    assert sim.switches["s0"]["status"]["quarantine"] == [], "what takes no finalizer never got into a ledger"


def test_a_job_that_is_left_alone_says_why_and_others_go_on() -> None:
    sim = two_tenants()
    snapshot = sim.snapshot()
    held = Snapshot(
        jobs=snapshot.jobs,
        pods=snapshot.pods,
        switches=snapshot.switches,
        held_back={"f": ("413 too large", sim.now + 7)},
    )
    plan = plan_cluster(held, SIDECAR, LIMITS, sim.now)
    forger = next(p for p in plan.jobs if p.job.uid == "f")
    assert forger.held_back and not forger.acts and not forger.moves and forger.wake_at == sim.now + 7
    condition = forger.status.condition(STALLED)
    assert condition is not None and (condition["reason"], condition["message"]) == (WRITE_FAILED, "413 too large")
    held_ids = {entry["uid"] for entry in plan.switch_statuses["s0"]["jobs"]}
    assert held_ids == {"v", "f"}, "it keeps what it holds"


def test_namespaces_are_admitted_in_turn() -> None:
    """A flood of one tenant's older jobs, more than a plan lets in: another's first job is among the first."""
    sim = Simulation({"s0": 4096}, {"s0": list(NODES)}, [])
    for i in range(3 * ADMISSIONS):
        sim.jobs[f"f{i}"] = job_object(f"f{i}", sim.now, f"f{i}", namespace="team-b", mode="HostOnly")
    sim.step()
    sim.jobs["v"] = job_object("v", sim.now + 10, "v")
    sim.step()
    sim.step()
    assert sim.jobs["v"]["status"]["phase"] in ("Admitted", "Starting")
    waiting = [raw for uid, raw in sim.jobs.items() if uid != "v" and raw["status"]["phase"] == "Pending"]
    assert waiting and {raw["status"]["reason"] for raw in waiting} <= {"Queued", "Admitting"}
    settle(sim)
    assert all(raw["status"]["phase"] == "Running" for raw in sim.jobs.values()), "all have their turn"


def test_nobody_can_take_the_last_job_ids() -> None:
    """Of 96 job IDs 24 are kept for namespaces with fewer than 3 jobs."""
    sim = Simulation({"s0": 4096}, {"s0": list(NODES)}, [])
    capacity = sim.views["s0"].capacity
    assert capacity is not None
    sim.views["s0"] = replace(sim.views["s0"], capacity=replace(capacity, job_ids=96))
    for i in range(100):
        sim.jobs[f"f{i}"] = job_object(f"f{i}", sim.now, f"f{i}", namespace="team-b", workers=1)
    for _ in range(15):
        sim.step()
    held = [raw for raw in sim.jobs.values() if raw["status"].get("jobId")]
    assert len(held) == 96 - 24
    waits = next(raw["status"] for raw in sim.jobs.values() if not raw["status"].get("jobId"))
    assert waits["reason"] == "JobIDsExhausted" and "kept for namespaces with fewer than 3 jobs" in waits["message"]
    for i in range(5):
        sim.jobs[f"v{i}"] = job_object(f"v{i}", sim.now + i, f"v{i}", workers=1)
    settle(sim)
    got = [uid for uid in sim.jobs if uid.startswith("v") and sim.jobs[uid]["status"].get("jobId")]
    assert got == ["v0", "v1", "v2"]


def test_a_pod_on_its_nodes_network_has_no_address() -> None:
    raw = {
        "metadata": {"name": "j-worker-0", "labels": {"atp.dev/role": "worker", "atp.dev/rank": "0"}},
        "spec": {"hostNetwork": True, "nodeName": "n0"},
        "status": {"phase": "Running", "podIP": "192.0.2.1"},
    }
    assert Pod.from_object(raw).address == ""
    raw["spec"]["hostNetwork"] = False
    assert Pod.from_object(raw).address == "192.0.2.1"
    raw["metadata"]["labels"] |= {"atp.dev/epoch": "9" * 60, "atp.dev/rank": "٣"}
    assert (Pod.from_object(raw).epoch, Pod.from_object(raw).rank) == (0, -1)


# --- sizes -----------------------------------------------------------------------------------------------------------


def large(**parts: Any) -> Object:
    raw = job_object("j", 0, "u")
    raw["metadata"].update(parts.pop("metadata", {}))
    raw["spec"]["workers"]["template"].update(parts)
    return raw


TOO_LARGE: dict[str, tuple[Object, str]] = {
    "template": (large(x="y" * 550_000), "spec has 550"),
    "many small values": (large(x=list(range(40_000))), "spec has "),
    "annotations": (large(metadata={"annotations": {"a": "b" * 40_000}}), "metadata has 40"),
    "labels": (large(metadata={"labels": {f"l{i}": "v" * 60 for i in range(600)}}), "metadata has "),
    "finalizers": (large(metadata={"finalizers": [f"example.org/{i}" for i in range(3000)]}), "metadata has "),
    "owners": (
        large(metadata={"ownerReferences": [{"name": "n" * 200, "uid": str(i)} for i in range(200)]}),
        "metadata has ",
    ),
    "managed fields": (
        large(metadata={"managedFields": [{"manager": str(i), "fieldsV1": {"f:x": "y" * 5000}} for i in range(90)]}),
        "managedFields",
    ),
    "last applied": (
        large(metadata={"annotations": {sizes.LAST_APPLIED: "z" * 410_000}}),
        "last-applied-configuration",
    ),
}


@pytest.mark.parametrize("part", TOO_LARGE)
def test_what_is_too_large_is_refused_with_the_number_and_never_runs(part: str) -> None:
    raw, says = TOO_LARGE[part]
    answer = CHECKS[CHECK_JOB]({"uid": "1", "object": raw}, SIDECAR)
    assert len(answer.refused) == 1 and says in answer.refused[0] and "at most" in answer.refused[0]
    assert not answer.trial
    # Stored all the same, as before this limit or without the webhook: it waits with the reason, and costs nothing.
    kept = intake.keep_job(raw, SIDECAR)
    assert kept["problems"] == list(answer.refused)
    assert sizes.json_bytes(kept) < 40_000
    # It can be changed, but not grow.
    old = copy.deepcopy(raw)
    assert CHECKS[CHECK_JOB]({"uid": "1", "object": raw, "oldObject": old}, SIDECAR).refused == ()


def test_what_is_kept_of_a_job_does_not_grow_with_its_templates() -> None:
    small, big = job_object("j", 0, "u"), large(x="y" * 90_000, metadata={"annotations": {"a": "b" * 30_000}})
    assert sizes.json_bytes(intake.keep_job(big, SIDECAR)) == sizes.json_bytes(intake.keep_job(small, SIDECAR))
    assert "problems" not in intake.keep_job(big, SIDECAR)


def test_templates_are_looked_at_once_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    real = intake.job_problems
    monkeypatch.setattr(intake, "job_problems", lambda raw, sidecar: looked.append(1) or real(raw, sidecar))
    keep = intake.JobKeeper(SIDECAR, most=2)
    raw = large(spec={"containers": []})
    kept = keep(copy.deepcopy(raw))
    assert "containers is empty" in kept["problems"][0]
    raw["metadata"]["annotations"] = {"a": "b"}
    assert keep(copy.deepcopy(raw)) == kept and len(looked) == 1
    raw["metadata"]["generation"] = 2
    raw["spec"]["workers"]["template"]["spec"] = {"containers": [{"name": "t", "image": "i"}]}
    assert "problems" not in keep(copy.deepcopy(raw)) and len(looked) == 2
    raw["metadata"]["annotations"] = {"a": "b" * 40_000}
    assert "metadata has" in keep(copy.deepcopy(raw))["problems"][0] and len(looked) == 2
    for uid in ("x", "y", "u"):
        raw["metadata"].update(uid=uid, annotations={})
        keep(copy.deepcopy(raw))
    assert len(looked) == 5, "only the last ones are remembered"


def test_what_is_kept_of_a_pod_does_not_grow_with_it() -> None:
    raw = {
        "metadata": {
            "name": "j-worker-0",
            "namespace": "n",
            "uid": "u",
            "labels": {"atp.dev/job": "j", **{f"l{i}": "v" for i in range(5000)}},
            "annotations": {"atp.dev/assignment": "a" * 100_000, "x": "y" * 100_000},
            "ownerReferences": [{"apiVersion": "atp.dev/v1alpha1", "kind": "ATPJob", "uid": "o", "controller": True}],
        },
        "spec": {"containers": [{"name": "t", "env": [{"name": "x", "value": "y" * 100_000}]}], "nodeName": "n0"},
        "status": {"phase": "Failed", "message": "m" * 100_000},
    }
    kept = intake.keep_pod(raw)
    assert kept is not None and sizes.json_bytes(kept) < 4_000
    assert Pod.from_object(kept).node == "n0"
    foreign = copy.deepcopy(raw)
    foreign["metadata"]["ownerReferences"] = []
    assert intake.keep_pod(foreign) is None, "a pod of no job is not kept, whatever its labels say"


def test_nesting_deeper_than_any_template_is_refused() -> None:
    deep: Any = "x"
    for _ in range(500):
        deep = [deep]
    answer = CHECKS[CHECK_JOB]({"uid": "1", "object": large(x=deep)}, SIDECAR)
    assert "nested deeper than 64" in answer.refused[0]
    assert "nested" in intake.keep_job(large(x=deep), SIDECAR)["problems"][0]
    text = b'{"kind":"AdmissionReview","request":{"uid":"abc-1","object":' + b"[" * 100_000 + b"]" * 100_000 + b"}}"
    with pytest.raises(BadReview):
        read_review(text)
    assert uid_of(text) == "abc-1", "so that the API server gets an answer that it can pass on"


FIELDS = st.sampled_from(
    [
        "spec",
        "metadata",
        "labels",
        "containers",
        "initContainers",
        "volumes",
        "volumeMounts",
        "name",
        "env",
        "hostNetwork",
        "restartPolicy",
        "annotations",
        "securityContext",
        "mountPath",
        "serviceAccountName",
        "a",
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(worker=st.dictionaries(FIELDS, VALUES), server=VALUES, containers=st.booleans())
def test_a_template_may_hold_anything(worker: Object, server: Any, containers: bool) -> None:
    """It is refused or kept with its problem; what passes can be made."""
    if containers:
        spec = worker.get("spec") if isinstance(worker.get("spec"), dict) else {}
        worker["spec"] = {**spec, "containers": [{"name": "t", "image": "i"}]}
    raw = job_object("j", 0, "u")
    raw["spec"]["workers"]["template"] = worker
    raw["spec"]["parameterServers"] = {"template": server}
    answer = CHECKS[CHECK_JOB]({"uid": "1", "object": raw}, SIDECAR)
    assert bool(answer.refused) == bool(intake.keep_job(raw, SIDECAR).get("problems"))
    assert bool(answer.refused) != bool(answer.trial)


# --- what a review is told -------------------------------------------------------------------------------------------


def test_a_trial_names_no_namespace_and_nothing_that_may_exist() -> None:
    raw = job_object("j", 0, "u", namespace="secret")
    raw["spec"]["workers"]["template"]["spec"].update(
        serviceAccountName="s", priorityClassName="p", runtimeClassName="r", overhead={"cpu": "1"}
    )
    answer = CHECKS[CHECK_JOB]({"uid": "1", "namespace": "secret", "object": raw}, SIDECAR)
    assert set(answer.trial) == {"spec.workers.template", "spec.parameterServers.template"}
    for pod in answer.trial.values():
        assert "namespace" not in pod["metadata"] and "ownerReferences" not in pod["metadata"]
        assert not [k for k in pod["metadata"]["labels"] if k.startswith("atp.dev/")]
        assert not set(pod["spec"]) & set(NAMED_ELSEWHERE)
        assert pod["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize(
    ("code", "message", "told"),
    [
        (422, 'Pod "atp-dry-run-x" is invalid: spec.containers[0].image: Required value', True),
        (400, 'Pod in version "v1" cannot be handled as a Pod: strict decoding error: unknown field "x"', True),
        (400, 'admission webhook "policy.example" denied the request: image not allowed', False),
        (422, "pods \"x\" is forbidden: ValidatingAdmissionPolicy 'p' denied request", False),
        (403, 'pods "x" is forbidden: error looking up service account', False),
        (404, 'namespaces "x" not found', False),
        (500, "etcd", False),
    ],
)
def test_only_faults_of_the_pod_itself_are_told(code: int, message: str, told: bool) -> None:
    assert tells_of_the_pod(code, message) is told


def test_names_of_other_objects_are_checked_without_looking() -> None:
    raw = job_object("j", 0, "u")
    raw["spec"]["workers"]["template"]["spec"]["serviceAccountName"] = "Foo_Bar"
    answer = CHECKS[CHECK_JOB]({"uid": "1", "object": raw}, SIDECAR)
    assert "spec.workers.template.spec.serviceAccountName 'Foo_Bar'" in answer.refused[0]


def test_an_injected_pod_is_answered_with_a_patch() -> None:
    labels = {"atp.dev/job": "j", "atp.dev/role": "worker", "atp.dev/rank": "0"}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "t"}]}}
    answer = CHECKS[INJECT]({"uid": "1", "object": pod}, SIDECAR)
    assert {op["path"] for op in answer.patch} == {
        "/metadata/annotations",
        "/spec/volumes",
        "/spec/containers",
        "/spec/initContainers",
    }
    review = review_answer("1", answer)["response"]
    assert review["allowed"] and review["patchType"] == "JSONPatch"
    refused = review_answer("1", CHECKS[INJECT]({"uid": "1", "object": {"metadata": {}, "spec": {}}}, SIDECAR))
    assert refused["response"]["allowed"] is False and "patch" not in refused["response"]


@pytest.mark.parametrize("body", [b"", b"x", b"[]", b'{"request":{}}', b'{"request":{"uid":7}}', b"null"])
def test_what_is_no_review_is_refused(body: bytes) -> None:
    with pytest.raises(BadReview):
        read_review(body)


# --- fairness --------------------------------------------------------------------------------------------------------


def test_groups_take_turns_and_the_first_changes() -> None:
    items = ["a1", "a2", "a3", "b1", "c1", "c2"]
    assert interleave(items, lambda i: i[0]) == ["a1", "b1", "c1", "a2", "c2", "a3"]
    assert interleave(items, lambda i: i[0], 4) == ["b1", "c1", "a1", "c2", "a2", "a3"]
    assert interleave([], str) == []


def test_back_off_doubles_ends_and_forgets() -> None:
    backoff = Backoff(1.0, 10.0)
    ends = [backoff.fail("x", "why", 0.0).until for _ in range(6)]
    assert ends == [1, 2, 4, 8, 10, 10]
    assert backoff.fail("x", "why", 0.0, 3.0).until == 3
    assert backoff.waits("x", 2.9) and not backoff.waits("x", 3.0) and not backoff.waits("y", 0)
    assert backoff.done("x") and not backoff.done("x")
    assert backoff.fail("x", "why", 0.0).until == 1
    backoff.keep({"y"})
    assert not backoff.all()


def test_a_plan_for_1800_waiting_jobs_takes_no_longer_than_a_second() -> None:
    sim = Simulation({"s0": 4096, "s1": 4096}, {"s0": ["n0"], "s1": ["n1"]}, [])
    for i in range(1800):
        sim.jobs[f"f{i}"] = job_object(f"f{i}", sim.now, f"f{i}", aggregators={"request": 5000 + i})
    jobs = sim.snapshot()
    plan_cluster(jobs, SIDECAR, LIMITS, sim.now)
    begin = time.process_time()
    plan = plan_cluster(jobs, SIDECAR, LIMITS, sim.now)
    assert time.process_time() - begin < 1.0
    assert {p.status.reason for p in plan.jobs} == {"AggregatorsExhausted"}
    assert len(json.dumps([p.status.to_dict(1) for p in plan.jobs])) < 2_000_000
