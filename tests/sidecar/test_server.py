# SPDX-License-Identifier: Apache-2.0
"""The unix socket: real sockets and files, sidecars in this process over a loopback hub."""

import concurrent.futures
import contextlib
import http.client
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from atp_harness import LoopbackHub, SidecarThread, assignment, eventually, fetch, loopback_addresses, sidecar_threads
from raw_client import RawClient

from atp_sidecar.server import INITIAL_SEGMENT_BYTES


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[SidecarThread]]:
    with sidecar_threads(tmp_path, 2) as sidecars:
        yield sidecars


@pytest.fixture
def single(tmp_path: Path) -> Iterator[SidecarThread]:
    with sidecar_threads(tmp_path, 1) as sidecars:
        yield sidecars[0]


def test_welcome_and_files(single: SidecarThread) -> None:
    client = RawClient(single.socket)
    welcome = client.welcome()
    assert {**welcome, "shm": "", "masterAddress": ""} == {
        "type": "welcome", "rank": 0, "worldSize": 1, "job": "team-a/digits", "epoch": 1, "mode": "HostOnly",
        "masterAddress": "", "shm": "", "shmBytes": INITIAL_SEGMENT_BYTES,
    }  # fmt: skip
    assert welcome["masterAddress"].startswith("127.")
    assert Path(welcome["shm"]).parent == single.socket.parent
    assert stat.S_IMODE(Path(welcome["shm"]).stat().st_mode) == 0o666
    assert stat.S_IMODE(single.socket.stat().st_mode) == 0o666
    client.send({"type": "bye"})
    assert client.at_end()
    eventually(lambda: not Path(welcome["shm"]).exists(), what="removal of the shared file")


@pytest.mark.parametrize("kind", ["sum", "mean"])
def test_all_reduce(pair: list[SidecarThread], kind: str) -> None:
    clients = [RawClient(sidecar.socket) for sidecar in pair]
    for rank, client in enumerate(clients):
        client.welcome()
        client.write(64, [1.0 + rank, 10.0 * rank])
        client.submit(7, 2, 64, kind)
    for client in clients:
        assert client.expect("done") == {"type": "done", "op": 7}
        assert client.read(64, 2) == ([3.0, 10.0] if kind == "sum" else [1.5, 5.0])


def test_several_clients_of_one_pod_share_the_order(pair: list[SidecarThread]) -> None:
    clients = [[RawClient(sidecar.socket) for _ in range(2)] for sidecar in pair]
    for group in clients:
        for client in group:
            client.welcome()
    for op in range(20):
        for rank in range(2):
            for number in range(2):
                clients[rank][number].write(0, [op + 100.0 * number])
                clients[rank][number].submit(op, 1)
                # The other client of this pod submits next; its order is settled once this one is known.
                if number == 0:
                    clients[rank][number].send({"type": "stats"})
                    clients[rank][number].expect("stats") if rank == 0 else None
        for rank in range(2):
            for number in range(2):
                client = clients[rank][number]
                message = client.receive()
                while message["type"] == "stats":
                    message = client.receive()
                assert message == {"type": "done", "op": op}
                assert client.read(0, 1) == [2 * (op + 100.0 * number)]


def test_waiting_is_announced_with_its_reason(tmp_path: Path) -> None:
    hub = LoopbackHub()
    sidecar = SidecarThread(tmp_path / "w", hub, None)
    try:
        sidecar.event("started")
        client = RawClient(sidecar.socket)
        for _ in range(2):
            message = client.receive()
            assert message["type"] == "waiting"
            assert "atp.dev/assignment is empty" in message["reason"]
        assert fetch(sidecar, "/readyz")[0] == 503
        assert fetch(sidecar, "/healthz") == (200, "ok\n")
        early = RawClient(sidecar.socket)
        early.expect("waiting")
        early.close()  # leaves before the gate opens
        sidecar.assign(assignment(loopback_addresses(2)))
        assert client.welcome()["worldSize"] == 1
        assert fetch(sidecar, "/readyz")[0] == 200
    finally:
        sidecar.stop()


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"type": "submit", "op": 1, "kind": "max", "dtype": "float32", "offset": 0, "count": 1}, '"kind" must be'),
        ({"type": "submit", "op": 1, "kind": "sum", "dtype": "int64", "offset": 0, "count": 1}, '"dtype" must be'),
        ({"type": "submit", "op": 1, "kind": "sum", "dtype": "float32", "offset": 2, "count": 1}, "not a multiple"),
        ({"type": "submit", "op": 1, "kind": "sum", "dtype": "float32", "offset": 0, "count": -1}, '"count" must be'),
        (
            {"type": "submit", "op": 1, "kind": "sum", "dtype": "float32", "offset": 0, "count": 1 << 40},
            "not inside the shared file",
        ),
        ({"type": "submit", "op": True, "kind": "sum", "dtype": "float32", "offset": 0, "count": 1}, '"op" must be'),
        ({"type": "resize", "bytes": 0}, '"bytes" must be'),
        ({"type": "dance"}, "unknown message type 'dance'"),
    ],
)
def test_a_client_that_breaks_the_protocol_is_told_and_dropped(
    single: SidecarThread, message: dict[str, Any], words: str
) -> None:
    client = RawClient(single.socket)
    client.welcome()
    client.send(message)
    fatal = client.expect("fatal")
    assert fatal["code"] == "Protocol"
    assert words in fatal["message"]
    assert client.at_end()
    again = RawClient(single.socket)
    assert again.welcome()["rank"] == 0


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"type": "hello", "version": 2, "pid": 1, "client": "x"}, "install atp-client and the sidecar image"),
        ({"type": "submit"}, "the first message must be hello"),
    ],
)
def test_bad_hello(single: SidecarThread, message: dict[str, Any], words: str) -> None:
    client = RawClient(single.socket, hello=False)
    client.send(message)
    assert words in client.expect("fatal")["message"]
    assert client.at_end()


def test_bytes_that_are_no_frame_end_the_connection_only(single: SidecarThread) -> None:
    client = RawClient(single.socket)
    client.welcome()
    client.socket.sendall(b"\xff" * 100)
    assert client.at_end()
    assert RawClient(single.socket).welcome()["rank"] == 0


def test_resize(single: SidecarThread) -> None:
    client = RawClient(single.socket)
    first = client.welcome()
    client.send({"type": "resize", "bytes": INITIAL_SEGMENT_BYTES + 1})
    resized = client.expect("resized")
    assert "error" not in resized
    assert resized["shmBytes"] == INITIAL_SEGMENT_BYTES + 4096
    assert not Path(first["shm"]).exists()
    client.map(resized)
    client.write(INITIAL_SEGMENT_BYTES, [5.0])
    client.submit(1, 1, INITIAL_SEGMENT_BYTES)
    client.expect("done")
    assert client.read(INITIAL_SEGMENT_BYTES, 1) == [5.0]


def test_resize_without_room_keeps_the_file(single: SidecarThread) -> None:
    client = RawClient(single.socket)
    first = client.welcome()
    client.send({"type": "resize", "bytes": 1 << 41})
    resized = client.expect("resized")
    assert "exceed" in resized["error"]
    assert (resized["shm"], resized["shmBytes"]) == (first["shm"], first["shmBytes"])


def test_resize_with_an_operation_in_flight(pair: list[SidecarThread]) -> None:
    client = RawClient(pair[0].socket)
    client.welcome()
    client.submit(1, 1)
    client.send({"type": "resize", "bytes": 1 << 23})
    assert "1 operations are in flight" in client.expect("fatal")["message"]


def test_a_client_that_dies_in_an_operation_breaks_the_epoch_not_the_sidecar(pair: list[SidecarThread]) -> None:
    client = RawClient(pair[0].socket)
    welcome = client.welcome()
    client.submit(1, 1)
    client.send({"type": "stats"})
    client.expect("stats")
    client.close()
    assert pair[0].event("operations-cancelled")["left"] == 1
    assert pair[0].event("client-left")["operationsLeft"] == 1
    eventually(lambda: not Path(welcome["shm"]).exists())
    again = RawClient(pair[0].socket)
    again.welcome()
    again.submit(2, 1)
    failed = again.expect("failed")
    assert failed["code"] == "PeerGone"
    assert "the job has to be restarted" in failed["message"]
    assert '"epochBroken": "the trainer of worker 0' in fetch(pair[0], "/status")[1]


def test_a_client_that_leaves_between_operations_breaks_nothing(pair: list[SidecarThread]) -> None:
    for value in (1.0, 2.0):
        clients = [RawClient(sidecar.socket) for sidecar in pair]
        for client in clients:
            client.welcome()
            client.write(0, [value])
            client.submit(0, 1)
        for client in clients:
            client.expect("done")
            assert client.read(0, 1) == [2 * value]
            client.close()


def test_a_new_epoch_ends_the_clients(tmp_path: Path) -> None:
    hub = LoopbackHub()
    addresses = loopback_addresses(3)
    sidecar = SidecarThread(tmp_path / "w", hub, assignment(addresses))
    try:
        sidecar.event("gate-opened")
        client = RawClient(sidecar.socket)
        client.welcome()
        client.submit(1, 1)
        client.send({"type": "stats"})
        client.expect("stats")
        sidecar.assign(assignment(addresses, epoch=2))
        failed = client.expect("failed")
        assert (failed["op"], failed["code"]) == (1, "Epoch")
        fatal = client.expect("fatal")
        assert fatal["code"] == "Epoch"
        assert "from epoch 1 to 2" in fatal["message"]
        assert client.at_end()
        assert RawClient(sidecar.socket).welcome()["epoch"] == 2
    finally:
        sidecar.stop()


def test_stopping_tells_the_clients_and_removes_the_files(tmp_path: Path) -> None:
    with sidecar_threads(tmp_path, 1) as sidecars:
        client = RawClient(sidecars[0].socket)
        welcome = client.welcome()
        sidecars[0].stop()
        assert client.expect("fatal")["code"] == "Shutdown"
        assert not Path(welcome["shm"]).exists()
        assert not sidecars[0].socket.exists()


def test_leftovers_of_a_killed_sidecar_are_removed(tmp_path: Path) -> None:
    run = tmp_path / "w" / "run"
    run.mkdir(parents=True)
    (run / "shm-1-0").write_bytes(b"x")
    (run / "atp.sock").write_bytes(b"")
    sidecar = SidecarThread(tmp_path / "w", LoopbackHub(), assignment(loopback_addresses(2)))
    try:
        sidecar.event("gate-opened")
        assert not (run / "shm-1-0").exists()
        assert RawClient(sidecar.socket).welcome()["rank"] == 0
    finally:
        sidecar.stop()


def test_http(single: SidecarThread) -> None:
    assert "atp_gate_open" in fetch(single, "/metrics")[1]
    assert '"gateOpen": true' in fetch(single, "/status")[1]
    status, body = fetch(single, "/nothing")
    assert status == 404
    assert "/healthz /metrics /readyz /status" in body
    assert fetch(single, "/readyz?wait=soon")[0] == 400


def test_readiness_is_held_back_until_the_gate_opens(tmp_path: Path) -> None:
    sidecar = SidecarThread(tmp_path / "w", LoopbackHub(), None)
    try:
        sidecar.event("started")
        begin = time.monotonic()
        status, text = fetch(sidecar, "/readyz?wait=0.5")
        assert status == 503 and "gate closed" in text and time.monotonic() - begin >= 0.5
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(fetch, sidecar, "/readyz?wait=30")
            with pytest.raises(concurrent.futures.TimeoutError):
                waiting.result(0.5)
            assert fetch(sidecar, "/healthz")[0] == 200, "others are served meanwhile"
            sidecar.assign(assignment(loopback_addresses(2)))
            begin = time.monotonic()
            assert waiting.result(25) == (200, "ok\n")
            assert time.monotonic() - begin < 15
    finally:
        sidecar.stop()


def test_who_waits_for_readiness_does_not_hold_up_the_end(tmp_path: Path) -> None:
    sidecar = SidecarThread(tmp_path / "w", LoopbackHub(), None)
    sidecar.event("started")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fetch, sidecar, "/readyz?wait=60")
        with pytest.raises(concurrent.futures.TimeoutError):
            waiting.result(0.5)
        begin = time.monotonic()
        sidecar.stop()
        assert time.monotonic() - begin < 10
        with contextlib.suppress(OSError, http.client.HTTPException):
            waiting.result(10)
