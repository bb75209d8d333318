# SPDX-License-Identifier: Apache-2.0
"""An all-reduce of a tensor of any shape, layout and device: what is done before and after the memory is summed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from atp_client.connection import Connection
from atp_client.errors import AtpError, UsageError, again
from atp_client.groups import Group
from atp_client.operation import Operation

# Codes of the session protocol.
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int32: 3}
_ITEM_BYTES = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2, torch.int32: 4}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# What says that this is a tensor of a torch.func transform, without memory of its own.
_is_wrapped: Callable[[torch.Tensor], bool] = getattr(
    getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", lambda _: False
)

_streams: dict[Any, Any] = {}
_lock = threading.Lock()


def supported(tensor: torch.Tensor) -> bool:
    """Whether ATP can sum it: a dense CPU or CUDA tensor of float32, float16, bfloat16 or int32, and no subclass."""
    return (
        tensor.dtype in DTYPES
        and type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.is_cuda)
        and not _is_wrapped(tensor)
    )


class Reduction:
    """All-reduces that have been started together; when `wait` returns, the tensors hold the results.

    A tensor that is not plain memory of the CPU needs something done afterwards. Whoever waits first does it, or a
    thread of the connection's own if somebody asked for `when_done`.
    """

    __slots__ = ("_finish", "_lock", "connection", "error", "operations", "streams")

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.operations: list[Operation] = []
        self.error: AtpError | None = None
        self._finish: list[Callable[[], None]] | None = None
        self._lock: threading.Lock | None = None
        # CUDA streams that write the results.
        self.streams: list[Any] = []

    def then(self, finish: Callable[[], None]) -> None:
        """Something to do after all operations have succeeded, once."""
        if self._finish is None:
            self._finish = []
            self._lock = threading.Lock()
        self._finish.append(finish)

    @property
    def completed(self) -> bool:
        """Whether all operations have ended."""
        return all(operation.done for operation in self.operations)

    def failure(self) -> AtpError | None:
        """The error of an operation that has ended with one."""
        if self.error is None:
            for operation in self.operations:
                if operation.error is not None:
                    self.error = operation.error
                    break
        return self.error

    def wait(self, seconds: float = 0.0) -> None:
        """Blocks until the tensors hold the results (a CUDA tensor: until the current stream may use it).

        Args:
            seconds: a time-out shorter than the group's, if above 0.

        Raises:
            AtpError: one of them failed.
        """
        for operation in self.operations:
            self.connection.wait(operation, seconds)
        if self._lock is not None:
            self.settle()
            if self.error is not None:
                raise again(self.error)
            for stream in self.streams:
                torch.cuda.current_stream(stream.device).wait_stream(stream)

    def settle(self) -> None:
        """Does what is to be done afterwards, if it is not done. All operations must have ended."""
        if self._lock is None or self.failure() is not None:
            return
        with self._lock:
            finish, self._finish = self._finish or [], []
            for each in finish:
                try:
                    with torch.no_grad():
                        each()
                except Exception as error:
                    self.error = UsageError(f"the result of an all-reduce cannot be written to its tensor: {error}")

    def attend(self) -> None:
        """Has it go on although nobody waits."""
        for operation in self.operations:
            if not operation.done:
                self.connection.attend(operation)

    def when_done(self, callback: Callable[[], None]) -> None:
        """Has `callback()` called once, from any thread, when the tensors hold the results or it has failed."""
        left = len(self.operations)
        lock = threading.Lock()

        def one() -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                try:
                    self.settle()
                finally:
                    callback()

        if not left:
            callback()
        for operation in self.operations:
            self.connection.when_done(operation, one)


def start(group: Group, tensor: torch.Tensor, mean: bool, reduction: Reduction, seconds: float = 0.0) -> None:
    """Starts an all-reduce in place and adds it to `reduction`.

    Args:
        group: of all workers.
        tensor: a `supported` one of any shape, also empty, not contiguous or expanded.
        mean: over the ranks, not the sum; integers are divided as C does, towards zero.
        reduction: to add it to.
        seconds: time-out, if not the group's.

    Raises:
        AtpError: the group is broken, or the tensor's memory cannot be used.
    """
    dtype = tensor.dtype
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg():
        count = tensor.numel()
        address = tensor.data_ptr()
        if address == 0 and count:
            raise UsageError("the tensor has no memory (its storage was resized to 0)")
        integers = mean and dtype is torch.int32
        operation = group.start(
            address, count, _ITEM_BYTES[dtype], DTYPES[dtype], mean and not integers, tensor, True, seconds
        )
        reduction.operations.append(operation)
        if integers:
            size = group.connection.world_size
            reduction.then(lambda: divide(tensor.detach(), size))
    elif tensor.is_cpu:
        target = tensor.detach()
        host = target.clone(memory_format=torch.contiguous_format).resolve_neg()
        start(group, host, mean, reduction, seconds)
        reduction.then(lambda: write(target, host))
    else:
        _start_cuda(group, tensor.detach(), mean, reduction, seconds)


def divide(tensor: torch.Tensor, size: int) -> None:
    """Divides in place; integers towards zero."""
    with torch.inference_mode(tensor.is_inference()):
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.div_(size)
        else:
            tensor.div_(size, rounding_mode="trunc")


def write(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies values into a tensor whose elements may share memory (then all of a place are alike)."""
    with torch.inference_mode(target.is_inference()):
        if target.numel() == 0:
            return
        strides = target.stride()
        if 0 in strides:
            # One element of each place.
            for dimension, stride in enumerate(strides):
                if stride == 0:
                    target, source = target.narrow(dimension, 0, 1), source.narrow(dimension, 0, 1)
        if torch._debug_has_internal_overlap(target) == 0:
            target.copy_(source)
            return
        places = torch.zeros((), dtype=torch.int64)
        for dimension, stride in enumerate(target.stride()):
            places = places.unsqueeze(-1) + torch.arange(target.shape[dimension]) * stride
        flat = target.as_strided((int(places.max()) + 1,), (1,))
        flat[places.reshape(-1)] = source.reshape(-1)


def _side_stream(device: Any) -> Any:
    """The CUDA stream that copies of a device use."""
    with _lock:
        stream = _streams.get(device)
        if stream is None:
            stream = _streams[device] = torch.cuda.Stream(device)
        return stream


class _Stager:
    """A thread that waits for copies from devices, in the order of the calls."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="atp-stage", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._work.get()()

    def put(self, item: Callable[[], None]) -> None:
        """Has it called."""
        self._work.put(item)


_stager: _Stager | None = None


def _stage(item: Callable[[], None]) -> None:
    global _stager
    with _lock:
        if _stager is None:
            _stager = _Stager()
    _stager.put(item)


def _start_cuda(group: Group, target: torch.Tensor, mean: bool, reduction: Reduction, seconds: float) -> None:
    stream = _side_stream(target.device)
    stream.wait_stream(torch.cuda.current_stream(target.device))
    with torch.cuda.stream(stream):
        host = torch.empty(target.shape, dtype=target.dtype, device="cpu", pin_memory=True)
        host.copy_(target, non_blocking=True)
        # The allocator must not hand the memory out while the side stream still reads or writes it.
        target.record_stream(stream)
        copied = torch.cuda.Event()
        copied.record(stream)
    integers = mean and not target.is_floating_point()
    operation = group.start(
        host.data_ptr(),
        host.numel(),
        _ITEM_BYTES[host.dtype],
        DTYPES[host.dtype],
        mean and not integers,
        host,
        False,
        seconds,
    )
    reduction.operations.append(operation)

    def ready() -> None:
        try:
            copied.synchronize()
        except RuntimeError as error:
            # The peers wait for this operation: it cannot be left out.
            group.connection.give_up(group, UsageError(f"copying from the device failed: {error}"), str(error))
        group.set_ready(operation)

    def finish() -> None:
        if integers:
            divide(host, group.connection.world_size)
        with torch.cuda.stream(stream):
            target.copy_(host, non_blocking=True)

    _stage(ready)
    reduction.then(finish)
    reduction.streams.append(stream)
