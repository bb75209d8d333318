# SPDX-License-Identifier: Apache-2.0
"""Allocation of ranges in a shared-memory segment: first fit, merging neighbours."""

from __future__ import annotations

from bisect import bisect_left

ALIGNMENT = 64


class Arena:
    """Hands out ranges of `size` bytes, aligned to 64. The free ranges are few, so a sorted list is enough."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranges: list[tuple[int, int]] = [(0, size)]
        self._used: dict[int, int] = {}

    def allocate(self, size: int) -> int | None:
        """Offset of a new range of `size` > 0 bytes, or None if there is no room now."""
        need = (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        for index, (offset, room) in enumerate(self._ranges):
            if room >= need:
                if room == need:
                    del self._ranges[index]
                else:
                    self._ranges[index] = (offset + need, room - need)
                self._used[offset] = need
                return offset
        return None

    def begins(self, offset: int) -> bool:
        """Whether a range is allocated that begins there."""
        return offset in self._used

    def release(self, offset: int) -> None:
        """Gives a range back.

        Raises:
            KeyError: none is allocated there.
        """
        size = self._used.pop(offset)
        ranges = self._ranges
        at = bisect_left(ranges, (offset, 0))
        if at < len(ranges) and ranges[at][0] == offset + size:
            size += ranges.pop(at)[1]
        if at > 0 and sum(ranges[at - 1]) == offset:
            before, room = ranges[at - 1]
            ranges[at - 1] = (before, room + size)
        else:
            ranges.insert(at, (offset, size))
