# SPDX-License-Identifier: Apache-2.0
"""core/v1 Events on the operator's objects.

Not kopf's poster: it makes a new event of each repetition, where this raises the count of the one there is, and the
name of an event is a digest of what it says, so that a new leader goes on counting.
"""

from __future__ import annotations

import hashlib
import logging
import time

from . import API_VERSION
from .cache import key_of
from .kube import ApiError, Kube, path
from .model import Event, Object, rfc3339

log = logging.getLogger(__name__)


class Recorder:
    """Writes events as the component atp-operator; `identity` is the replica."""

    def __init__(self, kube: Kube, identity: str) -> None:
        self._kube, self._identity = kube, identity

    async def tell(self, kind: str, raw: Object, event: Event) -> None:
        """An event on an object; the same said again raises the count of the one there is.

        One that the API server does not take is logged only: an event is a message, not a state.
        """
        name, body = event_object(kind, raw, event, self._identity, time.time())
        log.log(
            logging.WARNING if event.kind == "Warning" else logging.INFO,
            "%s %s: %s: %s",
            kind,
            "/".join(filter(None, key_of(raw))),
            event.reason,
            event.message,
        )
        collection = path("api/v1", "events", body["metadata"]["namespace"])
        try:
            await self._kube.create(collection, body)
        except ApiError as error:
            if error.code != 409:
                log.warning("event not written: %s", error)
                return
            try:
                old = await self._kube.get(f"{collection}/{name}")
                change = {"count": int(old.get("count") or 1) + 1, "lastTimestamp": body["lastTimestamp"]}
                await self._kube.merge(f"{collection}/{name}", change)
            except ApiError as again:
                log.warning("event not written: %s", again)


def event_object(kind: str, raw: Object, event: Event, identity: str, now: float) -> tuple[str, Object]:
    """(name, object) of an event; what says the same of the same object has the same name."""
    meta = raw["metadata"]
    key = hashlib.sha256(f"{meta['uid']}{event.reason}{event.message}".encode()).hexdigest()[:16]
    # The name has 253 characters at most. Events of cluster-wide objects are in namespace default.
    name, namespace = f"{meta['name'][:200].rstrip('.-')}.{key}", meta.get("namespace") or "default"
    involved = {
        "apiVersion": "v1" if kind == "Pod" else API_VERSION,
        "kind": kind,
        "name": meta["name"],
        "uid": meta["uid"],
    }
    if meta.get("namespace"):
        involved["namespace"] = namespace
    return name, {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": namespace},
        "involvedObject": involved,
        "type": event.kind,
        "reason": event.reason,
        "message": event.message[:1024],
        "source": {"component": "atp-operator"},
        "reportingComponent": "atp.dev/operator",
        "reportingInstance": identity,
        "firstTimestamp": rfc3339(now),
        "lastTimestamp": rfc3339(now),
        "count": 1,
    }
