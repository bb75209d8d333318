# SPDX-License-Identifier: Apache-2.0
"""DDP communication hook."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the classes
# themselves.

from typing import Any

import torch
import torch.distributed as dist

from atp_client.connection import connect
from atp_client.errors import UsageError
from atp_client.reduce import Reduction, supported

_TIMEOUT_SECONDS = 1800.0


def _mean_by_group(tensor: torch.Tensor, group: Any) -> torch.futures.Future[torch.Tensor]:
    """Mean of a dtype that ATP does not sum, through the process group."""
    size = dist.get_world_size(group)
    work = dist.all_reduce(tensor, group=group, async_op=True)

    def divide(future: Any) -> torch.Tensor:
        future.wait()
        return tensor.div_(size)

    result: torch.futures.Future[torch.Tensor] = work.get_future().then(divide)
    return result


def allreduce_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages the gradients of a bucket over the workers through ATP.

        model.register_comm_hook(None, atp_client.allreduce_hook)

    The process group of the script (gloo, say) does everything else. DDP does not divide after a hook, so the
    mean is taken here, once. Buckets of a dtype that ATP does not sum (float64) go through the process group.

    Args:
        state: the process group of the DDP model, or None for the default one. It must span all workers of
        the job. bucket: gradients, shape (n,).

    Returns:
        A Future of the averaged buffer, same shape and dtype.

    Raises:
        AtpError: no sidecar, or the process group is not the job's workers.
    """
    tensor = bucket.buffer()
    if not supported(tensor):
        return _mean_by_group(tensor, state)
    connection = connect()
    size = dist.get_world_size(state)
    if size != connection.world_size:
        raise UsageError(
            f"the process group has {size} ranks, but job {connection.job} has {connection.world_size} "
            "workers: ATP "
            "averages over one process per worker pod, so use this hook on a model whose process group has "
            "them all"
        )
    return Reduction(connection, tensor, "mean", _TIMEOUT_SECONDS, lambda result: result).future
