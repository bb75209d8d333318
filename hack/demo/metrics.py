# SPDX-License-Identifier: Apache-2.0
"""Read the sidecars' Prometheus metrics of one job while it runs, and keep the last values of each pod.

A pod's counters vanish with the pod, so the demo polls and keeps what it saw last.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{[^}]*\})?\s+(?P<value>[-+.\deE]+|NaN)\s*$")


def parse(text: str) -> dict[str, float]:
    """Sum the samples of each metric name over all labels."""
    out: dict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if match := SAMPLE.match(line):
            out[match["name"]] += float(match["value"])
    return dict(out)


@dataclass
class JobMetrics:
    """Last metrics seen, by pod name."""

    pods: dict[str, dict[str, float]] = field(default_factory=dict)

    def update(self, pod: str, text: str) -> None:
        if values := parse(text):
            self.pods[pod] = values

    def total(self, name: str, role: str = "") -> int:
        """Sum of a counter over the pods whose name contains ``role``."""
        return int(sum(values.get(name, 0.0) for pod, values in self.pods.items() if role in pod))

    def aggregated_share(self) -> float:
        """Share of gradient packets that a switch aggregated, as the parameter servers count them (0 to 1)."""
        aggregated = self.total("atp_aggregated_packets_total", "-ps-")
        host = self.total("atp_host_summed_packets_total", "-ps-")
        return aggregated / (aggregated + host) if aggregated + host else 0.0
