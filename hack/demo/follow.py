# SPDX-License-Identifier: Apache-2.0
"""Watch one ATPJob until it ends: its status, what worker 0 prints, and the sidecars' metrics while their pods run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .kube import CommandFailed, Kube
from .metrics import JobMetrics

METRICS_PORT = 9095
LOOK_SECONDS = 0.5


@dataclass
class Training:
    """JSON lines that a training script printed."""

    epochs: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] | None = None

    @classmethod
    def read(cls, log: str) -> Training:
        out = cls()
        for line in log.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and "accuracy" in event:
                out.result = event
            elif isinstance(event, dict) and "epoch" in event and "loss" in event:
                out.epochs.append(event)
        return out


@dataclass
class Followed:
    """What was seen of a job so far."""

    status: dict[str, Any] = field(default_factory=dict)
    training: Training = field(default_factory=Training)
    metrics: JobMetrics = field(default_factory=JobMetrics)
    log: str = ""

    @property
    def phase(self) -> str:
        return str(self.status.get("phase", "Pending"))

    def progress(self) -> str:
        """One line that changes as the job gets on."""
        status, metrics = self.status, self.metrics
        line = f"{status.get('phase', 'Pending'):<10} mode {status.get('mode', '-'):<8}"
        line += f" workers {status.get('workers', {}).get('summary') or '-'}"
        if self.training.epochs:
            last = self.training.epochs[-1]
            line += f"  epoch {last['epoch']:>3}  loss {last['loss']:.4f}"
        aggregated = metrics.total("atp_aggregated_packets_total", "-ps-")
        host = metrics.total("atp_host_summed_packets_total", "-ps-")
        if aggregated or host:
            line += f"  packets summed in the switch {aggregated:>8,}, by the parameter server {host:,}"
        if not self.training.epochs:
            for condition in status.get("conditions", []):
                if condition["status"] == "False" and condition.get("message"):
                    line += f"  ({condition.get('reason', '')}: {condition['message']})"
                    break
        return line


def follow(kube: Kube, name: str, namespace: str, patience: float) -> Iterator[Followed]:
    """Yield what is seen of the job, twice a second, until it is Succeeded or Failed; the last one is the end.

    Raises:
        CommandFailed: nothing changed for `patience` seconds.
    """
    seen, line, moved = Followed(), "", time.monotonic()
    while True:
        job = kube.get("atpjob", name, namespace)
        seen.status = (job or {}).get("status", {}) or seen.status
        for pod in kube.list("pods", namespace, f"atp.dev/job={name}"):
            if pod.get("status", {}).get("phase") == "Running":
                pod_name = pod["metadata"]["name"]
                seen.metrics.update(pod_name, kube.pod_http(pod_name, namespace, METRICS_PORT, "/metrics"))
        seen.log = kube.logs(f"{name}-worker-0", namespace, "trainer") or seen.log
        seen.training = Training.read(seen.log)
        yield seen
        if seen.phase in ("Succeeded", "Failed"):
            return
        before, line = line, seen.progress()
        if line != before:
            moved = time.monotonic()
        elif time.monotonic() - moved > patience:
            raise CommandFailed(f"job {name} stands still: {line}\n{seen.log[-2000:]}")
        time.sleep(LOOK_SECONDS)
