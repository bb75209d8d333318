# SPDX-License-Identifier: Apache-2.0
"""Carries out a plan: statuses, finalizers, annotations, pods. It decides nothing, and says nothing of failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from . import FINALIZER
from .cache import key_of
from .caches import Caches
from .creation import CALLS_AT_ONCE, OBJECTS_A_PASS, PodMaker
from .events import Recorder
from .kube import ATP, CALL_FAILED, ApiError, Kube, path
from .lifecycle import JobPlan
from .model import Job, Object, stored_fraction

log = logging.getLogger(__name__)

FAILURES = (*CALL_FAILED, ValueError, KeyError, TypeError)
"""What can go wrong with one object."""
TESTED = ("phase", "epoch", "jobId", "revision")
"""Of a status: what must be as it was planned from when the next one is written."""


def tested(raw: Object) -> tuple[object, ...]:
    """What the write of a status rests on."""
    meta, status = raw["metadata"], raw.get("status") or {}
    return (meta.get("uid"), meta.get("generation"), *(status.get(key) for key in TESTED))


class Applier:
    """Writes to the API server, and keeps the caches at what it answers; `changed()` asks for another look."""

    def __init__(
        self, kube: Kube, caches: Caches, events: Recorder, maker: PodMaker, changed: Callable[[], None]
    ) -> None:
        self._kube, self._caches, self._events = kube, caches, events
        self._maker, self._changed = maker, changed

    async def write_status(self, kind: str, plural: str, raw: Object, status: Object) -> None:
        if (raw.get("status") or {}) == status:
            return
        namespace, name = key_of(raw)
        body = {**raw, "status": status}
        try:
            answer = await self._kube.replace(path(ATP, plural, namespace or None, name, "status"), body)
        except ApiError as error:
            if error.code == 404:
                self._caches.stores[kind].drop(raw)
                return
            raise
        self._caches.put(kind, answer)

    async def write(self, plan: JobPlan) -> None:
        """Status, and the events that go with it."""
        if not plan.remove_finalizer:
            await self._write_job_status(plan)
        for event in plan.events:
            await self._events.tell("ATPJob", plan.job.raw, event)

    async def _write_job_status(self, plan: JobPlan) -> None:
        """Only if it is still the one that was planned from, whatever else of the object changed meanwhile."""
        job, old = plan.job, plan.job.raw.get("status") or {}
        status = plan.status.to_dict(job.spec.workers)
        if old == status and not job.distrust:
            return
        operations: list[Object] = [{"op": "test", "path": "/metadata/uid", "value": job.uid}]
        if not job.distrust:
            operations += [{"op": "test", "path": f"/status/{key}", "value": old[key]} for key in TESTED if key in old]
        if plan.moves:
            # What it gets was weighed by what it asked for.
            operations.append({"op": "test", "path": "/metadata/generation", "value": job.generation})
        operations.append({"op": "add", "path": "/status", "value": status})
        try:
            answer = await self._kube.patch(path(ATP, "atpjobs", job.namespace, job.name, "status"), operations)
        except ApiError as error:
            if error.code != 404:
                raise
            self._caches.stores["jobs"].drop(job.raw)
            return
        self._caches.put("jobs", answer)

    async def finish(self, plan: JobPlan) -> None:
        """All but what `write` did already."""
        job = plan.job
        if plan.add_finalizer:
            await self._finalizers(job, add=True)
        if not plan.moves:
            await self.write(plan)
        if plan.held_back:
            return
        await self._some(
            [
                partial(self._kube.delete, path("api/v1", "pods", job.namespace, pod.name), uid=pod.uid)
                for pod in plan.delete_pods
            ]
        )
        if plan.create:
            await self._maker.create(plan)
        await self._some([partial(self._annotate, job, name, changes) for name, changes in plan.annotate.items()])
        if plan.delete_job:
            log.info("ATPJob %s: ttlSecondsAfterFinished is over, deleted", job.key)
            await self._kube.delete(path(ATP, "atpjobs", job.namespace, job.name), uid=job.uid)
        if plan.remove_finalizer:
            await self._finalizers(job, add=False)
            log.info("ATPJob %s: released", job.key)

    async def _some(self, calls: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """Make the calls for one job, a few at once; what is more than a pass allows waits for the next."""
        gate = asyncio.Semaphore(CALLS_AT_ONCE)

        async def one(call: Callable[[], Awaitable[None]]) -> None:
            async with gate:
                await call()

        if len(calls) > OBJECTS_A_PASS:
            self._changed()
        results = await asyncio.gather(*(one(call) for call in calls[:OBJECTS_A_PASS]), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _annotate(self, job: Job, name: str, changes: dict[str, str]) -> None:
        try:
            answer = await self._kube.merge(
                path("api/v1", "pods", job.namespace, name), {"metadata": {"annotations": changes}}
            )
        except ApiError as error:
            if error.code != 404:
                raise
            return
        self._caches.put("pods", answer)

    async def _finalizers(self, job: Job, *, add: bool) -> None:
        url = path(ATP, "atpjobs", job.namespace, job.name)
        current = list(job.raw["metadata"].get("finalizers") or ())
        wanted = [*current, FINALIZER] if add else [f for f in current if f != FINALIZER]
        body = {"metadata": {"resourceVersion": job.raw["metadata"]["resourceVersion"], "finalizers": wanted}}
        try:
            answer = await self._kube.merge(url, body)
        except ApiError as error:
            if error.code == 404 and not add:
                return
            if error.code != 409:
                raise
            # Somebody else changed the object: once more with what it is now.
            raw = await self._kube.get(url)
            if raw["metadata"].get("uid") != job.uid:
                raise
            current = list(raw["metadata"].get("finalizers") or ())
            wanted = [*current, FINALIZER] if add else [f for f in current if f != FINALIZER]
            if wanted == current or (add and FINALIZER in current):
                self._caches.put("jobs", raw)
                return
            body = {"metadata": {"resourceVersion": raw["metadata"]["resourceVersion"], "finalizers": wanted}}
            answer = await self._kube.merge(url, body)
        self._caches.put("jobs", answer)

    async def quote_fractions(self) -> None:
        """Writes a `spec.scale` that was stored as a fraction as the schema wants it now, so that updates work."""
        for raw in list(self._caches.stores["jobs"].items.values()):
            text = stored_fraction((raw.get("spec") or {}).get("scale"))
            if text is None:
                continue
            namespace, name = key_of(raw)
            body = {"metadata": {"resourceVersion": raw["metadata"]["resourceVersion"]}, "spec": {"scale": text}}
            try:
                self._caches.put("jobs", await self._kube.merge(path(ATP, "atpjobs", namespace, name), body))
                log.info("ATPJob %s/%s: spec.scale is now written as %r", namespace, name, text)
            except FAILURES as error:
                # Where the definition is still an earlier one, the number is right as it is.
                log.debug("ATPJob %s/%s: %s", namespace, name, error)
