# SPDX-License-Identifier: Apache-2.0
"""The loop that demo and cluster tests watch a job with; no cluster: what kubectl would say is written here."""

from __future__ import annotations

import json
from typing import Any

import pytest
from demo.follow import follow
from demo.kube import CommandFailed, Kube


class Said(Kube):
    """kubectl's answers, one state of the job a look; the last one stays."""

    def __init__(self, *states: dict[str, Any]) -> None:
        super().__init__("kubectl", "helm", "")
        object.__setattr__(self, "states", list(states))

    def get(self, kind: str, name: str, namespace: str = "") -> dict[str, Any] | None:
        states: list[dict[str, Any]] = vars(self)["states"]
        state = states.pop(0) if len(states) > 1 else states[0]
        object.__setattr__(self, "now", state)
        return {"status": state["status"]} if state["status"] else None

    def list(self, kind: str, namespace: str, selector: str) -> list[dict[str, Any]]:
        assert selector == "atp.dev/job=j"
        return [{"metadata": {"name": pod}, "status": {"phase": "Running"}} for pod in vars(self)["now"]["pods"]]

    def logs(self, pod: str, namespace: str, container: str) -> str:
        return "".join(json.dumps(line) + "\n" for line in vars(self)["now"].get("log", ()))

    def pod_http(self, pod: str, namespace: str, port: int, path: str) -> str:
        return str(vars(self)["now"]["pods"][pod])


STARTING = {"status": {"phase": "Starting", "conditions": []}, "pods": {}}
RUNNING = {
    "status": {"phase": "Running", "mode": "Shared"},
    "pods": {
        "j-ps-0": 'atp_aggregated_packets_total{rank="0"} 6\natp_host_summed_packets_total{rank="0"} 1\n',
        "j-ps-1": 'atp_aggregated_packets_total{rank="1"} 3\natp_host_summed_packets_total{rank="1"} 2\n',
    },
    "log": [{"epoch": 1, "loss": 0.5}],
}
DONE = {
    "status": {"phase": "Succeeded", "mode": "Shared"},
    "pods": {},
    "log": [{"epoch": 1, "loss": 0.5}, {"accuracy": 0.9}],
}


def test_what_was_seen_last_stays_when_the_pods_are_gone() -> None:
    lines = []
    for seen in follow(Said({"status": {}, "pods": {}}, STARTING, RUNNING, DONE), "j", "ns", 60):
        lines.append(seen.progress())
    assert [line.split()[0] for line in lines] == ["Pending", "Starting", "Running", "Succeeded"]
    assert "packets summed in the switch        9, by the parameter server 3" in lines[2]
    assert seen.metrics.aggregated_share() == 0.75
    assert seen.training.result == {"accuracy": 0.9} and len(seen.training.epochs) == 1


def test_a_failed_job_is_an_end() -> None:
    *_, seen = follow(Said(RUNNING, {"status": {"phase": "Failed"}, "pods": {}}), "j", "ns", 60)
    assert seen.phase == "Failed" and seen.training.epochs


def test_a_job_that_stands_still_is_told_with_its_reason() -> None:
    why = {"type": "Admitted", "status": "False", "reason": "QuotaExceeded", "message": "needs 1 job"}
    waiting = {"status": {"phase": "Pending", "conditions": [why]}, "pods": {}}
    with pytest.raises(CommandFailed, match=r"job j stands still: Pending .*QuotaExceeded: needs 1 job"):
        list(follow(Said(waiting), "j", "ns", 0.3))
