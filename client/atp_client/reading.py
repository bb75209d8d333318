# SPDX-License-Identifier: Apache-2.0
"""Who reads the socket.

One thread at a time leads: it reads, copies results out and ends operations, its own and everybody's. A thread that
waits for its operation leads if nobody else does, so that a synchronous all-reduce needs no second thread. Threads of
our own lead only while there is something that nobody waits for (a Future, a tensor that is not submitted whole), and
run the callbacks of Futures, which may wait for later operations: whoever has callbacks to run lets another lead
first.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

log = logging.getLogger("atp_client")

_IDLE_SECONDS = 10.0


class Readers:
    """The lead, the threads that wait for it or for their operation, and the threads of our own.

    Args:
        read_once: waits until about the given monotonic time (None: a tick) for something to read, and acts on it. It
            raises nothing but interrupts.
    """

    def __init__(self, read_once: Callable[[float | None], None]) -> None:
        self._read_once = read_once
        # Guards all state that several threads change; never held while waiting or copying.
        self.lock = threading.Lock()
        self._lead = threading.Lock()
        # A gate is opened by whoever takes it out of one of these lists, once.
        self._followers: list[threading.Lock] = []
        self._resting: list[threading.Lock] = []
        self._unattended = 0
        self._callbacks: deque[Callable[[], None]] = deque()
        self._threads: list[threading.Thread] = []
        self._ended = False
        self._closed = False

    # -- waiting

    def wait(self, thing: Any) -> None:
        """Blocks until `thing.done`, leading if nobody else does. `thing` has done, deadline and waiters."""
        while not thing.done:
            if self._lead.acquire(False):
                try:
                    while not thing.done:
                        self._read_once(thing.deadline)
                finally:
                    self._lead.release()
                    if self._followers or self._unattended or self._callbacks:
                        self._pass_on(own_callbacks=False)
            else:
                self._follow(thing)

    def _follow(self, thing: Any) -> None:
        gate = threading.Lock()
        gate.acquire()
        with self.lock:
            if thing.done:
                return
            if thing.waiters is None:
                thing.waiters = []
            thing.waiters.append(gate)
            self._followers.append(gate)
        try:
            # Whoever let go of the lead before this thread was a follower has not seen it.
            if self._lead.locked():
                gate.acquire()
        finally:
            with self.lock:
                chosen = gate not in self._followers
                if not chosen:
                    self._followers.remove(gate)
                if thing.waiters is not None:
                    thing.waiters.remove(gate)
            if chosen and sys.exc_info()[0] is not None:
                # Interrupted (Ctrl-C) just when it was this thread's turn to lead.
                self._pass_on(own_callbacks=False)

    def wake(self, thing: Any) -> None:
        """Wakes who waits for a thing that is done and has waiters. With the lock held."""
        for gate in thing.waiters:
            if gate in self._followers:
                self._followers.remove(gate)
                gate.release()
        thing.waiters = None

    def _pass_on(self, own_callbacks: bool) -> None:
        """Lets somebody else lead if there is need; `own_callbacks`: this thread is one that runs them."""
        with self.lock:
            promoted = bool(self._followers)
            if promoted:
                self._followers.pop(0).release()
        if own_callbacks:
            need = bool(self._callbacks and self._unattended and not promoted)
        else:
            need = bool(self._callbacks or (self._unattended and not promoted))
        if need:
            self._ring()

    # -- threads of our own

    def attend(self) -> None:
        """One more thing that nobody may be waiting for. With the lock held; `look_after` afterwards, without it."""
        if not self._ended:
            self._unattended += 1

    def attended(self) -> None:
        """One less. With the lock held."""
        if not self._ended:
            self._unattended -= 1

    def end(self) -> None:
        """There is nothing to read any more; what is left are callbacks. With the lock held."""
        self._ended = True
        self._unattended = 0

    def call(self, callbacks: list[Callable[[], None]]) -> None:
        """Has them called in a thread of our own. With the lock held; `look_after` afterwards."""
        self._callbacks.extend(callbacks)

    def look_after(self) -> None:
        """Wakes a thread of our own if there is need of one. Whoever leads does it on leaving."""
        if (self._callbacks or self._unattended) and not self._lead.locked():
            self._ring()

    def _ring(self) -> None:
        with self.lock:
            if self._resting:
                self._resting.pop().release()
                return
            thread = threading.Thread(target=self._work, name="atp-client", daemon=True)
            self._threads = [other for other in self._threads if other.is_alive()]
            self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:
            # No more threads, at the end of the interpreter for one; a Future must end all the same.
            with self.lock:
                self._threads.remove(thread)
            while self._call_one():
                pass

    def _call_one(self) -> bool:
        with self.lock:
            callback = self._callbacks.popleft() if self._callbacks else None
        if callback is None:
            return False
        try:
            callback()
        except Exception:
            log.exception("ATP: a callback failed")
        return True

    def _work(self) -> None:
        while True:
            if self._call_one():
                continue
            if self._unattended and self._lead.acquire(False):
                try:
                    while self._unattended and not self._callbacks:
                        self._read_once(None)
                finally:
                    self._lead.release()
                    self._pass_on(own_callbacks=True)
            elif not self._rest():
                return

    def _rest(self) -> bool:
        """Waits until it is needed. False: it is not any more."""
        gate = threading.Lock()
        gate.acquire()
        with self.lock:
            # Checked with the lock held: whoever rings later finds this gate.
            if self._callbacks or (self._unattended and not self._lead.locked()):
                return True
            if self._closed:
                return False
            self._resting.append(gate)
        if gate.acquire(timeout=_IDLE_SECONDS):
            return True
        with self.lock:
            if gate not in self._resting:
                return True
            self._resting.remove(gate)
            return False

    def close(self, seconds: float) -> None:
        """Ends the threads of our own: one that the end of the interpreter meets in torch would abort the process."""
        with self.lock:
            self._closed = True
            threads, self._threads = self._threads, []
            resting, self._resting = self._resting, []
        for gate in resting:
            gate.release()
        end = time.monotonic() + seconds
        for thread in threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(max(0.0, end - time.monotonic()))
