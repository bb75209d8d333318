# SPDX-License-Identifier: Apache-2.0
"""What the API's JSON is, and its times."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

Object = dict[str, Any]


def rfc3339(seconds: float) -> str:
    """Unix time in seconds as RFC 3339 in UTC, whole seconds (as the API server's own times)."""
    return dt.datetime.fromtimestamp(math.floor(seconds), dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str | None) -> float | None:
    """RFC 3339 text as Unix seconds; None for None or an empty text."""
    if not text:
        return None
    return dt.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
