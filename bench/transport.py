#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Goodput of the transport on loopback: one worker and one parameter server in HostOnly mode, one process.

Prints one JSON line a figure: name, value, unit, peer (the figure of the peer), ratio (value over peer) and
conditions. Gradient bits reduced (32 a value) over time, and over the CPU time of the whole process: worker,
parameter server and the kernel's share of both. Peers: packets of the same size that go there and back through
the same socket layer (native/atp-net/examples/udp_echo.rs), and torch's gloo all-reduce between two processes
where torch is installed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import select
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from atp_transport import ParameterServer, Worker

HEADER_BYTES = 16


def free_port() -> int:
    """A UDP port that is free on all loopback addresses now."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def measure(run: Callable[[], int], repeats: int) -> tuple[float, float]:
    """Median Gbit/s by time and by CPU time of `run`, which returns the bits it moved."""
    by_time, by_cpu = [], []
    for _ in range(repeats):
        cpu, start = time.process_time(), time.monotonic()
        bits = run()
        by_time.append(bits / (time.monotonic() - start) / 1e9)
        by_cpu.append(bits / (time.process_time() - cpu) / 1e9)
    return statistics.median(by_time), statistics.median(by_cpu)


def transport(values: int, elements: int, repeats: int, offload: bool) -> tuple[float, float]:
    """Gbit/s by time and by CPU time of float32 all-reduces of `elements`."""
    base: dict[str, Any] = {
        "job": "bench/transport",
        "jobId": 1,
        "mode": "HostOnly",
        "rank": 0,
        "valuesPerPacket": values,
        "port": free_port(),
        "indexTableSize": 1024,
        "segmentationOffload": offload,
        "workers": [{"rank": 0, "address": "127.0.0.2"}],
        "parameterServers": [{"shard": 0, "address": "127.0.0.3"}],
    }
    server = ParameterServer(json.dumps(base | {"role": "parameterServer"}))
    worker = Worker(json.dumps(base | {"role": "worker"}))
    data = np.random.default_rng(1).normal(0, 0.1, elements).astype(np.float32)
    out = np.empty_like(data)
    try:

        def run() -> int:
            worker.submit(1, "sum", "float32", data.data, out.data, elements)
            while not (done := worker.completions()):
                select.select([worker.fileno()], [], [])
            assert done == [(1, None)], done
            return 32 * elements

        run()
        result = measure(run, repeats)
        assert np.array_equal(out, (np.rint(data.astype(np.float64) * 1e8) / 1e8).astype(np.float32))
        return result
    finally:
        worker.close()
        server.close()


def udp_echo(values: int, packets: int, repeats: int, offload: bool) -> tuple[float, float] | None:
    """Gbit/s by time and by CPU time of bare packets of that size, there and back; None without cargo."""
    native = Path(__file__).resolve().parent.parent / "native"
    build = ["cargo", "build", "--release", "--quiet", "-p", "atp-net", "--example", "udp_echo"]
    if shutil.which("cargo") is None:
        return None
    subprocess.run(build, cwd=native, check=True)
    program = native / "target" / "release" / "examples" / "udp_echo"
    command = [str(program), str(HEADER_BYTES + 4 * values), str(packets), str(int(offload))]
    runs = []
    for _ in range(repeats):
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        runs.append([float(word) for word in output.split()])
    return statistics.median(r[0] for r in runs), statistics.median(r[1] for r in runs)


def gloo_rank(rank: int, port: int, elements: int, repeats: int, queue: Any) -> None:
    """One process of `gloo`."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    data = torch.ones(elements)
    dist.all_reduce(data)

    def run() -> int:
        dist.all_reduce(data)
        return 32 * elements

    queue.put(measure(run, repeats))
    dist.destroy_process_group()


def gloo(elements: int, repeats: int) -> tuple[float, float] | None:
    """Gbit/s by time and by CPU time (of both processes) of gloo's all-reduce; None without torch."""
    try:
        import torch.distributed  # noqa: F401
    except ImportError:
        return None
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [context.Process(target=gloo_rank, args=(rank, port, elements, repeats, queue)) for rank in range(2)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    by_time = min(r[0] for r in results)
    return by_time, 1 / sum(1 / r[1] for r in results)


def report(name: str, value: float, peer: str, peer_value: float | None, conditions: str) -> None:
    """One line of the result."""
    print(
        json.dumps(
            {
                "name": name,
                "value": round(value, 3),
                "unit": "Gbit/s",
                "peer": None if peer_value is None else {"name": peer, "value": round(peer_value, 3)},
                "ratio": None if peer_value is None else round(value / peer_value, 3),
                "conditions": conditions,
            }
        ),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=4_000_000, help="float32 values of one all-reduce")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    where = f"loopback, {os.cpu_count()} cores, kernel {os.uname().release}, load {os.getloadavg()[0]:.1f}"
    where += f", {args.elements} float32, median of {args.repeats}"
    ring = gloo(args.elements, args.repeats)
    for values in (62, 350):
        for offload in (True, False):
            echo = udp_echo(values, args.elements // values, args.repeats, offload)
            got = transport(values, args.elements, args.repeats, offload)
            how = f"1 worker, 1 PS, HostOnly, {values} values a packet, "
            how += "UDP_SEGMENT and UDP_GRO" if offload else "one datagram a packet (as with a switch)"
            suffix = f"{values}{'' if offload else '_plain'}"
            for part, i in (("goodput", 0), ("goodput_per_core", 1)):
                peer = None if echo is None else echo[i]
                report(f"transport_{part}_{suffix}", got[i], "UDP echo, same socket layer", peer, f"{how}; {where}")
                if offload and ring is not None:
                    name = f"transport_{part}_{suffix}_vs_gloo"
                    report(name, got[i], "gloo all-reduce, 2 processes", ring[i], f"{how}; {where}")


if __name__ == "__main__":
    main()
