# SPDX-License-Identifier: Apache-2.0
"""Allocation of ranges in the shared-memory file: first fit, merging neighbours."""

from __future__ import annotations

ALIGNMENT = 64


class Arena:
    """Hands out ranges of `size` bytes, aligned to 64.

    The free ranges are few (a handful of chunks is in flight), so a sorted list is enough.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)]
        self._used: dict[int, int] = {}

    @property
    def idle(self) -> bool:
        """Whether nothing is allocated."""
        return not self._used

    def allocate(self, size: int) -> int | None:
        """Offset of a new range of `size` > 0 bytes, or None if there is no room now."""
        need = -(-size // ALIGNMENT) * ALIGNMENT
        for index, (offset, room) in enumerate(self._free):
            if room >= need:
                if room == need:
                    del self._free[index]
                else:
                    self._free[index] = (offset + need, room - need)
                self._used[offset] = need
                return offset
        return None

    def release(self, offset: int) -> None:
        """Gives a range back.

        Raises:
            KeyError: none is allocated there.
        """
        size = self._used.pop(offset)
        merged: list[tuple[int, int]] = []
        for start, room in sorted([*self._free, (offset, size)]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((start, room))
        self._free = merged
