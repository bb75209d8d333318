# SPDX-License-Identifier: Apache-2.0
"""What is to be done for one job, and what a step may look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..allocation import Ledger, Refusal
from ..conditions import STALLED, set_condition
from ..injection import SidecarConfig
from ..model import Event, Job, JobStatus, Limits, Pod, Switch
from ..pods import Wanted
from ..quota import QuotaBook

ENDED = ("Succeeded", "Failed")
"""Phases of a pod that runs no more."""


@dataclass
class JobPlan:
    """What is to be done for one job, in this order: finalizer, status, objects, annotations, events, release."""

    job: Job
    status: JobStatus
    add_finalizer: bool = False
    create: list[Wanted] = field(default_factory=list)
    delete_pods: list[Pod] = field(default_factory=list)
    annotate: dict[str, dict[str, str]] = field(default_factory=dict)  # pod name -> annotations
    events: list[Event] = field(default_factory=list)
    remove_finalizer: bool = False
    delete_job: bool = False
    wake_at: float | None = None
    held_back: bool = False  # nothing is done for it in this pass

    @property
    def moves(self) -> bool:
        """True when what the job holds of quota and switches changes: the ledgers say so already, its status must."""
        old, new = self.job.status, self.status
        held = (old.job_id, old.switches, old.regions) if old.holds_switches else None
        holds = (new.job_id, new.switches, new.regions) if new.holds_switches else None
        return old.admitted != new.admitted or held != holds

    @property
    def acts(self) -> bool:
        """True when there is something to do beside writing the status."""
        return bool(
            self.add_finalizer
            or self.create
            or self.delete_pods
            or self.annotate
            or self.events
            or self.remove_finalizer
            or self.delete_job
        )

    def wake(self, at: float) -> None:
        """Ask for another look at a time, Unix seconds."""
        self.wake_at = at if self.wake_at is None else min(self.wake_at, at)

    def tell(self, kind: str, reason: str, message: str) -> None:
        """An event."""
        self.events.append(Event(kind, reason, message))

    def condition(self, kind: str, status: bool | None, reason: str, message: str, now: float) -> None:
        """Set a condition of the new status."""
        set_condition(self.status.conditions, kind, status, reason, message, self.job.generation, now)

    def now_is(self, phase: str, reason: str, message: str) -> None:
        """Set the phase with its reason."""
        self.status.phase, self.status.reason, self.status.message = phase, reason, message


@dataclass
class World:
    """What a step may look at beside its own job; the ledger and the quota book change as jobs take and give back."""

    switches: Mapping[str, Switch]
    ledger: Ledger
    quotas: QuotaBook
    sidecar: SidecarConfig
    limits: Limits
    now: float
    create_errors: Mapping[str, str] = field(default_factory=dict)  # by ATPJob uid: why its pods could not be made
    refused: dict[tuple[object, ...], Refusal] = field(default_factory=dict)  # see `admit`


def hold_back(job: Job, why: str, reason: str, world: World, until: float | None) -> JobPlan:
    """The plan for a job that failed: it keeps what it holds, and says why nothing is done."""
    plan = JobPlan(job, job.status.copy(), held_back=True)
    plan.condition(STALLED, True, reason, why, world.now)
    if until is not None:
        plan.wake(until)
    return plan


def live(pods: Sequence[Pod]) -> list[Pod]:
    """The pods that nobody has deleted yet."""
    return [p for p in pods if not p.deleting]
