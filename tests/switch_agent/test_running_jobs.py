# SPDX-License-Identifier: Apache-2.0
"""A job that trains while its switch gets into trouble: real transport, real switch and agent. No sum is lost or wrong.

The transport goes on without the switch by itself (HostOnly), and with it again once the agent has repaired it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from switch_agent.test_bad_input import Operator, Rival, table, write
from transport import rig
from transport.rig import SERVER, Job, fixed_point_sum

from atp_api.switchagent.v1alpha1 import switchagent_pb2 as api
from atp_api.wire import UDP_PORT
from atp_switch_agent.codec import contract_path, load_p4info

RELAY = "127.77.4.1"
WORKERS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
"""Addresses of the rig."""
JOB_ID, REGION = 7, 256
COUNT = 20_000


def wanted(job_id: int = JOB_ID, start: int = 0, size: int = REGION) -> api.Job:
    job = api.Job(job_id=job_id, epoch=1, uid=f"u{job_id}", name=f"ns/j{job_id}", values=62, multicast_group=job_id)
    job.regions.add(start=start, size=size)
    job.parameter_servers.add(address=SERVER)
    for rank, address in enumerate(WORKERS):
        job.members.add(rank=rank, bit=rank).endpoint.address = address
    return job


@dataclass
class Training:
    """All-reduces one after the other, in a thread; every result is compared with the exact one."""

    job: Job
    steps: int = 0
    wrong: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        rng = np.random.default_rng(11)
        while not self._stop.is_set() and not self.wrong:
            inputs = [rng.normal(0, 0.5, COUNT).astype(np.float32) for _ in WORKERS]
            expected = fixed_point_sum(inputs).astype(np.float32)
            try:
                for out in self.job.all_reduce(inputs, "float32", op_id=self.steps + 1):
                    np.testing.assert_array_equal(out, expected)
            except AssertionError as error:
                self.wrong.append(f"step {self.steps}: {error}")
            self.steps += 1

    def __enter__(self) -> Training:
        self._thread = threading.Thread(target=self.run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def go_on(self, steps: int = 5) -> None:
        """Some more steps are done, and right."""
        goal = self.steps + steps
        self.until(lambda: self.steps >= goal, f"{steps} more steps")

    def aggregated(self) -> None:
        """The switch sums packets of this job now."""
        before = self.job.servers[0].metrics()["aggregated_packets"]
        self.until(lambda: self.job.servers[0].metrics()["aggregated_packets"] > before + 50, "the switch to sum")

    def until(self, check: Callable[[], bool], what: str, seconds: float = 40.0) -> None:
        deadline = time.monotonic() + seconds
        while not check():
            assert not self.wrong, self.wrong
            assert time.monotonic() < deadline, f"waited for {what}; {self.steps} steps"
            time.sleep(0.05)
        assert not self.wrong, self.wrong


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    # The copies of an ACK go to the well-known port.
    monkeypatch.setattr(rig, "free_port", lambda: UDP_PORT)
    shared: dict[str, Any] = {
        "mode": "Shared",
        "regions": [{"start": 0, "size": REGION}],
        "indexTableSize": 256,
        "maxWindow": 256,
    }
    with Job(len(WORKERS), jobId=JOB_ID, switchAddress=RELAY, **shared) as job:
        yield Training(job)


@pytest.fixture
def operator(relay: Any, agent: Any, free_port: int) -> Operator:
    """Switch and agent with the job programmed."""
    relay(RELAY, p4runtime=free_port)
    operator = Operator(agent(free_port, "--election-id", "100"))
    operator.until("NoDesiredState")
    assert operator.apply(wanted()).in_sync
    return operator


def test_another_controller_takes_everything(training: Training, operator: Operator, free_port: int) -> None:
    with training:
        training.aggregated()
        with grpc.insecure_channel(f"127.0.0.1:{free_port}") as channel, Rival(channel, 500) as rival:
            operator.until("NotMaster")
            rival.delete_all(load_p4info(contract_path()), "admission", "ps_port", "replica", "job", "region")
            training.go_on()
        assert operator.until("", 30).in_sync
        training.aggregated()


def test_the_switch_dies_and_comes_back(
    training: Training, relay: Any, agent: Any, free_port: int, processes: Any
) -> None:
    switch = relay(RELAY, p4runtime=free_port)
    operator = Operator(agent(free_port))
    operator.until("NoDesiredState")
    assert operator.apply(wanted()).in_sync
    with training:
        training.aggregated()
        switch.kill()
        operator.until("SwitchUnreachable")
        training.go_on()
        relay(RELAY, p4runtime=free_port)
        assert operator.until("", 30).in_sync
        training.aggregated()


def test_the_switch_comes_back_with_another_program(
    training: Training, relay: Any, agent: Any, free_port: int, tmp_path: Path
) -> None:
    switch = relay(RELAY, p4runtime=free_port)
    operator = Operator(agent(free_port))
    operator.until("NoDesiredState")
    assert operator.apply(wanted()).in_sync
    other = load_p4info(contract_path())
    table(other, "region").match_fields[1].bitwidth = 12
    with training:
        training.aggregated()
        switch.kill()
        switch = relay(RELAY, p4runtime=free_port, p4info=write(tmp_path / "other.txtpb", other))
        operator.until("PipelineMismatch", 30)
        training.go_on()
        switch.kill()
        relay(RELAY, p4runtime=free_port)
        assert operator.until("", 30).in_sync
        training.aggregated()


def test_jobs_that_the_switch_cannot_serve_do_not_disturb(training: Training, operator: Operator) -> None:
    lost = wanted(8, 512, 64)
    lost.members[0].endpoint.port = 0xFFFFFFFF
    wide = wanted(9, 1024, 64)
    wide.values = 870
    with training:
        training.aggregated()
        told = operator.apply(wanted(), lost, wide)
        states = operator.states(told)
        assert states[JOB_ID] == (api.JobStatus.PROGRAMMED, "")
        assert (states[8][1], states[9][1]) == ("PortNotFound", "ValuesUnsupported")
        training.aggregated()
        training.go_on()
