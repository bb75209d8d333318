# SPDX-License-Identifier: Apache-2.0
"""The trainers of one epoch: let in here, served by the transport, logged here."""

import asyncio
import itertools
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from atp_sidecar.assignment import Assignment
from atp_sidecar.logs import EventLog
from atp_sidecar.transport import MemberTransport

# The number of a session is 16 bits of the numbers of its groups, and no two groups of an epoch share theirs.
SESSIONS_MAX = 65535


class AttachError(Exception):
    """The client cannot be served; `code` is that of the session protocol."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Client:
    """Who a client says it is."""

    pid: int
    name: str


class Clients:
    """Hands clients to the transport, and logs what it says about them.

    Args:
        assignment: of this epoch.
        member: the transport.
        log: where events go.
        on_stats: called with these clients and the session that asks for metrics.
    """

    def __init__(
        self,
        assignment: Assignment,
        member: MemberTransport,
        log: EventLog,
        on_stats: "Callable[[Clients, int], None]",
    ) -> None:
        self._assignment = assignment
        self._member = member
        self._log = log
        self._on_stats = on_stats
        self._numbers = itertools.count(1)
        self._clients: dict[int, Client] = {}
        self._loop = asyncio.get_running_loop()
        self._descriptor = member.fileno()
        self._loop.add_reader(self._descriptor, self.collect)

    def attach(self, connection: socket.socket, client: Client) -> None:
        """Welcomes a client; the caller closes its own descriptor.

        Raises:
            AttachError: it cannot be.
        """
        session = next(self._numbers)
        if session > SESSIONS_MAX:
            raise AttachError(
                "Internal", f"{SESSIONS_MAX} trainers connected in this epoch; the job has to be restarted"
            )
        assignment = self._assignment
        welcome = {
            "type": "welcome",
            "rank": assignment.rank,
            "worldSize": assignment.world_size,
            "job": assignment.job,
            "epoch": assignment.epoch,
            "mode": assignment.mode,
            "masterAddress": assignment.master_address,
            "scale": assignment.scale,
            "stallTimeoutSeconds": assignment.stall_timeout_seconds,
            "session": session,
        }
        try:
            self._member.attach(connection.fileno(), json.dumps(welcome), session)
        except OSError as error:
            raise AttachError("Memory", error.strerror or str(error)) from error
        except ValueError as error:
            raise AttachError("Internal", str(error)) from error
        self._clients[session] = client
        self._log.info("client-attached", session=session, pid=client.pid, client=client.name)

    def revise(self, assignment: Assignment) -> None:
        """The assignment changed within the epoch."""
        self._assignment = assignment

    def reply(self, session: int, stats: dict[str, Any]) -> None:
        """Answers a question for metrics."""
        self._member.reply(session, json.dumps({**stats, "type": "stats"}).encode())

    def collect(self) -> None:
        """Takes what the transport has to say."""
        for kind, session, fields in self._member.session_events():
            self._event(kind, session, fields)

    def _event(self, kind: str, session: int, fields: dict[str, Any]) -> None:
        if kind == "stats":
            self._on_stats(self, session)
        elif kind == "failed":
            event = "operation-stalled" if fields["code"] == "Stalled" else "operation-failed"
            self._log.warning(event, session=session, **fields)
        elif kind in ("left", "refused", "cut-off"):
            client = self._clients.pop(session, Client(0, ""))
            if kind == "refused":
                self._log.error("client-refused", session=session, client=client.name, pid=client.pid, **fields)
            elif kind == "cut-off":
                self._log.error("client-cut-off", session=session, pid=client.pid, **fields)
            if fields["operationsLeft"]:
                self._log.warning("operations-cancelled", left=fields["operationsLeft"], why=fields["reason"])
            self._log.info("client-left", session=session, pid=client.pid, **fields)
        elif kind == "grow-refused":
            self._log.warning("grow-refused", session=session, **fields)
        elif kind == "warning":
            self._log.warning("transport-warning", **fields)
        else:
            self._log.error("transport-failed", **fields)

    def close(self) -> None:
        """The transport was closed: takes its last events."""
        self._loop.remove_reader(self._descriptor)
        self.collect()
