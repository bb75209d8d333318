# SPDX-License-Identifier: Apache-2.0
"""Sidecars as processes over the native transport, on loopback addresses: sums, faults, signals."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from atp_harness import Job, SidecarProcess, assignment, eventually, fetch, loopback_addresses
from prometheus_client.parser import text_string_to_metric_families
from raw_client import GROUP, RawClient


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path, 2) as made:
        yield made


def attach(job: Job) -> list[RawClient]:
    clients = [RawClient(sidecar.socket) for sidecar in job.workers]
    for client in clients:
        client.welcome()
    return clients


def counter(text: str, name: str, **labels: str) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


@pytest.mark.parametrize(
    ("dtype", "code", "size", "values", "expected"),
    [
        ("float32", "f", 4, [0.5, -1.25], [1.0, -2.5]),
        ("int32", "i", 4, [3, -2000000000], [6, -4000000000 + 2**32]),  # wraps as torch does
        ("float16", "H", 2, [0x3C00, 0xC000], [0x4000, 0xC400]),  # 1, -2 -> 2, -4
        ("bfloat16", "H", 2, [0x3F80, 0xC000], [0x4000, 0xC080]),
    ],
)
def test_dtypes(job: Job, dtype: str, code: str, size: int, values: list[float], expected: list[float]) -> None:
    clients = attach(job)
    for client in clients:
        client.write(0, values, code)
        client.submit(1, len(values), dtype=dtype)
    for client in clients:
        client.done(1)
        assert client.read(0, len(values), code) == expected


def test_many_operations_and_what_was_counted(job: Job) -> None:
    clients = attach(job)
    for op in range(50):
        for rank, client in enumerate(clients):
            client.write(op * 4096, [op / 4 + rank] * 500)
            client.submit(op, 500, op * 4096)
    for client in clients:
        client.done(*range(50))
        for op in range(50):
            assert client.read(op * 4096, 500) == [op / 2 + 1] * 500

    def summed() -> int:
        clients[0].send({"type": "stats"})
        stats = clients[0].expect("stats")
        assert stats["gradient_packets"] >= 50 * 9
        # Nothing aggregates here, so the parameter server sums everything. Asked from there, up to 20 ms old.
        assert stats["aggregated_packets"] == 0
        return int(stats["host_summed_packets"])

    eventually(lambda: summed() >= 2 * 50 * 9, what="the count of the parameter server")
    worker, server = fetch(job.workers[0], "/metrics")[1], fetch(job.servers[0], "/metrics")[1]
    assert counter(worker, "atp_operations_total", result="ok") == 50
    assert counter(worker, "atp_gradient_packets_total", role="worker", rank="0") >= 50 * 9
    assert counter(worker, "atp_parts_granted_total", role="worker", rank="0") == 50
    assert counter(server, "atp_host_summed_packets_total", role="parameterServer") >= 2 * 50 * 9


def test_an_empty_operation(job: Job) -> None:
    clients = attach(job)
    for client in clients:
        client.submit(1, 0)
    for client in clients:
        client.done(1)


def test_ranks_that_differ_are_named(job: Job) -> None:
    clients = attach(job)
    clients[0].submit(1, 10)
    clients[1].submit(1, 11)
    for rank, client in enumerate(clients):
        failed = client.expect("failed")
        assert failed["code"] == "Mismatch"
        assert f"rank {1 - rank} has {11 - rank} float32 elements" in failed["message"]
    for client in clients:  # the job goes on
        client.write(0, [1.0])
        client.submit(2, 1)
    for client in clients:
        client.done(2)


def test_values_below_a_fixed_scale_are_counted_and_warned_of_once(job: Job) -> None:
    clients = attach(job)
    for op in range(3):
        for client in clients:
            client.write(op * 4096, [1e-10] * 900 + [1.0] * 100)
            client.submit(op, 1000, op * 4096)
        for client in clients:
            got = [client.receive() for _ in range(2 if op == 0 else 1)]
            assert sorted(each["type"] for each in got) == (["done", "warning"] if op == 0 else ["done"])
            if op == 0:
                text = next(each["text"] for each in got if each["type"] == "warning")
                assert "became 0 at scale 1e8: set spec.scale to Auto" in text
            assert client.read(op * 4096, 1000) == [0.0] * 900 + [2.0] * 100
    for sidecar in job.workers:
        assert "set spec.scale to Auto" in sidecar.event("transport-warning")["text"]
        assert [each["event"] for each in sidecar.events()].count("transport-warning") == 1
        eventually(lambda: counter(fetch(sidecar, "/metrics")[1], "atp_values_rounded_to_zero_total") == 2700)  # noqa: B023


def test_with_scale_auto_small_values_keep_their_precision(tmp_path: Path) -> None:
    with Job(tmp_path, 2, scale="Auto") as job:
        clients = [RawClient(sidecar.socket) for sidecar in job.workers]
        for client in clients:
            assert client.welcome()["scale"] == "Auto"
            client.write(0, [3e-9] * 1000)
            client.write(4096, [float("inf")] + [1e30] * 999)
            client.submit(1, 1000)
            client.submit(2, 1000, 4096)
        for client in clients:
            client.done(1, 2)
            assert all(abs(each / 6e-9 - 1) < 1e-6 for each in client.read(0, 1000))
            values = client.read(4096, 1000)
            assert values[0] == float("inf") and all(abs(each / 2e30 - 1) < 1e-6 for each in values[1:])

        def not_finite() -> int:
            clients[0].send({"type": "stats"})
            return int(clients[0].expect("stats")["values_not_finite"])

        eventually(lambda: not_finite() == 1, what="the count")


def test_a_peer_without_a_trainer_is_named(job: Job) -> None:
    client = RawClient(job.workers[0].socket)
    client.welcome()
    begin = time.monotonic()
    client.submit(1, 1000)
    failed = client.expect("failed")
    assert (failed["code"], failed["broken"]) == ("PeerGone", True)
    assert f"rank 1 ({job.addresses[1]}) has no trainer for 3 s" in failed["message"]
    assert 2 < time.monotonic() - begin < 30
    event = job.workers[0].event("operation-failed")
    assert (event["op"], event["code"], event["count"]) == (1, "PeerGone", 1)
    assert counter(fetch(job.workers[0], "/metrics")[1], "atp_operations_total", result="PeerGone") == 1


def test_a_late_trainer_is_waited_for(job: Job) -> None:
    """Computing for longer than the stall time-out (3 s here) is no fault."""
    clients = attach(job)
    clients[0].write(0, [1.0])
    clients[0].submit(1, 1)
    clients[0].submit(2, 1000, 64)
    time.sleep(7)
    clients[1].write(0, [2.0])
    clients[1].submit(1, 1)
    clients[1].submit(2, 1000, 64)
    for client in clients:
        client.done(1, 2)
        assert client.read(0, 1) == [3.0]


def test_a_silent_sidecar_is_named(job: Job) -> None:
    clients = attach(job)
    clients[0].submit(1, 1000)
    job.workers[1].signal(signal.SIGSTOP)
    try:
        failed = clients[0].expect("failed")
    finally:
        job.workers[1].signal(signal.SIGCONT)
    assert (failed["code"], failed["broken"]) == ("Stalled", True)
    assert f"the sidecar of rank 1 ({job.addresses[1]}) is silent" in failed["message"]
    assert job.workers[0].event("operation-stalled")["op"] == 1


def test_a_sidecar_that_starts_again_ends_the_epoch_at_once(job: Job) -> None:
    clients = attach(job)
    for client in clients:
        client.submit(1, 1000)
    for client in clients:
        client.done(1)
    clients[0].submit(1, 1000)
    begin = time.monotonic()
    job.workers[1].kill()
    job.workers[1].start()
    failed = clients[0].expect("failed")
    assert (failed["code"], failed["broken"]) == ("PeerGone", True), failed
    assert "rank 1" in failed["message"] and "has started again" in failed["message"]
    assert time.monotonic() - begin < 30
    job.assign_all(epoch=2)
    assert clients[0].expect("fatal")["code"] == "Epoch"
    eventually(lambda: all(sidecar.event("gate-opened")["epoch"] == 2 for sidecar in job.workers + job.servers))
    clients = attach(job)
    for client in clients:
        client.write(0, [1.5])
        client.submit(1, 1)
    for client in clients:
        client.done(1)
        assert client.read(0, 1) == [3.0]


def test_a_client_killed_in_an_operation(job: Job) -> None:
    """The other worker learns it at once; the epoch, the sidecars and other groups go on."""
    script = (
        "import sys, time\nsys.path.insert(0, sys.argv[1])\nfrom raw_client import RawClient\n"
        "client = RawClient(sys.argv[2])\nclient.welcome()\nclient.submit(1, 100000)\n"
        "client.send({'type': 'ping'})\nclient.expect('pong')\nprint('in', flush=True)\ntime.sleep(60)\n"
    )
    peer = RawClient(job.workers[1].socket)
    peer.welcome()
    command = [sys.executable, "-c", script, str(Path(__file__).parent), str(job.workers[0].socket)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"in\n"
        peer.submit(2, 1, group=GROUP + 1)
        victim.kill()
    assert job.workers[0].event("client-left")["operationsLeft"] == 1
    peer.submit(1, 100000)
    failed = peer.expect("failed")
    assert failed["code"] == "PeerGone"
    assert "rank 0: its trainer left (connection closed) with 1 operations outstanding" in failed["message"]
    again = RawClient(job.workers[0].socket)
    again.welcome()
    again.submit(2, 1, group=GROUP + 1)
    for client in (again, peer):
        client.done(2)


def test_a_parameter_server_that_dies(job: Job) -> None:
    clients = attach(job)
    job.servers[0].kill()
    for client in clients:
        client.submit(1, 1000)
    for client in clients:
        failed = client.expect("failed")
        assert failed["code"] == "Stalled"
        assert "parameter server" in failed["message"]


def test_shards_share_the_sequences(tmp_path: Path) -> None:
    """Four parameter servers: each answers its quarter, and together they answer all; totals add them up."""
    with Job(tmp_path, 2, servers=4) as job:
        clients = attach(job)
        for op in range(8):
            for rank, client in enumerate(clients):
                client.write(op * 65536, [op + rank / 2] * 10000)
                client.submit(op, 10000, op * 65536)
        for client in clients:
            client.done(*range(8))
            for op in range(8):
                assert client.read(op * 65536, 10000) == [2 * op + 0.5] * 10000
        packets = 8 * 163  # one descriptor and ceil(10000 / 62) packets of values an operation

        def shares() -> bool:
            # Each shard's figures are up to 20 ms old, and packets that were sent again count too.
            texts = [fetch(server, "/metrics")[1] for server in job.servers]
            counts = [counter(text, "atp_gradient_packets_total", rank=str(i)) for i, text in enumerate(texts)]
            return sum(counts) >= 2 * packets and min(counts) >= 2 * (packets // 4)

        def summed() -> bool:
            clients[0].send({"type": "stats"})
            return bool(clients[0].expect("stats")["host_summed_packets"] >= 2 * packets)

        eventually(shares, what="all gradients counted")
        eventually(summed, what="the job's total")

        job.servers[2].kill()
        for client in clients:
            client.submit(99, 10000)
        for client in clients:
            failed = client.expect("failed")
            assert failed["code"] == "Stalled" and job.addresses[4] in failed["message"], "the shard that died is named"


def test_sigterm_ends_at_once_and_cleans_up(job: Job) -> None:
    client = RawClient(job.workers[0].socket)
    welcome = client.welcome()
    client.submit(1, 1000)
    begin = time.monotonic()
    assert job.workers[0].stop() == 0
    assert time.monotonic() - begin < 8
    assert client.expect("failed")["code"] == "Shutdown"
    assert client.expect("fatal")["code"] == "Shutdown"
    assert not Path(welcome["shm"]).exists()
    assert [event["event"] for event in job.workers[0].events()][-1] == "stopped"
    assert job.servers[0].stop() == 0


def test_a_restarted_sidecar_serves_again(job: Job) -> None:
    first = job.workers[0]
    client = RawClient(first.socket)
    client.welcome()
    first.kill()
    assert client.at_end()
    first.start()
    eventually(lambda: [event["event"] for event in first.events()].count("gate-opened") == 2)
    assert first.event("leftovers-removed")["files"] == 1
    assert RawClient(first.socket).welcome()["rank"] == 0


def test_gate_over_the_life_of_a_process(tmp_path: Path) -> None:
    with Job(tmp_path, 1, gate=False) as job:
        client = RawClient(job.workers[0].socket)
        assert client.receive()["type"] == "waiting"
        job.workers[0].assign("{")
        assert "not valid" in job.workers[0].event("assignment-refused")["reason"]
        job.assign_all()
        assert client.welcome()["worldSize"] == 1
        client.write(0, [2.5])
        client.submit(1, 1)
        client.done(1)
        assert client.read(0, 1) == [2.5]
        job.assign_all(revision=2, mode="Shared", regions=[{"start": 0, "size": 8}])
        eventually(lambda: "more than mode and revision" in job.workers[0].event("assignment-refused")["reason"])


def test_trainers_do_not_connect_to_a_parameter_server(job: Job) -> None:
    client = RawClient(job.servers[0].socket)
    assert "parameter server" in client.expect("fatal")["message"]


def test_an_address_that_is_not_ours_keeps_the_gate_closed(tmp_path: Path) -> None:
    document = assignment(["192.0.2.1", *loopback_addresses(1)])
    sidecar = SidecarProcess(tmp_path / "w", "worker", document)
    try:
        assert "the transport cannot start" in sidecar.event("transport-failed")["reason"]
        assert fetch(sidecar, "/readyz")[0] == 503
    finally:
        sidecar.stop()


def test_pod_ip_is_checked(tmp_path: Path) -> None:
    document = assignment(loopback_addresses(2))
    sidecar = SidecarProcess(tmp_path / "w", "worker", document, POD_IP="10.1.2.3")
    try:
        assert "this pod has 10.1.2.3" in sidecar.event("assignment-refused")["reason"]
    finally:
        sidecar.stop()


def _command(*arguments: str, **environment: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "atp_sidecar", *arguments],
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def test_park_waits_for_sigterm_and_loads_little() -> None:
    with _command("park") as process:
        try:

            def waits() -> bool:
                # rt_sigtimedwait: 128 on x86-64, 137 on arm64.
                return Path(f"/proc/{process.pid}/syscall").read_text().split()[0] in ("128", "137")

            eventually(waits, what="park")
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            assert "pydantic_core" not in maps
            assert "atp_transport" not in maps
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(5) == 0
        finally:
            process.kill()


def test_a_probe_that_comes_before_the_sidecar_is_up_waits_and_does_not_fail(tmp_path: Path) -> None:
    """As on a busy node: importing takes its time, and the kubelet's first probe comes meanwhile."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\n"
        "class Slow:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        time.sleep(3 if name == 'pydantic' else 0)\n"
        "sys.meta_path.insert(0, Slow())\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    sidecar = SidecarProcess(tmp_path / "w", "worker", None, "127.0.0.1", port, PYTHONPATH=str(tmp_path))
    try:

        def connect() -> socket.socket | None:
            with contextlib.suppress(ConnectionRefusedError):
                return socket.create_connection(("127.0.0.1", port), 10)
            return None

        with eventually(connect, what="listening") as probe:
            assert sidecar.events() == [], "it is not up yet"
            probe.settimeout(30)
            probe.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert probe.recv(100).startswith(b"HTTP/1.1 200 OK")
        sidecar.event("started")
    finally:
        sidecar.stop()


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with _command("run", "--metrics-host", "127.0.0.1", "--metrics-port", port, ATP_ROLE="worker") as process:
            output, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    line = json.loads(output.splitlines()[-1])
    assert line["event"] == "cannot-start" and f"127.0.0.1 port {port}" in line["reason"]


def test_role_is_required() -> None:
    with _command("run", ATP_ROLE="chief") as process:
        _, error = process.communicate(timeout=30)
        assert process.returncode == 2
        assert b"ATP_ROLE is 'chief'; it must be worker or parameterServer" in error


def test_a_second_sidecar_on_the_same_socket_is_refused(job: Job) -> None:
    arguments = ["run", "--socket", str(job.workers[0].socket), "--metrics-port", "0"]
    with _command(*arguments, ATP_ROLE="worker") as process:
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 1
        assert "another sidecar serves" in json.loads(output.splitlines()[-1])["reason"]


def test_the_sidecar_imports_neither_torch_nor_numpy(job: Job) -> None:
    for sidecar in [*job.workers, *job.servers]:
        maps = Path(f"/proc/{sidecar.pid}/maps").read_text()
        assert "torch/lib" not in maps
        assert "numpy" not in maps
