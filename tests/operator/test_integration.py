# SPDX-License-Identifier: Apache-2.0
"""The operator against a real API server: the whole life of jobs, and what bad input gets."""

from __future__ import annotations

import json
from typing import Any


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
    told = json.loads(lab.wait_for(lambda: lab.cluster.get("pod", "life-worker-1")["metadata"]["annotations"].get("atp.dev/assignment"), "assignment"))
    assert told["jobId"] == 1 and told["role"] == "worker" and told["rank"] == 1 and told["mode"] == "Shared"
    assert [w["address"] for w in told["workers"]] == [pods[f"life-worker-{r}"]["status"]["podIP"] for r in (0, 1)]
    assert told["parameterServers"] == [{"shard": 0, "address": pods["life-ps-0"]["status"]["podIP"]}]
    worker = pods["life-worker-0"]["spec"]
    assert worker["initContainers"][0]["name"] == "atp-sidecar" and worker["initContainers"][0]["restartPolicy"] == "Always"
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
