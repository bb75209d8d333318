# SPDX-License-Identifier: Apache-2.0
"""A cluster in memory for the planner: API objects, pods, switches and a clock."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

from atp_operator import ANNOTATION_ASSIGNMENT, FINALIZER
from atp_operator.claims import doubt
from atp_operator.desired import desired_jobs
from atp_operator.injection import SidecarConfig
from atp_operator.intake import keep_job
from atp_operator.lifecycle import JobPlan
from atp_operator.model import AgentView, Capacity, Job, JobReport, Limits, Pod, Quota, Switch, rfc3339
from atp_operator.planning import ClusterPlan, Snapshot, plan_cluster
from atp_operator.pods import manifest

Object = dict[str, Any]
SIDECAR = SidecarConfig(image="sidecar:test")
LIMITS = Limits(quarantine=20.0, switch_wait=10.0, switch_loss=5.0, start_timeout=60.0, release_wait=30.0)
NODES = ("n0", "n1", "n2", "n3")


def job_object(name: str, created: float, uid: str, **spec: Any) -> Object:
    """An ATPJob as the API server stores it."""
    workers = spec.pop("workers", 2)
    template = {"spec": {"containers": [{"name": "trainer", "image": "x"}]}}
    return {
        "apiVersion": "atp.dev/v1alpha1",
        "kind": "ATPJob",
        "metadata": {
            "name": name,
            "namespace": spec.pop("namespace", "team-a"),
            "uid": uid,
            "generation": 1,
            "creationTimestamp": rfc3339(created),
        },
        "spec": {"workers": {"replicas": workers, "template": template}, **spec},
    }


class Simulation:
    """API objects, pods and switches, and a clock."""

    def __init__(self, aggregators: dict[str, int], below: dict[str, list[str]], quotas: list[Quota]) -> None:
        self.now = 1_000_000.0
        self.jobs: dict[str, Object] = {}
        self.pods: dict[str, list[Pod]] = {}
        self.quotas = quotas
        self.switches: dict[str, Object] = {
            name: {
                "metadata": {"name": name, "generation": 1},
                "spec": {"type": "Software", "nodes": below[name], "agent": {"address": f"{name}:1"}},
            }
            for name in aggregators
        }
        self.views = {
            name: AgentView(
                known=True,
                reachable=True,
                connected=True,
                in_sync=True,
                since=self.now,
                capacity=Capacity(aggregators=n, values=(62, 350), target="software-bpf", sticky_saturation=True),
            )
            for name, n in aggregators.items()
        }
        self.addresses = 0
        self.unwritable: set[str] = set()  # UIDs of jobs whose status the API server takes from nobody
        self.order: random.Random | None = None  # shuffles the order in which statuses are written
        self.last_used: dict[tuple[str, int], tuple[str, int, float]] = {}  # (switch, job ID) -> uid, epoch, time

    def snapshot(self, seed: int | None = None) -> Snapshot:
        jobs = [Job.from_object(keep_job(copy.deepcopy(raw), SIDECAR)) for raw in self.jobs.values()]
        if seed is not None:
            random.Random(seed).shuffle(jobs)
        return Snapshot(
            jobs=jobs,
            pods={key: list(pods) for key, pods in self.pods.items()},
            switches={n: Switch.from_object(copy.deepcopy(raw), {}, self.views[n]) for n, raw in self.switches.items()},
            quotas=self.quotas,
            namespaces={"team-a": {"team": "a"}, "team-b": {"team": "b"}},
        )

    def step(self, stop_after: int | None = None) -> ClusterPlan:
        """One pass, or the first `stop_after` writes of it, as when the operator is killed there."""
        plan = plan_cluster(self.snapshot(), SIDECAR, LIMITS, self.now)
        for count, (name, status) in enumerate(plan.switch_statuses.items()):
            if stop_after is not None and count >= stop_after:
                return plan
            self.switches[name]["status"] = status
        for count, entry in enumerate(self.write_order(plan.jobs), len(self.switches)):
            if stop_after is not None and count >= stop_after:
                return plan
            if entry.job.uid in self.unwritable:
                continue
            raw = self.jobs[entry.job.uid]
            if entry.add_finalizer:
                raw["metadata"]["finalizers"] = [FINALIZER]
            raw["status"] = entry.status.to_dict(entry.job.spec.workers)
            pods = self.pods.setdefault(entry.job.key, [])
            for pod in entry.delete_pods:
                pods[:] = [replace(p, deleting=True) if p.uid == pod.uid else p for p in pods]
            for wanted in entry.create:
                if wanted.kind == "Pod":
                    body = manifest(wanted, entry.job, raw["spec"], entry.status.epoch, SIDECAR)
                    assert body["metadata"]["name"] not in {p.name for p in pods}, "made while the old one is there"
                    body["metadata"]["uid"] = f"{body['metadata']['name']}-{len(pods)}-{self.now}-{self.addresses}"
                    self.addresses += 1
                    pods.append(Pod.from_object(body))
            pods[:] = [
                replace(p, assignment=entry.annotate.get(p.name, {}).get(ANNOTATION_ASSIGNMENT, p.assignment))
                for p in pods
            ]
            if entry.delete_job:
                self.delete(entry.job.uid)
            if entry.remove_finalizer:
                raw["metadata"]["finalizers"] = []
        for uid, raw in list(self.jobs.items()):
            if raw["metadata"].get("deletionTimestamp") and not raw["metadata"].get("finalizers"):
                del self.jobs[uid]
                self.pods.pop(f"{raw['metadata']['namespace']}/{raw['metadata']['name']}", None)
        self.program()
        return plan

    def write_order(self, plans: list[JobPlan]) -> list[JobPlan]:
        """Statuses may be written in any order."""
        if self.order is None:
            return plans
        return self.order.sample(plans, len(plans))

    def believed(self) -> list[Job]:
        """The jobs whose statuses the operator takes for its own, as it reads them when it programs switches."""
        snapshot = self.snapshot()
        return [job for job in snapshot.jobs if not doubt(job, snapshot.switches)]

    def program(self) -> None:
        snapshot = self.snapshot()
        for name, switch in snapshot.switches.items():
            view = self.views[name]
            if not view.reachable:
                continue
            jobs = desired_jobs(switch, self.believed())
            for job in jobs:
                before = self.last_used.get((name, job.job_id))
                if before is not None and before[:2] != (job.uid, job.epoch):
                    assert self.now - before[2] >= LIMITS.quarantine, (
                        f"job ID {job.job_id} came back too soon on {name}"
                    )
            for job in jobs:
                self.last_used[name, job.job_id] = (job.uid, job.epoch, self.now)
            state = {"": "PROGRAMMED", "SwitchFull": "FAILED"}.get(view.reason, "PENDING")
            reports = {job.uid: JobReport(job.job_id, job.epoch, state, view.reason, view.message) for job in jobs}
            self.views[name] = replace(view, jobs=reports)

    def delete(self, uid: str) -> None:
        meta = self.jobs[uid]["metadata"]
        meta.setdefault("deletionTimestamp", rfc3339(self.now))

    def kubelet(self, choose: random.Random) -> None:
        """Pods get a node and start; deleted ones go."""
        for key, pods in self.pods.items():
            result = []
            for pod in pods:
                if pod.deleting:
                    continue
                if not pod.node:
                    self.addresses += 1
                    pod = replace(
                        pod,
                        node=choose.choice(NODES),
                        address=f"10.0.{self.addresses // 250}.{self.addresses % 250}",
                        phase="Running",
                        sidecar_started=True,
                        ready=True,
                    )
                result.append(pod)
            self.pods[key] = result


def running_job() -> Simulation:
    """Job u1 (team-a/j), two workers below switch s0, that has just been given its assignment."""
    sim = Simulation({"s0": 4096}, {"s0": list(NODES)}, [])
    sim.jobs["u1"] = job_object("j", sim.now, "u1")
    for _ in range(6):
        sim.step()
        sim.kubelet(random.Random(1))
    status = sim.jobs["u1"]["status"]
    assert (status["phase"], status["mode"]) == ("Running", "Shared")
    assert all(pod.assignment for pod in sim.pods["team-a/j"])
    return sim
