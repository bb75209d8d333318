# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the agent, from the newest telemetry."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .reconciler import Reconciler

UNKNOWN_JOB = "unknown"


class AgentCollector(Collector):
    """Label `job` is namespace/name; `unknown` for packets of no known job."""

    def __init__(self, reconciler: Reconciler) -> None:
        self._reconciler = reconciler

    def collect(self) -> Iterator[Metric]:
        agent = self._reconciler
        switch = agent.settings.switch_name
        observed = agent.observed()
        packets = CounterMetricFamily(
            "atp_switch_packets",
            "Packets of a job (bytes_in, bytes_out: bytes), since its epoch began",
            labels=["switch", "job", "counter"],
        )
        in_use = GaugeMetricFamily(
            "atp_switch_aggregators_in_use", "Aggregators in use by a job", labels=["switch", "job"]
        )
        names = agent.job_names()
        told = agent.last_telemetry
        for job in told.jobs if told else ():
            name = names.get(job.job_id) if job.job_id else UNKNOWN_JOB
            if name is None:
                continue  # gone from the desired state since
            for counter, value in job.counters.items():
                packets.add_metric([switch, name, counter], value)
            if job.job_id:
                in_use.add_metric([switch, name], job.aggregators_in_use)
        yield packets
        yield in_use
        for metric, text, value in (
            ("atp_switch_aggregators", "Aggregators of the switch", agent.facts.limits.aggregators),
            ("atp_switch_in_sync", "1: the switch holds exactly the desired state", observed.in_sync),
            ("atp_switch_connected", "1: the agent is primary of the switch", observed.connected),
            ("atp_agent_generation", "Generation of the desired state in force", observed.generation),
        ):
            gauge = GaugeMetricFamily(metric, text, labels=["switch"])
            gauge.add_metric([switch], float(value))
            yield gauge
