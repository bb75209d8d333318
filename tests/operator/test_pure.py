# SPDX-License-Identifier: Apache-2.0
"""Allocation, topology, injection, validation and assignments by example."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from typing import Any

import pytest

from atp_operator.allocation import Allocation, Ledger, Refusal, addend_limit, gaps
from atp_operator.cache import Store
from atp_operator.claims import seal
from atp_operator.desired import assignments, desired_jobs
from atp_operator.injection import InjectionError, SidecarConfig, inject
from atp_operator.lifecycle import JobPlan
from atp_operator.lifecycle.switches import aggregating_text
from atp_operator.model import AgentView, Capacity, Job, JobSpec, JobStatus, Placement, Region, Switch
from atp_operator.pods import manifest, wanted_objects
from atp_operator.settings import Settings, SettingsError
from atp_operator.topology import Located, host_only, place
from atp_operator.validation import validate_job, validate_job_update

CONFIG = SidecarConfig(image="sidecar:1")


def switch(name: str, nodes: list[str], aggregators: int = 4096, kind: str = "Software", **capacity: Any) -> Switch:
    view = AgentView(
        known=True,
        reachable=True,
        connected=True,
        capacity=Capacity(**{"aggregators": aggregators, "values": (62, 350), "sticky_saturation": True, **capacity}),
    )
    raw = {"metadata": {"name": name}, "spec": {"type": kind, "nodes": nodes, "agent": {"address": "h:1"}}}
    return Switch.from_object(raw, {}, view)


def located(count: int, node: str, start: int = 0) -> list[Located]:
    return [Located(start + i, node, f"10.0.{node[1:]}.{start + i}", f"w{start + i}") for i in range(count)]


PS = [Located(0, "n9", "10.0.9.1", "ps0")]


def test_gaps() -> None:
    assert gaps(10, []) == [Region(0, 10)]
    assert gaps(10, [Region(2, 3), Region(4, 2), Region(9, 5)]) == [Region(0, 2), Region(6, 3)]
    assert gaps(4, [Region(0, 9)]) == []


def test_shared_jobs_share_and_reserved_ones_do_not() -> None:
    ledger = Ledger({"s": switch("s", ["n0"])}, [], 0.0)
    first = ledger.allocate(("s",), "Shared", 1024, None)
    assert first == Allocation(1, (Region(0, 3072),), 350)
    ledger.take("a", ("s",), 1, first.regions, False, 1024)
    second = ledger.allocate(("s",), "Shared", 1024, 62)
    assert second == Allocation(2, (Region(0, 3072),), 62)
    reserved = ledger.allocate(("s",), "Reserved", 1000, None)
    assert reserved == Allocation(2, (Region(3096, 1000),), 350)
    ledger.take("b", ("s",), 2, reserved.regions, True, 1000)
    refusal = ledger.allocate(("s",), "Reserved", 100, None)
    assert refusal == Refusal("AggregatorsExhausted", "needs 100 aggregators on switch s: 24 free of 4096")
    ledger.release("b")
    assert ledger.allocate(("s",), "Reserved", 100, None) == refusal, "what b gives back is for others in the next plan"
    again = ledger.allocate(("s",), "Reserved", 1024, None, "b")
    assert isinstance(again, Allocation) and again.job_id == 3, "the job ID of b rests"


def test_a_floor_is_exclusive_and_outside_the_shared_pool_first() -> None:
    ledger = Ledger({"s": switch("s", ["n0"])}, [], 0.0)
    first = ledger.allocate(("s",), "Shared", 1024, None, floor=256)
    assert first == Allocation(1, (Region(0, 3072), Region(3840, 256, floor=True)), 350)
    ledger.take("a", ("s",), 1, first.regions, False, 1024)
    second = ledger.allocate(("s",), "Shared", 1000, None, floor=768)
    assert second == Allocation(2, (Region(0, 3072), Region(3072, 768, floor=True)), 350)
    ledger.take("b", ("s",), 2, second.regions, False, 1000)
    refusal = ledger.allocate(("s",), "Shared", 1000, None, floor=1)
    text = "the floor needs 1 aggregators on switch s: 0 free of 4096"
    assert refusal == Refusal("AggregatorsExhausted", text)
    assert isinstance(ledger.allocate(("s",), "Shared", 1000, None), Allocation), "without a floor there is room"
    assert isinstance(ledger.allocate(("s",), "Reserved", 1, None), Refusal)


def test_a_floor_takes_what_no_shared_job_uses_yet() -> None:
    ledger = Ledger({"s": switch("s", ["n0"])}, [], 0.0)
    first = ledger.allocate(("s",), "Shared", 4096, None, floor=2000)
    assert first == Allocation(1, (Region(0, 2096), Region(2096, 2000, floor=True)), 350)
    all_of_it = ledger.allocate(("s",), "Shared", 2000, None, floor=2000)
    assert isinstance(all_of_it, Allocation) and all_of_it.regions[0] == Region(0, 2096), (
        "it shares something all the same"
    )
    whole = ledger.allocate(("s",), "Shared", 4096, None, floor=4096)
    assert isinstance(whole, Refusal) and whole.reason == "AggregatorsExhausted"


def test_a_floor_has_the_same_indexes_on_all_switches() -> None:
    switches = {"s": switch("s", ["n0"]), "t": switch("t", ["n1"], aggregators=2048)}
    ledger = Ledger(switches, [], 0.0)
    found = ledger.allocate(("s", "t"), "Shared", 500, None, floor=100)
    assert found == Allocation(1, (Region(0, 1536), Region(1948, 100, floor=True)), 350)
    ledger.take("low", ("t",), 1, (Region(500, 1548),), True, 1548)
    ledger.take("high", ("s",), 1, (Region(0, 400),), False, 400)
    refusal = ledger.allocate(("s", "t"), "Shared", 500, None, floor=200)
    assert (
        isinstance(refusal, Refusal) and refusal.reason == "NoCommonRange" and refusal.message.startswith("the floor ")
    )


def test_a_floor_in_status_seal_and_assignment() -> None:
    tree = place(located(2, "n0"), PS, {"s0": switch("s0", ["n0"])})
    assert isinstance(tree, Placement)
    plain = running(tree)
    job = Job(**{**plain.__dict__, "spec": replace(plain.spec, request=1024, floor=256)})
    status = replace(job.status, regions=(Region(0, 768), Region(900, 256, floor=True)))
    told = status.to_dict(2)
    assert told["regions"] == [{"start": 0, "size": 768}, {"start": 900, "size": 256, "floor": True}]
    assert told["floor"] == 256 and "floor" not in plain.status.to_dict(2)
    assert JobStatus.from_dict(json.loads(json.dumps(told))).regions == status.regions
    texts = assignments(replace(job, status=status)).values()
    assert all(json.loads(text)["regions"] == told["regions"] for text in texts) and len(texts) == 3
    swapped = replace(status, regions=(Region(0, 768, floor=True), Region(900, 256)))
    less = Job(**{**job.__dict__, "spec": replace(job.spec, floor=255)})
    assert len({seal(job, status), seal(job, swapped), seal(less, status), seal(plain, status)}) == 4


def test_without_a_floor_a_seal_is_as_before_there_were_any() -> None:
    """A job that runs over an upgrade of the operator keeps its status."""
    job = Job.from_object({"metadata": {"name": "j", "uid": "u"}, "spec": {"workers": {"replicas": 2}}})
    held = {"job_id": 7, "epoch": 2, "switches": ("s0",), "values": 62, "regions": (Region(0, 1024),)}
    assert seal(job, JobStatus(**held)) == "92840ec5329ea50beb2ddbaea7a8f133"


@pytest.mark.parametrize(
    ("mode", "aggregators", "text"),
    [
        ("Shared", {"request": 100, "floor": 101}, "spec.aggregators.floor is 101: 0 to 100"),
        ("Shared", {"floor": 1025}, "spec.aggregators.floor is 1025: 0 to 1024"),
        ("Shared", {"floor": -1}, "spec.aggregators.floor is -1"),
        ("Shared", {"floor": "1"}, "spec.aggregators.floor is '1'"),
        ("Reserved", {"floor": 1}, "a floor is for mode Shared"),
        ("HostOnly", {"floor": 1}, "a floor is for mode Shared"),
    ],
)
def test_bad_floors(mode: str, aggregators: dict[str, Any], text: str) -> None:
    (error,) = validate_job(valid(mode=mode, aggregators=aggregators))
    assert text in error


def test_good_floors() -> None:
    for mode, aggregators in (("Shared", {"request": 9, "floor": 9}), ("Reserved", {"floor": 0}), ("Shared", {})):
        assert validate_job(valid(mode=mode, aggregators=aggregators)) == []
    old, new = (valid(aggregators={"request": 9, "floor": floor}) for floor in (0, 1))
    old["status"] = {"admittedTime": "2026-01-01T00:00:00Z", "phase": "Running"}
    assert any("spec.aggregators" in error for error in validate_job_update(old, new))


def test_refusals_name_switch_and_numbers() -> None:
    few = switch("few", ["n0"], job_ids=2)
    ledger = Ledger({"few": few, "odd": switch("odd", ["n1"], aggregators=100)}, [], 0.0)
    ledger.take("a", ("few",), 1, (Region(0, 10),), False, 10)
    ledger.take("b", ("few",), 2, (Region(0, 10),), False, 10)
    refusal = ledger.allocate(("few",), "Shared", 10, None)
    assert isinstance(refusal, Refusal) and refusal.reason == "JobIDsExhausted" and "0 free of 2" in refusal.message
    refusal = ledger.allocate(("odd",), "Shared", 10, 870)
    assert isinstance(refusal, Refusal) and refusal.reason == "ValuesUnsupported" and "62, 350" in refusal.message


def test_one_rack_is_level_0_alone() -> None:
    switches = {"s0": switch("s0", ["n0"]), "s9": switch("s9", ["n9"])}
    tree = place(located(3, "n0"), PS, switches)
    assert isinstance(tree, Placement) and tree.switches == ("s0",) and tree.level1 is None
    assert [(s.rack, s.bit, s.edge) for s in tree.seats] == [(0, 0, False), (0, 1, False), (0, 2, False)]


def test_the_nodes_own_software_switch_comes_before_its_tor() -> None:
    switches = {"tor": switch("tor", ["n0", "n1", "n9"], kind="Tofino"), "soft": switch("soft", ["n0"])}
    tree = place(located(2, "n0") + located(1, "n1", 2), PS, switches)
    assert isinstance(tree, Placement) and tree.level1 == "tor"
    assert [(s.switch, s.rack, s.bit, s.edge) for s in tree.seats] == [
        ("soft", 0, 0, False),
        ("soft", 0, 1, False),
        ("tor", 1, 0, True),
    ]


def test_32_racks_of_32_workers() -> None:
    switches = {f"s{i:02}": switch(f"s{i:02}", [f"n{i}"]) for i in range(100, 132)}
    switches["root"] = switch("root", ["n9"])
    workers = [w for i in range(32) for w in located(32, f"n{100 + i}", 32 * i)]
    tree = place(workers, PS, switches)
    assert isinstance(tree, Placement) and len(tree.seats) == 1024 and len(tree.switches) == 33
    assert {(s.rack, s.bit) for s in tree.seats} == {(r, b) for r in range(32) for b in range(32)}


@pytest.mark.parametrize(
    ("workers", "reason", "text"),
    [
        (located(33, "n0"), "FanInExceeded", "needs a fan-in of 33 on switch s0: 32"),
        (located(32, "n9") + located(1, "n0", 32), "FanInExceeded", "needs 33 level-1 bits on switch s9"),
        (located(2, "n5"), "NoSwitchOnPath", "n5"),
    ],
)
def test_no_tree(workers: list[Located], reason: str, text: str) -> None:
    refusal = place(workers, PS, {"s0": switch("s0", ["n0"]), "s9": switch("s9", ["n9"])})
    assert isinstance(refusal, Refusal) and refusal.reason == reason and text in refusal.message


def test_several_racks_need_a_switch_above_the_parameter_server() -> None:
    refusal = place(
        located(1, "n0") + located(1, "n1", 1), PS, {"s0": switch("s0", ["n0"]), "s1": switch("s1", ["n1"])}
    )
    assert isinstance(refusal, Refusal) and refusal.reason == "NoLevel1Switch" and "n9" in refusal.message


SHARDS = [Located(i, "n9", f"10.0.9.{i + 1}", f"ps{i}") for i in range(4)]


def test_all_shards_are_below_the_one_switch_of_level_1() -> None:
    switches = {name: switch(name, [f"n{name[1:]}"]) for name in ("s0", "s1", "s9")}
    workers = located(2, "n0") + located(1, "n1", 2)
    tree = place(workers, SHARDS, switches)
    assert isinstance(tree, Placement) and tree.level1 == "s9"
    assert [(s.shard, s.address) for s in tree.servers] == [(i, f"10.0.9.{i + 1}") for i in range(4)]
    for name, worker_seats in (("s0", 2), ("s1", 1), ("s9", 0)):
        (job,) = desired_jobs(switches[name], [running(tree)])
        assert [e.address for e in job.parameter_servers] == [s.address for s in tree.servers], "each may send ACKs"
        assert len(job.members) == worker_seats
    apart = [*SHARDS[:3], Located(3, "n1", "10.0.1.9", "ps3")]
    refusal = place(workers, apart, switches)
    assert isinstance(refusal, Refusal) and refusal.reason == "NoLevel1Switch"
    assert "s1, s9" in refusal.message and "spec.parameterServers.template" in refusal.message
    # One rack needs no level 1: its ACKs pass its switch wherever the shards are.
    assert isinstance(place(located(2, "n0"), apart, switches), Placement)


def test_every_shard_gets_its_own_assignment() -> None:
    tree = place(located(2, "n0"), SHARDS, {"s0": switch("s0", ["n0"])})
    assert isinstance(tree, Placement)
    told = {uid: json.loads(text) for uid, text in assignments(running(tree)).items()}
    assert set(told) == {"w0", "w1", "ps0", "ps1", "ps2", "ps3"}
    everybody = [{"shard": i, "address": f"10.0.9.{i + 1}"} for i in range(4)]
    assert all(t["parameterServers"] == everybody for t in told.values())
    assert [(told[f"ps{i}"]["role"], told[f"ps{i}"]["rank"]) for i in range(4)] == [
        ("parameterServer", i) for i in range(4)
    ]


def test_the_index_table_is_a_multiple_of_the_shards() -> None:
    tree = place(located(1, "n0"), SHARDS, {"s0": switch("s0", ["n0"])})
    assert isinstance(tree, Placement)
    for size, slots in ((1, 4), (2, 4), (3, 4), (5, 8), (300, 512)):
        job = running(tree)
        job.status.regions = (Region(0, size),)
        told = json.loads(assignments(job)["w0"])
        assert (told["maxWindow"], told["indexTableSize"]) == (size, slots)


def running(placement: Placement, scale: Any = 1000, **status: Any) -> Job:
    raw = {
        "metadata": {"name": "j", "namespace": "ns", "uid": "u", "generation": 1},
        "spec": {"workers": {"replicas": len(placement.seats)}, "scale": scale},
    }
    job = Job.from_object(raw)
    new = JobStatus(
        phase="Running",
        mode="Shared",
        job_id=7,
        epoch=2,
        revision=1,
        switches=placement.switches,
        values=62,
        regions=(Region(0, 1024),),
        placement=placement,
        **status,
    )
    return Job(**{**job.__dict__, "status": new})


def test_assignment_is_what_the_sidecar_expects() -> None:
    tree = place(located(2, "n0"), PS, {"s0": switch("s0", ["n0"])})
    assert isinstance(tree, Placement)
    told = {uid: json.loads(text) for uid, text in assignments(running(tree)).items()}
    assert set(told) == {"w0", "w1", "ps0"}
    assert told["w1"] == {
        "apiVersion": "atp.dev/v1alpha1",
        "job": "ns/j",
        "uid": "u",
        "key": told["ps0"]["key"],
        "epoch": 2,
        "revision": 1,
        "jobId": 7,
        "mode": "Shared",
        "role": "worker",
        "rank": 1,
        "valuesPerPacket": 62,
        "scale": 1000.0,
        "port": 10800,
        "regions": [{"start": 0, "size": 1024}],
        "indexTableSize": 1024,
        "maxWindow": 1024,
        "stallTimeoutSeconds": 60,
        "workers": [
            {"rank": 0, "address": "10.0.0.0", "rack": 0, "bit": 0, "edge": False},
            {"rank": 1, "address": "10.0.0.1", "rack": 0, "bit": 1, "edge": False},
        ],
        "parameterServers": [{"shard": 0, "address": "10.0.9.1"}],
        "switchAddress": None,
    }
    assert told["ps0"]["role"] == "parameterServer"


def test_addends_are_bounded_where_an_overflow_can_come_back_unseen() -> None:
    soft, tofino = switch("soft", ["n0"]), switch("tor", ["n1"], kind="Tofino", sticky_saturation=False)
    unknown = Switch.from_object(soft.raw, {}, AgentView())
    assert addend_limit([soft], 8) is None and addend_limit([], 8) is None
    for switches in ([tofino], [soft, tofino], [unknown]):
        for workers in (1, 2, 3, 7, 8, 1000, 1024):
            limit = addend_limit(switches, workers)
            assert limit is not None and workers * limit <= 2**31 - 1 < workers * (limit + 1)


def test_a_switch_status_of_an_older_operator_is_not_sticky() -> None:
    known = Capacity(aggregators=64, sticky_saturation=True)
    assert Capacity.from_dict(known.to_dict()) == known
    old = {key: value for key, value in known.to_dict().items() if key != "stickySaturation"}
    read = Capacity.from_dict(old)
    assert read is not None and not read.sticky_saturation


def test_addend_limit_is_told_to_all_pods_or_to_none() -> None:
    tree = place(located(2, "n0"), PS, {"s0": switch("s0", ["n0"])})
    assert isinstance(tree, Placement)
    bounded = replace(tree, addend_limit=2**30 - 1)
    told = [json.loads(text) for text in assignments(running(bounded)).values()]
    assert [t["addendLimit"] for t in told] == [2**30 - 1] * 3
    assert all("addendLimit" not in json.loads(text) for text in assignments(running(tree)).values())


def test_the_key_of_an_epoch_is_its_pods_own_and_stays() -> None:
    tree = place(located(2, "n0"), PS, {"s0": switch("s0", ["n0"])})
    assert isinstance(tree, Placement)

    def key(placement: Placement) -> str | None:
        (found,) = {json.loads(text).get("key") for text in assignments(running(placement)).values()}
        return None if found is None else str(found)

    first = key(tree)
    assert first is not None and len(bytes.fromhex(first)) == 16
    assert key(Placement.from_dict(tree.to_dict())) == first, "the same after a restart of the operator"
    other = replace(tree, servers=tuple(replace(server, pod_uid="another") for server in tree.servers))
    assert key(other) not in (None, first)
    old = {name: value for name, value in tree.to_dict().items() if name != "tagged"}
    assert key(Placement.from_dict(old)) is None, "an epoch that began without goes on without"


def test_addend_limit_outlives_a_definition_that_does_not_know_it() -> None:
    """Helm does not upgrade definitions; an older one drops fields of the status that it does not name."""
    tree = place(located(2, "n0"), PS, {"s0": switch("s0", ["n0"], sticky_saturation=False)})
    assert isinstance(tree, Placement)
    status = running(replace(tree, addend_limit=5)).status.to_dict(2)
    assert status.pop("addendLimit") == 5
    kept = JobStatus.from_dict(json.loads(json.dumps(status)))
    assert kept.placement is not None and kept.placement.addend_limit == 5
    assert "addendLimit" not in running(tree).status.to_dict(2)


def test_window_never_exceeds_the_aggregators_and_slots_are_a_power_of_two() -> None:
    tree = host_only(located(1, "n0"), PS)
    job = running(tree)
    job.status.regions = (Region(10, 300),)
    told = json.loads(assignments(job)["w0"])
    assert told["maxWindow"] == 300 and told["indexTableSize"] == 512


@pytest.mark.parametrize(
    ("size", "values", "window", "slots"),
    [
        (4096, 62, 1024, 4096),
        (65536, 62, 1024, 4096),
        (1500, 62, 1024, 2048),
        (65536, 350, 1024, 2048),
        (65536, 870, 1024, 1024),
        (0, 62, 1024, 4096),
    ],
)
def test_more_sequences_may_be_open_than_a_window_holds(size: int, values: int, window: int, slots: int) -> None:
    """As many as there are aggregators, and as the parameter server can keep answers of."""
    job = running(host_only(located(1, "n0"), PS))
    job.status.regions = (Region(0, size),) if size else ()
    job.status.values = values
    told = json.loads(assignments(job)["w0"])
    assert (told["maxWindow"], told["indexTableSize"]) == (window, slots)


def test_known_ports_go_to_the_agent() -> None:
    view = AgentView(known=True, reachable=True, connected=True, capacity=Capacity(aggregators=64))
    raw = {
        "metadata": {"name": "tor"},
        "spec": {
            "type": "Tofino",
            "nodes": ["n0", "n9"],
            "agent": {"address": "h:1"},
            "ports": [{"node": "n0", "port": 132}],
        },
    }
    tor = Switch.from_object(raw, {}, view)
    tree = place(located(1, "n0"), PS, {"tor": tor})
    assert isinstance(tree, Placement)
    (job,) = desired_jobs(tor, [running(tree)])
    assert job.members[0].endpoint.port == 132 and job.parameter_servers[0].port == 0
    assert job.parameter_servers[0].node == "n9"


def test_node_selector_finds_the_nodes_below() -> None:
    raw = {
        "metadata": {"name": "t"},
        "spec": {"type": "Tofino", "nodeSelector": {"rack": "1"}, "nodes": ["x"], "agent": {"address": "h:1"}},
    }
    found = Switch.from_object(raw, {"a": {"rack": "1"}, "b": {"rack": "2"}}, AgentView())
    assert found.nodes == {"a", "x"}


def pod(**spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"labels": {"atp.dev/job": "j", "atp.dev/role": "worker", "atp.dev/rank": "3"}},
        "spec": {"containers": [{"name": "main", "image": "x"}, {"name": "log", "image": "y"}], **spec},
    }


def test_injection_is_idempotent_and_leaves_its_input_alone() -> None:
    original = pod(initContainers=[{"name": "data", "image": "d"}], volumes=[{"name": "v", "emptyDir": {}}])
    kept = copy.deepcopy(original)
    once = inject(original, CONFIG)
    assert original == kept
    assert inject(once, CONFIG) == once
    assert [c["name"] for c in once["spec"]["initContainers"]] == ["atp-sidecar", "data"]
    for container in [*once["spec"]["containers"], once["spec"]["initContainers"][1]]:
        assert {"name": "atp-shm", "mountPath": "/run/atp"} in container["volumeMounts"]
        assert {"name": "ATP_SOCKET", "value": "/run/atp/atp.sock"} in container["env"]
    assert [v["name"] for v in once["spec"]["volumes"]] == ["v", "atp-shm", "atp-assignment"]


def test_injection_again_covers_a_container_that_another_webhook_added() -> None:
    once = inject(pod(), CONFIG)
    once["spec"]["containers"].append({"name": "late", "image": "z"})
    again = inject(once, CONFIG)
    assert again["spec"]["containers"][2]["volumeMounts"] == [{"name": "atp-shm", "mountPath": "/run/atp"}]
    assert sum(c["name"] == "atp-sidecar" for c in again["spec"]["initContainers"]) == 1


def test_sidecar_passes_the_restricted_standard() -> None:
    (sidecar,) = inject(pod(securityContext={"runAsUser": 0}), CONFIG)["spec"]["initContainers"]
    context = sidecar["securityContext"]
    assert context["runAsNonRoot"] and context["runAsUser"] == 65532 and not context["allowPrivilegeEscalation"]
    assert context["capabilities"] == {"drop": ["ALL"]} and context["seccompProfile"] == {"type": "RuntimeDefault"}
    (sidecar,) = inject(pod(securityContext={"runAsUser": 1000}), CONFIG)["spec"]["initContainers"]
    assert "runAsUser" not in sidecar["securityContext"], "the pod's own user serves the sidecar, too"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"volumes": [{"name": "atp-assignment", "emptyDir": {}}]}, "spec.volumes[0].name atp-assignment"),
        ({"containers": [{"name": "atp-sidecar"}]}, "spec.containers[0].name"),
        ({"containers": []}, "spec.containers is empty"),
        ({"hostNetwork": True}, "hostNetwork"),
    ],
)
def test_injection_refuses(change: dict[str, Any], text: str) -> None:
    with pytest.raises(InjectionError) as caught:
        inject(pod(**change), CONFIG)
    assert text in str(caught.value)


def job_pods(raw: dict[str, Any], epoch: int, config: SidecarConfig) -> list[dict[str, Any]]:
    """All pods of an ATPJob, as they are created."""
    job = Job.from_object(raw)
    return [manifest(w, job, raw["spec"], epoch, config) for w in wanted_objects(job) if w.kind == "Pod"]


def test_pods_of_a_job() -> None:
    raw = {
        "metadata": {"name": "j", "namespace": "ns", "uid": "u"},
        "spec": {
            "workers": {
                "replicas": 2,
                "template": {
                    "metadata": {"labels": {"team": "x"}, "annotations": {"atp.dev/assignment": "forged", "a": "b"}},
                    "spec": {"containers": [{"name": "t", "image": "i", "env": [{"name": "RANK", "value": "own"}]}]},
                },
            }
        },
    }
    server, first, second = job_pods(raw, 4, CONFIG)
    assert server["metadata"]["name"] == "j-ps-0" and server["spec"]["containers"][0]["args"] == ["park"]
    assert first["spec"]["restartPolicy"] == "Never" and first["spec"]["subdomain"] == "j"
    assert second["metadata"]["labels"] == {
        "team": "x",
        "atp.dev/job": "j",
        "atp.dev/role": "worker",
        "atp.dev/rank": "1",
        "atp.dev/epoch": "4",
    }
    assert "forged" not in json.dumps(first), "only the operator opens the gate"
    env = {e["name"]: e["value"] for e in first["spec"]["containers"][0]["env"]}
    assert env["RANK"] == "own" and env["ATP_JOB"] == "ns/j"
    assert first["metadata"]["ownerReferences"][0]["uid"] == "u"


def sharded(**servers: Any) -> list[dict[str, Any]]:
    raw = valid()
    raw["metadata"].update({"namespace": "ns", "uid": "u"})
    raw["spec"]["parameterServers"] = servers
    return [p for p in job_pods(raw, 1, CONFIG) if p["metadata"]["labels"]["atp.dev/role"] != "worker"]


def test_pods_of_several_parameter_servers() -> None:
    pods = sharded(replicas=4)
    assert [p["metadata"]["name"] for p in pods] == [f"j-ps-{i}" for i in range(4)]
    assert [p["spec"]["hostname"] for p in pods] == [f"j-ps-{i}" for i in range(4)]
    assert [p["metadata"]["labels"]["atp.dev/rank"] for p in pods] == ["0", "1", "2", "3"]
    assert all(c["name"] == "atp-sidecar" for p in pods for c in p["spec"]["initContainers"][:1])
    (term,) = pods[0]["spec"]["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["podAffinityTerm"]["labelSelector"]["matchLabels"] == {
        "atp.dev/job": "j",
        "atp.dev/role": "parameter-server",
    }
    own = {"nodeAffinity": {}}
    assert all(p["spec"]["affinity"] == own for p in sharded(replicas=2, template={"spec": {"affinity": own}}))
    assert "affinity" not in sharded()[0]["spec"] and len(sharded()) == 1


def valid(**spec: Any) -> dict[str, Any]:
    template = {"spec": {"containers": [{"name": "t", "image": "i"}]}}
    return {"metadata": {"name": "j"}, "spec": {"workers": {"replicas": 2, "template": template}, **spec}}


def test_validation_of_a_good_job() -> None:
    assert validate_job(valid()) == []


BAD_SCALES = [
    (0, "above 0 and at most 2147483648"),
    (-1, "above 0"),
    (2**31 + 1, "2147483649: it must be above 0 and at most 2147483648"),
    (2.0**31 + 1, "at most 2147483648"),
    ("0", "above 0"),
    ("-0.5", "above 0"),
    ("1e10", "at most 2147483648"),
    ("2147483648.5", "2147483648.5: it must be above 0 and at most 2147483648"),
    ("auto", "write Auto with a capital A"),
    ("AUTO", "write Auto with a capital A"),
    (math.nan, "a decimal number in quotes"),
    (math.inf, "a decimal number in quotes"),
    (True, "a decimal number in quotes"),
    (None, "a decimal number in quotes"),
    ([1], "a decimal number in quotes"),
    *[(text, "a decimal number in quotes") for text in ("", " 1", "1 ", "1,5", "1e", "0x10", "nan", "inf", "1e400")],
    ("1" * 33, "a decimal number in quotes"),
]


@pytest.mark.parametrize(("scale", "says"), BAD_SCALES)
def test_bad_scales(scale: Any, says: str) -> None:
    job = valid()
    job["spec"]["scale"] = scale
    (error,) = validate_job(job)
    assert error.startswith("spec.scale is ") and says in error
    # What another version's schema let in must not keep the operator from reading the other jobs.
    assert JobSpec.from_dict(job["spec"]).scale == "Auto"


@pytest.mark.parametrize(
    ("scale", "read"),
    [
        ("Auto", "Auto"),
        (100000000, 1e8),
        (2**31, 2.0**31),
        ("2147483648", 2.0**31),
        ("1e8", 1e8),
        ("1.5E+3", 1500.0),
        ("0.5", 0.5),
        ("+2", 2.0),
        ("1e-99", 1e-99),
        # As stored under the schema of earlier versions, which had numbers only.
        (0.5, 0.5),
        (1e8, 1e8),
        (1e-300, 1e-300),
    ],
)
def test_good_scales(scale: Any, read: float | str) -> None:
    job = valid()
    job["spec"]["scale"] = scale
    assert validate_job(job) == []
    assert JobSpec.from_dict(job["spec"]).scale == read


def test_the_default_scale_is_auto() -> None:
    assert JobSpec.from_dict(valid()["spec"]).scale == "Auto"


@pytest.mark.parametrize(("scale", "told"), [("Auto", "Auto"), (100000000, 100000000.0), (0.5, 0.5), ("1e8", 1e8)])
def test_scale_of_the_assignment(scale: Any, told: float | str) -> None:
    """A job that runs with a number keeps it, also one stored by an earlier version."""
    tree = place(located(2, "n0"), PS, {"s0": switch("s0", ["n0"])})
    assert isinstance(tree, Placement)
    job = running(tree, scale=scale)
    for text in assignments(job).values():
        assert json.loads(text)["scale"] == told
        assert type(json.loads(text)["scale"]) is type(told)


def test_only_a_fixed_scale_sends_large_values_raw() -> None:
    tree = place(located(2, "n0"), PS, {"s0": switch("s0", ["n0"])})
    assert isinstance(tree, Placement)
    limited = replace(tree, addend_limit=2**30 - 1)
    fixed = running(limited, scale=1000)
    said = "gradients are summed on s0"
    raw = "; values of magnitude above 1.07e+06 take the slower raw path (status.addendLimit / spec.scale)"
    assert aggregating_text(JobPlan(fixed, fixed.status), "s0") == said + raw
    auto = running(limited, scale="Auto")
    assert aggregating_text(JobPlan(auto, auto.status), "s0") == said


@pytest.mark.parametrize("count", [0, -1, 3, 5, 6, 7, 9, 16, "two", None])
def test_bad_numbers_of_parameter_servers(count: Any) -> None:
    job = valid()
    job["spec"]["parameterServers"] = {"replicas": count}
    (error,) = validate_job(job)
    assert error.startswith(f"spec.parameterServers.replicas is {count!r}: 1, 2, 4 or 8")


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_good_numbers_of_parameter_servers(count: int) -> None:
    job = valid()
    job["spec"]["parameterServers"] = {"replicas": count}
    assert validate_job(job) == []


def test_all_errors_are_told_at_once() -> None:
    job = valid()
    job["metadata"]["name"] = "1x"
    job["spec"].update({"mode": "Fast", "valuesPerPacket": 3, "parameterServers": {"replicas": 0}})
    job["spec"]["workers"] = {"replicas": 2000, "template": {"spec": {"containers": []}}}
    text = "\n".join(validate_job(job))
    for field in (
        "metadata.name",
        "spec.mode",
        "spec.valuesPerPacket",
        "spec.parameterServers.replicas",
        "spec.workers.replicas is 2000",
        "spec.workers.template.spec.containers",
    ):
        assert field in text


def test_frozen_fields_of_an_admitted_job() -> None:
    old, new = valid(), valid()
    new["spec"]["scale"] = 5
    assert validate_job_update(old, new) == []
    old["status"] = {"admittedTime": "2026-01-01T00:00:00Z", "phase": "Running"}
    (error,) = validate_job_update(old, new)
    assert "spec.scale cannot change" in error and "spec.suspend" in error
    new = valid()
    new["spec"].update({"suspend": True, "ttlSecondsAfterFinished": 5, "backoffLimit": 9})
    assert validate_job_update(old, new) == []


def test_settings_name_everything_that_is_wrong() -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_env(
            {"ATP_SIDECAR_RESOURCES": "[]", "ATP_WEBHOOK_PORT": "many", "ATP_MANAGE_SOFTWARE_SWITCHES": "perhaps"}
        )
    for name in (
        "ATP_SIDECAR_IMAGE",
        "ATP_SIDECAR_RESOURCES",
        "ATP_AGENT_TLS_DIR",
        "ATP_WEBHOOK_PORT",
        "ATP_MANAGE_SOFTWARE",
    ):
        assert name in str(caught.value)


def test_cache_never_goes_back() -> None:
    def thing(version: int, uid: str = "u") -> dict[str, Any]:
        return {"metadata": {"name": "x", "uid": uid, "resourceVersion": str(version)}}

    store = Store()
    assert store.put(thing(5)) and not store.put(thing(4)) and not store.put(thing(5))
    store.fill([], 4)
    assert store.items, "made after the list"
    store.drop(thing(7))
    assert not store.items and not store.put(thing(6)), "a late event does not bring it back"
    assert store.put(thing(8, "another"))
    store.fill([], 9)
    assert not store.items
