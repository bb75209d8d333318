# SPDX-License-Identifier: Apache-2.0
"""The c10d backend "atp": sums and means through ATP, every other collective through gloo."""

from __future__ import annotations

import inspect
import logging
import sys
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from atp_client.connection import Connection, connect
from atp_client.errors import UsageError
from atp_client.reduce import Reduction, supported

log = logging.getLogger("atp_client")

NAME = "atp"
_OLD_TORCH = torch.__version__.startswith("1.")
# Whatever a process group can do besides allreduce; torch versions have different subsets.
_DELEGATED = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
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


class AtpWork(dist._Work if hasattr(dist, "_Work") else dist.Work):  # type: ignore[misc]
    """Handle of an all-reduce in flight."""

    def __init__(self, reduction: Reduction, tensor: torch.Tensor) -> None:
        super().__init__()
        self._reduction = reduction
        self._tensor: torch.Tensor | None = tensor

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Blocks until the result is in the tensor.

        Args:
            timeout: zero means that of the process group.

        Raises:
            AtpError: the operation failed or took too long.
        """
        seconds = timeout.total_seconds()
        self._reduction.wait(seconds if seconds > 0 else None)
        return True

    def synchronize(self) -> None:
        """As wait."""
        self.wait()

    def get_future(self) -> Any:
        """Future of the list with the tensor."""
        return self._reduction.future

    def is_completed(self) -> bool:
        """Whether it has ended, with or without an error."""
        return self._reduction.completed

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self._reduction.completed and self._reduction.error is None

    def exception(self) -> BaseException | None:
        """The error it ended with."""
        return self._reduction.error

    def result(self) -> list[torch.Tensor]:
        """The tensor, in a list."""
        return [] if self._tensor is None else [self._tensor]

    def drop_tensor(self) -> None:
        """Lets go of the tensor; only wait and the questions after the end work from now on."""
        self._tensor = None
        self._reduction.drop_future()


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a type that every gloo can move: older ones do not know bfloat16."""
    if tensor.dtype == torch.bfloat16 and tensor.is_contiguous() and tensor.numel():
        return tensor.detach().view(-1).view(torch.uint8)
    return tensor


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A gloo process group that has the interface of dist.ProcessGroup in every torch version."""
    prefix = dist.PrefixStore("atp/gloo", store)
    gloo = dist.ProcessGroupGloo(prefix, rank, size, timeout=timeout)
    if isinstance(gloo, dist.ProcessGroup):  # torch 1
        return gloo
    group = dist.ProcessGroup(prefix, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    if hasattr(group, "_set_default_backend"):
        group._set_default_backend(kind)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), kind, gloo)
    return group


class ProcessGroupATP(dist.ProcessGroup):  # type: ignore[misc]
    """Process group of the backend "atp".

    all_reduce with SUM or AVG of float32, float16, bfloat16 and int32 goes through ATP if the group has all
    workers of the job; everything else goes through gloo.

    Args:
        gloo: the process group for everything else.
        connection: to the sidecar; None for a group of only some of the workers.
        rank: in this group.
        size: of this group.
        timeout: of each operation.
    """

    def __init__(self, gloo: Any, connection: Connection | None, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = gloo
        self._connection = connection
        self._seconds = timeout.total_seconds()
        # torch 1 lets go of the Python part of a Work that only C++ holds (DDP), and with it of its wait(). Whole for a
        # moment, for get_future; then without the tensor, for a later wait.
        self._whole: deque[AtpWork] = deque()
        self._light: deque[AtpWork] = deque(maxlen=256)

    def getBackendName(self) -> str:
        """The name of the backend."""
        return NAME

    def name(self) -> str:
        """The name of the backend."""
        return NAME

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Sum or mean over the ranks, in place.

        Args:
            tensors: a list of one tensor (a tensor alone is taken too).
            opts: AllreduceOptions with the operation.
        """
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        if opts is None:
            opts = dist.AllreduceOptions()
        elif not hasattr(opts, "reduceOp"):
            operation, opts = opts, dist.AllreduceOptions()
            opts.reduceOp = operation
        mean = opts.reduceOp == dist.ReduceOp.AVG
        if not mean and opts.reduceOp != dist.ReduceOp.SUM:
            return self._gloo.allreduce(tensors, opts)
        if self._connection is None or len(tensors) != 1 or not supported(tensors[0]):
            return self._mean_by_gloo(tensors) if mean else self._gloo.allreduce(tensors, opts)
        tensor = tensors[0]
        if mean and not tensor.is_floating_point():
            raise UsageError(f"the mean of {tensor.dtype} is not defined; use SUM, or convert to a float type")
        reduction = Reduction(
            self._connection, tensor, "mean" if mean else "sum", self._seconds, lambda result: [result]
        )
        work = AtpWork(reduction, tensor)
        if _OLD_TORCH:
            self._keep(work)
        return work

    def _keep(self, work: AtpWork) -> None:
        self._whole.append(work)
        while len(self._whole) > 4 and self._whole[0].is_completed():
            old = self._whole.popleft()
            # Somebody in Python who holds it keeps it alive, and may still want the tensor.
            if sys.getrefcount(old) <= 2:
                old.drop_tensor()
                self._light.append(old)

    def broadcast(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Broadcast, through gloo."""
        if isinstance(tensors, torch.Tensor):
            return self._gloo.broadcast(_sendable(tensors), *args, **kwargs)
        return self._gloo.broadcast([_sendable(tensor) for tensor in tensors], *args, **kwargs)

    def allgather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """All-gather, through gloo."""
        if isinstance(inputs, torch.Tensor):
            return self._gloo.allgather(outputs, inputs, *args, **kwargs)
        everything = [*inputs, *(tensor for row in outputs for tensor in row)]
        if all(tensor.is_contiguous() for tensor in everything):
            outputs = [[_sendable(tensor) for tensor in row] for row in outputs]
            inputs = [_sendable(tensor) for tensor in inputs]
        return self._gloo.allgather(outputs, inputs, *args, **kwargs)

    def _mean_by_gloo(self, tensors: list[torch.Tensor]) -> Any:
        """Mean of what ATP does not do; gloo has sums only."""
        for tensor in tensors:
            if not (tensor.is_floating_point() or tensor.is_complex()):
                raise UsageError(f"the mean of {tensor.dtype} is not defined; use SUM, or convert to a float type")
        size = self.size()

        def divide(future: Any) -> list[torch.Tensor]:
            future.wait()
            return [tensor.div_(size) for tensor in tensors]

        future = self._gloo.allreduce(tensors, dist.AllreduceOptions()).get_future().then(divide)
        return torch._C._distributed_c10d._create_work_from_future(future)


def _delegate(name: str) -> Any:
    def method(self: ProcessGroupATP, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._gloo, name)(*args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"{name}, through gloo."
    return method


for _name in _DELEGATED:
    if hasattr(dist.ProcessGroup, _name):
        setattr(ProcessGroupATP, _name, _delegate(_name))


def create(store: Any, rank: int, size: int, timeout: timedelta) -> ProcessGroupATP:
    """Makes a process group; what torch calls for init_process_group("atp") and new_group().

    Raises:
        AtpError: no sidecar, the gate stays closed, or the default group is not the workers of the job.
    """
    whole = not dist.is_initialized() or size == dist.get_world_size()
    connection: Connection | None = None
    if whole:
        connection = connect()
        if connection.world_size != size:
            raise UsageError(
                f"the process group has {size} ranks, but job {connection.job} has {connection.world_size} "
                "workers. ATP "
                "sums over one process per worker pod: start one process in each pod (WORLD_SIZE and RANK "
                "are set in "
                "the pods of an ATPJob), or set spec.workers.replicas to the number of ranks"
            )
        if connection.rank != rank:
            log.warning("ATP: torch rank %d runs in the pod of ATP worker %d", rank, connection.rank)
    else:
        log.info("ATP: a group of %d of the ranks uses gloo; ATP sums over all workers of the job", size)
    return ProcessGroupATP(_gloo(store, rank, size, timeout), connection, rank, size, timeout)


def register() -> None:
    """Registers the backend with torch; calling it again does nothing."""
    if not dist.is_available():
        raise UsageError("this build of torch has no torch.distributed; install one that has")
    if NAME.upper() in dist.Backend._plugins:
        return
    if "devices" in inspect.signature(dist.Backend.register_backend).parameters:
        dist.Backend.register_backend(NAME, create, devices=["cpu", "cuda"])
    else:
        dist.Backend.register_backend(NAME, create)
