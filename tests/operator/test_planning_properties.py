# SPDX-License-Identifier: Apache-2.0
"""The planner in a simulated cluster: jobs come, fail, pause and go, switches vanish and return.

The simulation does with a plan what the controller does, through the same API objects (dicts), so that everything
the planner knows after a step has gone through a status. Pods get nodes and addresses by chance, switches do as told.
"""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from operator_simulation import LIMITS, NODES, SIDECAR, Simulation, job_object

from atp_operator.desired import assignments, desired_jobs
from atp_operator.model import AgentView, JobStatus, Quota
from atp_operator.planning import plan_cluster


def check_switches(sim: Simulation) -> None:
    """No job ID, group, bit or reserved range twice on a switch; everything inside what the switch has."""
    snapshot = sim.snapshot()
    by_uid = {job.uid: job for job in snapshot.jobs}
    for name, switch in snapshot.switches.items():
        assert switch.capacity is not None
        jobs = desired_jobs(switch, sim.believed())
        ids = [job.job_id for job in jobs]
        assert len(set(ids)) == len(ids) and all(0 < i < 255 for i in ids), (name, ids)
        assert len({job.multicast_group for job in jobs}) == len(jobs)
        held: list[tuple[str, int, int, bool]] = []
        for job in jobs:
            owner = by_uid[job.uid]
            assert sum(r.size for r in job.regions) >= owner.spec.request
            floors = {(r.start, r.size) for r in owner.status.regions if r.floor}
            assert sum(size for _, size in floors) == owner.spec.floor
            for region in job.regions:
                assert region.start >= 0 and region.start + region.size <= switch.capacity.aggregators
                exclusive = owner.spec.mode == "Reserved" or (region.start, region.size) in floors
                held.append((job.uid, region.start, region.start + region.size, exclusive))
            level0 = [m.bit for m in job.members if not m.edge]
            level1 = [m.bit for m in job.members if m.edge] + [rack.bit for rack in job.racks]
            for bits in (level0, level1):
                assert len(set(bits)) == len(bits) and all(0 <= bit < 32 for bit in bits)
            assert not (level0 and level1), "both levels of one job met in one switch"
            for racks in job.racks:
                assert 1 <= racks.workers <= 32
        for i, (uid, start, end, exclusive) in enumerate(held):
            for other, begin, stop, also in held[i + 1 :]:
                if exclusive or also:
                    assert end <= begin or stop <= start, f"{uid} and {other} share an exclusive range on {name}"


def check_seats(sim: Simulation, forged: frozenset[str] | set[str] = frozenset()) -> None:
    """Every running job has whole coverage: each worker once, racks numbered without gaps, all told the same."""
    for job in sim.snapshot().jobs:
        placement = job.status.placement
        if placement is None or job.uid in forged:
            continue
        assert [s.rank for s in placement.seats] == list(range(job.spec.workers))
        seats = {(s.rack, s.bit) for s in placement.seats}
        assert len(seats) == job.spec.workers
        racks = sorted({s.rack for s in placement.seats})
        assert racks == list(range(len(racks)))
        for rack in racks:
            bits = sorted(s.bit for s in placement.seats if s.rack == rack)
            assert bits == list(range(len(bits))), "full0 is the low bits"
        if job.status.phase == "Running":
            assert [s.shard for s in placement.servers] == list(range(job.spec.servers))
            assert len(assignments(job)) == job.spec.workers + job.spec.servers


def check_quotas(sim: Simulation, forged: frozenset[str] | set[str] = frozenset()) -> None:
    """No tenant holds more than its quota, in jobs or on any switch.

    `forged`: UIDs of jobs whose status somebody wrote; one that holds no switch takes nothing from another tenant.
    """
    snapshot = sim.snapshot()
    believed = [job for job in sim.believed() if job.uid not in forged or job.status.holds_switches]
    for quota in snapshot.quotas:
        jobs = [
            j
            for j in believed
            if quota.selects(snapshot.namespaces[j.namespace]) and j.status.admitted and not j.deleting
        ]
        assert quota.max_jobs is None or len(jobs) <= quota.max_jobs
        for name in snapshot.switches:
            used = sum(j.spec.request for j in jobs if j.status.holds_switches and name in j.status.switches)
            assert quota.aggregators is None or used <= quota.aggregators


def check_assignments(
    sim: Simulation, told: dict[tuple[str, int], dict[str, Any]], forged: frozenset[str] | set[str] = frozenset()
) -> None:
    """Within an epoch a pod is told the same but for mode and revision (a sidecar takes no other change); the limit on
    addends keeps every sum in int32. `told`: what was seen before, by pod UID and epoch."""
    for job in sim.snapshot().jobs:
        for uid, text in assignments(job).items() if job.uid not in forged else ():
            now = json.loads(text)
            del now["mode"], now["revision"]
            assert told.setdefault((uid, job.status.epoch), now) == now
            assert now["indexTableSize"] % len(now["parameterServers"]) == 0
            assert now["indexTableSize"] >= now["maxWindow"]
            assert sum(r["size"] for r in now["regions"] if r.get("floor")) == (job.spec.floor if now["regions"] else 0)
            if "addendLimit" in now:
                assert now["regions"] and 0 < now["addendLimit"] * job.spec.workers <= 2**31 - 1


class Planner(RuleBasedStateMachine):
    @initialize(
        sizes=st.tuples(st.integers(1200, 6000), st.integers(1200, 6000)),
        shape=st.sampled_from([{"s0": ["n0", "n1"], "s1": ["n2", "n3"]}, {"s0": ["n0"], "s1": ["n0", "n1", "n2"]}]),
        max_jobs=st.sampled_from([None, 1, 3]),
        nominal=st.sampled_from([None, 1024, 3000]),
    )
    def begin(
        self, sizes: tuple[int, int], shape: dict[str, list[str]], max_jobs: int | None, nominal: int | None
    ) -> None:
        quota = Quota("a", {"matchLabels": {"team": "a"}}, max_jobs, nominal)
        self.sim = Simulation(dict(zip(("s0", "s1"), sizes, strict=True)), shape, [quota])
        self.sim.order = random.Random(0)
        self.count = 0
        self.forged: set[str] = set()
        self.told: dict[tuple[str, int], dict[str, Any]] = {}

    @rule(
        workers=st.sampled_from([1, 2, 5, 33, 40]),
        mode=st.sampled_from(["Shared", "Reserved", "HostOnly"]),
        request=st.sampled_from([1, 300, 1024, 2000]),
        floor=st.sampled_from([0, 0, 1, 100, 1024]),
        switches=st.sampled_from([[], [], ["s0"], ["s0", "s1"], ["nowhere"]]),
        namespace=st.sampled_from(["team-a", "team-b"]),
        backoff=st.integers(0, 2),
        servers=st.sampled_from([1, 1, 2, 8]),
    )
    def create(
        self,
        workers: int,
        mode: str,
        request: int,
        floor: int,
        switches: list[str],
        namespace: str,
        backoff: int,
        servers: int,
    ) -> None:
        self.count += 1
        uid = f"uid-{self.count}"
        self.sim.jobs[uid] = job_object(
            f"job-{self.count}",
            self.sim.now,
            uid,
            workers=workers,
            mode=mode,
            aggregators={"request": request, "floor": min(floor, request) if mode == "Shared" else 0},
            switches=switches,
            namespace=namespace,
            backoffLimit=backoff,
            parameterServers={"replicas": servers},
            ttlSecondsAfterFinished=50,
        )

    @rule()
    def plan(self) -> None:
        self.sim.step()

    @rule(seed=st.integers(0, 1 << 20))
    def progress(self, seed: int) -> None:
        """What usually happens: pods start, gates open."""
        choose = random.Random(seed)
        for _ in range(4):
            self.sim.step()
            self.sim.kubelet(choose)
            self.sim.now += 1

    @rule(seed=st.integers(0, 1 << 20), count=st.integers(1, 4), mode=st.sampled_from(["Shared", "Reserved"]))
    def create_and_start(self, seed: int, count: int, mode: str) -> None:
        for _ in range(count):
            self.create(3, mode, 300, 100, [], "team-b", 2, 1)
        self.progress(seed)

    @rule(seed=st.integers(0, 1 << 20))
    def kubelet(self, seed: int) -> None:
        self.sim.kubelet(random.Random(seed))

    @rule(seconds=st.sampled_from([1, 3, 7, 30]))
    def wait(self, seconds: int) -> None:
        self.sim.now += seconds

    @precondition(lambda self: self.sim.jobs)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        self.sim.delete(data.draw(st.sampled_from(sorted(self.sim.jobs))))

    @precondition(lambda self: self.sim.jobs)
    @rule(data=st.data())
    def suspend_and_resume(self, data: st.DataObject) -> None:
        spec = self.sim.jobs[data.draw(st.sampled_from(sorted(self.sim.jobs)))]["spec"]
        spec["suspend"] = True
        self.sim.step()
        check_switches(self.sim)
        if data.draw(st.integers(0, 3)):
            spec["suspend"] = False

    @precondition(lambda self: any(self.sim.pods.values()))
    @rule(data=st.data(), phase=st.sampled_from(["Failed", "Succeeded"]))
    def pod_ends(self, data: st.DataObject, phase: str) -> None:
        key = data.draw(st.sampled_from(sorted(k for k, pods in self.sim.pods.items() if pods)))
        whole = phase == "Succeeded"
        self.sim.pods[key] = [
            replace(p, phase=phase) if p.role == "worker" and p.node and (whole or p.rank == 0) else p
            for p in self.sim.pods[key]
        ]

    @rule(
        name=st.sampled_from(["s0", "s1"]),
        reason=st.sampled_from(["", "", "NotMaster", "PipelineMismatch", "SwitchFull", "PortUnresolved"]),
        sticky=st.booleans(),
    )
    def agent_says(self, name: str, reason: str, sticky: bool) -> None:
        """What the agent meets, until it says something else; its switch may also come back as another kind."""
        view = self.sim.views[name]
        if view.reachable:
            assert view.capacity is not None
            self.sim.views[name] = replace(
                view,
                connected=reason != "NotMaster",
                in_sync=not reason,
                reason=reason,
                capacity=replace(view.capacity, sticky_saturation=sticky),
            )

    @rule(name=st.sampled_from(["s0", "s1"]), up=st.sampled_from([True, True, False]))
    def switch_comes_and_goes(self, name: str, up: bool) -> None:
        view = self.sim.views[name]
        if up != view.reachable:
            self.sim.views[name] = replace(view, reachable=up, connected=up, since=self.sim.now, jobs={})

    @rule(writes=st.integers(0, 8))
    def operator_is_killed_in_a_pass(self, writes: int) -> None:
        self.sim.step(stop_after=writes)
        check_switches(self.sim)
        check_quotas(self.sim, self.forged)

    @precondition(lambda self: self.sim.jobs)
    @rule(data=st.data(), passes=st.integers(1, 3))
    def statuses_cannot_be_written(self, data: st.DataObject, passes: int) -> None:
        """Of some jobs, for some passes: nobody else notices, and nothing is promised twice."""
        self.sim.unwritable = set(data.draw(st.lists(st.sampled_from(sorted(self.sim.jobs)), unique=True)))
        for _ in range(passes):
            self.sim.step()
            self.holds()
        self.sim.unwritable = set()

    @precondition(lambda self: self.sim.jobs)
    @rule(data=st.data())
    def a_status_is_forged(self, data: st.DataObject) -> None:
        """With what another job has, with an older status, or with what is no status at all."""
        forger = data.draw(st.sampled_from(sorted(self.sim.jobs)))
        victim = data.draw(st.sampled_from(sorted(self.sim.jobs)))
        stolen = copy.deepcopy(self.sim.jobs[victim].get("status") or {})
        how = data.draw(st.sampled_from(["steal", "steal ID", "unreadable", "larger", "exclusive", "longer"]))
        status = stolen if how == "steal" else copy.deepcopy(self.sim.jobs[forger].get("status") or {})
        if how == "steal ID":
            status |= {key: stolen[key] for key in ("jobId", "switches", "regions") if key in stolen}
        elif how == "unreadable":
            status["placement"] = {"workers": [{"rank": "x"}], "level1": 3}
        elif how == "larger":
            status["regions"] = [{"start": 0, "size": 65536}]
        elif how == "exclusive" and status.get("regions"):
            status["regions"][0]["floor"] = True
        elif how == "longer":
            status["epoch"] = 2**62
        if status != self.sim.jobs[forger].get("status"):
            self.forged.add(forger)
        self.sim.jobs[forger]["status"] = status
        check_switches(self.sim)

    @rule(name=st.sampled_from(["s0", "s1"]))
    def operator_restarts(self, name: str) -> None:
        """Nothing is known of one agent, as after a restart; the switch itself goes on."""
        view = self.sim.views[name]
        self.sim.views[name] = AgentView(since=self.sim.now)
        self.sim.step()
        self.sim.views[name] = replace(view, jobs=view.jobs)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "sim"):
            return
        check_switches(self.sim)
        check_seats(self.sim, self.forged)
        check_quotas(self.sim, self.forged)
        check_assignments(self.sim, self.told, self.forged)

    @rule(seed=st.integers(0, 1 << 20))
    def settles_and_is_deterministic(self, seed: int) -> None:
        """With nothing new, a few passes reach a plan that changes nothing, whatever the order of the input."""
        for _ in range(6):
            self.sim.step()
        first = plan_cluster(self.sim.snapshot(), SIDECAR, LIMITS, self.sim.now)
        second = plan_cluster(self.sim.snapshot(seed), SIDECAR, LIMITS, self.sim.now)
        for one, two in zip(first.jobs, second.jobs, strict=True):
            assert one.status == two.status and one.job.uid == two.job.uid
            workers = one.job.spec.workers
            assert one.status.to_dict(workers) == self.sim.jobs[one.job.uid]["status"] or one.remove_finalizer
            assert not [w for w in one.create if w.kind == "Pod"] and not one.events and not one.delete_pods
            again = JobStatus.from_dict(one.status.to_dict(workers))
            assert again.to_dict(workers) == one.status.to_dict(workers)
        assert first.switch_statuses == second.switch_statuses
        for name, status in first.switch_statuses.items():
            assert status == self.sim.switches[name]["status"]

    def teardown(self) -> None:
        """After all jobs are deleted nothing is held, and after the quarantine nothing rests."""
        if not hasattr(self, "sim"):
            return
        sim = self.sim
        for name, view in sim.views.items():
            sim.views[name] = replace(view, known=True, reachable=True, connected=True)
        for uid in list(sim.jobs):
            sim.delete(uid)
        for _ in range(4):
            sim.step()
            sim.kubelet(random.Random(0))
        assert not sim.jobs
        for name, raw in sim.switches.items():
            assert raw["status"]["jobs"] == [] and sim.views[name].jobs == {}
        sim.now += LIMITS.quarantine + 2
        sim.step()
        for raw in sim.switches.values():
            assert raw["status"]["quarantine"] == [] and raw["status"]["inUse"]["reservedAggregators"] == 0


TestPlanner = Planner.TestCase
TestPlanner.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


@settings(max_examples=50, deadline=None)
@given(workers=st.integers(1, 40), seed=st.integers(0, 1 << 20))
def test_a_lone_job_always_runs_and_ends(workers: int, seed: int) -> None:
    sim = Simulation({"s0": 4096, "s1": 4096}, {"s0": ["n0", "n1"], "s1": ["n2", "n3"]}, [])
    sim.jobs["u"] = job_object("j", sim.now, "u", workers=workers)
    choose = random.Random(seed)
    for _ in range(20):
        sim.step()
        sim.kubelet(choose)
        sim.now += 1
    status = sim.jobs["u"]["status"]
    assert status["phase"] == "Running", status
    assert status["mode"] in ("Shared", "HostOnly")
    if status["mode"] == "HostOnly":
        reason = next(c["reason"] for c in status["conditions"] if c["type"] == "NetworkAggregation")
        assert reason == "FanInExceeded"
    sim.pods["team-a/j"] = [replace(p, phase="Succeeded") if p.role == "worker" else p for p in sim.pods["team-a/j"]]
    sim.step()
    assert sim.jobs["u"]["status"]["phase"] == "Succeeded"
    assert all(view.jobs == {} for view in sim.views.values())


def test_what_one_job_gives_back_is_written_before_another_has_it() -> None:
    """The older job resumes in the very pass in which the younger ends; a stop after any write breaks nothing."""
    for stop_after in range(6):
        quota = Quota("a", {"matchLabels": {"team": "a"}}, 1, None)
        sim = Simulation({"s0": 4096}, {"s0": list(NODES)}, [quota])
        options = {"workers": 1, "mode": "Reserved", "aggregators": {"request": 3000}, "backoffLimit": 0}
        sim.jobs["old"] = job_object("old", sim.now, "old", suspend=True, **options)
        sim.jobs["young"] = job_object("young", sim.now + 1, "young", **options)
        for _ in range(5):
            sim.step()
            sim.kubelet(random.Random(0))
        assert sim.jobs["young"]["status"]["phase"] == "Running"
        sim.jobs["old"]["spec"]["suspend"] = False
        sim.step()
        assert sim.jobs["old"]["status"]["reason"] == "QuotaExceeded"
        sim.pods["team-a/young"] = [replace(p, phase="Failed") for p in sim.pods["team-a/young"]]
        sim.step(stop_after)
        check_switches(sim)
        check_quotas(sim)
        for _ in range(3):  # the write that was missed, what it gave back, the finalizer
            sim.step()
        assert sim.jobs["young"]["status"]["phase"] == "Failed"
        assert sim.jobs["old"]["status"]["phase"] in ("Admitted", "Starting"), sim.jobs["old"]["status"]


def test_a_reserved_range_is_kept_while_its_switch_is_away() -> None:
    """A job that runs on HostOnly gets its range back with the switch: meanwhile nobody else is given it."""
    sim = Simulation({"s0": 2048}, {"s0": list(NODES)}, [])
    sim.jobs["owner"] = job_object("owner", sim.now, "owner", mode="Reserved", aggregators={"request": 1024})
    for _ in range(5):
        sim.step()
        sim.kubelet(random.Random(0))
    view = sim.views["s0"]
    sim.views["s0"] = replace(view, in_sync=False, reason="PortUnresolved")
    for _ in range(3):
        sim.step()
        sim.now += LIMITS.switch_loss
    assert sim.jobs["owner"]["status"]["mode"] == "HostOnly"
    sim.jobs["other"] = job_object("other", sim.now, "other", aggregators={"request": 512})
    for _ in range(5):
        sim.step()
        sim.kubelet(random.Random(0))
    assert sim.jobs["other"]["status"]["regions"] == [{"start": 0, "size": 1024}]
    sim.views["s0"] = replace(sim.views["s0"], in_sync=True, reason="")
    for _ in range(3):
        sim.step()
    assert sim.jobs["owner"]["status"]["mode"] == "Reserved"
    check_switches(sim)
