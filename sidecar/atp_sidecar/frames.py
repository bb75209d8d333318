# SPDX-License-Identifier: Apache-2.0
"""Frames of the unix socket between client and sidecar: u32 big-endian length, then a JSON object in UTF-8.

Messages, client to sidecar:

    {"type":"hello","version":1,"pid":..,"client":"atp-client/0.1.0 torch/1.13"}
    {"type":"resize","bytes":N}                       only while none of the client's operations is in flight
    {"type":"submit","op":7,"kind":"sum"|"mean","dtype":"float32","offset":0,"count":1000}   in place
    {"type":"stats"}   {"type":"bye"}

sidecar to client:

    {"type":"waiting","reason":".."}                  until the gate opens, every second
    {"type":"welcome","rank":0,"worldSize":4,"job":"ns/name","epoch":1,"mode":"Shared","masterAddress":"..",
     "shm":"/run/atp/<file>","shmBytes":N}
    {"type":"resized","shm":"..","shmBytes":N}        if there is no room: the old file and "error"
    {"type":"done","op":7}   {"type":"failed","op":7,"code":"..","message":".."}
    {"type":"stats", ..}     {"type":"fatal","code":"..","message":".."} and the connection closes
"""

import asyncio
import json
import struct
from typing import Any

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 1 << 20
_LENGTH = struct.Struct(">I")


class FrameError(ValueError):
    """The peer sent something that is not a frame of this protocol."""


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


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any] | None:
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
