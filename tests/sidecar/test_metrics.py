# SPDX-License-Identifier: Apache-2.0
"""The exposition has every metric of the contract and parses with the official parser."""

import json

from atp_harness import assignment
from prometheus_client.parser import text_string_to_metric_families

from atp_sidecar.assignment import parse_assignment
from atp_sidecar.metrics import SidecarMetrics

PLACE = parse_assignment(json.dumps(assignment(["10.0.0.1", "10.0.0.9"])), "worker")
COUNTERS = {
    "gradient_packets", "ack_packets", "aggregated_packets", "host_summed_packets", "retransmits", "timeouts",
    "ecn_marks", "collisions", "raw_float_corrections", "bytes_sent", "bytes_received", "duplicates", "reanswers",
    "values_rounded_to_zero", "values_out_of_range", "values_not_finite", "inline_operations", "parts_granted",
    "control_packets", "control_retransmits",
}  # fmt: skip


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_every_metric_of_the_contract() -> None:
    snapshot = {name: number for number, name in enumerate(sorted(COUNTERS), 1)}
    snapshot |= {"rejected_stranger": 4, "rejected_length": 2, "rejected_tag": 6, "window": 200, "in_flight": 3}
    snapshot |= {"sessions": 2, "operations_outstanding": 9}
    operations = {"ok": 1, "Stalled": 1, "Timeout": 0}
    text = SidecarMetrics().expose(PLACE, "worker", {**snapshot, "rtt_seconds": 0.25, "operations": operations}, True)
    found = samples(text)
    labels = {"job": "team-a/digits", "role": "worker", "rank": "0"}
    for name in COUNTERS:
        assert found[f"atp_{name}_total"] == [(labels, snapshot[name])]
    reasons = {each["reason"]: value for each, value in found["atp_rejected_packets_total"]}
    assert reasons == {"stranger": 4, "job": 0, "length": 2, "sequence": 0, "tag": 6}
    results = {each["result"]: value for each, value in found["atp_operations_total"]}
    assert results == {"ok": 1, "Stalled": 1}
    assert found["atp_window_packets"] == [(labels, 200)]
    assert found["atp_rtt_seconds"] == [(labels, 0.25)]
    assert found["atp_in_flight_packets"] == [(labels, 3)]
    assert found["atp_sessions"] == [(labels, 2)]
    assert found["atp_outstanding_parts"] == [(labels, 9)]
    assert found["atp_gate_open"] == [(labels, 1)]
    assert found["atp_job_info"] == [({**labels, "mode": "HostOnly", "epoch": "1"}, 1)]


def test_closed_gate() -> None:
    found = samples(SidecarMetrics().expose(None, "worker", {}, False))
    assert found["atp_gate_open"] == [({"job": "", "role": "worker", "rank": ""}, 0)]
    assert "atp_job_info" not in found


def test_counters_never_fall_when_the_epoch_changes() -> None:
    metrics = SidecarMetrics()
    metrics.retire({"retransmits": 5, "rejected_job": 2, "window": 9, "operations": {"ok": 7, "Epoch": 1}})
    total = metrics.total({"retransmits": 1, "window": 3, "operations": {"ok": 2, "Epoch": 0}})
    assert (total["retransmits"], total["rejected_job"], total["window"]) == (6, 2, 3)
    assert total["operations"] == {"ok": 9, "Epoch": 1}
    assert metrics.total({})["operations"] == {"ok": 7, "Epoch": 1}
