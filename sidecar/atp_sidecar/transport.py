# SPDX-License-Identifier: Apache-2.0
"""The native transport as this package uses it, and how it is started."""

from collections.abc import Callable
from typing import Any, Protocol

from atp_sidecar.assignment import Assignment

ERROR_CODES = frozenset({"Mismatch", "Stalled", "PeerGone", "Cancelled", "Internal", "Epoch"})


class Transport(Protocol):
    """What both roles have."""

    def metrics(self) -> dict[str, Any]:
        """Counters and gauges since the start."""

    def close(self) -> None:
        """Stops the transport and releases its socket. May be called twice."""


class WorkerTransport(Transport, Protocol):
    """The role worker: all-reduces buffers. Operations take their sequences in the order of `submit`."""

    def fileno(self) -> int:
        """An eventfd that is readable while completions wait."""

    def submit(self, op_id: int, kind: str, dtype: str, send: memoryview, recv: memoryview, count: int) -> None:
        """Starts one all-reduce. The buffers must stay alive until its completion.

        Raises:
            ValueError: the operation cannot be.
            OSError: the transport is closed or broken.
        """

    def completions(self) -> list[tuple[int, str | None]]:
        """Operations finished since the last call: (op_id, None or the error)."""

    def cancel_all(self, reason: str) -> None:
        """Ends every operation in flight with an error."""


Factory = Callable[[Assignment], Transport]


def start_native(assignment: Assignment) -> Transport:
    """Starts the native transport in the assignment's role.

    Raises:
        ValueError: the transport refuses the assignment.
        OSError: its socket cannot be opened.
    """
    # Imported here: `park` and the tests of the other modules do without it.
    import atp_transport

    transport: Transport
    if assignment.role == "worker":
        transport = atp_transport.Worker(assignment.to_json())
    else:
        transport = atp_transport.ParameterServer(assignment.to_json())
    return transport


# How the transport's texts begin or what they contain, by code; the first that fits counts.
_SIGNS = (
    ("Cancelled", "cancelled:"),
    ("Stalled", "no progress for "),
    ("Mismatch", "all ranks must call the same operations"),
    ("Mismatch", "the descriptor came back damaged"),
    ("PeerGone", "the answer is to another process"),
)


def error_code(text: str) -> str:
    """The code of a transport's error text; Internal for one that is not known."""
    return next((code for code, sign in _SIGNS if sign in text), "Internal")
