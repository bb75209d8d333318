# SPDX-License-Identifier: Apache-2.0
"""The tooling is not an installed package: it runs before any environment exists."""

from __future__ import annotations

import sys
from pathlib import Path

HACK = Path(__file__).resolve().parents[2] / "hack"
if str(HACK) not in sys.path:
    sys.path.insert(0, str(HACK))
