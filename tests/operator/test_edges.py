# SPDX-License-Identifier: Apache-2.0
"""What the operator's edges decide before they call anybody: software switches, events, health."""

from __future__ import annotations

import time
from typing import Any

from atp_operator.cache import Store
from atp_operator.caches import sources
from atp_operator.controller import STUCK_SECONDS, Controller
from atp_operator.events import event_object
from atp_operator.injection import SidecarConfig
from atp_operator.metrics import Metrics
from atp_operator.model import Event
from atp_operator.settings import Settings
from atp_operator.softswitches import Discovery, discover
from atp_operator.watching import Watcher

Object = dict[str, Any]


def pod(node: str, *, ready: bool = True, address: str = "10.0.0.7") -> Object:
    return {
        "metadata": {"labels": {"app.kubernetes.io/component": "softswitch"}},
        "spec": {"nodeName": node},
        "status": {"hostIP": address, "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


def found(pods: list[Object], nodes: list[str], switches: dict[str, Object]) -> Discovery:
    return discover(pods, nodes, switches, 9560, "agent")


def managed(node: str, address: str = "10.0.0.7") -> Object:
    made = found([pod(node, address=address)], [node], {}).create[node]
    made["metadata"]["uid"] = f"uid-{node}"
    return made


def test_a_ready_software_switch_gets_an_object_once() -> None:
    made = managed("n0")
    assert made["metadata"]["name"] == "software-n0" and made["spec"]["nodes"] == ["n0"]
    assert made["spec"]["agent"] == {"address": "10.0.0.7:9560", "serverName": "agent"}
    assert found([pod("n0")], ["n0"], {"software-n0": made}) == Discovery({}, {}, {})
    assert found([pod("n0", ready=False)], ["n0"], {}) == Discovery({}, {}, {})


def test_its_address_follows_the_pod_and_it_goes_with_its_node() -> None:
    there = {"software-n0": managed("n0")}
    moved = found([pod("n0", address="10.0.0.8")], ["n0"], there)
    assert moved.update["software-n0"]["agent"]["address"] == "10.0.0.8:9560" and not moved.delete
    assert not found([], ["n0"], there).delete, "the pod may come back"
    assert not found([pod("n0", ready=False)], [], there).delete
    assert found([], ["n1"], there).delete == {"software-n0": "uid-n0"}


def test_a_switch_that_an_admin_made_is_left_alone() -> None:
    own = managed("n0")
    del own["metadata"]["labels"]
    assert found([], [], {"software-n0": own}) == Discovery({}, {}, {})
    assert found([pod("n0", address="10.0.0.9")], ["n0"], {"software-n0": own}) == Discovery({}, {}, {})


def test_an_event_that_says_the_same_of_the_same_object_has_the_same_name() -> None:
    raw = {"metadata": {"name": "j", "namespace": "team", "uid": "u"}}
    first, body = event_object("ATPJob", raw, Event("Warning", "PodLost", "pod a is gone"), "me", 1_000_000.0)
    again, _ = event_object("ATPJob", raw, Event("Warning", "PodLost", "pod a is gone"), "other", 2_000_000.0)
    other, _ = event_object("ATPJob", raw, Event("Warning", "PodLost", "pod b is gone"), "me", 1_000_000.0)
    assert first == again != other
    assert body["metadata"] == {"name": first, "namespace": "team"} and body["involvedObject"]["namespace"] == "team"
    _, wide = event_object("ATPSwitch", {"metadata": {"name": "s", "uid": "v"}}, Event("Normal", "Ready", "x"), "me", 0)
    assert wide["metadata"]["namespace"] == "default" and "namespace" not in wide["involvedObject"]


def test_health_is_about_progress_not_about_a_long_pass() -> None:
    nothing: Any = None
    controller = Controller(Settings(SidecarConfig(image="x")), nothing, Metrics())
    assert controller.problem() == ""
    controller._moved_at = time.monotonic() - STUCK_SECONDS - 10
    assert "has not moved for" in controller.problem()
    controller._moved()
    assert controller.problem() == "", "each object that is written is progress"


def test_a_node_that_is_written_without_new_labels_wakes_nobody() -> None:
    def node(version: int, zone: str, uid: str = "u") -> Object:
        return {"metadata": {"name": "n0", "uid": uid, "resourceVersion": str(version), "labels": {"zone": zone}}}

    woken: list[int] = []
    nothing: Any = None
    store = Store()
    watcher = Watcher(nothing, sources(Settings(SidecarConfig(image="x")))["nodes"], store, lambda: woken.append(1))
    for raw, looks in ((node(1, "a"), 1), (node(2, "a"), 1), (node(3, "b"), 2), (node(4, "b", "v"), 3)):
        watcher.see("MODIFIED", raw)
        assert len(woken) == looks
    assert store.items["", "n0"]["metadata"]["resourceVersion"] == "4", "what is known is the newest all the same"
    watcher.see("DELETED", node(5, "b", "v"))
    assert len(woken) == 4
