# SPDX-License-Identifier: Apache-2.0
"""What `helm test` runs: the definitions, the webhook and the switches of an installation, seen from a pod."""

from __future__ import annotations

import asyncio
import time

from .kube import ATP, ApiError, Kube, path
from .model import Object

WAIT_SECONDS = 60.0
"""How long a software switch may take to become ready after the installation."""

JOBS = path(ATP, "atpjobs", "default")
SWITCHES = path(ATP, "atpswitches")


def _job(containers: list[Object]) -> Object:
    return {
        "apiVersion": "atp.dev/v1alpha1",
        "kind": "ATPJob",
        "metadata": {"name": "atp-check-installation"},
        "spec": {"workers": {"replicas": 1, "template": {"spec": {"containers": containers}}}},
    }


async def _dry_run(kube: Kube, job: Object) -> str:
    """Create the job without keeping it; the refusal's text, or nothing when it would be accepted."""
    try:
        await kube.request("POST", JOBS, job, query={"dryRun": "All"})
    except ApiError as error:
        return error.message or str(error)
    return ""


async def _ready_switches(kube: Kube) -> list[str]:
    items = (await kube.request("GET", SWITCHES)).get("items") or []
    return [
        item["metadata"]["name"]
        for item in items
        if any(
            c["type"] == "Ready" and c["status"] == "True" for c in (item.get("status") or {}).get("conditions") or ()
        )
    ]


async def check_installation(*, expect_switch: bool) -> int:
    """Print what was found; 0 when all of it is well."""
    kube = await Kube.connect()
    failures = 0

    def report(good: bool, text: str) -> None:
        nonlocal failures
        failures += not good
        print(f"{'ok    ' if good else 'FAILED'} {text}", flush=True)

    try:
        refused = await _dry_run(kube, _job([{"name": "trainer", "image": "none"}]))
        report(not refused, f"an ATPJob that can run is accepted {refused and '(' + refused + ')'}".rstrip())
        refused = await _dry_run(kube, _job([]))
        report(bool(refused), f"an ATPJob without containers is refused: {refused or 'it was accepted'}")
        if expect_switch:
            deadline = time.monotonic() + WAIT_SECONDS
            while not (ready := await _ready_switches(kube)) and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(1)
            report(bool(ready), f"software switches ready: {', '.join(ready) or 'none'}")
    except ApiError as error:
        report(False, f"the API server refused a question: {error}")
    finally:
        await kube.close()
    return 1 if failures else 0
