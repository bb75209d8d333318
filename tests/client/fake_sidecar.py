# SPDX-License-Identifier: Apache-2.0
"""Sidecars without a transport: one thread serves the sockets of all ranks and sums when all have submitted a part.

For what real sidecars do not do at will: last words before they hang up, answers that never come, memory that does
not grow. float32 and int32 only.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import selectors
import socket
import struct
import threading
from array import array
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_SUBMIT = struct.Struct("<4BI6QI4x")
_CODES = {0: "f", 3: "i"}


class _Client:
    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.connection = connection
        self.rank = rank
        self.input = bytearray()
        self.segments: list[mmap.mmap] = []


class FakeSidecars:
    """Listens at `directory`/rank-<n>.sock for each of `ranks` ranks.

    Args:
        directory: for the sockets and the shared memory.
        ranks: of the job.
        segment_bytes: of the first segment.
        may_grow: whether a segment more is given when asked for.
    """

    def __init__(self, directory: Path, ranks: int, segment_bytes: int = 4 << 20, may_grow: bool = True) -> None:
        self.directory = directory
        self.ranks = ranks
        self.segment_bytes = segment_bytes
        self.may_grow = may_grow
        self.job, self.epoch = "team-a/fake", 1
        # Answers are held back while set; what was asked stays.
        self.hold = False
        self.heard: list[dict[str, Any]] = []
        self._sessions = 0
        self._waiting: dict[tuple[int, int, int], dict[int, tuple[_Client, tuple[int, ...]]]] = defaultdict(dict)
        self._selector = selectors.DefaultSelector()
        self._clients: list[_Client] = []
        self.lock = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True)
        for rank in range(ranks):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(str(self.path(rank)))
            listener.listen()
            self._selector.register(listener, selectors.EVENT_READ, rank)
        self._stop = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def path(self, rank: int) -> Path:
        """The socket of a rank's sidecar."""
        return self.directory / f"rank-{rank}.sock"

    @property
    def workers(self) -> list[SimpleNamespace]:
        """As a Job's: each with its socket."""
        return [SimpleNamespace(socket=self.path(rank)) for rank in range(self.ranks)]

    def _serve(self) -> None:
        while not self._stop:
            for key, _ in self._selector.select(0.05):
                with self.lock:
                    if isinstance(key.data, int):
                        client = _Client(key.fileobj.accept()[0], key.data)  # type: ignore[union-attr]
                        self._clients.append(client)
                        self._selector.register(client.connection, selectors.EVENT_READ, client)
                    else:
                        self._receive(key.data)

    def _receive(self, client: _Client) -> None:
        try:
            data = client.connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self.hang_up(client)
            return
        client.input += data
        while len(client.input) >= 4:
            (length,) = struct.unpack_from(">I", client.input)
            if len(client.input) < 4 + length:
                return
            body = bytes(client.input[4 : 4 + length])
            del client.input[: 4 + length]
            if body[0] == 1:
                self._submit(client, _SUBMIT.unpack(body))
            else:
                self._message(client, json.loads(body))

    def hang_up(self, client: _Client) -> None:
        """Closes a connection."""
        if client in self._clients:
            self._clients.remove(client)
            self._selector.unregister(client.connection)
            client.connection.close()

    def send(self, client: _Client, message: dict[str, Any] | bytes) -> None:
        """One frame."""
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        with contextlib.suppress(OSError):
            client.connection.sendall(struct.pack(">I", len(body)) + body)

    def say(self, rank: int, message: dict[str, Any], then_hang_up: bool = False) -> None:
        """A message to all clients of a rank."""
        with self.lock:
            for client in [each for each in self._clients if each.rank == rank]:
                self.send(client, message)
                if then_hang_up:
                    self.hang_up(client)

    def _segment(self, client: _Client, size: int) -> dict[str, Any]:
        path = self.directory / f"shm-{id(client):x}-{len(client.segments)}"
        with path.open("w+b") as file:
            file.truncate(size)
            client.segments.append(mmap.mmap(file.fileno(), size))
        return {"segment": len(client.segments) - 1, "shm": str(path), "shmBytes": size}

    def _message(self, client: _Client, message: dict[str, Any]) -> None:
        self.heard.append({**message, "rank": client.rank})
        kind = message["type"]
        if kind == "hello":
            self._sessions += 1
            welcome = {
                "type": "welcome",
                "rank": client.rank,
                "worldSize": self.ranks,
                "job": self.job,
                "epoch": self.epoch,
                "mode": "HostOnly",
                "masterAddress": "127.0.0.1",
                "scale": "Auto",
                "session": self._sessions,
                "stallTimeoutSeconds": 60,
            }
            self.send(client, {**welcome, **self._segment(client, self.segment_bytes)})
        elif kind == "grow":
            answer = self._segment(client, message["bytes"]) if self.may_grow else {"error": "no room"}
            self.send(client, {"type": "segment", **answer})
        elif kind == "ping":
            self.send(client, {"type": "pong"})
        elif kind == "stats":
            self.send(client, {"type": "stats", "gradient_packets": 1})
        elif kind == "bye":
            self.hang_up(client)

    def _submit(self, client: _Client, part: tuple[int, ...]) -> None:
        group, number, begin = part[6], part[7], part[9]
        here = self._waiting[group, number, begin]
        here[client.rank] = (client, part)
        if len(here) == self.ranks and not self.hold:
            self._finish(group, number, begin)

    def release(self) -> None:
        """Answers what was held back."""
        with self.lock:
            self.hold = False
            for key in [key for key, here in self._waiting.items() if len(here) == self.ranks]:
                self._finish(*key)

    def _finish(self, group: int, number: int, begin: int) -> None:
        here = self._waiting.pop((group, number, begin))
        if len({(part[1], part[2], part[8], part[11]) for _, part in here.values()}) > 1:
            for client, part in here.values():
                failed = {
                    "type": "failed",
                    "op": part[5],
                    "code": "Mismatch",
                    "message": "sizes differ",
                    "group": group,
                }
                self.send(client, {**failed, "broken": False})
            return
        blocks: list[array[Any]] = []
        for client, part in here.values():
            code, count, offset = _CODES[part[1]], part[11], part[10]
            data = client.segments[part[4]][offset : offset + 4 * count] if count else b""
            blocks.append(array(code, data))
        mean = next(iter(here.values()))[1][2] == 1
        total: array[Any] = array(blocks[0].typecode, map(sum, zip(*blocks, strict=True)))
        if mean:
            total = array("f", (value / self.ranks for value in total))
        for client, part in here.values():
            if part[11]:
                client.segments[part[4]][part[10] : part[10] + 4 * part[11]] = total.tobytes()
            self.send(client, bytes([2, 0, 0, 0, 0, 0, 0, 0]) + struct.pack("<Q", part[5]))

    def close(self) -> None:
        """Ends it."""
        self._stop = True
        self._thread.join(5)
        with self.lock:
            for client in list(self._clients):
                self.hang_up(client)

    def __enter__(self) -> FakeSidecars:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
