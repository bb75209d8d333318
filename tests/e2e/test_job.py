# SPDX-License-Identifier: Apache-2.0
"""The whole path on a real cluster: apply, train through the switch, release."""

from __future__ import annotations

import json
import urllib.request

import pytest
from demo import run
from demo.follow import Training
from demo.metrics import parse
from e2e.support import Installation, condition, digits_job, job_status, wait_until, watch

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def switch_metrics(installation: Installation) -> str:
    """The agent's metrics, read from the node's address as Prometheus does."""
    pods = installation.kube.list("pods", run.SYSTEM, "app.kubernetes.io/component=softswitch")
    address = pods[0]["status"]["hostIP"]
    with urllib.request.urlopen(f"http://{address}:9562/metrics", timeout=10) as answer:
        return answer.read().decode()


def test_digits_through_the_switch(installation: Installation, namespace: str) -> None:
    kube = installation.kube
    kube.ctl("apply", "-n", namespace, "-f", "-", stdin=digits_job(installation.images.digits))
    seen = watch(kube, "digits", namespace)
    status, training, metrics = seen.status, seen.training, seen.metrics

    assert status["phase"] == "Succeeded", status
    assert status["mode"] == "Shared"
    assert status["scale"] == "Auto"
    assert condition(status, "Complete")["status"] == "True"
    assert training.result is not None
    assert training.result["accuracy"] >= 0.9
    assert 0 < training.result["error_over_bound"] <= 1
    assert training.epochs[-1]["loss"] < training.epochs[0]["loss"] / 2

    # The switch did the adding, and what the parameter server and the switch counted agrees.
    assert metrics.aggregated_share() > 0.9, metrics.pods
    assert metrics.total("atp_gradient_packets_total", "-worker-") > 1000
    assert metrics.total("atp_raw_float_corrections_total", "-worker-") == 0
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


def test_two_parameter_servers_share_the_sequences(installation: Installation, namespace: str) -> None:
    """With a fixed scale, too: its sums keep their own bound."""
    kube = installation.kube
    job = digits_job(installation.images.digits, "sharded", parameterServers={"replicas": 2}, scale=100000000)
    kube.ctl("apply", "-n", namespace, "-f", "-", stdin=job)
    seen = watch(kube, "sharded", namespace)
    assert seen.phase == "Succeeded", seen.status
    assert seen.status["mode"] == "Shared"
    assert seen.status["scale"] == "100000000"
    assert seen.training.result is not None and seen.training.result["accuracy"] >= 0.9
    assert seen.training.result["error_over_bound"] <= 1
    assert seen.metrics.aggregated_share() > 0.9, seen.metrics.pods
    assert seen.status["aggregation"]["rejectedPackets"] == 0, "the switch takes ACKs of both"
    shares = [seen.metrics.total("atp_ack_packets_total", f"-ps-{shard}") for shard in range(2)]
    assert min(shares) > 0.4 * sum(shares) > 0, shares


def test_switch_lost_during_training(installation: Installation, namespace: str) -> None:
    """A switch that dies takes nothing with it: its programs go on, the next one takes them over."""
    kube = installation.kube
    kube.ctl("apply", "-n", namespace, "-f", "-", stdin=digits_job(installation.images.digits, "lost"))
    wait_until("training begins", lambda: Training.read(kube.logs("lost-worker-0", namespace, "trainer")).epochs, 180)
    pods = kube.list("pods", run.SYSTEM, "app.kubernetes.io/component=softswitch")
    kube.ctl(
        "delete", "pod", pods[0]["metadata"]["name"], "-n", run.SYSTEM, "--grace-period=0", "--force", "--wait=false"
    )
    seen = watch(kube, "lost", namespace)
    status, training = seen.status, seen.training
    assert status["phase"] == "Succeeded", status
    assert status.get("retries", 0) == 0
    assert training.result is not None and training.result["error_over_bound"] <= 1
    assert training.result["accuracy"] >= 0.9
    assert seen.metrics.aggregated_share() > 0.9, seen.metrics.pods
    run.wait_for_switches(kube)
    pods = kube.list("pods", run.SYSTEM, "app.kubernetes.io/component=softswitch")
    assert "tables taken over" in kube.logs(pods[0]["metadata"]["name"], run.SYSTEM, "softswitch")


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
    seen = watch(kube, "restart", namespace)
    status, training = seen.status, seen.training
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
