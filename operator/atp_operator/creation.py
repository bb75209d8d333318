# SPDX-License-Identifier: Apache-2.0
"""A job's Service and pods: made from the templates that its object has now, some at once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from . import reasons
from .caches import Caches
from .events import Recorder
from .fair import Backoff
from .injection import InjectionError, SidecarConfig
from .kube import ATP, ApiError, Kube, path
from .lifecycle import JobPlan
from .model import Event, Job, Object
from .pods import Wanted, manifest

log = logging.getLogger(__name__)

CALLS_AT_ONCE = 8
"""Objects of one job that are made or deleted at the same time."""
OBJECTS_A_PASS = 64
"""Objects of one job that one pass makes or deletes at most."""
CREATE_SECONDS = (2.0, 60.0)
"""Pause after a job's pods could not be made: the first, and the longest."""


class PodMaker:
    """Makes what a plan says is missing, and remembers what could not be made; `changed()` asks for another look."""

    def __init__(
        self, kube: Kube, caches: Caches, events: Recorder, sidecar: SidecarConfig, changed: Callable[[], None]
    ) -> None:
        self._kube, self._caches, self._events = kube, caches, events
        self._sidecar, self._changed = sidecar, changed
        self._failures = Backoff(*CREATE_SECONDS)  # by ATPJob uid, Unix seconds
        self.errors: dict[str, str] = {}  # by ATPJob uid: why its pods could not be made
        self._services: set[str] = set()  # UIDs of jobs whose Service is there

    def keep(self, uids: set[str]) -> None:
        """Forget all jobs but these."""
        self.errors = {uid: text for uid, text in self.errors.items() if uid in uids}
        self._services &= uids
        self._failures.keep(uids)

    def retries(self, now: float) -> list[float]:
        """When it is tried again for the jobs whose pods could not be made, Unix seconds."""
        return self._failures.retries(now)

    async def create(self, plan: JobPlan) -> None:
        """Make what is missing. The templates are read now, for this job alone."""
        job = plan.job
        missing = [w for w in plan.create if w.kind != "Service" or job.uid not in self._services]
        if not missing or self._failures.waits(job.uid, time.time()):
            return
        whole = await self._kube.get(path(ATP, "atpjobs", job.namespace, job.name))
        if whole["metadata"].get("uid") != job.uid or whole["metadata"].get("generation") != job.generation:
            self._caches.put("jobs", whole)
            self._changed()
            return
        refused = ""
        # The Service first: a pod that starts looks up names in it.
        for batch in ([w for w in missing if w.kind == "Service"], [w for w in missing if w.kind == "Pod"]):
            if len(batch) > OBJECTS_A_PASS:
                self._changed()
            for start in range(0, min(len(batch), OBJECTS_A_PASS), CALLS_AT_ONCE):
                if not refused:
                    some = batch[start : start + CALLS_AT_ONCE]
                    said = await asyncio.gather(*(self._create_one(plan, w, whole.get("spec") or {}) for w in some))
                    refused = next(filter(None, said), "")
        if refused:
            await self._create_failed(plan, refused)
        else:
            self._failures.done(job.uid)
            if self.errors.pop(job.uid, None) is not None:
                self._changed()

    async def _create_one(self, plan: JobPlan, wanted: Wanted, spec: Object) -> str:
        """Make one object; what keeps it from being made, for people, or nothing."""
        job, plural = plan.job, {"Pod": "pods", "Service": "services"}[wanted.kind]
        try:
            body = manifest(wanted, job, spec, plan.status.epoch, self._sidecar)
            answer = await self._kube.create(path("api/v1", plural, job.namespace), body)
        except InjectionError as error:
            return f"{wanted.kind} {wanted.name}: {error}"
        except ApiError as error:
            if error.code == 409 and error.reason == "AlreadyExists":
                return await self._adopt(job, plural, wanted.name)
            # Quota, PodSecurity, a webhook or a bad template: the words of the API server tell the user what to do.
            return f"{wanted.kind} {wanted.name} was refused by the API server: {error.message or error}"
        if wanted.kind == "Pod":
            self._caches.put("pods", answer)
        else:
            self._services.add(job.uid)
        return ""

    async def _adopt(self, job: Job, plural: str, name: str) -> str:
        """The object is there already: ours from before the cache knew it (nothing to say), or somebody else's."""
        raw = await self._kube.get(path("api/v1", plural, job.namespace, name))
        owners = [o.get("uid") for o in raw["metadata"].get("ownerReferences") or ()]
        if job.uid in owners:
            if plural == "pods":
                self._caches.put("pods", raw)
            else:
                self._services.add(job.uid)
            return ""
        kind = plural[:-1].capitalize()
        ours_once = any(o.get("kind") == "ATPJob" for o in raw["metadata"].get("ownerReferences") or ())
        return (
            f"waits until {kind} {name} of an earlier ATPJob of this name is gone"
            if raw["metadata"].get("deletionTimestamp") or ours_once
            else f"{kind} {name} exists in namespace {job.namespace} and is not this job's: delete it or rename the job"
        )

    async def _create_failed(self, plan: JobPlan, message: str) -> None:
        job = plan.job
        self._failures.fail(job.uid, message, time.time())
        if self.errors.get(job.uid) != message:
            log.warning("ATPJob %s: %s", job.key, message)
            await self._events.tell("ATPJob", job.raw, Event("Warning", reasons.POD_CREATE_FAILED, message))
            self.errors[job.uid] = message
            self._changed()  # the next plan puts it into the status
