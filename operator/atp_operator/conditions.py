# SPDX-License-Identifier: Apache-2.0
"""Conditions as Kubernetes means them: the transition time moves only when the status does."""

from __future__ import annotations

from .model import Object, rfc3339

STALLED = "Stalled"
"""Condition of an ATPJob that the operator leaves alone for a while; absent while all is well."""
STATUS_REJECTED = "StatusRejected"
"""The status was not written by the operator: the job gave everything back and begins again."""
WRITE_FAILED = "WriteFailed"
"""The API server does not take what the operator writes to this object."""
PLAN_FAILED = "PlanFailed"
"""The operator cannot plan this job; it keeps what it holds."""


def set_condition(
    conditions: list[Object],
    kind: str,
    status: bool | None,
    reason: str,
    message: str,
    generation: int,
    now: float,
) -> None:
    """Add or replace the condition `kind` in place; status None means Unknown."""
    text = "Unknown" if status is None else "True" if status else "False"
    entry: Object = {
        "type": kind,
        "status": text,
        "reason": reason,
        "message": message,
        "observedGeneration": generation,
        "lastTransitionTime": rfc3339(now),
    }
    for index, old in enumerate(conditions):
        if old["type"] == kind:
            if old["status"] == text:
                entry["lastTransitionTime"] = old["lastTransitionTime"]
            conditions[index] = entry
            return
    conditions.append(entry)


def drop_condition(conditions: list[Object], kind: str) -> None:
    """Remove the condition `kind` in place, if there."""
    conditions[:] = [c for c in conditions if c["type"] != kind]
