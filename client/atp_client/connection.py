# SPDX-License-Identifier: Apache-2.0
"""The connection to the sidecar: one a process, used by every process group and hook in it.

An all-reduce is cut into chunks of CHUNK_BYTES. Each chunk is copied into the shared-memory file, announced
over the unix socket, summed in place by the sidecar and copied back; several are in flight at once. All ranks
cut alike, because the chunk size depends on nothing but the dtype.

Threads: whoever calls `all_reduce` copies in as much as there is room for. Reader threads take the answers,
copy out, and go on copying in. A reader that completes a Future first lets another thread read, since
callbacks of the Future may wait for a later operation.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import mmap
import os
import queue
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from atp_client._version import __version__
from atp_client.arena import Arena
from atp_client.errors import (
    AtpError,
    GateTimeoutError,
    NoSidecarError,
    OperationTimeoutError,
    SidecarLostError,
    UsageError,
    from_code,
)

log = logging.getLogger("atp_client")

DEFAULT_SOCKET = "/run/atp/atp.sock"
PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 1 << 20
CHUNK_BYTES = 1 << 20
MAX_SHM_BYTES = 32 << 20
LOG_SECONDS = 5.0
# Without a socket: how long it may take to appear. A sidecar starts before the trainer, so only a restart
# needs this.
SOCKET_GRACE_SECONDS = 10.0
PING_SECONDS = 10.0

DTYPES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int32: "int32",
}
_LENGTH = struct.Struct(">I")

NO_SIDECAR = (
    "This process has to run in a worker pod of an ATPJob (kubectl apply -f atpjob.yaml), or in a pod with "
    "the label "
    "atp.dev/job=<name of the ATPJob>: the webhook then adds the container atp-sidecar. If the sidecar's "
    "socket is "
    "somewhere else, set ATP_SOCKET to its path. To train without ATP, use the backend gloo."
)


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value > 0:
        raise UsageError(f"{name} must be a positive number of seconds, not {text!r}")
    return value


def _megabytes(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 2 * CHUNK_BYTES:
        raise UsageError(f"{name} must be a number of bytes of at least {2 * CHUNK_BYTES}, not {text!r}")
    return value


def _broken(error: OSError | None) -> SidecarLostError:
    """The sidecar's end of the connection is gone: whether reading or writing noticed it first, it means the same."""
    detail = f" ({error})" if error is not None else ""
    return SidecarLostError(
        f"the ATP sidecar closed the connection{detail}: it was killed or restarted; "
        "see kubectl logs <pod> -c atp-sidecar --previous"
    )


class Request:
    """One all-reduce on its way.

    Args:
        flat: contiguous CPU tensor of shape (n,); summed in place.
        kind: "sum" or "mean".
        deadline: monotonic time after which it fails.
        finish: called once, from any thread, with None or the error.
    """

    def __init__(
        self, flat: torch.Tensor, kind: str, deadline: float, finish: Callable[[AtpError | None], None]
    ) -> None:
        self.flat = flat
        self.kind = kind
        self.dtype = DTYPES[flat.dtype]
        self.deadline = deadline
        self.finish = finish
        self.error: AtpError | None = None
        self.started = 0
        self.chunks = 0

    @property
    def count(self) -> int:
        """Number of elements."""
        return int(self.flat.numel())


class _Chunk:
    __slots__ = ("begin", "count", "offset", "request")

    def __init__(self, request: Request, begin: int, count: int, offset: int) -> None:
        self.request = request
        self.begin = begin
        self.count = count
        self.offset = offset


class _StatsWaiter:
    def __init__(self) -> None:
        self.ready = threading.Event()
        self.answer: dict[str, Any] | None = None


class Connection:
    """A connection to a sidecar whose gate is open.

    Args:
        path: of the unix socket.
        connect_timeout: seconds to wait for the gate.

    Raises:
        NoSidecarError: nobody listens at the path.
        GateTimeoutError: the gate stayed closed.
        SidecarLostError: the sidecar refused or left.
    """

    rank: int
    world_size: int
    job: str
    epoch: int
    mode: str
    master_address: str

    def __init__(self, path: str, connect_timeout: float) -> None:
        self.path = path
        self.pid = os.getpid()
        self._buffer = bytearray()
        self._shm_limit = _megabytes("ATP_SHM_BYTES", MAX_SHM_BYTES)
        self._silence = _seconds("ATP_SIDECAR_TIMEOUT", 60.0)
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._submit_lock = threading.Lock()
        self._read_lock = threading.Lock()
        self._idle_readers = 0
        self._threads: list[threading.Thread] = []
        self._queue: deque[Request] = deque()
        self._chunks: dict[int, _Chunk] = {}
        self._next_op = 0
        self._released = 0
        self._resizing = False
        self._resize_refused = False
        self._stats_waiters: deque[_StatsWaiter] = deque()
        self._error: AtpError | None = None
        self._last_heard = self._last_ping = time.monotonic()
        self._staging: queue.SimpleQueue[Callable[[], None] | None] | None = None
        deadline = time.monotonic() + connect_timeout
        self._socket = self._dial(deadline)
        try:
            self._handshake(deadline, connect_timeout)
        except BaseException:
            self._socket.close()
            raise
        # A sidecar that does not read for this long while its buffer is full counts as gone.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", max(1, int(self._silence)), 0))
        self._start_reader()

    # -- connecting

    def _dial(self, deadline: float) -> socket.socket:
        grace = min(deadline, time.monotonic() + SOCKET_GRACE_SECONDS)
        if "ATP_SOCKET" not in os.environ and not Path(self.path).parent.is_dir():
            grace = 0.0  # no sidecar was ever added to this pod
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(self.path)
                return connection
            except OSError as error:
                connection.close()
                if isinstance(error, PermissionError):
                    raise NoSidecarError(f"the ATP sidecar's socket {self.path} may not be opened: {error}") from error
                if time.monotonic() >= grace:
                    raise NoSidecarError(
                        f"no ATP sidecar at {self.path} ({error.strerror or error}). {NO_SIDECAR}"
                    ) from error
            time.sleep(0.1)

    def _handshake(self, deadline: float, connect_timeout: float) -> None:
        version = ".".join(str(torch.__version__).split(".")[:2])
        self._send(
            {
                "type": "hello",
                "version": PROTOCOL_VERSION,
                "pid": self.pid,
                "client": f"atp-client/{__version__} torch/{version}",
            }
        )
        reason, logged_at, logged = "", 0.0, ""
        while True:
            now = time.monotonic()
            if now >= deadline:
                raise GateTimeoutError(
                    f"the ATP sidecar did not let this worker start within {connect_timeout:g} s "
                    f"(ATP_CONNECT_TIMEOUT). Its reason: {reason or 'none given; it does not answer'}. "
                    "kubectl describe atpjob shows what the job waits for."
                )
            message = self._receive(min(1.0, deadline - now))
            if message is None:
                continue
            kind = message["type"]
            if kind == "waiting":
                reason = str(message.get("reason", ""))
                if reason != logged or now - logged_at >= LOG_SECONDS:
                    log.warning("ATP: waiting to start: %s", reason)
                    logged, logged_at = reason, now
            elif kind == "welcome":
                break
            elif kind == "fatal":
                raise from_code(str(message.get("code")), str(message.get("message")))
            else:
                raise SidecarLostError(f"the sidecar answered hello with {kind!r}; use the same release of both")
        try:
            self.rank, self.world_size = int(message["rank"]), int(message["worldSize"])
            self.job, self.epoch, self.mode = str(message["job"]), int(message["epoch"]), str(message["mode"])
            self.master_address = str(message["masterAddress"])
            self._map(str(message["shm"]), int(message["shmBytes"]))
        except (KeyError, TypeError, ValueError) as error:
            raise SidecarLostError(f"the sidecar's welcome is not understood: {error!r}") from error
        log.info("ATP: joined %s as rank %d of %d, mode %s", self.job, self.rank, self.world_size, self.mode)

    def _map(self, path: str, size: int) -> None:
        try:
            with Path(path).open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), size)
        except (OSError, ValueError) as error:
            raise SidecarLostError(
                f"the shared-memory file {path} of {size} bytes cannot be mapped: {error}; the volume "
                "atp-shm must be "
                "mounted at the same path in the trainer and in the sidecar"
            ) from error
        self._arena = Arena(size)

    # -- frames

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message, separators=(",", ":")).encode()
        with self._send_lock:
            self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def _frame(self) -> dict[str, Any] | None:
        """A whole frame from the buffer, if there is one."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_FRAME_BYTES:
            raise SidecarLostError(f"the sidecar sent a frame of {length} bytes; the limit is {MAX_FRAME_BYTES}")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        try:
            message = json.loads(body)
            if not isinstance(message["type"], str):
                raise TypeError("type is not a string")
        except (ValueError, TypeError, KeyError) as error:
            raise SidecarLostError(f"the sidecar sent a frame that is not understood: {error!r}") from error
        return dict(message)

    def _receive(self, timeout: float) -> dict[str, Any] | None:
        """The next message, or None after `timeout` seconds.

        Raises:
            SidecarLostError: the connection ended or the bytes are no frame.
        """
        end = time.monotonic() + timeout
        while True:
            message = self._frame()
            if message is not None:
                return message
            left = end - time.monotonic()
            if left <= 0:
                return None
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            if not poll.poll(left * 1000):
                return None
            try:
                data = self._socket.recv(65536)
            except OSError as error:
                raise _broken(error) from error
            if not data:
                raise _broken(None)
            self._buffer += data

    # -- reading

    def _start_reader(self) -> None:
        thread = threading.Thread(target=self._read_loop, name="atp-reader", daemon=True)
        with self._lock:
            self._threads = [other for other in self._threads if other.is_alive()] + [thread]
            thread.start()

    def _read_loop(self) -> None:
        while True:
            with self._lock:
                if self._error is not None:
                    return
                if self._idle_readers:
                    return  # another thread waits for its turn already
                self._idle_readers += 1
            with self._read_lock:
                with self._lock:
                    self._idle_readers -= 1
                    if self._error is not None:
                        return
                try:
                    # Whatever kind of tensor the caller has, it is written as data.
                    with torch.inference_mode():
                        deliveries = self._read_once()
                except (AtpError, OSError, RuntimeError) as error:
                    if isinstance(error, ConnectionError):
                        error = _broken(error)
                    deliveries = self._fail(
                        error if isinstance(error, AtpError) else SidecarLostError(f"ATP client: {error}")
                    )
            if deliveries:
                self._ensure_reader()
                for deliver in deliveries:
                    deliver()

    def _ensure_reader(self) -> None:
        with self._lock:
            needed = self._idle_readers == 0 and not self._read_lock.locked() and self._error is None
        if needed:
            self._start_reader()

    def _read_once(self) -> list[Callable[[], None]]:
        """Waits for one message at most a second and acts on it; returns what to call outside the locks."""
        message = self._receive(1.0)
        now = time.monotonic()
        if message is None:
            return self._watch(now)
        self._last_heard = now
        kind = message["type"]
        if kind == "done":
            return self._done(int(message["op"]))
        if kind == "failed":
            return self._failed(int(message["op"]), from_code(str(message.get("code")), str(message.get("message"))))
        if kind == "stats":
            with self._lock:
                waiter = self._stats_waiters.popleft() if self._stats_waiters else None
            if waiter is not None:
                message.pop("type")
                waiter.answer = message
                waiter.ready.set()
        elif kind == "resized":
            self._resized(message)
        elif kind == "fatal":
            raise from_code(str(message.get("code")), str(message.get("message")))
        return []

    def _watch(self, now: float) -> list[Callable[[], None]]:
        with self._lock:
            requests = {id(chunk.request): chunk.request for chunk in self._chunks.values()}
            requests.update((id(request), request) for request in self._queue)
        if not requests:
            self._last_heard = now
            return []
        for request in requests.values():
            if now >= request.deadline:
                raise OperationTimeoutError(
                    f"an all-reduce of {request.count} {request.dtype} values did not finish within the "
                    "timeout of its "
                    "process group; another rank is slow, stuck or calls other collectives "
                    "(raise the timeout of init_process_group if the wait is expected)"
                )
        if now - self._last_heard > self._silence:
            raise SidecarLostError(
                f"the ATP sidecar has not answered for {self._silence:g} s (ATP_SIDECAR_TIMEOUT); "
                "see kubectl logs <pod> -c atp-sidecar"
            )
        patience = min(PING_SECONDS, self._silence / 3)
        if now - self._last_heard > patience and now - self._last_ping > patience:
            self._last_ping = now
            with self._lock:
                self._stats_waiters.append(_StatsWaiter())
                self._send({"type": "stats"})
        return []

    def _done(self, op: int) -> list[Callable[[], None]]:
        with self._lock:
            chunk = self._chunks.get(op)
        if chunk is None:
            return []
        request = chunk.request
        if request.error is None:
            part = torch.frombuffer(self._memory, dtype=request.flat.dtype, count=chunk.count, offset=chunk.offset)
            request.flat[chunk.begin : chunk.begin + chunk.count].copy_(part)
        return self._retire(op, None)

    def _failed(self, op: int, error: AtpError) -> list[Callable[[], None]]:
        return self._retire(op, error)

    def _retire(self, op: int, error: AtpError | None) -> list[Callable[[], None]]:
        deliveries: list[Callable[[], None]] = []
        with self._lock:
            chunk = self._chunks.pop(op, None)
            if chunk is None:
                return []
            self._arena.release(chunk.offset)
            self._released += 1
            request = chunk.request
            request.chunks -= 1
            if error is not None and request.error is None:
                # The chunks that are not submitted yet are still submitted: the other ranks do it too, and
                # all ranks must go through the same operations.
                request.error = error
            if request.chunks == 0 and request.started == request.count:
                deliveries.append(lambda: request.finish(request.error))
        self._pump()
        return deliveries

    def _fail(self, error: AtpError) -> list[Callable[[], None]]:
        """Breaks the connection; everything on its way fails with `error`."""
        with self._lock:
            if self._error is not None:
                return []
            self._error = error
            requests = {id(chunk.request): chunk.request for chunk in self._chunks.values()}
            requests.update((id(request), request) for request in self._queue)
            self._chunks.clear()
            self._queue.clear()
            waiters, self._stats_waiters = self._stats_waiters, deque()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for waiter in waiters:
            waiter.ready.set()
        return [partial(request.finish, error) for request in requests.values()]

    # -- submitting

    @property
    def broken(self) -> AtpError | None:
        """Why this connection is of no more use, or None."""
        return self._error

    def all_reduce(
        self, flat: torch.Tensor, kind: str, timeout: float, finish: Callable[[AtpError | None], None]
    ) -> None:
        """Starts an all-reduce in place and returns; `finish` is called once with None or the error.

        Args:
            flat: contiguous CPU tensor of shape (n,), n > 0, of a dtype in DTYPES.
            kind: "sum" or "mean".
            timeout: seconds.
            finish: may be called from any thread, also before this returns.
        """
        request = Request(flat, kind, time.monotonic() + timeout, finish)
        if self._staging is not None:
            self._staging.put(lambda: self._enqueue(request))
        else:
            self._enqueue(request)

    def all_reduce_staged(
        self,
        flat: torch.Tensor,
        kind: str,
        timeout: float,
        prepare: Callable[[], None],
        finish: Callable[[AtpError | None], None],
    ) -> None:
        """As `all_reduce`, for a host copy that is not complete before `prepare` has returned.

        `prepare` (waiting for a device) runs in a thread of its own, and from the first call on every
        all-reduce passes through that thread, so the order stays that of the calls.
        """
        with self._lock:
            if self._staging is None:
                self._staging = queue.SimpleQueue()
                thread = threading.Thread(target=self._stage_loop, args=(self._staging,), name="atp-stage", daemon=True)
                self._threads.append(thread)
                thread.start()
        request = Request(flat, kind, time.monotonic() + timeout, finish)

        def run() -> None:
            try:
                prepare()
            except RuntimeError as error:
                # The peers would wait for this operation: it cannot be left out.
                for deliver in self._fail(SidecarLostError(f"copying from the device failed: {error}")):
                    deliver()
            self._enqueue(request)

        self._staging.put(run)

    @staticmethod
    def _stage_loop(work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while True:
            item = work.get()
            if item is None:
                return
            item()

    def _enqueue(self, request: Request) -> None:
        with self._lock:
            error = self._error
            if error is None:
                self._queue.append(request)
        if error is not None:
            request.finish(error)
            return
        self._pump()

    def _pump(self) -> None:
        """Submits what there is room for. Any thread may call it, one works; no wake-up is missed."""
        while self._submit_lock.acquire(blocking=False):
            try:
                released = self._submit_some()
            except (OSError, RuntimeError) as error:
                # Also when a tensor cannot be read: the peers wait for this operation, it cannot be left out.
                released = None
                failure = (
                    _broken(error)
                    if isinstance(error, ConnectionError)
                    else SidecarLostError(f"the ATP client cannot go on: {error}")
                )
                for deliver in self._fail(failure):
                    deliver()
            finally:
                self._submit_lock.release()
            with self._lock:
                # Nothing to do, or nothing was released since there was no room: who releases next pumps
                # again.
                if not self._queue or self._error is not None or released == self._released:
                    return

    def _submit_some(self) -> int | None:
        """Submits until the queue is empty (None) or there is no room (number of releases at that moment)."""
        while True:
            with self._lock:
                if not self._queue or self._error is not None:
                    return None
                request = self._queue[0]
                if self._wants_growth(request):
                    return self._released
                begin = request.started
                count = min(CHUNK_BYTES // request.flat.element_size(), request.count - begin)
                offset = self._arena.allocate(count * request.flat.element_size())
                if offset is None:
                    return self._released
                op = self._next_op
                self._next_op += 1
                memory = self._memory
            part = torch.frombuffer(memory, dtype=request.flat.dtype, count=count, offset=offset)
            part.copy_(request.flat[begin : begin + count])
            with self._lock:
                if self._error is not None:
                    return None
                self._chunks[op] = _Chunk(request, begin, count, offset)
                request.started += count
                request.chunks += 1
                if request.started == request.count:
                    self._queue.popleft()
            self._send(
                {
                    "type": "submit",
                    "op": op,
                    "kind": request.kind,
                    "dtype": request.dtype,
                    "offset": offset,
                    "count": count,
                }
            )

    def _wants_growth(self, request: Request) -> bool:
        """Asks for a larger file if two such requests do not fit; True while the queue has to wait for it."""
        if self._resizing:
            return True
        want = min(self._shm_limit, 2 * request.count * request.flat.element_size())
        if want <= self._arena.size or self._resize_refused:
            return False
        if self._arena.idle:
            self._resizing = True
            self._send({"type": "resize", "bytes": want})
        return True

    def _resized(self, message: dict[str, Any]) -> None:
        with self._lock:
            if "error" in message:
                self._resize_refused = True
                log.warning("ATP: shared memory stays at %d bytes: %s", self._arena.size, message["error"])
            else:
                self._map(str(message["shm"]), int(message["shmBytes"]))
            self._resizing = False
            self._released += 1
        self._pump()

    # -- the rest

    def stats(self, timeout: float = 10.0) -> dict[str, Any]:
        """The sidecar's metrics.

        Raises:
            AtpError: the connection is broken or the sidecar does not answer.
        """
        waiter = _StatsWaiter()
        with self._lock:
            if self._error is not None:
                raise self._error
            self._stats_waiters.append(waiter)
            try:
                self._send({"type": "stats"})
            except OSError as error:
                raise _broken(error) from error
        if not waiter.ready.wait(timeout):
            raise SidecarLostError(f"the ATP sidecar did not answer a question for its metrics within {timeout:g} s")
        if waiter.answer is None:
            raise self._error or SidecarLostError("the connection to the ATP sidecar broke")
        return waiter.answer

    def close(self) -> None:
        """Leaves; operations in flight fail."""
        if os.getpid() == self.pid:
            with contextlib.suppress(OSError):
                self._send({"type": "bye"})
            for deliver in self._fail(SidecarLostError("the connection to the ATP sidecar was closed by this process")):
                deliver()
            # A thread that the end of the interpreter meets inside torch would abort the process.
            if self._staging is not None:
                self._staging.put(None)
            for thread in self._threads:
                if thread is not threading.current_thread():
                    thread.join(2.0)
        with contextlib.suppress(OSError):
            self._socket.close()


_connection: Connection | None = None
_connection_lock = threading.Lock()


def connect() -> Connection:
    """The connection of this process, made at the first call (and again after it broke or after a fork).

    Waits for the gate at most ATP_CONNECT_TIMEOUT seconds (600), and logs the reason while it waits.

    Raises:
        AtpError: there is no sidecar, or it does not let this worker start.
    """
    global _connection
    with _connection_lock:
        current = _connection
        if current is not None and (current.pid != os.getpid() or current.broken is not None):
            if current.pid == os.getpid():
                current.close()
            _connection = current = None
        if current is None:
            path = os.environ.get("ATP_SOCKET", DEFAULT_SOCKET)
            _connection = current = Connection(path, _seconds("ATP_CONNECT_TIMEOUT", 600.0))
        return current


def stats() -> dict[str, Any]:
    """The sidecar's metrics: counters and gauges of the transport, mode, epoch, job, scale and world_size."""
    return connect().stats()


def close() -> None:
    """Leaves the sidecar. The next collective connects again."""
    global _connection
    with _connection_lock:
        current, _connection = _connection, None
    if current is not None:
        current.close()


atexit.register(close)
