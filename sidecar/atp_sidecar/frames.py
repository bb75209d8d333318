# SPDX-License-Identifier: Apache-2.0
"""Frames of the handshake on the unix socket: u32 big-endian length, then a JSON object in UTF-8.

What follows the welcome is served by the transport itself; docs/session.md describes all of it.
"""

import asyncio
import json
import struct
from typing import Any, Protocol

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 1 << 20
_LENGTH = struct.Struct(">I")


class FrameError(ValueError):
    """The peer sent something that is not a frame of the handshake."""


class Reader(Protocol):
    """A stream of bytes."""

    async def readexactly(self, n: int, /) -> bytes:
        """The next `n` bytes.

        Raises:
            asyncio.IncompleteReadError: the stream ended before.
        """


def encode(message: dict[str, Any]) -> bytes:
    """One message as a frame.

    Raises:
        FrameError: it is larger than 1 MiB.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> dict[str, Any]:
    """The message in a frame's body.

    Raises:
        FrameError: it is not a JSON object with a "type".
    """
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:  # RecursionError: brackets in brackets, thousands deep
        raise FrameError(f"a frame is not JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise FrameError('a frame is not a JSON object with a "type"')
    return message


async def read_frame(reader: Reader) -> dict[str, Any] | None:
    """The next message, or None when the peer has closed the connection between frames.

    Raises:
        FrameError: the bytes are no frame, or the connection ends inside one.
    """
    try:
        header = await reader.readexactly(_LENGTH.size)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise FrameError("the connection ended inside a frame") from None
        return None
    except ConnectionError:
        return None
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
    try:
        return decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        raise FrameError("the connection ended inside a frame") from None
