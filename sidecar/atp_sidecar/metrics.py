# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the sidecar, from the transport's snapshots."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import CollectorRegistry

from atp_sidecar.assignment import Assignment
from atp_sidecar.counters import ENDPOINT

__all__ = ["CONTENT_TYPE", "SidecarMetrics"]

# Metric, key in the transport's snapshot, help.
_COUNTERS = tuple((each.metric, each.name, each.doc) for each in ENDPOINT if each.metric)
_REJECTIONS = ("stranger", "job", "length", "sequence", "tag")
_GAUGES = (
    ("atp_window_packets", "window", "Congestion window in packets."),
    ("atp_rtt_seconds", "rtt_seconds", "Smoothed round-trip time in seconds."),
    ("atp_in_flight_packets", "in_flight", "Packets sent and not acknowledged."),
    ("atp_sessions", "sessions", "Trainers that are connected."),
    ("atp_outstanding_parts", "operations_outstanding", "Parts of operations that were submitted and have not ended."),
)
_CUMULATIVE = tuple(key for _, key, _ in _COUNTERS) + tuple(f"rejected_{reason}" for reason in _REJECTIONS)


class _Families:
    """A collector of families that were made for one scrape."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _value(snapshot: Mapping[str, Any], key: str) -> float:
    value = snapshot.get(key, 0)
    return float("nan") if value is None else float(value)


@dataclass
class SidecarMetrics:
    """Counters that survive a change of epoch (a new transport starts at zero), and their exposition."""

    _before: Counter[str] = field(default_factory=Counter)
    _operations: Counter[str] = field(default_factory=Counter)

    def retire(self, snapshot: Mapping[str, Any]) -> None:
        """Keeps the counts of a transport that is about to close."""
        for key in _CUMULATIVE:
            self._before[key] += int(snapshot.get(key) or 0)
        self._operations.update(snapshot.get("operations") or {})

    def total(self, snapshot: Mapping[str, Any]) -> dict[str, Any]:
        """The snapshot with the counts of earlier transports added to its counters."""
        return {
            **snapshot,
            **{key: int(snapshot.get(key) or 0) + self._before[key] for key in _CUMULATIVE},
            "operations": dict(self._operations + Counter(snapshot.get("operations") or {})),
        }

    def expose(self, assignment: Assignment | None, role: str, snapshot: Mapping[str, Any], gate_open: bool) -> str:
        """The metrics as text.

        Args:
            assignment: of the open gate; None while it is closed (then only the gate's gauge has values).
            role: worker or parameterServer.
            snapshot: the transport's metrics; empty while the gate is closed.
            gate_open: value of atp_gate_open.
        """
        job = assignment.job if assignment else ""
        own = {"job": job, "role": role, "rank": str(assignment.rank) if assignment else ""}
        totals = self.total(snapshot)
        families: list[Metric] = []

        def add(
            metric: CounterMetricFamily | GaugeMetricFamily, samples: Iterable[tuple[Mapping[str, str], float]]
        ) -> None:
            for extra, value in samples:
                metric.add_metric([*own.values(), *extra.values()], value)
            families.append(metric)

        for name, key, text in _COUNTERS:
            add(CounterMetricFamily(name, text, labels=list(own)), [({}, totals[key])])
        add(
            CounterMetricFamily(
                "atp_rejected_packets_total",
                "Packets dropped by reason: stranger (not from this job), job (foreign job ID), length, sequence.",
                labels=[*own, "reason"],
            ),
            [({"reason": reason}, totals[f"rejected_{reason}"]) for reason in _REJECTIONS],
        )
        results = {"ok": 0, **totals["operations"]}
        add(
            CounterMetricFamily(
                "atp_operations_total",
                "Finished collective operations by result: ok or the error's code.",
                labels=[*own, "result"],
            ),
            [({"result": result}, count) for result, count in sorted(results.items())],
        )
        for name, key, text in _GAUGES:
            add(GaugeMetricFamily(name, text, labels=list(own)), [({}, _value(totals, key))])
        add(
            GaugeMetricFamily(
                "atp_gate_open", "1 while this pod has a valid assignment and its transport is up.", labels=list(own)
            ),
            [({}, float(gate_open))],
        )
        if assignment is not None:
            # Every pod may read this: nothing that a packet of the job would have to say.
            info = {"mode": assignment.mode, "epoch": str(assignment.epoch)}
            add(
                GaugeMetricFamily("atp_job_info", "What this pod's assignment says.", labels=[*own, *info]),
                [(info, 1.0)],
            )
        registry = CollectorRegistry()
        registry.register(_Families(families))
        return generate_latest(registry).decode()
