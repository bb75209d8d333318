# SPDX-License-Identifier: Apache-2.0
"""Structured logs: one JSON object a line, `event` names what happened."""

import json
import sys
import time
from typing import IO, Any

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class EventLog:
    """Writes events as JSON lines to a stream.

    Args:
        stream: where the lines go (standard output by default).
        level: least level that is written: debug, info, warning or error.
        **base: fields that every line carries.

    Raises:
        ValueError: the level is none of the four.
    """

    def __init__(self, stream: IO[str] | None = None, level: str = "info", **base: Any) -> None:
        if level not in _LEVELS:
            raise ValueError(f"log level {level!r} is unknown; use one of {', '.join(_LEVELS)}")
        self._stream = stream if stream is not None else sys.stdout
        self._threshold = _LEVELS[level]
        self._base = base

    def bind(self, **fields: Any) -> None:
        """Adds fields to every later line."""
        self._base.update(fields)

    def _write(self, level: str, event: str, fields: dict[str, Any]) -> None:
        if _LEVELS[level] < self._threshold:
            return
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
        line = {"time": stamp, "level": level, "event": event, **self._base, **fields}
        # A closed standard output must not stop the transport.
        try:
            self._stream.write(json.dumps(line, default=str) + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            pass

    def debug(self, event: str, **fields: Any) -> None:
        """Writes a line of level debug."""
        self._write("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        """Writes a line of level info."""
        self._write("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Writes a line of level warning."""
        self._write("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """Writes a line of level error."""
        self._write("error", event, fields)
