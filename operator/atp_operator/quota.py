# SPDX-License-Identifier: Apache-2.0
"""Tenant quotas: how much the admitted jobs of the selected namespaces may hold together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from . import reasons
from .allocation import Ledger, Refusal
from .model import Job, Quota


class QuotaBook:
    """Usage per quota, counted from the admitted jobs and the ledger of the switches."""

    def __init__(
        self,
        quotas: Iterable[Quota],
        namespaces: Mapping[str, Mapping[str, str]],
        jobs: Iterable[Job],
        ledger: Ledger,
    ) -> None:
        self._quotas = sorted(quotas, key=lambda q: q.name)
        self._namespaces = namespaces
        self._ledger = ledger
        self.members: dict[str, set[str]] = {q.name: set() for q in self._quotas}
        self._leaving: dict[str, set[str]] = {q.name: set() for q in self._quotas}
        for job in jobs:
            if job.status.admitted and job.deleting is None:
                self.admit(job)

    def of(self, job: Job) -> list[Quota]:
        """The quotas that count this job: all whose selector matches its namespace."""
        labels = self._namespaces.get(job.namespace, {"kubernetes.io/metadata.name": job.namespace})
        return [quota for quota in self._quotas if quota.selects(labels)]

    def admit(self, job: Job) -> None:
        """Count the job as admitted."""
        for quota in self.of(job):
            self.members[quota.name].add(job.uid)

    def leave(self, job: Job) -> None:
        """Stop counting the job; its place is for others in the next plan, when its status says so (see `Ledger`)."""
        for name, members in self.members.items():
            if job.uid in members:
                members.discard(job.uid)
                self._leaving[name].add(job.uid)

    def _counted(self, quota: Quota, job: Job) -> set[str]:
        """UIDs of the other jobs that count against what the job may have."""
        return (self.members[quota.name] | self._leaving[quota.name]) - {job.uid}

    def used(self, quota: Quota, switch: str) -> int:
        """Aggregators that the quota's jobs request on a switch."""
        requests = self._ledger.switches[switch].requests
        return sum(n for uid, n in requests.items() if uid in self.members[quota.name])

    def refuse_job(self, job: Job) -> Refusal | None:
        """Why one more job does not fit, or None."""
        for quota in self.of(job):
            held = len(self._counted(quota, job))
            if quota.max_jobs is not None and held + 1 > quota.max_jobs:
                return Refusal(
                    reasons.QUOTA_EXCEEDED,
                    f"needs 1 job under quota {quota.name}: {max(0, quota.max_jobs - held)} free of {quota.max_jobs}",
                )
        return None

    def refuse_switch(self, job: Job, switch: str) -> Refusal | None:
        """Why its aggregators do not fit on one switch, or None."""
        for quota in self.of(job):
            if quota.aggregators is None:
                continue
            ledger, others = self._ledger.switches[switch], self._counted(quota, job)
            held = {**ledger.leaving_requests, **ledger.requests}
            used = sum(n for uid, n in held.items() if uid in others)
            if used + job.spec.request > quota.aggregators:
                return Refusal(
                    reasons.QUOTA_EXCEEDED,
                    f"needs {job.spec.request} aggregators on switch {switch} under quota {quota.name}: "
                    f"{max(0, quota.aggregators - used)} free of {quota.aggregators}"
                    + (
                        "; it can never fit: ask for less or raise the quota"
                        if job.spec.request > quota.aggregators
                        else ""
                    ),
                )
        return None
