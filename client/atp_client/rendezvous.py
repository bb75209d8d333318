# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a process group agree on its number, through the store that torch made for the group.

Every rank writes who it is for ATP. Group rank 0 reads all, checks that they are the workers of one job in one epoch,
each once, and publishes the group's number. Whoever finds a reason why this cannot work publishes that instead, so
that every rank fails at once and says why.
"""

from __future__ import annotations

import json
import time
from typing import Any

from atp_client import errors
from atp_client.connection import Connection, connect
from atp_client.errors import AtpError, EpochError, OperationTimeoutError, UsageError

# How long a failing group rank 0, which often holds the store, stays for the others to read why.
_LINGER_SECONDS = 5.0
# The least time that the ranks have to come, whatever time-out the operations of the group have.
_LEAST_SECONDS = 30.0


class _Board:
    """The keys of one round. Only `add`, `set` and `get`, which the stores of all versions of torch have."""

    def __init__(self, store: Any, rank: int, size: int, seconds: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._end = time.monotonic() + seconds
        self._seconds = seconds
        # A store may be used again for a group of the same name.
        self._round = store.add(f"atp/rounds/{rank}", 1)

    def _key(self, name: str) -> str:
        return f"atp/{self._round}/{name}"

    def write(self, name: str, value: dict[str, Any]) -> None:
        """Sets a value, then says so."""
        self._store.set(self._key(name), json.dumps(value))
        self._store.add(self._key(f"{name}/written"), 1)

    def read(self, name: str) -> dict[str, Any] | None:
        """The value, or None if it is not written yet."""
        if self._store.add(self._key(f"{name}/written"), 0) == 0:
            return None
        return dict(json.loads(self._store.get(self._key(name))))

    def wait(self, name: str) -> dict[str, Any]:
        """The value, or the verdict if that comes first.

        Raises:
            OperationTimeoutError: neither came.
        """
        pause = 0.002
        while True:
            for each in (name, "verdict"):
                value = self.read(each)
                if value is not None:
                    return value
            if time.monotonic() >= self._end:
                raise OperationTimeoutError(
                    f"the process group did not come about within {self._seconds:g} s: {self._missing()}"
                )
            time.sleep(pause)
            pause = min(0.1, 1.5 * pause)

    def _missing(self) -> str:
        missing = [str(rank) for rank in range(self._size) if self.read(f"rank/{rank}") is None]
        return f"rank {', '.join(missing)} did not come" if missing else "rank 0 has not answered"

    def seen(self) -> None:
        """This rank has read the verdict."""
        self._store.add(self._key("seen"), 1)

    def linger(self) -> None:
        """Waits a little until all others that came have read the verdict."""
        end = time.monotonic() + _LINGER_SECONDS
        while self._store.add(self._key("seen"), 0) < self._size - 1 and time.monotonic() < end:
            time.sleep(0.02)


def _identity(connection: Connection) -> dict[str, Any]:
    return {
        "job": connection.job,
        "epoch": connection.epoch,
        "rank": connection.rank,
        "workers": connection.world_size,
    }


def _failure(error: AtpError) -> dict[str, Any]:
    return {"error": str(error), "class": type(error).__name__}


def _objection(identities: list[dict[str, Any]]) -> AtpError | None:
    """Why these ranks cannot be a group, if so."""
    first = identities[0]
    owners: dict[int, int] = {}
    for rank, identity in enumerate(identities):
        if identity["job"] != first["job"]:
            return UsageError(
                f"rank 0 of the process group runs in a pod of job {first['job']}, "
                f"rank {rank} in one of {identity['job']}"
            )
        if identity["epoch"] != first["epoch"]:
            return EpochError(
                f"rank 0 of the process group has joined epoch {first['epoch']} of job {first['job']}, "
                f"rank {rank} epoch {identity['epoch']}: the operator has restarted the job; start the processes again"
            )
        other = owners.setdefault(identity["rank"], rank)
        if other != rank:
            return UsageError(
                f"ranks {other} and {rank} of the process group run in the same pod (worker {identity['rank']} of job "
                f"{first['job']}). ATP sums over one process in each worker pod: start one process in a pod (torchrun "
                "--nproc-per-node=1), or use the backend gloo"
            )
    return None


def _wrong_size(size: int, connection: Connection) -> UsageError:
    return UsageError(
        f"the process group has {size} ranks, but job {connection.job} has {connection.world_size} workers. ATP sums "
        "over one process per worker pod: start one process in each pod (WORLD_SIZE and RANK are set in the pods of an "
        "ATPJob; torchrun --nproc-per-node=1), or set spec.workers.replicas to the number of ranks"
    )


def agree(store: Any, rank: int, size: int, seconds: float) -> tuple[Connection, int]:
    """Connects to the sidecar and agrees with the other ranks on the group's number.

    Args:
        store: of the group; all its ranks call this, once for each group.
        rank: in the group.
        size: ranks of the group.
        seconds: how long to wait for the others.

    Returns:
        The connection and the number.

    Raises:
        AtpError: this rank, or another, cannot use ATP, or they are not the workers of one job.
    """
    board = _Board(store, rank, size, max(_LEAST_SECONDS, seconds))
    try:
        connection = connect()
        if connection.world_size != size:
            raise _wrong_size(size, connection)
    except AtpError as error:
        if board.read("verdict") is None:
            board.write("verdict", {**_failure(error), "rank": rank})
        if rank == 0:
            board.linger()
        else:
            board.seen()
        raise
    board.write(f"rank/{rank}", _identity(connection))
    verdict = _judge(board, connection, size) if rank == 0 else board.wait("verdict")
    if "error" in verdict:
        if rank == 0:
            board.linger()
        else:
            board.seen()
        raise _raised(verdict)
    return connection, int(verdict["group"])


def _judge(board: _Board, connection: Connection, size: int) -> dict[str, Any]:
    """What group rank 0 does: the verdict."""
    identities = []
    for rank in range(size):
        identity = board.wait(f"rank/{rank}")
        if "error" in identity:
            return identity
        identities.append(identity)
    objection = _objection(identities)
    verdict = _failure(objection) if objection is not None else {"group": connection.new_group_number()}
    board.write("verdict", verdict)
    return verdict


def _raised(verdict: dict[str, Any]) -> AtpError:
    kind = getattr(errors, str(verdict["class"]), AtpError)
    if "rank" not in verdict:
        return AtpError(verdict["error"]) if kind is AtpError else kind(verdict["error"])
    text = f"rank {verdict['rank']} of the process group cannot use ATP: {verdict['error']}"
    return UsageError(text) if kind is UsageError else errors.PeerError(text)
