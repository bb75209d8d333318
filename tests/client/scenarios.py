# SPDX-License-Identifier: Apache-2.0
"""What the ranks do in the tests. Runs under torch 1.13 and newest, so it uses what both have."""

import contextlib
import logging
import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

logging.basicConfig(level=logging.INFO, stream=sys.stderr)

SCALE = 1e8
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
}


def init(seconds: float = 120.0) -> int:
    import atp_client  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("atp", timeout=timedelta(seconds=seconds))
    return dist.get_rank()


def values(shape, dtype: torch.dtype, rank: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.int32:
        return torch.randint(-1000, 1000, shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def ulp(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Spacing of `dtype` at |exact|, as float64."""
    size = exact.abs().float()
    if dtype == torch.float32:
        return (torch.nextafter(size, torch.full_like(size, math.inf)) - size).double()
    bits = {torch.float16: 10, torch.bfloat16: 7}[dtype]
    least = {torch.float16: -14, torch.bfloat16: -126}[dtype]
    exponent = torch.floor(torch.log2(size.double().clamp_min(1e-300))).clamp_min(least)
    return torch.pow(torch.full_like(exponent, 2.0), exponent - bits)


def check(got: torch.Tensor, parts: list, dtype: torch.dtype, mean: bool) -> float:
    """Error over bound: n/(2s) + one ulp of the result's type (a mean: 1/(2s) + ulp)."""
    exact = torch.stack([part.double() for part in parts]).sum(0)
    count = len(parts)
    if mean:
        exact = exact / count
    if dtype == torch.int32:
        assert torch.equal(got.double(), exact), (got, exact)
        return 0.0
    bound = (1 if mean else count) / (2 * SCALE) + ulp(exact, dtype)
    ratio = ((got.double() - exact).abs() / bound).max().item() if got.numel() else 0.0
    assert ratio <= 1.0, ratio
    return ratio


def dtypes() -> dict:
    """Every dtype, sum and mean, shapes and layouts."""
    rank = init()
    size = dist.get_world_size()
    worst = {}
    for name, dtype in DTYPES.items():
        for mean in (False, True):
            if mean and dtype == torch.int32:
                continue
            for seed, shape in enumerate([(), (0,), (1,), (61,), (62,), (63,), (3, 0, 2), (7, 9), (1000,), (5000,)]):
                parts = [values(shape, dtype, each, seed) for each in range(size)]
                tensor = parts[rank].clone()
                result = dist.all_reduce(tensor, op=dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM)
                assert result is None
                ratio = check(tensor, parts, dtype, mean)
                worst[name] = max(worst.get(name, 0.0), ratio)
        parts = [values((12, 34), dtype, each, 77) for each in range(size)]
        transposed = parts[rank].clone().t()
        dist.all_reduce(transposed)
        check(transposed, [part.t() for part in parts], dtype, False)
        whole = parts[rank].clone()
        dist.all_reduce(whole[:, ::3])  # strided: what is between must stay
        check(whole[:, ::3], [part[:, ::3] for part in parts], dtype, False)
        assert torch.equal(whole[:, 1::3], parts[rank][:, 1::3])
        expanded = values((4, 1), dtype, 0, 5).expand(4, 1)
        dist.all_reduce(expanded)
    return worst


def not_finite() -> None:
    """NaN, Inf and what fixed point cannot hold arrive as a float sum does."""
    rank = init()
    tensor = torch.zeros(1000)
    tensor[10] = math.nan if rank == 0 else 1.0
    tensor[20] = math.inf
    tensor[30] = math.inf if rank == 0 else -math.inf
    tensor[40] = 1e30 * (rank + 1)
    tensor[50] = 20.0  # each fits, the sum does not
    tensor[60] = 0.5
    dist.all_reduce(tensor)
    assert math.isnan(tensor[10]) and math.isnan(tensor[30])
    assert tensor[20] == math.inf
    # What summing the float32 values in float64 gives.
    assert tensor[40] == (torch.tensor(1e30).double() + torch.tensor(2e30).double()).float()
    assert tensor[50] == 40.0
    assert tensor[60] == 1.0
    half = torch.full((100,), 60000.0, dtype=torch.float16)
    dist.all_reduce(half)
    assert torch.isinf(half).all()
    half = torch.full((100,), 60000.0, dtype=torch.float16)
    dist.all_reduce(half, op=dist.ReduceOp.AVG)
    assert (half == 60000.0).all()


def in_flight() -> dict:
    """Many operations at once, larger than the shared file, waited for out of order; callbacks that wait."""
    import atp_client

    rank = init()
    size = dist.get_world_size()
    connection = atp_client.connect()
    before = connection.shared_bytes
    tensors = [values((700_001,), torch.float32, rank, seed) for seed in range(8)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for seed in reversed(range(8)):
        works[seed].wait()
        assert works[seed].is_completed() and works[seed].is_success()
        check(
            tensors[seed], [values((700_001,), torch.float32, each, seed) for each in range(size)], torch.float32, False
        )
    big = values((6_000_001,), torch.float32, rank, 99)
    dist.all_reduce(big)
    parts = [values((6_000_001,), torch.float32, each, 99) for each in range(size)]
    check(big, parts, torch.float32, False)

    # A callback may wait for a later operation (PowerSGD does), even when several do at once.
    outer = [torch.full((10,), 1.0) for _ in range(4)]
    inner = [torch.full((10,), 2.0) for _ in range(4)]
    barrier_order = []

    def then(number: int):
        def callback(future):
            work = dist.all_reduce(inner[number], async_op=True)
            work.wait()
            barrier_order.append(number)
            return future.value()[0]

        return callback

    futures = []
    for number in range(4):
        # One at a time: the order of the inner operations has to be the same on all ranks.
        future = dist.all_reduce(outer[number], async_op=True).get_future().then(then(number))
        future.wait()
        futures.append(future)
    assert barrier_order == [0, 1, 2, 3]
    assert all((future.value() == size).all() for future in futures)
    assert all((tensor == 2.0 * size).all() for tensor in inner)
    # Nothing keeps the tensors of finished operations alive.
    import gc
    import weakref

    finished = []
    for _ in range(8):
        tensor = torch.ones(10)
        finished.append(weakref.ref(tensor))
        dist.all_reduce(tensor)
    del tensor, outer, future, futures
    gc.collect()
    assert sum(each() is not None for each in finished) <= 4
    return {"before": before, "after": connection.shared_bytes}


def other_collectives() -> None:
    """Whatever is not a sum of a supported dtype rides on gloo."""
    rank = init()
    size = dist.get_world_size()
    assert dist.get_backend() == "atp"
    for dtype in (torch.float64, torch.int64):
        tensor = torch.full((100,), rank + 1, dtype=dtype)
        dist.all_reduce(tensor)
        assert (tensor == sum(range(1, size + 1))).all()
    tensor = torch.tensor([1.0 * rank, 5.0], dtype=torch.float32)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    assert tensor.tolist() == [size - 1, 5.0]
    tensor = torch.full((10,), float(rank), dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    assert (tensor == (size - 1) / 2).all()
    tensor = torch.full((5,), float(rank))
    dist.broadcast(tensor, 1)
    assert (tensor == 1).all()
    for tensor in (torch.full((5,), rank + 0.5).bfloat16(), torch.tensor(rank + 0.5).bfloat16()):
        dist.broadcast(tensor, 1)
        assert (tensor == 1.5).all()
    parts = [torch.zeros(3).bfloat16() for _ in range(size)]
    dist.all_gather(parts, torch.full((3,), float(rank)).bfloat16())
    assert [int(part[0]) for part in parts] == list(range(size))
    parts = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(parts, torch.full((3,), float(rank)))
    assert [int(part[0]) for part in parts] == list(range(size))
    tensor = torch.full((4,), float(rank + 1))
    dist.reduce(tensor, 0)
    if rank == 0:
        assert (tensor == sum(range(1, size + 1))).all()
    gathered = [torch.zeros(2) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.full((2,), float(rank)), gathered, dst=0)
    received = torch.zeros(2)
    dist.scatter(received, [torch.full((2,), float(each)) for each in range(size)] if rank == 0 else None, src=0)
    assert (received == rank).all()
    if rank == 0:
        dist.send(torch.tensor([7.0]), 1)
    elif rank == 1:
        tensor = torch.zeros(1)
        dist.recv(tensor, 0)
        assert tensor == 7
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert [each["rank"] for each in objects] == list(range(size))
    box = ["hello" if rank == 0 else None]
    dist.broadcast_object_list(box, 0)
    assert box == ["hello"]
    dist.barrier()

    # A group of all ranks uses ATP, one of some of them gloo.
    everybody = dist.new_group(list(range(size)))
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=everybody)
    assert (tensor == size).all()
    alone = [dist.new_group([each]) for each in range(size)][rank]
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=alone)
    assert (tensor == 1).all()

    # In place, whatever the tensor is.
    leaf = torch.ones(3, requires_grad=True)
    dist.all_reduce(leaf)
    assert leaf.requires_grad and leaf.is_leaf and (leaf == size).all()
    with torch.inference_mode():
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
    assert (tensor == size).all()
    dist.destroy_process_group()

    # The same process may start again (at a store of its own: torch counts who has come).
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    dist.init_process_group("atp")
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert (tensor == size).all()
    dist.destroy_process_group()


class Net(nn.Module):
    """Has a part that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 300)
        self.second = nn.Linear(300, 300)
        self.norm = nn.BatchNorm1d(300)
        self.sometimes = nn.Linear(300, 300)
        self.last = nn.Linear(300, 5)

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        x = torch.relu(self.norm(self.second(torch.relu(self.first(x)))))
        return self.last(torch.relu(self.sometimes(x)) if extra else x)


def _train(model, dtype: torch.dtype, batches, accumulate: bool, extra) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        context = model.no_sync() if accumulate and hasattr(model, "no_sync") else contextlib.nullcontext()
        if accumulate:
            with context:
                model(batch.to(dtype), extra(step)).pow(2).mean().backward()
        model(batch.to(dtype), extra(step)).pow(2).mean().backward()
        optimizer.step()


def ddp(kind: str, hook: bool = False) -> float:
    """Trains with DDP and compares the weights with those that averaging by hand over gloo gives."""
    import atp_client

    torch.set_num_threads(1)
    dist.init_process_group("gloo" if hook else "atp", timeout=timedelta(seconds=120))
    rank, size = dist.get_rank(), dist.get_world_size()
    dtype = {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(kind, torch.float32)
    options = {
        "unused": {"find_unused_parameters": True},
        "view": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1},
        "accumulate": {},
    }.get(kind, {"bucket_cap_mb": 1})

    def extra(step: int) -> bool:
        return kind != "unused" or step % 2 == 0

    torch.manual_seed(rank)  # DDP has to send rank 0's weights around
    net = Net().to(dtype).train()
    model = DistributedDataParallel(net, broadcast_buffers=False, **options)
    if hook:
        model.register_comm_hook(None, atp_client.allreduce_hook)

    torch.manual_seed(0)
    reference = Net().to(dtype).train()
    generator = torch.Generator().manual_seed(5 + rank)
    batches = [torch.randn(8, 20, generator=generator) for _ in range(6)]
    _train(model, dtype, batches, kind == "accumulate", extra)

    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05)
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        for _ in range(2 if kind == "accumulate" else 1):
            reference(batch.to(dtype), extra(step)).pow(2).mean().backward()
        for parameter in reference.parameters():
            if parameter.grad is None:
                continue
            average = parameter.grad.double()
            dist.all_reduce(average)  # float64: never through ATP
            parameter.grad = (average / size).to(dtype)
        optimizer.step()
    if kind == "unused":
        assert net.sometimes.weight.grad is None or net.sometimes.weight.grad.abs().sum() >= 0
    worst = 0.0
    for mine, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        worst = max(worst, (mine.double() - theirs.double()).abs().max().item())
        copies = [torch.empty_like(mine.double()) for _ in range(size)]
        dist.all_gather(copies, mine.detach().double())
        assert all(torch.equal(copy, copies[0]) for copy in copies), "the ranks have different weights"
    used = atp_client.stats()["gradient_packets"]
    assert (used > 0) == (kind != "float64"), used
    return worst


def digits(arguments: list) -> None:
    """The example as a user runs it."""
    import runpy

    sys.argv = ["train.py", *arguments]
    runpy.run_path(str(Path(os.environ["DIGITS"])), run_name="__main__")


# -- what goes wrong


def only_init(seconds: float = 120.0) -> int:
    return init(seconds)


def mismatch() -> str:
    import atp_client

    rank = init()
    try:
        dist.all_reduce(torch.ones(100 + rank))
    except atp_client.MismatchError as error:
        text = str(error)
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    assert (tensor == dist.get_world_size()).all()
    return text


def wait_for_peer(seconds: float = 120.0) -> None:
    """Rank 0 starts a sum that rank 1 never joins."""
    rank = init(seconds)
    dist.barrier()
    print("ready", flush=True)
    if rank == 0:
        work = dist.all_reduce(torch.ones(3_000_000), async_op=True)
        print("submitted", flush=True)
        try:
            work.wait()
        finally:
            print(f"ended {type(work.exception()).__name__}", flush=True)
    else:
        time.sleep(300)


def ddp_with_peer_that_leaves() -> None:
    rank = init()
    model = DistributedDataParallel(nn.Linear(10, 10))
    for step in range(100):
        if rank == 1 and step == 3:
            print("ready", flush=True)
            time.sleep(300)
        model(torch.randn(4, 10)).sum().backward()


def epoch_then_again() -> int:
    import atp_client

    init()
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    print("ready", flush=True)
    try:
        while True:
            dist.all_reduce(torch.ones(1000))
            time.sleep(0.01)
    except (atp_client.EpochError, atp_client.PeerError) as error:
        first = type(error).__name__
    end = time.monotonic() + 30
    while True:
        try:
            epoch = atp_client.connect().epoch
            if epoch == 2:
                break
        except atp_client.AtpError:
            pass
        assert time.monotonic() < end
        time.sleep(0.1)
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    dist.init_process_group("atp")
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    assert (tensor == dist.get_world_size()).all()
    print(first, flush=True)
    return epoch


def gradients(hook: bool, fixed_scale: bool) -> dict:
    """What DDP makes of the same gradients with the backend, with the hook, and with a plain mean, as bits."""
    import atp_client

    torch.set_num_threads(1)
    dist.init_process_group("gloo" if hook else "atp", timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(17 + rank)
    bits = {}
    for magnitude in (1.0, 1e-4) if fixed_scale else (1.0, 1e-12, 1e12):
        torch.manual_seed(3)
        model = DistributedDataParallel(nn.Linear(50, 40), bucket_cap_mb=1)
        if hook:
            model.register_comm_hook(None, atp_client.allreduce_hook)
        model(torch.randn(8, 50, generator=generator) * magnitude).sin().sum().mul(magnitude).backward()
        bits[str(magnitude)] = model.module.weight.grad.view(torch.int32).flatten()[:200].tolist()
    group = dist.new_group(backend="atp") if hook else None
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(rank)) * 1e-5
    if hook:
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=group)
    else:
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    bits["mean"] = tensor.view(torch.int32).tolist()
    return bits


def hook_with_wrong_group() -> None:
    import atp_client

    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(10, 10))
    model.register_comm_hook(None, atp_client.allreduce_hook)
    model(torch.randn(4, 10)).sum().backward()
