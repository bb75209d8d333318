# SPDX-License-Identifier: Apache-2.0
"""Manifests of a job's headless Service and pods."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from . import (
    API_VERSION,
    LABEL_EPOCH,
    LABEL_JOB,
    LABEL_MANAGED_BY,
    LABEL_RANK,
    LABEL_ROLE,
    ROLE_PARAMETER_SERVER,
    ROLE_WORKER,
)
from .injection import SidecarConfig, inject
from .model import Job, Object

MASTER_PORT = 29500


@dataclass(frozen=True)
class Wanted:
    """An object that a job needs, not made yet: a pod is made from its template when it is created, one at a time."""

    kind: Literal["Service", "Pod"]
    name: str
    role: str = ""
    index: int = 0


TEMPLATE_FIELDS: Mapping[str, str] = {
    ROLE_PARAMETER_SERVER: "spec.parameterServers.template",
    ROLE_WORKER: "spec.workers.template",
}
"""Where a role's pod template is in an ATPJob."""


def worker_name(job: str, rank: int) -> str:
    """Name, and host name, of a worker's pod."""
    return f"{job}-worker-{rank}"


def server_name(job: str, shard: int) -> str:
    """Name, and host name, of a parameter server's pod."""
    return f"{job}-ps-{shard}"


def owner(job: Job) -> Object:
    """Owner reference that makes garbage collection follow the ATPJob."""
    return {
        "apiVersion": API_VERSION,
        "kind": "ATPJob",
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def service(job: Job) -> Object:
    """Headless Service that gives every pod a name, also before it is ready (the gate is not open yet)."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": job.name,
            "namespace": job.namespace,
            "ownerReferences": [owner(job)],
            "labels": {LABEL_JOB: job.name, LABEL_MANAGED_BY: "operator"},
        },
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {LABEL_JOB: job.name},
            "ports": [{"name": "master", "port": MASTER_PORT, "protocol": "TCP"}],
        },
    }


def wanted_objects(job: Job) -> list[Wanted]:
    """The Service and all pods of a job, parameter servers first."""
    result = [Wanted("Service", job.name)]
    result += [
        Wanted("Pod", server_name(job.name, shard), ROLE_PARAMETER_SERVER, shard) for shard in range(job.spec.servers)
    ]
    result += [Wanted("Pod", worker_name(job.name, rank), ROLE_WORKER, rank) for rank in range(job.spec.workers)]
    return result


def manifest(wanted: Wanted, job: Job, spec: Mapping[str, Any], epoch: int, sidecar: SidecarConfig) -> Object:
    """The object as it is to be created; `spec` is the whole `ATPJob.spec`, with the pod templates.

    Raises InjectionError when the template cannot take the sidecar.
    """
    return service(job) if wanted.kind == "Service" else _pod(wanted, job, spec, epoch, sidecar)


def _server_template(sidecar: SidecarConfig) -> Object:
    """A parameter server needs nothing beside its sidecar; a pod needs a container, so one waits for SIGTERM."""
    return {
        "spec": {
            "terminationGracePeriodSeconds": 5,
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": sidecar.user,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "parameter-server",
                    "image": sidecar.image,
                    "imagePullPolicy": sidecar.pull_policy,
                    "args": ["park"],
                    "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "64Mi"}},
                    "securityContext": {
                        "runAsNonRoot": True,
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                }
            ],
        }
    }


def _complete_server_template(template: Mapping[str, Any], sidecar: SidecarConfig) -> Object:
    """The user's template; one without containers (only a node selector, say) keeps the default container."""
    given, default = template.get("spec") or {}, _server_template(sidecar)["spec"]
    if given.get("containers"):
        return dict(template)
    return {**template, "spec": {**default, **given, "containers": default["containers"]}}


def _together(job: Job) -> Object:
    """Prefer one node for all parameter servers of a job.

    Workers in several racks need them below one switch, and where each node has a software switch of its own that is
    the node. A template with an affinity of its own spreads them, over the nodes of a rack for instance.
    """
    return {
        "podAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {
                    "weight": 100,
                    "podAffinityTerm": {
                        "topologyKey": "kubernetes.io/hostname",
                        "labelSelector": {"matchLabels": {LABEL_JOB: job.name, LABEL_ROLE: ROLE_PARAMETER_SERVER}},
                    },
                }
            ]
        }
    }


def _pod(wanted: Wanted, job: Job, job_spec: Mapping[str, Any], epoch: int, sidecar: SidecarConfig) -> Object:
    worker, name = wanted.role == ROLE_WORKER, wanted.name
    given = (job_spec.get("workers" if worker else "parameterServers") or {}).get("template") or {}
    template: Mapping[str, Any] = given if worker else _complete_server_template(given, sidecar)
    meta = template.get("metadata") or {}
    spec: Object = copy.deepcopy(dict(template.get("spec") or {}))
    spec.update({"hostname": name, "subdomain": job.name, "restartPolicy": "Never"})
    if not worker and job.spec.servers > 1 and job.spec.mode != "HostOnly":
        spec.setdefault("affinity", _together(job))
    for container in spec.get("containers") or ():
        # The pod goes with its epoch; its last words stay in the job's events and conditions.
        container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    if worker:
        env = [
            {"name": "RANK", "value": str(wanted.index)},
            {"name": "WORLD_SIZE", "value": str(job.spec.workers)},
            {"name": "LOCAL_RANK", "value": "0"},
            {"name": "MASTER_ADDR", "value": f"{worker_name(job.name, 0)}.{job.name}"},
            {"name": "MASTER_PORT", "value": str(MASTER_PORT)},
            {"name": "ATP_JOB", "value": job.key},
        ]
        for container in spec.get("containers") or ():
            own = {entry["name"] for entry in container.get("env") or ()}
            container["env"] = [*(container.get("env") or ()), *(e for e in env if e["name"] not in own)]
    pod: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": job.namespace,
            "labels": {
                **(meta.get("labels") or {}),
                LABEL_JOB: job.name,
                LABEL_ROLE: wanted.role,
                LABEL_RANK: str(wanted.index),
                LABEL_EPOCH: str(epoch),
            },
            "annotations": {k: v for k, v in (meta.get("annotations") or {}).items() if not k.startswith("atp.dev/")},
            "ownerReferences": [owner(job)],
        },
        "spec": spec,
    }
    return inject(pod, sidecar)
