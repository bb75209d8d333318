# SPDX-License-Identifier: Apache-2.0
"""The session protocol against real sidecars: what it promises, and what clients that break it get."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import itertools
import json
import os
import re
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from atp_harness import Job, SidecarProcess, assignment, eventually, fetch, loopback_addresses
from raw_client import GROUP, PART_BYTES, RawClient

INITIAL_SEGMENT_BYTES = 4 << 20
ROOM = PART_BYTES // 4
_groups = itertools.count(GROUP + 1000)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with Job(tmp_path_factory.mktemp("pair"), 2) as job:
        yield job


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    with Job(tmp_path_factory.mktemp("single"), 1) as job:
        yield job.workers[0]


@pytest.fixture
def group() -> int:
    """The number of a group that nobody used before."""
    return next(_groups)


def attach(job: Job) -> list[RawClient]:
    clients = [RawClient(sidecar.socket) for sidecar in job.workers]
    for client in clients:
        client.welcome()
    return clients


def works(clients: list[RawClient], group: int) -> None:
    """An all-reduce of these clients in this group gives the sum."""
    for client in clients:
        client.write(64, [1.5])
        client.submit(4711, 1, 64, group=group)
    for client in clients:
        client.done(4711)
        assert client.read(64, 1) == [1.5 * len(clients)]


def test_welcome_and_files(single: SidecarProcess) -> None:
    client = RawClient(single.socket)
    welcome = client.welcome()
    assert {**welcome, "shm": "", "masterAddress": "", "session": 0} == {
        "type": "welcome", "rank": 0, "worldSize": 1, "job": "team-a/digits", "epoch": 1, "mode": "HostOnly",
        "masterAddress": "", "scale": 1e8, "session": 0, "segment": 0, "shm": "", "shmBytes": INITIAL_SEGMENT_BYTES,
        "stallTimeoutSeconds": 3,
    }  # fmt: skip
    assert welcome["masterAddress"].startswith("127.")
    assert Path(welcome["shm"]).parent == single.socket.parent
    assert stat.S_IMODE(Path(welcome["shm"]).stat().st_mode) == 0o666
    assert stat.S_IMODE(single.socket.stat().st_mode) == 0o666
    other = RawClient(single.socket)
    assert other.welcome()["session"] == welcome["session"] + 1
    client.send({"type": "bye"})
    assert client.at_end()
    eventually(lambda: not Path(welcome["shm"]).exists(), what="removal of the shared file")
    assert single.event("client-left")["reason"] == "bye"


@pytest.mark.parametrize("kind", ["sum", "mean"])
@pytest.mark.parametrize("count", [1, 2, 65, 1000, ROOM, 2 * ROOM + 3])
def test_all_reduce(pair: Job, group: int, kind: str, count: int) -> None:
    clients = attach(pair)
    for rank, client in enumerate(clients):
        client.write(0, [1.0 + rank] * (count - 1) + [10.0 * rank])
        parts = client.submit(7, count, 0, kind, group=group)
    for client in clients:
        client.done(*range(7, 7 + parts))
        expected = [3.0] * (count - 1) + [10.0]
        assert client.read(0, count) == [each / (2 if kind == "mean" else 1) for each in expected]


def test_groups_have_an_order_of_their_own(pair: Job) -> None:
    """What one rank starts first may be last at the other, within one trainer and between two of a pod."""
    groups = [next(_groups) for _ in range(6)]
    clients = [attach(pair), attach(pair)]
    for rank in range(2):
        for at in range(len(groups)):
            number = at if rank == 0 else len(groups) - 1 - at
            client = clients[number % 2][rank]
            for op in range(3):
                client.write(4096 * (10 * number + op), [100.0 * number + op + rank] * 300)
                client.submit(10 * number + op, 300, 4096 * (10 * number + op), group=groups[number])
    for half in range(2):
        for rank in range(2):
            client = clients[half][rank]
            client.done(*(10 * number + op for number in range(half, len(groups), 2) for op in range(3)))
            for number in range(half, len(groups), 2):
                for op in range(3):
                    expected = [2 * (100.0 * number + op) + 1] * 300
                    assert client.read(4096 * (10 * number + op), 300) == expected


def test_a_group_that_waits_holds_up_no_other(pair: Job, group: int) -> None:
    clients = attach(pair)
    clients[0].submit(1, 100, 8192, group=group)
    for _ in range(3):
        works(clients, next(_groups))
    clients[1].submit(1, 100, 8192, group=group)
    for client in clients:
        client.done(1)


def test_a_tensor_is_one_operation(pair: Job, group: int) -> None:
    """3 MiB and 1 MiB are not 4 MiB; afterwards the ranks are in step again."""
    clients = attach(pair)
    clients[0].submit(1, 3 * ROOM, group=group)
    clients[0].submit(10, ROOM, 3 * PART_BYTES, group=group)
    clients[1].submit(1, 4 * ROOM, group=group)
    for rank, parts in ((0, 3), (1, 4)):
        texts = [clients[rank].expect("failed") for _ in range(parts)]
        assert {text["code"] for text in texts} == {"Mismatch"} and not any(text["broken"] for text in texts)
        assert {text["op"] for text in texts} == set(range(1, 1 + parts)), "every part comes back"
        words = f"rank {1 - rank} has {(4 - rank) * ROOM if rank == 0 else 3 * ROOM} float32 elements"
        assert words in texts[0]["message"], texts[0]
    clients[1].submit(10, ROOM, 0, group=group)
    for client in clients:
        client.done(10)
    works(clients, group)


def test_many_small_operations_outstanding(pair: Job, group: int) -> None:
    """More than the coordinator takes of one rank at a time; and another group gets through meanwhile."""
    count = 70_000
    clients = attach(pair)
    for op in range(count):
        clients[0].submit(op, 1, op % 60_000 * 64, group=group)
    other = next(_groups)
    for client in clients:
        client.submit(1_000_000, 1, 0, group=other)
    for client in clients:
        client.done(1_000_000)
    done: list[int] = []
    for op in range(count):
        clients[1].submit(op, 1, op % 60_000 * 64, group=group)
        if op % 1000 == 999:
            done += [clients[1].expect("done")["op"] for _ in range(op + 1 - len(done))]
    assert done == list(range(count))
    clients[0].done(*range(count))


def test_waiting_is_announced_with_its_reason(tmp_path: Path) -> None:
    sidecar = SidecarProcess(tmp_path / "w", "worker", None)
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
        hasty = RawClient(sidecar.socket)
        hasty.expect("waiting")
        hasty.send({"type": "stats"})
        assert "came before the welcome" in hasty.expect("fatal")["message"]
        sidecar.assign(assignment(loopback_addresses(2)))
        assert client.welcome()["worldSize"] == 1
        assert fetch(sidecar, "/readyz")[0] == 200
    finally:
        sidecar.stop()


MIB = 1 << 20


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": 4}, "dtype must be 0..3"),
        ({"kind": 2}, "kind must be 0"),
        ({"dtype": 3, "kind": 1}, "mean of int32 is not defined"),
        ({"segment": 1}, "there is no segment 1"),
        ({"offset": 4}, "offset 4 is not a multiple of 64"),
        ({"offset": INITIAL_SEGMENT_BYTES}, "are not inside segment 0 of 4194304 bytes"),
        ({"offset": 2**64 - 64}, "are not inside segment 0"),
        ({"count": 2**32 - 1, "total": 2**32 - 1}, "are not inside segment 0"),
        ({"number": 1}, "operation 1 of group {group} is out of order: number 0 was expected"),
        ({"number": 2**64 - 1}, "out of order"),
        ({"begin": 1}, "elements 1 to 5 of operation 0 of group {group}: 0 to 4 were expected"),
        ({"total": 5}, "0 to 5 were expected"),
        ({"total": 3}, "0 to 3 were expected"),
        ({"type": 9}, "a frame begins with 9"),
    ],
)
def test_a_submit_that_cannot_be(single: SidecarProcess, group: int, changes: dict[str, int], words: str) -> None:
    client = RawClient(single.socket)
    client.welcome()
    client.submit(1, 4, group=group, changes=changes)
    fatal = client.expect("fatal")
    assert fatal["code"] == "Protocol"
    assert words.format(group=hex(group)) in fatal["message"]
    assert client.at_end()
    assert RawClient(single.socket).welcome()["rank"] == 0
    eventually(lambda: words.format(group=hex(group)) in single.event("client-refused")["reason"])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"type": "grow", "bytes": 0}, '"bytes" must be an integer of at least 1, not 0'),
        ({"type": "grow"}, '"bytes" must be an integer of at least 1, not missing'),
        ({"type": "grow", "bytes": True}, "not true"),
        ({"type": "grow", "bytes": 2**64}, '"bytes" must be'),
        ({"type": "abort", "group": 1, "code": "Tired", "reason": ""}, 'code "Tired" is unknown'),
        ({"type": "abort", "group": -1, "code": "Timeout", "reason": ""}, '"group" must be'),
        ({"type": "abort", "group": 1, "code": "Timeout"}, '"reason" must be a text'),
        ({"type": "leave", "group": "x"}, '"group" must be'),
        ({"type": "dance"}, 'unknown message type "dance"'),
        ({"kind": "ping"}, 'not a JSON object with a "type"'),
        (b'{"type":"ping"', "not a JSON object"),
        (b'{"type":' + b"[" * 200_000, "not a JSON object"),
        (b'{"type":"\xff"}', "not a JSON object"),
        (b"[1]", "a frame begins with 91"),
        (b"\1" + bytes(62), "the body has 63 bytes, not 64"),
        (b"", "a frame is empty"),
    ],
)
def test_a_message_that_cannot_be(single: SidecarProcess, message: dict[str, Any] | bytes, words: str) -> None:
    client = RawClient(single.socket)
    client.welcome()
    client.send(message)
    fatal = client.expect("fatal")
    assert fatal["code"] == "Protocol"
    assert words in fatal["message"]
    assert client.at_end()


def test_frames_are_bounded_and_what_they_quote_too(single: SidecarProcess) -> None:
    client = RawClient(single.socket)
    client.welcome()
    client.send(b'{"type":"' + b"x" * 1_000_000 + b'"}')
    assert len(client.expect("fatal")["message"]) < 2000
    client = RawClient(single.socket)
    client.welcome()
    client.socket.sendall(struct.pack(">I", MIB + 1))
    assert "a frame of 1048577 bytes exceeds 1048576" in client.expect("fatal")["message"]


def test_a_handle_is_used_once_at_a_time(pair: Job, group: int) -> None:
    client = attach(pair)[0]
    client.submit(1, 1, group=group)
    client.submit(1, 1, 64, group=group)
    assert "operation 1 is outstanding already" in client.expect("fatal")["message"]


def test_a_group_belongs_to_one_trainer_of_a_pod(pair: Job, group: int) -> None:
    clients, others = attach(pair), attach(pair)
    works(clients, group)
    others[0].submit(1, 1, group=group)
    assert "belongs to another trainer of this pod" in others[0].expect("fatal")["message"]
    others[1].send({"type": "leave", "group": group})
    assert "belongs to another trainer of this pod" in others[1].expect("fatal")["message"]
    works(clients, group)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"type": "hello", "version": 1, "pid": 1, "client": "x"}, "install atp-client and the sidecar image"),
        ({"type": "submit"}, "the first message must be hello"),
        (b"\xff", "not JSON"),
    ],
)
def test_bad_hello(single: SidecarProcess, message: dict[str, Any] | bytes, words: str) -> None:
    client = RawClient(single.socket, hello=False)
    client.send(message)
    assert words in client.expect("fatal")["message"]
    assert client.at_end()


def test_bytes_that_are_no_frame_end_the_connection_only(single: SidecarProcess) -> None:
    client = RawClient(single.socket)
    client.welcome()
    client.socket.sendall(b"\xff" * 100)
    assert client.expect("fatal")["code"] == "Protocol"
    assert client.at_end()
    assert RawClient(single.socket).welcome()["rank"] == 0


def test_one_byte_at_a_time(single: SidecarProcess, group: int) -> None:
    client = RawClient(single.socket)
    client.welcome()
    body = b'{"type":"ping"}'
    for byte in struct.pack(">I", len(body)) + body:
        client.socket.sendall(bytes([byte]))
        time.sleep(0.002)
    client.expect("pong")
    works([client], group)


def test_grow(pair: Job, group: int) -> None:
    clients = attach(pair)
    clients[0].submit(1, 5, group=group)  # may be asked at any time
    for client in clients:
        first = client.shm
        client.send({"type": "grow", "bytes": 5 << 20})
        client.send({"type": "grow", "bytes": 1})
        for number, size in ((1, 5 << 20), (2, 4096)):
            segment = client.expect("segment")
            assert (segment["segment"], segment["shmBytes"]) == (number, size)
            client.map(segment)
        assert Path(first).exists()
    clients[1].submit(1, 5, group=group)
    for client in clients:
        client.done(1)
    for rank, client in enumerate(clients):
        client.write(0, [1.0 + rank] * ROOM, segment=1)
        client.write(64, [5.0], segment=2)
        client.submit(1, 5 * ROOM, 0, group=group, segment=1)
        client.submit(9, 1, 64, group=group, segment=2)
    for client in clients:
        client.done(1, 2, 3, 4, 5, 9)
        assert client.read(0, ROOM, segment=1) == [3.0] * ROOM
        assert client.read(64, 1, segment=2) == [10.0]
        files = list(Path(client.shm).parent.glob("shm-*"))
        client.close()
    assert len(files) >= 3
    eventually(lambda: not any(Path(client.shm).exists() for client in clients))


def test_grow_without_room(single: SidecarProcess, group: int) -> None:
    client = RawClient(single.socket)
    client.welcome()
    client.send({"type": "grow", "bytes": 1 << 41})
    answer = client.expect("segment")
    assert "exceed the largest segment" in answer["error"] and "segment" not in answer
    assert single.event("grow-refused")["bytes"] == 1 << 41
    works([client], group)


def test_ping_and_stats(pair: Job, group: int) -> None:
    clients = attach(pair)
    clients[0].send({"type": "ping"})
    clients[0].expect("pong")
    works(clients, group)
    clients[0].send({"type": "stats"})
    stats = clients[0].expect("stats")
    assert (stats["job"], stats["epoch"], stats["world_size"], stats["scale"]) == ("team-a/digits", 1, 2, 1e8)
    assert stats["operations"]["ok"] >= 1 and stats["sessions"] >= 1 and stats["inline_operations"] >= 1


def test_a_client_that_dies_breaks_its_groups_and_nothing_else(pair: Job, group: int) -> None:
    clients, others = attach(pair), attach(pair)
    idle, welcome = next(_groups), clients[0].shm
    works(clients, idle)
    shared = next(_groups)
    works(others, shared)
    for client in clients:
        client.submit(1, 3 * ROOM, group=group)
    for client in clients:
        client.done(1, 2, 3)
    clients[0].submit(5, 3 * ROOM, group=group)
    clients[0].send({"type": "ping"})
    clients[0].expect("pong")
    clients[0].close()

    def logged() -> bool:
        return any(e["event"] == "operations-cancelled" and e["left"] == 3 for e in pair.workers[0].events())

    eventually(logged, what="the event")
    eventually(lambda: not Path(welcome).exists())
    for number in (group, idle):
        clients[1].submit(9, 1, group=number)
        failed = clients[1].expect("failed")
        assert (failed["code"], failed["broken"], failed["group"]) == ("PeerGone", True, number)
        assert "rank 0: its trainer left (connection closed) with 3 operations outstanding" in failed["message"]
    works(others, shared)
    again = RawClient(pair.workers[0].socket)
    again.welcome()
    works([again, clients[1]], next(_groups))


def test_a_client_that_dies_while_its_part_is_summed(pair: Job, group: int) -> None:
    """The sidecar finishes from the shared memory: the other rank gets the sum, or a clear error, and all go on."""
    for _ in range(5):
        clients = attach(pair)
        number = next(_groups)
        for client in clients:
            client.write(0, [1.0] * ROOM)
        clients[0].submit(1, 4 * ROOM, group=number)
        clients[1].submit(1, 4 * ROOM, group=number)
        clients[0].close()
        for _ in range(4):
            message = clients[1].receive()
            assert message["type"] == "done" or message["code"] == "PeerGone", message
        clients[1].close()
    works(attach(pair), group)


def test_a_client_that_leaves_between_operations_breaks_nothing(pair: Job) -> None:
    for bye in (True, False):
        clients = attach(pair)
        works(clients, next(_groups))
        for client in clients:
            if bye:
                client.send({"type": "bye"})
                assert client.at_end()
            client.close()


def test_a_rank_that_left_the_group_is_not_waited_for(pair: Job, group: int) -> None:
    clients = attach(pair)
    works(clients, group)
    clients[0].send({"type": "leave", "group": group})
    clients[1].submit(1, 1, group=group)
    failed = clients[1].expect("failed")
    assert failed["code"] == "PeerGone" and "rank 0 has left the process group" in failed["message"]
    works(clients, next(_groups))
    clients[0].submit(1, 1, group=group, changes={"number": 0})  # for this client the group is over
    message = clients[0].receive()
    assert message["type"] in ("failed", "done")


def test_leaving_with_operations_outstanding_fails_them(pair: Job, group: int) -> None:
    clients = attach(pair)
    clients[0].submit(1, 1, group=group)
    clients[0].send({"type": "leave", "group": group})
    assert clients[0].expect("failed")["op"] == 1
    clients[0].send({"type": "ping"})
    clients[0].expect("pong")


def test_abort_breaks_the_group_at_every_rank(pair: Job, group: int) -> None:
    clients = attach(pair)
    works(clients, group)
    for op in (1, 2):
        clients[0].submit(op, 100, op * 4096, group=group)
    clients[0].send({"type": "abort", "group": group, "code": "Timeout", "reason": "the time-out of 7 s is over"})
    for op in (1, 2):
        failed = clients[0].expect("failed")
        assert (failed["op"], failed["code"], failed["broken"]) == (op, "Timeout", True)
    for client in clients:
        client.submit(3, 1, group=group)
        failed = client.expect("failed")
        assert (failed["code"], failed["broken"]) == ("Timeout", True)
        assert "rank 0: the time-out of 7 s is over" in failed["message"]
    works(clients, next(_groups))

    def logged() -> int:
        events = [e for e in pair.workers[0].events() if e["event"] == "operation-failed" and e["group"] == group]
        assert all(each["code"] == "Timeout" for each in events)
        return sum(each["count"] for each in events)

    eventually(lambda: logged() == 3, what="the events")


def test_a_client_that_reads_nothing_is_cut_off(pair: Job, group: int) -> None:
    clients = attach(pair)
    deaf = RawClient(pair.workers[0].socket)
    deaf.welcome()
    body = b'{"type":"ping"}'
    frames = (struct.pack(">I", len(body)) + body) * 10_000
    with pytest.raises(ConnectionError):
        for _ in range(200):
            deaf.socket.sendall(frames)
    assert "does not read" in pair.workers[0].event("client-cut-off")["reason"]
    works(clients, group)


def test_a_client_may_change_and_shrink_its_memory_at_any_time(pair: Job, group: int) -> None:
    clients = attach(pair)
    hostile = RawClient(pair.workers[0].socket)
    hostile.welcome()
    other = RawClient(pair.workers[1].socket)
    other.welcome()
    number = next(_groups)
    other.submit(1, 4 * ROOM, group=number)
    os.truncate(hostile.shm, 0)
    hostile.submit(1, 4 * ROOM, group=number)
    for _ in range(4):
        assert hostile.receive()["type"] in ("done", "failed")
        assert other.receive()["type"] in ("done", "failed")
    works(clients, group)


def test_a_new_epoch_ends_the_clients(tmp_path: Path) -> None:
    with Job(tmp_path, 2) as job:
        clients = attach(job)
        clients[0].submit(1, 3 * ROOM)
        # In the middle of sending, and with its answers unread.
        busy = RawClient(job.workers[1].socket)
        busy.welcome()
        with contextlib.suppress(BlockingIOError):
            busy.socket.setblocking(False)
            body = b'{"type":"stats"}'
            while True:
                busy.socket.send((struct.pack(">I", len(body)) + body) * 500 + b"\0\0\0\x40\x01")
                break
        job.assign_all(epoch=2)
        failed = [clients[0].expect("failed") for _ in range(3)]
        assert {each["op"] for each in failed} == {1, 2, 3} and {each["code"] for each in failed} == {"Epoch"}
        busy.socket.settimeout(30)
        for client in (*clients, busy):
            while (fatal := client.receive())["type"] == "stats":
                pass
            assert fatal["type"] == "fatal" and fatal["code"] == "Epoch"
            assert "from epoch 1 to 2" in fatal["message"]
            assert client.at_end()
        eventually(lambda: all(sidecar.event("gate-opened")["epoch"] == 2 for sidecar in job.workers + job.servers))
        works(attach(job), GROUP)
        counted = json.loads(fetch(job.workers[0], "/status")[1])["metrics"]["operations"]
        assert counted["Epoch"] == 1 and counted["ok"] >= 1


def test_a_new_epoch_while_large_submissions_are_written(tmp_path: Path) -> None:
    """A client that only writes finds the reason in its socket afterwards, not a broken pipe alone."""
    with Job(tmp_path, 2) as job:
        clients = attach(job)
        job.workers[0].signal(19)  # SIGSTOP: its socket fills up
        client = clients[0]
        client.socket.settimeout(0.5)
        sent = 0
        with contextlib.suppress(TimeoutError):
            for op in range(100_000):
                client.submit(op, 1, 0)
                sent += 1
        assert sent > 10
        job.assign_all(epoch=2)
        job.workers[0].signal(18)  # SIGCONT
        client.socket.settimeout(30)
        seen = set()
        with contextlib.suppress(EOFError):
            while True:
                message = client.receive()
                seen.add(message.get("code"))
        assert message["type"] == "fatal" and message["code"] == "Epoch"
        assert seen == {"Epoch"}


def test_stopping_tells_the_clients_and_removes_the_files(tmp_path: Path) -> None:
    with Job(tmp_path, 1) as job:
        client = RawClient(job.workers[0].socket)
        shm = client.welcome()["shm"]
        deaf = RawClient(job.workers[0].socket)
        deaf.welcome()
        begin = time.monotonic()
        assert job.workers[0].stop() == 0
        assert time.monotonic() - begin < 5
        assert client.expect("fatal")["code"] == "Shutdown"
        assert not Path(shm).exists()
        assert not job.workers[0].socket.exists()
        assert deaf.expect("fatal")["code"] == "Shutdown"


def test_stopping_tells_those_who_wait_for_the_gate(tmp_path: Path) -> None:
    sidecar = SidecarProcess(tmp_path / "w", "worker", None)
    sidecar.event("started")
    client = RawClient(sidecar.socket)
    client.receive()
    sidecar.stop()
    assert client.expect("fatal")["code"] == "Shutdown"


def test_leftovers_of_a_killed_sidecar_are_removed(tmp_path: Path) -> None:
    run = tmp_path / "w" / "run"
    run.mkdir(parents=True)
    (run / "shm-1-0").write_bytes(b"x")
    (run / "atp.sock").write_bytes(b"")
    sidecar = SidecarProcess(tmp_path / "w", "worker", assignment(loopback_addresses(2)))
    try:
        sidecar.event("gate-opened")
        assert not (run / "shm-1-0").exists()
        assert RawClient(sidecar.socket).welcome()["rank"] == 0
    finally:
        sidecar.stop()


def test_memory_errors_say_what_to_do(tmp_path: Path) -> None:
    sidecar = SidecarProcess(tmp_path / "w", "worker", assignment(loopback_addresses(2)))
    try:
        sidecar.event("gate-opened")
        run = tmp_path / "w" / "run"
        connected = RawClient(sidecar.socket)
        connected.welcome()
        run.rename(tmp_path / "w" / "gone")
        connected.send({"type": "grow", "bytes": 4096})
        answer = connected.expect("segment")
        assert re.search(r"no shared-memory file of 4096 bytes in .*: No such file .*sizeLimit", answer["error"])
        client = RawClient(tmp_path / "w" / "gone" / "atp.sock")
        fatal = client.expect("fatal")
        assert fatal["code"] == "Memory" and "raise the sizeLimit of the volume atp-shm" in fatal["message"]
        assert client.at_end()
    finally:
        sidecar.stop()


def test_http(single: SidecarProcess) -> None:
    assert "atp_gate_open" in fetch(single, "/metrics")[1]
    assert '"gateOpen": true' in fetch(single, "/status")[1]
    status, body = fetch(single, "/nothing")
    assert status == 404
    assert "/healthz /metrics /readyz /status" in body
    assert fetch(single, "/readyz?wait=soon")[0] == 400


def test_readiness_is_held_back_until_the_gate_opens(tmp_path: Path) -> None:
    sidecar = SidecarProcess(tmp_path / "w", "worker", None)
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
    sidecar = SidecarProcess(tmp_path / "w", "worker", None)
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


def test_a_hundred_clients_at_once(single: SidecarProcess) -> None:
    clients = [RawClient(single.socket) for _ in range(100)]
    sessions = [client.welcome()["session"] for client in clients]
    assert len(set(sessions)) == 100
    for client in clients:
        client.submit(1, 10, group=next(_groups))
    for client in clients:
        client.done(1)
        client.socket.shutdown(socket.SHUT_WR)
        assert client.at_end()
