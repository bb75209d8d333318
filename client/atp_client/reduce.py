# SPDX-License-Identifier: Apache-2.0
"""One all-reduce of a tensor of any shape, layout and device, as a Future."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from atp_client.connection import DTYPES, Connection
from atp_client.errors import AtpError, OperationTimeoutError, UsageError

_streams: dict[Any, Any] = {}
_streams_lock = threading.Lock()


def supported(tensor: torch.Tensor) -> bool:
    """Whether ATP can sum this tensor: a dense CPU or CUDA tensor of float32, float16, bfloat16 or int32."""
    return tensor.dtype in DTYPES and tensor.layout == torch.strided and tensor.device.type in ("cpu", "cuda")


def _side_stream(device: Any) -> Any:
    """The CUDA stream that staging copies of a device use."""
    with _streams_lock:
        stream = _streams.get(device)
        if stream is None:
            stream = _streams[device] = torch.cuda.Stream(device)
        return stream


class Reduction:
    """An all-reduce that has been started; the tensor holds the result when it is complete.

    Args:
        connection: to the sidecar.
        tensor: any shape, also empty or not contiguous; changed in place.
        kind: "sum" or "mean" (over the workers of the job).
        timeout: seconds until it fails.
        value: makes the Future's value from the tensor.

    Raises:
        UsageError: ATP cannot sum this tensor.
    """

    def __init__(
        self,
        connection: Connection,
        tensor: torch.Tensor,
        kind: str,
        timeout: float,
        value: Callable[[torch.Tensor], Any],
    ) -> None:
        if not supported(tensor):
            raise UsageError(
                f"ATP sums dense CPU and CUDA tensors of {', '.join(DTYPES.values())}; "
                f"this one is {tensor.dtype} {tensor.layout} on {tensor.device}"
            )
        self.error: AtpError | None = None
        self._done = threading.Event()
        # The caller's graph must not see the copies, and a leaf that requires grad may be summed in place.
        target = tensor.detach()
        result = value(tensor)
        devices = [tensor.device] if tensor.device.type == "cuda" else None
        base: Any = torch.futures.Future(devices=devices)

        def conclude(_: Any) -> Any:
            # Raised here, in `then`, the error reaches C++ consumers (DDP) too. Future.set_exception does not
            # do that.
            if self.error is not None:
                raise self.error
            return result

        self.future: Any = base.then(conclude)

        def complete(error: AtpError | None) -> None:
            self.error = error
            self._done.set()
            base.set_result(result)

        if tensor.numel() == 0:
            complete(None)
        elif tensor.device.type == "cuda":
            self._start_cuda(connection, target, kind, timeout, complete)
        else:
            self._start_cpu(connection, target, kind, timeout, complete)

    @staticmethod
    def _start_cpu(
        connection: Connection,
        target: torch.Tensor,
        kind: str,
        timeout: float,
        complete: Callable[[AtpError | None], None],
    ) -> None:
        if target.is_contiguous():
            connection.all_reduce(target.view(-1), kind, timeout, complete)
            return
        copy = target.contiguous()

        def finish(error: AtpError | None) -> None:
            if error is None:
                with torch.inference_mode():
                    target.copy_(copy)
            complete(error)

        connection.all_reduce(copy.view(-1), kind, timeout, finish)

    @staticmethod
    def _start_cuda(
        connection: Connection,
        target: torch.Tensor,
        kind: str,
        timeout: float,
        complete: Callable[[AtpError | None], None],
    ) -> None:
        stream = _side_stream(target.device)
        stream.wait_stream(torch.cuda.current_stream(target.device))
        with torch.cuda.stream(stream):
            host = torch.empty(target.shape, dtype=target.dtype, device="cpu", pin_memory=True)
            host.copy_(target, non_blocking=True)
            # The allocator must not hand the memory out while the side stream still reads or writes it.
            target.record_stream(stream)
            copied = torch.cuda.Event()
            copied.record(stream)

        def finish(error: AtpError | None) -> None:
            # The Future remembers this stream's state at completion, and its consumers wait for that on
            # theirs.
            with torch.cuda.stream(stream):
                if error is None:
                    with torch.inference_mode():
                        target.copy_(host, non_blocking=True)
                complete(error)

        connection.all_reduce_staged(host.view(-1), kind, timeout, copied.synchronize, finish)

    @property
    def completed(self) -> bool:
        """Whether the result, or an error, is there."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until the tensor holds the result (a CUDA tensor: until the current stream may use it).

        Raises:
            AtpError: the operation failed, or `timeout` seconds passed.
        """
        if not self._done.wait(timeout):
            raise OperationTimeoutError(f"an all-reduce did not finish within {timeout:g} s")
        if self.error is not None:
            raise self.error
        if self.future is not None:
            self.future.wait()

    def drop_future(self) -> None:
        """Lets go of the Future, and so of the tensor, after completion."""
        self.future = None
