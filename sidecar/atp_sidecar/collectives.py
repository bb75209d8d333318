# SPDX-License-Identifier: Apache-2.0
"""The operations of one epoch: many clients, one order, one transport."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from atp_sidecar.assignment import Assignment
from atp_sidecar.logs import EventLog
from atp_sidecar.transport import WorkerTransport, error_code

ITEM_BYTES = {"float32": 4, "int32": 4, "float16": 2, "bfloat16": 2}
KINDS = ("sum", "mean")


class Owner(Protocol):
    """A client that operations report to."""

    def operation_done(self, op: int) -> None:
        """The operation is complete, its result is in place."""

    def operation_failed(self, op: int, code: str, message: str) -> None:
        """The operation ended without a result."""


@dataclass(frozen=True)
class _Operation:
    owner: Owner
    op: int
    # The view keeps the shared file mapped until the transport has let go of it.
    view: memoryview


class Collectives:
    """Gives the operations of all clients one order and numbers of their own, and hands results back.

    The transport takes sequences in the order of submission, so all workers must submit the same operations
    in the same order. A client that leaves in the middle of an operation breaks that order for the epoch.

    Args:
        assignment: of this epoch.
        transport: the worker.
        log: where events go.
        count: called with the result ("ok" or an error code) of each finished operation.
    """

    def __init__(
        self, assignment: Assignment, transport: WorkerTransport, log: EventLog, count: Callable[[str], None]
    ) -> None:
        self.assignment = assignment
        self._transport = transport
        self._log = log
        self._count = count
        self._numbers = itertools.count(1)
        self._operations: dict[int, _Operation] = {}
        self._loop = asyncio.get_running_loop()
        self._descriptor = transport.fileno()
        self._closed = False
        self.broken: str | None = None
        self._loop.add_reader(self._descriptor, self.collect)

    @property
    def in_flight(self) -> int:
        """Operations submitted and not finished, of all clients."""
        return len(self._operations)

    def submit(self, owner: Owner, op: int, kind: str, dtype: str, view: memoryview, count: int) -> None:
        """Starts an all-reduce in place.

        Args:
            owner: who is told the result.
            op: the owner's number for it.
            kind: "sum" or "mean".
            dtype: of the values.
            view: the `count` values, shape (count * item size,) bytes.
            count: number of values.
        """
        if self.broken is not None:
            owner.operation_failed(op, "PeerGone", self.broken)
            return
        number = next(self._numbers)
        self._operations[number] = _Operation(owner, op, view)
        try:
            self._transport.submit(number, kind, dtype, view, view, count)
        except (ValueError, OSError, BufferError) as error:
            del self._operations[number]
            self._finish_failed(owner, op, error_code(str(error)), str(error))

    def _finish_failed(self, owner: Owner, op: int, code: str, message: str) -> None:
        self._count(code)
        self._log.warning(
            "operation-stalled" if code == "Stalled" else "operation-failed",
            op=op,
            code=code,
            message=message,
        )
        owner.operation_failed(op, code, message)

    def collect(self) -> None:
        """Hands finished operations to their owners."""
        for number, error in self._transport.completions():
            operation = self._operations.pop(number, None)
            if operation is None:
                self._log.error("unknown-completion", number=number, error=error)
                continue
            operation.view.release()
            if error is None:
                self._count("ok")
                operation.owner.operation_done(operation.op)
            else:
                self._finish_failed(operation.owner, operation.op, error_code(error), error)

    def leave(self, owner: Owner, why: str) -> int:
        """A client has gone. Operations it left in flight are cancelled; returns how many there were.

        Cancelling part of a collective leaves this worker out of step with its peers, so the epoch is over:
        every later operation fails at once and says so.
        """
        left = sum(1 for operation in self._operations.values() if operation.owner is owner)
        if left and not self._closed:
            place = f"worker {self.assignment.rank} of {self.assignment.job}"
            self.broken = (
                f"the trainer of {place} left ({why}) with {left} operations in flight, so epoch "
                f"{self.assignment.epoch} cannot go on; the job has to be restarted (it gets a new epoch)"
            )
            self._log.warning("operations-cancelled", left=left, why=why)
            self._transport.cancel_all(self.broken)
            self.collect()
        return left

    def close(self, code: str, message: str) -> None:
        """Stops the transport; whatever is still in flight fails with the code and message."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._descriptor)
        self._transport.close()
        operations, self._operations = self._operations, {}
        for operation in operations.values():
            self._finish_failed(operation.owner, operation.op, code, message)

    def metrics(self) -> dict[str, Any]:
        """The transport's metrics."""
        return self._transport.metrics()
