# SPDX-License-Identifier: Apache-2.0
"""The digits example: over ATP it gets what it gets over gloo, and each sum is within its bound."""

import json
from pathlib import Path
from typing import Any

from atp_harness import Job
from torch_ranks import ROOT, Child, Ranks

DIGITS = {"DIGITS": str(ROOT / "examples" / "digits" / "train.py")}


def lines(child: Child) -> list[dict[str, Any]]:
    child.value(280)
    return [json.loads(line) for line in child.output().splitlines() if line.startswith("{")]


def test_same_accuracy_as_gloo_and_exact_sums(tmp_path: Path, ranks: Ranks) -> None:
    with Job(tmp_path / "job", 4) as job:
        over_atp = lines(ranks(job, "digits", DIGITS, arguments=["--check-sum"])[0])
    over_gloo = lines(ranks(None, "digits", DIGITS, count=4, arguments=["--backend", "gloo"])[0])
    atp, gloo = over_atp[-1], over_gloo[-1]
    assert abs(atp["accuracy"] - gloo["accuracy"]) <= 0.005
    assert atp["accuracy"] > 0.95
    assert 0 < atp["error_over_bound"] <= 1
    assert atp["checked_elements"] == 38282 * 12 * 15
    assert atp["host_summed_packets"] > 4 * atp["epochs"] * 12 * (38282 // 62)
    assert [line["epoch"] for line in over_atp[:-1]] == list(range(1, 16))
    assert over_atp[-2]["loss"] < over_atp[0]["loss"] / 10
