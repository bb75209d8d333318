# SPDX-License-Identifier: Apache-2.0
from typing import Any, final

from typing_extensions import Buffer

# Numbers, but for rtt_histogram: dict[str, int].
Metrics = dict[str, Any]

@final
class Worker:
    """One rank of a job: runs all-reduces over UDP on a thread of its own.

    ``config`` is the assignment JSON with ``role`` "worker". Raises ValueError when the assignment is wrong and
    OSError when the address cannot be bound.
    """

    def __new__(cls, config: str) -> Worker: ...
    def fileno(self) -> int:
        """An eventfd that is readable while completions wait."""

    def submit(
        self,
        op_id: int,
        kind: str,
        dtype: str,
        send: Buffer,
        recv: Buffer,
        count: int,
    ) -> None:
        """Start an all-reduce of ``count`` elements; it ends as an entry of ``completions()``.

        ``kind`` is "sum" or "mean"; ``dtype`` is "float32", "float16", "bfloat16" or "int32" (sum only).
        ``send`` and ``recv`` are C-contiguous and hold at least ``count`` elements; they may be the same memory,
        and are kept alive until the completion is collected. Neither may be touched before. All ranks submit the
        same ``op_id`` (compared modulo 2**23), count, dtype and kind in the same order. After an error ``recv``
        is undefined.

        Raises ValueError (unknown kind or dtype, mean of int32, buffer too short), BufferError (read-only or not
        contiguous) and OSError (closed, its socket failed, or 65,536 operations were not collected).
        """

    def completions(self) -> list[tuple[int, str | None]]:
        """Operations that ended since the last call: (op_id, None) or (op_id, error text)."""

    def cancel_all(self, reason: str) -> None:
        """End all pending operations with an error.

        When any was pending, later operations fail too: the ranks no longer agree on the sequence, the job needs a new
        epoch (a new Worker).
        """

    def metrics(self) -> Metrics:
        """Counters since the start and gauges, at most 20 ms old. Times in seconds, windows in packets.

        ``rtt_histogram`` maps an upper bound in seconds to the number of round trips at or below it (cumulative).
        """

    def close(self) -> None:
        """Stop the thread. Pending operations end with an error; buffers are free afterwards. May be called again."""

@final
class ParameterServer:
    """One shard's parameter server.

    ``config`` is the assignment JSON with ``role`` "parameterServer"; its ``rank`` is the shard. Raises as Worker.
    """

    def __new__(cls, config: str) -> ParameterServer: ...
    def metrics(self) -> Metrics:
        """As ``Worker.metrics``.

        ``aggregated_packets`` and ``host_summed_packets`` count worker gradients by where they were summed.
        """

    def close(self) -> None:
        """Stop the thread. May be called again."""
