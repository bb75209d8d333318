# SPDX-License-Identifier: Apache-2.0
from os import PathLike
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
class Member:
    """One rank of a job with process groups: serves the sessions of trainers (docs/session.md) on a thread of its own.

    ``config`` is the assignment JSON with ``role`` "worker"; ``directory`` is where the shared memory of the sessions
    is made, on a memory file system that the trainers see at the same path. Raises as Worker.
    """

    def __new__(cls, config: str, directory: str | PathLike[str]) -> Member: ...
    def fileno(self) -> int:
        """An eventfd that is readable while ``session_events()`` wait."""

    def attach(self, fd: int, welcome: str, session: int) -> None:
        """Serve a client from now on: send the welcome, then read its frames.

        ``fd`` is a connected unix stream socket, which is duplicated: the caller closes its own, and does not read or
        write any more. ``welcome`` is a JSON object, to which the shared memory is added. ``session`` is a number that
        no other session of this member has or had.

        Raises OSError (no shared memory, no descriptor; ``strerror`` says what to do) and ValueError (the welcome is no
        JSON object, or the member does not run).
        """

    def session_events(self) -> list[tuple[str, int, dict[str, Any]]]:
        """What happened since the last call, as (kind, session, fields).

        - "stats": the client asks for metrics; ``reply`` answers.
        - "left", "refused" (broke the protocol), "cut-off" (does not read): the session has ended, with reason and
          operationsLeft.
        - "failed": op, group, code, message, broken and count: the first part of a group that failed and how many
          followed with the same code.
        - "grow-refused": bytes and reason.
        - "warning": text. "stopped": reason, the thread ended by itself. Both with session 0.
        """

    def reply(self, session: int, body: bytes) -> None:
        """Answer a "stats" event with a JSON object. Without effect when the session has ended."""

    def metrics(self) -> Metrics:
        """As ``Worker.metrics``; and "operations" (dict of result, "ok" or the code, to count), "sessions" and
        "operations_outstanding" (parts)."""

    def close(self, code: str, message: str) -> None:
        """End all sessions: what is outstanding fails with the code and message, which every client also gets as its
        last frame. Returns when the UDP address is free. May be called again."""

    def join(self) -> None:
        """After ``close``: wait until the clients have read their last words, for a second at most. Before: stop."""

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
