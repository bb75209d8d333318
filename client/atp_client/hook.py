# SPDX-License-Identifier: Apache-2.0
"""DDP communication hook."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the classes
# themselves.

import threading
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from atp_client.backend import ProcessGroupATP
from atp_client.connection import connect
from atp_client.errors import UsageError
from atp_client.groups import Group
from atp_client.rendezvous import agree
from atp_client.tensors import divide, start, supported
from atp_client.work import future_of, release_unheld

_DEFAULT_SECONDS = 1800.0
_groups: "weakref.WeakKeyDictionary[Any, Group]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _mean_by_group(tensor: torch.Tensor, group: Any) -> torch.futures.Future[torch.Tensor]:
    """Mean of a dtype that ATP does not sum, through the process group."""
    size = dist.get_world_size(group)
    work = dist.all_reduce(tensor, group=group, async_op=True)

    def quotient(future: Any) -> torch.Tensor:
        future.wait()
        divide(tensor, size)
        return tensor

    result: torch.futures.Future[torch.Tensor] = work.get_future().then(quotient)
    return result


def _seconds(group: Any) -> float:
    """The time-out of a process group of torch, where it can be read."""
    for device in ("cpu", "cuda"):
        try:
            options = group._get_backend(torch.device(device)).options
            timeout = options._timeout
        except (AttributeError, RuntimeError):
            continue
        if isinstance(timeout, timedelta):
            return timeout.total_seconds()
    timeout = getattr(getattr(group, "options", None), "_timeout", None)
    return timeout.total_seconds() if isinstance(timeout, timedelta) else _DEFAULT_SECONDS


def _store(group: Any) -> Any:
    """The store that torch made for a process group."""
    module = dist.distributed_c10d
    groups = module._world.pg_map if hasattr(module, "_world") else module._pg_map
    store = groups[group][1]
    if store is None:
        raise UsageError(f"a process group of the backend {groups[group][0]} has no store; use gloo, nccl or atp")
    return store


def _group_of(state: Any) -> Group:
    """The group of the sidecar for a process group of torch, made at the first call.

    Raises:
        AtpError: no sidecar, or the process group is not the workers of the job.
    """
    group = dist.distributed_c10d._get_default_group() if state is None else state
    if isinstance(group, ProcessGroupATP) and group.atp_group is not None:
        return group.atp_group
    with _lock:
        known = _groups.get(group)
        if known is not None and known.connection.broken is None:
            return known
        size = dist.get_world_size(state)
        connection = connect()
        if connection.world_size != size:
            raise UsageError(
                f"the process group has {size} ranks, but job {connection.job} has {connection.world_size} workers: "
                "ATP averages over one process per worker pod, so use this hook on a model whose process group has "
                "them all"
            )
        seconds = _seconds(group)
        connection, number = agree(dist.PrefixStore("atp/hook", _store(group)), dist.get_rank(state), size, seconds)
        made = _groups[group] = Group(connection, number, seconds)
        weakref.finalize(group, connection.leave_later, made).atexit = False
        return made


def allreduce_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages the gradients of a bucket over the workers through ATP.

        model.register_comm_hook(None, atp_client.allreduce_hook)

    The process group of the script (gloo, say) does everything else. DDP does not divide after a hook, so the mean is
    taken here, once, after the sum. Buckets of a dtype that ATP does not sum (float64) go through the process group.

    Args:
        state: the process group of the DDP model, or None for the default one. It must span all workers of the job.
        bucket: gradients, shape (n,).

    Returns:
        A Future of the averaged buffer, same shape and dtype.

    Raises:
        AtpError: no sidecar, or the process group is not the job's workers.
    """
    tensor = bucket.buffer()
    if not supported(tensor):
        return _mean_by_group(tensor, state)
    group = _group_of(state)
    release_unheld()
    future: torch.futures.Future[torch.Tensor] = future_of(start(group, tensor, True), lambda: tensor, [tensor])
    return future
