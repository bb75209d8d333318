# SPDX-License-Identifier: Apache-2.0
"""All-reduces as torch's profiler shows them: from the call to the end, whichever thread that is in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from atp_client.errors import AtpError
from atp_client.tensors import Handle
from atp_client.torch_version import VERSION

# With the shapes of the tensors. Only a newer profiler keeps what ends in another thread without help.
_WITH_SHAPES = VERSION >= (2, 15)
# Callbacks before ours may take long; an event less in a profile is better than to wait for them for ever.
_PATIENCE_SECONDS = 5.0


class Profiled:
    """A handle that has not ended before the profiler knows that it has.

    Args:
        name: of the event.
        tensors: that it is about.
        start: starts the operation.
    """

    def __init__(self, name: str, tensors: list[torch.Tensor], start: Callable[[], Handle]) -> None:
        self._done, self._ended = threading.Event(), threading.Event()
        # In a list, so that nobody else holds it when the list lets go of it.
        event: list[Any] = []
        if _WITH_SHAPES:
            event.append(torch._C._profiler._RecordFunctionFast(name, tensors, {}))
        else:
            event.append(torch.autograd.profiler.record_function(name))
        event[0].__enter__()
        try:
            self._handle = start()
        except BaseException:
            event[0].__exit__(None, None, None)
            raise
        if _WITH_SHAPES:
            # A thread that the profiler does not know ends an event by destroying it, not by __exit__.
            end: Callable[[], Any] = event.clear
        else:
            future: Any = torch.futures.Future()
            event[0]._call_end_callbacks_on_future(future)
            event[0].__exit__(None, None, None)
            end = partial(future.set_result, None)

        def run() -> None:
            self._done.wait()
            end()
            self._ended.set()

        # To torch, an event is asynchronous if it ends in another thread.
        threading.Thread(target=run, name="atp-profiler", daemon=True).start()
        self._handle.when_done(self._done.set)

    @property
    def completed(self) -> bool:
        """See Handle."""
        return self._handle.completed and self._ended.is_set()

    @property
    def streams(self) -> Sequence[Any]:
        """See Handle."""
        return self._handle.streams

    def failure(self) -> AtpError | None:
        """See Handle."""
        return self._handle.failure()

    def wait(self, seconds: float = 0.0) -> None:
        """See Handle."""
        try:
            self._handle.wait(seconds)
        finally:
            if self._handle.completed:
                self._ended.wait(_PATIENCE_SECONDS)

    def when_done(self, callback: Callable[[], None]) -> None:
        """See Handle."""
        self._handle.when_done(callback)

    def attend(self) -> None:
        """See Handle."""
        self._handle.attend()
