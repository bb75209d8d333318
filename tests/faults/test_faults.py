# SPDX-License-Identifier: Apache-2.0
"""The ten faults that transports of this kind are known for. Each test says the fault, the rule that prevents it
and where the rule lives. They use the transport that ships, over loopback, through the switch core where it
matters."""

from __future__ import annotations

import json
import select
import shutil
import socket
import subprocess
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pytest
from conformance.switches import NativeSwitch, Packet
from transport.rig import JOB_ID, SERVER, Array, Job, assignment, fixed_point_sum
from transport.test_relay import Relay, shared

from atp_api.wire import Header
from atp_transport import Worker

ROOT = Path(__file__).resolve().parents[2]
FLAG_RESEND, FLAG_ECN, FLAG_ACK = 0x10, 0x04, 0x02


class Listener:
    """Stands where the parameter server of a job of one worker should be: counts what comes, and echoes or keeps
    quiet. In a job of one the gradient is the sum, so an echo is a right answer."""

    def __init__(self, port: int, echo: bool, ecn: bool = False) -> None:
        self.packets: list[tuple[float, bytes]] = []
        self.ecn = ecn
        self._echo = echo
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        self._socket.bind((SERVER, port))
        self._socket.settimeout(0.05)
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            try:
                data, sender = self._socket.recvfrom(65536)
            except TimeoutError:
                continue
            self.packets.append((time.monotonic(), data[:16]))
            if self._echo:
                flags = data[13] & ~FLAG_RESEND | FLAG_ACK | (FLAG_ECN if self.ecn else 0)
                self._socket.sendto(data[:13] + bytes([flags]) + data[14:], sender)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._stop = True
        self._thread.join(5)
        self._socket.close()


class Alone(Job):
    """A job of one worker without its parameter server; packets one by one, so that they can be counted."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(1, **({"segmentationOffload": False} | changes))
        self.servers.pop().close()


def submit(job: Job, rank: int, op_id: int, tensor: Array, kind: str = "sum") -> Array:
    out = np.zeros_like(tensor)
    job.workers[rank].submit(op_id, kind, "float32", tensor.data, out.data, tensor.size)
    return out


# ---- 1. wrap ----


def test_wrap_in_the_endpoints() -> None:
    """Fault: after 2^24 packets the sequence starts at 0 again, and old and new packets or aggregators are taken
    for each other. Rule: sequences are 64-bit inside and the 24 bits on the wire are read as the nearest to the
    present (native/atp-proto/src/seq.rs); the index table's size divides 2^24. Driven in the simulation beside the
    code, because 2^24 packets over sockets take a minute."""
    cargo = shutil.which("cargo")
    if cargo is None:
        pytest.skip("cargo is missing: install Rust")
    command = [cargo, "test", "--release", "-q", "-p", "atp-proto", "--test", "faults", "wrap"]
    done = subprocess.run(command, cwd=ROOT / "native", capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout, done.stdout


def test_wrap_at_a_switch() -> None:
    """Fault: an aggregator that was left incomplete one wrap ago has the same key as a packet of now, and its old
    values enter the new sum. Rule: whoever meets an aggregator idle for longer than T takes it as free, a packet
    with the same key too; T is shorter than a wrap (atp_decide in softswitch/core/aggregator.h)."""
    stale = 100_000_000
    switch = NativeSwitch(8, 62, stale)
    try:
        switch.set_group(1, ["w0", "w1"])
        switch.set_job(1, 62, 0b11, 0, 1, [(0, 8)])
        switch.admit(1, "w0", 0, 1)
        switch.admit(1, "w1", 0, 2)
        switch.ps_port(1, "ps")

        def gradient(port: str, bit: int, fill: int) -> Packet:
            header = Header(job_id=1, sequence=5, bitmap0=bit, bitmap1=1, fan_in_degree0=2, fan_in_degree1=1)
            return Packet(port, header, (fill,) * 62)

        switch.set_clock(10**9)
        assert switch.send(gradient("w0", 1, 1000), "ps", 0) == []
        switch.set_clock(10**9 + stale + 1)  # the other half of the old sum never came; the sequence has wrapped
        assert switch.send(gradient("w1", 2, 3), "ps", 0) == []
        (out,) = switch.send(gradient("w0", 1, 4), "ps", 1)
        assert out.values == (7,) * 62
        assert switch.counters(1)["stale_takeovers"] == 1
    finally:
        switch.close()


# ---- 2. retransmit amplification ----


def test_retransmit_amplification() -> None:
    """Fault: at each timeout everything pending is sent again, which makes the congestion that caused the timeout
    worse. Rule: a timeout resends one packet, the oldest, and the next wait is twice as long, up to a second
    (native/atp-proto/src/worker/timers.rs, Rtt::rto in rtt.rs)."""
    with Alone(stallTimeoutSeconds=2.5) as job, Listener(job.port, echo=False) as silent:
        submit(job, 0, 1, np.ones(62 * 2000, np.float32))
        assert job.collect(0)[0][1] is not None
        resent = [at for at, header in silent.packets if header[13] & FLAG_RESEND]
        fresh = len(silent.packets) - len(resent)
        assert fresh <= 200, "the initial window"
        assert 3 <= len(resent) <= 10, f"{len(resent)} resends in 2.5 s"
        gaps = np.diff(resent)
        assert all(later > 1.4 * earlier for earlier, later in pairwise(gaps) if later < 0.9), gaps


def test_retransmit_amplification_by_a_straggler() -> None:
    """The same fault, when nothing is lost and one rank is merely late: all others must not resend their windows.
    Rule: as above, and the parameter server tells whoever resends that it waits for somebody else (a notice)."""
    with Job(3, segmentationOffload=False) as job:
        tensors = [np.full(62 * 1000, rank + 1, np.float32) for rank in range(3)]
        outs = [submit(job, rank, 1, tensors[rank]) for rank in range(2)]
        time.sleep(1.0)
        outs.append(submit(job, 2, 1, tensors[2]))
        for rank in range(3):
            assert job.collect(rank) == [(1, None)]
            np.testing.assert_array_equal(outs[rank], np.full(62 * 1000, 6, np.float32))
        for rank in range(2):
            metrics = job.settled(job.workers[rank])
            assert metrics["retransmits"] < 100, metrics


# ---- 3. restart under the same identity ----


def test_restart_under_the_same_identity() -> None:
    """Fault: a worker dies and comes back with its old address, rank, job ID and epoch; its sequence starts at 0,
    the parameter server answers from its cache, and it gets the results of its former life as if they were new.
    Rule: each start draws an incarnation that its descriptors carry; an answer without it ends the operation and
    all later ones, and asks for a new epoch (native/atp-proto/src/op.rs). The others are told whom they wait for."""
    with Job(2, stallTimeoutSeconds=2) as job:
        old = [np.full(100, rank + 1, np.float32) for rank in range(2)]
        job.all_reduce(old, "float32", op_id=1)
        job.workers[0].close()
        job.workers[0] = Worker(json.dumps(assignment("worker", 0, 2, job.port, stallTimeoutSeconds=2)))
        new = np.full(100, 50, np.float32)
        out = submit(job, 0, 1, new)
        ((op_id, text),) = job.collect(0)
        assert (op_id, text is not None) == (1, True), f"given {out[0]}, the sum of an earlier process"
        assert text is not None and "new epoch" in text and "rank 0" in text, text
        submit(job, 0, 2, new)
        later = job.collect(0)[0][1]
        assert later is not None and "new epoch" in later
        submit(job, 1, 2, new)
        theirs = job.collect(1, timeout=10)[0][1]
        assert theirs is not None and "rank 0 (127.0.0.1)" in theirs, theirs


def test_restart_in_a_new_epoch() -> None:
    """The other half: with the next epoch comes another job ID, and whatever is left of the old one is not heard.
    Rule: job IDs rest in quarantine before they are used again (the operator); endpoints drop foreign ones and
    count them (handle() of both state machines)."""
    with Job(2) as job:
        job.all_reduce([np.ones(100, np.float32)] * 2, "float32")
        job.workers[0].close()
        job.workers[0] = Worker(json.dumps(assignment("worker", 0, 2, job.port, epoch=2, jobId=JOB_ID + 1)))
        submit(job, 0, 1, np.full(100, 50, np.float32))
        time.sleep(0.2)
        assert job.settled(job.servers[0])["rejected_job"] > 0
        out = submit(job, 1, 2, np.ones(100, np.float32))
        time.sleep(0.2)
        assert job.workers[1].completions() == []
        assert not out.any(), "nothing of the new epoch got into the old one"


# ---- 4. window collapse or overflow ----


def test_window_collapse() -> None:
    """Fault: marks or losses in a row halve the window to nothing, and no ACK ever opens it again. Rule: it never
    falls below 2 packets, is cut once per round trip at most, and grows again with each ACK (Aimd in
    native/atp-proto/src/congestion/aimd.rs)."""
    with Alone() as job, Listener(job.port, echo=True, ecn=True) as server:
        tensor = np.arange(62 * 3000, dtype=np.float32) / 2**20
        out = submit(job, 0, 1, tensor)
        assert job.collect(0) == [(1, None)]
        np.testing.assert_allclose(out, tensor, atol=1e-8)
        collapsed = job.settled(job.workers[0])
        assert 1.9 < collapsed["window"] < 4, collapsed
        server.ecn = False
        submit(job, 0, 2, tensor)
        assert job.collect(0) == [(2, None)]
        assert job.settled(job.workers[0])["window"] > 8 * collapsed["window"]


def test_window_overflow() -> None:
    """Fault: the window grows past the index table, so that two sequences in flight share a slot, or past what the
    receiver can hold. Rule: it ends at maxWindow, which is at most the table's size (Config::check,
    Window::on_ack)."""
    with Alone(maxWindow=32, indexTableSize=64) as job, Listener(job.port, echo=True) as server:
        submit(job, 0, 1, np.ones(62 * 5000, np.float32))
        assert job.collect(0) == [(1, None)]
        assert job.settled(job.workers[0])["window"] == 32
        assert len(server.packets) >= 5001
    with (
        Alone(maxWindow=32, indexTableSize=64, stallTimeoutSeconds=0.5) as job,
        Listener(job.port, echo=False) as silent,
    ):
        submit(job, 0, 1, np.ones(62 * 5000, np.float32))
        assert job.collect(0)[0][1] is not None
        sequences = {header[1:4] for _, header in silent.packets}
        assert len(sequences) == 32


# ---- 5. zero-size and one-worker collectives ----


@pytest.mark.parametrize("workers", [1, 2])
def test_zero_size(workers: int) -> None:
    """Fault: an operation without elements sends nothing, so nobody ever completes it, or it falls out of step with
    the ranks that have elements. Rule: every operation has descriptor packets, and ends when they are answered
    (native/atp-proto/src/op.rs)."""
    with Job(workers) as job:
        for op_id in range(1, 4):
            job.all_reduce([np.zeros(0, np.float32) for _ in range(workers)], "float32", op_id=op_id)
        full = [np.full(5, rank + 1, np.float32) for rank in range(workers)]
        for out in job.all_reduce(full, "float32", op_id=4):
            np.testing.assert_array_equal(out, np.full(5, sum(range(1, workers + 1)), np.float32))


@pytest.mark.parametrize("through_switch", [False, True])
def test_one_worker(through_switch: bool) -> None:
    """Fault: a group of one has a fan-in of 1, which some switch never completes, or is skipped and left undivided.
    Rule: a fan-in of 1 is complete with its first packet (atp_decide), and the endpoints know no special case."""
    changes = shared(256) if through_switch else {}
    with Job(1, **changes) as job:
        relay = Relay(job, 1, 256) if through_switch else None
        try:
            tensor = np.linspace(-3, 3, 1000, dtype=np.float32)
            expected = fixed_point_sum([tensor]).astype(np.float32)
            np.testing.assert_array_equal(job.all_reduce([tensor], "float32")[0], expected)
            np.testing.assert_array_equal(job.all_reduce([tensor], "float32", kind="mean", op_id=2)[0], expected)
            if relay is not None:
                assert relay.counters()["completed"] >= 34
        finally:
            if relay is not None:
                relay.switch.close()


# ---- 6. unaligned tails ----


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("float16", 2), ("int32", 4)])
def test_unaligned_tails(dtype: str, item: int) -> None:
    """Fault: the last packet of a tensor is not full, and the rest of it is read or written beyond the tensor; or
    the memory is not aligned and the vector code faults. Rule: the tail is padded with zeros on the wire and cut on
    arrival (fill() and write() in native/atp-proto/src/worker/ops.rs), and all memory is taken byte by byte
    (fixed.rs)."""
    canary = b"\xa5" * 64
    with Job(2) as job:
        for op_id, count in enumerate((1, 61, 62, 63, 123, 124, 125, 62 * 40 + 1)):
            shift = op_id % 4 + 1  # never aligned to the item but by chance
            memories = []
            for rank in range(2):
                values = (np.arange(count) % 11 + rank).astype(dtype)
                memory = bytearray(canary[:shift] + values.tobytes() + canary)
                view = memoryview(memory)[shift : shift + count * item]
                job.workers[rank].submit(op_id, "sum", dtype, view, view, count)
                memories.append(memory)
            for rank, memory in enumerate(memories):
                assert job.collect(rank) == [(op_id, None)]
                got = np.frombuffer(bytes(memory[shift : shift + count * item]), dtype)
                np.testing.assert_array_equal(got, (2 * (np.arange(count) % 11) + 1).astype(dtype))
                assert bytes(memory[:shift]) == canary[:shift], "written before the tensor"
                assert bytes(memory[shift + count * item :]) == canary, "written behind the tensor"


# ---- 7. mismatched shapes ----


@pytest.mark.parametrize("through_switch", [False, True])
def test_mismatched_shapes(through_switch: bool) -> None:
    """Fault: ranks bring tensors of different sizes, and the job hangs, or sums what does not belong together.
    Rule: the sum of the descriptors tells every rank what all ranks asked for; the operation fails everywhere, with
    the ranks' numbers, and the next one goes well (check_descriptors in native/atp-proto/src/op.rs)."""
    with Job(3, **(shared(256) if through_switch else {})) as job:
        relay = Relay(job, 3, 256) if through_switch else None
        try:
            counts = [5000, 5001, 5000]
            for rank in range(3):
                submit(job, rank, 1, np.ones(counts[rank], np.float32))
            later = [submit(job, rank, 2, np.full(700, rank + 1, np.float32)) for rank in range(3)]
            for rank in range(3):
                ended = dict(job.collect(rank, 2))
                assert ended[1] is not None and ended[1].startswith("all_reduce #1: "), ended
                if rank != 1:
                    assert f"rank 1 has 5001 float32 elements, this rank ({rank}) has 5000" in ended[1]
                assert ended[2] is None
                np.testing.assert_array_equal(later[rank], np.full(700, 6, np.float32))
        finally:
            if relay is not None:
                relay.switch.close()


# ---- 8. NaN and infinities ----


@pytest.mark.parametrize("through_switch", [False, True])
def test_nan_and_infinities(through_switch: bool) -> None:
    """Fault: NaN and Inf have no fixed-point value; converted all the same they become ordinary numbers, and a
    diverging training looks healthy. Rule: a packet with such a value travels raw and is summed by the parameter
    server in float64, in rank order (encode() and sum_raw() in native/atp-proto/src/fixed.rs); switches pass it
    untouched."""
    with Job(2, **(shared(256) if through_switch else {})) as job:
        relay = Relay(job, 2, 256) if through_switch else None
        try:
            tensors: list[Array] = [np.full(62 * 20, 0.25, np.float32) for _ in range(2)]
            tensors[0][5] = np.nan
            tensors[1][62 * 3] = np.inf
            tensors[0][62 * 5], tensors[1][62 * 5] = np.inf, -np.inf
            tensors[0][62 * 7 + 1] = -np.inf
            tensors[0][62 * 9], tensors[1][62 * 9] = 1e30, 2e30
            tensors[0][62 * 11], tensors[1][62 * 11] = 20.0, 20.0  # each has a fixed point, the sum saturates
            with np.errstate(invalid="ignore"):
                exact = (tensors[0].astype(np.float64) + tensors[1]).astype(np.float32)
            for out in job.all_reduce(tensors, "float32"):
                np.testing.assert_array_equal(out, exact)
            with np.errstate(invalid="ignore"):
                half = ((tensors[0].astype(np.float64) + tensors[1]).astype(np.float32).astype(np.float64) / 2).astype(
                    np.float32
                )
            for out in job.all_reduce(tensors, "float32", kind="mean", op_id=2):
                np.testing.assert_array_equal(out, half)
        finally:
            if relay is not None:
                relay.switch.close()


# ---- 9. double averaging ----


def test_double_averaging_in_the_transport() -> None:
    """Fault: the sum is divided by the number of workers in two places, or in none, and training goes on at another
    learning rate. Rule: "mean" divides once, when the result is decoded (fixed::decode), never on the way."""
    with Job(4) as job:
        ones = [np.ones(1000, np.float32) for _ in range(4)]
        for out in job.all_reduce(ones, "float32", kind="mean"):
            np.testing.assert_array_equal(out, np.ones(1000, np.float32))
        for out in job.all_reduce(ones, "float32", kind="sum", op_id=2):
            np.testing.assert_array_equal(out, np.full(1000, 4, np.float32))


@pytest.mark.parametrize("hook", [False, True], ids=["backend", "hook"])
def test_double_averaging_under_ddp(scenario: Any, hook: bool) -> None:
    """The same fault where it is usually made: DDP divides by the world size before a backend's all-reduce, and
    does not divide around a communication hook. Rule: the backend sums, the hook asks for the mean
    (client/atp_client); weights after six steps are those of averaging by hand."""
    for worst in scenario("ddp", kind="plain", hook=hook):
        assert worst <= 1e-6


# ---- 10. silent stalls ----


@pytest.mark.parametrize("seconds", [0.8, 2.0])
@pytest.mark.parametrize("through_switch", [False, True])
def test_silent_stalls(seconds: float, through_switch: bool) -> None:
    """Fault: a peer hangs and everybody waits for ever, with nothing to read. Rule: without progress for
    stallTimeoutSeconds the operation fails at every rank that waits, and the error names the ranks whose gradient
    is missing, as the parameter server's notices tell (stall_text in
    native/atp-proto/src/worker/progress.rs)."""
    changes = {"stallTimeoutSeconds": seconds} | (shared(256) if through_switch else {})
    with Job(3, **changes) as job:
        relay = Relay(job, 3, 256) if through_switch else None
        try:
            began = time.monotonic()
            for rank in (0, 2):
                submit(job, rank, 5, np.ones(3000, np.float32))
            for rank in (0, 2):
                ((_, text),) = job.collect(rank, timeout=seconds + 5)
                assert text is not None
                assert f"no progress for {seconds:g} s" in text
                assert "rank 1 (127.0.0.2)" in text and f"rank {2 - rank} (" not in text, text
            assert seconds * 0.95 < time.monotonic() - began < seconds + 2.5
        finally:
            if relay is not None:
                relay.switch.close()


def test_silent_stall_of_the_parameter_server() -> None:
    """The same fault when it is the parameter server that hangs: the error says so, in the same time."""
    with Alone(stallTimeoutSeconds=0.8) as job:
        began = time.monotonic()
        submit(job, 0, 1, np.ones(100, np.float32))
        assert select.select([job.workers[0].fileno()], [], [], 5)[0]
        ((_, text),) = job.workers[0].completions()
        assert text is not None and f"{SERVER}:{job.port} does not answer" in text
        assert time.monotonic() - began < 3
