# SPDX-License-Identifier: Apache-2.0
"""The native transport as this package uses it, and how it is started."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from atp_sidecar.assignment import Assignment


class Transport(Protocol):
    """What both roles have."""

    def metrics(self) -> dict[str, Any]:
        """Counters and gauges since the start; also after the end."""

    def close(self, code: str, message: str) -> None:
        """Stops the transport and releases its address; clients learn the code and the message.

        May be called twice.
        """

    def join(self) -> None:
        """Waits, for a second at most, until the clients have read their last words."""


class MemberTransport(Transport, Protocol):
    """The role worker: serves the sessions of the trainers."""

    def fileno(self) -> int:
        """An eventfd that is readable while `session_events` wait."""

    def attach(self, fd: int, welcome: str, session: int) -> None:
        """Serves a connected client from now on, on a copy of the descriptor.

        Args:
            fd: the client's unix stream socket.
            welcome: JSON object; the transport adds the shared memory, and sends it.
            session: number, unique in this transport.

        Raises:
            OSError: there is no shared memory for it; `strerror` says what to do.
            ValueError: the transport does not run.
        """

    def session_events(self) -> list[tuple[str, int, dict[str, Any]]]:
        """What happened since the last call: kind, session, fields."""

    def reply(self, session: int, body: bytes) -> None:
        """Answers a "stats" event with a JSON object."""


Factory = Callable[[Assignment], Transport]


class _Server:
    """The parameter server has no clients to tell anything."""

    def __init__(self, config: str) -> None:
        import atp_transport

        self._server = atp_transport.ParameterServer(config)

    def metrics(self) -> dict[str, Any]:
        return self._server.metrics()

    def close(self, code: str, message: str) -> None:
        self._server.close()

    def join(self) -> None:
        pass


def native_factory(directory: Path) -> Factory:
    """Starts native transports whose shared memory is in `directory`.

    The factory raises ValueError when the transport refuses the assignment, OSError when its socket cannot be opened.
    """

    def start(assignment: Assignment) -> Transport:
        # Imported here: `park` and the tests of the other modules do without it.
        import atp_transport

        if assignment.role == "worker":
            return atp_transport.Member(assignment.to_json(), directory)
        return _Server(assignment.to_json())

    return start
