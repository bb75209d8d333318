# SPDX-License-Identifier: Apache-2.0
"""The transport through a real switch: the C core behind its UDP relay, on loopback."""

from __future__ import annotations

import time
from collections.abc import Iterator
from ipaddress import IPv4Address
from typing import Any

import numpy as np
import pytest
from transport.rig import JOB_ID, SERVER, Array, Job, fixed_point_sum

from atp_softswitch.dataplane import JobConfig, Region, Replica
from atp_softswitch.library import SwitchLibrary, find_library

RELAY = "127.0.0.50"
GROUP = 5


def address(text: str) -> int:
    return int(IPv4Address(text))


class Relay:
    """A software switch that knows the job of `workers` workers in one rack."""

    def __init__(self, job: Job, workers: int, region: int, values: int = 62) -> None:
        self.switch = SwitchLibrary(find_library(), bpf=False, aggregators=1024, values=values)
        self.workers = workers
        self.values = values
        self.region = region
        self.learn()
        self.switch.start_relay(address(RELAY), job.port)

    def learn(self) -> None:
        """What the control plane would write."""
        hosts = [address(f"127.0.0.{rank + 1}") for rank in range(self.workers)]
        config = JobConfig(
            values=self.values,
            full0=(1 << self.workers) - 1,
            full1=0,
            group=GROUP,
            regions=(Region(0, self.region),),
        )
        self.switch.set_job(JOB_ID, config)
        for bit, host in enumerate(hosts):
            self.switch.set_admission(JOB_ID, host, 0, 1 << bit)
        self.switch.set_ps_port(JOB_ID, address(SERVER))
        self.switch.set_group(GROUP, [Replica(port=host, dst_ip=host, dst_mac=0, dst_port=0) for host in hosts])

    def forget(self) -> None:
        """The switch loses its tables."""
        self.switch.delete_job(JOB_ID)

    def counters(self) -> dict[str, int]:
        return dict(self.switch.read_counters(JOB_ID))


def shared(region: int, **changes: Any) -> dict[str, Any]:
    return {
        "mode": "Shared",
        "regions": [{"start": 0, "size": region}],
        "indexTableSize": 256,
        "maxWindow": 256,
        "switchAddress": RELAY,
    } | changes


@pytest.fixture
def relay_job(request: pytest.FixtureRequest) -> Iterator[tuple[Job, Relay]]:
    workers, region, changes = request.param
    with Job(workers, **shared(region, **changes)) as job:
        relay = Relay(job, workers, region)
        try:
            yield job, relay
        finally:
            relay.switch.close()


def tensors(workers: int, count: int) -> list[Array]:
    rng = np.random.default_rng(3)
    return [rng.normal(0, 0.5, count).astype(np.float32) for _ in range(workers)]


@pytest.mark.parametrize("relay_job", [(1, 256, {}), (2, 256, {}), (4, 256, {"mode": "Reserved"})], indirect=True)
def test_the_switch_sums(relay_job: tuple[Job, Relay]) -> None:
    job, relay = relay_job
    inputs = tensors(len(job.workers), 30_000)
    for out in job.all_reduce(inputs, "float32"):
        np.testing.assert_array_equal(out, fixed_point_sum(inputs).astype(np.float32))
    metrics = job.settled(job.servers[0])
    assert metrics["aggregated_packets"] > 20 * metrics["host_summed_packets"], metrics
    assert relay.counters()["completed"] > 400
    assert relay.counters()["rejected_bit"] == 0


@pytest.mark.parametrize("relay_job", [(3, 16, {})], indirect=True)
def test_a_region_too_small_collides_and_stays_right(relay_job: tuple[Job, Relay]) -> None:
    job, relay = relay_job
    inputs = tensors(3, 30_000)
    for out in job.all_reduce(inputs, "float32"):
        np.testing.assert_array_equal(out, fixed_point_sum(inputs).astype(np.float32))
    assert relay.counters()["collisions"] > 0
    assert job.settled(job.servers[0])["collisions"] > 0
    assert job.settled(job.workers[1])["collisions"] > 0, "new indexes are announced"


@pytest.mark.parametrize("relay_job", [(2, 256, {})], indirect=True)
def test_overflow_is_corrected_through_the_switch(relay_job: tuple[Job, Relay]) -> None:
    job, _ = relay_job
    inputs = tensors(2, 5000)
    inputs[0][100] = inputs[1][100] = 20.0  # saturates in the switch
    inputs[1][4000] = np.nan
    for out in job.all_reduce(inputs, "float32"):
        assert out[100] == 40.0
        assert np.isnan(out[4000])
        np.testing.assert_array_equal(out[:62], fixed_point_sum(inputs).astype(np.float32)[:62])
    assert job.settled(job.servers[0])["raw_float_corrections"] == 2


@pytest.mark.parametrize("relay_job", [(1, 256, {}), (2, 256, {})], indirect=True)
def test_a_switch_that_lost_its_tables_is_left_out(relay_job: tuple[Job, Relay]) -> None:
    job, relay = relay_job
    workers = len(job.workers)
    inputs = tensors(workers, 30_000)
    expected = fixed_point_sum(inputs).astype(np.float32)
    job.all_reduce(inputs, "float32", op_id=1)
    relay.forget()
    started = time.monotonic()
    for op_id in range(2, 5):
        for out in job.all_reduce(inputs, "float32", op_id=op_id):
            np.testing.assert_array_equal(out, expected)
    assert time.monotonic() - started < 10
    assert job.settled(job.workers[0])["relay_fallbacks"] > 0
    relay.learn()
    before = job.settled(job.servers[0])["aggregated_packets"]
    deadline = time.monotonic() + 30
    op_id = 5
    while job.settled(job.servers[0])["aggregated_packets"] == before:
        assert time.monotonic() < deadline, "the switch does not sum again"
        for out in job.all_reduce(inputs, "float32", op_id=op_id):
            np.testing.assert_array_equal(out, expected)
        op_id += 1
        time.sleep(0.3)
