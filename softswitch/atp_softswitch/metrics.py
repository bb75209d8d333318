# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the software switch, read from the data path at each scrape."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .dataplane import Dataplane
from .errors import DataplaneError
from .server import P4RuntimeService


class SwitchCollector(Collector):
    """Counters by job ID (0: packets of no known job), occupancy, table sizes, ports, streams."""

    def __init__(
        self,
        dataplane: Dataplane,
        service: P4RuntimeService,
        ports: Callable[[], Mapping[str, int]],
        swept: Callable[[], int],
    ) -> None:
        self._dataplane = dataplane
        self._service = service
        self._ports = ports
        self._swept = swept

    def collect(self) -> Iterator[Metric]:
        packets = CounterMetricFamily(
            "atp_softswitch_packets",
            "Packets (bytes_in, bytes_out: bytes) by job ID",
            labels=["job_id", "counter"],
        )
        in_use = GaugeMetricFamily(
            "atp_softswitch_aggregators_in_use", "Aggregators in use by job ID", labels=["job_id"]
        )
        dropped = CounterMetricFamily(
            "atp_softswitch_dropped_packets",
            "Packets that the guard dropped, by the port where they came in, the address of the pod there, and why",
            labels=["ifindex", "address", "reason"],
        )
        entries = GaugeMetricFamily("atp_softswitch_table_entries", "Entries by table", labels=["table"])
        device = self._service.device
        jobs = device.jobs() if device else []
        try:
            for job_id in (0, *jobs):
                for name, value in self._dataplane.read_counters(job_id).items():
                    packets.add_metric([str(job_id), name], value)
            for drops in self._dataplane.read_drops():
                address = str(ipaddress.IPv4Address(drops.address)) if drops.address else ""
                for reason, value in drops.dropped.items():
                    dropped.add_metric([str(drops.port), address, reason], value)
            if device:
                for job_id in jobs:
                    in_use.add_metric([str(job_id)], device.occupancy(job_id))
                for table in device.pipeline.tables.values():
                    entries.add_metric([table.name], len(device.entries(table.name)))
        except DataplaneError:
            return  # closing down
        yield packets
        yield dropped
        yield in_use
        yield entries
        yield GaugeMetricFamily(
            "atp_softswitch_aggregators", "Aggregators of the switch", value=self._dataplane.aggregators
        )
        ports = GaugeMetricFamily("atp_softswitch_ports", "Interfaces attached, by hook", labels=["hook"])
        for hook, count in self._ports().items():
            ports.add_metric([hook], count)
        yield ports
        yield GaugeMetricFamily(
            "atp_softswitch_p4runtime_streams", "Open controller streams", value=self._service.streams
        )
        yield CounterMetricFamily(
            "atp_softswitch_aggregators_swept", "Stale aggregators freed by the sweep", value=self._swept()
        )
