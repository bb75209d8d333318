# SPDX-License-Identifier: Apache-2.0
"""Reaching the sidecar: the socket, and the messages until the job may start."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atp_client import framing
from atp_client._version import __version__
from atp_client.errors import GateTimeoutError, NoSidecarError, SidecarLostError, from_code
from atp_client.torch_version import VERSION

log = logging.getLogger("atp_client")

PROTOCOL_VERSION = 2
LOG_SECONDS = 5.0
# Without a socket: how long it may take to appear. A sidecar starts before the trainer, so only a restart needs this.
SOCKET_GRACE_SECONDS = 10.0

NO_SIDECAR = (
    "This process has to run in a worker pod of an ATPJob (kubectl apply -f atpjob.yaml), or in a pod with the label "
    "atp.dev/job=<name of the ATPJob>: the webhook then adds the container atp-sidecar. If the sidecar's socket is "
    "somewhere else, set ATP_SOCKET to its path. To train without ATP, use the backend gloo."
)


@dataclass(frozen=True)
class Welcome:
    """What the sidecar says of the job when the gate is open."""

    rank: int
    world_size: int
    job: str
    epoch: int
    mode: str
    master_address: str
    session: int
    segment: int
    shm: str
    shm_bytes: int


def lost(error: OSError | None) -> SidecarLostError:
    """The sidecar's end of the connection is gone: whether reading or writing noticed it first, it means the same."""
    detail = f" ({error})" if error is not None else ""
    return SidecarLostError(
        f"the ATP sidecar closed the connection{detail}: it was killed or restarted; "
        "see kubectl logs <pod> -c atp-sidecar --previous"
    )


def dial(path: str, deadline: float) -> socket.socket:
    """Connects to the socket at `path`, which may appear a little later.

    Raises:
        NoSidecarError: nobody listens there.
    """
    grace = min(deadline, time.monotonic() + SOCKET_GRACE_SECONDS)
    if "ATP_SOCKET" not in os.environ and not Path(path).parent.is_dir():
        grace = 0.0  # no sidecar was ever added to this pod
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
            return connection
        except OSError as error:
            connection.close()
            if isinstance(error, PermissionError):
                raise NoSidecarError(f"the ATP sidecar's socket {path} may not be opened: {error}") from error
            if time.monotonic() >= grace:
                raise NoSidecarError(f"no ATP sidecar at {path} ({error.strerror or error}). {NO_SIDECAR}") from error
        time.sleep(0.1)


def _receive(connection: socket.socket, reader: framing.FrameReader, timeout: float) -> list[dict[str, Any]]:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if not poll.poll(timeout * 1000):
        return []
    try:
        open_still = reader.receive(connection)
    except BlockingIOError:
        return []
    except OSError as error:
        raise lost(error) from error
    if not open_still:
        raise lost(None)
    return reader.take()[1]


def _welcome(message: dict[str, Any]) -> Welcome:
    try:
        return Welcome(
            rank=int(message["rank"]),
            world_size=int(message["worldSize"]),
            job=str(message["job"]),
            epoch=int(message["epoch"]),
            mode=str(message["mode"]),
            master_address=str(message["masterAddress"]),
            session=int(message["session"]),
            segment=int(message["segment"]),
            shm=str(message["shm"]),
            shm_bytes=int(message["shmBytes"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SidecarLostError(
            f"the sidecar's welcome is not understood: {error!r}; use the same release of atp-client and atp-sidecar"
        ) from error


def shake(
    connection: socket.socket, reader: framing.FrameReader, deadline: float, seconds: float
) -> tuple[Welcome, list[dict[str, Any]]]:
    """Says hello and waits for the gate, logging the reason every few seconds.

    Args:
        connection: to the sidecar.
        reader: of its frames.
        deadline: monotonic time.
        seconds: how long that was, for the text.

    Returns:
        The welcome, and the messages that came right behind it.

    Raises:
        GateTimeoutError: the gate stayed closed.
        AtpError: the sidecar refused or left.
    """
    version = ".".join(map(str, VERSION))
    client = f"atp-client/{__version__} torch/{version}"
    hello = {"type": "hello", "version": PROTOCOL_VERSION, "pid": os.getpid(), "client": client}
    # If it has hung up, what it said before is still there to read.
    with contextlib.suppress(OSError):
        connection.sendall(framing.encode(hello))
    reason, logged_at, logged = "", 0.0, ""
    while True:
        now = time.monotonic()
        if now >= deadline:
            raise GateTimeoutError(
                f"the ATP sidecar did not let this worker start within {seconds:g} s (ATP_CONNECT_TIMEOUT). Its "
                f"reason: {reason or 'none given; it does not answer'}. kubectl describe atpjob shows what the job "
                "waits for."
            )
        messages = _receive(connection, reader, min(1.0, deadline - now))
        for position, message in enumerate(messages):
            kind = message["type"]
            if kind == "waiting":
                reason = str(message.get("reason", ""))
                if reason != logged or now - logged_at >= LOG_SECONDS:
                    log.warning("ATP: waiting to start: %s", reason)
                    logged, logged_at = reason, now
            elif kind == "welcome":
                return _welcome(message), messages[position + 1 :]
            elif kind == "fatal":
                raise from_code(str(message.get("code")), str(message.get("message")))
            else:
                raise SidecarLostError(f"the sidecar answered hello with {kind!r}; use the same release of both")
