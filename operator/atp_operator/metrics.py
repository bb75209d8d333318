# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the operator, and the HTTP end point that serves them with the health checks."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .planning import ClusterPlan, Snapshot

PHASES = ("Pending", "Admitted", "Starting", "Running", "Succeeded", "Failed", "Suspended")


class Metrics:
    """All metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.jobs = Gauge("atp_jobs", "ATPJobs by phase", ["phase"], registry=self.registry)
        self.quota_used = Gauge(
            "atp_quota_used", "Quota in use", ["tenant", "switch", "resource"], registry=self.registry
        )
        self.quota_nominal = Gauge(
            "atp_quota_nominal", "Quota granted", ["tenant", "switch", "resource"], registry=self.registry
        )
        self.reconcile_seconds = Histogram(
            "atp_reconcile_seconds", "Duration of one reconcile of everything", registry=self.registry
        )
        self.reconcile_errors = Counter("atp_reconcile_errors_total", "Reconciles that failed", registry=self.registry)
        self.job_errors = Counter(
            "atp_job_errors_total", "Times that the object of one ATPJob failed", registry=self.registry
        )
        self.dropped_packets = Counter(
            "atp_dropped_packets_total",
            "Packets that the guard of a switch dropped, by the pod that sent them (empty: no pod is known) and why",
            ["switch", "namespace", "pod", "reason"],
            registry=self.registry,
        )
        self.leader = Gauge("atp_operator_leader", "1 on the replica that acts", registry=self.registry)

    def record(self, snapshot: Snapshot, plan: ClusterPlan) -> None:
        """Gauges from a plan."""
        counts = dict.fromkeys(PHASES, 0)
        for entry in plan.jobs:
            counts[entry.status.phase] = counts.get(entry.status.phase, 0) + 1
        for phase, count in counts.items():
            self.jobs.labels(phase).set(count)
        self.quota_used.clear()
        self.quota_nominal.clear()
        for quota in snapshot.quotas:
            status = plan.quota_statuses[quota.name]
            self.quota_used.labels(quota.name, "", "jobs").set(status["admittedJobs"])
            if quota.max_jobs is not None:
                self.quota_nominal.labels(quota.name, "", "jobs").set(quota.max_jobs)
            used = {entry["switch"]: entry["aggregators"] for entry in status["usage"]}
            for name in snapshot.switches:
                self.quota_used.labels(quota.name, name, "aggregators").set(used.get(name, 0))
                if quota.aggregators is not None:
                    self.quota_nominal.labels(quota.name, name, "aggregators").set(quota.aggregators)


READY_WAIT_SECONDS = 60.0
"""Longest time that /readyz?wait=... holds an answer back."""


async def serve(
    metrics: Metrics,
    listener: socket.socket,
    healthy: Callable[[], str],
    ready: Callable[[], Awaitable[str]],
) -> web.AppRunner:
    """Serve /metrics, /healthz and /readyz on a listening socket.

    `healthy` and `ready` return an empty text, or what is wrong. /readyz?wait=SECONDS holds the answer "not ready" back
    for so long: a start that takes its time is not a probe that failed.
    """

    async def show(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), content_type="text/plain")

    def answer(problem: str) -> web.Response:
        return web.Response(text=problem or "ok", status=503 if problem else 200)

    async def health(_: web.Request) -> web.Response:
        return answer(healthy())

    async def readiness(request: web.Request) -> web.Response:
        try:
            wait = min(float(request.query.get("wait", "0")), READY_WAIT_SECONDS)
        except ValueError:
            return web.Response(text="wait is a number of seconds", status=400)
        end = time.monotonic() + wait
        while (problem := healthy() or await ready()) and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        return answer(problem)

    app = web.Application()
    app.router.add_get("/metrics", show)
    app.router.add_get("/healthz", health)
    app.router.add_get("/readyz", readiness)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    return runner
