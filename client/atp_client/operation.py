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
    """An all-reduce of one tensor, in place.

    Args:
        group: that it is an operation of.
        number: of the operation in the group.
        address: of the first element of contiguous memory.
        count: elements.
        itemsize: bytes of an element.
        dtype: code of the session protocol.
        mean: the mean instead of the sum.
        keep: whatever owns the memory; let go of at the end.
        deadline: monotonic time after which it fails.
        ready: the memory has the values already.
    """

    __slots__ = (
        "address",
        "begun",
        "callbacks",
        "count",
        "deadline",
        "done",
        "dtype",
        "error",
        "group",
        "itemsize",
        "keep",
        "mean",
        "number",
        "outstanding",
        "ready",
        "unattended",
        "waiters",
        "whole",
    )

    def __init__(
        self,
        group: Group,
        number: int,
        address: int,
        count: int,
        itemsize: int,
        dtype: int,
        mean: bool,
        keep: Any,
        deadline: float,
        ready: bool,
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
        self.ready = ready
        # The first `begun` elements are submitted, as parts of which `outstanding` have no answer; whole: that is all.
        self.begun = 0
        self.outstanding = 0
        self.whole = False
        self.done = False
        self.error: AtpError | None = None
        self.callbacks: list[Callable[[], None]] | None = None
        self.waiters: list[threading.Lock] | None = None
        # A thread of the connection's own has to look after it, because nobody may be waiting.
        self.unattended = False


class Question:
    """A question to the sidecar, which is waited for as an operation is."""

    __slots__ = ("answer", "deadline", "done", "error", "waiters")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.done = False
        self.error: AtpError | None = None
        self.answer: dict[str, Any] | None = None
        self.waiters: list[threading.Lock] | None = None
