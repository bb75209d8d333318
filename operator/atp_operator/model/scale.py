# SPDX-License-Identifier: Apache-2.0
"""The fixed-point scale of a job's tensors, as an ATPJob may write it."""

from __future__ import annotations

import math
import re
from typing import Final, Literal

Scale = float | Literal["Auto"]
"""The fixed-point factor of a job's tensors; "Auto": the ranks agree on one for each part of a tensor."""
SCALE_AUTO: Final = "Auto"
SCALE_MAX = float(2**31)
# As in the schema: the digits of the exponent are such that it is a finite number.
_DECIMAL = re.compile(r"[+-]?[0-9]+([.][0-9]+)?([eE]([+]?[0-9]{1,2}|-[0-9]{1,3}))?")


def read_scale(value: object) -> Scale:
    """`spec.scale`: "Auto", a number in a string, an integer, or a float as earlier versions of the schema stored it.

    Raises:
        ValueError: it is none of these or out of bounds; the text says what to write.
    """
    if value == SCALE_AUTO:
        return SCALE_AUTO
    if isinstance(value, str) and value.lower() == "auto":
        raise ValueError(f"{value!r}: write Auto with a capital A and small letters")
    numeric = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not numeric and not (isinstance(value, str) and len(value) <= 32 and _DECIMAL.fullmatch(value)):
        raise ValueError(
            f'{value!r}: it must be Auto, an integer (100000000), or a decimal number in quotes ("0.5", "1e8")'
        )
    assert isinstance(value, int | float | str)
    scale = float(value)
    if not 0 < scale <= SCALE_MAX:
        raise ValueError(
            f"{scale:.12g}: it must be above 0 and at most 2147483648 (2^31), for a value x travels as "
            f"round(x * scale) in 32 bits; Auto suits all magnitudes"
        )
    return scale


def stored_fraction(value: object) -> str | None:
    """The text that stands for a scale which an earlier version of the schema stored as a fraction; None for others.

    The API server refuses every update of an object with such a value in a field that is now int-or-string, also of
    its finalizers and status.
    """
    return repr(value) if isinstance(value, float) and math.isfinite(value) and not value.is_integer() else None
