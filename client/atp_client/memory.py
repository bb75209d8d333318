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
# Larger rooms are always given back to their segment.
_SPARE_BYTES = 1 << 12


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
        # Small rooms that were given back, by size, for the next of that size: taking one is most of what a small
        # tensor costs.
        self._spare: dict[int, list[tuple[Segment, int]]] = {}
        self._spare_bytes = 0

    def add(self, segment: Segment) -> None:
        """Takes a segment into use."""
        self._segments.append(segment)
        self.total += segment.arena.size
        self.free += segment.arena.free

    def take(self, size: int, first: bool) -> tuple[Segment, int] | None:
        """Segment and offset for a part of `size` > 0 bytes, or None if it may have no room now.

        Args:
            size: bytes.
            first: its group has no other part outstanding.
        """
        size = (size + 63) & -64
        spare = self._spare.get(size)
        if spare:
            self._spare_bytes -= size
            return spare.pop()
        if not first and 2 * (self.free - size) < self.total:
            return None
        room = self._allocate(size)
        if room is None and self._spare_bytes:
            self._merge()
            room = self._allocate(size)
        return room

    def _allocate(self, size: int) -> tuple[Segment, int] | None:
        for segment in self._segments:
            offset = segment.arena.allocate(size)
            if offset is not None:
                self.free -= size
                return segment, offset
        return None

    def _merge(self) -> None:
        for size, rooms in self._spare.items():
            for segment, offset in rooms:
                segment.arena.release(offset)
                self.free += size
        self._spare.clear()
        self._spare_bytes = 0

    def give(self, segment: Segment, offset: int, size: int) -> None:
        """Gives a part's room of `size` bytes back."""
        size = (size + 63) & -64
        if size <= _SPARE_BYTES and 16 * (self._spare_bytes + size) <= self.total:
            rooms = self._spare.get(size)
            if rooms is None:
                rooms = self._spare[size] = []
            rooms.append((segment, offset))
            self._spare_bytes += size
            return
        segment.arena.release(offset)
        self.free += size

    def growth(self, size: int, first: bool) -> int:
        """Bytes of a segment to ask for when a part of `size` bytes got no room; 0: it waits for room instead."""
        doubled = min(self.limit - self.total, max(self.total, 2 * size))
        if doubled >= size:
            return doubled
        return max(size, 1 << 20) if first else 0
