# SPDX-License-Identifier: Apache-2.0
"""What the tests on the cluster share."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from demo import artifacts, run
from demo.follow import Followed, follow
from demo.kube import CommandFailed, Kube


@dataclass
class Installation:
    """An installed chart: how to reach the cluster, and the images of this checkout."""

    kube: Kube
    images: artifacts.Images


def install() -> Installation:
    """The local cluster (or ATP_KUBECONTEXT's) with the chart of this checkout, as `make demo` makes it."""
    kube = run.prepare_cluster()
    images = run.prepare_images()
    run.install(kube, images)
    run.wait_for_switches(kube)
    return Installation(kube, images)


def wait_until(what: str, check: Callable[[], Any], timeout: float = 120.0) -> Any:
    """Return the first true answer of ``check``; fail with ``what`` and the last answer after ``timeout`` seconds."""
    deadline, last = time.monotonic() + timeout, None
    while time.monotonic() < deadline:
        try:
            last = check()
        except CommandFailed as error:
            last = None
            what = f"{what.split(' (')[0]} ({error})"
        if last:
            return last
        time.sleep(0.4)
    pytest.fail(f"not in {timeout:.0f} s: {what}; last seen: {last!r}")


def job_status(kube: Kube, name: str, namespace: str) -> dict[str, Any]:
    job = kube.get("atpjob", name, namespace)
    return (job or {}).get("status", {})


def watch(kube: Kube, name: str, namespace: str, patience: float = 240.0) -> Followed:
    """Follow a job until it has succeeded or failed; a job that stands still for ``patience`` seconds is a failure."""
    try:
        *_, seen = follow(kube, name, namespace, patience)
    except CommandFailed as error:
        pytest.fail(str(error))
    return seen


def condition(item: dict[str, Any], kind: str) -> dict[str, Any]:
    found = [c for c in item.get("conditions", []) if c["type"] == kind]
    return found[0] if found else {}


def digits_job(image: str, name: str = "digits", *, command: list[str] | None = None, **spec: Any) -> str:
    """examples/digits/atpjob.yaml with this checkout's image, another name, command or further spec fields, as JSON."""
    text = (run.ROOT / "examples/digits/atpjob.yaml").read_text().replace("localhost/atp/digits:dev", image)
    job: dict[str, Any] = yaml.safe_load(text)
    job["metadata"]["name"] = name
    job["metadata"].pop("namespace", None)
    if command is not None:
        job["spec"]["workers"]["template"]["spec"]["containers"][0]["command"] = command
        job["spec"]["workers"]["template"]["spec"]["containers"][0].pop("args", None)
    job["spec"].update(spec)
    return json.dumps(job)
