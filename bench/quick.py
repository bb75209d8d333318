# SPDX-License-Identifier: Apache-2.0
"""``make bench-quick``: run every quick benchmark in turn and pass its JSON lines on.

Each benchmark is a program of its own that prints lines with name, value, unit, peer, ratio and conditions. Absolute
times depend on the machine and on what else it does; the ratio to the peer, taken in the same run, is what to compare.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent
BENCHMARKS = ["softswitch_bpf.py", "transport.py", "agent.py", "memory.py"]
LIMIT_SECONDS = 80
"""One benchmark's limit; all together stay under three minutes."""


def main() -> int:
    failed = []
    for name in BENCHMARKS:
        try:
            code = subprocess.run([sys.executable, str(BENCH / name)], timeout=LIMIT_SECONDS, check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
        if code != 0:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
