# SPDX-License-Identifier: Apache-2.0
"""Handles of collectives in flight: what torch calls a Work.

A Work made in Python has two halves. C++ code that holds one (DDP, the registry of functional collectives) does not
keep the Python half alive in any torch, and without it `wait` is that of the C++ base class, which waits for ever. So
a Work whose Python half would go while C++ holds the other one stays, until C++ lets go of it.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from atp_client.tensors import Handle

_Base: Any = dist._Work if hasattr(dist, "_Work") else dist.Work
_UNLIMITED = timedelta(0)
# Works that are kept where the references of C++ cannot be counted; a finished one is long forgotten by then.
_KEPT_BLINDLY = 4096


class _References:
    """Counts the references that C++ holds to a Work.

    pybind11 keeps the pointer to the C++ object right behind the head of the Python object. The C++ object begins
    with the pointer to its virtual functions, and then has its reference count (c10::intrusive_ptr_target), in 64
    bits or, in newer torch, in the lower 32 of them. `known` says whether this is so here; it is tried once, on a
    Work of known count.
    """

    def __init__(self) -> None:
        self.known = False
        probe = _Base()
        try:
            one = self.count(probe)
            # Only torch from before the last change of the layout has no boxes to hold a second reference in.
            box = probe.boxed() if hasattr(probe, "boxed") else None
            self.known = one == 1 and (box is None or self.count(probe) == 2)
            del box
        except Exception:
            self.known = False

    @staticmethod
    def count(work: Any) -> int:
        """References to the C++ object, that of the Python object among them."""
        pointer = ctypes.c_void_p.from_address(id(work) + object.__basicsize__).value
        assert pointer is not None
        return int(ctypes.c_uint32.from_address(pointer + ctypes.sizeof(ctypes.c_void_p)).value)


_references = _References()
# Without a lock: the garbage collector may call __del__ anywhere, also while this thread holds one.
_held: deque[Any] = deque(maxlen=None if _references.known else _KEPT_BLINDLY)


def release_unheld() -> None:
    """Lets go of the Works that C++ does not hold any more."""
    if not _held or not _references.known:
        return
    for _ in range(len(_held)):
        try:
            work = _held.popleft()
        except IndexError:
            return
        if _references.count(work) > 1:
            _held.append(work)


class Work(_Base):  # type: ignore[misc]
    """A Work whose Python half lives as long as C++ needs it."""

    def __del__(self) -> None:
        # Called once, when Python has no reference left. Appending makes one.
        if _references.known and _references.count(self) <= 1:
            return
        _held.append(self)
        if len(_held) % 256 == 0:
            release_unheld()


class AtpWork(Work):
    """Handle of all-reduces through ATP.

    Args:
        reduction: them.
        tensors: what they are of.
    """

    def __init__(self, reduction: Handle, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._reduction = reduction
        self._tensors = tensors
        self._future: Any = None

    def wait(self, timeout: timedelta = _UNLIMITED) -> bool:
        """Blocks until the results are in the tensors.

        Args:
            timeout: zero means that of the process group.

        Raises:
            AtpError: an operation failed or took too long; if it took too long, the process group is broken.
        """
        seconds = timeout.total_seconds()
        self._reduction.wait(seconds if seconds > 0 else 0.0)
        return True

    def synchronize(self) -> None:
        """As wait."""
        self._reduction.wait()

    def get_future(self) -> Any:
        """Future of the list of tensors."""
        if self._future is None:
            self._future = future_of(self._reduction, lambda: self._tensors, self._tensors)
        return self._future

    def is_completed(self) -> bool:
        """Whether it has ended, with or without an error."""
        if not self._reduction.completed:
            # Somebody who asks again and again may never wait.
            self._reduction.attend()
            return False
        return True

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self._reduction.completed and self._reduction.failure() is None

    def exception(self) -> BaseException | None:
        """The error it ended with."""
        return self._reduction.failure()

    def result(self) -> list[torch.Tensor]:
        """The tensors."""
        return self._tensors


def future_of(reduction: Handle, value: Callable[[], Any], tensors: list[torch.Tensor]) -> Any:
    """A Future of `value()`, complete when the reduction is.

    Args:
        reduction: to wait for.
        value: of the Future.
        tensors: that the Future is about.
    """
    devices = sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)
    base: Any = torch.futures.Future(devices=devices or None)

    def conclude(_: Any) -> Any:
        # Raised here, in `then`, the error reaches C++ (DDP) too. Future.set_exception does not do that.
        error = reduction.failure()
        if error is not None:
            raise error
        return value()

    future = base.then(conclude)

    def complete() -> None:
        with ExitStack() as streams:
            # The Future remembers the state of the current streams, and whoever uses it waits for that on theirs.
            for stream in reduction.streams:
                streams.enter_context(torch.cuda.stream(stream))
            base.set_result(value())

    reduction.when_done(complete)
    return future


class DelegatedWork(Work):
    """Handle of an all-reduce that another process group makes, with something to do afterwards.

    Args:
        inner: the other's handle.
        tensors: what it is of.
        finish: called once, when the other has succeeded.
    """

    def __init__(self, inner: Any, tensors: list[torch.Tensor], finish: Callable[[], None]) -> None:
        super().__init__()
        self._inner = inner
        self._tensors = tensors

        def conclude(future: Any) -> list[torch.Tensor]:
            future.wait()
            with torch.no_grad():
                finish()
            return tensors

        self._future = inner.get_future().then(conclude)

    def wait(self, timeout: timedelta = _UNLIMITED) -> bool:
        """Blocks until the results are in the tensors.

        Raises:
            RuntimeError: as the other's wait.
        """
        if timeout > _UNLIMITED:
            self._inner.wait(timeout)
        else:
            self._inner.wait()
        self._future.wait()
        return True

    def synchronize(self) -> None:
        """As wait."""
        self.wait()

    def get_future(self) -> Any:
        """Future of the list of tensors."""
        return self._future

    def is_completed(self) -> bool:
        """Whether it has ended, with or without an error."""
        return bool(self._future.done())

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error it ended with."""
        if not self._future.done():
            return None
        try:
            self._future.value()
        except RuntimeError as error:
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        """The tensors."""
        return self._tensors


class BarrierWork(Work):
    """Handle of a barrier behind all-reduces that were in flight when it began.

    Args:
        inner: gloo's handle of the barrier.
        before: the all-reduces.
    """

    def __init__(self, inner: Any, before: Handle) -> None:
        super().__init__()
        self._inner = inner
        self._before = before
        self._future: Any = None

    def wait(self, timeout: timedelta = _UNLIMITED) -> bool:
        """Blocks until all ranks are here and the all-reduces before have ended.

        Raises:
            RuntimeError: the barrier, or an all-reduce before it, failed or took too long.
        """
        if timeout > _UNLIMITED:
            self._inner.wait(timeout)
        else:
            self._inner.wait()
        self._before.wait(max(0.0, timeout.total_seconds()))
        return True

    def synchronize(self) -> None:
        """As wait."""
        self.wait()

    def get_future(self) -> Any:
        """Future of an empty list."""
        if self._future is None:
            both = [self._inner.get_future(), future_of(self._before, list, [])]

            def conclude(futures: Any) -> list[torch.Tensor]:
                for each in futures.value():
                    each.wait()
                return []

            self._future = torch.futures.collect_all(both).then(conclude)
        return self._future

    def is_completed(self) -> bool:
        """Whether it has ended, with or without an error."""
        if not self._before.completed:
            self._before.attend()
            return False
        return bool(self._inner.is_completed())

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self.is_completed() and self._before.failure() is None and bool(self._inner.is_success())

    def exception(self) -> BaseException | None:
        """The error it ended with."""
        return self._before.failure() or self._inner.exception()

    def result(self) -> list[torch.Tensor]:
        """Nothing."""
        return []
