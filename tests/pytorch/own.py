# SPDX-License-Identifier: Apache-2.0
"""Our own tests, for uses of process groups of which torch's wheel has no test: the same code on gloo and on atp.

Runs in the interpreter with torch. Expectations are computed in one process, never taken from the other backend.
"""

from __future__ import annotations

import copy
import functools
import os
import tempfile
import threading
import time
import unittest
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_distributed import MultiProcessTestCase

BACKEND = os.environ["BACKEND"]
VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if VERSION >= (2, 6):
    # What torch.compile imports at its first use takes half a minute: once, before the ranks are forked.
    import torch._dynamo
    import torch._inductor.lowering
SIZE = 4
TIMEOUT = timedelta(seconds=60)

Test = Callable[..., None]


def since(*version: int) -> Callable[[Test], Test]:
    """Skips a test on a torch that does not have what it tests."""
    return unittest.skipIf(version > VERSION, f"torch {'.'.join(map(str, version))} has it first")


class Ranks(MultiProcessTestCase):  # type: ignore[misc]
    """Tests that run in SIZE processes, which are a process group when the test begins."""

    @property
    def world_size(self) -> int:
        return SIZE

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def tearDown(self) -> None:
        super().tearDown()
        Path(self.file_name).unlink(missing_ok=True)

    def init(self, timeout: timedelta = TIMEOUT, backend: str = BACKEND) -> None:
        """Makes the default process group."""
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=timeout)

    @property
    def numbers(self) -> range:
        """All ranks."""
        return range(self.world_size)


def grouped(test: Test) -> Test:
    """The test runs inside of a process group."""

    @functools.wraps(test)
    def run(self: Ranks) -> None:
        self.init()
        test(self)
        dist.barrier()
        dist.destroy_process_group()

    return run


def model(seed: int = 0) -> nn.Module:
    """A small network, the same on all ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def batch(rank: int, step: int = 0, rows: int = 6) -> torch.Tensor:
    """What a rank trains on."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, 8, generator=generator)


def train_alone(net: nn.Module, ranks: list[int] | range, steps: int, rate: float = 0.1) -> list[torch.Tensor]:
    """Parameters after SGD on the mean of the ranks' gradients, in this process alone."""
    net = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in ranks:
            (net(batch(rank, step)).square().mean() / len(ranks)).backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def train(net: nn.Module, rank: int, steps: int, rate: float = 0.1) -> None:
    """SGD of one rank on a parallel model."""
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    for step in range(steps):
        optimizer.zero_grad()
        net(batch(rank, step)).square().mean().backward()
        optimizer.step()


class Collectives(Ranks):
    """c10d's functions, for every dtype, layout and group."""

    @grouped
    def test_all_reduce_of_every_dtype_and_operation(self) -> None:
        operations: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
            dist.ReduceOp.SUM: lambda rows: rows.sum(0),
            dist.ReduceOp.MAX: lambda rows: rows.amax(0),
            dist.ReduceOp.MIN: lambda rows: rows.amin(0),
            dist.ReduceOp.PRODUCT: lambda rows: rows.prod(0),
        }
        dtypes = [torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.uint8, torch.int8]
        for dtype in dtypes:
            for operation, expected in operations.items():
                rows = torch.stack([torch.arange(1, 6) % 3 + rank % 2 for rank in self.numbers]).to(dtype)
                tensor = rows[self.rank].clone()
                dist.all_reduce(tensor, operation)
                self.assertEqual(tensor, expected(rows.double()).to(dtype), f"{dtype} {operation}")

    @since(2, 1)
    @grouped
    def test_all_reduce_of_bfloat16_and_complex(self) -> None:
        tensor = torch.full((33,), float(self.rank + 1), dtype=torch.bfloat16)
        dist.all_reduce(tensor)
        self.assertEqual(tensor, torch.full((33,), 10.0, dtype=torch.bfloat16))
        numbers = torch.full((5,), complex(self.rank, 1), dtype=torch.complex64)
        dist.all_reduce(numbers)
        self.assertEqual(numbers, torch.full((5,), complex(6, 4), dtype=torch.complex64))

    @grouped
    def test_all_reduce_of_bits(self) -> None:
        for dtype in (torch.int32, torch.int64):
            rows = torch.stack([torch.tensor([1 << rank, 7, 5 + rank]) for rank in self.numbers]).to(dtype)
            for operation, function in ((dist.ReduceOp.BOR, torch.bitwise_or), (dist.ReduceOp.BAND, torch.bitwise_and)):
                tensor = rows[self.rank].clone()
                dist.all_reduce(tensor, operation)
                self.assertEqual(tensor, functools.reduce(function, rows))

    @grouped
    def test_all_reduce_of_every_layout(self) -> None:
        total = sum(rank + 1 for rank in self.numbers)
        square = torch.arange(12.0).view(3, 4)
        layouts: dict[str, Callable[[], torch.Tensor]] = {
            "transposed": lambda: square.clone().t(),
            "no dimension": lambda: torch.tensor(3.0),
            "empty": lambda: torch.empty(0),
            "one": lambda: torch.ones(1),
            "large": lambda: torch.ones(700_001),
            "channels last": lambda: torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
            "of a larger one": lambda: torch.arange(100.0)[10:20],
        }
        for name, make in layouts.items():
            tensor = make()
            expected = tensor.clone() * total
            tensor *= self.rank + 1
            dist.all_reduce(tensor)
            self.assertEqual(tensor, expected, name)

    @grouped
    def test_sparse_all_reduce(self) -> None:
        tensor = torch.sparse_coo_tensor([[self.rank, 0]], [1.0, 2.0], (SIZE,))
        dist.all_reduce(tensor)
        self.assertEqual(tensor.to_dense(), torch.tensor([9.0, 1.0, 1.0, 1.0]))

    @grouped
    def test_works_and_futures(self) -> None:
        tensor = torch.full((10,), float(self.rank))
        work = dist.all_reduce(tensor, async_op=True)
        self.assertTrue(work.wait())
        self.assertTrue(work.is_completed())
        self.assertEqual(tensor, torch.full((10,), 6.0))
        tensor = torch.full((10,), float(self.rank))
        future = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0] / 2)
        self.assertEqual(future.wait(), torch.full((10,), 3.0))
        works = [dist.all_reduce(torch.ones(1000) * k, async_op=True) for k in range(50)]
        for each in reversed(works):
            each.wait(timedelta(seconds=30))

    @grouped
    def test_barrier_ends_after_what_was_before(self) -> None:
        for contiguous in (True, False):
            tensors = [torch.full((100, 100), float(k)) for k in range(16)]
            if not contiguous:
                tensors = [tensor.t() for tensor in tensors]
            for tensor in tensors:
                dist.all_reduce(tensor, async_op=True)
            dist.barrier()
            self.assertEqual([tensor[0, 0].item() for tensor in tensors], [4.0 * k for k in range(16)])
            tensors = [torch.full((100, 100), float(k)) for k in range(16)]
            for tensor in tensors:
                dist.all_reduce(tensor, async_op=True)
            work = dist.barrier(async_op=True)
            work.get_future().wait()
            self.assertEqual([tensor[99, 99].item() for tensor in tensors], [4.0 * k for k in range(16)])

    @grouped
    def test_rooted_collectives(self) -> None:
        for root in self.numbers:
            tensor = torch.full((3, 2), float(self.rank))
            dist.broadcast(tensor, root)
            self.assertEqual(tensor, torch.full((3, 2), float(root)))
            tensor = torch.full((7,), float(self.rank))
            dist.reduce(tensor, root)
            if self.rank == root:
                self.assertEqual(tensor, torch.full((7,), 6.0))
            rows = [torch.zeros(2) for _ in self.numbers] if self.rank == root else None
            dist.gather(torch.full((2,), float(self.rank)), rows, root)
            if rows is not None:
                self.assertEqual(torch.stack(rows), torch.arange(4.0)[:, None].expand(4, 2))
            mine = torch.zeros(2)
            dist.scatter(mine, [torch.full((2,), k * 2.0) for k in self.numbers] if self.rank == root else None, root)
            self.assertEqual(mine, torch.full((2,), self.rank * 2.0))

    @grouped
    def test_all_gather_and_all_to_all(self) -> None:
        rows = [torch.zeros(3, dtype=torch.int64) for _ in self.numbers]
        dist.all_gather(rows, torch.full((3,), self.rank))
        self.assertEqual(torch.stack(rows), torch.arange(4)[:, None].expand(4, 3))
        out = torch.zeros(4)
        dist.all_to_all_single(out, torch.arange(4.0) + 10 * self.rank)
        self.assertEqual(out, torch.arange(4.0) * 10 + self.rank)

    @grouped
    def test_all_to_all_of_lists(self) -> None:
        for gap in (1, 2):  # outputs in one piece, and with gaps in memory
            outputs = [torch.zeros((self.rank + 1, 2 * gap))[:, ::gap] for _ in self.numbers]
            inputs = [torch.full((to + 1, 2), 10.0 * self.rank + to) for to in self.numbers]
            work = dist.all_to_all(outputs, inputs, async_op=True)
            work.wait()
            for source, output in enumerate(outputs):
                self.assertEqual(output, torch.full((self.rank + 1, 2), 10.0 * source + self.rank))
        empty = [torch.zeros(0) for _ in self.numbers]
        dist.all_to_all([torch.zeros(0) for _ in self.numbers], empty)

    @since(2, 0)
    @grouped
    def test_all_gather_into_tensor(self) -> None:
        out = torch.zeros(8)
        dist.all_gather_into_tensor(out, torch.full((2,), float(self.rank)))
        self.assertEqual(out, torch.arange(4.0).repeat_interleave(2))

    @since(2, 4)
    @grouped
    def test_reduce_scatter(self) -> None:
        out = torch.zeros(2)
        dist.reduce_scatter_tensor(out, torch.arange(8.0))
        self.assertEqual(out, 4 * torch.arange(8.0)[2 * self.rank : 2 * self.rank + 2])

    @grouped
    def test_point_to_point(self) -> None:
        right, left = (self.rank + 1) % SIZE, (self.rank - 1) % SIZE
        tensor, received = torch.full((5,), float(self.rank)), torch.zeros(5)
        sending = dist.isend(tensor, right, tag=3)
        dist.irecv(received, left, tag=3).wait()
        sending.wait()
        self.assertEqual(received, torch.full((5,), float(left)))
        if self.rank == 0:
            seen = set()
            for _ in range(SIZE - 1):
                seen.add(dist.recv(received))
            self.assertEqual(seen, {1, 2, 3})
        else:
            dist.send(tensor, 0)

    @grouped
    def test_batch_isend_irecv(self) -> None:
        right, left = (self.rank + 1) % SIZE, (self.rank - 1) % SIZE
        received = torch.zeros(4)
        sends = [
            dist.P2POp(dist.isend, torch.full((4,), float(self.rank)), right),
            dist.P2POp(dist.irecv, received, left),
        ]
        for work in dist.batch_isend_irecv(sends):
            work.wait()
        self.assertEqual(received, torch.full((4,), float(left)))

    @grouped
    def test_coalesced(self) -> None:
        pair = [torch.full((3,), float(self.rank)), torch.full((2, 2), self.rank + 1.0)]
        dist.all_reduce_coalesced(pair)
        self.assertEqual(pair, [torch.full((3,), 6.0), torch.full((2, 2), 10.0)])
        tensors = [torch.full((5,), float(self.rank)), torch.full((3,), float(self.rank))]
        dist._broadcast_coalesced(dist.group.WORLD or dist.distributed_c10d._get_default_group(), tensors, 1 << 20, 2)
        self.assertEqual(tensors, [torch.full((5,), 2.0), torch.full((3,), 2.0)])

    @since(2, 1)
    @grouped
    def test_coalescing_manager(self) -> None:
        tensors = [torch.full((3,), self.rank + k * 1.0) for k in range(3)]
        try:
            with dist._coalescing_manager():
                for tensor in tensors:
                    dist.all_reduce(tensor)
        except (RuntimeError, NotImplementedError) as error:
            self.skipTest(f"{BACKEND}: {error}")
        self.assertEqual(tensors, [torch.full((3,), 6.0 + 4 * k) for k in range(3)])

    @grouped
    def test_objects(self) -> None:
        everything: list[Any] = [None] * SIZE
        dist.all_gather_object(everything, {"rank": self.rank})
        self.assertEqual(everything, [{"rank": rank} for rank in self.numbers])
        root: list[Any] | None = [None] * SIZE if self.rank == 0 else None
        dist.gather_object("x" * self.rank, root, dst=0)
        if root is not None:
            self.assertEqual(root, ["", "x", "xx", "xxx"])
        objects = [self.rank, "text" if self.rank == 1 else None]
        dist.broadcast_object_list(objects, src=1)
        self.assertEqual(objects, [1, "text"])
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [(rank,) for rank in self.numbers] if self.rank == 3 else [None] * 4, src=3)
        self.assertEqual(mine, [(self.rank,)])

    @since(2, 4)
    @grouped
    def test_objects_point_to_point(self) -> None:
        objects: list[Any] = [None, None]
        if self.rank == 0:
            dist.send_object_list(["a", {"b": 1}], dst=1)
        if self.rank == 1:
            dist.recv_object_list(objects, src=0)
            self.assertEqual(objects, ["a", {"b": 1}])

    def test_monitored_barrier(self) -> None:
        self.init()
        dist.monitored_barrier(timeout=timedelta(seconds=20))
        if self.rank == 2:
            time.sleep(4)
        elif self.rank == 0:
            with self.assertRaisesRegex(RuntimeError, r"[Rr]ank 2 failed"):
                dist.monitored_barrier(timeout=timedelta(seconds=1))
        else:
            with self.assertRaises(RuntimeError):
                dist.monitored_barrier(timeout=timedelta(seconds=3))

    @grouped
    def test_autograd_functions(self) -> None:
        from torch.distributed.nn import functional

        tensor = torch.full((3,), self.rank + 1.0, requires_grad=True)
        (functional.all_reduce(tensor) * (self.rank + 1)).sum().backward()
        self.assertEqual(tensor.grad, torch.full((3,), 10.0))
        tensor = torch.full((2,), self.rank + 1.0, requires_grad=True)
        gathered = functional.all_gather(tensor)
        (torch.stack(list(gathered)) * (self.rank + 1)).sum().backward()
        self.assertEqual(tensor.grad, torch.full((2,), 10.0))

    @grouped
    def test_under_inference_mode_and_grad(self) -> None:
        with torch.inference_mode():
            tensor = torch.ones(5)
            dist.all_reduce(tensor)
            self.assertEqual(tensor, torch.full((5,), 4.0))
        leaf = torch.ones(5, requires_grad=True)
        with torch.no_grad():
            dist.all_reduce(leaf)
        self.assertEqual(leaf.detach(), torch.full((5,), 4.0))
        from_inference = tensor.clone()
        dist.all_reduce(from_inference)
        self.assertEqual(from_inference, torch.full((5,), 16.0))

    @grouped
    def test_profiler(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
            dist.all_reduce(torch.ones(4, 3))
            dist.broadcast(torch.ones(4, 3), 0)
        names = [event.name for event in profile.events()]
        self.assertIn(f"{BACKEND}:all_reduce", names)
        # atp leaves broadcasts to gloo.
        self.assertTrue({f"{BACKEND}:broadcast", "gloo:broadcast"} & set(names), names)


class Groups(Ranks):
    """Several process groups at once."""

    @grouped
    def test_groups_in_different_orders(self) -> None:
        first, second = dist.new_group(), dist.new_group()
        ones, hundreds = torch.full((1000,), 1.0 + self.rank), torch.full((1000,), 100.0)
        order = [(first, ones), (second, hundreds)]
        works = [
            dist.all_reduce(tensor, group=group, async_op=True)
            for group, tensor in (order if self.rank % 2 else reversed(order))
        ]
        for work in works:
            work.wait()
        self.assertEqual((ones[0].item(), hundreds[0].item()), (10.0, 400.0))

    @grouped
    def test_groups_in_two_threads(self) -> None:
        groups = [dist.new_group() for _ in range(2)]
        tensors = [torch.full((200_000,), float(10**k)) for k in range(2)]
        errors: list[BaseException] = []

        def run(k: int) -> None:
            try:
                for _ in range(20):
                    tensor = tensors[k].clone()
                    dist.all_reduce(tensor, group=groups[k])
                    if not torch.equal(tensor, tensors[k] * SIZE):
                        raise AssertionError(f"group {k} got {tensor[:2]}")
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(errors, [])

    @grouped
    def test_groups_of_some_ranks(self) -> None:
        evens, odds = dist.new_group([0, 2]), dist.new_group([1, 3])
        mine = evens if self.rank % 2 == 0 else odds
        tensor = torch.full((5,), float(self.rank))
        dist.all_reduce(tensor, group=mine)
        self.assertEqual(tensor, torch.full((5,), 2.0 if self.rank % 2 == 0 else 4.0))
        self.assertEqual(dist.get_world_size(mine), 2)
        self.assertEqual(dist.get_rank(mine), self.rank // 2)
        dist.barrier(group=mine)

    @since(2, 1)
    @grouped
    def test_local_synchronization(self) -> None:
        ranks = [0, 1] if self.rank < 2 else [2, 3]
        group = dist.new_group(ranks, use_local_synchronization=True)
        tensor = torch.tensor([float(self.rank)])
        dist.all_reduce(tensor, group=group)
        self.assertEqual(tensor.item(), float(sum(ranks)))

    @grouped
    def test_subgroups(self) -> None:
        mine, everyone = dist.new_subgroups(2)
        self.assertEqual(len(everyone), 2)
        tensor = torch.tensor([self.rank + 1])
        dist.all_reduce(tensor, group=mine)
        self.assertEqual(tensor.item(), 3 if self.rank < 2 else 7)

    @since(2, 4)
    @grouped
    def test_split_group(self) -> None:
        try:
            group = dist.split_group(split_ranks=[[0, 1], [2, 3]])
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            if BACKEND == "gloo":
                self.skipTest(f"gloo: {error}")
            raise
        tensor = torch.tensor([float(self.rank)])
        dist.all_reduce(tensor, group=group)
        self.assertEqual(tensor.item(), 1.0 if self.rank < 2 else 5.0)

    @grouped
    def test_destroy_one_group(self) -> None:
        first, second = dist.new_group(), dist.new_group()
        dist.all_reduce(torch.ones(10), group=first)
        dist.destroy_process_group(first)
        tensor = torch.ones(10)
        dist.all_reduce(tensor, group=second)
        dist.all_reduce(tensor)
        self.assertEqual(tensor, torch.full((10,), 16.0))
        for _ in range(5):
            group = dist.new_group()
            tensor = torch.ones(10)
            dist.all_reduce(tensor, group=group)
            self.assertEqual(tensor, torch.full((10,), 4.0))
            dist.destroy_process_group(group)

    def test_default_group_again_and_again(self) -> None:
        for round_number in range(3):
            store = dist.FileStore(f"{self.file_name}-{round_number}", SIZE)
            dist.init_process_group(BACKEND, store=store, rank=self.rank, world_size=SIZE, timeout=TIMEOUT)
            tensor = torch.full((100,), 1.0)
            dist.all_reduce(tensor)
            self.assertEqual(tensor, torch.full((100,), 4.0))
            dist.barrier()
            dist.destroy_process_group()

    @since(2, 0)
    def test_backend_of_a_device(self) -> None:
        self.init(backend=f"cpu:{BACKEND}")
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        self.assertEqual(tensor, torch.full((3,), 4.0))
        dist.barrier()
        dist.destroy_process_group()

    def test_time_out_of_the_group(self) -> None:
        self.init(timedelta(seconds=4))
        dist.all_reduce(torch.ones(1000))
        if self.rank == 3:
            time.sleep(8)
        else:
            begin = time.monotonic()
            with self.assertRaises(RuntimeError):
                dist.all_reduce(torch.ones(1000))
            self.assertLess(time.monotonic() - begin, 12)

    @since(2, 2)
    def test_time_out_is_changed(self) -> None:
        self.init(timedelta(seconds=60))
        dist.all_reduce(torch.ones(1000))
        change: Callable[..., None] = dist.distributed_c10d._set_pg_timeout
        change(timedelta(seconds=3), dist.group.WORLD)
        if self.rank == 3:
            time.sleep(8)
        else:
            begin = time.monotonic()
            with self.assertRaises(RuntimeError):
                dist.all_reduce(torch.ones(1000))
            self.assertLess(time.monotonic() - begin, 15)

    @grouped
    def test_a_late_rank(self) -> None:
        if self.rank == 1:
            time.sleep(14)  # longer than the job's stall time-out
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        self.assertEqual(tensor, torch.full((10,), 4.0))

    @since(2, 0)
    @grouped
    def test_names(self) -> None:
        self.assertEqual(dist.get_backend(), BACKEND)
        group = dist.distributed_c10d._get_default_group()
        self.assertEqual(group.rank(), self.rank)
        self.assertEqual(group.size(), SIZE)
        if VERSION >= (2, 2):
            self.assertTrue(group.group_name)
            self.assertEqual(dist.get_process_group_ranks(group), list(self.numbers))


class Parallel(Ranks):
    """What is built on process groups."""

    def same_parameters(self, net: nn.Module, expected: list[torch.Tensor]) -> None:
        for parameter, wanted in zip(net.parameters(), expected, strict=True):
            self.assertEqual(parameter.detach(), wanted, rtol=1e-4, atol=1e-5)

    @grouped
    def test_ddp(self) -> None:
        options: list[dict[str, Any]] = [
            {},
            {"find_unused_parameters": True},
            {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005},
            {"static_graph": True, "bucket_cap_mb": 0.0005},
            {"broadcast_buffers": False},
        ]
        for each in options:
            net = DistributedDataParallel(model(), **each)
            train(net, self.rank, 5)
            self.same_parameters(net, train_alone(model(), self.numbers, 5))

    @grouped
    def test_ddp_no_sync(self) -> None:
        net = DistributedDataParallel(model())
        with net.no_sync():
            net(batch(self.rank)).square().mean().backward()
        net(batch(self.rank, 1)).square().mean().backward()
        alone = model()
        for rank in self.numbers:
            for step in range(2):
                (alone(batch(rank, step)).square().mean() / SIZE).backward()
        for parameter, wanted in zip(net.parameters(), alone.parameters(), strict=True):
            self.assertEqual(parameter.grad, wanted.grad, rtol=1e-4, atol=1e-5)

    @grouped
    def test_ddp_hooks(self) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        group = dist.group.WORLD
        exact = train_alone(model(), self.numbers, 3)
        hooks: list[tuple[Any, Any, float]] = [
            (group, default_hooks.allreduce_hook, 1e-5),
            (group, default_hooks.fp16_compress_hook, 2e-2),
            (group, default_hooks.bf16_compress_hook, 1e-1),
            (
                powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2),
                powerSGD_hook.powerSGD_hook,
                1.0,
            ),
            (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 2e-2),
        ]
        for state, hook, tolerance in hooks:
            if hook is default_hooks.bf16_compress_hook and VERSION < (2, 1):
                continue  # gloo of that time does not know bfloat16
            net = DistributedDataParallel(model())
            net.register_comm_hook(state, hook)
            train(net, self.rank, 3)
            for parameter, wanted in zip(net.parameters(), exact, strict=True):
                self.assertEqual(parameter.detach(), wanted, rtol=tolerance, atol=tolerance)

    @grouped
    def test_ddp_join(self) -> None:
        for divide in (True, False):
            net = DistributedDataParallel(model())
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            with net.join(divide_by_initial_world_size=divide):
                for step in range(2 + self.rank):
                    optimizer.zero_grad()
                    net(batch(self.rank, step)).square().mean().backward()
                    optimizer.step()
            alone = model()
            optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
            for step in range(2 + SIZE - 1):
                active = [rank for rank in self.numbers if step < 2 + rank]
                optimizer.zero_grad()
                for rank in active:
                    (alone(batch(rank, step)).square().mean() / (SIZE if divide else len(active))).backward()
                optimizer.step()
            self.same_parameters(net, [parameter.detach() for parameter in alone.parameters()])

    @grouped
    def test_ddp_join_throws(self) -> None:
        net = DistributedDataParallel(model())
        with self.assertRaisesRegex(RuntimeError, "exhausted"):
            with net.join(throw_on_early_termination=True):
                for step in range(5 if self.rank else 2):
                    net(batch(self.rank, step)).square().mean().backward()

    @grouped
    def test_zero_redundancy_optimizer(self) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        net = DistributedDataParallel(model())
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            net(batch(self.rank, step)).square().mean().backward()
            optimizer.step()
        self.same_parameters(net, train_alone(model(), self.numbers, 3))

    @grouped
    def test_post_local_sgd(self) -> None:
        from torch.distributed.algorithms.model_averaging import averagers

        net = model()
        averager = averagers.PeriodicModelAverager(period=1, warmup_steps=0)
        for parameter in net.parameters():
            parameter.data.fill_(float(self.rank))
            parameter.grad = torch.zeros_like(parameter)
        averager.average_parameters(net.parameters())
        for parameter in net.parameters():
            self.assertEqual(parameter.detach(), torch.full_like(parameter, 1.5))

    @since(2, 6)
    @grouped
    def test_compiled_ddp(self) -> None:
        net = DistributedDataParallel(torch.compile(model(), backend="aot_eager"))
        train(net, self.rank, 3)
        self.same_parameters(net, train_alone(model(), self.numbers, 3))
        net = torch.compile(DistributedDataParallel(model()), backend="aot_eager")
        train(net, self.rank, 3)
        self.same_parameters(net, train_alone(model(), self.numbers, 3))

    @since(2, 6)
    @grouped
    def test_compiled_collective(self) -> None:
        def reduced(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor * 2
            dist.all_reduce(tensor)
            return tensor + 1

        compiled = torch.compile(reduced, backend="aot_eager", fullgraph=True)
        self.assertEqual(compiled(torch.ones(5)), torch.full((5,), 9.0))

    @since(2, 2)
    @grouped
    def test_fsdp(self) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

        net = FullyShardedDataParallel(
            model(), device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP
        )
        train(net, self.rank, 3)
        with FullyShardedDataParallel.summon_full_params(net):
            self.same_parameters(net, train_alone(model(), self.numbers, 3))


def full(parameters: Any) -> list[torch.Tensor]:
    """Whole tensors of parameters that may be DTensors."""
    return [each.full_tensor().detach() if hasattr(each, "full_tensor") else each.detach() for each in parameters]


class Meshes(Ranks):
    """DeviceMesh and what is built on it."""

    @since(2, 2)
    def test_mesh_makes_the_groups(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.init()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        tensor = torch.tensor([float(self.rank)])
        dist.all_reduce(tensor, group=mesh.get_group("columns"))
        self.assertEqual(tensor.item(), 1.0 if self.rank < 2 else 5.0)
        tensor = torch.tensor([float(self.rank)])
        dist.all_reduce(tensor, group=mesh["rows"].get_group())
        self.assertEqual(tensor.item(), 2.0 if self.rank % 2 == 0 else 4.0)
        self.assertEqual(mesh.get_local_rank("rows"), self.rank // 2)
        if VERSION >= (2, 5):
            flat = mesh["rows", "columns"]._flatten("all")
            tensor = torch.tensor([float(self.rank)])
            dist.all_reduce(tensor, group=flat.get_group())
            self.assertEqual(tensor.item(), 6.0)
        dist.barrier()
        dist.destroy_process_group()

    @since(2, 2)
    @grouped
    def test_mesh_of_a_group(self) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        if not hasattr(DeviceMesh, "from_group"):
            self.skipTest("no DeviceMesh.from_group")
        mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=mesh.get_group())
        self.assertEqual(tensor, torch.full((3,), 4.0))

    @since(2, 5)
    @grouped
    def test_dtensor(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (SIZE,))
        whole = torch.arange(32.0).view(8, 4)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        self.assertEqual(sharded.to_local(), whole[2 * self.rank : 2 * self.rank + 2])
        self.assertEqual(sharded.redistribute(mesh, [Replicate()]).to_local(), whole)
        self.assertEqual(sharded.redistribute(mesh, [Shard(1)]).to_local(), whole[:, self.rank : self.rank + 1])
        self.assertEqual((sharded @ sharded.t()).full_tensor(), whole @ whole.t())
        self.assertEqual(sharded.sum().full_tensor(), whole.sum())
        partial = DTensor.from_local(whole.clone(), mesh, [Partial()])
        self.assertEqual(partial.redistribute(mesh, [Replicate()]).to_local(), 4 * whole)
        self.assertEqual(
            partial.redistribute(mesh, [Shard(0)]).to_local(), 4 * whole[2 * self.rank : 2 * self.rank + 2]
        )
        for operation, factor in (("avg", 1.0), ("max", 1.0), ("min", 1.0)):
            partial = DTensor.from_local(whole.clone(), mesh, [Partial(operation)])
            self.assertEqual(partial.full_tensor(), factor * whole, operation)

    @since(2, 5)
    @grouped
    def test_tensor_parallel(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (SIZE,))
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        alone = copy.deepcopy(net)
        net = parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        inputs = batch(7)
        for each in (net, alone):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                each(inputs).square().mean().backward()
                optimizer.step()
        self.assertEqual(full(net.parameters()), full(alone.parameters()), rtol=1e-4, atol=1e-5)

    @since(2, 6)
    @grouped
    def test_fully_shard(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        for mesh in (
            None,
            init_device_mesh("cpu", (SIZE,)),
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")),
        ):
            net = model()
            options = {"mesh": mesh if mesh is not None else init_device_mesh("cpu", (SIZE,))}
            for layer in net:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, **options)
            fully_shard(net, **options)
            train(net, self.rank, 3)
            expected = train_alone(model(), self.numbers, 3)
            self.assertEqual(full(net.parameters()), expected, rtol=1e-4, atol=1e-5)

    @since(2, 6)
    @grouped
    def test_fully_shard_mixed_precision(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (SIZE,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        net = fully_shard(model(), mesh=mesh, mp_policy=policy) or model()
        train(net, self.rank, 2)
        expected = train_alone(model(), self.numbers, 2)
        self.assertEqual(full(net.parameters()), expected, rtol=1e-1, atol=1e-1)
        if hasattr(nn.utils, "get_total_norm"):
            norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            self.assertTrue(bool(torch.isfinite(norm.full_tensor())))

    @since(2, 6)
    @grouped
    def test_replicate(self) -> None:
        from torch.distributed._composable.replicate import replicate

        net = replicate(model())
        train(net, self.rank, 3)
        expected = train_alone(model(), self.numbers, 3)
        self.assertEqual(full(net.parameters()), expected, rtol=1e-4, atol=1e-5)

    @since(2, 6)
    @grouped
    def test_tensor_parallel_with_fully_shard(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        alone = copy.deepcopy(net)
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(net, mesh=mesh["dp"])
        # Both ranks of a tensor-parallel pair see the same batch.
        train(net, self.rank // 2, 3)
        self.assertEqual(full(net.parameters()), train_alone(alone, [0, 1], 3), rtol=1e-4, atol=1e-5)

    @since(2, 1)
    @grouped
    def test_functional_collectives(self) -> None:
        import torch.distributed._functional_collectives as functional

        everyone = list(self.numbers)
        group: Any = dist.group.WORLD if VERSION >= (2, 4) else everyone
        tensor = torch.full((4,), self.rank + 1.0)
        self.assertEqual(functional.all_reduce(tensor, "sum", group) + 0, torch.full((4,), 10.0))
        self.assertEqual(functional.all_reduce(tensor, "max", group) + 0, torch.full((4,), 4.0))
        self.assertEqual(functional.all_gather_tensor(tensor[:1], 0, group) + 0, torch.arange(1.0, 5.0))
        if VERSION >= (2, 4):
            self.assertEqual(functional.reduce_scatter_tensor(tensor, "sum", 0, group) + 0, torch.full((1,), 10.0))
            self.assertEqual(functional.broadcast(tensor, 2, group) + 0, torch.full((4,), 3.0))
            out = functional.all_to_all_single(torch.arange(4.0) + 10 * self.rank, None, None, group)
            self.assertEqual(out + 0, torch.arange(4.0) * 10 + self.rank)
        pair = functional.all_reduce_coalesced([tensor, tensor[:2] * 2], "sum", group)
        self.assertEqual([each + 0 for each in pair], [torch.full((4,), 10.0), torch.full((2,), 20.0)])
        if VERSION >= (2, 6):
            gathered = functional.all_gather_into_tensor_coalesced([tensor[:1], tensor[:2]], group)
            self.assertEqual(gathered[0] + 0, torch.arange(1.0, 5.0))

    @since(2, 6)
    @grouped
    def test_functional_mean(self) -> None:
        import torch.distributed._functional_collectives as functional

        tensor = torch.full((4,), self.rank + 1.0)
        try:
            mean = functional.all_reduce(tensor, "avg", dist.group.WORLD) + 0
        except (RuntimeError, ValueError) as error:
            if BACKEND == "gloo":
                self.skipTest(f"gloo: {error}")
            raise
        self.assertEqual(mean, torch.full((4,), 2.5))

    @since(2, 6)
    @grouped
    def test_functional_collectives_with_gradients(self) -> None:
        import torch.distributed._functional_collectives as functional

        tensor = torch.arange(4.0, requires_grad=True)
        out = functional.all_gather_tensor_autograd(tensor, 0, dist.group.WORLD)
        (out * (self.rank + 1)).sum().backward()
        self.assertEqual(tensor.grad, torch.full((4,), 10.0))

    @since(2, 6)
    @grouped
    def test_pipeline(self) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        torch.manual_seed(0)
        layers = [nn.Linear(8, 8) for _ in range(SIZE)]
        alone = nn.Sequential(*copy.deepcopy(layers))
        inputs, target = batch(3, rows=8), torch.zeros(8, 8)
        nn.functional.mse_loss(alone(inputs), target).backward()
        for schedule in (ScheduleGPipe, Schedule1F1B):
            mine = copy.deepcopy(layers[self.rank])
            stage = PipelineStage(mine, self.rank, SIZE, torch.device("cpu"))
            runner = schedule(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
            if self.rank == 0:
                runner.step(inputs)
            elif self.rank == SIZE - 1:
                runner.step(target=target)
            else:
                runner.step()
            self.assertEqual(mine.weight.grad, alone[self.rank].weight.grad, rtol=1e-4, atol=1e-6)

    @since(2, 6)
    @grouped
    def test_checkpoint(self) -> None:
        import torch.distributed.checkpoint as checkpoint
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (SIZE,))
        net = fully_shard(model(), mesh=mesh) or model()
        train(net, self.rank, 2)
        folder: list[Any] = [tempfile.mkdtemp() if self.rank == 0 else None]
        dist.broadcast_object_list(folder, src=0)
        saved = {"model": net.state_dict()}
        checkpoint.async_save(
            saved, checkpoint_id=f"{folder[0]}/async", process_group=dist.new_group(backend="gloo")
        ).result()
        checkpoint.async_save(saved, checkpoint_id=f"{folder[0]}/again").result()
        checkpoint.save(saved, checkpoint_id=f"{folder[0]}/sync")
        for name in ("async", "again", "sync"):
            other = fully_shard(model(5), mesh=mesh) or model(5)
            loaded = {"model": other.state_dict()}
            checkpoint.load(loaded, checkpoint_id=f"{folder[0]}/{name}")
            self.assertEqual(full(loaded["model"].values()), full(saved["model"].values()), name)
