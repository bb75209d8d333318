# SPDX-License-Identifier: Apache-2.0
"""The unix socket that trainers connect to: one session a connection, any number of them."""

import asyncio
import contextlib
import errno
import socket
from pathlib import Path
from typing import Any

from atp_sidecar.collectives import ITEM_BYTES, KINDS
from atp_sidecar.frames import PROTOCOL_VERSION, FrameError, encode, read_frame
from atp_sidecar.gate import Gate
from atp_sidecar.logs import EventLog
from atp_sidecar.segment import Segment, SegmentError, remove_leftovers
from atp_sidecar.totals import JobTotals

HELLO_SECONDS = 10.0
WAITING_SECONDS = 1.0
OPEN_POLL_SECONDS = 0.05
INITIAL_SEGMENT_BYTES = 4 << 20
MAX_SEGMENT_BYTES = 1 << 30
# A client that reads nothing while it submits is cut off here.
MAX_UNSENT_BYTES = 16 << 20
# Texts that quote what a client sent, a megabyte perhaps, must fit a frame and a line of the log.
MAX_TEXT = 1000


class ProtocolError(Exception):
    """The client broke the protocol; the session ends with a fatal message."""


def _integer(message: dict[str, Any], name: str, least: int) -> int:
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ProtocolError(f'{message["type"]}: "{name}" must be an integer of at least {least}, not {value!r}')
    return value


class Session:
    """One connected client."""

    def __init__(
        self, gate: Gate, totals: JobTotals, directory: Path, writer: asyncio.StreamWriter, log: EventLog
    ) -> None:
        self._gate = gate
        self._totals = totals
        self._tasks: set[asyncio.Task[None]] = set()
        self._directory = directory
        self._writer = writer
        self._log = log
        self._segment: Segment | None = None
        self._in_flight: set[int] = set()
        self._collectives = gate.collectives
        self.client = ""
        self.pid = 0
        self.welcomed = False

    def send(self, message: dict[str, Any]) -> None:
        """Queues a message to the client."""
        if self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._log.error("client-cut-off", pid=self.pid, reason="it does not read its messages")
            self._writer.transport.abort()
            return
        self._writer.write(encode(message))

    def fatal(self, code: str, message: str) -> None:
        """Tells the client why the connection ends, and ends it."""
        self.send({"type": "fatal", "code": code, "message": message})
        self._writer.close()

    def operation_done(self, op: int) -> None:
        """Owner: the result of `op` is in place."""
        self._in_flight.discard(op)
        self.send({"type": "done", "op": op})

    def operation_failed(self, op: int, code: str, message: str) -> None:
        """Owner: `op` ended without a result."""
        self._in_flight.discard(op)
        self.send({"type": "failed", "op": op, "code": code, "message": message})

    async def run(self, reader: asyncio.StreamReader) -> str:
        """Serves the client until it leaves; returns why it did."""
        await self._hello(reader)
        first = asyncio.create_task(read_frame(reader))
        try:
            if not await self._wait_for_gate(first):
                return await self._gone(first)
            self._welcome()
            while True:
                message = await first
                if message is None:
                    return "connection closed"
                if message["type"] == "bye":
                    return "bye"
                self._handle(message)
                first = asyncio.create_task(read_frame(reader))
        finally:
            first.cancel()

    async def _gone(self, first: "asyncio.Task[dict[str, Any] | None]") -> str:
        message = await first
        if message is None or message["type"] == "bye":
            return "left while waiting for the gate"
        raise ProtocolError(f"{message['type']} came before the welcome")

    async def _hello(self, reader: asyncio.StreamReader) -> None:
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                message = await read_frame(reader)
        except TimeoutError:
            raise ProtocolError(f"no hello within {HELLO_SECONDS:.0f} s") from None
        if message is None:
            raise FrameError("the connection ended before hello")
        if message["type"] != "hello":
            raise ProtocolError(f"the first message must be hello, not {message['type']}")
        version = _integer(message, "version", 1)
        if version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the client speaks version {version}, this sidecar version {PROTOCOL_VERSION}; "
                "install atp-client and the sidecar image of the same release"
            )
        self.pid = message["pid"] if isinstance(message.get("pid"), int) else 0
        self.client = str(message.get("client", ""))[:MAX_TEXT]
        if self._gate.role != "worker":
            raise ProtocolError("this pod is a parameter server: it has no trainer; connect in a worker pod")

    async def _wait_for_gate(self, first: "asyncio.Task[dict[str, Any] | None]") -> bool:
        """True when the gate is open; False when the client said something or left before."""
        loop = asyncio.get_running_loop()
        next_notice = loop.time()
        while not self._gate.is_open:
            if loop.time() >= next_notice:
                self.send({"type": "waiting", "reason": self._gate.reason})
                next_notice = loop.time() + WAITING_SECONDS
            done, _ = await asyncio.wait({first}, timeout=OPEN_POLL_SECONDS)
            if done:
                return False
        return True

    def _welcome(self) -> None:
        assignment, self._collectives = self._gate.assignment, self._gate.collectives
        assert assignment is not None and self._collectives is not None
        self._segment = Segment(self._directory, INITIAL_SEGMENT_BYTES)
        self.welcomed = True
        self._log.info("client-attached", pid=self.pid, client=self.client)
        self.send(
            {
                "type": "welcome",
                "rank": assignment.rank,
                "worldSize": assignment.world_size,
                "job": assignment.job,
                "epoch": assignment.epoch,
                "mode": assignment.mode,
                "masterAddress": assignment.master_address,
                "shm": str(self._segment.path),
                "shmBytes": self._segment.size,
            }
        )

    def _handle(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "submit":
            self._submit(message)
        elif kind == "resize":
            self._resize(message)
        elif kind == "stats":
            task = asyncio.create_task(self._stats())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            raise ProtocolError(f"unknown message type {kind!r}")

    async def _stats(self) -> None:
        """Answers a question for metrics, in the order of the questions (JobTotals has one lock)."""
        assignment = self._gate.assignment
        assert assignment is not None
        totals = await self._totals.get(server.address for server in assignment.parameter_servers)
        self.send(
            {
                **self._gate.snapshot(),
                **totals,
                "type": "stats",
                "mode": assignment.mode,
                "epoch": assignment.epoch,
                "job": assignment.job,
                "scale": assignment.scale,
                "world_size": assignment.world_size,
            }
        )

    def _submit(self, message: dict[str, Any]) -> None:
        assert self._segment is not None and self._collectives is not None
        op, offset, count = (
            _integer(message, "op", 0),
            _integer(message, "offset", 0),
            _integer(message, "count", 0),
        )
        kind, dtype = message.get("kind"), message.get("dtype")
        if op in self._in_flight:
            raise ProtocolError(f"submit: operation {op} is in flight already")
        if kind not in KINDS:
            raise ProtocolError(f'submit: "kind" must be one of {", ".join(KINDS)}, not {kind!r}')
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise ProtocolError(f'submit: "dtype" must be one of {", ".join(ITEM_BYTES)}, not {dtype!r}')
        if offset % ITEM_BYTES[dtype]:
            raise ProtocolError(f"submit: offset {offset} is not a multiple of the size of {dtype}")
        try:
            view = self._segment.view(offset, count * ITEM_BYTES[dtype])
        except ValueError as error:
            raise ProtocolError(f"submit: {error}") from None
        self._in_flight.add(op)
        self._collectives.submit(self, op, kind, dtype, view, count)

    def _resize(self, message: dict[str, Any]) -> None:
        assert self._segment is not None
        size = _integer(message, "bytes", 1)
        if self._in_flight:
            raise ProtocolError(f"resize: {len(self._in_flight)} operations are in flight; wait for them first")
        answer: dict[str, Any] = {"type": "resized"}
        size = (size + 4095) // 4096 * 4096
        try:
            if size > MAX_SEGMENT_BYTES:
                raise SegmentError(errno.EFBIG, f"{size} bytes exceed the largest shared file of {MAX_SEGMENT_BYTES}")
            if size > self._segment.size:
                old, self._segment = self._segment, Segment(self._directory, size)
                old.unlink()
        except SegmentError as error:
            # Not fatal: the client goes on with the smaller file, in more pieces.
            answer["error"] = error.strerror
            self._log.warning("resize-refused", pid=self.pid, bytes=size, reason=error.strerror)
        self.send({**answer, "shm": str(self._segment.path), "shmBytes": self._segment.size})

    def leave(self, why: str) -> None:
        """Ends what the client left behind."""
        left = self._collectives.leave(self, why) if self._collectives is not None and self.welcomed else 0
        for task in list(self._tasks):
            task.cancel()
        if self._segment is not None:
            self._segment.unlink()
        if self.welcomed:
            self._log.info("client-left", pid=self.pid, reason=why, operationsLeft=left)


class SocketServer:
    """Listens on the unix socket and keeps the sessions.

    Args:
        gate: whose collectives the clients use.
        totals: what the parameter servers count.
        path: of the socket; the shared-memory files are made beside it.
        log: where events go.
    """

    def __init__(self, gate: Gate, totals: JobTotals, path: Path, log: EventLog) -> None:
        self._gate = gate
        self._totals = totals
        self._path = path
        self._log = log
        self._sessions: set[Session] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

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
        self._server = await asyncio.start_unix_server(self._serve, str(self._path))
        self._path.chmod(0o666)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        session = Session(self._gate, self._totals, self._path.parent, writer, self._log)
        self._sessions.add(session)
        why = "sidecar stops"
        try:
            why = await session.run(reader)
        except (ProtocolError, SegmentError) as error:
            why = str(error.strerror if isinstance(error, SegmentError) else error)[:MAX_TEXT]
            self._log.error("client-refused", pid=session.pid, client=session.client, reason=why)
            session.fatal("Memory" if isinstance(error, SegmentError) else "Protocol", why)
        except (FrameError, ConnectionError) as error:
            why = str(error)
        except Exception as error:
            why = f"internal error: {error!r}"[:MAX_TEXT]
            self._log.error("session-failed", pid=session.pid, reason=why)
            session.fatal("Internal", why)
        finally:
            session.leave(why)
            self._sessions.discard(session)
            self._tasks.discard(task)
            writer.close()

    def disconnect(self, code: str, message: str) -> None:
        """Ends every session that was welcomed, with a fatal message."""
        for session in list(self._sessions):
            if session.welcomed:
                session.fatal(code, message)

    async def stop(self) -> None:
        """Ends all sessions and removes the socket."""
        if self._server is not None:
            self._server.close()
        for session in list(self._sessions):
            session.fatal("Shutdown", "the sidecar was told to stop (the pod is being deleted)")
        await asyncio.sleep(0)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=1)
        self._path.unlink(missing_ok=True)
