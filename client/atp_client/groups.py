# SPDX-License-Identifier: Apache-2.0
"""A process group on the wire: its number, the order of its operations, and what waits for room."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from atp_client.errors import AtpError, UsageError, again
from atp_client.operation import Operation

if TYPE_CHECKING:
    from atp_client.connection import Connection


class Group:
    """The operations of one process group of this process. Groups do not order each other.

    Args:
        connection: to the sidecar.
        number: of the group; the same on all ranks, and never used twice in an epoch.
        seconds: the time-out of its operations.
    """

    def __init__(self, connection: Connection, number: int, seconds: float) -> None:
        self.connection = connection
        self.number = number
        self.seconds = seconds
        # Why no operation can succeed any more.
        self.error: AtpError | None = None
        self.left = False
        # Held while parts are submitted, so that they go out in order.
        self.lock = threading.Lock()
        # A thread that found the lock taken wants the holder to look again.
        self.wanted = False
        # Operations that are not submitted whole.
        self.queue: deque[Operation] = deque()
        # Parts without an answer.
        self.outstanding = 0
        self._next = 0
        connection.leave_left()

    def start(
        self, address: int, count: int, itemsize: int, dtype: int, mean: int, keep: Any, seconds: float = 0.0
    ) -> Operation:
        """Starts an all-reduce in place and returns at once.

        Args:
            address: of contiguous memory with `count` elements.
            count: elements, also 0.
            itemsize: bytes of one.
            dtype: code of the session protocol.
            mean: 1 for the mean over the ranks, 0 for the sum.
            keep: owns the memory; kept until nobody reads or writes it any more.
            seconds: time-out of this operation, if above 0.

        Raises:
            AtpError: the group, or the connection, is broken.
        """
        return self._start(address, count, itemsize, dtype, mean, keep, seconds, True)

    def prepare(self, address: int, count: int, itemsize: int, dtype: int, mean: int, keep: Any, seconds: float) -> Any:
        """As `start`, for memory that gets its values later; then `set_ready`."""
        return self._start(address, count, itemsize, dtype, mean, keep, seconds, False)

    def _start(
        self, address: int, count: int, itemsize: int, dtype: int, mean: int, keep: Any, seconds: float, ready: bool
    ) -> Operation:
        now = time.monotonic()
        connection = self.connection
        if connection.broken is not None:
            raise again(connection.broken)
        with self.lock:
            operation = Operation(
                self, self._next, address, count, itemsize, dtype, mean, keep, now + (seconds or self.seconds)
            )
            if not ready:
                operation.ready = False
            connection.launch(operation, now)
            self._next += 1
        if self.wanted:
            connection.pump(self)
        connection.readers.look_after()
        return operation

    def set_ready(self, operation: Operation) -> None:
        """The values of a prepared operation are in its memory now."""
        operation.ready = True
        self.connection.pump(self)

    def refuse(self) -> None:
        """Raises why no operation can succeed any more, if so."""
        if self.left:
            raise UsageError("the process group was destroyed")
        if self.error is not None:
            raise again(
                self.error,
                "this process group cannot be used any more, because one of its operations failed on some rank: ",
                "; other process groups can, and so can a new one that all ranks make",
            )

    def leave(self) -> None:
        """This process will not use it any more."""
        if not self.left:
            self.left = True
            self.connection.leave(self)
