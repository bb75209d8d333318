# SPDX-License-Identifier: Apache-2.0
"""What the operator keeps of an object that it has seen: only what planning needs, however large the object is.

A kept object has the shape of an API object. Of an ATPJob the pod templates are dropped once they are checked (they are
read again, one job at a time, when pods are made); of a pod, all but its place, its state and its assignment's digest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from . import ANNOTATION_ASSIGNMENT, ANNOTATION_REFRESH, GROUP
from .desired import assignment_digest
from .injection import InjectionError, SidecarConfig
from .model import Job, Object
from .pods import TEMPLATE_FIELDS, manifest, wanted_objects
from .sizes import STATUS_BYTES_MAX, json_bytes, too_large
from .validation import validate_job

_META = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "deletionTimestamp")
_TEXT_MAX = 2048
_PROBLEMS_MAX = 8
_LABELS_MAX = 128


def _pick(value: Mapping[str, Any], keys: Iterable[str]) -> Object:
    return {key: value[key] for key in keys if key in value}


def _short(value: object) -> object:
    return value[:_TEXT_MAX] if isinstance(value, str) else value


def _labels(meta: Mapping[str, Any]) -> Object:
    return dict(list((meta.get("labels") or {}).items())[:_LABELS_MAX])


class JobKeeper:
    """`keep_job`, which looks at the templates of each version of a spec once: most events change something else."""

    def __init__(self, sidecar: SidecarConfig, most: int = 8192) -> None:
        self._sidecar, self._most = sidecar, most
        self._seen: OrderedDict[str, tuple[int, list[str]]] = OrderedDict()  # by UID: generation, problems

    def __call__(self, raw: Object) -> Object:
        """What is kept of the job."""
        uid, generation = raw["metadata"].get("uid", ""), raw["metadata"].get("generation", 0)
        before = self._seen.get(uid)
        known = before[1] if before is not None and before[0] == generation else None
        kept, found = _keep_job(raw, self._sidecar, known)
        if found is not None:
            self._seen[uid] = (generation, found)
            self._seen.move_to_end(uid)
            if len(self._seen) > self._most:
                self._seen.popitem(last=False)
        return kept


def keep_job(raw: Object, sidecar: SidecarConfig) -> Object:
    """An ATPJob without its templates, with `problems`: what keeps it from ever running.

    A status that is larger than the operator ever writes is not kept: `unreadable` says so.
    """
    return _keep_job(raw, sidecar, None)[0]


def _keep_job(raw: Object, sidecar: SidecarConfig, known: list[str] | None) -> tuple[Object, list[str] | None]:
    """(what is kept, problems of its templates or None if they were not looked at); `known`: problems found before."""
    meta, spec = raw["metadata"], raw.get("spec") or {}
    kept: Object = {"metadata": _pick(meta, _META), "spec": {}, "status": raw.get("status") or {}}
    if meta.get("finalizers"):
        kept["metadata"]["finalizers"] = list(meta["finalizers"])[:_LABELS_MAX]
    for key, value in spec.items():
        if key in ("workers", "parameterServers"):
            kept["spec"][key] = _pick(value or {}, ("replicas",))
        else:
            kept["spec"][key] = value
    large = too_large(raw)
    found = None if large else known if known is not None else job_problems(raw, sidecar)
    problems = large or found
    if large:
        kept["spec"] = _pick(kept["spec"], ("workers", "parameterServers", "suspend", "mode", "aggregators", "scale"))
    if problems:
        kept["problems"] = [str(_short(problem)) for problem in problems[:_PROBLEMS_MAX]]
    if json_bytes(kept["status"]) > STATUS_BYTES_MAX:
        kept["status"], kept["unreadable"] = {}, f"the status has more than {STATUS_BYTES_MAX} bytes"
    return kept, found


def job_problems(raw: Mapping[str, Any], sidecar: SidecarConfig) -> list[str]:
    """All that keeps an ATPJob of a size that is read from ever running; templates may hold anything."""
    try:
        return validate_job(raw) or _unmakeable(raw, sidecar)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        return [f"spec.workers.template or spec.parameterServers.template is not a pod template: {error}"]


def _unmakeable(raw: Mapping[str, Any], sidecar: SidecarConfig) -> list[str]:
    """What keeps the job's pods from being made; those of a role differ only in names."""
    job = Job.from_object({**raw, "status": {}})
    errors = []
    for wanted in wanted_objects(job):
        if wanted.kind == "Pod" and wanted.index == 0:
            try:
                manifest(wanted, job, raw.get("spec") or {}, 1, sidecar)
            except (InjectionError, AttributeError, KeyError, TypeError, ValueError) as error:
                errors.append(f"{TEMPLATE_FIELDS[wanted.role]}: {error}")
    return errors


def keep_pod(raw: Object) -> Object | None:
    """A pod that an ATPJob controls, or that is part of no job but labelled (a software switch's); None for others."""
    meta, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    owners = [
        _pick(owner, ("kind", "uid", "controller"))
        for owner in meta.get("ownerReferences") or ()
        if owner.get("controller") and str(owner.get("apiVersion", "")).startswith(f"{GROUP}/")
    ]
    labels = {k: v for k, v in _labels(meta).items() if k.startswith((f"{GROUP}/", "app.kubernetes.io/"))}
    if not owners and f"{GROUP}/job" in labels:
        return None
    annotations = meta.get("annotations") or {}
    told: Object = {}
    if ANNOTATION_ASSIGNMENT in annotations:
        told[ANNOTATION_ASSIGNMENT] = assignment_digest(annotations[ANNOTATION_ASSIGNMENT])
    if ANNOTATION_REFRESH in annotations:
        told[ANNOTATION_REFRESH] = annotations[ANNOTATION_REFRESH][:32]
    return {
        "metadata": {**_pick(meta, _META), "labels": labels, "annotations": told, "ownerReferences": owners[:1]},
        "spec": _pick(spec, ("nodeName", "hostNetwork")),
        "status": {
            **{key: _short(status[key]) for key in ("phase", "podIP", "hostIP", "reason", "message") if key in status},
            "conditions": [
                {key: _short(c[key]) for key in ("type", "status", "reason", "message") if key in c}
                for c in status.get("conditions") or ()
                if c.get("type") in ("PodScheduled", "Ready")
            ],
            **{
                key: [_container(c) for c in status.get(key) or ()]
                for key in ("initContainerStatuses", "containerStatuses")
            },
        },
    }


def _container(status: Mapping[str, Any]) -> Object:
    """A container's state, in short; of the last words the end counts."""
    kept = _pick(status, ("name", "ready", "started"))
    for how, told in (status.get("state") or {}).items():
        if how in ("waiting", "terminated"):
            state = _pick(told or {}, ("reason", "exitCode"))
            if isinstance((told or {}).get("message"), str):
                text = told["message"]
                state["message"] = text[:_TEXT_MAX] if how == "waiting" else text[-_TEXT_MAX:]
            kept["state"] = {how: state}
    return kept


def keep_labels(raw: Object) -> Object:
    """A node or a namespace: its labels."""
    meta = raw["metadata"]
    return {"metadata": {**_pick(meta, _META), "labels": _labels(meta)}}


def keep_whole(raw: Object) -> Object:
    """A cluster object of an admin: all but the record of who wrote which field."""
    return {**raw, "metadata": {key: value for key, value in raw["metadata"].items() if key != "managedFields"}}
