# SPDX-License-Identifier: Apache-2.0
"""The sidecar in a pod: what the mutating webhook adds, and the operator to the pods that it makes itself.

Idempotent: injecting twice, or again after another webhook changed the pod, changes nothing more.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atp_api import wire

from . import (
    ANNOTATION_ASSIGNMENT,
    ANNOTATION_INJECTED,
    LABEL_JOB,
    LABEL_RANK,
    LABEL_ROLE,
    ROLE_PARAMETER_SERVER,
    ROLE_WORKER,
    SIDECAR_NAME,
)
from .model import Object

SOCKET = "/run/atp/atp.sock"
METRICS_PORT = 9095
READY_WAIT_SECONDS = 50
SHM_VOLUME, ASSIGNMENT_VOLUME = "atp-shm", "atp-assignment"
# Where a rank may be found in pods that somebody else made.
RANK_KEYS = (LABEL_RANK, "batch.kubernetes.io/job-completion-index", "training.kubeflow.org/replica-index")


class InjectionError(ValueError):
    """The pod cannot take a sidecar; the text says which field and what to do."""


@dataclass(frozen=True)
class SidecarConfig:
    """The sidecar as the installation wants it."""

    image: str
    pull_policy: str = "IfNotPresent"
    resources: Mapping[str, Any] = field(default_factory=dict)
    shm_size: str = "1Gi"
    user: int = 65532


def inject(pod: Mapping[str, Any], config: SidecarConfig) -> Object:
    """A copy of the pod with the sidecar in it.

    Raises InjectionError when labels are missing or names are taken.
    """
    result: Object = copy.deepcopy(dict(pod))
    meta = result.setdefault("metadata", {})
    labels: dict[str, str] = meta.setdefault("labels", {})
    annotations: dict[str, str] = meta.get("annotations") or {}
    spec: Object = result.setdefault("spec", {})
    role = labels.get(LABEL_ROLE, "")
    if role not in (ROLE_WORKER, ROLE_PARAMETER_SERVER):
        raise InjectionError(
            f"metadata.labels[{LABEL_ROLE}] is {role!r}: a pod labelled {LABEL_JOB} needs it to be "
            f"{ROLE_WORKER} or {ROLE_PARAMETER_SERVER}"
        )
    rank = next((v for key in RANK_KEYS for v in (labels.get(key), annotations.get(key)) if v), None)
    if rank is None or not rank.isdigit():
        raise InjectionError(
            f"metadata.labels[{LABEL_RANK}] is {rank!r}: a pod labelled {LABEL_JOB} needs its rank, a number from 0, "
            f"in this label (or the completion index of an Indexed Job)"
        )
    labels[LABEL_RANK] = str(int(rank))
    if spec.get("hostNetwork"):
        raise InjectionError("spec.hostNetwork must be false: the switch knows a worker by the address of its pod")

    present = ANNOTATION_INJECTED in annotations and any(
        c.get("name") == SIDECAR_NAME for c in spec.get("initContainers") or ()
    )
    containers: list[Object] = list(spec.get("containers") or ())
    if not containers:
        raise InjectionError("spec.containers is empty: a pod needs at least one container")
    if not present:
        _refuse_taken_names(spec)
        init = [_sidecar(role, spec, config), *(spec.get("initContainers") or ())]
        spec["volumes"] = [
            *(spec.get("volumes") or ()),
            {"name": SHM_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": config.shm_size}},
            {
                "name": ASSIGNMENT_VOLUME,
                "downwardAPI": {
                    "items": [
                        {
                            "path": "assignment.json",
                            "fieldRef": {"fieldPath": f"metadata.annotations['{ANNOTATION_ASSIGNMENT}']"},
                        }
                    ]
                },
            },
        ]
        meta["annotations"] = {**annotations, ANNOTATION_INJECTED: "v1"}
    else:
        init = list(spec.get("initContainers") or ())
    spec["containers"] = [_with_socket(c) for c in containers]
    spec["initContainers"] = [c if c.get("name") == SIDECAR_NAME else _with_socket(c) for c in init]
    return result


def _refuse_taken_names(spec: Mapping[str, Any]) -> None:
    for key in ("initContainers", "containers", "ephemeralContainers"):
        for index, container in enumerate(spec.get(key) or ()):
            if container.get("name") == SIDECAR_NAME:
                raise InjectionError(
                    f"spec.{key}[{index}].name {SIDECAR_NAME} belongs to the injected sidecar: choose another name"
                )
            for mount in container.get("volumeMounts") or ():
                if str(mount.get("mountPath", "")).rstrip("/") == "/run/atp":
                    raise InjectionError(
                        f"spec.{key}[{index}].volumeMounts: /run/atp is where the sidecar's socket is: mount elsewhere"
                    )
    for index, volume in enumerate(spec.get("volumes") or ()):
        if volume.get("name") in (SHM_VOLUME, ASSIGNMENT_VOLUME):
            raise InjectionError(
                f"spec.volumes[{index}].name {volume['name']} belongs to the injected sidecar: choose another name"
            )


def _with_socket(container: Mapping[str, Any]) -> Object:
    result: Object = dict(container)
    mounts = list(result.get("volumeMounts") or ())
    if not any(m.get("name") == SHM_VOLUME for m in mounts):
        result["volumeMounts"] = [*mounts, {"name": SHM_VOLUME, "mountPath": "/run/atp"}]
    env = list(result.get("env") or ())
    if not any(e.get("name") == "ATP_SOCKET" for e in env):
        result["env"] = [*env, {"name": "ATP_SOCKET", "value": SOCKET}]
    return result


def _field(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _sidecar(role: str, spec: Mapping[str, Any], config: SidecarConfig) -> Object:
    pod_context = spec.get("securityContext") or {}
    security: Object = {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    # A pod that runs as root cannot pass that to a sidecar that must not.
    if not pod_context.get("runAsUser"):
        security["runAsUser"] = config.user
    # A normal start fails no probe: the sidecar listens at once, though it answers later, and while the gate is closed
    # it holds the answer on readiness back for as long as the probe is patient.
    alive: Object = {"httpGet": {"port": METRICS_PORT, "path": "/healthz"}}
    ready: Object = {"httpGet": {"port": METRICS_PORT, "path": f"/readyz?wait={READY_WAIT_SECONDS}"}}
    return {
        "name": SIDECAR_NAME,
        "image": config.image,
        "imagePullPolicy": config.pull_policy,
        "args": ["run"],
        "restartPolicy": "Always",
        "env": [
            {"name": "ATP_ROLE", "value": "worker" if role == ROLE_WORKER else "parameterServer"},
            _field("POD_NAME", "metadata.name"),
            _field("POD_NAMESPACE", "metadata.namespace"),
            _field("POD_IP", "status.podIP"),
            _field("NODE_NAME", "spec.nodeName"),
        ],
        "ports": [
            {"name": "atp-metrics", "containerPort": METRICS_PORT, "protocol": "TCP"},
            {"name": "atp", "containerPort": wire.UDP_PORT, "protocol": "UDP"},
        ],
        "startupProbe": {
            **alive,
            "initialDelaySeconds": 2,  # until Python has come so far, on a busy node
            "periodSeconds": 1,
            "timeoutSeconds": 10,
            "failureThreshold": 60,
        },
        "livenessProbe": {**copy.deepcopy(alive), "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 3},
        "readinessProbe": {
            **ready,
            "periodSeconds": 10,  # the first answer comes when the gate opens; often would only meet a pod's end
            "timeoutSeconds": READY_WAIT_SECONDS + 10,
            "failureThreshold": 1,
        },
        "volumeMounts": [
            {"name": SHM_VOLUME, "mountPath": "/run/atp"},
            {"name": ASSIGNMENT_VOLUME, "mountPath": "/etc/atp", "readOnly": True},
        ],
        "securityContext": security,
        "resources": copy.deepcopy(dict(config.resources)),
    }
