# SPDX-License-Identifier: Apache-2.0
"""A client of the unix socket without torch: what the protocol says and nothing more."""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import time
from array import array
from pathlib import Path
from typing import Any


class RawClient:
    """One connection. `seconds` bounds every wait."""

    def __init__(self, path: Path, hello: bool = True, seconds: float = 30.0) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(seconds)
        self.socket.connect(str(path))
        self.memory: mmap.mmap | None = None
        self.shm = ""
        if hello:
            self.send({"type": "hello", "version": 1, "pid": os.getpid(), "client": "test"})

    def send(self, message: dict[str, Any] | bytes) -> None:
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        self.socket.sendall(struct.pack(">I", len(body)) + body)

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def receive(self) -> dict[str, Any]:
        (length,) = struct.unpack(">I", self._exactly(4))
        return dict(json.loads(self._exactly(length)))

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

    def welcome(self) -> dict[str, Any]:
        """Waits for the welcome and maps the shared file."""
        message = self.expect("welcome")
        self.map(message)
        return message

    def map(self, message: dict[str, Any]) -> None:
        self.shm = message["shm"]
        with Path(self.shm).open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), message["shmBytes"])

    def write(self, offset: int, values: list[float], code: str = "f") -> None:
        assert self.memory is not None
        data = array(code, values).tobytes()
        self.memory[offset : offset + len(data)] = data

    def read(self, offset: int, count: int, code: str = "f") -> list[float]:
        assert self.memory is not None
        values = array(code)
        values.frombytes(self.memory[offset : offset + count * values.itemsize])
        return list(values)

    def submit(self, op: int, count: int, offset: int = 0, kind: str = "sum", dtype: str = "float32") -> None:
        self.send({"type": "submit", "op": op, "kind": kind, "dtype": dtype, "offset": offset, "count": count})

    def at_end(self) -> bool:
        """Whether the sidecar closes the connection."""
        try:
            while True:
                self.receive()
        except (EOFError, ConnectionError):
            return True

    def close(self) -> None:
        self.socket.close()
