# SPDX-License-Identifier: Apache-2.0
"""Operator's gRPC -> agent -> P4Runtime -> the relay's data path, with packets through it."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from finsy.proto import p4r, p4r_grpc

from atp_api.switchagent.v1alpha1 import switchagent_pb2 as api
from atp_api.switchagent.v1alpha1 import switchagent_pb2_grpc as api_grpc
from atp_switch_agent import cli

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
    """A stub of an agent, once that has found its switch."""
    stub = api_grpc.SwitchAgentStub(grpc.insecure_channel(f"127.0.0.1:{process.started['grpc_port']}"))
    deadline = time.monotonic() + 15
    while not stub.GetObservedState(api.GetObservedStateRequest()).connected:
        assert time.monotonic() < deadline, process.lines
        time.sleep(0.05)
    return stub


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
    until(lambda: stub.GetCapabilities(api.GetCapabilitiesRequest()).target)
    capabilities = stub.GetCapabilities(api.GetCapabilitiesRequest())
    assert capabilities.target == "software-relay"
    assert list(capabilities.values) == [62, 350]
    assert capabilities.sticky_saturation
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
    text = urllib.request.urlopen(f"http://127.0.0.1:{switch.started['http_port']}/metrics", timeout=5).read().decode()
    assert 'atp_softswitch_packets_total{counter="passed_unknown_job",job_id="0"} 1.0' in text
    assert controller.stop() == 0
    assert switch.stop() == 0


def test_raw_packets_are_their_hosts_own(relay: Any, agent: Any, hosts: Hosts) -> None:
    """Behind a relay all have the relay's address, so that the PS cannot tell: the relay must."""
    switch = relay(RELAY)
    stub = connect(agent(switch.started["p4runtime_port"]))
    state = desired(job())
    guard = state.guards.add(job_id=JOB, epoch=1, uid="uid-1", name="default/train")
    guard.hosts.add(parameter_server=True).endpoint.address = PS
    for bit, address in enumerate(WORKERS):
        guard.hosts.add(bit=bit).endpoint.address = address
    observed = stub.ApplyDesiredState(state, timeout=15)
    assert observed.in_sync, observed
    aggregate(hosts, 0)
    raw = struct.pack(">4I", JOB << 24 | 9, 0b01, 1, 1 << 16) + bytes(4 * VALUES)
    with Hosts._open("127.77.0.66") as stranger:
        stranger.sendto(raw, (RELAY, PORT))
    hosts.send(WORKERS[1], raw)
    assert hosts.silent(PS)
    hosts.send(WORKERS[0], raw)
    assert hosts.receive(PS) == raw


def status_of(observed: api.ObservedState, job_id: int = JOB) -> api.JobStatus:
    return next(status for status in observed.jobs if status.job_id == job_id)


def test_a_restarted_switch_is_found_empty_and_programmed_again(
    relay: Any, agent: Any, hosts: Hosts, until: Any, free_port: int
) -> None:
    switch = relay(RELAY, p4runtime=free_port)
    stub = connect(agent(free_port))
    assert stub.ApplyDesiredState(desired(job()), timeout=15).in_sync
    aggregate(hosts, 0)
    told: Any = stub.StreamTelemetry(api.TelemetryRequest(period_seconds=60), timeout=60)
    assert next(told).observed.in_sync

    switch.kill()
    lost = next(told).observed  # at once, not after the period
    assert not lost.connected and not lost.in_sync
    assert lost.reason == "SwitchUnreachable"
    assert status_of(lost).state == api.JobStatus.PENDING

    relay(RELAY, p4runtime=free_port)
    until(lambda: stub.GetObservedState(api.GetObservedStateRequest()).in_sync, 30)
    assert until(lambda: next(told).observed.in_sync)
    aggregate(hosts, 1)


def test_a_restarted_agent_disturbs_nothing(relay: Any, agent: Any, hosts: Hosts, until: Any) -> None:
    port = relay(RELAY, stale_ms=60_000).started["p4runtime_port"]
    first = agent(port)
    assert connect(first).ApplyDesiredState(desired(job()), timeout=15).in_sync
    hosts.send(WORKERS[0], packet(0, [1] * VALUES, bitmap0=1))
    first.kill()

    stub = connect(agent(port))
    until(lambda: stub.GetObservedState(api.GetObservedStateRequest()).reason == "NoDesiredState")
    assert stub.GetObservedState(api.GetObservedStateRequest()).generation == 0
    assert stub.ApplyDesiredState(desired(job()), timeout=15).in_sync
    # The aggregator that was open is still there: the sum goes on.
    for rank in (1, 2):
        hosts.send(WORKERS[rank], packet(0, [rank + 1] * VALUES, bitmap0=1 << rank))
    assert unpack(hosts.receive(PS))[4] == [6] * VALUES


def test_another_controller_with_a_higher_election_id(relay: Any, agent: Any, until: Any) -> None:
    port = relay(RELAY).started["p4runtime_port"]
    stub = connect(agent(port, "--election-id", "100"))
    assert stub.ApplyDesiredState(desired(job()), timeout=15).in_sync

    def bid() -> Iterator[p4r.StreamMessageRequest]:
        request = p4r.StreamMessageRequest()
        request.arbitration.device_id = 1
        request.arbitration.election_id.low = 500
        yield request
        leave.wait(30)

    leave = threading.Event()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        answers: Any = p4r_grpc.P4RuntimeStub(channel).StreamChannel(bid())
        assert next(answers).arbitration.status.code == 0
        observed = until(lambda: (told := stub.GetObservedState(api.GetObservedStateRequest())).reason and told)
        assert observed.reason == "NotMaster" and not observed.connected
        assert "500" in observed.message
        assert status_of(observed).state == api.JobStatus.PENDING
        answer = stub.ApplyDesiredState(desired(generation=2), timeout=15)
        assert answer.generation == 2 and not answer.in_sync
        leave.set()
        answers.cancel()
    # It left: the agent takes over, and what came in meanwhile is programmed.
    until(lambda: stub.GetObservedState(api.GetObservedStateRequest()).in_sync)


def test_generations(relay: Any, agent: Any) -> None:
    stub = connect(agent(relay(RELAY).started["p4runtime_port"]))

    def apply(state: api.DesiredState) -> api.ObservedState:
        return stub.ApplyDesiredState(state, timeout=15)

    assert apply(desired(job(), generation=5)).generation == 5
    assert apply(desired(job(), generation=5)).in_sync, "the same again is fine"
    with pytest.raises(grpc.RpcError) as caught:
        apply(desired(generation=4))
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "older than 5" in str(caught.value.details())
    assert stub.GetObservedState(api.GetObservedStateRequest()).in_sync, "nothing is changed"
    assert apply(desired(generation=1, writer="operator-2")).generation == 1, "another writer starts anew"

    wrong = job()
    wrong.members[1].bit = 0
    with pytest.raises(grpc.RpcError) as caught:
        apply(desired(wrong, generation=2, writer="operator-2"))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "worker 1 and worker 0 both have bit 0" in str(caught.value.details())
    assert stub.GetObservedState(api.GetObservedStateRequest()).generation == 1


def test_a_job_that_does_not_fit_leaves_the_others_alone(relay: Any, agent: Any, hosts: Hosts) -> None:
    # The agent is told a larger switch than there is, so that the switch itself refuses.
    switch = relay(RELAY, aggregators=1024)
    stub = connect(agent(switch.started["p4runtime_port"], "--aggregators", "4096"))
    big = job(job_id=6, uid="uid-6", multicast_group=8)
    big.regions[0].start = 2048
    wide = job(job_id=7, uid="uid-7", multicast_group=9, values=870)
    observed = stub.ApplyDesiredState(desired(job(), big, wide), timeout=15)
    assert not observed.in_sync
    assert status_of(observed).state == api.JobStatus.PROGRAMMED
    refused = status_of(observed, 6)
    assert (refused.state, refused.reason) == (api.JobStatus.FAILED, "SwitchRefused")
    assert "this switch has 1024 aggregators" in refused.message
    assert status_of(observed, 7).reason == "ValuesUnsupported"
    aggregate(hosts, 0)


def test_a_job_waits_for_its_ports(relay: Any, agent: Any, until: Any, tmp_path: Path) -> None:
    table = tmp_path / "ports.json"
    table.write_text('{"addresses": {}}')
    port = relay(RELAY).started["p4runtime_port"]
    stub = connect(agent(port, "--ports", "static", "--port-file", str(table)))
    observed = stub.ApplyDesiredState(desired(job()), timeout=15)
    waiting = status_of(observed)
    assert (waiting.state, waiting.reason) == (api.JobStatus.PENDING, "PortUnresolved")
    assert "127.77.0.11" in waiting.message and str(table) in waiting.message
    ports = {
        address: {"port": number, "mac": f"02:00:00:00:00:{number:02x}"}
        for number, address in enumerate((*WORKERS, PS), 1)
    }
    table.write_text(json.dumps({"addresses": ports}))
    until(lambda: stub.GetObservedState(api.GetObservedStateRequest()).in_sync)


def issue(folder: Path, name: str, authority: Path | None) -> None:
    """A key and certificate `name`.key, `name`.crt, signed by the authority or by itself."""
    key, certificate = folder / f"{name}.key", folder / f"{name}.crt"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", f"/CN={name}"]
    if authority is not None:
        command += ["-addext", f"subjectAltName=DNS:{name},DNS:localhost", "-CA", str(authority)]
        command += ["-CAkey", str(authority.with_suffix(".key"))]
        command += ["-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run(command, check=True, capture_output=True)


def test_only_clients_with_a_certificate(processes: Any, tmp_path: Path, relay: Any, until: Any) -> None:
    issue(tmp_path, "ca", None)
    issue(tmp_path, "stranger-ca", None)
    for name, signer in (("agent", "ca"), ("operator", "ca"), ("other", "ca"), ("stranger", "stranger-ca")):
        issue(tmp_path, name, tmp_path / f"{signer}.crt")
    folder = tmp_path / "tls"
    folder.mkdir()
    for source, target in (("ca.crt", "ca.crt"), ("agent.crt", "tls.crt"), ("agent.key", "tls.key")):
        (folder / target).write_bytes((tmp_path / source).read_bytes())
    switch = relay(RELAY)
    process = processes(
        "atp_switch_agent",
        *("serve", "--switch-name", "sw", "--listen", "127.0.0.1:0", "--health-listen", "127.0.0.1:0"),
        *("--p4runtime", f"127.0.0.1:{switch.started['p4runtime_port']}", "--ports", "relay"),
        *("--tls-dir", str(folder), "--allow-client", "operator"),
    )
    target = f"127.0.0.1:{process.started['grpc_port']}"

    def call(credentials: grpc.ChannelCredentials | None) -> str:
        options = (("grpc.ssl_target_name_override", "localhost"),)
        with (
            grpc.secure_channel(target, credentials, options) if credentials else grpc.insecure_channel(target)
        ) as channel:
            stub = api_grpc.SwitchAgentStub(channel)
            try:
                return stub.GetCapabilities(api.GetCapabilitiesRequest(), timeout=10).switch_name
            except grpc.RpcError as error:
                return error.code().name

    def client(name: str | None) -> grpc.ChannelCredentials:
        root = (tmp_path / "ca.crt").read_bytes()
        if name is None:
            return grpc.ssl_channel_credentials(root)
        pair = ((tmp_path / f"{name}{suffix}").read_bytes() for suffix in (".key", ".crt"))
        return grpc.ssl_channel_credentials(root, *pair)

    assert call(client("operator")) == "sw"
    assert call(client(None)) == "UNAVAILABLE"
    assert call(client("stranger")) == "UNAVAILABLE"
    assert call(None) == "UNAVAILABLE"
    assert call(client("other")) == "PERMISSION_DENIED"

    # A renewed certificate is served without a restart.
    issue(tmp_path, "agent", tmp_path / "ca.crt")
    renewed = (tmp_path / "agent.crt").read_bytes()
    (folder / "tls.key").write_bytes((tmp_path / "agent.key").read_bytes())
    (folder / "tls.crt").write_bytes(renewed)
    assert call(client("operator")) == "sw"
    host, port = target.split(":")
    shown = subprocess.run(
        ["openssl", "s_client", "-connect", f"{host}:{port}", "-alpn", "h2"],
        input=b"",
        capture_output=True,
        check=False,
    ).stdout
    assert renewed.decode().strip() in shown.decode()


def test_no_tls_on_loopback_only(capsys: pytest.CaptureFixture[str]) -> None:
    for listen in ("0.0.0.0:0", "10.0.0.1:9560"):
        with pytest.raises(SystemExit):
            cli.main(["serve", "--switch-name", "sw", "--insecure-loopback", "--listen", listen])
        assert "needs a loopback --listen" in capsys.readouterr().err


def test_two_levels(relay: Any, agent: Any, until: Any) -> None:
    """Two racks of two workers behind switches of their own, a third worker beside the PS; one sum at the PS."""
    top, racks = "127.77.1.1", ("127.77.1.2", "127.77.1.3")
    workers = {
        ("127.77.1.11", 0, 0): racks[0],
        ("127.77.1.12", 0, 1): racks[0],
        ("127.77.1.21", 1, 0): racks[1],
        ("127.77.1.22", 1, 1): racks[1],
        ("127.77.1.31", 2, 0): top,
    }
    stubs = {}
    for number, address in enumerate((top, *racks)):
        switch = relay(address, stale_ms=60_000)
        stubs[address] = connect(agent(switch.started["p4runtime_port"], name=f"sw{number}"))

    def base(**fields: Any) -> api.Job:
        regions = [api.Region(start=0, size=256)]
        return api.Job(job_id=JOB, epoch=1, uid="u", name="ns/j", values=VALUES, regions=regions, **fields)

    # At the top, a rack is reached through its switch; there, the PS is reached through the top.
    level1 = base(
        members=[api.Member(rank=4, bit=2, edge=True, endpoint=api.Endpoint(address="127.77.1.31"))],
        racks=[api.Rack(bit=bit, workers=2, uplink=api.Endpoint(address=address)) for bit, address in enumerate(racks)],
        parameter_servers=[api.Endpoint(address=PS)],
        multicast_group=1,
    )
    jobs = {top: level1}
    for number, rack in enumerate(racks):
        members = [
            api.Member(rank=2 * number + bit, bit=bit, endpoint=api.Endpoint(address=address))
            for (address, _, bit), behind in workers.items()
            if behind == rack
        ]
        servers = [api.Endpoint(address=top)]
        jobs[rack] = base(members=members, parameter_servers=servers, multicast_group=1)
    for number, (address, wanted) in enumerate(jobs.items()):
        state = api.DesiredState(switch_name=f"sw{number}", generation=1, writer="op", jobs=[wanted])
        assert stubs[address].ApplyDesiredState(state, timeout=15).in_sync

    with ExitStack() as stack:
        sockets = {}
        for address in (*(key[0] for key in workers), PS):
            opened = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            opened.bind((address, PORT))
            opened.settimeout(3)
            sockets[address] = opened

        for (address, number, bit), behind in workers.items():
            values = [10 * number + bit + 1] * VALUES
            data = bytearray(packet(1, values, bitmap0=1 << bit, bitmap1=1 << number))
            # Beside the PS, a worker is a rack of one and enters level 1 directly.
            flags = (1 << 27 | 1 << 21 if behind == top else 2 << 27) | 3 << 22 | 100
            data[12:16] = struct.pack(">I", flags)
            sockets[address].sendto(data, (behind, PORT))
        _, _, bitmap1, flags, values = unpack(sockets[PS].recv(4096))
        assert bitmap1 == 0b111 and flags >> 21 & 1
        assert values == [1 + 2 + 11 + 12 + 21] * VALUES
        sockets[PS].sendto(packet(1, values, bitmap1=0b111, ack=True), (top, PORT))
        for address, _, _ in workers:
            assert unpack(sockets[address].recv(4096))[4] == values

        # A rack's switch may not speak for another rack, nor with more workers than it has.
        foreign = packet(2, [1] * VALUES, bitmap0=1, bitmap1=1 << 1, fan_in0=2)
        beyond = packet(3, [1] * VALUES, bitmap0=1 << 2, bitmap1=1, fan_in0=2)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as uplink:
            uplink.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            uplink.bind((racks[0], 0))
            for refused in (foreign, beyond):
                uplink.sendto(refused, (top, PORT))
        told = until(lambda: _rejected(stubs[top], 2))
        assert told["rejected_bit"] == 2
        assert (told["aggregated"], told["completed"], told["acks"]) == (3, 1, 1)


def _rejected(stub: api_grpc.SwitchAgentStub, count: int) -> dict[str, int] | None:
    told = next(iter(stub.StreamTelemetry(api.TelemetryRequest(period_seconds=1), timeout=15)))
    counters = {item.job_id: dict(item.counters) for item in told.jobs}[JOB]
    return counters if counters["rejected_bit"] >= count else None
