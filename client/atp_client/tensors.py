# SPDX-License-Identifier: Apache-2.0
"""An all-reduce of a tensor of any shape, layout and device: what is done before and after the memory is summed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from atp_client.errors import AtpError, UsageError, again
from atp_client.groups import Group

# Code of the session protocol, and bytes of an element.
DTYPES = {torch.float32: (0, 4), torch.float16: (1, 2), torch.bfloat16: (2, 2), torch.int32: (3, 4)}
_PLAIN = (torch.Tensor, torch.nn.Parameter)

_streams: dict[Any, Any] = {}
_lock = threading.Lock()


class Handle(Protocol):
    """All-reduces that have been started; when `wait` returns, the tensors hold the results."""

    @property
    def completed(self) -> bool:
        """Whether all have ended."""

    @property
    def streams(self) -> Sequence[Any]:
        """CUDA streams that write the results."""

    def failure(self) -> AtpError | None:
        """The error of one that has ended with an error."""

    def wait(self, seconds: float = 0.0) -> None:
        """Blocks until the tensors hold the results (a CUDA tensor: until the current stream may use it).

        Args:
            seconds: a time-out shorter than the group's, if above 0.

        Raises:
            AtpError: one of them failed.
        """

    def when_done(self, callback: Callable[[], None]) -> None:
        """Has `callback()` called once, from any thread, when the tensors hold the results or one has failed."""

    def attend(self) -> None:
        """Has them go on although nobody waits."""


def supported(tensor: torch.Tensor) -> bool:
    """Whether ATP can sum it: a dense CPU or CUDA tensor of float32, float16, bfloat16 or int32, and no subclass."""
    return (
        tensor.dtype in DTYPES
        and type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.is_cuda)
    )


def plain(tensor: torch.Tensor) -> bool:
    """Whether its elements lie in memory one behind the other; also if it has no such memory at all."""
    return type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_contiguous()


class Reduction:
    """A Handle of several operations, or of one with something to do afterwards.

    Whoever waits first does it, or a thread of the connection's own if somebody asked for `when_done`.

    Args:
        parts: what is waited for.
        finish: what to do after all have succeeded, once.
        streams: CUDA streams that `finish` uses.
    """

    def __init__(
        self, parts: Sequence[Handle], finish: Callable[[], None] | None = None, streams: Sequence[Any] = ()
    ) -> None:
        self._parts = parts
        self._finish = finish
        self._lock = threading.Lock()
        self._error: AtpError | None = None
        self.streams: list[Any] = [*streams, *(stream for part in parts for stream in part.streams)]

    @property
    def completed(self) -> bool:
        """See Handle."""
        return all(part.completed for part in self._parts)

    def failure(self) -> AtpError | None:
        """See Handle."""
        if self._error is None:
            errors = [part.failure() for part in self._parts]
            self._error = next((error for error in errors if error is not None), None)
        return self._error

    def wait(self, seconds: float = 0.0) -> None:
        """See Handle."""
        for part in self._parts:
            part.wait(seconds)
        self._settle()
        if self._error is not None:
            raise again(self._error)
        for stream in self.streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def _settle(self) -> None:
        """Does what is to be done afterwards, if it is not done. All parts must have ended."""
        if self._finish is None or self.failure() is not None:
            return
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                try:
                    with torch.no_grad():
                        finish()
                except Exception as error:
                    self._error = UsageError(f"the result of an all-reduce cannot be written to its tensor: {error}")

    def when_done(self, callback: Callable[[], None]) -> None:
        """See Handle."""
        left = len(self._parts)

        def one() -> None:
            nonlocal left
            with self._lock:
                left -= 1
                last = left == 0
            if last:
                self._settle()
                callback()

        for part in self._parts:
            part.when_done(one)

    def attend(self) -> None:
        """See Handle."""
        for part in self._parts:
            part.attend()


def start(group: Group, tensor: torch.Tensor, mean: bool, seconds: float = 0.0) -> Handle:
    """Starts an all-reduce in place.

    Args:
        group: of all workers.
        tensor: a `supported` one of any shape, also empty, not contiguous or expanded.
        mean: over the ranks, not the sum; integers are divided as C does, towards zero.
        seconds: time-out, if not the group's.

    Raises:
        AtpError: the group is broken, or the tensor has no memory.
    """
    if not tensor.is_cpu:
        return _start_cuda(group, tensor.detach(), mean, seconds)
    if not tensor.is_contiguous() or tensor.is_neg():
        target = tensor.detach()
        host = target.clone(memory_format=torch.contiguous_format).resolve_neg()
        return Reduction([start(group, host, mean, seconds)], lambda: write(target, host))
    dtype = tensor.dtype
    code, itemsize = DTYPES[dtype]
    count = tensor.numel()
    try:
        address = tensor.data_ptr()
    except RuntimeError as error:
        raise UsageError(f"the tensor has no memory of its own: {error}") from error
    if address == 0 and count:
        raise UsageError("the tensor has no memory (its storage was resized to 0)")
    if not mean:
        return group.start(address, count, itemsize, code, 0, tensor, seconds)
    if dtype is not torch.int32:
        return group.start(address, count, itemsize, code, 1, tensor, seconds)
    total = group.start(address, count, itemsize, code, 0, tensor, seconds)
    return Reduction([total], lambda: divide(tensor.detach(), group.connection.world_size))


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


def _start_cuda(group: Group, target: torch.Tensor, mean: bool, seconds: float) -> Handle:
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
    code, itemsize = DTYPES[host.dtype]
    kind = int(mean and not integers)
    operation = group.prepare(host.data_ptr(), host.numel(), itemsize, code, kind, host, seconds)

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
    return Reduction([operation], finish, [stream])
