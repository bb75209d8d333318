# SPDX-License-Identifier: Apache-2.0
"""The operator without Kubernetes: its planning functions over objects in memory, its own session with the agent."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

from atp_operator import ANNOTATION_ASSIGNMENT, FINALIZER
from atp_operator.agent import AgentSession
from atp_operator.desired import desired_guards, desired_jobs
from atp_operator.injection import SidecarConfig
from atp_operator.model import Job, Limits, Pod, Switch, rfc3339
from atp_operator.planning import Snapshot, plan_cluster
from atp_operator.pods import manifest

Object = dict[str, Any]
NAMESPACE = "atp-bmv2"
PLAN_SECONDS = 0.2


class Cluster:
    """One ATPJob and one ATPSwitch whose nodes are hosts; pods are given the addresses of hosts, and start at once."""

    def __init__(self, switch: str, agent: str, job: str, workers: int, addresses: dict[str, str], **spec: Any) -> None:
        """``addresses``: by pod name; ``agent``: where the agent listens; ``spec``: more of the ATPJob's spec."""
        self.session = AgentSession(switch, agent, "", "", "demo", lambda: None)
        self.addresses = addresses
        template = {"spec": {"containers": [{"name": "trainer", "image": "none"}]}}
        self.job: Object = {
            "apiVersion": "atp.dev/v1alpha1",
            "kind": "ATPJob",
            "metadata": {
                "name": job,
                "namespace": NAMESPACE,
                "uid": f"{job}-uid",
                "generation": 1,
                "creationTimestamp": rfc3339(time.time()),
            },
            "spec": {"workers": {"replicas": workers, "template": template}, **spec},
        }
        self.switch: Object = {
            "metadata": {"name": switch, "generation": 1},
            "spec": {"type": "Hardware", "nodes": list(addresses), "agent": {"address": agent}},
        }
        self.pods: list[Pod] = []

    def plan(self) -> None:
        """One pass of the operator; what it would write is kept here."""
        switch = Switch.from_object(self.switch, {}, self.session.view)
        job = Job.from_object(self.job)
        snapshot = Snapshot(jobs=[job], pods={job.key: list(self.pods)}, switches={switch.name: switch})
        plan = plan_cluster(snapshot, SidecarConfig(image="none"), Limits(), time.time())
        self.switch["status"] = plan.switch_statuses[switch.name]
        entry = plan.jobs[0]
        if entry.add_finalizer:
            self.job["metadata"]["finalizers"] = [FINALIZER]
        self.job["status"] = entry.status.to_dict(entry.job.spec.workers)
        for wanted in entry.create:
            if wanted.kind == "Pod":
                body = manifest(wanted, entry.job, self.job["spec"], entry.status.epoch, SidecarConfig(image="none"))
                self.pods.append(self.started(body))
        self.pods = [
            replace(pod, assignment=entry.annotate.get(pod.name, {}).get(ANNOTATION_ASSIGNMENT, pod.assignment))
            for pod in self.pods
        ]
        jobs = [Job.from_object(self.job)]
        self.session.want(desired_jobs(switch, jobs), desired_guards(switch, jobs))

    def started(self, body: Object) -> Pod:
        """A pod as it is once the kubelet has started its sidecar."""
        name = body["metadata"]["name"]
        body["metadata"]["uid"] = f"{name}-uid"
        pod = Pod.from_object(body)
        return replace(pod, node=name, address=self.addresses[name], phase="Running", sidecar_started=True, ready=True)

    def said(self) -> str:
        status = self.job.get("status", {})
        return f"{status.get('phase')} {status.get('reason')}: {status.get('message')}"

    async def assign(self, seconds: float) -> dict[str, str]:
        """Plan until every pod has its assignment: JSON by pod name. TimeoutError with the job's own words."""
        deadline = time.monotonic() + seconds
        while True:
            self.plan()
            if self.pods and all(pod.assignment for pod in self.pods):
                return {pod.name: pod.assignment for pod in self.pods}
            if time.monotonic() > deadline:
                view = self.session.view
                raise TimeoutError(f"the job did not start: {self.said()}; the agent: {view.error or view.message}")
            await asyncio.sleep(PLAN_SECONDS)

    def counters(self) -> dict[str, int]:
        """The switch's counters of the job, as the agent last told."""
        return dict(self.session.view.counters.get(self.job["metadata"]["uid"], {}))
