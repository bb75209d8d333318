# SPDX-License-Identifier: Apache-2.0
"""An aggregator as the vectors describe it, from the registers of the bmv2 program."""

from __future__ import annotations

from collections.abc import Callable

from conformance.switches import Aggregator

from atp_api.wire import Header

LEVEL_BIT = 0x00800000
PAIRS = 31


class Registers:
    """Reads aggregators through ``read(name, index)``.

    The key register has level and sequence in one word: only the packets that came by tell them apart.
    """

    def __init__(self, read: Callable[[str, int], int]) -> None:
        self.read = read
        self.seen: dict[int, tuple[int, int]] = {}

    def came_by(self, header: Header) -> None:
        """To be called after each packet."""
        index = header.aggregator_index
        held = self.read("keys", index)
        for level in (0, 1):
            if held == (header.job_id << 24 | header.sequence) ^ (1 - level) * LEVEL_BIT:
                self.seen[index] = level, header.sequence

    def aggregator(self, index: int) -> Aggregator:
        """The state of an aggregator; its time in nanoseconds of the switch's clock."""
        key = self.read("keys", index)
        pairs = [self.read(f"pair{i}.sums", index) for i in range(PAIRS)]
        values = tuple(v - (1 << 32) if v >> 31 else v for p in pairs for v in (p >> 32, p & 0xFFFFFFFF))
        if key == 0:
            return Aggregator(0, 0, 0, 0, False, False, 0, values)
        level, sequence = self.seen[index]
        return Aggregator(
            key >> 24,
            sequence,
            level,
            self.read("cover", index),
            self.read("missing", index) == 0,
            bool(self.read("mark", index)),
            1000 * self.read("times", index),
            values,
        )
