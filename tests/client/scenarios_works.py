# SPDX-License-Identifier: Apache-2.0
"""What the ranks do in the tests of works, futures and unusual tensors. See scenarios.py."""

import contextlib
import gc
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from scenarios import init
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def layouts() -> None:
    """Tensors that are not plain memory are summed as what they are."""
    import atp_client

    rank = init()
    size = dist.get_world_size()
    total = sum(range(1, size + 1))

    def summed(tensor: torch.Tensor, expected: torch.Tensor) -> None:
        result = dist.all_reduce(tensor)
        assert result is None
        assert torch.equal(tensor.detach().resolve_neg(), expected), (tensor, expected)

    base = torch.arange(24.0).view(2, 3, 4)
    ones = torch.ones(1) * (rank + 1)
    summed(ones.expand(4), torch.full((4,), float(total)))
    assert ones == total
    summed((torch.ones(3, 1) * (rank + 1)).expand(3, 5), torch.full((3, 5), float(total)))
    summed(ones.expand(0, 4), torch.ones(0, 4))
    memory = torch.arange(6.0)
    summed(memory.as_strided((4, 2), (1, 1)), (torch.arange(6.0) * size).as_strided((4, 2), (1, 1)))
    memory = torch.arange(6.0)
    dist.all_reduce(memory.as_strided((4, 2), (1, 1)), op=dist.ReduceOp.AVG)
    assert torch.equal(memory[:5], torch.arange(5.0))
    summed((base * (rank + 1)).permute(2, 0, 1), (base * total).permute(2, 0, 1))
    summed((base * (rank + 1))[:, 1:, ::2], (base * total)[:, 1:, ::2])
    image = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1)).round()
    # The layouts of the ranks differ, which gloo would sum as if they did not.
    mine = (image * (rank + 1)).contiguous(memory_format=torch.channels_last if rank else torch.contiguous_format)
    summed(mine, image * total)
    summed(torch._neg_view(torch.ones(3) * (rank + 1)), torch.full((3,), -float(total)))
    summed(torch.ones(3, requires_grad=True), torch.full((3,), float(size)))
    summed((torch.ones(3, requires_grad=True) * (rank + 1)), torch.full((3,), float(total)))
    summed(torch.ones(4, requires_grad=True)[:2], torch.full((2,), float(size)))
    summed(nn.Parameter(torch.ones(3)), torch.full((3,), float(size)))
    complexes = torch.complex(torch.ones(3) * (rank + 1), torch.ones(3))
    dist.all_reduce(complexes)
    assert torch.equal(complexes, torch.complex(torch.full((3,), float(total)), torch.full((3,), float(size))))
    with torch.inference_mode():
        summed(torch.ones(3), torch.full((3,), float(size)))
        summed(torch.ones(3, 2).t(), torch.full((2, 3), float(size)))
    inferred = torch.inference_mode()(lambda: torch.ones(1).expand(3))()
    summed(inferred, torch.full((3,), float(size)))
    gone = torch.ones(5)
    (gone.untyped_storage() if hasattr(gone, "untyped_storage") else gone.storage()).resize_(0)
    try:
        # Not by dist.all_reduce: some torch crashes when it logs the error, because it prints the tensor.
        dist.distributed_c10d._get_default_group().allreduce([gone])
        raise AssertionError("a tensor without memory was summed")
    except atp_client.UsageError:
        pass
    try:
        torch.func.vmap(lambda x: dist.all_reduce(x) or x)(torch.ones(2, 3))
        raise AssertionError("a batched tensor was summed")
    except (RuntimeError, AttributeError):
        pass
    summed(torch.ones(2), torch.full((2,), float(size)))
    dist.destroy_process_group()


def means() -> None:
    """The mean of every dtype: integers are divided towards zero, as Lightning does after gloo's sum."""
    rank = init()
    size = dist.get_world_size()
    rows = [torch.tensor([7, -7, 3, -3, 1, 0, 100]) * (each + 1) for each in range(size)]
    total = torch.stack(rows).sum(0)
    for dtype in (torch.int64, torch.int32, torch.int8, torch.uint8):
        mine = (rows[rank].abs() if dtype == torch.uint8 else rows[rank].clone()).to(dtype)
        expected = torch.stack([row.abs() if dtype == torch.uint8 else row for row in rows]).sum(0).to(dtype)
        lightning = expected.clone()
        lightning.copy_(lightning / size)
        for tensor in (mine.clone(), mine.clone().expand(2, 7)):
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
            assert torch.equal(tensor, lightning.expand(tensor.shape)), (dtype, tensor, lightning)
        work = dist.all_reduce(mine, op=dist.ReduceOp.AVG, async_op=True)
        (result,) = work.get_future().wait()
        assert torch.equal(result, lightning)
        assert work.is_completed() and work.is_success()
    for dtype in (torch.float64, torch.complex64):
        tensor = rows[rank].to(dtype)
        work = dist.all_reduce(tensor, op=dist.ReduceOp.AVG, async_op=True)
        work.wait(timedelta(seconds=30))
        assert torch.allclose(tensor.real.double(), total.double() / size)
        assert work.is_completed() and work.is_success() and len(work.result()) == 1
    tensor = torch.tensor([2**31 - 1, 5], dtype=torch.int32)
    dist.all_reduce(tensor)  # wraps, as in torch
    assert tensor.tolist() == [((2**31 - 1) * size + 2**31) % 2**32 - 2**31, 5 * size]
    several = [torch.full((3,), float(rank)), torch.full((4, 2), 2.0)]
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp.AVG
    dist.distributed_c10d._get_default_group().allreduce_coalesced(several, options).wait()
    assert (several[0] == (size - 1) / 2).all() and (several[1] == 2).all()
    several = [torch.full((3,), rank), torch.full((4, 2), 3)]
    dist.distributed_c10d._get_default_group().allreduce_coalesced(several, options).wait()
    assert (several[0] == (size - 1) // 2).all() and (several[1] == 3).all()
    dist.destroy_process_group()


def handles() -> None:
    """Everything that a Work and its Future offer, in every order."""
    rank = init()
    size = dist.get_world_size()
    group = dist.distributed_c10d._get_default_group()
    for wait_first in (True, False):
        tensor = torch.full((1000,), float(rank))
        work = dist.all_reduce(tensor, async_op=True)
        if wait_first:
            assert work.wait() is True
        future = work.get_future()
        (result,) = future.wait()
        assert result is tensor and (tensor == sum(range(size))).all()
        assert work.is_completed() and work.is_success() and work.exception() is None
        assert work.result()[0] is tensor
        work.synchronize()
        assert work.wait(timedelta(seconds=5)) is True
        assert future.then(lambda done: done.value()[0].sum()).wait() == tensor.sum()
    # Nobody waits: it is completed all the same.
    tensor = torch.ones(700_000)
    work = dist.all_reduce(tensor, async_op=True)
    end = time.monotonic() + 60
    while not work.is_completed():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert (tensor == size).all()
    # The methods of the process group itself.
    for arguments in (([torch.ones(3)],), (torch.ones(3),), ([torch.ones(3)], dist.ReduceOp.SUM)):
        group.allreduce(*arguments).wait()
        assert (arguments[0][0] == size).all()
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG
    options.timeout = timedelta(seconds=30)
    tensor = torch.full((3,), float(rank))
    group.allreduce([tensor], options).wait()
    assert (tensor == (size - 1) / 2).all()
    # Several threads wait for each other's.
    works = [dist.all_reduce(torch.ones(200_000), async_op=True) for _ in range(8)]
    threads = [threading.Thread(target=work.wait) for work in works for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    # A callback that waits for a later one, while another thread waits too.
    later = torch.ones(10)

    def callback(done: torch.futures.Future) -> torch.Tensor:
        dist.all_reduce(later)
        return done.value()[0]

    future = dist.all_reduce(torch.ones(10), async_op=True).get_future().then(callback)
    assert (future.wait() == size).all() and (later == size).all()
    dist.destroy_process_group()


def held_by_cpp() -> dict:
    """Works of which only C++ holds a reference are waited for, and are let go of afterwards."""
    import atp_client.work

    rank = init()
    size = dist.get_world_size()
    # DDP.join keeps the handle of a sum that Python started.
    for divide in (False, True):
        torch.manual_seed(3)
        model = DistributedDataParallel(nn.Linear(4, 1))
        with model.join(divide_by_initial_world_size=divide):
            for _ in range(3 + 2 * rank):
                model.zero_grad()
                model(torch.ones(4, 4) * (rank + 1)).sum().backward()
        gradients = [torch.zeros(1, 4) for _ in range(size)]
        dist.all_gather(gradients, model.module.weight.grad)
    boxes = 0
    tensors = [torch.full((5,), float(each)) for each in range(2000)]
    if hasattr(torch._C._distributed_c10d.Work, "boxed"):
        held = [dist.all_reduce(tensor, async_op=True).boxed() for tensor in tensors]
        gc.collect()
        boxes = len(atp_client.work._held)
        for box in held:
            torch._C._distributed_c10d.Work.unbox(box).wait()
        del held, box
        assert all((tensor == each * size).all() for each, tensor in enumerate(tensors))
        dist.all_reduce(torch.ones(1))  # looks after what is held
        dist.all_reduce(torch.ones(1))
    left = len(atp_client.work._held)
    known = atp_client.work._references.known
    dist.destroy_process_group()
    return {"held": boxes, "left": left, "known": known}


def found_unused() -> None:
    """DDP sums which parameters are used, as int32, with a Work that only C++ holds."""
    rank = init()

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

        def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
            x = self.parts[0](x)
            return self.parts[1](x) if (step + rank) % 2 else x

    torch.manual_seed(1)
    model = DistributedDataParallel(Two(), find_unused_parameters=True)
    for step in range(6):
        model.zero_grad()
        model(torch.ones(2, 4), step).sum().backward()
        assert model.module.parts[1].weight.grad is not None
        never = model.module.parts[2].weight.grad
        assert never is None or not never.any()
    dist.destroy_process_group()


def error_in_a_client_thread(where: str) -> list:
    """Something of ours fails while a result is taken in: every handle ends with an error, none hangs."""
    import atp_client
    import atp_client.connection as connection

    init(60.0)
    dist.all_reduce(torch.ones(1))
    seen = []
    copy = connection.copy

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a fault of ours")

    if where == "copy":
        connection.copy = lambda *a: broken() if sys._getframe(1).f_code.co_name == "_retire" else copy(*a)
    elif where == "retire":
        atp_client.connect()._retire = broken
    else:
        atp_client.connect()._frames.take = broken
    flying = [dist.all_reduce(torch.ones(50_000), async_op=True) for _ in range(3)]
    with contextlib.suppress(RuntimeError):
        flying[2].get_future()
    for work in flying:
        begin = time.monotonic()
        try:
            work.wait()
            seen.append("done")
        except atp_client.AtpError as error:
            # Or the other rank's fault was here first.
            assert "a fault of ours" in str(error) or "its trainer left" in str(error), error
            seen.append("failed")
        assert time.monotonic() - begin < 20
    try:
        flying[2].get_future().wait()
        seen.append("done")
    except RuntimeError as error:
        assert "a fault of ours" in str(error) or "its trainer left" in str(error), error
        seen.append("failed")
    return seen


def error_of_a_callback() -> None:
    """A callback that raises ends its own Future only."""
    init()

    def callback(_: torch.futures.Future) -> None:
        raise ZeroDivisionError("the user's fault")

    future = dist.all_reduce(torch.ones(10), async_op=True).get_future().then(callback)
    try:
        future.wait()
        raise AssertionError("no error")
    except RuntimeError as error:
        assert "the user's fault" in str(error)
    tensor = torch.ones(10)
    dist.all_reduce(tensor, async_op=True).get_future().wait()
    assert (tensor == dist.get_world_size()).all()
    dist.destroy_process_group()


def errors_everywhere() -> dict:
    """The error of an operation reaches whoever waits, in each way of waiting."""
    import atp_client

    rank = init()
    found = {}

    def differs(name: str, wait) -> None:
        work = dist.all_reduce(torch.ones(10 + rank), async_op=True)
        try:
            wait(work)
            found[name] = "nothing"
        except atp_client.MismatchError as error:
            found[name] = f"MismatchError {error}"
        except RuntimeError as error:
            found[name] = f"RuntimeError {error}"
        end = time.monotonic() + 30
        while not work.is_completed():
            assert time.monotonic() < end
            time.sleep(0.01)
        assert not work.is_success()
        assert isinstance(work.exception(), atp_client.MismatchError)

    differs("wait", lambda work: work.wait())
    differs("wait with a timeout", lambda work: work.wait(timedelta(seconds=20)))
    differs("synchronize", lambda work: work.synchronize())
    differs("future", lambda work: work.get_future().wait())
    differs("value", _value)
    differs("then", lambda work: work.get_future().then(lambda done: done.value()).wait())
    if hasattr(torch._C._distributed_c10d.Work, "boxed"):
        differs("C++", lambda work: torch._C._distributed_c10d.Work.unbox(work.boxed()).wait())
    # DDP: what C++ waits for.
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(10, 10))
    model.register_comm_hook(None, _wrong_sum)
    try:
        model(torch.ones(2, 10)).sum().backward()
        found["ddp"] = "nothing"
    except RuntimeError as error:
        found["ddp"] = f"{type(error).__name__} {error}"
    return found


def _value(work: object) -> object:
    future = work.get_future()
    while not future.done():
        time.sleep(0.01)
    return future.value()


def _wrong_sum(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    extra = torch.ones(50 + dist.get_rank())
    future = dist.all_reduce(extra, async_op=True).get_future()
    return future.then(lambda done: (done.value(), bucket.buffer())[1])


def profiled() -> list:
    """What the profiler shows of an all-reduce."""
    init()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(10))
        dist.all_reduce(torch.ones(10), async_op=True).wait()
        dist.all_reduce(torch.ones(10, dtype=torch.float64))
    dist.destroy_process_group()
    return [event.name for event in profile.events() if event.name.endswith("all_reduce")]


def any_magnitude() -> None:
    """Small and large values in one tensor: as precise as float32 sums, whatever the magnitude."""
    rank = init()
    size = dist.get_world_size()
    for magnitude in (1e-30, 3e-9, 1e-6, 1.0, 1e6, 1e30):
        for mean in (False, True):
            parts = [
                torch.randn(5000, generator=torch.Generator().manual_seed(each)) * magnitude for each in range(size)
            ]
            tensor = parts[rank].clone()
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM)
            exact = torch.stack(parts).double().sum(0) / (size if mean else 1)
            error = (tensor.double() - exact).norm() / exact.norm()
            assert error < 1e-7, (magnitude, mean, error)
    tensor = torch.full((3,), 3e-9)
    dist.all_reduce(tensor)
    assert torch.allclose(tensor, torch.full((3,), 3e-9 * size), rtol=1e-6, atol=0)
    dist.destroy_process_group()


# -- over sidecars that only act (fake_sidecar.py)


def last_words(elements: int) -> list:
    """Keeps submitting until the sidecar has hung up; says what every handle ended with."""
    import atp_client

    init(60.0)
    dist.all_reduce(torch.ones(1))
    print("ready", flush=True)
    flying, ends = [], []
    try:
        for _ in range(2000):
            flying.append(dist.all_reduce(torch.ones(elements), async_op=True))
            time.sleep(0.005)
    except atp_client.AtpError as error:
        ends.append(type(error).__name__)
    for work in flying:
        try:
            work.wait()
            ends.append("done")
        except atp_client.AtpError as error:
            ends.append(type(error).__name__)
    return sorted(set(ends))


def collected_while_locked() -> None:
    """The garbage collector ends process groups and works wherever it likes, also where this thread holds our locks."""
    import atp_client

    init(60.0)
    connection = atp_client.connect()
    for _ in range(3):
        group = dist.new_group(list(range(dist.get_world_size())))
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        work.wait()
        work.myself, group.myself = work, group  # only the collector can end these
        dist.destroy_process_group(group)
        with connection.readers.lock, connection._send_lock:
            del group, work
            gc.collect()
        dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()


def warned() -> None:
    """The sidecar's warnings are logged, each once."""
    init(60.0)
    dist.all_reduce(torch.ones(3))
    print("ready", flush=True)
    for _ in range(60):
        dist.all_reduce(torch.ones(3))
        time.sleep(0.05)


def large_ones(elements: int, tensors: int) -> int:
    """Tensors larger than the shared memory, several at once."""
    import atp_client

    init(60.0)
    made = [torch.full((elements,), 1.0) for _ in range(tensors)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in made]
    for tensor, work in zip(made, works, strict=True):
        work.wait()
        assert (tensor == dist.get_world_size()).all()
    return atp_client.connect().shared_bytes
