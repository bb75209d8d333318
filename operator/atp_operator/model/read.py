# SPDX-License-Identifier: Apache-2.0
"""Values of a status that anybody may have written: taken only within their bounds."""

from __future__ import annotations

EPOCH_LAST = 2**31 - 1
"""Counters of a status beyond this are nobody's: the operator never counts so far."""


def number(value: object, least: int, most: int) -> int:
    """The value, if it is an integer within the bounds; ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{str(value)[:40]!r} is no integer of {least} to {most}")
    return value


def text_of(value: object, most: int = 1024) -> str:
    """The value, if it is a text of at most so many characters; ValueError otherwise."""
    if not isinstance(value, str) or len(value) > most:
        raise ValueError(f"{str(value)[:40]!r} is no text of at most {most} characters")
    return value
