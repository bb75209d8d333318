# SPDX-License-Identifier: Apache-2.0
"""From counters of drops at ports to pods by name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from atp_api.switchagent.v1alpha1 import switchagent_pb2 as pb
from atp_operator.intruders import (
    ADVICE,
    EVENT_PACKETS,
    EVENT_SECONDS,
    PODS_MAX,
    WAITING_MAX,
    Intruders,
    Report,
    Tally,
    message,
)
from atp_operator.kube import ApiError
from atp_operator.metrics import Metrics
from atp_operator.model import Event


def drops(port: int, address: str, last: str = "10.0.0.1", /, **counts: int) -> pb.PortDrops:
    return pb.PortDrops(port=port, address=address, last_source=last, dropped=counts)


def test_only_growth_is_news() -> None:
    tally = Tally()
    assert tally.news("s", [drops(4, "10.0.0.4", source=7)]) == [], "from before this operator's time"
    assert tally.news("s", [drops(4, "10.0.0.4", source=7)]) == []
    assert tally.news("s", [drops(4, "10.0.0.4", source=9, forged=1)]) == [
        Report("s", "10.0.0.4", "10.0.0.1", {"forged": 1, "source": 2})
    ]
    # Another pod behind the same port, another switch, and a switch that counts from zero again.
    assert tally.news("s", [drops(4, "10.0.0.5", source=3)]) == [Report("s", "10.0.0.5", "10.0.0.1", {"source": 3})]
    assert tally.news("t", [drops(4, "10.0.0.5", source=3)]) == []
    assert tally.news("s", [drops(4, "10.0.0.5", source=1)]) == [Report("s", "10.0.0.5", "10.0.0.1", {"source": 1})]
    tally.forget("s")
    assert tally.news("s", [drops(4, "10.0.0.5", source=9)]) == []


class Cluster:
    """Pods by address, and what was told of them."""

    def __init__(self, pods: Mapping[str, list[str]]) -> None:
        self.pods = pods
        self.queries: list[str] = []
        self.events: list[tuple[str, Event]] = []
        self.now = 0.0
        self.refuse = False
        self.runner = asyncio.Runner()
        self.metrics = Metrics()
        self.intruders = Intruders(self, self.metrics, self.tell, lambda: self.now)  # type: ignore[arg-type]

    async def request(self, method: str, url: str, *, query: Mapping[str, str], accept: str) -> dict[str, Any]:
        assert (method, url) == ("GET", "/api/v1/pods") and "PartialObjectMetadataList" in accept
        self.queries.append(query["fieldSelector"])
        address = query["fieldSelector"].split(",")[0].removeprefix("status.podIP=")
        if self.refuse:
            raise ApiError(500, "InternalError", "no")
        names = self.pods.get(address, [])
        return {"items": [{"metadata": {"name": name, "namespace": "evil", "uid": f"u-{name}"}} for name in names]}

    async def tell(self, kind: str, raw: dict[str, Any], event: Event) -> None:
        assert kind == "Pod"
        self.events.append((raw["metadata"]["name"], event))

    def report(self, *seen: pb.PortDrops) -> None:
        async def work() -> None:
            self.intruders.seen("s", [])
            self.intruders.seen("s", seen)
            task = asyncio.create_task(self.intruders.run())
            await self.intruders.settled()
            task.cancel()

        self.runner.run(work())

    def counted(self) -> dict[tuple[str, str, str], float]:
        (family,) = [f for f in self.metrics.registry.collect() if f.name == "atp_dropped_packets"]
        return {
            (s.labels["namespace"], s.labels["pod"], s.labels["reason"]): s.value
            for s in family.samples
            if s.name.endswith("_total")
        }


def test_the_pod_is_named() -> None:
    cluster = Cluster({"10.0.0.4": ["mallory"], "10.0.0.6": ["a", "b"]})
    cluster.report(
        drops(4, "10.0.0.4", source=70, admission=1),
        drops(5, "10.0.0.5", source=2),  # of no pod any more
        drops(6, "10.0.0.6", source=3),  # two say that they have it
        drops(2, "", "10.9.9.9", source=4),  # an uplink
    )
    assert cluster.counted() == {
        ("evil", "mallory", "source"): 70,
        ("evil", "mallory", "admission"): 1,
        ("", "", "source"): 9,
    }
    ((name, event),) = cluster.events
    assert (name, event.kind, event.reason) == ("mallory", "Warning", "ATPPacketsDropped")
    assert "switch s drops packets of this pod" in event.message and ADVICE["source"] in event.message
    assert all(selector.startswith("status.podIP=10.0.0.") for selector in cluster.queries)


def test_a_few_packets_accuse_nobody() -> None:
    cluster = Cluster({"10.0.0.4": ["honest"]})
    cluster.report(drops(4, "10.0.0.4", source=EVENT_PACKETS - 1))
    assert cluster.events == [] and cluster.counted() == {("evil", "honest", "source"): EVENT_PACKETS - 1}


def test_events_are_few_and_the_same() -> None:
    cluster = Cluster({"10.0.0.4": ["mallory"]})
    cluster.report(drops(4, "10.0.0.4", source=37))
    cluster.now = EVENT_SECONDS / 2
    cluster.report(drops(4, "10.0.0.4", source=70))
    assert len(cluster.events) == 1
    cluster.now = 2 * EVENT_SECONDS
    cluster.report(drops(4, "10.0.0.4", source=700))
    assert len(cluster.events) == 2
    assert cluster.events[0][1] == cluster.events[1][1], "the API server's count is raised, no second event made"
    assert cluster.counted() == {("evil", "mallory", "source"): 807}


def test_an_unanswered_question_loses_no_count() -> None:
    cluster = Cluster({})
    cluster.refuse = True
    cluster.report(drops(4, "10.0.0.4", source=7))
    assert cluster.counted() == {("", "", "source"): 7} and cluster.events == []


def test_many_attackers_cost_a_bounded_amount() -> None:
    cluster = Cluster({f"10.1.{n // 256}.{n % 256}": [f"pod-{n}"] for n in range(PODS_MAX + 5)})
    for start in range(0, PODS_MAX + 5, WAITING_MAX):
        numbers = range(start, min(start + WAITING_MAX, PODS_MAX + 5))
        cluster.report(*(drops(n + 1, f"10.1.{n // 256}.{n % 256}", source=1) for n in numbers))
    named = [key for key in cluster.counted() if key[1]]
    assert len(named) == PODS_MAX and cluster.counted()["", "", "source"] == 5
    queued = Cluster({})
    for _ in range(2):
        queued.intruders.seen("s", [drops(n + 1, "10.0.0.4", source=1) for n in range(_ * 2 * WAITING_MAX)])
    assert queued.counted() == {("", "", "source"): WAITING_MAX}


def test_each_reason_is_explained() -> None:
    for reason in ("source", "destination", "malformed", "forged", "admission"):
        assert ADVICE[reason] in message(Report("s", "10.0.0.4", "", {reason: 1}))
