# SPDX-License-Identifier: Apache-2.0
"""Conditions as Kubernetes means them: the transition time moves only when the status does."""

from __future__ import annotations

from .model import Object, rfc3339


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
