# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the sidecar, from the transport's snapshots (text exposition format 0.0.4)."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atp_sidecar.assignment import Assignment

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Metric, key in the transport's snapshot, help.
_COUNTERS = (
    (
        "atp_gradient_packets_total",
        "gradient_packets",
        "Gradient packets: sent by a worker, received by a parameter server.",
    ),
    (
        "atp_ack_packets_total",
        "ack_packets",
        "ACK packets: received by a worker, sent by a parameter server.",
    ),
    (
        "atp_aggregated_packets_total",
        "aggregated_packets",
        "Gradient packets of this job that a switch aggregated.",
    ),
    (
        "atp_host_summed_packets_total",
        "host_summed_packets",
        "Gradient packets that the parameter server summed.",
    ),
    ("atp_retransmits_total", "retransmits", "Packets sent again."),
    ("atp_timeouts_total", "timeouts", "Retransmission timeouts."),
    ("atp_ecn_marks_total", "ecn_marks", "Packets that carried a congestion mark."),
    ("atp_collisions_total", "collisions", "Packets whose aggregator belonged to somebody else."),
    (
        "atp_raw_float_corrections_total",
        "raw_float_corrections",
        "Sequences summed as raw floats (overflow, NaN, Inf).",
    ),
    ("atp_bytes_sent_total", "bytes_sent", "Bytes sent (UDP payload)."),
    ("atp_bytes_received_total", "bytes_received", "Bytes received (UDP payload)."),
    ("atp_duplicates_total", "duplicates", "Packets whose content was already known."),
    ("atp_reanswers_total", "reanswers", "Packets of answered sequences that were answered again."),
)
_REJECTIONS = ("stranger", "job", "length", "sequence")
_GAUGES = (
    ("atp_window_packets", "window", "Congestion window in packets."),
    ("atp_rtt_seconds", "rtt_seconds", "Smoothed round-trip time in seconds."),
    ("atp_in_flight_packets", "in_flight", "Packets sent and not acknowledged."),
)
_CUMULATIVE = tuple(key for _, key, _ in _COUNTERS) + tuple(f"rejected_{reason}" for reason in _REJECTIONS)


def escape(value: str) -> str:
    """A label value as the exposition format wants it."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{escape(value)}"' for name, value in labels.items()) + "}"


def _number(value: Any) -> str:
    if value is None:
        return "NaN"
    return repr(float(value)) if isinstance(value, float) and not value.is_integer() else str(int(value))


@dataclass
class SidecarMetrics:
    """Counters that survive a change of epoch (a new transport starts at zero), and their exposition."""

    operations: Counter[str] = field(default_factory=Counter)
    _before: Counter[str] = field(default_factory=Counter)

    def count_operation(self, result: str) -> None:
        """Counts a finished operation; result is "ok" or an error code."""
        self.operations[result] += 1

    def retire(self, snapshot: Mapping[str, Any]) -> None:
        """Keeps the counts of a transport that is about to close."""
        for key in _CUMULATIVE:
            self._before[key] += int(snapshot.get(key) or 0)

    def total(self, snapshot: Mapping[str, Any]) -> dict[str, Any]:
        """The snapshot with the counts of earlier transports added to its counters."""
        return {**snapshot, **{key: int(snapshot.get(key) or 0) + self._before[key] for key in _CUMULATIVE}}

    def expose(self, assignment: Assignment | None, role: str, snapshot: Mapping[str, Any], gate_open: bool) -> str:
        """The metrics as text.

        Args:
            assignment: of the open gate; None while it is closed (then only the gate's gauge has values).
            role: worker or parameterServer.
            snapshot: the transport's metrics; empty while the gate is closed.
            gate_open: value of atp_gate_open.
        """
        labels = {
            "job": assignment.job if assignment else "",
            "role": role,
            "rank": str(assignment.rank) if assignment else "",
        }
        own = _labels(labels)
        lines: list[str] = []

        def metric(name: str, kind: str, text: str, samples: list[tuple[str, str]]) -> None:
            lines.append(f"# HELP {name} {text}")
            lines.append(f"# TYPE {name} {kind}")
            lines.extend(f"{name}{at} {value}" for at, value in samples)

        totals = self.total(snapshot)
        for name, key, text in _COUNTERS:
            metric(name, "counter", text, [(own, _number(totals[key]))])
        metric(
            "atp_rejected_packets_total",
            "counter",
            "Packets dropped by reason: stranger (not from this job), job (foreign job ID), length, sequence.",
            [(_labels({**labels, "reason": reason}), _number(totals[f"rejected_{reason}"])) for reason in _REJECTIONS],
        )
        results = {"ok": 0, **self.operations}
        metric(
            "atp_operations_total",
            "counter",
            "Finished collective operations by result: ok or the error's code.",
            [(_labels({**labels, "result": result}), str(count)) for result, count in sorted(results.items())],
        )
        for name, key, text in _GAUGES:
            metric(name, "gauge", text, [(own, _number(totals.get(key, 0)))])
        metric(
            "atp_gate_open",
            "gauge",
            "1 while this pod has a valid assignment and its transport is up.",
            [(own, "1" if gate_open else "0")],
        )
        if assignment is not None:
            info = {
                **labels,
                "mode": assignment.mode,
                "epoch": str(assignment.epoch),
                "job_id": str(assignment.job_id),
            }
            metric("atp_job_info", "gauge", "What this pod's assignment says.", [(_labels(info), "1")])
        return "\n".join(lines) + "\n"
