# SPDX-License-Identifier: Apache-2.0
"""Bad input is refused at apply with the field and what to do; what must wait says for what, with numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from demo.kube import CommandFailed
from e2e.support import Installation, condition, digits_job, job_status, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


def changed(image: str, path: str, value: Any) -> str:
    """The example with the field at dotted ``path`` replaced; a value of None removes it."""
    job = json.loads(digits_job(image))
    *parents, last = path.split(".")
    place = job
    for name in parents:
        place = place.setdefault(name, {})
    if value is None:
        place.pop(last)
    else:
        place[last] = value
    return json.dumps(job)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("spec.workers.replicas", 0, "at least 1 worker"),
        ("spec.workers.replicas", 1025, "1024"),
        ("spec.workers.template.spec.containers", [], "no containers"),
        ("spec.scale", 0, "scale"),
        ("spec.scale", 1e300, "scale"),
        ("spec.scale", 0.5, "integer,string"),
        ("spec.scale", "auto", "write Auto with a capital A"),
        ("spec.scale", "1e10", "at most 2147483648"),
        ("spec.mode", "Magic", "mode"),
        ("spec.parameterServers.replicas", 3, "1, 2, 4 or 8"),
        ("spec.valuesPerPacket", 63, "valuesPerPacket"),
        ("spec.backoffLimit", -1, "backoffLimit"),
        ("spec.workers.template.spec.hostNetwork", True, "hostNetwork"),
        ("spec.workers.template.spec.containers", [{"name": "Foo_Bar", "image": "x"}], "Foo_Bar"),
        ("spec.workers.template.spec.containers", [{"name": "t", "image": "x", "comand": ["true"]}], "comand"),
        ("spec.workers.template.spec.containers", [{"name": "t", "image": "x", "command": [20]}], "workers.template"),
        ("spec.workers.template.spec.containers", [{"name": "t", "image": ""}], "image"),
    ],
)
def test_bad_job_is_refused_at_apply(
    installation: Installation, namespace: str, path: str, value: Any, says: str
) -> None:
    with pytest.raises(CommandFailed) as refusal:
        installation.kube.ctl(
            "apply", "-n", namespace, "-f", "-", stdin=changed(installation.images.digits, path, value)
        )
    assert says in str(refusal.value)
    assert installation.kube.get("atpjob", "digits", namespace) is None


def test_unknown_switch_waits_with_the_name(installation: Installation, namespace: str) -> None:
    kube = installation.kube
    kube.ctl("apply", "-n", namespace, "-f", "-", stdin=digits_job(installation.images.digits, switches=["tor-99"]))
    status = wait_until(
        "the job says that it waits",
        lambda: (s := job_status(kube, "digits", namespace)).get("reason") == "UnknownSwitch" and s,
        30,
    )
    assert status["phase"] == "Pending"
    assert "tor-99" in condition(status, "Admitted")["message"]
    assert not kube.list("pods", namespace, "atp.dev/job=digits")


def test_more_workers_than_the_fan_in(installation: Installation, namespace: str) -> None:
    kube = installation.kube
    job = json.loads(digits_job(installation.images.digits))
    job["spec"]["workers"]["replicas"] = 33
    kube.ctl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(job))
    status = wait_until(
        "the job names the fan-in",
        lambda: (s := job_status(kube, "digits", namespace)).get("reason") == "FanInExceeded" and s,
        30,
    )
    assert "33" in status["message"] and "32" in status["message"]


def test_quota_queues_and_admits_when_room_appears(installation: Installation, namespace: str) -> None:
    kube = installation.kube
    quota = {
        "apiVersion": "atp.dev/v1alpha1",
        "kind": "ATPTenantQuota",
        "metadata": {"name": namespace},
        "spec": {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            "maxJobs": 1,
            "nominalQuota": {"aggregators": 1500},
        },
    }
    kube.ctl("apply", "-f", "-", stdin=json.dumps(quota))
    try:
        sleep = ["sleep", "600"]
        for name in ("first", "second"):
            job = digits_job(installation.images.digits, name, command=sleep)
            kube.ctl("apply", "-n", namespace, "-f", "-", stdin=job)
            wait_until(f"{name} is looked at", lambda name=name: job_status(kube, name, namespace).get("phase"), 30)
        status = job_status(kube, "second", namespace)
        assert status["phase"] == "Pending"
        assert condition(status, "Admitted")["reason"] == "QuotaExceeded"
        assert "needs 1 job" in condition(status, "Admitted")["message"]
        assert "0 free of 1" in condition(status, "Admitted")["message"]
        assert not kube.list("pods", namespace, "atp.dev/job=second")

        big = digits_job(installation.images.digits, "big", command=sleep, aggregators={"request": 1501})
        kube.ctl("delete", "atpjob", "first", "-n", namespace, "--wait", timeout=90)
        wait_until(
            "second is admitted",
            lambda: condition(job_status(kube, "second", namespace), "Admitted").get("status") == "True",
            60,
        )
        kube.ctl("delete", "atpjob", "second", "-n", namespace, "--wait", timeout=90)
        kube.ctl("apply", "-n", namespace, "-f", "-", stdin=big)
        wait_until(
            "big is refused by number", lambda: job_status(kube, "big", namespace).get("reason") == "QuotaExceeded", 30
        )
        assert "1501" in job_status(kube, "big", namespace)["message"]
    finally:
        kube.ctl("delete", "atptenantquota", namespace, "--ignore-not-found")


def test_suspend_releases_everything_and_resumes(installation: Installation, namespace: str) -> None:
    kube = installation.kube
    kube.ctl(
        "apply", "-n", namespace, "-f", "-", stdin=digits_job(installation.images.digits, command=["sleep", "600"])
    )
    wait_until("the job runs", lambda: job_status(kube, "digits", namespace).get("phase") == "Running", 120)
    kube.ctl("patch", "atpjob", "digits", "-n", namespace, "--type=merge", "-p", '{"spec":{"suspend":true}}')
    wait_until("the pods go", lambda: not kube.list("pods", namespace, "atp.dev/job=digits"), 90)
    status = job_status(kube, "digits", namespace)
    assert status["phase"] == "Suspended"
    assert not status.get("jobId")
    kube.ctl("patch", "atpjob", "digits", "-n", namespace, "--type=merge", "-p", '{"spec":{"suspend":false}}')
    wait_until("the job runs again", lambda: job_status(kube, "digits", namespace).get("phase") == "Running", 120)
    assert job_status(kube, "digits", namespace)["epoch"] == 2
