# SPDX-License-Identifier: Apache-2.0
"""The connection to the sidecar: one a process, used by every process group and hook in it.

A tensor is one operation of its group, cut into parts of PART_BYTES. Each part is copied into shared memory,
submitted over the unix socket, summed in place by the sidecar and copied back; as many are on their way as there is
room for. All ranks cut alike, because the size of a part depends on nothing but the dtype.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from typing import Any

from atp_client import framing
from atp_client.errors import AtpError, OperationTimeoutError, SidecarLostError, UsageError, again, from_code
from atp_client.groups import Group
from atp_client.handshake import dial, lost, shake
from atp_client.memory import Memory, Segment, copy
from atp_client.operation import Operation, Question
from atp_client.reading import Readers

log = logging.getLogger("atp_client")

DEFAULT_SOCKET = "/run/atp/atp.sock"
PART_BYTES = 1 << 20
MAX_SHM_BYTES = 32 << 20
PING_SECONDS = 10.0
# How often whoever reads looks at the clock, at least.
TICK_SECONDS = 0.25
# Frames of small parts are sent together up to this size.
SEND_BYTES = 1 << 13
_SEND_FLAGS = int(socket.MSG_DONTWAIT) | int(socket.MSG_NOSIGNAL)
EVERYTHING = select.POLLIN | select.POLLERR | select.POLLHUP

# Operation, first element, bytes, segment (None: no bytes) and offset in it, handle.
_Part = tuple[Operation, int, int, "Segment | None", int, int]


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


def _bytes(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 2 * PART_BYTES:
        raise UsageError(f"{name} must be a number of bytes of at least {2 * PART_BYTES}, not {text!r}")
    return value


def _nothing() -> None:
    pass


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

    def __init__(self, path: str, connect_timeout: float) -> None:
        self.path = path
        self.pid = os.getpid()
        self._silence = _seconds("ATP_SIDECAR_TIMEOUT", 60.0)
        self._memory = Memory(_bytes("ATP_SHM_BYTES", MAX_SHM_BYTES))
        deadline = time.monotonic() + connect_timeout
        self._frames = framing.FrameReader()
        self._socket = dial(path, deadline)
        try:
            self.welcome, rest = shake(self._socket, self._frames, deadline, connect_timeout)
            self._memory.add(Segment(self.welcome.segment, self.welcome.shm, self.welcome.shm_bytes))
        except BaseException:
            self._socket.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._socket, EVERYTHING)
        self._send_lock = threading.Lock()
        self._unsent = bytearray()
        self._hung_up = False
        self.readers = Readers(self._read_once)
        self._lock = self.readers.lock
        # Why this connection is of no more use; `broken` is for everybody to read.
        self._error: AtpError | None = None
        self.broken: AtpError | None = None
        self._next_handle = 0
        self._group_numbers = itertools.count(1)
        self._parts: dict[int, _Part] = {}
        # Groups with operations that are not submitted whole, and those of them that wait for room.
        self._queued: dict[Group, None] = {}
        self._starved: dict[Group, None] = {}
        self._growing = False
        self._growth_refused = False
        self._questions: deque[Question] = deque()
        self._warned: set[str] = set()
        self._leaving: deque[Group] = deque()
        self._last_heard = self._last_ping = self._last_tick = time.monotonic()
        for message in rest:
            self._act(message)

    # -- the job

    @property
    def rank(self) -> int:
        """Of this worker in the job."""
        return self.welcome.rank

    @property
    def world_size(self) -> int:
        """Workers of the job."""
        return self.welcome.world_size

    @property
    def job(self) -> str:
        """Namespace and name."""
        return self.welcome.job

    @property
    def epoch(self) -> int:
        """Of the job."""
        return self.welcome.epoch

    @property
    def shared_bytes(self) -> int:
        """Shared memory that this process has."""
        return self._memory.total

    def new_group_number(self) -> int:
        """A number that no other group of the epoch has."""
        return self.rank << 48 | self.welcome.session << 32 | next(self._group_numbers)

    # -- sending

    def _send(self, data: bytes | bytearray) -> None:
        """Sends what the socket takes now; whoever leads sends the rest. A broken pipe is the reader's to explain."""
        wake = False
        with self._send_lock:
            if self._unsent:
                self._unsent += data
                data = self._unsent
            try:
                sent = self._socket.send(data, _SEND_FLAGS)
            except BlockingIOError:
                sent = 0
            except OSError:
                # The last words of the sidecar are still to be read, and say more than this error does.
                sent = len(data)
                wake, self._hung_up = not self._hung_up, True
            if data is self._unsent:
                del self._unsent[:sent]
                if not self._unsent:
                    self._settle()
            elif sent < len(data):
                self._unsent += data[sent:]
                wake = True
        if wake:
            with self._lock:
                self.readers.attend()
            self.readers.look_after()

    def _settle(self) -> None:
        """All is sent, so nobody has to look after that."""
        with self._lock:
            self.readers.attended()

    # -- submitting

    def launch(self, operation: Operation, now: float) -> None:
        """Takes an operation in and submits what there is room for; with its group's lock held.

        Raises:
            AtpError: the group or the connection is broken.
        """
        group = operation.group
        part: _Part | None = None
        size = operation.count * operation.itemsize
        with self._lock:
            if self._error is not None:
                raise again(self._error)
            if group.error is not None or group.left:
                group.refuse()
            if not self._parts and not self._queued:
                self._last_heard = now
            if size <= PART_BYTES and operation.ready and not group.queue:
                part = self._take(operation, 0, operation.count)
            if part is None:
                group.queue.append(operation)
                self._queued[group] = None
        if part is not None:
            self._send(self._frame(part))
        else:
            self.advance(group)

    def pump(self, group: Group) -> None:
        """Submits what there is room for. Any thread may call it, one works; no wake-up is missed."""
        group.wanted = True
        while group.wanted and group.lock.acquire(False):
            try:
                self.advance(group)
            finally:
                group.lock.release()

    def advance(self, group: Group) -> None:
        """As `pump`, with the group's lock held."""
        group.wanted = False
        queue = group.queue
        frames = bytearray()
        while queue:
            operation = queue[0]
            # After a failure the parts that are left need not go out.
            if not operation.done:
                if not operation.ready:
                    break
                part = self._next_part(operation)
                if part is None:
                    break
                frames += self._frame(part)
                if len(frames) >= SEND_BYTES or part[2] == PART_BYTES:
                    self._send(frames)
                    frames = bytearray()
            if operation.whole or operation.done:
                queue.popleft()
        if frames:
            self._send(frames)
        if queue:
            self._attend(queue[0])
        else:
            with self._lock:
                if not queue:
                    self._queued.pop(group, None)

    def _next_part(self, operation: Operation) -> _Part | None:
        """The next part, registered; None if it may have no room now (more is asked for if that helps)."""
        grow = 0
        with self._lock:
            begin = operation.begun
            count = min(operation.count - begin, PART_BYTES // operation.itemsize)
            part = self._take(operation, begin, count)
            if part is not None:
                if operation.whole and operation.unattended and operation.callbacks is None:
                    operation.unattended = False
                    self.readers.attended()
            else:
                group, first = operation.group, operation.group.outstanding == 0
                self._starved[group] = None
                if not self._growing and (first or not self._growth_refused):
                    grow = self._memory.growth(count * operation.itemsize, first)
                    self._growing = grow > 0
        if grow:
            self._send(framing.encode({"type": "grow", "bytes": grow}))
        return part

    def _take(self, operation: Operation, begin: int, count: int) -> _Part | None:
        """A part with room of its own, registered; None if it may have none. With the lock held."""
        group = operation.group
        size = count * operation.itemsize
        segment, offset = None, 0
        if size:
            room = self._memory.take(size, group.outstanding == 0)
            if room is None:
                return None
            segment, offset = room
        handle = self._next_handle
        self._next_handle = handle + 1
        part = (operation, begin, size, segment, offset, handle)
        self._parts[handle] = part
        operation.outstanding += 1
        group.outstanding += 1
        operation.begun = end = begin + count
        operation.whole = end == operation.count
        return part

    @staticmethod
    def _frame(part: _Part) -> bytes:
        """Copies a part in and returns the frame that submits it."""
        operation, begin, size, segment, offset, handle = part
        index = 0
        if segment is not None:
            keep = operation.keep
            # Nobody holds the memory of an operation that has ended.
            if keep is not None:
                copy(segment.base + offset, operation.address + begin * operation.itemsize, size)
            index = segment.index
        return framing.submit(
            operation.dtype,
            operation.mean,
            index,
            handle,
            operation.group.number,
            operation.number,
            operation.count,
            begin,
            offset,
            size // operation.itemsize,
        )

    def attend(self, operation: Operation) -> None:
        """Somebody has to go on with it until it has ended, even if nobody waits for it."""
        self.when_done(operation, _nothing)

    def _attend(self, operation: Operation) -> None:
        """Somebody has to go on with it until it is submitted whole."""
        with self._lock:
            if not operation.unattended and not operation.done:
                operation.unattended = True
                self.readers.attend()

    # -- waiting

    def wait(self, operation: Operation, seconds: float = 0.0) -> None:
        """Blocks until it has ended.

        Args:
            operation: of a group of this connection.
            seconds: a time-out shorter than the group's, if above 0.

        Raises:
            AtpError: it failed.
        """
        if seconds > 0:
            operation.deadline = min(operation.deadline, time.monotonic() + seconds)
        if not operation.done:
            self.readers.wait(operation)
        if operation.error is not None:
            raise again(operation.error)

    def when_done(self, operation: Operation, callback: Any) -> None:
        """Has `callback()` called once, when it has ended, from a thread of our own (at once if it has)."""
        with self._lock:
            late = operation.done
            if not late:
                if operation.callbacks is None:
                    operation.callbacks = []
                if callback is not _nothing:
                    operation.callbacks.append(callback)
                if not operation.unattended:
                    operation.unattended = True
                    self.readers.attend()
        if late:
            callback()
            return
        self.readers.look_after()

    # -- reading; only by whoever leads

    def _read_once(self, until: float | None) -> None:
        now = time.monotonic()
        wait = TICK_SECONDS if until is None else max(0.0, min(TICK_SECONDS, until - now))
        if self._error is not None:
            return
        try:
            if self._unsent:
                self._poll.modify(self._socket, EVERYTHING | select.POLLOUT)
                events = self._poll.poll(wait * 1000)
                self._poll.modify(self._socket, EVERYTHING)
            else:
                events = self._poll.poll(wait * 1000)
        except OSError as error:
            self._fail(lost(error))
            return
        try:
            event = events[0][1] if events else 0
            if event & select.POLLOUT:
                self._send(b"")
            if event & EVERYTHING:
                self._receive()
            now = time.monotonic()
            if now - self._last_tick >= TICK_SECONDS or (until is not None and now >= until):
                self._last_tick = now
                self._tick(now)
        except AtpError as error:
            self._fail(error)
        except Exception as error:
            log.exception("ATP: an error of the client")
            self._fail(SidecarLostError(f"ATP client: {type(error).__name__}: {error}"))
        except BaseException:
            # Whatever interrupts here (Ctrl-C) may leave half a frame behind.
            self._fail(SidecarLostError("the ATP client was interrupted while it read from the sidecar"))
            raise

    def _receive(self) -> None:
        try:
            open_still = self._frames.receive(self._socket)
        except BlockingIOError:
            return
        except OSError as error:
            raise lost(error) from error
        if not open_still:
            raise lost(None)
        self._last_heard = time.monotonic()
        done, messages = self._frames.take()
        if done:
            self._retire(done)
        for message in messages:
            self._act(message)

    def _retire(self, done: list[int]) -> None:
        """Copies results out and gives their room back."""
        parts = self._parts
        for handle in done:
            part = parts.get(handle)
            if part is not None:
                operation, begin, size, segment, offset, _ = part
                if segment is not None and not operation.done:
                    copy(operation.address + begin * operation.itemsize, segment.base + offset, size)
        with self._lock:
            for handle in done:
                ended = self._forget(handle)
                if ended is not None:
                    self._end(ended, None)
            starved = list(self._starved) if self._starved else ()
        for group in starved:
            self._feed(group)

    def _forget(self, handle: int) -> Operation | None:
        """The sidecar will not touch a part's memory any more; its operation if that was the last. With the lock."""
        part = self._parts.pop(handle, None)
        if part is None:
            return None
        operation, _, size, segment, offset, _ = part
        if segment is not None:
            self._memory.give(segment, offset, size)
        operation.group.outstanding -= 1
        operation.outstanding -= 1
        if operation.outstanding:
            return None
        if operation.done:
            operation.keep = None
            return None
        return operation if operation.whole else None

    def _feed(self, group: Group) -> None:
        with self._lock:
            self._starved.pop(group, None)
        self.pump(group)

    def _end(self, operation: Operation, error: AtpError | None) -> None:
        """It has ended. With the lock held."""
        operation.error = error
        operation.done = True
        if operation.outstanding == 0:
            operation.keep = None
        if operation.waiters is not None:
            self.readers.wake(operation)
        if operation.unattended:
            operation.unattended = False
            self.readers.attended()
        if operation.callbacks is not None:
            self.readers.call(operation.callbacks)
            operation.callbacks = None

    def _live(self) -> dict[Operation, None]:
        """Operations that have not ended, in order of submission. With the lock held."""
        live = {part[0]: None for part in self._parts.values()}
        for group in self._queued:
            live.update(dict.fromkeys(group.queue))
        return {operation: None for operation in live if not operation.done}

    def _answered(self, question: Question) -> None:
        """With the lock held."""
        question.done = True
        if question.waiters is not None:
            self.readers.wake(question)

    def _act(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "failed":
            self._failed(message)
        elif kind == "fatal":
            raise from_code(str(message.get("code")), str(message.get("message")))
        elif kind == "segment":
            self._grown(message)
        elif kind == "stats":
            with self._lock:
                question = self._questions.popleft() if self._questions else None
                if question is not None:
                    message.pop("type")
                    question.answer = message
                    self._answered(question)
        elif kind == "warning":
            text = str(message.get("text"))
            if text not in self._warned:
                self._warned.add(text)
                log.warning("ATP: %s", text)

    def _failed(self, message: dict[str, Any]) -> None:
        handle = int(message["op"])
        part = self._parts.get(handle)
        if part is None:
            return
        operation = part[0]
        error = from_code(str(message.get("code")), str(message.get("message")))
        with self._lock:
            if not operation.done:
                self._end(operation, error)
            self._forget(handle)
        if message.get("broken"):
            self._break(operation.group, error)
        else:
            # What it had left to submit is left out; others may go on.
            with self._lock:
                self._starved[operation.group] = None
        for group in list(self._starved):
            self._feed(group)

    def _grown(self, message: dict[str, Any]) -> None:
        if "error" in message:
            text = str(message["error"])
            if not self._growth_refused:
                log.warning("ATP: shared memory stays at %d bytes: %s", self._memory.total, text)
            with self._lock:
                self._growing, self._growth_refused = False, True
            return
        segment = Segment(int(message["segment"]), str(message["shm"]), int(message["shmBytes"]))
        with self._lock:
            self._memory.add(segment)
            self._growing = False
            starved = sorted(self._starved, key=lambda group: group.outstanding > 0)
        for group in starved:
            self._feed(group)

    def _tick(self, now: float) -> None:
        """Time-outs, and whether the sidecar lives."""
        if self._leaving:
            self.leave_left()
        with self._lock:
            late = [operation for operation in self._live() if now >= operation.deadline]
            for question in self._questions:
                if now >= question.deadline and not question.done:
                    # Its place stays: the answer may come.
                    question.error = SidecarLostError("the ATP sidecar did not answer a question in time")
                    self._answered(question)
            busy = bool(self._parts or self._queued or self._questions)
        for operation in late:
            if not operation.done:
                self._expire(operation)
        if not busy:
            self._last_heard = now
            return
        quiet = now - self._last_heard
        if quiet > self._silence:
            raise SidecarLostError(
                f"the ATP sidecar has not answered for {self._silence:g} s (ATP_SIDECAR_TIMEOUT); "
                "see kubectl logs <pod> -c atp-sidecar"
            )
        patience = min(PING_SECONDS, self._silence / 3)
        if quiet > patience and now - self._last_ping > patience:
            self._last_ping = now
            self._send(framing.encode({"type": "ping"}))

    def _expire(self, operation: Operation) -> None:
        group = operation.group
        what = f"all-reduce {operation.number} of group {group.number:#x}, of {operation.count} elements"
        text = (
            f"{what}, did not finish within its timeout; another rank is slow, stuck or calls other collectives "
            "(raise the timeout of the process group if the wait is expected)"
        )
        self.give_up(
            group, OperationTimeoutError(text), f"rank {self.rank} gave up: {what}, took longer than its timeout"
        )

    # -- failing

    def _break(self, group: Group, error: AtpError) -> bool:
        """All that is on its way in the group, and all that comes, fails. False: it was broken before."""
        with self._lock:
            if group.error is not None:
                return False
            group.error = error
            for operation in self._live():
                if operation.group is group:
                    self._end(operation, error)
            self._starved[group] = None  # so that its queue is emptied
        self._feed(group)
        self.readers.look_after()
        return True

    def give_up(self, group: Group, error: AtpError, reason: str) -> None:
        """Breaks a group here and on all ranks."""
        if self._break(group, error):
            message = {"type": "abort", "group": group.number, "code": "Timeout", "reason": reason}
            self._send(framing.encode(message))

    def leave_later(self, group: Group) -> None:
        """As `leave`, for the garbage collector, which may call this anywhere, also while this thread holds a lock."""
        self._leaving.append(group)

    def leave_left(self) -> None:
        """Leaves the groups that were to be left later."""
        while self._leaving:
            self._leaving.popleft().leave()

    def leave(self, group: Group) -> None:
        """This process will not use the group any more; what is on its way in it fails."""
        if self._error is None and os.getpid() == self.pid:
            self._break(group, UsageError("the process group was destroyed"))
            self._send(framing.encode({"type": "leave", "group": group.number}))

    def _fail(self, error: AtpError) -> None:
        """Breaks the connection; everything on its way fails."""
        with self._lock:
            if self._error is not None:
                return
            self._error = self.broken = error
            live = self._live()
            self._parts.clear()
            for operation in live:
                operation.outstanding = 0
                self._end(operation, error)
            for question in self._questions:
                question.error = error
                self._answered(question)
            self._questions.clear()
            self._starved.clear()
            self.readers.end()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.readers.look_after()

    # -- the rest

    def stats(self, timeout: float = 10.0) -> dict[str, Any]:
        """The sidecar's metrics.

        Raises:
            AtpError: the connection is broken or the sidecar does not answer.
        """
        question = Question(time.monotonic() + timeout)
        with self._lock:
            if self._error is not None:
                raise again(self._error)
            if not self._parts and not self._queued:
                self._last_heard = time.monotonic()
            self._questions.append(question)
        self._send(framing.encode({"type": "stats"}))
        self.readers.wait(question)
        if question.answer is None:
            raise again(question.error or SidecarLostError("the connection to the ATP sidecar broke"))
        return question.answer

    def forget(self) -> None:
        """In a child process after a fork: the connection stays the parent's."""
        self._error = self.broken = UsageError(
            "this process group was made before a fork, and its connection to the ATP sidecar is the parent's"
        )

    def close(self) -> None:
        """Leaves; operations in flight fail."""
        if os.getpid() == self.pid:
            if self._error is None:
                self._send(framing.encode({"type": "bye"}))
            self._fail(SidecarLostError("the connection to the ATP sidecar was closed by this process"))
            self.readers.close(2.0)
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
        if current is not None and current.broken is not None:
            current.close()
            _connection = current = None
        if current is None:
            path = os.environ.get("ATP_SOCKET", DEFAULT_SOCKET)
            _connection = current = Connection(path, _seconds("ATP_CONNECT_TIMEOUT", 600.0))
            welcome = current.welcome
            log.info(
                "ATP: joined %s as rank %d of %d, mode %s", welcome.job, welcome.rank, welcome.world_size, welcome.mode
            )
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


def _after_fork() -> None:
    global _connection, _connection_lock
    _connection_lock = threading.Lock()
    if _connection is not None:
        _connection.forget()
        _connection = None


atexit.register(close)
os.register_at_fork(after_in_child=_after_fork)
