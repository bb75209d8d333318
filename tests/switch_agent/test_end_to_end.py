# SPDX-License-Identifier: Apache-2.0
"""Operator's gRPC -> agent -> P4Runtime -> the relay's data path, with packets through it."""

from __future__ import annotations

import socket
import struct
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest

from atp_api.switchagent.v1alpha1 import switchagent_pb2 as api
from atp_api.switchagent.v1alpha1 import switchagent_pb2_grpc as api_grpc

PORT = 10800
RELAY, PS = "127.77.0.1", "127.77.0.9"
WORKERS = ("127.77.0.11", "127.77.0.12", "127.77.0.13")
VALUES = 62
JOB = 5


def packet(
    sequence: int,
    values: list[int],
    *,
    bitmap0: int = 0,
    bitmap1: int = 1,
    index: int = 100,
    ack: bool = False,
    job: int = JOB,
    fan_in0: int = 3,
) -> bytes:
    flags = fan_in0 << 27 | 1 << 22 | int(ack) << 17 | index
    return struct.pack(f">4I{len(values)}i", job << 24 | sequence, bitmap0, bitmap1, flags, *values)


def unpack(data: bytes) -> tuple[int, int, int, int, list[int]]:
    count = (len(data) - 16) // 4
    key, bitmap0, bitmap1, flags, *values = struct.unpack(f">4I{count}i", data)
    return key, bitmap0, bitmap1, flags, values


class Hosts:
    """Sockets of the workers and the PS on loopback."""

    def __init__(self, stack: ExitStack) -> None:
        self.sockets = {address: stack.enter_context(self._open(address)) for address in (*WORKERS, PS)}

    @staticmethod
    def _open(address: str) -> socket.socket:
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        opened.bind((address, PORT))
        opened.settimeout(3)
        return opened

    def send(self, source: str, data: bytes) -> None:
        self.sockets[source].sendto(data, (RELAY, PORT))

    def receive(self, at: str) -> bytes:
        return self.sockets[at].recv(4096)

    def silent(self, at: str, seconds: float = 0.3) -> bool:
        self.sockets[at].settimeout(seconds)
        try:
            self.sockets[at].recv(4096)
        except TimeoutError:
            return True
        finally:
            self.sockets[at].settimeout(3)
        return False


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with ExitStack() as stack:
        yield Hosts(stack)


def job(**changes: Any) -> api.Job:
    message = api.Job(
        job_id=JOB,
        epoch=1,
        uid="uid-1",
        name="default/train",
        values=VALUES,
        regions=[api.Region(start=64, size=128)],
        members=[
            api.Member(rank=rank, bit=rank, endpoint=api.Endpoint(address=address))
            for rank, address in enumerate(WORKERS)
        ],
        parameter_servers=[api.Endpoint(address=PS)],
        multicast_group=7,
    )
    for name, value in changes.items():
        setattr(message, name, value)
    return message


def desired(*jobs: api.Job, generation: int = 1, writer: str = "operator-1") -> api.DesiredState:
    return api.DesiredState(switch_name="sw", generation=generation, writer=writer, jobs=jobs)


def connect(process: Any) -> api_grpc.SwitchAgentStub:
    return api_grpc.SwitchAgentStub(grpc.insecure_channel(f"127.0.0.1:{process.started['grpc_port']}"))


def aggregate(hosts: Hosts, sequence: int, index: int = 100) -> None:
    """One sum through the switch: three gradients in, one packet at the PS, one ACK copy at each worker."""
    for rank, address in enumerate(WORKERS):
        hosts.send(address, packet(sequence, [rank + 1] * VALUES, bitmap0=1 << rank, index=index))
    key, bitmap0, _, flags, values = unpack(hosts.receive(PS))
    assert key == JOB << 24 | sequence
    assert bitmap0 == 0b111
    assert flags >> 21 & 1 == 1, "level 0 is complete"
    assert values == [6] * VALUES
    hosts.send(PS, packet(sequence, values, bitmap0=0b111, index=index, ack=True))
    for address in WORKERS:
        assert unpack(hosts.receive(address))[4] == [6] * VALUES


def test_a_sum_through_the_whole_path(relay: Any, agent: Any, hosts: Hosts, until: Any) -> None:
    switch = relay(RELAY)
    controller = agent(switch.started["p4runtime_port"])
    stub = connect(controller)
    until(lambda: stub.GetCapabilities(api.GetCapabilitiesRequest()).aggregators)
    capabilities = stub.GetCapabilities(api.GetCapabilitiesRequest())
    assert capabilities.target == "software-relay"
    assert list(capabilities.values) == [62, 350]
    assert stub.GetObservedState(api.GetObservedStateRequest()).generation == 0

    observed = stub.ApplyDesiredState(desired(job()), timeout=15)
    assert observed.connected and observed.in_sync, observed
    assert [status.state for status in observed.jobs] == [api.JobStatus.PROGRAMMED]
    for sequence in range(5):
        aggregate(hosts, sequence)

    # Admission: a foreign bit, a foreign index and an ACK from a worker all stop at the switch.
    hosts.send(WORKERS[0], packet(50, [9] * VALUES, bitmap0=0b10))
    hosts.send(WORKERS[0], packet(51, [9] * VALUES, bitmap0=0b01, index=7))
    hosts.send(WORKERS[0], packet(52, [9] * VALUES, bitmap0=0b01, ack=True))
    assert hosts.silent(PS) and hosts.silent(WORKERS[1])

    told = next(iter(stub.StreamTelemetry(api.TelemetryRequest(period_seconds=1), timeout=15)))
    counters = {item.job_id: dict(item.counters) for item in told.jobs}[JOB]
    assert (counters["aggregated"], counters["completed"], counters["acks"]) == (15, 5, 5)
    assert (counters["rejected_bit"], counters["rejected_index"], counters["rejected_ack_source"]) == (
        1,
        1,
        1,
    )
    assert {item.job_id: item.aggregators_in_use for item in told.jobs}[JOB] == 0

    # A new epoch counts from zero, and a job that left is ordinary traffic.
    stub.ApplyDesiredState(desired(job(epoch=2), generation=2), timeout=15)
    aggregate(hosts, 0)
    told = next(iter(stub.StreamTelemetry(api.TelemetryRequest(period_seconds=1), timeout=15)))
    assert {item.job_id: dict(item.counters) for item in told.jobs}[JOB]["aggregated"] == 3
    url = f"http://127.0.0.1:{controller.started['http_port']}/metrics"
    text = urllib.request.urlopen(url, timeout=5).read().decode()
    assert 'atp_switch_packets_total{counter="aggregated",job="default/train",switch="sw"} 3.0' in text
    assert 'atp_switch_in_sync{switch="sw"} 1.0' in text
    observed = stub.ApplyDesiredState(desired(generation=3), timeout=15)
    assert observed.in_sync and not observed.jobs
    hosts.send(WORKERS[0], packet(60, [1] * VALUES, bitmap0=1))
    assert hosts.silent(PS)
    text = (
        urllib.request.urlopen(f"http://127.0.0.1:{switch.started['http_port']}/metrics", timeout=5)
        .read()
        .decode()
    )
    assert 'atp_softswitch_packets_total{counter="passed_unknown_job",job_id="0"} 1.0' in text
    assert controller.stop() == 0
    assert switch.stop() == 0
