# SPDX-License-Identifier: Apache-2.0
"""One tensor on its way through a process group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atp_client.errors import AtpError

if TYPE_CHECKING:
    from atp_client.groups import Group


class Operation:
    """An all-reduce of contiguous memory, in place. See `Handle` in tensors.py for what callers see of it.

    Args:
        group: that it is an operation of.
        number: of the operation in the group.
        address: of the first element.
        count: elements.
        itemsize: bytes of an element.
        dtype: code of the session protocol.
        mean: 1 for the mean, 0 for the sum.
        keep: whatever owns the memory; let go of at the end.
        deadline: monotonic time after which it fails.
    """

    # The memory has the values already.
    ready = True
    # The first `begun` elements are submitted, as parts of which `outstanding` have no answer; whole: that is all.
    begun = 0
    outstanding = 0
    whole = False
    done = False
    error: AtpError | None = None
    callbacks: list[Callable[[], None]] | None = None
    waiters: list[threading.Lock] | None = None
    # A thread of the connection's own has to look after it, because nobody may be waiting.
    unattended = False
    streams: tuple[Any, ...] = ()

    def __init__(
        self,
        group: Group,
        number: int,
        address: int,
        count: int,
        itemsize: int,
        dtype: int,
        mean: int,
        keep: Any,
        deadline: float,
    ) -> None:
        self.group = group
        self.number = number
        self.address = address
        self.count = count
        self.itemsize = itemsize
        self.dtype = dtype
        self.mean = mean
        self.keep = keep
        self.deadline = deadline

    @property
    def completed(self) -> bool:
        """Whether it has ended."""
        return self.done

    def failure(self) -> AtpError | None:
        """The error that it has ended with."""
        return self.error

    def wait(self, seconds: float = 0.0) -> None:
        """Blocks until it has ended; `seconds`: a time-out shorter than the group's, if above 0.

        Raises:
            AtpError: it failed.
        """
        self.group.connection.wait(self, seconds)

    def when_done(self, callback: Callable[[], None]) -> None:
        """Has `callback()` called once, from any thread, when it has ended."""
        self.group.connection.when_done(self, callback)

    def attend(self) -> None:
        """Has it go on although nobody waits."""
        self.group.connection.attend(self)


class Question:
    """A question to the sidecar, which is waited for as an operation is."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.done = False
        self.error: AtpError | None = None
        self.answer: dict[str, Any] | None = None
        self.waiters: list[threading.Lock] | None = None
