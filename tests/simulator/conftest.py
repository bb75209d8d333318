# SPDX-License-Identifier: Apache-2.0
"""The simulator as its users run it: the command of the virtual environment."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def atp_sim() -> Run:
    """Run ``atp-sim`` with the given arguments; the result has text output and is not checked."""
    command = Path(sys.executable).parent / "atp-sim"
    if not command.exists():
        pytest.fail(f"{command} is missing: build native/atp-sim with maturin and install it (docs/simulator.md)")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(command), *arguments], capture_output=True, text=True, timeout=300, check=False)

    return run


@pytest.fixture(scope="session")
def scenario(atp_sim: Run) -> Callable[..., dict[str, Any]]:
    """Measure a scenario with one seed; its JSON."""

    def measure(name: str, seed: int = 1) -> dict[str, Any]:
        done = atp_sim("scenario", name, "--seed", str(seed), "--runs", "1", "--json")
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    return measure
