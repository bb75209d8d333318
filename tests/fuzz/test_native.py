# SPDX-License-Identifier: Apache-2.0
"""The coverage-guided targets (Makefile beside this file), each for its share of a minute."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
TARGETS = ("packet", "switch", "assignment", "worker", "server", "job", "control")
SECONDS = int(os.environ.get("ATP_FUZZ_SECONDS", "5"))
CLANG = os.environ.get("CLANG", "clang-14")


def make(*arguments: str, seconds: float) -> str:
    """Runs make here; its output. It must succeed."""
    done = subprocess.run(
        ["make", "-s", "-C", str(HERE), f"CLANG={CLANG}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=seconds,
        encoding="utf-8",
        errors="replace",
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.fixture(scope="module")
def built() -> None:
    """The targets, compiled."""
    clang = shutil.which(CLANG)
    if clang is None:
        pytest.skip(f"{CLANG} is missing: apt-get install clang-14 libclang-rt-14-dev")
    folder = subprocess.run([clang, "-print-runtime-dir"], capture_output=True, text=True, check=True).stdout.strip()
    if not list(Path(folder).glob("libclang_rt.fuzzer*.a")):
        pytest.skip("clang has no libFuzzer: apt-get install libclang-rt-14-dev")
    if shutil.which("cargo") is None:
        pytest.skip("cargo is missing, which builds half of the targets: install Rust")
    make("build", seconds=280)


@pytest.mark.parametrize("target", TARGETS)
def test_no_input_breaks_a_rule(built: None, target: str) -> None:
    output = make("run", f"TARGET={target}", f"SECONDS={SECONDS}", seconds=SECONDS + 120)
    assert f"fuzz: {target}: cov: " in output
