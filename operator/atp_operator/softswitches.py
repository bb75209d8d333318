# SPDX-License-Identifier: Apache-2.0
"""An ATPSwitch for every node with a ready software switch; gone when the node is."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from . import API_VERSION, LABEL_MANAGED_BY
from .caches import SOFTSWITCH_LABEL, Caches
from .kube import ATP, Kube, path
from .model import Object
from .settings import Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Discovery:
    """What the ATPSwitches of software switches become."""

    create: Mapping[str, Object]  # the whole object, by node
    update: Mapping[str, Object]  # `spec`, by switch name
    delete: Mapping[str, str]  # UID, by switch name


def discover(
    pods: Iterable[Object],
    nodes: Iterable[str],
    switches: Mapping[str, Object],
    agent_port: int,
    agent_server_name: str,
) -> Discovery:
    """Compare the software switches' pods with the ATPSwitches that there are (by name); others' are left alone."""
    key, value = SOFTSWITCH_LABEL
    wanted: dict[str, Object] = {}
    present: set[str] = set()
    for raw in pods:
        if (raw["metadata"].get("labels") or {}).get(key) != value:
            continue
        node, status = (raw.get("spec") or {}).get("nodeName") or "", raw.get("status") or {}
        if not node:
            continue
        present.add(node)
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ())
        if ready and status.get("hostIP") and not raw["metadata"].get("deletionTimestamp"):
            wanted[node] = {
                "type": "Software",
                "nodes": [node],
                "agent": {"address": f"{status['hostIP']}:{agent_port}", "serverName": agent_server_name},
            }
    create: dict[str, Object] = {}
    update: dict[str, Object] = {}
    delete: dict[str, str] = {}
    for node, spec in wanted.items():
        name = f"software-{node}"
        old = switches.get(name)
        if old is None:
            create[node] = {
                "apiVersion": API_VERSION,
                "kind": "ATPSwitch",
                "metadata": {"name": name, "labels": {LABEL_MANAGED_BY: "operator"}},
                "spec": spec,
            }
        elif _managed(old) and any((old.get("spec") or {}).get(part) != spec[part] for part in spec):
            update[name] = spec
    here = present | set(nodes)
    for name, old in switches.items():
        below = set((old.get("spec") or {}).get("nodes") or ())
        if _managed(old) and not below & here and not old["metadata"].get("deletionTimestamp"):
            delete[name] = old["metadata"]["uid"]
    return Discovery(create, update, delete)


def _managed(switch: Object) -> bool:
    return bool((switch["metadata"].get("labels") or {}).get(LABEL_MANAGED_BY) == "operator")


async def manage(kube: Kube, caches: Caches, settings: Settings) -> None:
    """Carry out what `discover` finds."""
    found = discover(
        caches.stores["switch_pods"].items.values(),
        [name for _, name in caches.stores["nodes"].items],
        {name: raw for (_, name), raw in caches.stores["switches"].items.items()},
        settings.agent_port,
        settings.agent_server_name,
    )
    for node, body in found.create.items():
        caches.put("switches", await kube.create(path(ATP, "atpswitches"), body))
        log.info("ATPSwitch %s made for the software switch of node %s", body["metadata"]["name"], node)
    for name, spec in found.update.items():
        caches.put("switches", await kube.merge(path(ATP, "atpswitches", name=name), {"spec": spec}))
    for name, uid in found.delete.items():
        await kube.delete(path(ATP, "atpswitches", name=name), uid=uid)
        log.info("ATPSwitch %s removed: its node is gone", name)
