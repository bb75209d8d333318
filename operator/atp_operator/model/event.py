# SPDX-License-Identifier: Apache-2.0
"""What is told of an object as a Kubernetes event."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """One event; core/v1 fields `type`, `reason` and `message`."""

    kind: str  # Normal or Warning
    reason: str
    message: str
