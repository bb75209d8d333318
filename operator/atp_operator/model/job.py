# SPDX-License-Identifier: Apache-2.0
"""One ATPJob: its spec, its status, and what is known against it."""

from __future__ import annotations

from dataclasses import dataclass, field

from .. import FINALIZER
from .spec import JobSpec
from .status import JobStatus
from .types import Object, parse_time


@dataclass(frozen=True)
class Job:
    """One ATPJob."""

    namespace: str
    name: str
    uid: str
    generation: int
    created: float
    deleting: float | None  # deletionTimestamp, Unix seconds
    finalized: bool  # carries our finalizer
    spec: JobSpec
    status: JobStatus
    problems: tuple[str, ...] = ()  # what keeps it from ever running, see `intake`
    distrust: str = ""  # why its status is not taken for the operator's own; `status` is then a fresh one
    raw: Object = field(default_factory=dict, compare=False, repr=False)

    @property
    def key(self) -> str:
        """namespace/name."""
        return f"{self.namespace}/{self.name}"

    @property
    def queue_key(self) -> tuple[float, str, str]:
        """First come, first served; ties by name, so that every replica orders alike."""
        return (self.created, self.namespace, self.name)

    @staticmethod
    def from_object(raw: Object) -> Job:
        """Read an ATPJob that the schema let pass; one whose status nobody can read is distrusted, not refused."""
        meta = raw["metadata"]
        status, distrust = JobStatus(), str(raw.get("unreadable") or "")
        if not distrust:
            try:
                status = JobStatus.from_dict(raw.get("status") or {})
            except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
                distrust = f"the status cannot be read ({str(error)[:200]})"
        return Job(
            namespace=meta.get("namespace", ""),
            name=meta["name"],
            uid=meta.get("uid", ""),
            generation=meta.get("generation", 0),
            created=parse_time(meta.get("creationTimestamp")) or 0.0,
            deleting=parse_time(meta.get("deletionTimestamp")),
            finalized=FINALIZER in (meta.get("finalizers") or ()),
            spec=JobSpec.from_dict(raw.get("spec") or {}),
            status=status,
            problems=tuple(raw.get("problems") or ()),
            distrust=distrust,
            raw=raw,
        )
