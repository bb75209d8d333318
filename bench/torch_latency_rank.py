# SPDX-License-Identifier: Apache-2.0
"""One rank of bench/torch_latency.py: all-reduces over two process groups, one of gloo and one of atp, taking turns."""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist

import atp_client  # noqa: F401


def synchronous(group, elements: int, calls: int) -> float:
    """Seconds of a synchronous all-reduce: the median of `calls`."""
    tensor = torch.ones(elements)
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def waited(group, calls: int) -> float:
    """Seconds of an asynchronous all-reduce of one element that is waited for at once."""
    tensor = torch.ones(1)
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def in_flight(group, count: int) -> float:
    """Seconds for `count` tensors of 4 elements, all started before the first is waited for."""
    tensors = [torch.ones(4) for _ in range(count)]
    begin = time.perf_counter()
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    taken = time.perf_counter() - begin
    assert all((tensor == dist.get_world_size()).all() for tensor in tensors[:: max(1, count // 50)])
    return taken


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--tiny", type=int, required=True)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    everybody = list(range(dist.get_world_size()))
    groups = {"gloo": dist.new_group(everybody, backend="gloo"), "atp": dist.new_group(everybody, backend="atp")}
    figures = {
        "4 B": lambda group: synchronous(group, 1, 200),
        "4 KB": lambda group: synchronous(group, 1 << 10, 200),
        "64 KB": lambda group: synchronous(group, 1 << 14, 50),
        "1 MB": lambda group: synchronous(group, 1 << 18, 20),
        "4 B async": lambda group: waited(group, 200),
        f"{arguments.tiny} x 16 B": lambda group: in_flight(group, arguments.tiny),
    }
    seconds: dict = {name: {backend: [] for backend in groups} for name in figures}
    for step in range(arguments.rounds + 1):
        for name, measure in figures.items():
            if arguments.only and arguments.only != name:
                continue
            for backend, group in groups.items():
                dist.barrier()
                taken = measure(group)
                if step:  # the first round warms up
                    seconds[name][backend].append(taken)
    if dist.get_rank() == 0:
        print(json.dumps({"torch": torch.__version__, "cores": os.cpu_count(), "seconds": seconds}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
