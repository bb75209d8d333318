# SPDX-License-Identifier: Apache-2.0
"""A BPF file system of a test's own."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def bpf_file_system() -> Iterator[Path]:
    """A folder with a BPF file system of its own in `bpf`, and a plain folder `state`; what is pinned goes with it."""
    with tempfile.TemporaryDirectory(prefix="atp-pins-") as name:
        root = Path(name)
        for folder in ("bpf", "state"):
            (root / folder).mkdir()
        subprocess.run(["mount", "-t", "bpf", "bpf", root / "bpf"], check=True)
        try:
            yield root
        finally:
            subprocess.run(["umount", root / "bpf"], check=True)
