# SPDX-License-Identifier: Apache-2.0
"""p4runtime-shell, a client that is not ours, against the server."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atp_softswitch.pipeline import contract_path

HERE = Path(__file__).resolve().parent
ENVIRONMENT = HERE.parents[1] / ".venv-p4shell"
REQUIREMENTS = HERE / "p4shell-requirements.txt"


@pytest.fixture(scope="session")
def shell_python() -> Path:
    """Interpreter of the shell's own environment, made when it is not there or its lock has changed."""
    stamp = ENVIRONMENT / "requirements.sha256"
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    python = ENVIRONMENT / "bin" / "python"
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "-q", "--clear", "--python", sys.executable, str(ENVIRONMENT)], check=True)
    install = [*uv, "pip", "install", "-q", "--python", str(python), "--require-hashes", "-r", str(REQUIREMENTS)]
    subprocess.run(install, check=True)
    stamp.write_text(wanted)
    return python


def test_a_session(served: Any, shell_python: Path) -> None:
    command = [
        *(str(shell_python), str(HERE / "shell_session.py")),
        *(f"127.0.0.1:{served.port}", str(contract_path())),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["tables"] == [
        "AtpEgress.replica",
        "AtpIngress.admission",
        "AtpIngress.job",
        "AtpIngress.ps_port",
        "AtpIngress.region",
        "AtpIngress.transit",
    ]
    assert seen["jobs"] == [{"1": 62, "2": 3, "3": 0, "4": 7}]
    assert seen["regions"] == [[0, 127]]
    assert seen["groups"] == [[[2130706433, 1], [2130706434, 2]]]
    assert seen["aggregated"] == [0]
    assert "ALREADY_EXISTS" in seen["twice"]
    assert seen["modified"] == [7]
    assert seen["left"] == 0
