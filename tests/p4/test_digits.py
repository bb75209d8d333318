# SPDX-License-Identifier: Apache-2.0
"""The digits example over one switch in the middle, as ``make demo-bmv2`` runs it: agent, planner, sidecars.

On bmv2 where it is installed; on the software switch everywhere, so that all but the switch is tested there too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bmv2.process import ROOT, reason_not_to_run
from bmv2.run import DemoError, torch_python

MISSING = reason_not_to_run()
SECONDS = 230
PACKETS_A_STEP = 38282 // 62
"""Of one worker: the model's parameters. A step has one packet more, and descriptors."""
SWITCHES = [
    pytest.param("software", [], id="software"),
    pytest.param(
        "bmv2", ["--epochs", "1"], id="bmv2", marks=pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
    ),
]


@pytest.mark.root
@pytest.mark.parametrize(("switch", "arguments"), SWITCHES)
def test_same_result_as_gloo_and_sums_made_by_the_switch(switch: str, arguments: list[str], tmp_path: Path) -> None:
    try:
        torch_python()
    except DemoError as error:
        pytest.skip(str(error))
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "bmv2", "--switch", switch, "--result", str(result), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "hack")}
    child = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said, _ = child.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        child.terminate()  # it ends all that it has started
        said, _ = child.communicate(timeout=60)
    assert child.returncode == 0, said
    got: dict[str, Any] = json.loads(result.read_text())
    assert abs(got["accuracy"] - got["gloo_accuracy"]) <= 0.005
    assert 0 < got["error_over_bound"] <= 1
    assert got["sidecar"]["mode"] == "Reserved"
    steps = got["epochs"] * 12
    assert got["gradient_packets"] >= 2 * PACKETS_A_STEP * steps
    assert got["summed_share"] > 0.95
    # What else reached the switch are resends, which a busy machine makes.
    assert got["switch_share"] > 0.5
    assert got["counters"]["completed"] > 0.9 * PACKETS_A_STEP * steps
    if switch == "software":
        assert got["accuracy"] > 0.95


def test_a_machine_without_bmv2_is_told_what_to_do(tmp_path: Path) -> None:
    if Path("/usr/bin/simple_switch_grpc").exists():
        pytest.skip("bmv2 is installed in /usr/bin")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "hack"),
        "P4_BMV2": "",
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    }
    command = [sys.executable, "-m", "bmv2", "--result", str(tmp_path / "result.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert ("root" if os.geteuid() != 0 else "P4_BMV2") in done.stderr
