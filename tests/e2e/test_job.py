# SPDX-License-Identifier: Apache-2.0
"""The whole path on a real cluster: apply, train through the switch, release."""

from __future__ import annotations

import json
import time
import urllib.request

import pytest
from demo import run
from demo.metrics import JobMetrics, parse
from e2e.support import Installation, condition, digits_job, job_status, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def switch_metrics(installation: Installation) -> str:
    """The agent's metrics, read from the node's address as Prometheus does."""
    pods = installation.kube.list("pods", run.SYSTEM, "app.kubernetes.io/component=softswitch")
    address = pods[0]["status"]["hostIP"]
    with urllib.request.urlopen(f"http://{address}:9562/metrics", timeout=10) as answer:
        return answer.read().decode()


def follow(
    installation: Installation, namespace: str, name: str, timeout: float = 240.0
) -> tuple[dict, run.Training, JobMetrics]:
    """Watch a job until it ends; return its status, what worker 0 printed, and the sidecars' last metrics."""
    kube, metrics, log = installation.kube, JobMetrics(), ""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        status = job_status(kube, name, namespace)
        for pod in kube.list("pods", namespace, f"atp.dev/job={name}"):
            if pod.get("status", {}).get("phase") == "Running":
                metrics.update(
                    pod["metadata"]["name"],
                    kube.pod_http(pod["metadata"]["name"], namespace, run.METRICS_PORT, "/metrics"),
                )
        log = kube.logs(f"{name}-worker-0", namespace, "trainer") or log
        if status.get("phase") in ("Succeeded", "Failed"):
            return status, run.Training.read(log), metrics
        time.sleep(0.4)
    pytest.fail(f"job {name} did not end in {timeout:.0f} s: {job_status(kube, name, namespace)}\n{log[-2000:]}")


def test_digits_through_the_switch(installation: Installation, namespace: str) -> None:
    kube = installation.kube
    kube.ctl("apply", "-n", namespace, "-f", "-", stdin=digits_job(installation.images.digits))
    status, training, metrics = follow(installation, namespace, "digits")

    assert status["phase"] == "Succeeded", status
    assert status["mode"] == "Shared"
    assert condition(status, "Complete")["status"] == "True"
    assert training.result is not None
    assert training.result["accuracy"] >= 0.9
    assert 0 < training.result["error_over_bound"] <= 1
    assert training.epochs[-1]["loss"] < training.epochs[0]["loss"] / 2

    # The switch did the adding, and what the parameter server and the switch counted agrees.
    assert metrics.aggregated_share() > 0.9, metrics.pods
    assert metrics.total("atp_gradient_packets_total", "-worker-") > 1000
    assert status["aggregation"]["aggregatedPackets"] > 1000
    assert status["aggregation"]["rejectedPackets"] == 0

    # After the job the parameter server is gone; after deletion the switch holds nothing of it.
    wait_until(
        "the parameter server pod is removed", lambda: not kube.list("pods", namespace, "atp.dev/role=parameter-server")
    )
    kube.ctl("delete", "atpjob", "digits", "-n", namespace, "--wait", timeout=60)

    def empty() -> bool:
        text = switch_metrics(installation)
        samples = parse(text)
        return samples.get("atp_switch_aggregators_in_use", 0) == 0 and f"{namespace}/digits" not in text

    wait_until("the switch holds nothing of the job", empty, 30)
    switches = json.loads(kube.ctl("get", "atpswitches", "-o", "json"))["items"]
    assert all(not item["status"].get("jobs") for item in switches)
    assert not kube.list("pods", namespace, "atp.dev/job=digits")


def test_switch_lost_during_training(installation: Installation, namespace: str) -> None:
    """A switch that dies takes nothing with it: the parameter server sums meanwhile, and the result is right."""
    kube = installation.kube
    kube.ctl("apply", "-n", namespace, "-f", "-", stdin=digits_job(installation.images.digits, "lost"))
    wait_until(
        "training begins", lambda: run.Training.read(kube.logs("lost-worker-0", namespace, "trainer")).epochs, 180
    )
    pods = kube.list("pods", run.SYSTEM, "app.kubernetes.io/component=softswitch")
    kube.ctl(
        "delete", "pod", pods[0]["metadata"]["name"], "-n", run.SYSTEM, "--grace-period=0", "--force", "--wait=false"
    )
    status, training, _ = follow(installation, namespace, "lost")
    assert status["phase"] == "Succeeded", status
    assert status.get("retries", 0) == 0
    assert training.result is not None and training.result["error_over_bound"] <= 1
    assert training.result["accuracy"] >= 0.9
    run.wait_for_switches(kube)


def test_operator_restarts_during_training(installation: Installation, namespace: str) -> None:
    kube = installation.kube
    kube.ctl("apply", "-n", namespace, "-f", "-", stdin=digits_job(installation.images.digits, "restart"))
    wait_until(
        "the job starts", lambda: job_status(kube, "restart", namespace).get("phase") in ("Starting", "Running"), 60
    )
    for pod in kube.list("pods", run.SYSTEM, "app.kubernetes.io/component=operator"):
        kube.ctl(
            "delete", "pod", pod["metadata"]["name"], "-n", run.SYSTEM, "--grace-period=0", "--force", "--wait=false"
        )
    status, training, _ = follow(installation, namespace, "restart")
    assert status["phase"] == "Succeeded", status
    assert status["epoch"] == 1
    assert training.result is not None and training.result["error_over_bound"] <= 1


def test_worker_that_fails_costs_a_restart_and_then_the_job(installation: Installation, namespace: str) -> None:
    kube = installation.kube
    job = digits_job(
        installation.images.digits, "fails", command=["python3", "-c", "raise SystemExit('no data')"], backoffLimit=1
    )
    kube.ctl("apply", "-n", namespace, "-f", "-", stdin=job)
    wait_until("the job fails", lambda: job_status(kube, "fails", namespace).get("phase") == "Failed", 180)
    status = job_status(kube, "fails", namespace)
    assert status["epoch"] == 2
    assert condition(status, "Failed")["status"] == "True"
    assert "worker" in condition(status, "Failed")["message"]
    wait_until(
        "the parameter server pod is removed", lambda: not kube.list("pods", namespace, "atp.dev/role=parameter-server")
    )
