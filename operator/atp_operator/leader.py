# SPDX-License-Identifier: Apache-2.0
"""Leader election on a coordination.k8s.io Lease: only its holder acts.

As client-go does it: a holder that cannot renew stops by itself before anyone else may take over, and a candidate
measures the lease's age by its own clock from when it saw the last change, so clocks need not agree.

Not kopf's peering: that is an object of a kind of kopf's own which says who should stand back, and a replica that does
not read it acts on.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import time
from collections.abc import Callable

from .kube import LEASES, ApiError, Kube, path
from .model import Object

log = logging.getLogger(__name__)


def _micro_now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class LeaderElection:
    """Holds or seeks the lease until cancelled; calls `changed(leading)` on every change."""

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        name: str,
        identity: str,
        seconds: float,
        changed: Callable[[bool], None],
    ) -> None:
        self._kube = kube
        self._url = path(LEASES, "leases", namespace, name)
        self._collection = path(LEASES, "leases", namespace)
        self._name, self._namespace = name, namespace
        self.identity = identity
        self._seconds = max(1.0, seconds)
        self._changed = changed
        self._seen: tuple[str, str] | None = None
        self._seen_at = 0.0
        self._renewed_at = 0.0
        self.leading = False

    async def run(self) -> None:
        """Until cancelled; then the lease is given back so that another replica need not wait."""
        try:
            while True:
                await self._round()
                await asyncio.sleep(self._seconds / 5)
        finally:
            if self.leading:
                self._set(False)
                try:
                    await asyncio.wait_for(self._give_back(), 3.0)
                except Exception as error:
                    log.warning("the lease was not given back: %s", error)

    async def _round(self) -> None:
        try:
            held = await asyncio.wait_for(self._acquire_or_renew(), self._seconds / 2)
        except (ApiError, OSError, TimeoutError) as error:
            log.warning("lease %s/%s: %s", self._namespace, self._name, error)
            held = False
        except Exception as error:  # the HTTP client has errors of its own
            log.warning("lease %s/%s: %r", self._namespace, self._name, error)
            held = False
        now = time.monotonic()
        if held:
            self._renewed_at = now
            self._set(True)
        elif self.leading and now - self._renewed_at > self._seconds * 2 / 3:
            self._set(False)

    def _set(self, leading: bool) -> None:
        if leading != self.leading:
            self.leading = leading
            log.info("%s as leader", "acts" if leading else "stands back")
            self._changed(leading)

    async def _acquire_or_renew(self) -> bool:
        stamp = _micro_now()
        try:
            lease = await self._kube.get(self._url)
        except ApiError as error:
            if error.code != 404:
                raise
            await self._kube.create(self._collection, self._body(stamp, stamp, 0))
            return True
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        seen = (holder, spec.get("renewTime") or "")
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
        valid = now - self._seen_at < float(spec.get("leaseDurationSeconds") or self._seconds)
        if holder not in ("", self.identity) and valid:
            if self.leading:
                self._set(False)  # somebody took it: stop at once
            return False
        own = holder == self.identity
        transitions = int(spec.get("leaseTransitions") or 0) + (0 if own else 1)
        body = self._body(spec.get("acquireTime") or stamp if own else stamp, stamp, transitions)
        body["metadata"]["resourceVersion"] = lease["metadata"]["resourceVersion"]
        try:
            await self._kube.replace(self._url, body)
        except ApiError as error:
            if error.code == 409:
                return False
            raise
        return True

    def _body(self, acquired: str, renewed: str, transitions: int, holder: str | None = None) -> Object:
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": {
                "holderIdentity": self.identity if holder is None else holder,
                "leaseDurationSeconds": max(1, round(self._seconds)),
                "acquireTime": acquired,
                "renewTime": renewed,
                "leaseTransitions": transitions,
            },
        }

    async def _give_back(self) -> None:
        lease = await self._kube.get(self._url)
        if (lease.get("spec") or {}).get("holderIdentity") == self.identity:
            lease["spec"]["holderIdentity"] = ""
            await self._kube.replace(self._url, lease)
