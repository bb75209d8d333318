# SPDX-License-Identifier: Apache-2.0
"""What an object must be before it can run; every text says which field, what is wrong and what to do.

The schema's CEL rules say the same for clusters without the webhook; these hold for what came in another way, too.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from typing import Any

from atp_api import wire

from . import SIDECAR_NAME
from .injection import ASSIGNMENT_VOLUME, SHM_VOLUME
from .model import SCALE_AUTO, read_scale

# Powers of two divide the index table, so that a slot (sequence mod P) and its index belong to one shard (sequence mod
# their number). A switch takes a job's ACKs from at most 8 ports, see ATP_PS_PORTS_MAX in softswitch/.
SHARDS = (1, 2, 4, 8)
MODES = ("Shared", "Reserved", "HostOnly")
NAME = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
NAMES_OF_OTHERS = ("serviceAccountName", "priorityClassName", "runtimeClassName")
"""Fields of a pod that name other objects."""
SUBDOMAIN = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
# What every pod of a running epoch was made from, or what the switches were told: it cannot change under it.
FROZEN = (
    "workers",
    "parameterServers",
    "mode",
    "switches",
    "aggregators",
    "valuesPerPacket",
    "scale",
    "stallTimeoutSeconds",
)


def validate_job(job: Mapping[str, Any]) -> list[str]:
    """All that keeps an ATPJob from running; empty when nothing does. The argument is the API object."""
    errors: list[str] = []
    spec = job.get("spec") or {}
    name = (job.get("metadata") or {}).get("name", "")
    if name and (len(name) > 51 or not NAME.match(name)):
        errors.append(
            f"metadata.name {name!r}: at most 51 characters, lower-case letters, digits and '-', beginning with a "
            f"letter: pods and a Service are named after it"
        )
    workers = spec.get("workers") or {}
    replicas = workers.get("replicas")
    most = wire.WORKERS_MAX
    if not isinstance(replicas, int) or replicas < 1:
        errors.append(f"spec.workers.replicas is {replicas!r}: a job needs at least 1 worker")
    elif replicas > most:
        errors.append(
            f"spec.workers.replicas is {replicas}: at most {most}, the fan-in degree allows 32 racks of 32 workers"
        )
    errors += _template("spec.workers.template", workers.get("template"))
    servers = spec.get("parameterServers") or {}
    if servers.get("replicas", 1) not in SHARDS:
        errors.append(
            f"spec.parameterServers.replicas is {servers['replicas']!r}: 1, 2, 4 or 8, each of them answers an equal "
            f"share of the sequences; a switch takes a job's ACKs from at most 8 ports"
        )
    if servers.get("template") is not None:
        errors += _template("spec.parameterServers.template", servers["template"], containers=False)
    if spec.get("mode", "Shared") not in MODES:
        errors.append(f"spec.mode is {spec['mode']!r}: one of {', '.join(MODES)}")
    try:
        read_scale(spec.get("scale", SCALE_AUTO))
    except ValueError as error:
        errors.append(f"spec.scale is {error}")
    aggregators = spec.get("aggregators") or {}
    request, floor = aggregators.get("request", 1024), aggregators.get("floor", 0)
    if not isinstance(request, int) or not 1 <= request <= wire.AGGREGATOR_INDEX_MAX + 1:
        errors.append(
            f"spec.aggregators.request is {request!r}: 1 to {wire.AGGREGATOR_INDEX_MAX + 1}, for an index has 16 bits"
        )
    elif not isinstance(floor, int) or not 0 <= floor <= request:
        errors.append(
            f"spec.aggregators.floor is {floor!r}: 0 to {request} (aggregators.request), for the floor is a part of "
            f"what is requested"
        )
    if floor and spec.get("mode", "Shared") != "Shared":
        errors.append(
            f"spec.aggregators.floor is {floor!r}, but spec.mode is {spec['mode']}: a floor is for mode Shared; in "
            f"mode Reserved every aggregator is the job's own, in mode HostOnly it has none"
        )
    values = spec.get("valuesPerPacket")
    profiles = (wire.VALUES_BASE, wire.VALUES_LARGE, wire.VALUES_JUMBO)
    if values is not None and values not in profiles:
        errors.append(f"spec.valuesPerPacket is {values!r}: one of {', '.join(map(str, profiles))}")
    return errors


def _template(path: str, template: Mapping[str, Any] | None, *, containers: bool = True) -> list[str]:
    if not template and containers:
        return [f"{path} is missing: give a pod template with at least one container, the first is the trainer"]
    template = template or {}
    spec = template.get("spec") or {}
    errors: list[str] = []
    for label in ((template.get("metadata") or {}).get("labels") or {}) if containers else ():
        if str(label).startswith("atp.dev/"):
            errors.append(f"{path}.metadata.labels: {label} is set by the operator: leave it out")
    if containers and not spec.get("containers"):
        errors.append(f"{path}.spec.containers is empty: give at least one container, the first is the trainer")
    for field in NAMES_OF_OTHERS:
        name = spec.get(field) or ""
        if name and (len(name) > 253 or not SUBDOMAIN.match(name)):
            errors.append(
                f"{path}.spec.{field} {name!r}: at most 253 lower-case letters, digits, '-' and '.', "
                f"beginning and ending with a letter or digit"
            )
    if spec.get("hostNetwork"):
        errors.append(f"{path}.spec.hostNetwork must be false: the switch knows a worker by the address of its pod")
    if spec.get("restartPolicy", "Never") != "Never":
        errors.append(
            f"{path}.spec.restartPolicy is {spec['restartPolicy']}: it must be Never or absent, a failed worker "
            f"restarts the whole job as a new epoch (spec.backoffLimit)"
        )
    for key in ("containers", "initContainers"):
        for index, container in enumerate(spec.get(key) or ()):
            if container.get("name") == SIDECAR_NAME:
                errors.append(
                    f"{path}.spec.{key}[{index}].name {SIDECAR_NAME} belongs to the injected sidecar: choose another"
                )
            for mount in container.get("volumeMounts") or ():
                where = posixpath.normpath("/" + str(mount.get("mountPath", "")).lstrip("/"))
                where = where.removeprefix("/var") if where.startswith("/var/run") else where
                if where in ("/", "/run", "/run/atp") or where.startswith("/run/atp/"):
                    errors.append(
                        f"{path}.spec.{key}[{index}].volumeMounts: {mount.get('mountPath')} hides the sidecar's "
                        f"/run/atp: mount elsewhere"
                    )
    for index, volume in enumerate(spec.get("volumes") or ()):
        if volume.get("name") in (SHM_VOLUME, ASSIGNMENT_VOLUME):
            errors.append(
                f"{path}.spec.volumes[{index}].name {volume['name']} belongs to the injected sidecar: choose another"
            )
    return errors


def validate_job_update(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Changes that an admitted job does not take."""
    status = old.get("status") or {}
    if not status.get("admittedTime"):
        return []
    before, after = old.get("spec") or {}, new.get("spec") or {}
    return [
        f"spec.{key} cannot change once the job is admitted (phase {status.get('phase')}): "
        + (
            "it has ended, make a new job"
            if status.get("phase") in ("Succeeded", "Failed")
            else "set spec.suspend to true first, or make a new job"
        )
        for key in FROZEN
        if before.get(key) != after.get(key) and not (key == "scale" and _same_scale(before, after))
    ]


def _same_scale(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """True for two ways to write one scale: 0.5, as an earlier version of the schema stored it, and "0.5"."""
    try:
        return read_scale(before.get("scale", SCALE_AUTO)) == read_scale(after.get("scale", SCALE_AUTO))
    except ValueError:
        return False


def validate_switch(switch: Mapping[str, Any]) -> list[str]:
    """All that is wrong with an ATPSwitch."""
    spec = switch.get("spec") or {}
    errors: list[str] = []
    address = (spec.get("agent") or {}).get("address", "")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 1 <= int(port) <= 65535:
        errors.append(f"spec.agent.address is {address!r}: give host:port, for example 10.0.0.7:9560")
    nodes: dict[tuple[str, int], None] = {}
    if spec.get("type") != "Software":
        if not spec.get("nodes") and not spec.get("nodeSelector"):
            errors.append("spec.nodes and spec.nodeSelector are both empty: say which nodes are below this switch")
        for index, entry in enumerate(spec.get("ports") or ()):
            key = (entry.get("node", ""), entry.get("port", 0))
            if key[1] in {p for _, p in nodes}:
                errors.append(f"spec.ports[{index}].port {key[1]} is given twice: one port leads to one node")
            nodes[key] = None
    return errors


def validate_quota(quota: Mapping[str, Any]) -> list[str]:
    """All that is wrong with an ATPTenantQuota."""
    spec = quota.get("spec") or {}
    errors: list[str] = []
    if spec.get("maxJobs") is None and spec.get("nominalQuota") is None:
        errors.append("spec limits nothing: give spec.maxJobs, spec.nominalQuota.aggregators or both")
    for index, rule in enumerate((spec.get("namespaceSelector") or {}).get("matchExpressions") or ()):
        needs = rule.get("operator") in ("In", "NotIn")
        if needs != bool(rule.get("values")):
            errors.append(
                f"spec.namespaceSelector.matchExpressions[{index}].values must be given for In and NotIn, and absent "
                f"for Exists and DoesNotExist"
            )
    return errors
