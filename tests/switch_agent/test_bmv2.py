# SPDX-License-Identifier: Apache-2.0
"""The agent and bmv2: tables, multicast groups, counters and ordinary traffic over P4Runtime, packets through them."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from switch_agent.bmv2 import PORTS, Bmv2, address_of, mac_of, reason_not_to_run
from switch_agent.test_bad_input import Operator, Rival, job, own_p4info

from atp_api.switchagent.v1alpha1 import switchagent_pb2 as api

MISSING = reason_not_to_run()
pytestmark = [pytest.mark.root, pytest.mark.skipif(MISSING is not None, reason=MISSING or "")]
WORKERS, PS, VALUES, JOB = (1, 2, 3), 5, 62, 3
INDEX = 64 * JOB


@pytest.fixture
def bmv2(tmp_path: Path) -> Iterator[Bmv2]:
    with Bmv2(tmp_path) as switch:
        switch.start()
        yield switch


@pytest.fixture
def port_file(tmp_path: Path) -> Path:
    """A rack: every host by address, every port."""
    table = {
        "ports": list(PORTS),
        "addresses": {address_of(port): {"port": port, "mac": mac_of(port)} for port in PORTS},
    }
    path = tmp_path / "ports.json"
    path.write_text(json.dumps(table))
    return path


@pytest.fixture
def run_agent(agent: Any, bmv2: Bmv2, port_file: Path) -> Any:
    """Start an agent with the program that it brings along; every part of T is the test's own."""

    def start(*extra: str) -> Operator:
        options = ("--target", "bmv2", "--ports", "static", "--port-file", str(port_file), "--stale-ms", "60000")
        operator = Operator(agent(bmv2.address, *options, *extra))
        operator.until("NoDesiredState", 60)
        return operator

    return start


def wanted(switch: Bmv2, workers: int = len(WORKERS)) -> api.Job:
    """A job whose ports the agent has from its file."""
    message = job(switch, JOB, workers)
    for endpoint in (*(member.endpoint for member in message.members), *message.parameter_servers):
        endpoint.ClearField("port")
        endpoint.ClearField("mac")
    return message


def packet(sequence: int, values: list[int], bitmap0: int = 0, *, ack: bool = False, job_id: int = JOB) -> bytes:
    flags = len(WORKERS) << 27 | 1 << 22 | int(ack) << 17 | INDEX
    return struct.pack(f">4I{VALUES}i", job_id << 24 | sequence, bitmap0, 1, flags, *values)


def values_of(data: bytes | None) -> list[int]:
    assert data is not None, "no packet"
    assert len(data) == 16 + 4 * VALUES
    return list(struct.unpack(f">{VALUES}i", data[16:]))


def gradient(switch: Bmv2, worker: int, sequence: int) -> None:
    switch.send(worker, PS, packet(sequence, [worker] * VALUES, 1 << worker - 1))


def aggregate(switch: Bmv2, sequence: int, senders: tuple[int, ...] = WORKERS) -> None:
    """The rest of one sum: a packet at the PS, and its ACK at each worker."""
    for worker in senders:
        gradient(switch, worker, sequence)
    total = [sum(WORKERS)] * VALUES
    assert values_of(switch.receive(PS)) == total
    switch.send(PS, WORKERS[0], packet(sequence, total, 0b111, ack=True))
    for worker in WORKERS:
        assert values_of(switch.receive(worker)) == total


def counters(operator: Operator) -> tuple[dict[str, int], int]:
    told = next(iter(operator.stub.StreamTelemetry(api.TelemetryRequest(period_seconds=1), timeout=20)))
    mine = next(item for item in told.jobs if item.job_id == JOB)
    return dict(mine.counters), mine.aggregators_in_use


def test_a_sum_and_what_is_counted(bmv2: Bmv2, run_agent: Any) -> None:
    operator = run_agent()
    told = operator.stub.GetCapabilities(api.GetCapabilitiesRequest(), timeout=10)
    assert (told.target, list(told.values), told.aggregators) == ("bmv2", [VALUES], 65536)
    assert told.sticky_saturation and told.pipeline.startswith("atp 0.1.0")
    assert operator.apply(wanted(bmv2)).in_sync
    aggregate(bmv2, 0)
    for worker in WORKERS[:2]:
        gradient(bmv2, worker, 1)
    bmv2.send(WORKERS[0], PS, packet(2, [1] * VALUES, 0b10))  # another worker's bit
    deadline = time.monotonic() + 10
    while (seen := counters(operator))[0].get("rejected_bit") != 1:
        assert time.monotonic() < deadline, seen
    counted, in_use = seen
    # bmv2 answers UNIMPLEMENTED for registers, so what is in use follows from what was taken and released.
    assert (counted["allocated"], counted["aggregated"], counted["completed"]) == (2, 5, 1)
    assert (counted["acks"], counted["released"], in_use) == (1, 1, 1)

    # Another epoch of the job counts from zero.
    later = wanted(bmv2)
    later.epoch = 2
    assert operator.apply(later).in_sync
    counted, in_use = counters(operator)
    assert not any(counted.values()) and in_use == 0


def test_ordinary_traffic(bmv2: Bmv2, run_agent: Any) -> None:
    """Before there is a job, and after one: what the switch does not know, it forwards."""
    operator = run_agent()
    bmv2.quiet(2)
    unknown = packet(7, [9] * VALUES, 1, job_id=200)
    bmv2.send(1, 2, unknown)
    assert bmv2.receive(2) == unknown
    bmv2.send(1, 99, unknown)  # nobody knows where that is
    assert [bmv2.receive(port) for port in (2, 3, 4, 5)] == [unknown] * 4
    assert bmv2.receive(1) is None, "a flooded frame came back to its sender"
    assert operator.apply(wanted(bmv2)).in_sync
    assert operator.apply().in_sync
    gradient(bmv2, 1, 0)
    assert values_of(bmv2.receive(PS)) == [1] * VALUES


def test_a_restarted_bmv2_is_found_empty_and_programmed_again(bmv2: Bmv2, run_agent: Any) -> None:
    operator = run_agent()
    assert operator.apply(wanted(bmv2)).in_sync
    aggregate(bmv2, 0)
    bmv2.kill()
    told = operator.until("SwitchUnreachable")
    assert not told.connected and operator.states(told) == {JOB: (api.JobStatus.PENDING, "SwitchUnreachable")}
    bmv2.start()
    told = operator.until("", 60)
    assert told.in_sync
    aggregate(bmv2, 1)
    assert counters(operator)[0]["completed"] == 1


def test_a_restarted_agent_disturbs_nothing(bmv2: Bmv2, run_agent: Any) -> None:
    first = run_agent()
    assert first.apply(wanted(bmv2)).in_sync
    gradient(bmv2, 1, 0)
    first.process.kill()
    second = run_agent()
    assert second.apply(wanted(bmv2)).in_sync
    # The aggregator that was open is still there: the sum goes on, and so do the counters.
    aggregate(bmv2, 0, (2, 3))
    assert counters(second)[0]["aggregated"] == 3


def test_another_controller_takes_the_tables(bmv2: Bmv2, run_agent: Any) -> None:
    """Nothing is lost meanwhile: gradients pass and the parameter server sums them. Then all is repaired."""
    operator = run_agent("--election-id", "100")
    assert operator.apply(wanted(bmv2)).in_sync
    with grpc.insecure_channel(bmv2.address) as channel, Rival(channel, 500) as rival:
        told = operator.until("NotMaster")
        assert operator.states(told) == {JOB: (api.JobStatus.PENDING, "NotMaster")}
        rival.delete_all(own_p4info(bmv2), "admission", "ps_port", "replica", "job", "region")
        for worker in WORKERS:
            gradient(bmv2, worker, 0)
            assert values_of(bmv2.receive(PS)) == [worker] * VALUES
        bmv2.send(PS, 2, packet(0, [6] * VALUES, 0b111, ack=True))  # the PS, to each worker
        assert values_of(bmv2.receive(2)) == [6] * VALUES
        rival.delete_all(own_p4info(bmv2), "l2_forward")
    told = operator.until("", 30)
    assert told.in_sync
    aggregate(bmv2, 1)
