# SPDX-License-Identifier: Apache-2.0
"""The operator against a real API server: the whole life of jobs, and what bad input gets."""

from __future__ import annotations

import contextlib
import copy
import json
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from atp_api.switchagent.v1alpha1 import switchagent_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]


def test_job_from_apply_to_release(lab: Any) -> None:
    agent = lab.agent("sw-life", ["node-a"])
    lab.apply_job("life", workers=2)
    lab.cluster.run_pods("life", 3)
    status = lab.phase("life", "Running")
    assert status["mode"] == "Shared" and status["jobId"] == 1 and status["epoch"] == 1
    assert status["switches"] == ["sw-life"] and status["valuesPerPacket"] == 350

    (job,) = agent.jobs()
    assert job.name == "default/life" and job.job_id == 1 and job.values == 350 and job.multicast_group == 1
    assert [(m.rank, m.bit, m.edge) for m in job.members] == [(0, 0, False), (1, 1, False)]
    assert not job.racks and len(job.parameter_servers) == 1

    pods = {p["metadata"]["name"]: p for p in lab.cluster.pods("life")}
    assert set(pods) == {"life-ps-0", "life-worker-0", "life-worker-1"}
    told = json.loads(
        lab.wait_for(
            lambda: lab.cluster.get("pod", "life-worker-1")["metadata"]["annotations"].get("atp.dev/assignment"),
            "assignment",
        )
    )
    assert told["jobId"] == 1 and told["role"] == "worker" and told["rank"] == 1 and told["mode"] == "Shared"
    assert [w["address"] for w in told["workers"]] == [pods[f"life-worker-{r}"]["status"]["podIP"] for r in (0, 1)]
    assert told["parameterServers"] == [{"shard": 0, "address": pods["life-ps-0"]["status"]["podIP"]}]
    worker = pods["life-worker-0"]["spec"]
    assert (
        worker["initContainers"][0]["name"] == "atp-sidecar"
        and worker["initContainers"][0]["restartPolicy"] == "Always"
    )
    env = {e["name"]: e.get("value") for e in worker["containers"][0]["env"]}
    assert env["RANK"] == "0" and env["WORLD_SIZE"] == "2" and env["MASTER_ADDR"] == "life-worker-0.life"
    service = lab.cluster.get("service", "life")
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True

    agent.counters = {"aggregated": 40, "completed": 20, "collisions": 1}
    agent.notify()
    lab.wait_for(lambda: lab.operator and _counters_heard(lab, agent), "counters heard")
    for rank in (0, 1):
        lab.cluster.end_pod(pods[f"life-worker-{rank}"])
    status = lab.phase("life", "Succeeded")
    assert lab.condition("life", "Complete")["status"] == "True"
    assert status["aggregation"]["aggregatedPackets"] == 40 and status["aggregation"]["collisions"] == 1
    lab.wait_for(lambda: agent.jobs() == [], "the switch empty")
    lab.wait_for(lambda: lab.cluster.get("pod", "life-ps-0")["metadata"].get("deletionTimestamp"), "PS deleted")
    events = lab.cluster.kubectl("get", "events", "-n", "default", "-o", "json").stdout
    reasons = {e["reason"] for e in json.loads(events)["items"] if e["involvedObject"]["name"] == "life"}
    assert {"Admitted", "GateOpen", "Succeeded"} <= reasons
    lab.delete_job("life")


def _counters_heard(lab: Any, agent: Any) -> bool:
    import time

    time.sleep(1.5)  # telemetry of the peer comes every 0.5 s
    return True


def test_bad_jobs_are_rejected_at_apply(lab: Any) -> None:
    """By the schema's rules, which need no webhook, or by the webhook; the text names the field and says why."""
    template = lab.job("x")["spec"]["workers"]["template"]
    container = template["spec"]["containers"][0]
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("workers", {"workers": {"replicas": 0, "template": template}}, "at least 1 worker"),
        ("workers", {"workers": {"replicas": 1025, "template": template}}, "at most 1024"),
        ("template", {"workers": {"replicas": 1, "template": {"spec": {"containers": []}}}}, "no containers"),
        ("template", {"workers": {"replicas": 1, "template": {"metadata": {}}}}, "no containers"),
        ("template", {"workers": {"replicas": 1}}, "template"),
        ("scale", {"scale": 0}, "scale must be above 0"),
        ("scale", {"scale": -1}, "scale must be above 0"),
        ("scale", {"scale": "-1.5"}, "scale must be above 0"),
        ("scale", {"scale": 2147483649}, "at most 2147483648"),
        ("scale", {"scale": "1e10"}, "at most 2147483648"),
        ("scale", {"scale": "auto"}, "write Auto with a capital A"),
        ("scale", {"scale": "1e400"}, "a decimal number in quotes"),
        ("scale", {"scale": "large"}, "a decimal number in quotes"),
        ("scale", {"scale": 0.5}, "must be of type integer,string"),
        ("mode", {"mode": "Fast"}, "HostOnly"),
        ("request", {"aggregators": {"request": 65537}}, "65536"),
        ("floor", {"aggregators": {"request": 100, "floor": 101}}, "must be at most aggregators.request"),
        ("floor", {"aggregators": {"floor": 1025}}, "must be at most aggregators.request"),
        ("floor", {"aggregators": {"floor": -1}}, "must not be negative"),
        ("floor", {"mode": "Reserved", "aggregators": {"floor": 1}}, "is for mode Shared"),
        ("floor", {"mode": "HostOnly", "aggregators": {"floor": 1}}, "is for mode Shared"),
        ("valuesPerPacket", {"valuesPerPacket": 61}, "62"),
        ("parameterServers", {"parameterServers": {"replicas": 3}}, "must be 1, 2, 4 or 8"),
        ("parameterServers", {"parameterServers": {"replicas": 16}}, "at most 8 ports"),
        (
            "spec.parameterServers.template",
            {"parameterServers": {"replicas": 4, "template": {"spec": {"priority": "high"}}}},
            "priority",
        ),
        (
            "hostNetwork",
            {"workers": {"replicas": 1, "template": {"spec": {**template["spec"], "hostNetwork": True}}}},
            "hostNetwork must be false",
        ),
        (
            "restartPolicy",
            {"workers": {"replicas": 1, "template": {"spec": {**template["spec"], "restartPolicy": "Always"}}}},
            "restartPolicy must be Never",
        ),
        (
            "name",
            {"workers": {"replicas": 1, "template": {"spec": {"containers": [{**container, "name": "atp-sidecar"}]}}}},
            "atp-sidecar",
        ),
        (
            "volume",
            {
                "workers": {
                    "replicas": 1,
                    "template": {"spec": {**template["spec"], "volumes": [{"name": "atp-shm", "emptyDir": {}}]}},
                }
            },
            "atp-shm",
        ),
        # Only the webhook looks into mounts.
        (
            "volumeMounts",
            {
                "workers": {
                    "replicas": 1,
                    "template": {
                        "spec": {
                            "containers": [{**container, "volumeMounts": [{"name": "v", "mountPath": "/run/atp"}]}]
                        }
                    },
                }
            },
            "/run/atp",
        ),
    ]
    for field, change, text in cases:
        manifest = lab.job("bad")
        manifest["spec"].update(change)
        done = lab.cluster.kubectl("apply", "--dry-run=server", "-f", "-", stdin=json.dumps(manifest), check=False)
        assert done.returncode != 0, f"{change} was accepted"
        assert field in done.stderr and text in done.stderr, f"{change}: {done.stderr}"
    long = lab.job("a" * 52)
    done = lab.cluster.kubectl("apply", "--dry-run=server", "-f", "-", stdin=json.dumps(long), check=False)
    assert "at most 51 characters" in done.stderr
    assert lab.cluster.apply({**lab.job("good"), "kind": "ATPJob"}).returncode == 0
    lab._jobs.append("good")


def test_bad_switches_and_quotas_are_rejected(lab: Any) -> None:
    def refused(kind: str, spec: dict[str, Any], text: str) -> None:
        manifest = {"apiVersion": "atp.dev/v1alpha1", "kind": kind, "metadata": {"name": "bad"}, "spec": spec}
        done = lab.cluster.kubectl("apply", "--dry-run=server", "-f", "-", stdin=json.dumps(manifest), check=False)
        assert done.returncode != 0 and text in done.stderr, done.stderr

    refused("ATPSwitch", {"type": "Tofino", "agent": {"address": "somewhere"}}, "host:port")
    refused("ATPSwitch", {"type": "Tofino", "agent": {"address": "10.0.0.1:99999"}, "nodes": ["n"]}, "host:port")
    refused("ATPSwitch", {"type": "Tofino", "agent": {"address": "10.0.0.1:9560"}}, "which nodes")
    refused("ATPTenantQuota", {"namespaceSelector": {}}, "limits nothing")
    refused(
        "ATPTenantQuota",
        {"namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}, "maxJobs": 1},
        "values must be given",
    )


def test_quota_queue_admits_when_room_appears(lab: Any) -> None:
    lab.agent("sw-quota", ["node-a"])
    lab.quota("team", maxJobs=1, nominalQuota={"aggregators": 1024})
    lab.apply_job("first", workers=1)
    lab.phase("first", "Admitted", "Starting")
    lab.apply_job("second", workers=1)
    status = lab.wait_for(lambda: (s := lab.cluster.status("second")).get("reason") == "QuotaExceeded" and s, "queued")
    assert status["phase"] == "Pending"
    assert status["message"] == "needs 1 job under quota team: 0 free of 1"
    assert lab.cluster.pods("second") == []
    quota = lab.wait_for(
        lambda: (q := lab.cluster.get("atptenantquota", "team")).get("status", {}).get("pendingJobs") and q, "usage"
    )
    assert quota["status"]["admittedJobs"] == 1 and quota["status"]["usage"] == [
        {"switch": "sw-quota", "aggregators": 1024}
    ]
    lab.delete_job("first")
    lab.phase("second", "Admitted", "Starting")

    lab.quota("team", maxJobs=5, nominalQuota={"aggregators": 1536})
    lab.apply_job("third", workers=1)
    status = lab.wait_for(lambda: (s := lab.cluster.status("third")).get("reason") == "QuotaExceeded" and s, "queued")
    assert status["message"] == "needs 1024 aggregators on switch sw-quota under quota team: 512 free of 1536"


def test_reserved_job_waits_for_free_aggregators(lab: Any) -> None:
    agent = lab.agent("sw-small", ["node-a"], aggregators=1500)
    lab.apply_job("big", workers=1, mode="Reserved")
    lab.phase("big", "Admitted", "Starting")
    lab.apply_job("bigger", workers=1, mode="Reserved")
    status = lab.wait_for(
        lambda: (s := lab.cluster.status("bigger")).get("reason") == "AggregatorsExhausted" and s, "queued"
    )
    assert status["message"] == "needs 1024 aggregators on switch sw-small: 476 free of 1500"
    lab.cluster.run_pods("big", 2)
    lab.phase("big", "Running")
    (job,) = agent.jobs()
    assert [(r.start, r.size) for r in job.regions] == [(476, 1024)]
    lab.delete_job("big")
    lab.phase("bigger", "Admitted", "Starting")


def test_a_floor_is_this_jobs_alone(lab: Any) -> None:
    agent = lab.agent("sw-floor", ["node-a"], aggregators=1600)
    lab.apply_job("floored", workers=1, aggregators={"request": 1024, "floor": 300})
    lab.phase("floored", "Admitted", "Starting")
    lab.apply_job("second", workers=1, aggregators={"request": 200, "floor": 101})
    status = lab.wait_for(
        lambda: (s := lab.cluster.status("second")).get("reason") == "AggregatorsExhausted" and s, "queued"
    )
    assert status["message"] == "the floor needs 101 aggregators on switch sw-floor: 100 free of 1600"
    lab.cluster.run_pods("floored", 2)
    status = lab.phase("floored", "Running")
    own = {"start": 1300, "size": 300, "floor": True}
    assert status["regions"] == [{"start": 0, "size": 1200}, own] and status["floor"] == 300
    (job,) = agent.jobs()
    assert [(r.start, r.size) for r in job.regions] == [(0, 1200), (1300, 300)]
    changed = json.dumps({"spec": {"aggregators": {"floor": 299}}})
    done = lab.cluster.kubectl("patch", "atpjob", "floored", "--type=merge", "-p", changed, check=False)
    assert done.returncode != 0 and "cannot change once the job is admitted" in done.stderr
    lab.delete_job("floored")
    lab.phase("second", "Admitted", "Starting")


def test_unknown_switch_waits_until_it_appears(lab: Any) -> None:
    lab.apply_job("lost", workers=1, switches=["sw-later"])
    status = lab.wait_for(lambda: (s := lab.cluster.status("lost")).get("reason") == "UnknownSwitch" and s, "reason")
    assert status["phase"] == "Pending" and "sw-later" in status["message"]
    lab.agent("sw-later", ["node-a"])
    assert lab.phase("lost", "Admitted", "Starting")["switches"] == ["sw-later"]


def test_too_many_workers_for_the_fan_in(lab: Any) -> None:
    lab.agent("sw-fan", ["node-a"])
    lab.apply_job("crowd", workers=33)
    status = lab.wait_for(lambda: (s := lab.cluster.status("crowd")).get("reason") == "FanInExceeded" and s, "reason")
    assert "33" in status["message"] and "32 is what switch sw-fan can do" in status["message"]


def test_operator_killed_at_any_point_converges(lab: Any) -> None:
    agent = lab.agent("sw-crash", ["node-a"])
    operator = lab.operator
    lab.apply_job("crash", workers=1)
    lab.phase("crash", "Admitted", "Starting")
    operator.kill()  # pods may or may not be made
    operator.start()
    lab.cluster.run_pods("crash", 2)
    operator.kill()  # the switch may or may not be programmed, the gate open or not
    operator.start()
    status = lab.phase("crash", "Running")
    uid = lab.wait_for(lambda: agent.jobs(), "programmed")[0].uid
    assert status["mode"] == "Shared"
    annotation = lab.wait_for(
        lambda: lab.cluster.get("pod", "crash-worker-0")["metadata"]["annotations"].get("atp.dev/assignment"),
        "assignment",
    )
    operator.kill()
    (worker,) = [p for p in lab.cluster.pods("crash") if p["metadata"]["name"] == "crash-worker-0"]
    lab.cluster.end_pod(worker)
    operator.start()
    done = lab.phase("crash", "Succeeded")
    assert (done["epoch"], done["jobId"], done["retries"]) == (1, status["jobId"], 0)
    assert json.loads(annotation)["epoch"] == 1
    lab.wait_for(lambda: agent.jobs() == [], "the switch empty")
    # Through all that the switch never held anything but this one job, in one form.
    forms = {j.SerializeToString(deterministic=True) for state in agent.history for j in state.jobs}
    assert len(forms) == 1 and {j.uid for s in agent.history for j in s.jobs} == {uid}


def test_deletion_releases_switch_and_rests_the_job_id(lab: Any) -> None:
    agent = lab.agent("sw-del", ["node-a"])
    lab.apply_job("gone", workers=1)
    lab.cluster.run_pods("gone", 2)
    lab.phase("gone", "Running")
    assert "atp.dev/release" in lab.cluster.get("atpjob", "gone")["metadata"]["finalizers"]
    lab.delete_job("gone")
    assert agent.jobs() == []
    switch = lab.wait_for(
        lambda: (s := lab.cluster.get("atpswitch", "sw-del")["status"]).get("quarantine") and s, "rest"
    )
    assert switch["jobs"] == [] and switch["quarantine"][0]["jobId"] == 1 and switch["inUse"]["jobs"] == 0
    lab.apply_job("after", workers=1)
    assert lab.phase("after", "Admitted", "Starting")["jobId"] == 2
    lab.wait_for(lambda: lab.cluster.get("atpswitch", "sw-del")["status"]["quarantine"] == [], "rest over", 20)


def test_switch_away_means_host_only_never_a_block(lab: Any) -> None:
    lab.agent("sw-dead", ["node-a"], start=False)
    lab.apply_job("alone", workers=1, switches=["sw-dead"])
    status = lab.wait_for(lambda: (s := lab.cluster.status("alone")).get("reason") == "WaitingForSwitch" and s, "waits")
    assert "sw-dead" in status["message"]
    lab.phase("alone", "Admitted", "Starting", seconds=20)
    lab.cluster.run_pods("alone", 2)
    status = lab.phase("alone", "Running")
    assert status["mode"] == "HostOnly" and status["jobId"] == 255 and "switches" not in status
    condition = lab.condition("alone", "NetworkAggregation")
    assert condition["status"] == "False" and condition["reason"] == "NoUsableSwitch"
    text = lab.wait_for(
        lambda: lab.cluster.get("pod", "alone-ps-0")["metadata"]["annotations"].get("atp.dev/assignment"), "gate"
    )
    assert json.loads(text)["mode"] == "HostOnly" and json.loads(text)["role"] == "parameterServer"
    events = json.loads(lab.cluster.kubectl("get", "events", "-n", "default", "-o", "json").stdout)["items"]
    assert any(
        e["reason"] == "HostOnly" and e["type"] == "Warning" for e in events if e["involvedObject"]["name"] == "alone"
    )


def test_agent_that_refuses_means_host_only(lab: Any) -> None:
    agent = lab.agent("sw-full", ["node-a"])
    agent.answer = lambda _: (pb.JobStatus.FAILED, "SwitchFull", "the table atp_member has 0 of 64 entries free")
    lab.apply_job("refused", workers=1)
    lab.cluster.run_pods("refused", 2)
    status = lab.phase("refused", "Running")
    assert status["mode"] == "HostOnly"
    condition = lab.condition("refused", "NetworkAggregation")
    assert condition["reason"] == "SwitchFull" and "0 of 64 entries free" in condition["message"]
    lab.wait_for(lambda: agent.jobs() == [], "given back")
    assert status["reason"] == "SwitchFull"
    assert ("Warning", "SwitchFull") in lab.events("ATPSwitch", "sw-full")
    lab.wait_for(lambda: lab.switch_condition("sw-full", "InSync")["status"] == "True", "in sync without the job")


def test_what_the_agent_meets_is_told_on_switch_and_job(lab: Any) -> None:
    """Over real telemetry: another controller, another program, an unknown port; the job runs on and comes back."""
    agent = lab.agent("sw-trouble", ["node-a"])
    lab.apply_job("patient", workers=1)
    lab.cluster.run_pods("patient", 2)
    lab.phase("patient", "Running")
    for reason, kind, connected in (
        ("NotMaster", "Connected", False),
        ("PipelineMismatch", "PipelineMatches", True),
        ("PortUnresolved", "InSync", True),
    ):
        agent.connected, agent.trouble = connected, (reason, f"the agent met {reason}")
        agent.notify()
        condition = lab.wait_for(
            lambda kind=kind, reason=reason: (
                (c := lab.switch_condition("sw-trouble", kind)).get("reason") == reason and c
            ),
            f"condition {kind}",
        )
        assert condition["status"] == "False"
        assert f"the agent met {reason}" in condition["message"] and f"advice on {reason}" in condition["message"]
        lab.wait_for(
            lambda reason=reason: (s := lab.cluster.status("patient"))["mode"] == "HostOnly" and s["reason"] == reason,
            "HostOnly",
        )
        agent.connected, agent.trouble = True, ("", "")
        agent.notify()
        lab.wait_for(lambda: lab.cluster.status("patient")["mode"] == "Shared", "Shared again")
        lab.wait_for(lambda kind=kind: lab.switch_condition("sw-trouble", kind)["status"] == "True", f"{kind} again")
        assert ("Warning", reason) in lab.events("ATPSwitch", "sw-trouble")
        assert ("Normal", "InSync") in lab.events("ATPSwitch", "sw-trouble")
    assert lab.cluster.status("patient")["epoch"] == 1


def test_switch_that_restarts_empty_is_programmed_again(lab: Any) -> None:
    agent = lab.agent("sw-reset", ["node-a"])
    lab.apply_job("steady", workers=1)
    lab.cluster.run_pods("steady", 2)
    lab.phase("steady", "Running")
    agent.stop()
    lab.wait_for(lambda: lab.cluster.status("steady").get("mode") == "HostOnly", "seen as lost", 20)
    assert lab.condition("steady", "SwitchProgrammed")["reason"] == "SwitchUnreachable"
    text = lab.wait_for(
        lambda: (
            (t := lab.cluster.get("pod", "steady-worker-0")["metadata"]["annotations"]["atp.dev/assignment"])
            and json.loads(t)["revision"] == 2
            and t
        ),
        "revision 2",
    )
    assert json.loads(text)["mode"] == "HostOnly" and json.loads(text)["epoch"] == 1
    agent.start()
    lab.wait_for(lambda: [j.name for j in agent.jobs()] == ["default/steady"], "programmed again", 30)
    lab.wait_for(lambda: lab.cluster.status("steady").get("mode") == "Shared", "Shared again")
    assert lab.condition("steady", "NetworkAggregation")["status"] == "True"


def test_failed_worker_restarts_all_as_a_new_epoch(lab: Any) -> None:
    agent = lab.agent("sw-fail", ["node-a"])
    lab.apply_job("flaky", workers=2, backoffLimit=1)
    pods = lab.cluster.run_pods("flaky", 3)
    lab.phase("flaky", "Running")
    lab.cluster.end_pod(next(p for p in pods if p["metadata"]["name"] == "flaky-worker-1"), code=3)
    status = lab.wait_for(lambda: (s := lab.cluster.status("flaky")).get("epoch") == 2 and s, "epoch 2")
    assert status["retries"] == 1 and status["jobId"] == 2
    assert "flaky-worker-1" in status["message"] and "exited with 3" in status["message"]

    def replaced() -> bool:
        lab.cluster.finish_deletions("flaky")
        labels = [p["metadata"]["labels"]["atp.dev/epoch"] for p in lab.cluster.pods("flaky")]
        return labels == ["2"] * 3

    lab.wait_for(replaced, "pods of epoch 2")
    pods = lab.cluster.run_pods("flaky", 3)
    lab.wait_for(lambda: [j.epoch for j in agent.jobs()] == [2], "epoch 2 programmed")
    lab.phase("flaky", "Running")
    lab.cluster.end_pod(next(p for p in pods if p["metadata"]["name"] == "flaky-worker-0"), code=1)
    status = lab.phase("flaky", "Failed")
    assert status["reason"] == "BackoffLimitExceeded" and "1 of 1 restarts" in status["message"]
    lab.wait_for(lambda: agent.jobs() == [], "released")


def told_scale(lab: Any, job: str) -> float | str:
    """The scale in the assignment of the job's first worker."""
    text = lab.wait_for(
        lambda: lab.cluster.get("pod", f"{job}-worker-0")["metadata"]["annotations"].get("atp.dev/assignment"),
        "assignment",
    )
    scale: float | str = json.loads(text)["scale"]
    return scale


def test_ways_to_write_a_scale(lab: Any) -> None:
    """What the API server takes, and what is told to the sidecar."""
    lab.agent("sw-scale", ["node-a"])
    told: dict[str, float | str] = {"Auto": "Auto", "1e8": 1e8, "0.5": 0.5, "1e-05": 1e-5}
    cases: list[tuple[str, Any, float | str]] = [("absent", None, "Auto"), ("whole", 1000, 1000.0)]
    cases += [(f"text-{i}", text, number) for i, (text, number) in enumerate(told.items())]
    for name, scale, number in cases:
        lab.apply_job(name, workers=1, **({} if scale is None else {"scale": scale}))
        lab.cluster.run_pods(name, 2)
        status = lab.phase(name, "Running")
        assert status["scale"] == str("Auto" if scale is None else scale)
        assert told_scale(lab, name) == number
        lab.delete_job(name)


def _define_jobs(lab: Any, definition: dict[str, Any], accepts: Any) -> None:
    """Replaces the definition of ATPJob and waits until the API server goes by it."""
    lab.cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(definition))
    probe = {**lab.job("probe"), "kind": "ATPJob"}
    probe["spec"]["scale"] = accepts

    def goes_by_it() -> bool:
        done = lab.cluster.kubectl("apply", "--dry-run=server", "-f", "-", stdin=json.dumps(probe), check=False)
        return bool(done.returncode == 0)

    lab.wait_for(goes_by_it, "the new definition")


def test_jobs_of_the_schema_that_had_numbers(lab: Any) -> None:
    """They keep the number that they run with; a fraction, which is no value any more, blocks no update."""
    now = yaml.safe_load((ROOT / "crds/atpjob.yaml").read_text())
    before = copy.deepcopy(now)
    schema = before["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["properties"]["spec"]["properties"]["scale"] = {"type": "number", "default": 100000000}
    del schema["properties"]["status"]["properties"]["scale"]
    rules = schema["x-kubernetes-validations"]
    rules[:] = [rule for rule in rules if "scale" not in rule["rule"]]
    lab.agent("sw-old", ["node-a"])
    try:
        _define_jobs(lab, before, 0.25)
        told: dict[str, float] = {"default": 1e8, "fraction": 0.5}
        for name in told:
            lab.apply_job(name, workers=1, **({"scale": 0.5} if name == "fraction" else {}))
            lab.cluster.run_pods(name, 2)
            assert "scale" not in lab.phase(name, "Running")
    finally:
        _define_jobs(lab, now, "Auto")
    lab.wait_for(lambda: lab.cluster.get("atpjob", "fraction")["spec"]["scale"] == "0.5", "the fraction in quotes")
    lab.wait_for(lambda: lab.cluster.status("fraction").get("scale") == "0.5", "the scale in the status")
    lab.wait_for(lambda: lab.cluster.status("default").get("scale") == "100000000", "the scale in the status")
    for name, number in told.items():
        status = lab.cluster.status(name)
        assert status["phase"] == "Running" and status["epoch"] == 1
        assert told_scale(lab, name) == number
        for other in (7, "Auto", "0.25"):
            change = json.dumps({"spec": {"scale": other}})
            refused = lab.cluster.kubectl("patch", "atpjob", name, "--type=merge", "-p", change, check=False)
            assert "set spec.suspend to true first" in refused.stderr
    lab.cluster.kubectl("patch", "atpjob", "default", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    assert "scale" not in lab.phase("default", "Suspended")
    again = '{"spec":{"suspend":false,"scale":"Auto"}}'
    lab.cluster.kubectl("patch", "atpjob", "default", "--type=merge", "-p", again)
    assert lab.phase("default", "Admitted", "Starting")["scale"] == "Auto"
    for name in told:
        lab.delete_job(name)


def test_suspend_and_resume(lab: Any) -> None:
    agent = lab.agent("sw-susp", ["node-a"])
    lab.apply_job("nap", workers=1)
    lab.cluster.run_pods("nap", 2)
    lab.phase("nap", "Running")
    refused = lab.cluster.kubectl(
        "patch", "atpjob", "nap", "--type=merge", "-p", '{"spec":{"scale":1000}}', check=False
    )
    assert "set spec.suspend to true first" in refused.stderr
    lab.cluster.kubectl("patch", "atpjob", "nap", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    status = lab.phase("nap", "Suspended")
    assert "jobId" not in status
    lab.wait_for(lambda: agent.jobs() == [], "released")
    lab.cluster.kubectl("patch", "atpjob", "nap", "--type=merge", "-p", '{"spec":{"suspend":false,"scale":1000}}')
    lab.phase("nap", "Admitted", "Starting")

    def fresh() -> bool:
        lab.cluster.finish_deletions("nap")
        return [p["metadata"]["labels"]["atp.dev/epoch"] for p in lab.cluster.pods("nap")] == ["2", "2"]

    lab.wait_for(fresh, "pods of epoch 2")
    lab.cluster.run_pods("nap", 2)
    status = lab.phase("nap", "Running")
    assert status["epoch"] == 2 and status["jobId"] == 2
    told = lab.wait_for(
        lambda: lab.cluster.get("pod", "nap-worker-0")["metadata"]["annotations"].get("atp.dev/assignment"), "gate"
    )
    assert json.loads(told)["scale"] == 1000


def test_finished_job_is_deleted_after_its_ttl(lab: Any) -> None:
    lab.agent("sw-ttl", ["node-a"])
    lab.apply_job("brief", workers=1, ttlSecondsAfterFinished=1)
    pods = lab.cluster.run_pods("brief", 2)
    lab.phase("brief", "Running")
    lab.cluster.end_pod(next(p for p in pods if p["metadata"]["name"] == "brief-worker-0"))
    lab.phase("brief", "Succeeded")

    def gone() -> bool:
        lab.cluster.finish_deletions("brief")
        return not lab.cluster.get("atpjob", "brief")

    lab.wait_for(gone, "deleted by its TTL")


def test_unschedulable_pod_is_the_reason(lab: Any) -> None:
    lab.agent("sw-gang", ["node-a"])
    lab.apply_job("gang", workers=2)
    lab.wait_for(lambda: len(lab.cluster.pods("gang")) == 3, "pods")
    pods = lab.cluster.pods("gang")
    worker = next(p for p in pods if p["metadata"]["name"] == "gang-worker-1")
    lab.cluster.patch_status(
        worker,
        {
            "conditions": [
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": "0/1 nodes: 1 Insufficient cpu",
                }
            ]
        },
    )
    status = lab.wait_for(lambda: (s := lab.cluster.status("gang")).get("reason") == "Unschedulable" and s, "reason")
    assert status["message"] == "0 of 3 pods are there; pod gang-worker-1: 0/1 nodes: 1 Insufficient cpu"
    assert lab.condition("gang", "PodsReady")["status"] == "False"


def test_two_racks_make_a_two_level_tree(lab: Any) -> None:
    rack, root = lab.agent("sw-rack", ["node-b"], values=(62, 350)), lab.agent("sw-root", ["node-a"], values=(62,))
    lab.apply_job("wide", workers=3)
    where = {"wide-ps-0": "node-a", "wide-worker-0": "node-a", "wide-worker-1": "node-b", "wide-worker-2": "node-b"}
    lab.cluster.run_pods("wide", 4, node=lambda name: where[name])
    status = lab.phase("wide", "Running")
    assert status["switches"] == ["sw-rack", "sw-root"] and status["valuesPerPacket"] == 62
    (low,), (high,) = rack.jobs(), root.jobs()
    assert [(m.rank, m.bit, m.edge) for m in low.members] == [(1, 0, False), (2, 1, False)] and not low.racks
    assert [(m.rank, m.bit, m.edge) for m in high.members] == [(0, 1, True)]
    addresses = {p["metadata"]["name"]: p["status"]["podIP"] for p in lab.cluster.pods("wide")}
    assert [(r.bit, r.workers, r.uplink.address) for r in high.racks] == [(0, 2, addresses["wide-worker-1"])]


def test_several_parameter_servers(lab: Any) -> None:
    agent = lab.agent("sw-shards", ["node-a"])
    lab.apply_job("sharded", workers=2, parameterServers={"replicas": 2})
    pods = lab.cluster.run_pods("sharded", 4)
    status = lab.phase("sharded", "Running")
    assert status["mode"] == "Shared"
    addresses = {p["metadata"]["name"]: p["status"]["podIP"] for p in pods}
    servers = [addresses["sharded-ps-0"], addresses["sharded-ps-1"]]
    (job,) = agent.jobs()
    assert [e.address for e in job.parameter_servers] == servers, "both may send ACKs"
    for name, role, rank in (("ps-0", "parameterServer", 0), ("ps-1", "parameterServer", 1), ("worker-1", "worker", 1)):
        told = json.loads(
            lab.wait_for(
                lambda name=name: lab.cluster.get("pod", f"sharded-{name}")["metadata"]["annotations"].get(
                    "atp.dev/assignment"
                ),
                "assignment",
            )
        )
        assert (told["role"], told["rank"]) == (role, rank)
        assert told["parameterServers"] == [{"shard": i, "address": address} for i, address in enumerate(servers)]
    refused = lab.cluster.kubectl(
        "patch", "atpjob", "sharded", "--type=merge", "-p", '{"spec":{"parameterServers":{"replicas":1}}}', check=False
    )
    assert "spec.suspend" in refused.stderr
    # Any shard that fails ends the epoch: what it had summed is gone.
    lab.cluster.end_pod(next(p for p in pods if p["metadata"]["name"] == "sharded-ps-1"), code=1)
    status = lab.wait_for(lambda: (s := lab.cluster.status("sharded")).get("epoch") == 2 and s, "epoch 2")
    assert status["reason"] == "ParameterServerFailed" and "sharded-ps-1" in status["message"]

    def replaced() -> bool:
        lab.cluster.finish_deletions("sharded")
        return [p["metadata"]["labels"]["atp.dev/epoch"] for p in lab.cluster.pods("sharded")] == ["2"] * 4

    lab.wait_for(replaced, "pods of epoch 2")
    pods = lab.cluster.run_pods("sharded", 4)
    lab.phase("sharded", "Running")
    for pod in pods:
        if "worker" in pod["metadata"]["name"]:
            lab.cluster.end_pod(pod)
    lab.phase("sharded", "Succeeded")

    def servers_leave() -> bool:
        there = [p["metadata"] for p in lab.cluster.pods("sharded")]
        return all(m.get("deletionTimestamp") for m in there if "-ps-" in m["name"])

    lab.wait_for(servers_leave, "both parameter servers deleted")


def test_a_switch_whose_sums_are_not_sticky_bounds_the_addends(lab: Any) -> None:
    lab.agent("sw-tofino", ["node-a"], sticky=False)
    assert lab.cluster.get("atpswitch", "sw-tofino")["status"]["capacity"]["stickySaturation"] is False
    lab.apply_job("bounded", workers=3)
    lab.cluster.run_pods("bounded", 4)
    assert lab.phase("bounded", "Running")["addendLimit"] == 715827882
    told = lab.wait_for(
        lambda: lab.cluster.get("pod", "bounded-worker-2")["metadata"]["annotations"].get("atp.dev/assignment"), "gate"
    )
    assert json.loads(told)["addendLimit"] == 715827882


def test_foreign_pods_are_injected_or_refused(lab: Any) -> None:
    def pod(name: str, labels: dict[str, str], **spec: Any) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "default", "labels": labels},
            "spec": {"containers": [{"name": "main", "image": "x"}], **spec},
        }

    labels = {"atp.dev/job": "other", "atp.dev/role": "worker", "batch.kubernetes.io/job-completion-index": "7"}
    done = lab.cluster.kubectl(
        "create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(pod("p", labels))
    )
    made = json.loads(done.stdout)
    assert made["metadata"]["labels"]["atp.dev/rank"] == "7"
    sidecar = made["spec"]["initContainers"][0]
    assert sidecar["name"] == "atp-sidecar" and sidecar["securityContext"]["readOnlyRootFilesystem"] is True
    assert {v["name"] for v in made["spec"]["volumes"]} >= {"atp-shm", "atp-assignment"}
    assert {"name": "atp-shm", "mountPath": "/run/atp"} in made["spec"]["containers"][0]["volumeMounts"]
    for bad, text in [
        (pod("p", {"atp.dev/job": "other"}), "atp.dev/role"),
        (pod("p", {"atp.dev/job": "other", "atp.dev/role": "worker"}), "atp.dev/rank"),
        (pod("p", {**labels}, hostNetwork=True), "hostNetwork"),
        (pod("p", {**labels}, volumes=[{"name": "atp-shm", "emptyDir": {}}]), "atp-shm"),
    ]:
        done = lab.cluster.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(bad), check=False)
        assert done.returncode != 0 and text in done.stderr, done.stderr
    # A pod without the label is none of the webhook's business.
    done = lab.cluster.kubectl("create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(pod("p", {})))
    assert "initContainers" not in json.loads(done.stdout)["spec"]


def test_software_switch_pods_become_switches(lab: Any) -> None:
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-soft"}}
    lab.cluster.apply(node)
    lab.cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": "softswitch-x",
                "namespace": "atp-system",
                "labels": {"app.kubernetes.io/component": "softswitch"},
            },
            "spec": {"nodeName": "node-soft", "containers": [{"name": "agent", "image": "x"}]},
        }
    )
    pod = lab.cluster.get("pod", "softswitch-x", "atp-system")
    lab.cluster.patch_status(
        pod, {"phase": "Running", "hostIP": "127.0.0.9", "conditions": [{"type": "Ready", "status": "True"}]}
    )
    switch = lab.wait_for(lambda: lab.cluster.get("atpswitch", "software-node-soft"), "ATPSwitch")
    assert switch["spec"]["agent"] == {"address": "127.0.0.9:9560", "serverName": "atp-switch-agent"}
    assert switch["spec"]["nodes"] == ["node-soft"] and switch["metadata"]["labels"]["atp.dev/managed-by"] == "operator"
    lab.cluster.kubectl("delete", "pod", "softswitch-x", "-n", "atp-system", "--force", "--grace-period=0")
    lab.cluster.kubectl("delete", "node", "node-soft")
    lab.wait_for(lambda: not lab.cluster.get("atpswitch", "software-node-soft"), "removed with its node")


def test_first_probes_wait_for_the_operator_and_its_webhooks(lab: Any, apart: Any) -> None:
    """The kubelet's probes at a normal start: none fails, and readiness comes with the webhook server."""
    apart.start(wait=False)

    def connect() -> socket.socket | None:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", apart.metrics_port), 5)
        return None

    with lab.wait_for(connect, "the port for probes") as probe:
        probe.settimeout(60)
        probe.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert probe.recv(100).startswith(b"HTTP/1.1 200")
    url = f"http://127.0.0.1:{apart.metrics_port}/readyz"
    with urllib.request.urlopen(f"{url}?wait=50", timeout=60) as answer:
        assert answer.status == 200
    with socket.create_connection(("127.0.0.1", apart.webhook_port), 1):
        pass
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{url}?wait=soon", timeout=10)
    assert refused.value.code == 400


def test_standby_takes_over_when_the_leader_dies(lab: Any, standby: Any) -> None:
    agent = lab.agent("sw-ha", ["node-a"])
    lab.apply_job("ha", workers=1)
    lab.cluster.run_pods("ha", 2)
    lab.phase("ha", "Running")
    assert standby.metric("atp_operator_leader") == 0.0
    lab.operator.kill()
    try:
        lab.wait_for(lambda: standby.metric("atp_operator_leader") == 1.0, "take-over", 20)
        (worker,) = [p for p in lab.cluster.pods("ha") if p["metadata"]["name"] == "ha-worker-0"]
        lab.cluster.end_pod(worker)
        done = lab.phase("ha", "Succeeded")
        assert done["epoch"] == 1
        lab.wait_for(lambda: agent.jobs() == [], "released by the new leader")
        assert len({state.writer for state in agent.history}) == 2
    finally:
        standby.stop()
        lab.operator.start()
        lab.wait_for(lambda: lab.operator.metric("atp_operator_leader") == 1.0, "leadership", 20)


def test_pods_that_the_api_server_refuses_are_the_reason(lab: Any) -> None:
    lab.cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": "strict", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
        }
    )
    manifest = lab.job("rude", workers=1, mode="HostOnly")
    manifest["metadata"]["namespace"] = "strict"
    lab.cluster.apply(manifest)
    try:
        status = lab.wait_for(
            lambda: (s := lab.cluster.status("rude", "strict")).get("reason") == "PodCreateFailed" and s, "reason"
        )
        # The parked parameter server and its sidecar pass the restricted standard; the trainer is the user's.
        assert status["message"].startswith("Pod rude-worker-0 was refused by the API server")
        assert "PodSecurity" in status["message"] and 'container "trainer"' in status["message"]
        assert "atp-sidecar" not in status["message"]
        assert [p["metadata"]["name"] for p in lab.cluster.pods("rude", "strict")] == ["rude-ps-0"]
    finally:
        lab.cluster.kubectl("delete", "atpjob", "rude", "-n", "strict", "--wait=false")
        lab.cluster.kubectl("delete", "pod", "--all", "-n", "strict", "--force", "--grace-period=0", check=False)
        lab.wait_for(lambda: not lab.cluster.get("atpjob", "rude", "strict"), "deleted")


def test_metrics_tell_jobs_and_quotas(lab: Any) -> None:
    lab.agent("sw-met", ["node-a"])
    lab.quota("metered", maxJobs=3, nominalQuota={"aggregators": 2048})
    lab.apply_job("measured", workers=1)
    lab.cluster.run_pods("measured", 2)
    lab.phase("measured", "Running")
    for name, value in [
        ('atp_jobs{phase="Running"}', 1.0),
        ('atp_quota_used{resource="jobs",switch="",tenant="metered"}', 1.0),
        ('atp_quota_nominal{resource="jobs",switch="",tenant="metered"}', 3.0),
        ('atp_quota_used{resource="aggregators",switch="sw-met",tenant="metered"}', 1024.0),
        ('atp_quota_nominal{resource="aggregators",switch="sw-met",tenant="metered"}', 2048.0),
    ]:
        lab.wait_for(lambda n=name, v=value: lab.operator.metric(n) == v, f"{name} {value}", 10)


def test_what_kopf_watches_is_known_at_once(lab: Any) -> None:
    """Quotas, switches and namespaces reach the plan by kopf's events; what lists them again does so in minutes."""

    def admitted() -> int | None:
        status = lab.cluster.get("atptenantquota", "seen").get("status") or {}
        return status.get("admittedJobs")

    lab.quota("seen", namespaceSelector={"matchLabels": {"team": "seen"}}, maxJobs=5)
    lab.wait_for(lambda: admitted() == 0, "the quota's status", 10)
    lab.apply_job("seen", workers=1, mode="HostOnly")
    lab.wait_for(lambda: lab.cluster.status("seen").get("admittedTime"), "admission", 10)
    lab.cluster.kubectl("label", "namespace", "default", "team=seen")
    try:
        lab.wait_for(lambda: admitted() == 1, "the namespace's label", 10)
    finally:
        lab.cluster.kubectl("label", "namespace", "default", "team-", "--overwrite")
    lab.wait_for(lambda: admitted() == 0, "the label gone", 10)
    name = 'atp_quota_nominal{resource="jobs",switch="",tenant="seen"}'
    assert lab.operator.metric(name) == 5.0
    lab.cluster.kubectl("delete", "atptenantquota", "seen")
    lab.wait_for(lambda: lab.operator.metric(name) is None, "the quota gone", 10)
    first, second = lab.agent("sw-moves", ["node-a"]), lab.agent("sw-other", ["node-b"])
    assert first.history and second.history
    writes = len(second.history)
    change = {"spec": {"agent": {"address": f"127.0.0.1:{second.port}"}}}
    lab.cluster.kubectl("patch", "atpswitch", "sw-moves", "--type=merge", "-p", json.dumps(change))
    lab.wait_for(lambda: len(second.history) > writes, "the switch's new address", 10)


def test_names_that_are_taken_are_the_reason(lab: Any) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "taken", "namespace": "default"},
        "spec": {"ports": [{"port": 80}]},
    }
    lab.cluster.apply(service)
    lab.apply_job("taken", workers=1, mode="HostOnly")
    status = lab.wait_for(lambda: (s := lab.cluster.status("taken")).get("reason") == "PodCreateFailed" and s, "reason")
    assert status["message"] == (
        "Service taken exists in namespace default and is not this job's: delete it or rename the job"
    )
    lab.cluster.kubectl("delete", "service", "taken", "-n", "default")
    lab.wait_for(lambda: len(lab.cluster.pods("taken")) == 2, "made once the name is free")
    lab.wait_for(lambda: lab.cluster.status("taken")["reason"] == "WaitingForPods", "reason gone")


def test_agent_that_refuses_the_whole_state_means_host_only(lab: Any) -> None:
    agent = lab.agent("sw-strict", ["node-a"])
    agent.refuse = "region 0..3071 lies outside the switch"
    lab.apply_job("whole", workers=1)
    lab.cluster.run_pods("whole", 2)
    status = lab.phase("whole", "Running")
    assert status["mode"] == "HostOnly"
    condition = lab.condition("whole", "NetworkAggregation")
    assert condition["reason"] == "AgentRefused" and agent.refuse in condition["message"]
    agent.refuse = ""
    lab.apply_job("next", workers=1)
    lab.cluster.run_pods("next", 2)
    assert lab.phase("next", "Running")["mode"] == "Shared"


def test_deleted_switch_is_emptied_and_its_job_runs_on(lab: Any) -> None:
    agent = lab.agent("sw-gone", ["node-a"])
    lab.apply_job("orphan", workers=1)
    pods = lab.cluster.run_pods("orphan", 2)
    lab.phase("orphan", "Running")
    assert len(agent.jobs()) == 1
    lab.cluster.kubectl("delete", "atpswitch", "sw-gone")
    lab.wait_for(lambda: agent.jobs() == [], "told to hold nothing")
    lab.wait_for(lambda: lab.cluster.status("orphan").get("mode") == "HostOnly", "HostOnly")
    assert lab.condition("orphan", "NetworkAggregation")["reason"] == "SwitchDeleted"
    lab.cluster.end_pod(next(p for p in pods if p["metadata"]["name"] == "orphan-worker-0"))
    assert lab.phase("orphan", "Succeeded")["epoch"] == 1
