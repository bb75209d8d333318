# SPDX-License-Identifier: Apache-2.0
"""Who sends what the guards of the switches drop: counters by port become events on pods and a metric with their names.

The guard counts at the port where a packet came in, and the agent tells which pod's address is behind it. That address
is the kernel's word, not the packet's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from atp_api.switchagent.v1alpha1 import switchagent_pb2 as pb

from . import reasons
from .kube import CALL_FAILED, METADATA_ONLY, Kube, path
from .metrics import Metrics
from .model import Event, Object

log = logging.getLogger(__name__)

REASON = reasons.PACKETS_DROPPED
EVENT_SECONDS = 60.0
"""The shortest time between two events on one pod."""
EVENT_PACKETS = 32
"""Fewer in one report are no event: some of a job's own are dropped while its hosts come and go in a switch."""
WAITING_MAX = 256
"""Reports that wait for their pod's name; what comes beside them is counted without a name."""
PODS_MAX = 1000
"""Pods that are told apart in the metric; others are counted without a name."""
ADVICE: Mapping[str, str] = {
    "source": "sent to a worker or parameter server of a job that it is not part of, or under another address",
    "destination": "is of a job, and sent to the ATP port of others than that job's",
    "malformed": "fragments, IP options or wrong lengths between pods of a job",
    "forged": "is of a job, and sent packets of another worker or of the parameter server",
    "admission": "is of a job, and sent what its place in the job does not allow",
}
"""What each reason of a drop says of the pod that sent the packet (docs/protocol.md, The guard)."""


@dataclass(frozen=True)
class Report:
    """What was dropped at one port since the last report. `address`: of the pod there, empty when it is no pod's."""

    switch: str
    address: str
    last_source: str
    dropped: Mapping[str, int]
    port: int = field(default=0, compare=False)


class Tally:
    """Counters that only grow, as differences. What a switch had counted before this operator knew it is no news."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[tuple[int, str], dict[str, int]]] = {}

    def news(self, switch: str, drops: Iterable[pb.PortDrops]) -> list[Report]:
        """One report for each port where a counter grew."""
        now = {(entry.port, entry.address): dict(entry.dropped) for entry in drops}
        sources = {(entry.port, entry.address): entry.last_source for entry in drops}
        before = self._seen.get(switch)
        self._seen[switch] = now
        if before is None:
            return []
        reports = []
        for key, counters in now.items():
            old = before.get(key, {})
            if any(counters.get(reason, 0) < count for reason, count in old.items()):
                old = {}  # the switch started anew
            grown = {reason: count - old.get(reason, 0) for reason, count in counters.items()}
            grown = {reason: count for reason, count in sorted(grown.items()) if count > 0}
            if grown:
                reports.append(Report(switch, key[1], sources[key], grown, key[0]))
        return reports

    def forget(self, switch: str) -> None:
        """The switch is no longer this operator's."""
        self._seen.pop(switch, None)


def message(report: Report) -> str:
    """What the event on the pod says; without numbers, so that the same again only raises the event's count."""
    what = "; ".join(f"{reason}: it {ADVICE.get(reason, 'did')}" for reason in report.dropped)
    return f"switch {report.switch} drops packets of this pod to the ATP port: {what}. No job's sum is touched by them."


class Intruders:
    """Takes reports, finds the pods, tells. `seen` never blocks; `run` until cancelled."""

    def __init__(
        self,
        kube: Kube,
        metrics: Metrics,
        tell: Callable[[str, Object, Event], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube, self._metrics, self._tell, self._clock = kube, metrics, tell, clock
        self._tally = Tally()
        self._waiting: asyncio.Queue[Report] = asyncio.Queue(WAITING_MAX)
        self._told: dict[str, float] = {}  # pod UID -> when
        self._named: set[tuple[str, str]] = set()

    def seen(self, switch: str, drops: Iterable[pb.PortDrops]) -> None:
        """What a switch's telemetry says."""
        for report in self._tally.news(switch, drops):
            try:
                self._waiting.put_nowait(report)
            except asyncio.QueueFull:
                self._count(report, None)

    def forget(self, switch: str) -> None:
        """A session with a switch ended for good."""
        self._tally.forget(switch)

    async def run(self) -> None:
        """One report after the other."""
        while True:
            report = await self._waiting.get()
            try:
                await self._name(report)
            finally:
                self._waiting.task_done()

    async def settled(self) -> None:
        """Return once every report was told."""
        await self._waiting.join()

    async def _name(self, report: Report) -> None:
        pod = await self._pod(report.address) if report.address else None
        self._count(report, pod)
        if pod is None:
            counts = dict(report.dropped)
            sender = report.last_source or f"port {report.port}"  # hardware counts ports only
            log.warning("switch %s dropped packets from %s: %s", report.switch, sender, counts)
        elif sum(report.dropped.values()) >= EVENT_PACKETS:
            await self._event(report, pod)

    async def _event(self, report: Report, pod: Object) -> None:
        now, uid = self._clock(), pod["metadata"]["uid"]
        self._told = {key: at for key, at in self._told.items() if now - at < EVENT_SECONDS}
        if uid in self._told:
            return
        self._told[uid] = now
        try:
            await self._tell("Pod", pod, Event("Warning", REASON, message(report)))
        except CALL_FAILED as error:
            log.warning("an event on pod %s was lost: %s", pod["metadata"]["name"], error)

    def _count(self, report: Report, pod: Object | None) -> None:
        namespace, name = ("", "")
        if pod is not None:
            key = (pod["metadata"]["namespace"], pod["metadata"]["name"])
            if key in self._named or len(self._named) < PODS_MAX:
                self._named.add(key)
                namespace, name = key
        for reason, count in report.dropped.items():
            self._metrics.dropped_packets.labels(report.switch, namespace, name, reason).inc(count)

    async def _pod(self, address: str) -> Object | None:
        """The pod of an address; None when no pod has it, or two say so."""
        query = {"fieldSelector": f"status.podIP={address},status.phase=Running", "limit": "2"}
        accept = METADATA_ONLY.format(list="List")
        try:
            found = (await self._kube.request("GET", path("api/v1", "pods"), query=query, accept=accept))["items"]
        except (*CALL_FAILED, KeyError) as error:
            log.warning("which pod has the address %s is not known: %s", address, error)
            return None
        return found[0] if len(found) == 1 else None
