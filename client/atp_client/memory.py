# SPDX-License-Identifier: Apache-2.0
"""The shared memory of a session: segments that the sidecar made, and who may have room in them.

A process group whose first outstanding part finds no room must never wait for another group's room: that one may wait
for the same of the first group on another rank, and a legal program would hang. So the parts behind the first may
take room only while half of all of it stays free, and for a first one another segment is asked for.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any

from atp_client.arena import Arena
from atp_client.errors import SidecarLostError

# Holding the interpreter's lock is cheaper than giving it away for a small copy.
_SMALL_BYTES = 1 << 14
_SMALL_ROOM_BYTES = 1 << 12
_BLOCK_BYTES = 1 << 14


def _memmove(library: Any) -> Any:
    function = library.memmove
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = None
    return function


_copy_small = _memmove(ctypes.PyDLL(None))
_copy_large = _memmove(ctypes.CDLL(None))


def copy(target: int, source: int, size: int) -> None:
    """Copies `size` bytes between addresses; whoever calls keeps both alive."""
    if size <= _SMALL_BYTES:
        _copy_small(target, source, size)
    else:
        _copy_large(target, source, size)


class Segment:
    """One shared-memory file, mapped.

    Raises:
        SidecarLostError: it cannot be mapped.
    """

    def __init__(self, index: int, path: str, size: int) -> None:
        self.index = index
        self.arena = Arena(size)
        # Where blocks of small rooms begin.
        self.blocks: set[int] = set()
        try:
            with Path(path).open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), size)
        except (OSError, ValueError) as error:
            raise SidecarLostError(
                f"the shared-memory file {path} of {size} bytes cannot be mapped: {error}; the volume atp-shm must be "
                "mounted at the same path in the trainer and in the sidecar"
            ) from error
        self._pin = ctypes.c_char.from_buffer(self._map)
        self.base = ctypes.addressof(self._pin)


class Memory:
    """All segments of a session. Not for several threads at once."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self.free = 0
        self._segments: list[Segment] = []
        # Blocks are cut into small rooms of one size, which stay so: finding room is most of what a small tensor costs.
        self._rooms: dict[int, list[tuple[Segment, int]]] = {}
        self._block_bytes = 0

    def add(self, segment: Segment) -> None:
        """Takes a segment into use."""
        self._segments.append(segment)
        self.total += segment.arena.size
        self.free += segment.arena.size

    def take(self, size: int, first: bool) -> tuple[Segment, int] | None:
        """Segment and offset for a part of `size` > 0 bytes, or None if it may have no room now.

        Args:
            size: bytes.
            first: its group has no other part outstanding.
        """
        size = (size + 63) & -64
        if not first and 2 * (self.free - size) < self.total:
            return None
        room = None
        if size <= _SMALL_ROOM_BYTES:
            rooms = self._rooms.get(size) or self._cut(size)
            if rooms:
                room = rooms.pop()
        if room is None:
            room = self._allocate(size)
        if room is not None:
            self.free -= size
        return room

    def _cut(self, size: int) -> list[tuple[Segment, int]]:
        """Rooms of a new block, if there may be one."""
        if 2 * (self._block_bytes + _BLOCK_BYTES) > self.total:
            return []
        block = self._allocate(_BLOCK_BYTES)
        if block is None:
            return []
        segment, offset = block
        segment.blocks.add(offset)
        self._block_bytes += _BLOCK_BYTES
        rooms = self._rooms.setdefault(size, [])
        rooms += [(segment, offset + size * number) for number in range(_BLOCK_BYTES // size)]
        return rooms

    def _allocate(self, size: int) -> tuple[Segment, int] | None:
        for segment in self._segments:
            offset = segment.arena.allocate(size)
            if offset is not None:
                return segment, offset
        return None

    def give(self, segment: Segment, offset: int, size: int) -> None:
        """Gives a part's room of `size` bytes back."""
        size = (size + 63) & -64
        self.free += size
        if size <= _SMALL_ROOM_BYTES and (offset in segment.blocks or not segment.arena.begins(offset)):
            self._rooms[size].append((segment, offset))
        else:
            segment.arena.release(offset)

    def growth(self, size: int, first: bool) -> int:
        """Bytes of a segment to ask for when a part of `size` bytes got no room; 0: it waits for room instead."""
        doubled = min(self.limit - self.total, max(self.total, 2 * size))
        if doubled >= size:
            return doubled
        return max(size, 1 << 20) if first else 0
