# SPDX-License-Identifier: Apache-2.0
"""Frames of the session protocol, version 2: a length of four bytes, big endian, then the body (docs/session.md).

A body is JSON (it begins with `{`) or binary (its first byte is the type).
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from atp_client.errors import SidecarLostError

MAX_BODY_BYTES = 1 << 20
DONE = 2
_JSON = ord("{")
_LENGTH = struct.Struct(">I")
_HANDLE = struct.Struct("<Q")
_DONE_HEAD_BYTES = 8
_DONTWAIT = int(socket.MSG_DONTWAIT)
# Length (always 64), type 1, dtype, kind, 0, segment, op, group, number, total, begin, offset, count.
_SUBMIT = struct.Struct("<4s4BI6QI4x")
_SUBMIT_LENGTH = _LENGTH.pack(_SUBMIT.size - _LENGTH.size)
_pack = _SUBMIT.pack


def submit(
    dtype: int,
    kind: int,
    segment: int,
    handle: int,
    group: int,
    number: int,
    total: int,
    begin: int,
    offset: int,
    count: int,
) -> bytes:
    """The frame that submits one part: `count` elements from `begin` of `total`, at byte `offset` of the segment."""
    return _pack(_SUBMIT_LENGTH, 1, dtype, kind, 0, segment, handle, group, number, total, begin, offset, count)


def encode(message: dict[str, Any]) -> bytes:
    """The frame of a JSON message."""
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def _decode(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
        if not isinstance(message["type"], str):
            raise TypeError("type is not a string")
    except (ValueError, TypeError, KeyError) as error:
        raise SidecarLostError(f"the sidecar sent a frame that is not understood: {error!r}") from error
    return dict(message)


class FrameReader:
    """Cuts what a socket receives into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray(1 << 16)
        self._view = memoryview(self._buffer)
        self._begin = 0
        self._end = 0

    def receive(self, source: socket.socket) -> bool:
        """Takes what is there, without waiting. False: the stream has ended.

        Raises:
            OSError: as the socket's recv, also BlockingIOError.
        """
        if self._end == len(self._buffer):
            self._make_room()
        count = source.recv_into(self._view[self._end :], 0, _DONTWAIT)
        self._end += count
        return count > 0

    def _make_room(self) -> None:
        kept = bytes(self._view[self._begin : self._end])
        if 2 * len(kept) > len(self._buffer):
            self._buffer = bytearray(2 * len(self._buffer))
            self._view = memoryview(self._buffer)
        self._view[: len(kept)] = kept
        self._begin, self._end = 0, len(kept)

    def take(self) -> tuple[list[int], list[dict[str, Any]]]:
        """Handles of the parts that are done, and the JSON messages, of all frames that are whole.

        Raises:
            SidecarLostError: the bytes are no frames.
        """
        done: list[int] = []
        messages: list[dict[str, Any]] = []
        buffer, begin, end = self._buffer, self._begin, self._end
        while end - begin >= 4:
            (length,) = _LENGTH.unpack_from(buffer, begin)
            if not 0 < length <= MAX_BODY_BYTES:
                raise SidecarLostError(f"the sidecar sent a frame of {length} bytes; the limit is {MAX_BODY_BYTES}")
            body = begin + 4
            if end - body < length:
                break
            kind = buffer[body]
            begin = body + length
            if kind == DONE and length % 8 == 0 and length > _DONE_HEAD_BYTES:
                if length == _DONE_HEAD_BYTES + 8:
                    done += _HANDLE.unpack_from(buffer, body + _DONE_HEAD_BYTES)
                else:
                    count = (length - _DONE_HEAD_BYTES) // 8
                    done += struct.unpack_from(f"<{count}Q", buffer, body + _DONE_HEAD_BYTES)
            elif kind == _JSON:
                messages.append(_decode(bytes(self._view[body:begin])))
            else:
                raise SidecarLostError(f"the sidecar sent a frame of type {kind} and {length} bytes; it is not known")
        if begin == end:
            begin = end = 0
        self._begin, self._end = begin, end
        return done, messages
