# SPDX-License-Identifier: Apache-2.0
"""The unix socket that trainers connect to: the handshake, after which the transport serves the client."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from atp_sidecar.clients import AttachError, Client, Clients
from atp_sidecar.frames import PROTOCOL_VERSION, FrameError, encode, read_frame
from atp_sidecar.gate import Gate
from atp_sidecar.logs import EventLog
from atp_sidecar.totals import JobTotals

HELLO_SECONDS = 10.0
WAITING_SECONDS = 1.0
OPEN_POLL_SECONDS = 0.05
# How long a client may take to read its last words.
LINGER_SECONDS = 1.0
ACCEPT_RETRY_SECONDS = 0.1
# Texts that quote what a client sent, a megabyte perhaps, must fit a frame and a line of the log.
MAX_TEXT = 1000
SHARED_MEMORY_PREFIX = "shm-"


class ProtocolError(Exception):
    """The client broke the protocol; the session ends with a fatal message."""


class Handshake:
    """One client before its welcome.

    Reads no byte beyond a frame: whatever follows is the transport's.
    """

    def __init__(self, connection: socket.socket, gate: Gate) -> None:
        self.connection = connection
        self.client = Client(0, "")
        self._gate = gate
        self._loop = asyncio.get_running_loop()

    async def readexactly(self, n: int, /) -> bytes:
        """As asyncio.StreamReader's."""
        data = b""
        while len(data) < n:
            part = await self._loop.sock_recv(self.connection, n - len(data))
            if not part:
                raise asyncio.IncompleteReadError(data, n)
            data += part
        return data

    async def send(self, message: dict[str, Any]) -> None:
        """Sends a message."""
        await self._loop.sock_sendall(self.connection, encode(message))

    async def run(self) -> str | None:
        """Brings the client to its welcome; returns why it left if it did before.

        Raises:
            ProtocolError, FrameError: it is no client of this protocol.
            AttachError: it cannot be served.
            ConnectionError: it is gone.
        """
        await self._hello()
        while (clients := self._gate.clients) is None:
            if await self._wait():
                message = await read_frame(self)
                if message is None or message["type"] == "bye":
                    return "left while waiting for the gate"
                raise ProtocolError(f"{message['type'][:MAX_TEXT]} came before the welcome")
        clients.attach(self.connection, self.client)
        return None

    async def _hello(self) -> None:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                message = await read_frame(self)
        except TimeoutError:
            raise ProtocolError(f"no hello within {HELLO_SECONDS:g} s") from None
        if message is None:
            raise ConnectionError("left without a hello")
        if message["type"] != "hello":
            raise ProtocolError(f"the first message must be hello, not {message['type']}")
        version = message.get("version")
        if version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the client speaks version {version}, this sidecar version {PROTOCOL_VERSION}; "
                "install atp-client and the sidecar image of the same release"
            )
        pid = message["pid"] if isinstance(message.get("pid"), int) else 0
        self.client = Client(pid, str(message.get("client", ""))[:MAX_TEXT])
        if self._gate.role != "worker":
            raise ProtocolError("this pod is a parameter server: it has no trainer; connect in a worker pod")

    async def _wait(self) -> bool:
        """Until the gate opens (False) or the client says something or leaves (True)."""
        said = asyncio.Event()
        next_notice = self._loop.time()
        while self._gate.clients is None and not said.is_set():
            if self._loop.time() >= next_notice:
                await self.send({"type": "waiting", "reason": self._gate.reason})
                next_notice = self._loop.time() + WAITING_SECONDS
            self._loop.add_reader(self.connection, said.set)
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(OPEN_POLL_SECONDS):
                        await said.wait()
            finally:
                self._loop.remove_reader(self.connection)
        return said.is_set()

    async def fatal(self, code: str, message: str) -> None:
        """Tells the client why the connection ends, and waits until it has read it."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                await self.send({"type": "fatal", "code": code, "message": message})
                self.connection.shutdown(socket.SHUT_WR)
                # Closing with unread bytes would make the client's kernel forget the message.
                while await self._loop.sock_recv(self.connection, 1 << 16):
                    pass


def remove_leftovers(directory: Path) -> int:
    """Removes the shared memory of an earlier sidecar that was killed; returns the number of files."""
    leftovers = list(directory.glob(SHARED_MEMORY_PREFIX + "*"))
    for path in leftovers:
        path.unlink(missing_ok=True)
    return len(leftovers)


class SocketServer:
    """Listens on the unix socket and brings clients to the transport.

    Args:
        gate: whose transport serves the clients.
        totals: what the parameter servers count.
        path: of the socket; the shared-memory files are made beside it.
        log: where events go.
    """

    def __init__(self, gate: Gate, totals: JobTotals, path: Path, log: EventLog) -> None:
        self._gate = gate
        self._totals = totals
        self._path = path
        self._log = log
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None

    async def start(self) -> None:
        """Listens.

        Raises:
            OSError: the socket cannot be made there, or another sidecar serves it.
        """
        if len(str(self._path).encode()) > 107:
            raise OSError(errno.ENAMETOOLONG, f"the socket path {self._path} is longer than the 107 bytes Linux allows")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.closing(probe):
            try:
                probe.connect(str(self._path))
            except OSError:
                pass
            else:
                raise OSError(errno.EADDRINUSE, f"another sidecar serves {self._path}")
        self._path.unlink(missing_ok=True)
        leftovers = remove_leftovers(self._path.parent)
        if leftovers:
            self._log.info("leftovers-removed", files=leftovers)
        listener = self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self._path))
        listener.listen(128)
        listener.setblocking(False)
        self._path.chmod(0o666)
        self._start(self._accept(listener))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                # No descriptor is left, or the client has gone: the next one may have more luck.
                self._log.warning("accept-failed", reason=str(error))
                await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                continue
            self._start(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        handshake = Handshake(connection, self._gate)
        try:
            why = await handshake.run()
            if why is not None:
                self._log.debug("client-gone", pid=handshake.client.pid, reason=why)
        except (ProtocolError, FrameError) as error:
            await self._refuse(handshake, "Protocol", str(error))
        except AttachError as error:
            await self._refuse(handshake, error.code, str(error))
        except OSError as error:
            self._log.debug("client-gone", pid=handshake.client.pid, reason=str(error))
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                connection.send(encode({"type": "fatal", "code": "Shutdown", "message": SHUTDOWN}))
            raise
        except Exception as error:
            self._log.error("session-failed", pid=handshake.client.pid, reason=repr(error)[:MAX_TEXT])
            await handshake.fatal("Internal", f"internal error: {error!r}"[:MAX_TEXT])
        finally:
            connection.close()

    async def _refuse(self, handshake: Handshake, code: str, message: str) -> None:
        message = message[:MAX_TEXT]
        client = handshake.client
        self._log.error("client-refused", pid=client.pid, client=client.name, reason=message)
        await handshake.fatal(code, message)

    def answer(self, clients: Clients, session: int) -> None:
        """A session asks for metrics."""
        self._start(self._answer(clients, session))

    async def _answer(self, clients: Clients, session: int) -> None:
        """Answers in the order of the questions (JobTotals has one lock)."""
        assignment = self._gate.assignment
        assert assignment is not None
        totals = await self._totals.get(server.address for server in assignment.parameter_servers)
        clients.reply(
            session,
            {
                **self._gate.snapshot(),
                **totals,
                "mode": assignment.mode,
                "epoch": assignment.epoch,
                "job": assignment.job,
                "scale": assignment.scale,
                "world_size": assignment.world_size,
            },
        )

    async def stop(self) -> None:
        """Ends what waits for the gate and removes the socket."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=LINGER_SECONDS)
        if self._listener is not None:
            self._listener.close()
        self._path.unlink(missing_ok=True)


SHUTDOWN = "the sidecar was told to stop (the pod is being deleted)"
