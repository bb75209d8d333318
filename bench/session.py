# SPDX-License-Identifier: Apache-2.0
"""Latency of small all-reduces from a trainer's socket and back, without torch: n clients of the session protocol, n
sidecars and a parameter server on loopback, each a process of its own.

One JSON line a size: microseconds of a round trip, median over all ranks, and the tenth and the ninetieth percentile in
the conditions.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "sidecar"))

from atp_harness import Job
from raw_client import GROUP, SUBMIT, RawClient

WARM_UP = 200


def rank(path: str, sizes: list[int], rounds: int, barrier: Any, results: Any) -> None:
    """One trainer: `rounds` all-reduces of each size (float32 values), one after the other; puts seconds of each."""
    client = RawClient(Path(path))
    client.welcome()
    channel = client.socket
    times = []
    for group, count in enumerate(sizes, GROUP):
        client.write(0, [1.0] * count)
        barrier.wait()
        for number in range(WARM_UP + rounds):
            begin = time.perf_counter()
            body = SUBMIT.pack(1, 0, 0, 0, 0, number, group, number, count, 0, 0, count)
            channel.send(struct.pack(">I", len(body)) + body)
            answer = channel.recv(4096)
            if number >= WARM_UP:
                times.append(time.perf_counter() - begin)
            assert answer[4] == 2, answer
    results.put(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--bytes", type=int, nargs="+", default=[4, 4096])
    args = parser.parse_args()
    sizes = [each // 4 for each in args.bytes]
    context = multiprocessing.get_context("fork")
    with (
        tempfile.TemporaryDirectory() as directory,
        Job(Path(directory), args.workers, stallTimeoutSeconds=30, valuesPerPacket=350, scale="Auto") as job,
    ):
        barrier, results = context.Barrier(args.workers), context.Queue()
        processes = [
            context.Process(target=rank, args=(str(worker.socket), sizes, args.rounds, barrier, results))
            for worker in job.workers
        ]
        for process in processes:
            process.start()
        times = [results.get(timeout=120) for _ in processes]
        for process in processes:
            process.join()
    for at, size in enumerate(args.bytes):
        merged = sorted(t for each in times for t in each[at * args.rounds : (at + 1) * args.rounds])
        low, median, high = (1e6 * merged[len(merged) * tenth // 10] for tenth in (1, 5, 9))
        line = {
            "name": f"session_{size}B",
            "value": round(median, 1),
            "unit": "us",
            "peer": None,
            "ratio": None,
            "conditions": f"n = {args.workers}, HostOnly, loopback, {os.cpu_count()} cores, "
            f"load {os.getloadavg()[0]:.1f}, p10 {low:.0f} us, p90 {high:.0f} us of {len(merged)}",
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
