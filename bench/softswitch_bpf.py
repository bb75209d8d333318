# SPDX-License-Identifier: Apache-2.0
"""Nanoseconds a packet of the BPF program that aggregates, with all its checks on.

One frame is run again and again (BPF_PROG_TEST_RUN with repeat). A small prologue, compiled into the benchmark's
objects only (softswitch/testing/atp_switch_bench.bpf.c), turns each run into the packet of the next worker: 31
workers of a rack of 32 send sequence after sequence, each in the next aggregator. So every timed packet is admitted,
locks its aggregator and stores (1 of 31) or adds (30 of 31) all its values; none is a duplicate and none completes.
The job is guarded: source and destination are looked up among its hosts.
That is checked afterwards: the counter `aggregated` must equal the number of runs, and aggregators must hold the
31-fold sum. Time includes the prologue and the kernel's loop.

The peer is the same program, prologue, frame and loop with a job that the switch does not know: parse and pass.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from ctypes import POINTER, byref, c_int32, c_size_t, c_uint8, c_uint32
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "proto")]

from conformance.switches import BUILD, PROGRAM_XDP_BENCH, Packet, Switch, frame_of  # noqa: E402

from atp_api.wire import Header  # noqa: E402

AGGREGATORS = 512
"""As many as a window uses: a power of two, which the prologue wraps at."""
WORKERS = 31
BATCHES = 60
LOOPBACK = 1
JOB, UNKNOWN_JOB = 1, 2
DROP, PASS = 1, 2


class BenchSwitch(Switch):
    """The BPF programs of the benchmark's objects, on the clock of production."""

    name = "bench"

    def opener(self) -> object:
        return self.library.atp_switch_open_bpf

    def port_number(self, port: str) -> int:
        return LOOPBACK

    def run(self, frame: bytes, repeat: int, verdict: int) -> int:
        """Return ns a run."""
        got = c_int32()
        length = c_size_t()
        elapsed = c_uint32()
        data = (c_uint8 * len(frame)).from_buffer_copy(frame)
        result = self.library.atp_test_run(
            self.handle, PROGRAM_XDP_BENCH, c_uint32(LOOPBACK), data, c_size_t(len(frame)), c_uint32(repeat),
            POINTER(c_uint8)(), c_size_t(0), byref(length), byref(got), byref(elapsed),
        )  # fmt: skip
        self.check(result, "test run")
        if got.value != verdict:
            raise RuntimeError(f"the program returned {got.value}, not {verdict}")
        return int(elapsed.value)


def frame(job: int, batch: int, values: tuple[int, ...]) -> bytes:
    # The prologue turns bit 30 into bit 0 of the next sequence and index.
    header = Header(job_id=job, sequence=batch * 1000, bitmap0=1 << 30, bitmap1=1, fan_in_degree1=1,
                    aggregator_index=AGGREGATORS - 1)  # fmt: skip
    ends = ("w0", "ps") if job == JOB else ("w2", "w3")
    return frame_of(Packet("w0", header, values).payload(), *ends)


def values_of(count: int, hot: bool) -> tuple[int, ...]:
    """Gradients as they are, or with one value that makes sums saturate."""
    values = [((i * 7919) % 2001 - 1000) * 1000 for i in range(count)]
    if hot:
        values[count // 2] = 2**31 - 1
    return tuple(values)


def measure(count: int, hot: bool) -> tuple[float, float]:
    """Return (aggregate, pass) in ns a packet: medians over batches that alternate."""
    switch = BenchSwitch(AGGREGATORS, count, 10**12, BUILD / "bench")
    try:
        for i in range(WORKERS):
            switch.admit(JOB, "w0", 0, 1 << i)
        switch.set_host(JOB, "w0", "w0", "worker", 1, 1)
        switch.set_host(JOB, "ps", "ps", "ps")
        values = values_of(count, hot)
        repeat = WORKERS * AGGREGATORS
        aggregate: list[int] = []
        passing: list[int] = []
        for batch in range(BATCHES + 5):
            switch.set_job(JOB, count, 0xFFFFFFFF, 0, 0, [(0, AGGREGATORS)])
            aggregate.append(switch.run(frame(JOB, batch, values), repeat, DROP))
            if batch == 0:
                check_sums(switch, values)
            passing.append(switch.run(frame(UNKNOWN_JOB, batch, values), repeat, PASS))
            switch.delete_job(JOB)
            if switch.occupancy(JOB):
                raise RuntimeError("aggregators were left over")
        aggregated = switch.counters(JOB)["aggregated"]
        if aggregated != repeat * (BATCHES + 5):
            raise RuntimeError(f"{aggregated} packets aggregated, {repeat * (BATCHES + 5)} were run")
        return statistics.median(aggregate[5:]), statistics.median(passing[5:])
    finally:
        switch.close()


def check_sums(switch: Switch, values: tuple[int, ...]) -> None:
    wanted = tuple(max(-(2**31), min(2**31 - 1, WORKERS * v)) for v in values)
    for index in (0, AGGREGATORS // 2, AGGREGATORS - 1):
        state = switch.aggregator(index)
        if state.bitmap != (1 << WORKERS) - 1 or state.values != wanted:
            raise RuntimeError(f"aggregator {index} holds a wrong sum")


def main() -> int:
    if os.geteuid() != 0:
        print("softswitch_bpf: loading BPF programs needs root", file=sys.stderr)
        return 1
    subprocess.run(
        ["make", "-s", "-C", str(ROOT / "softswitch"), "all", "bench-objects"], check=True, stdout=subprocess.DEVNULL
    )
    for count, hot in ((62, False), (350, False), (62, True), (350, True)):
        value, peer = measure(count, hot)
        conditions = (
            f"one core, BPF_PROG_TEST_RUN of the XDP program, {count} values, 31 of 32 workers, "
            f"{AGGREGATORS} aggregators in turn, every packet aggregates, median of {BATCHES} batches of "
            f"{WORKERS * AGGREGATORS}; peer: unknown job, parse and pass"
        )
        if hot:
            conditions += "; every sum saturates in one value"
        line = {
            "name": f"softswitch_bpf_{count}" + ("_saturating" if hot else ""),
            "value": value,
            "unit": "ns/packet",
            "peer": peer,
            "ratio": round(value / peer, 3),
            "conditions": conditions,
        }
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
