# SPDX-License-Identifier: Apache-2.0
"""Conditions as Kubernetes means them: the transition time moves only when the status does."""

from __future__ import annotations

from .model import Object, rfc3339

# Of an ATPJob.
ADMITTED = "Admitted"
"""It holds quota, and what it needs of the switches."""
PODS_READY = "PodsReady"
"""All pods have an address and a running sidecar."""
SWITCH_PROGRAMMED = "SwitchProgrammed"
"""Every switch of the tree holds this epoch."""
NETWORK_AGGREGATION = "NetworkAggregation"
"""Gradients are summed in the network; False: by the parameter server."""
COMPLETE = "Complete"
"""All workers succeeded."""
FAILED = "Failed"
"""The job has ended otherwise."""
STALLED = "Stalled"
"""The operator leaves the job alone for a while; absent while all is well."""

# Of an ATPSwitch, in the order in which they hang on each other.
REACHABLE = "Reachable"
"""The agent answers."""
CONNECTED = "Connected"
"""The agent is the primary P4Runtime controller of the switch."""
PIPELINE_MATCHES = "PipelineMatches"
"""The switch runs the P4 program of the agent."""
IN_SYNC = "InSync"
"""The switch holds exactly what it should."""
READY = "Ready"
"""Jobs may use it."""


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
