# SPDX-License-Identifier: Apache-2.0
"""Makes the modules beside the tests importable: a package named ``p4`` exists already (the P4Runtime stubs)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
