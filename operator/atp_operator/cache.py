# SPDX-License-Identifier: Apache-2.0
"""The cluster's objects as last seen: filled by lists, kept fresh by watch events. A cache, never the truth.

Resource versions order what is known of an object, so that an event older than our own last write does not undo it.
"""

from __future__ import annotations

from collections.abc import Iterable

from .model import Object


def version_of(obj: Object) -> int:
    """The object's resource version as a number (API servers promise an order since 1.35, etcd always gave it)."""
    text = str((obj.get("metadata") or {}).get("resourceVersion") or "0")
    return int(text) if text.isdigit() else 0


def key_of(obj: Object) -> tuple[str, str]:
    """(namespace, name); the namespace is empty for cluster-wide objects."""
    meta = obj["metadata"]
    return meta.get("namespace") or "", meta["name"]


class Store:
    """Objects of one kind."""

    def __init__(self) -> None:
        self.items: dict[tuple[str, str], Object] = {}
        self._gone: dict[str, int] = {}  # uid -> version at which it was seen deleted

    def put(self, obj: Object) -> bool:
        """Keep the object if it is news; True when it was."""
        key, uid = key_of(obj), obj["metadata"].get("uid", "")
        if self._gone.get(uid, -1) >= version_of(obj):
            return False
        old = self.items.get(key)
        if old is not None and version_of(old) >= version_of(obj):
            return False
        self.items[key] = obj
        return True

    def drop(self, obj: Object) -> None:
        """The object is deleted."""
        key, uid = key_of(obj), obj["metadata"].get("uid", "")
        self._gone[uid] = version_of(obj)
        while len(self._gone) > 10_000:
            del self._gone[next(iter(self._gone))]
        old = self.items.get(key)
        if old is not None and old["metadata"].get("uid", "") == uid:
            del self.items[key]

    def fill(self, objects: Iterable[Object], version: int) -> None:
        """A full list, true at `version`: what it lacks and was older is gone."""
        listed = {key_of(obj): obj for obj in objects}
        for key, old in list(self.items.items()):
            if key not in listed and version_of(old) <= version:
                del self.items[key]
        for obj in listed.values():
            self.put(obj)
