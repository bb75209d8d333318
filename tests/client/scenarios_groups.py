# SPDX-License-Identifier: Apache-2.0
"""What the ranks do in the tests of process groups: orders, mismatches, time-outs. See scenarios.py."""

import random
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from scenarios import init

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32)


def everybody() -> list:
    return list(range(dist.get_world_size()))


class Call:
    """One all-reduce that all ranks make. Small integers: every sum is exact in every dtype."""

    def __init__(self, generator: random.Random, largest: int) -> None:
        self.dtype = generator.choice(DTYPES)
        self.mean = generator.random() < 0.3
        self.count = generator.choice([0, 1, 7, 64, 65, 1000, 5000, generator.randrange(largest)])
        self.start = generator.randrange(8)

    def tensor(self, rank: int) -> torch.Tensor:
        return ((torch.arange(self.count) + self.start + rank) % 8).to(self.dtype)

    def check(self, tensor: torch.Tensor) -> None:
        size = dist.get_world_size()
        total = sum(self.tensor(rank).double() for rank in range(size))
        if self.mean:
            total = total / size
            total = total.trunc() if self.dtype == torch.int32 else total
        assert torch.equal(tensor, total.to(self.dtype)), (self.dtype, self.mean, self.count)

    def begin(self, rank: int, group) -> tuple:
        tensor = self.tensor(rank)
        operation = dist.ReduceOp.AVG if self.mean else dist.ReduceOp.SUM
        return tensor, dist.all_reduce(tensor, operation, group=group, async_op=True)


def interleaved(groups: int, calls: int, largest: int, seed: int, threads: bool = False) -> None:
    """Every group has calls in one order on all ranks; how the groups mix is each rank's own."""
    rank = init()
    made = [dist.new_group(everybody()) for _ in range(groups)]
    plan = random.Random(seed)
    calls_of = [[Call(plan, largest) for _ in range(calls)] for _ in made]
    own = random.Random(1000 * seed + rank)
    errors = []

    def run(number: int) -> None:
        chance = random.Random(number + 100 * own.randrange(1 << 20))
        flying = []
        try:
            for call in calls_of[number]:
                flying.append((call, *call.begin(rank, made[number])))
                if chance.random() < 0.4:
                    each, tensor, work = flying.pop(chance.randrange(len(flying)))
                    work.wait()
                    each.check(tensor)
            for each, tensor, work in flying:
                work.wait()
                each.check(tensor)
        except BaseException as error:
            errors.append(error)

    if threads:
        started = [threading.Thread(target=run, args=(number,)) for number in range(groups)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
    else:
        turns = [number for number in range(groups) for _ in range(calls)]
        own.shuffle(turns)
        left = [iter(each) for each in calls_of]
        flying = []
        for number in turns:
            call = next(left[number])
            flying.append((call, *call.begin(rank, made[number])))
        own.shuffle(flying)
        for call, tensor, work in flying:
            work.wait()
            call.check(tensor)
    if errors:
        raise errors[0]
    dist.destroy_process_group()


def groups_against_each_other(groups: int, elements: int) -> int:
    """Each rank fills the shared memory with another group first, and waits for that: nobody may wait for room."""
    import atp_client

    rank = init()
    made = [dist.new_group(everybody()) for _ in range(groups)]
    order = made if rank % 2 == 0 else made[::-1]
    for group in order:
        # Started but not waited for on this rank, and waited for at once on the other.
        flying = [
            (each, dist.all_reduce(torch.ones(elements), group=each, async_op=True)) for each in made if each != group
        ]
        tensor = torch.ones(elements)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        del flying
        work.wait() if rank == 0 else None
        work.wait()
        assert (tensor == dist.get_world_size()).all()
    dist.barrier()
    bytes_used = atp_client.connect().shared_bytes
    dist.destroy_process_group()
    return bytes_used


def mismatches(seed: int, rounds: int) -> list:
    """Calls that differ between the ranks in random ways; the next one is right again."""
    import atp_client

    rank = init()
    other = dist.new_group(everybody())
    plan = random.Random(seed)
    seen = []
    for _ in range(rounds):
        way = plan.choice(["count", "parts", "dtype", "kind", "empty", "reshaped"])
        count = plan.choice([1, 100, 5000, 300_000, 800_000])
        more, next_count = plan.choice([1, 7, 64]), plan.choice([1, 70, 400_000])
        dtype, operation = torch.float32, dist.ReduceOp.SUM
        if rank == 1:
            if way == "count":
                count += more
            elif way == "parts":
                count += 1 << 18
            elif way == "dtype":
                dtype = torch.int32
            elif way == "kind":
                operation = dist.ReduceOp.AVG
            elif way == "empty":
                count = 0
        fine = torch.full((1000,), 3.0)
        beside = dist.all_reduce(fine, group=other, async_op=True)
        tensor = torch.ones(count, dtype=dtype)
        try:
            dist.all_reduce(tensor.view(-1, 1) if way == "reshaped" and rank else tensor, operation)
            assert way == "reshaped"
        except atp_client.MismatchError as error:
            assert way != "reshaped", error
            seen.append(str(error))
        tensor = torch.full((next_count,), 2.0)
        dist.all_reduce(tensor)
        assert (tensor == 4).all(), (way, tensor)
        beside.wait()
        assert (fine == 6).all()
    dist.destroy_process_group()
    return seen


def a_larger_one_or_two() -> list:
    """Rank 0 sums 3 MiB, then 1 MiB; rank 1 sums 4 MiB at once."""
    import atp_client

    rank = init()
    sizes = [3 << 18, 1 << 18] if rank == 0 else [4 << 18, 1 << 18]
    texts = []
    for number, size in enumerate(sizes):
        tensor = torch.full((size,), float(1 + number))
        try:
            dist.all_reduce(tensor)
            assert (tensor == 4).all()
        except atp_client.MismatchError as error:
            texts.append(str(error))
    return texts


def late(seconds: float, timeout: float) -> float:
    """Rank 1 computes for longer than the sidecars' stall time-out, and the group's is longer still."""
    rank = init(timeout)
    dist.barrier()
    begin = time.monotonic()
    if rank == 1:
        time.sleep(seconds)
    tensors = [torch.ones(300_000), torch.ones(3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for tensor, work in zip(tensors, works, strict=True):
        work.wait()
        assert (tensor == dist.get_world_size()).all()
    return time.monotonic() - begin


def timed_out(how: str, seconds: float) -> dict:
    """Rank 1 comes too late for one group; other groups, and a new one, go on."""
    import atp_client

    rank = init(60.0)
    group, other = dist.new_group(everybody()), dist.new_group(everybody())
    limit = timedelta(seconds=seconds)
    if how == "init":
        group = dist.new_group(everybody(), timeout=limit)
    elif how == "set":
        if hasattr(dist.distributed_c10d, "_set_pg_timeout"):
            dist.distributed_c10d._set_pg_timeout(limit, group)
        else:
            group.atp_group.seconds = seconds  # torch has no way to change it
    dist.all_reduce(torch.ones(10), group=group)
    dist.barrier()
    result = {}
    begin = time.monotonic()
    if rank == 1:
        time.sleep(2.5 * seconds)
    try:
        # Several parts, and one behind it.
        work = dist.all_reduce(torch.ones(700_000), group=group, async_op=True)
        behind = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        work.wait(limit) if how == "wait" else work.wait()
        raise AssertionError("it succeeded")
    except atp_client.AtpError as error:
        result["first"] = [type(error).__name__, str(error)]
    result["seconds"] = time.monotonic() - begin
    try:
        behind.wait()
        raise AssertionError("the one behind it succeeded")
    except (atp_client.AtpError, UnboundLocalError) as error:
        result["behind"] = type(error).__name__
    begin = time.monotonic()
    for _ in range(2):
        try:
            dist.all_reduce(torch.ones(1), group=group)
            raise AssertionError("a broken group was used")
        except atp_client.AtpError as error:
            result["later"] = [type(error).__name__, str(error)]
    assert time.monotonic() - begin < 2
    tensor = torch.ones(400_000)
    dist.all_reduce(tensor, group=other)
    assert (tensor == 2).all()
    new = dist.new_group(everybody())
    tensor = torch.ones(5)
    dist.all_reduce(tensor, group=new)
    assert (tensor == 2).all()
    dist.barrier()
    dist.destroy_process_group()
    return result


def groups_come_and_go(rounds: int) -> None:
    """Groups are made, used and destroyed, again and again."""
    init()
    for number in range(rounds):
        group = dist.new_group(everybody())
        tensor = torch.full((number % 5,), 1.0)
        dist.all_reduce(tensor, group=group)
        assert (tensor == dist.get_world_size()).all()
        dist.destroy_process_group(group)
        if VERSION < (2, 6):
            continue  # torch only forgets the group
        try:
            group.allreduce([torch.ones(1)])
            raise AssertionError("a destroyed group was used")
        except (RuntimeError, ValueError):
            pass
    dist.destroy_process_group()


def one_group_from_two_threads() -> None:
    """Two threads share a group: which of two equal calls meets which does not matter."""
    init()
    errors = []

    def run() -> None:
        try:
            for _ in range(50):
                tensor = torch.ones(1000)
                dist.all_reduce(tensor)
                assert (tensor == dist.get_world_size()).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    dist.destroy_process_group()


def killed_in_one_group() -> str:
    """Rank 1 dies; the error of rank 0 says so. Waits in a group of its own making."""
    rank = init(120.0)
    group = dist.new_group(everybody())
    dist.barrier()
    print("ready", flush=True)
    if rank == 1:
        time.sleep(300)
    dist.all_reduce(torch.ones(10), group=group)
    return "it succeeded"
