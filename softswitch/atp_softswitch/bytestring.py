# SPDX-License-Identifier: Apache-2.0
"""Canonical bytestrings: P4Runtime 1.4, section "Bytestrings"."""

from __future__ import annotations

from .errors import Code, P4RuntimeError


def encode(value: int) -> bytes:
    """The shortest big-endian string of an unsigned value; zero is one zero byte."""
    if value < 0:
        raise ValueError("a P4Runtime bytestring holds an unsigned value")
    return value.to_bytes(max(1, (value.bit_length() + 7) // 8), "big")


def decode(data: bytes, bitwidth: int, what: str) -> int:
    """The value of a bytestring that must fit `bitwidth` bits; leading zeros are accepted.

    Raises INVALID_ARGUMENT for an empty string, OUT_OF_RANGE for a value that does not fit.
    """
    if not data:
        raise P4RuntimeError(Code.INVALID_ARGUMENT, f"{what}: empty bytestring; zero is one zero byte")
    value = int.from_bytes(data, "big")
    if value.bit_length() > bitwidth:
        raise P4RuntimeError(Code.OUT_OF_RANGE, f"{what}: value {value:#x} does not fit {bitwidth} bits")
    return value
