# SPDX-License-Identifier: Apache-2.0
"""All that the operator knows of the cluster: a cache a kind, and what planning reads from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import LABEL_JOB
from .cache import Store
from .intake import JobKeeper, keep_labels, keep_pod, keep_whole
from .kube import ATP, Kube
from .model import AgentView, Job, Object, Pod, Quota, Switch
from .settings import Settings
from .watching import Source, Watcher

SOFTSWITCH_LABEL = ("app.kubernetes.io/component", "softswitch")
FED_BY_KOPF = ("switches", "quotas", "namespaces")
"""Kinds whose events come from kopf; they are listed here all the same, when a pass must know all."""


def relabelled(old: Object, new: Object) -> bool:
    """True when what is kept of a node or namespace changed: a node's object is written every few seconds."""
    before, now = old["metadata"], new["metadata"]
    return any(before.get(key) != now.get(key) for key in ("uid", "labels", "deletionTimestamp"))


def sources(settings: Settings) -> Mapping[str, Source]:
    """Where each kind comes from, and what is kept of it."""
    return {
        "jobs": Source(ATP, "atpjobs", JobKeeper(settings.sidecar)),
        "switches": Source(ATP, "atpswitches", keep_whole),
        "quotas": Source(ATP, "atptenantquotas", keep_whole),
        "namespaces": Source("api/v1", "namespaces", keep_labels, metadata_only=True, matters=relabelled),
        # Metadata alone, which kopf cannot watch: 5,000 whole nodes take 120 MB and 11 s of it, these 10 MB and 0.7 s.
        "nodes": Source("api/v1", "nodes", keep_labels, metadata_only=True, matters=relabelled),
        "pods": Source("api/v1", "pods", keep_pod, LABEL_JOB),
        # Of the installation's own namespace: anybody may label a pod in another.
        "switch_pods": Source("api/v1", "pods", keep_pod, "=".join(SOFTSWITCH_LABEL), namespace=settings.namespace),
    }


class Caches:
    """The stores by kind; `changed()` is called when an event brought news."""

    def __init__(self, kube: Kube, settings: Settings, changed: Callable[[], None]) -> None:
        found = sources(settings)
        self.stores = {kind: Store() for kind in found}
        self._keep = {kind: source.keep for kind, source in found.items()}
        self._watchers = {kind: Watcher(kube, source, self.stores[kind], changed) for kind, source in found.items()}
        self._parsed: dict[str, Job] = {}

    def watches(self) -> list[Any]:
        """A coroutine for each kind that kopf does not feed; it runs for ever."""
        return [watcher.run() for kind, watcher in self._watchers.items() if kind not in FED_BY_KOPF]

    def seen(self, kind: str, event: str | None, raw: Object) -> None:
        """An event of kopf's watches; see FED_BY_KOPF."""
        self._watchers[kind].see(event, raw)

    def put(self, kind: str, raw: Object) -> None:
        """An object as the API server answered it."""
        kept = self._keep[kind](raw)
        if kept is not None:
            self.stores[kind].put(kept)

    async def list_all(self, moved: Callable[[], None]) -> None:
        """Read all kinds from the API server; `moved()` is called after each."""
        for watcher in self._watchers.values():
            await watcher.list()
            moved()

    def jobs(self) -> list[Job]:
        """All jobs; each is read once a version."""
        before, self._parsed = self._parsed, {}
        for raw in self.stores["jobs"].items.values():
            uid = raw["metadata"].get("uid", "")
            job = before.get(uid)
            self._parsed[uid] = job if job is not None and job.raw is raw else Job.from_object(raw)
        return list(self._parsed.values())

    def pods(self, jobs: list[Job]) -> dict[str, list[Pod]]:
        """The pods of these jobs, by job key."""
        uids = {job.uid: job for job in jobs}
        pods: dict[str, list[Pod]] = {}
        for raw in self.stores["pods"].items.values():
            owner = uids.get(next((o["uid"] for o in raw["metadata"]["ownerReferences"]), ""))
            # An owner reference is what the pod's maker wrote: it counts in the job's own namespace only.
            if owner is not None and owner.namespace == raw["metadata"].get("namespace"):
                pods.setdefault(owner.key, []).append(Pod.from_object(raw))
        return pods

    def switches(self, view: Callable[[str], AgentView]) -> dict[str, Switch]:
        """All switches by name, with what `view` knows of their agents."""
        labels = {key[1]: (node["metadata"].get("labels") or {}) for key, node in self.stores["nodes"].items.items()}
        return {
            key[1]: Switch.from_object(raw, labels, view(key[1]))
            for key, raw in sorted(self.stores["switches"].items.items())
        }

    def quotas(self) -> list[Quota]:
        """All quotas."""
        return [Quota.from_object(raw) for raw in self.stores["quotas"].items.values()]

    def namespaces(self) -> dict[str, Mapping[str, str]]:
        """Labels by namespace, with the one that every namespace has."""
        return {
            key[1]: {"kubernetes.io/metadata.name": key[1], **(raw["metadata"].get("labels") or {})}
            for key, raw in self.stores["namespaces"].items.items()
        }
