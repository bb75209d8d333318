# SPDX-License-Identifier: Apache-2.0
"""A client of the unix socket without torch: what docs/session.md says and nothing more."""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import time
from array import array
from collections import Counter, deque
from pathlib import Path
from typing import Any

VERSION = 2
SUBMIT = struct.Struct("<4BI6QI4x")
DTYPES = {"float32": (0, 4), "float16": (1, 2), "bfloat16": (2, 2), "int32": (3, 4)}
"""Number and bytes of each dtype."""
KINDS = {"sum": 0, "mean": 1}
PART_BYTES = 1 << 20
GROUP = 1 << 32
"""The first group that session 0 of rank 0 would make: any number does that all ranks share."""


class RawClient:
    """One connection. `seconds` bounds every wait."""

    def __init__(self, path: Path, hello: bool = True, seconds: float = 30.0) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(seconds)
        self.socket.connect(str(path))
        self.segments: list[mmap.mmap] = []
        self.shm = ""
        self._numbers: Counter[int] = Counter()
        self._input = b""
        self._messages: deque[dict[str, Any]] = deque()
        if hello:
            self.send({"type": "hello", "version": VERSION, "pid": os.getpid(), "client": "test"})

    def send(self, message: dict[str, Any] | bytes) -> None:
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        self.socket.sendall(struct.pack(">I", len(body)) + body)

    def _body(self) -> bytes:
        while len(self._input) < 4 or len(self._input) < 4 + struct.unpack(">I", self._input[:4])[0]:
            part = self.socket.recv(1 << 16)
            if not part:
                raise EOFError
            self._input += part
        end = 4 + struct.unpack(">I", self._input[:4])[0]
        body, self._input = self._input[4:end], self._input[end:]
        return body

    def receive(self) -> dict[str, Any]:
        """The next message; a binary frame of several done operations gives one message each."""
        if not self._messages:
            body = self._body()
            if body[:1] == b"{":
                self._messages.append(dict(json.loads(body)))
            else:
                assert body[:8] == b"\2\0\0\0\0\0\0\0" and len(body) % 8 == 0 and len(body) > 8, body[:32]
                for (op,) in struct.iter_unpack("<Q", body[8:]):
                    self._messages.append({"type": "done", "op": op})
        return self._messages.popleft()

    def expect(self, kind: str) -> dict[str, Any]:
        """The next message, which must be of this type; notices of a closed gate are skipped."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            message = self.receive()
            if message["type"] == "waiting" != kind:
                continue
            assert message["type"] == kind, message
            return message
        raise AssertionError(f"no {kind}")

    def done(self, *ops: int) -> None:
        """Waits until exactly these operations are done, in any order."""
        assert sorted(self.expect("done")["op"] for _ in ops) == sorted(ops)

    def welcome(self) -> dict[str, Any]:
        """Waits for the welcome and maps the first segment."""
        message = self.expect("welcome")
        self.map(message)
        return message

    def map(self, message: dict[str, Any]) -> None:
        """Maps the segment that a welcome or a segment message tells of."""
        assert message["segment"] == len(self.segments)
        self.shm = message["shm"]
        with Path(self.shm).open("r+b") as file:
            self.segments.append(mmap.mmap(file.fileno(), message["shmBytes"]))

    def write(self, offset: int, values: list[float], code: str = "f", segment: int = 0) -> None:
        data = array(code, values).tobytes()
        self.segments[segment][offset : offset + len(data)] = data

    def read(self, offset: int, count: int, code: str = "f", segment: int = 0) -> list[float]:
        values = array(code)
        values.frombytes(self.segments[segment][offset : offset + count * values.itemsize])
        return list(values)

    def submit(
        self,
        op: int,
        count: int,
        offset: int = 0,
        kind: str = "sum",
        dtype: str = "float32",
        group: int = GROUP,
        segment: int = 0,
        changes: dict[str, int] | None = None,
    ) -> int:
        """Submits a tensor, the next operation of its group, as parts with the handles op, op + 1, ...

        `changes` replaces fields of the frames. Returns the number of parts.
        """
        code, size = DTYPES[dtype]
        room = PART_BYTES // size
        number = self._numbers[group]
        self._numbers[group] += 1
        frames = []
        for part, begin in enumerate(range(0, max(count, 1), room)):
            fields = {
                "type": 1, "dtype": code, "kind": KINDS[kind], "zero": 0, "segment": segment, "op": op + part,
                "group": group, "number": number, "total": count, "begin": begin, "offset": offset + begin * size,
                "count": min(room, count - begin),
            }  # fmt: skip
            body = SUBMIT.pack(*(fields | (changes or {})).values())
            frames.append(struct.pack(">I", len(body)) + body)
        self.socket.sendall(b"".join(frames))
        return len(frames)

    def at_end(self) -> bool:
        """Whether the sidecar closes the connection."""
        try:
            while True:
                self.receive()
        except (EOFError, ConnectionError):
            return True

    def close(self) -> None:
        self.socket.close()
