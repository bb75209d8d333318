# SPDX-License-Identifier: Apache-2.0
"""Client arbitration as a pure state machine: P4Runtime 1.4, section "Client Arbitration and Controller
Replication"."""

from __future__ import annotations

from dataclasses import dataclass, field

from .errors import Code, P4RuntimeError


@dataclass(frozen=True)
class Notice:
    """A MasterArbitrationUpdate that the server owes to one session.

    `election_id`: the highest that the server has received for the role, None if it has received none. `code`: OK
    for the primary, ALREADY_EXISTS for a backup, NOT_FOUND when there is no primary.
    """

    session: int
    role: str
    election_id: int | None
    code: Code


@dataclass
class _Role:
    sessions: dict[int, int | None] = field(default_factory=dict)
    highest: int | None = None
    primary: int | None = None


class Arbiter:
    """Sessions (open streams) by role; roles are independent, the default role is the empty name."""

    def __init__(self, device_id: int) -> None:
        self.device_id = device_id
        self._roles: dict[str, _Role] = {}
        self._role_of: dict[int, str] = {}

    def update(self, session: int, device_id: int, role: str, election_id: int | None) -> list[Notice]:
        """A session says who it wants to be. Election ID None (or 0) never becomes primary.

        Raises NOT_FOUND for another device, FAILED_PRECONDITION for a changed role, INVALID_ARGUMENT for an
        election ID that another session of the role has; the stream ends in each case.
        """
        if device_id != self.device_id:
            raise P4RuntimeError(
                Code.NOT_FOUND, f"device_id {device_id} is not served here; this switch is {self.device_id}"
            )
        if self._role_of.get(session, role) != role:
            raise P4RuntimeError(Code.FAILED_PRECONDITION, "the role of a stream cannot change; open another stream")
        if election_id == 0:
            election_id = None
        state = self._roles.setdefault(role, _Role())
        if election_id is not None and any(
            other != session and taken == election_id for other, taken in state.sessions.items()
        ):
            raise P4RuntimeError(Code.INVALID_ARGUMENT, f"election_id {election_id} is in use by another controller")
        self._role_of[session] = role
        state.sessions[session] = election_id
        before = (state.primary, state.highest)
        if election_id is not None and (state.highest is None or election_id >= state.highest):
            state.highest = election_id
            state.primary = session
        elif state.primary == session:
            state.primary = None  # it took a lower election ID: a step down, and nobody is raised for it
        if (state.primary, state.highest) != before:
            return self._notices(role, state)
        return [self._notice(role, state, session)]

    def leave(self, session: int) -> list[Notice]:
        """A stream ended. Backups hear it when it was the primary; none becomes primary by itself."""
        role = self._role_of.pop(session, None)
        if role is None:
            return []
        state = self._roles[role]
        del state.sessions[session]
        if state.primary != session:
            return []
        state.primary = None
        return self._notices(role, state)

    def check(self, device_id: int, role: str, election_id: int | None) -> None:
        """Raises PERMISSION_DENIED unless a request with this election ID comes from the primary of its role."""
        if device_id != self.device_id:
            raise P4RuntimeError(
                Code.NOT_FOUND, f"device_id {device_id} is not served here; this switch is {self.device_id}"
            )
        state = self._roles.get(role)
        primary = None if state is None or state.primary is None else state.sessions[state.primary]
        if not election_id or primary != election_id:
            raise P4RuntimeError(
                Code.PERMISSION_DENIED,
                "not the primary controller: open a stream and win the arbitration first",
            )

    def _notice(self, role: str, state: _Role, session: int) -> Notice:
        code = Code.OK if state.primary == session else Code.ALREADY_EXISTS
        if state.primary is None:
            code = Code.NOT_FOUND
        return Notice(session, role, state.highest, code)

    def _notices(self, role: str, state: _Role) -> list[Notice]:
        return [self._notice(role, state, session) for session in state.sessions]
