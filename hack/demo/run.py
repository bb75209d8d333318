# SPDX-License-Identifier: Apache-2.0
"""``make demo``, step by step. Every step is idempotent: what is there already is kept."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from localcluster import binaries, cluster, images, paths, versions

from . import artifacts
from .follow import Followed, Training, follow
from .kube import CommandFailed, Kube, connect
from .report import Result

ROOT = Path(__file__).resolve().parent.parent.parent
SYSTEM = "atp-system"
NAMESPACE = "atp-demo"
JOB = "digits"
EXAMPLE_IMAGE = "localhost/atp/digits:dev"
"""The image that examples/digits names; on the local cluster it is the one just built."""
PATIENCE_SECONDS = 300.0
"""How long a step on the cluster may stand still before the demo gives up and says what it saw."""


def say(text: str) -> None:
    print(text, flush=True)


def prepare_cluster() -> Kube:
    """Return the cluster to use: the user's own with ATP_KUBECONTEXT, otherwise the local one, running."""
    here = paths.current()
    context = os.environ.get("ATP_KUBECONTEXT", "")
    if context:
        say(f"using your cluster: context {context}")
    else:
        binaries.build(here)
        cluster.up(here)
    return connect(versions.bin_dir(here), here.kubeconfig, context)


def prepare_images() -> artifacts.Images:
    """Build the images and bring them to the cluster: imported into the local one, pushed for the user's own."""
    made = artifacts.build_all()
    if not os.environ.get("ATP_KUBECONTEXT"):
        for reference in made.all():
            images.load(reference)
        images.tag(made.digits, EXAMPLE_IMAGE)
        return made
    registry = os.environ.get("ATP_IMAGE_REGISTRY", "").rstrip("/")
    if not registry:
        say("ATP_IMAGE_REGISTRY is not set: the nodes of your cluster must already hold these images:")
        for reference in made.all():
            say(f"  {reference}")
        return made
    pushed = [images.push(reference, registry) for reference in made.all()]
    return artifacts.Images(*pushed)


def install(kube: Kube, made: artifacts.Images) -> None:
    repository, _, tag = made.control_plane.rpartition(":")
    sidecar_repository, _, sidecar_tag = made.sidecar.rpartition(":")
    settings = {
        "images.controlPlane.repository": repository,
        "images.controlPlane.tag": tag,
        "images.sidecar.repository": sidecar_repository,
        "images.sidecar.tag": sidecar_tag,
    }
    sets = [item for key, value in settings.items() for item in ("--set-string", f"{key}={value}")]
    if kube.get("customresourcedefinition", "atpjobs.atp.dev"):
        # Helm installs definitions once and upgrades none.
        say("kubectl apply --server-side -f crds/")
        kube.ctl("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds"))
    say("helm upgrade --install atp charts/atp")
    kube.charts(
        "upgrade", "--install", "atp", str(ROOT / "charts/atp"), "-n", SYSTEM, "--create-namespace", "--wait",
        "--timeout", "4m", *sets, timeout=260,
    )  # fmt: skip


def wait_for_switches(kube: Kube) -> None:
    """Wait until every software switch is known and ready, so that the job is planned on it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        items = json.loads(kube.ctl("get", "atpswitches", "-o", "json"))["items"]
        if items and all(condition_true(item, "Ready") for item in items):
            say(kube.ctl("get", "atpswitches").rstrip())
            return
        time.sleep(0.5)
    say("no ATPSwitch became ready in 60 s; the job will run all the same, in mode HostOnly:")
    say(kube.ctl("get", "atpswitches").rstrip())


def condition_true(item: dict[str, Any], kind: str) -> bool:
    conditions = item.get("status", {}).get("conditions", [])
    return any(c["type"] == kind and c["status"] == "True" for c in conditions)


def apply_example(kube: Kube, name: str, image: str) -> None:
    """Apply examples/digits/``name`` as it is; only a cluster of the user's own needs the image's name there."""
    path = ROOT / "examples/digits" / name
    say(f"kubectl apply -n {NAMESPACE} -f examples/digits/{name}")
    if os.environ.get("ATP_KUBECONTEXT"):
        kube.ctl("apply", "-n", NAMESPACE, "-f", "-", stdin=path.read_text().replace(EXAMPLE_IMAGE, image))
    else:
        kube.ctl("apply", "-n", NAMESPACE, "-f", str(path))


def follow_job(kube: Kube) -> Followed:
    """Show the job's progress until it has succeeded.

    Raises:
        CommandFailed: it failed, or stood still for PATIENCE_SECONDS.
    """
    shown, seen = "", Followed()
    try:
        for seen in follow(kube, JOB, NAMESPACE, PATIENCE_SECONDS):
            line = seen.progress()
            if line != shown:
                say(f"  {line}")
                shown = line
    except CommandFailed as error:
        raise CommandFailed(f"{error}; what it says:\n{explain(kube)}") from None
    if seen.phase != "Succeeded":
        raise CommandFailed(f"the job is {seen.phase}; what it says:\n{explain(kube)}\n{seen.log[-3000:]}")
    return seen


def explain(kube: Kube) -> str:
    return kube.ctl("describe", "atpjob", JOB, "-n", NAMESPACE) + kube.ctl("get", "pods", "-n", NAMESPACE, "-o", "wide")


def train_over_gloo(kube: Kube, image: str) -> Training:
    """Run the same training over gloo as a plain Job; return what it printed."""
    apply_example(kube, "gloo.yaml", image)
    try:
        kube.ctl("wait", "-n", NAMESPACE, "--for=condition=complete", "job/digits-gloo", "--timeout=240s", timeout=250)
    except CommandFailed as error:
        tail = kube.ctl("logs", "-n", NAMESPACE, "job/digits-gloo", "--tail=30")
        raise CommandFailed(f"the comparison over gloo did not finish: {error}\n{tail}") from None
    return Training.read(kube.ctl("logs", "-n", NAMESPACE, "job/digits-gloo", "--tail=-1"))


def demo() -> None:
    """Run it all and write build/demo/result.json."""
    started = time.monotonic()
    kube = prepare_cluster()
    made = prepare_images()
    install(kube, made)
    wait_for_switches(kube)
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    kube.ctl("apply", "-f", "-", stdin=json.dumps(namespace))
    for kind, name in (("atpjob", JOB), ("job", "digits-gloo")):
        kube.ctl("delete", kind, name, "-n", NAMESPACE, "--ignore-not-found", "--wait", timeout=120)
    apply_example(kube, "atpjob.yaml", made.digits)
    seen = follow_job(kube)
    training, metrics = seen.training, seen.metrics
    if training.result is None:
        raise CommandFailed("the job succeeded, but worker 0 printed no result; its log:\n" + explain(kube))
    say(kube.ctl("get", "atpjob", JOB, "-n", NAMESPACE).rstrip())
    gloo = train_over_gloo(kube, made.digits)
    if gloo.result is None:
        raise CommandFailed("the comparison over gloo printed no result")
    result = Result(
        accuracy=training.result["accuracy"],
        gloo_accuracy=gloo.result["accuracy"],
        error_over_bound=training.result["error_over_bound"],
        aggregated_share=metrics.aggregated_share(),
        mode=seen.status.get("mode", "HostOnly"),
        collisions=metrics.total("atp_collisions_total", "-ps-"),
        retransmits=metrics.total("atp_retransmits_total", "-worker-"),
        ecn_marks=metrics.total("atp_ecn_marks_total", "-worker-"),
        seconds=round(time.monotonic() - started, 1),
    )
    result.write(ROOT / "build/demo/result.json")
    say("")
    say(result.table())
    say(f"\nall of it took {result.seconds:.0f} s; the figures are in build/demo/result.json")
    sys.stdout.flush()
