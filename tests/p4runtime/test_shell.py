# SPDX-License-Identifier: Apache-2.0
"""p4runtime-shell, a client that is not ours, against the software switch's server and bmv2's."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from switch_agent.bmv2 import Bmv2, reason_not_to_run

from atp_softswitch.pipeline import contract_path
from atp_switch_agent.codec import bmv2_paths

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


@dataclass(frozen=True)
class Target:
    """A P4Runtime server, the pipeline that is pushed to it, and two of its ports."""

    address: str
    p4info: Path
    program: Path
    ports: tuple[int, int]


@pytest.fixture(params=["software", pytest.param("bmv2", marks=pytest.mark.root)])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Target]:
    if request.param == "software":
        program = tmp_path / "program"
        program.write_bytes(b"atp")
        served = request.getfixturevalue("served")
        yield Target(f"127.0.0.1:{served.port}", contract_path(), program, (2130706433, 2130706434))
        return
    reason = reason_not_to_run()
    if reason is not None:
        pytest.skip(reason)
    with Bmv2(tmp_path) as bmv2:
        bmv2.start()
        yield Target(bmv2.address, *bmv2_paths(), (1, 2))


def test_a_session(target: Target, shell_python: Path) -> None:
    command = [
        *(str(shell_python), str(HERE / "shell_session.py"), target.address, str(target.p4info)),
        *(str(target.program), *map(str, target.ports)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    contract = {
        "AtpEgress.replica",
        "AtpIngress.admission",
        "AtpIngress.job",
        "AtpIngress.ps_port",
        "AtpIngress.region",
        "AtpIngress.transit",
    }
    assert contract <= set(seen["tables"])
    assert seen["jobs"] == [{"1": 62, "2": 3, "3": 0, "4": 7}]
    assert seen["regions"] == [[0, 127]]
    first, second = target.ports
    assert seen["groups"] == [[[first, 1], [second, 2]]]
    assert seen["aggregated"] == [0]
    assert seen["counted"] == [17]
    assert seen["cells"] == {"3": 17}
    assert seen["grown"] == [[1, 2, 3]]
    assert "ALREADY_EXISTS" in seen["twice"]
    assert seen["modified"] == [7]
    assert seen["left"] == 0
