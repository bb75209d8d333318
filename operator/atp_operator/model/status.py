# SPDX-License-Identifier: Apache-2.0
"""`ATPJob.status`: all that the operator must know of a job after a restart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from atp_api import wire

from .placement import Placement, Region
from .read import EPOCH_LAST, number, text_of
from .types import Object, parse_time, rfc3339

ACTIVE_PHASES = frozenset({"Admitted", "Starting", "Running"})
TERMINAL_PHASES = frozenset({"Succeeded", "Failed"})

# HostOnly packets must be of a job that no switch knows, else a switch would drop them as foreign. One job ID is never
# given to a switch and serves all of them; end hosts tell such jobs apart by addresses.
HOST_ONLY_JOB_ID = wire.JOB_ID_MAX
JOB_ID_LAST = wire.JOB_ID_MAX - 1


@dataclass
class JobStatus:
    """`ATPJob.status`. Everything the operator must know of a job after a restart is in here."""

    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    mode: str | None = None
    job_id: int | None = None
    epoch: int = 0
    revision: int = 0
    retries: int = 0
    switches: tuple[str, ...] = ()
    values: int | None = None
    scale: str | None = None  # `spec.scale` when the job was admitted, as text
    regions: tuple[Region, ...] = ()
    placement: Placement | None = None
    ready: int = 0
    succeeded: int = 0
    failed: int = 0
    aggregation: Object = field(default_factory=dict)
    admitted_time: float | None = None
    epoch_time: float | None = None
    not_before: float | None = None
    placed_time: float | None = None
    start_time: float | None = None
    completion_time: float | None = None
    conditions: list[Object] = field(default_factory=list)
    observed_generation: int = 0

    @property
    def holds_switches(self) -> bool:
        """True while a job ID and regions on `switches` are this job's."""
        return self.job_id is not None and bool(self.switches) and self.phase in ACTIVE_PHASES

    @property
    def admitted(self) -> bool:
        """True while the job counts against quotas."""
        return self.admitted_time is not None and self.phase in ACTIVE_PHASES

    def copy(self) -> JobStatus:
        """A status to change: what is shared with this one is never changed in place."""
        return replace(self, conditions=[dict(c) for c in self.conditions], aggregation=dict(self.aggregation))

    def condition(self, kind: str) -> Object | None:
        """The condition of that type, or None."""
        return next((c for c in self.conditions if c["type"] == kind), None)

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> JobStatus:
        """Read a status, whoever wrote it.

        Raises:
            KeyError, TypeError, ValueError: the operator did not write it. What it says of switches may be forged all
                the same, see `claims`.
        """
        workers = value.get("workers") or {}
        placement = value.get("placement")
        job_id, values = value.get("jobId"), value.get("valuesPerPacket")
        return JobStatus(
            phase=value.get("phase", "Pending"),
            reason=value.get("reason", ""),
            message=value.get("message", ""),
            mode=value.get("mode"),
            job_id=None if job_id is None else number(job_id, 1, HOST_ONLY_JOB_ID),
            epoch=number(value.get("epoch", 0), 0, EPOCH_LAST),
            revision=number(value.get("revision", 0), 0, EPOCH_LAST),
            retries=number(value.get("retries", 0), 0, EPOCH_LAST),
            switches=tuple(text_of(name) for name in value.get("switches") or ()),
            values=None if values is None else number(values, 1, 2**16),
            scale=value.get("scale"),
            regions=tuple(
                Region(
                    number(r["start"], 0, wire.AGGREGATOR_INDEX_MAX),
                    number(r["size"], 1, wire.AGGREGATOR_INDEX_MAX + 1),
                    r.get("floor", False) is True,
                )
                for r in value.get("regions") or ()
            ),
            placement=Placement.from_dict(placement) if placement else None,
            ready=workers.get("ready", 0),
            succeeded=workers.get("succeeded", 0),
            failed=workers.get("failed", 0),
            aggregation=dict(value.get("aggregation") or {}),
            admitted_time=parse_time(value.get("admittedTime")),
            epoch_time=parse_time(value.get("epochTime")),
            not_before=parse_time(value.get("notBefore")),
            placed_time=parse_time(value.get("placedTime")),
            start_time=parse_time(value.get("startTime")),
            completion_time=parse_time(value.get("completionTime")),
            conditions=[dict(c) for c in value.get("conditions") or ()],
            observed_generation=value.get("observedGeneration", 0),
        )

    def to_dict(self, workers: int) -> Object:
        """As the API object's status; `workers` is the number that the spec asks for."""
        done = self.phase == "Succeeded" or self.succeeded > 0
        result: Object = {
            "observedGeneration": self.observed_generation,
            "phase": self.phase,
            "reason": self.reason,
            "message": self.message,
            "epoch": self.epoch,
            "revision": self.revision,
            "retries": self.retries,
            "workers": {
                "summary": f"{max(self.ready, self.succeeded) if done else self.ready}/{workers}",
                "ready": self.ready,
                "succeeded": self.succeeded,
                "failed": self.failed,
            },
            "conditions": self.conditions,
        }
        optional: Object = {
            "mode": self.mode,
            "jobId": self.job_id,
            "switches": list(self.switches) or None,
            "valuesPerPacket": self.values,
            "scale": self.scale,
            "regions": [region.to_dict() for region in self.regions] or None,
            "floor": sum(region.size for region in self.regions if region.floor) or None,
            # For people. What counts is in the placement, which an older definition of ATPJob in the cluster keeps.
            "addendLimit": self.placement.addend_limit if self.placement else None,
            "placement": self.placement.to_dict() if self.placement else None,
            "aggregation": self.aggregation or None,
        }
        times = {
            "admittedTime": self.admitted_time,
            "epochTime": self.epoch_time,
            "notBefore": self.not_before,
            "placedTime": self.placed_time,
            "startTime": self.start_time,
            "completionTime": self.completion_time,
        }
        optional.update({key: rfc3339(value) for key, value in times.items() if value is not None})
        result.update({key: value for key, value in optional.items() if value is not None})
        return result
