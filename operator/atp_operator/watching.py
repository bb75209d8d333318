# SPDX-License-Identifier: Apache-2.0
"""Keeps the caches fresh: one list and watch a kind, each object cut down as soon as it is read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from .cache import Store, key_of, version_of
from .kube import CALL_FAILED, METADATA_ONLY, Kube, path
from .model import Object

log = logging.getLogger(__name__)

RETRY_SECONDS = (0.5, 15.0)
"""Pause after a watch that failed: the first, and the longest."""


@dataclass(frozen=True)
class Source:
    """What one kind of objects comes from, and what is kept of each (None: nothing)."""

    root: str
    plural: str
    keep: Callable[[Object], Object | None]
    selector: str = ""
    metadata_only: bool = False
    namespace: str | None = None
    matters: Callable[[Object, Object], bool] = lambda old, new: True
    """Whether a change of an object, as it was kept before and is now, is worth a look."""


class Watcher:
    """Lists and watches one source into a store; calls `changed` when something is news."""

    def __init__(self, kube: Kube, source: Source, store: Store, changed: Callable[[], None]) -> None:
        self._kube, self._source, self._store, self._changed = kube, source, store, changed
        self._listing = asyncio.Lock()  # one list at a time: the controller asks for one, too
        self._url = path(source.root, source.plural, source.namespace)
        self._query = {"labelSelector": source.selector} if source.selector else None
        self._accept = ["application/json"] * 2
        if source.metadata_only:
            self._accept = [METADATA_ONLY.format(list="List"), METADATA_ONLY.format(list="")]

    def _keep(self, raw: Object) -> Object | None:
        """What is kept of an object; None also for one that is unlike all that the API server makes."""
        try:
            return self._source.keep(raw)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            log.warning("%s %s is passed over: %r", self._source.plural, "/".join(key_of(raw)), error)
            return None

    async def list(self) -> int:
        """Read all; the resource version at which that was."""
        async with self._listing:
            kept: list[Object] = []
            at = 0
            async for objects, version in self._kube.pages(self._url, self._query, self._accept[0]):
                kept += [found for raw in objects if (found := self._keep(raw)) is not None]
                at = version
                del objects
                await asyncio.sleep(0)
            self._store.fill(kept, at)
        self._changed()
        return at

    async def run(self) -> None:
        """For ever: list, then watch; again from the list when the watch cannot go on."""
        pause, version = RETRY_SECONDS[0], 0
        while True:
            try:
                version = version or await self.list()
                async for event, raw in self._kube.watch(self._url, str(version), self._query, self._accept[1]):
                    version = max(version, version_of(raw))
                    self.see(event, raw)
                    pause = RETRY_SECONDS[0]
                continue
            except (*CALL_FAILED, ValueError) as error:
                log.info("watch of %s: %s", self._source.plural, error or type(error).__name__)
                version = 0
            await asyncio.sleep(pause)
            pause = min(RETRY_SECONDS[1], 2 * pause)

    def see(self, event: str | None, raw: Object) -> None:
        """An event of a watch; kopf's, too, whose first list has events without a type."""
        if event == "BOOKMARK":
            return
        if event == "DELETED":
            self._store.drop(raw)
            self._changed()
        elif (kept := self._keep(raw)) is not None:
            old = self._store.items.get(key_of(raw))
            if self._store.put(kept) and (old is None or self._source.matters(old, kept)):
                self._changed()
        elif key_of(raw) in self._store.items:
            self._store.drop(raw)
            self._changed()
