# SPDX-License-Identifier: Apache-2.0
"""One pod of a job, as far as planning looks at it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import ANNOTATION_ASSIGNMENT, ANNOTATION_REFRESH, LABEL_EPOCH, LABEL_RANK, LABEL_ROLE, SIDECAR_NAME
from .types import Object


@dataclass(frozen=True)
class Pod:
    """What the planner needs to know of a job's pod."""

    name: str
    uid: str
    role: str
    rank: int
    epoch: int
    phase: str
    deleting: bool
    node: str
    address: str  # empty for a pod on its node's network: that address is the node's, not the pod's
    sidecar_started: bool
    ready: bool
    trouble: tuple[str, str] | None  # (reason, message) of what keeps the pod from starting
    failure: str  # why it failed, for people; empty unless phase is Failed
    assignment: str
    sidecar_ready: bool = True  # its gate is open
    refresh: str = ""

    @staticmethod
    def from_object(raw: Object) -> Pod:
        meta, status, spec = raw["metadata"], raw.get("status") or {}, raw.get("spec") or {}
        labels = meta.get("labels") or {}
        inits = status.get("initContainerStatuses") or ()
        conditions = status.get("conditions") or ()
        return Pod(
            name=meta["name"],
            uid=meta.get("uid", ""),
            role=labels.get(LABEL_ROLE, ""),
            rank=-1 if (rank := _count(labels.get(LABEL_RANK, ""))) is None else rank,
            epoch=_count(labels.get(LABEL_EPOCH, "")) or 0,
            phase=status.get("phase", "Pending"),
            deleting=bool(meta.get("deletionTimestamp")),
            node=spec.get("nodeName") or "",
            address="" if spec.get("hostNetwork") else status.get("podIP") or "",
            sidecar_started=any(c["name"] == SIDECAR_NAME and c.get("started") for c in inits),
            ready=any(c["type"] == "Ready" and c["status"] == "True" for c in conditions),
            trouble=_trouble(status),
            failure=_failure(status) if status.get("phase") == "Failed" else "",
            assignment=(meta.get("annotations") or {}).get(ANNOTATION_ASSIGNMENT, ""),
            sidecar_ready=any(c["name"] == SIDECAR_NAME and c.get("ready") for c in inits),
            refresh=(meta.get("annotations") or {}).get(ANNOTATION_REFRESH, ""),
        )


def _count(label: str) -> int | None:
    """The number in a label; None when it is none, or one that the operator never wrote."""
    return int(label) if label.isascii() and label.isdigit() and len(label) < 10 else None


def _trouble(status: Mapping[str, Any]) -> tuple[str, str] | None:
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return condition.get("reason", "Unschedulable"), condition.get("message", "the pod has no node yet")
    for entry in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
        waiting = (entry.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] not in ("PodInitializing", "ContainerCreating"):
            return waiting["reason"], f"container {entry['name']}: {waiting.get('message', waiting['reason'])}"
    return None


LAST_WORDS = 600
"""Characters of a failed container's message that are kept, from its end."""


def _failure(status: Mapping[str, Any]) -> str:
    for entry in [*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ())]:
        ended = (entry.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            words = str(ended.get("message") or "").strip()
            detail = f": {words[-LAST_WORDS:]}" if words else ""
            return f"container {entry['name']} exited with {ended['exitCode']} ({ended.get('reason', 'Error')}){detail}"
    return ": ".join(filter(None, [status.get("reason", ""), status.get("message", "")])) or "the pod failed"
