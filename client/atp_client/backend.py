# SPDX-License-Identifier: Apache-2.0
"""The c10d backend "atp": sums and means through ATP, every other collective through gloo."""

from __future__ import annotations

import atexit
import inspect
import logging
import threading
import time
import weakref
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from atp_client.connection import Connection
from atp_client.errors import UsageError
from atp_client.groups import Group
from atp_client.profiling import Profiled
from atp_client.rendezvous import agree
from atp_client.tensors import Handle, Reduction, divide, plain, start, supported, write
from atp_client.torch_version import VERSION
from atp_client.work import AtpWork, BarrierWork, DelegatedWork, release_unheld

log = logging.getLogger("atp_client")

NAME = "atp"
# torch 1 has no process groups made of backends: a process group does everything itself.
_OLD_TORCH = VERSION < (2, 0)
_SUM = dist.ReduceOp.SUM
_AVG = dist.ReduceOp.AVG
_UNLIMITED = timedelta(0)
# What a synchronous call returns: all is done, so one serves all.
_ENDED = AtpWork(Reduction([]), [])
_profiling = torch._C._autograd._profiler_enabled
# What a process group can do besides what is written out below; torch versions have different parts of it.
_DELEGATED = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)


_BFLOAT16 = VERSION >= (2, 2)  # whether gloo knows it


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a type that every gloo can move: older ones do not know bfloat16."""
    if tensor.dtype == torch.bfloat16 and tensor.is_contiguous() and tensor.numel():
        return tensor.detach().view(-1).view(torch.uint8)
    return tensor


# Until torch 2.5 a process group is made with options.
_OPTIONS = hasattr(dist.ProcessGroup, "Options")


def _takes_store() -> bool:
    """Whether a subclass of ProcessGroup can be made with a store: several versions after torch 2.5 fail at it."""

    class Probe(dist.ProcessGroup):  # type: ignore[misc]
        pass

    try:
        Probe(dist.HashStore(), 0, 1)
    except TypeError:
        return False
    return True


class _Gloo(dist.ProcessGroupGloo):  # type: ignore[misc]
    """The gloo backend; tells its owner when torch sets the time-out."""

    owner: weakref.ref[ProcessGroupATP] | None = None

    def _set_default_timeout(self, timeout: timedelta) -> None:
        super()._set_default_timeout(timeout)
        owner = self.owner() if self.owner is not None else None
        if owner is not None:
            owner.timeout_is(timeout)


_STORE = not _OLD_TORCH and (_OPTIONS or _takes_store())
_LINGER_SECONDS = 1.0
_lingering: deque[tuple[float, Any]] = deque()
_letting_go = threading.Lock()
atexit.register(_lingering.clear)


def _linger(gloo: Any) -> None:
    """Keep a group's gloo until the C++ part of the group is gone. For the garbage collector, which may call anywhere.

    That part lets go of it with the GIL held. If it were the last to do so, gloo's destructor would wait for its
    threads, and one of them may wait for the GIL, to let go of a tensor: for ever. Python lets go without the GIL.
    """
    _lingering.append((time.monotonic(), gloo))


def _let_go() -> None:
    """Let go of what has lingered for long enough."""
    with _letting_go:
        while _lingering and _lingering[0][0] < time.monotonic() - _LINGER_SECONDS:
            _lingering.popleft()


class ProcessGroupATP(dist.ProcessGroup):  # type: ignore[misc]
    """Process group of the backend "atp".

    all_reduce with SUM or AVG of float32, float16, bfloat16 and int32 goes through ATP if the group has all workers
    of the job; everything else goes through gloo, which this process group has as its backend for CPU and CUDA.

    Args:
        store: of the group.
        rank: in the group.
        size: of the group.
        timeout: of each operation.
        group: of the sidecar; None for a process group of only some of the workers.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, group: Group | None) -> None:
        _let_go()
        prefix = dist.PrefixStore("atp/gloo", store)
        arguments = self._arguments(prefix, rank, size, timeout)
        super().__init__(*(arguments if _STORE else (rank, size)))
        self._gloo = _Gloo(prefix, rank, size, timeout=timeout)
        self._gloo.owner = weakref.ref(self)
        weakref.finalize(self, _linger, self._gloo).atexit = False
        self._group = group
        # All-reduces that nobody has waited for: a barrier ends after them, as gloo's does.
        self._flying: deque[Handle] = deque()
        self._lock = threading.Lock()
        # Does everything else. Not left to the base class: when C++ finds no Python method for a collective, it runs
        # its own with the interpreter locked, and waits for ever for a thread of gloo's that wants the interpreter.
        self._rest: Any = self._gloo
        if not _OLD_TORCH:
            self._rest = dist.ProcessGroup(*self._arguments(prefix, rank, size, timeout))
            kind = dist.ProcessGroup.BackendType.GLOO
            for made in (self, self._rest):
                if hasattr(made, "_set_default_backend"):
                    made._set_default_backend(kind)
                for device in ("cpu", "cuda"):
                    made._register_backend(torch.device(device), kind, self._gloo)
        if group is not None:
            weakref.finalize(self, group.connection.leave_later, group).atexit = False

    @staticmethod
    def _arguments(store: Any, rank: int, size: int, timeout: timedelta) -> tuple[Any, ...]:
        """What ProcessGroup takes to be made."""
        if _OLD_TORCH:
            return (rank, size)
        if _OPTIONS:
            options = dist.ProcessGroup.Options(backend="gloo")
            options._timeout = timeout
            return (store, rank, size, options)
        return (store, rank, size)

    @property
    def atp_group(self) -> Group | None:
        """The group of the sidecar, if this process group has one."""
        return self._group

    def getBackendName(self) -> str:
        """The name of the backend."""
        return NAME

    def name(self) -> str:
        """The name of the backend."""
        return NAME

    # -- time-outs and the end

    def timeout_is(self, timeout: timedelta) -> None:
        """torch has set the time-out of the operations that begin from now on."""
        if self._group is not None:
            self._group.seconds = timeout.total_seconds()

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the time-out of the operations that begin from now on."""
        super().set_timeout(timeout)
        self.timeout_is(timeout)

    def shutdown(self) -> None:
        """What destroy_process_group calls."""
        if self._group is not None:
            self._group.leave()
        if hasattr(super(), "shutdown"):
            super().shutdown()

    # -- all-reduce

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Sum or mean over the ranks, in place.

        Args:
            tensors: a list of one tensor (a tensor alone is taken too).
            opts: AllreduceOptions, or the operation alone.
            timeout: of this operation; only with the operation alone.
        """
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        if opts is None:
            operation: Any = _SUM
        elif hasattr(opts, "reduceOp"):
            operation, timeout = opts.reduceOp, opts.timeout
        else:
            operation, opts = opts, None
        summed = operation == _SUM
        mean = not summed and operation == _AVG
        if (summed or mean) and len(tensors) == 1:
            group = self._group
            if group is not None and supported(tensors[0]):
                return self._reduce(
                    group, tensors, mean, timeout, opts is not None and not getattr(opts, "asyncOp", True)
                )
            if mean or not plain(tensors[0]):
                return self._by_gloo(tensors, mean, timeout)
        if opts is None:
            opts = dist.AllreduceOptions()
            opts.reduceOp = operation
            if timeout is not None:
                opts.timeout = timeout
        return self._rest.allreduce(tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """As allreduce, of several tensors at once."""
        opts = dist.AllreduceCoalescedOptions() if opts is None else opts
        operation = opts.reduceOp
        mean = operation == _AVG
        if mean or operation == _SUM:
            group = self._group
            if group is not None and tensors and all(supported(tensor) for tensor in tensors):
                return self._reduce(group, tensors, mean, opts.timeout, not getattr(opts, "asyncOp", True))
            if mean:
                return self._by_gloo(tensors, mean, opts.timeout)
        return self._rest.allreduce_coalesced(tensors, opts)

    def _reduce(
        self, group: Group, tensors: list[torch.Tensor], mean: bool, timeout: timedelta | None, wait: bool
    ) -> Any:
        seconds = 0.0
        if timeout is not None and timeout > _UNLIMITED:
            seconds = timeout.total_seconds()
        release_unheld()
        if _profiling():
            handle: Handle = Profiled(f"{NAME}:all_reduce", tensors, lambda: self._start(group, tensors, mean, seconds))
        else:
            handle = self._start(group, tensors, mean, seconds)
        if not wait:
            flying = self._flying
            with self._lock:
                while flying and flying[0].completed:
                    flying.popleft()
                flying.append(handle)
            return AtpWork(handle, tensors)
        handle.wait()
        return _ENDED

    @staticmethod
    def _start(group: Group, tensors: list[torch.Tensor], mean: bool, seconds: float) -> Handle:
        if len(tensors) == 1:
            return start(group, tensors[0], mean, seconds)
        return Reduction([start(group, tensor, mean, seconds) for tensor in tensors])

    def _by_gloo(self, tensors: list[torch.Tensor], mean: bool, timeout: timedelta | None) -> Any:
        """What ATP does not sum and gloo does not do well: means (not every gloo has them, and none of integers), and
        tensors with gaps or overlaps in memory, which gloo takes for contiguous ones."""
        plain_ones = [tensor if plain(tensor) else tensor.detach().clone().contiguous() for tensor in tensors]
        opts = dist.AllreduceOptions() if len(tensors) == 1 else dist.AllreduceCoalescedOptions()
        opts.reduceOp = _SUM
        if timeout is not None:
            opts.timeout = timeout
        work = (self._gloo.allreduce if len(tensors) == 1 else self._gloo.allreduce_coalesced)(plain_ones, opts)
        size = self.size()

        def finish() -> None:
            for tensor, summed in zip(tensors, plain_ones):  # noqa: B905 (Python 3.9)
                if mean:
                    divide(summed.detach(), size)
                if summed is not tensor:
                    write(tensor.detach(), summed)

        return DelegatedWork(work, tensors, finish)

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        """Ends when all ranks are here and what this one started before has ended."""
        work = self._rest.barrier(*args, **kwargs)
        with self._lock:
            before = [handle for handle in self._flying if not handle.completed]
        return BarrierWork(work, Reduction(before)) if before else work

    # -- what older gloo does not do

    def broadcast(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Broadcast, through gloo."""
        several = not isinstance(tensors, torch.Tensor)
        tensors = [_sendable(tensor) for tensor in tensors] if several else _sendable(tensors)
        return self._rest.broadcast(tensors, *args, **kwargs)

    def allgather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """All-gather, through gloo."""
        if not isinstance(inputs, torch.Tensor):
            everything = [*inputs, *(tensor for row in outputs for tensor in row)]
            if all(tensor.is_contiguous() for tensor in everything):
                outputs = [[_sendable(tensor) for tensor in row] for row in outputs]
                inputs = [_sendable(tensor) for tensor in inputs]
        return self._rest.allgather(outputs, inputs, *args, **kwargs)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """All-to-all of lists, through gloo's of one tensor: that of lists is missing, or wants equal sizes."""
        sent = torch.cat([tensor.detach().reshape(-1) for tensor in inputs])
        counts = [tensor.numel() for tensor in outputs]
        received = sent.new_empty(sum(counts))
        opts = dist.AllToAllOptions() if opts is None else opts
        work = self._rest.alltoall_base(received, sent, counts, [tensor.numel() for tensor in inputs], opts)

        def finish() -> None:
            for output, part in zip(outputs, received.split(counts)):  # noqa: B905 (Python 3.9)
                write(output.detach(), part.view(output.shape))

        return DelegatedWork(work, outputs, finish)


def _delegate(name: str) -> Any:
    def method(self: ProcessGroupATP, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._rest, name)(*args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"{name}, through gloo."
    return method


if _BFLOAT16:
    del ProcessGroupATP.broadcast, ProcessGroupATP.allgather
for _name in _DELEGATED:
    if hasattr(dist.ProcessGroup, _name) and _name not in vars(ProcessGroupATP):
        setattr(ProcessGroupATP, _name, _delegate(_name))
# C++ asks for this one by another name than Python.
ProcessGroupATP.recvAnysource = _delegate("recv_anysource")


def create(store: Any, rank: int, size: int, timeout: timedelta) -> ProcessGroupATP:
    """Makes a process group; what torch calls for init_process_group("atp") and new_group().

    Raises:
        AtpError: no sidecar, the gate stays closed, or the ranks are not the workers of one job.
    """
    if dist.is_initialized() and size != dist.get_world_size():
        log.info("ATP: a group of %d of the ranks uses gloo; ATP sums over all workers of the job", size)
        return ProcessGroupATP(store, rank, size, timeout, None)
    connection, number = agree(store, rank, size, timeout.total_seconds())
    _explain_order(connection, rank)
    return ProcessGroupATP(store, rank, size, timeout, Group(connection, number, timeout.total_seconds()))


def _explain_order(connection: Connection, rank: int) -> None:
    if connection.rank != rank:
        log.warning("ATP: torch rank %d runs in the pod of ATP worker %d", rank, connection.rank)


def _create(options: Any, _: Any = None) -> ProcessGroupATP:
    """As `create`, from what torch 2 gives."""
    group = create(options.store, options.group_rank, options.group_size, options.timeout)
    made_by_torch = getattr(options, "process_group", None)
    device = getattr(made_by_torch, "bound_device_id", None)
    if device is not None:
        group.bound_device_id = device
    return group


def register() -> None:
    """Registers the backend with torch; calling it again does nothing."""
    if not dist.is_available():
        raise UsageError("this build of torch has no torch.distributed; install one that has")
    if NAME.upper() in dist.Backend._plugins:
        return
    parameters = inspect.signature(dist.Backend.register_backend).parameters
    if "extended_api" in parameters and "devices" in parameters:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    else:
        dist.Backend.register_backend(NAME, create)
