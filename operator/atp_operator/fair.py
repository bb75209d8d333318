# SPDX-License-Identifier: Apache-2.0
"""Who is served next, and who not for a while. Pure: the time is an argument."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


def interleave(items: Sequence[T], group: Callable[[T], str], turn: int = 0) -> list[T]:
    """The first of each group, then the second of each, and so on; `turn` moves the group that comes first."""
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(group(item), []).append(item)
    names = sorted(groups)
    if not names:
        return []
    start = turn % len(names)
    ordered = [groups[name] for name in (*names[start:], *names[:start])]
    return [found[i] for i in range(max(map(len, ordered))) for found in ordered if i < len(found)]


@dataclass
class Failure:
    """Something failed: why, how often in a row, and until when (same clock as the caller's) it is left alone."""

    why: str
    times: int
    until: float
    told: bool = False


class Backoff:
    """Twice as long a pause after every failure of the same thing."""

    def __init__(self, first: float, most: float) -> None:
        self._first, self._most = first, most
        self._failures: dict[Hashable, Failure] = {}

    def fail(self, key: Hashable, why: str, now: float, most: float | None = None) -> Failure:
        """It failed: seconds of pause begin, at most `most`."""
        before = self._failures.get(key)
        times = min(before.times + 1, 30) if before else 1
        pause = min(self._most if most is None else most, self._first * 2 ** (times - 1))
        told = before is not None and before.told and before.why == why
        self._failures[key] = Failure(why, times, now + pause, told)
        return self._failures[key]

    def done(self, key: Hashable) -> bool:
        """It went well; True when it had failed before."""
        return self._failures.pop(key, None) is not None

    def waits(self, key: Hashable, now: float) -> bool:
        """True while it is to be left alone."""
        failure = self._failures.get(key)
        return failure is not None and failure.until > now

    def retries(self, now: float) -> list[float]:
        """When each thing that is left alone has its next try."""
        return [failure.until for failure in self._failures.values() if failure.until > now]

    def keep(self, keys: Sequence[Hashable] | set[str]) -> None:
        """Forget all but these."""
        wanted = set(keys)
        self._failures = {key: failure for key, failure in self._failures.items() if key in wanted}

    def all(self) -> dict[Hashable, Failure]:
        """All that failed last time."""
        return self._failures
