# SPDX-License-Identifier: Apache-2.0
"""The accuracy study's claims: with Auto the relative error is the same at any magnitude, also on real sidecars."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torchenv

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "sidecar"))

from atp_harness import Job  # noqa: E402


def script(name: str) -> ModuleType:
    """A script of bench/. That folder must not be on sys.path: its `transport` would hide a package of the tests."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / "bench" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


accuracy = script("accuracy")


def errors(rows: list[dict[str, Any]], setting: str) -> dict[float, float]:
    return {row["sigma"]: row["relative_error"] for row in rows if row["part"] == "sums" and row["setting"] == setting}


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 32])
def test_arithmetic(ranks: int) -> None:
    rows = accuracy.emulate(ranks, 1 << 14)
    auto, fixed = errors(rows, "auto"), errors(rows, "fixed")
    # Half an ulp of float32, and the rounding of each rank at n * m * 2^-29 or less, m within 6 sigma of these.
    assert max(auto.values()) < 2**-25 + 6 * ranks * 2**-29
    assert fixed[1e-6] == pytest.approx(2.9e-3, rel=0.1) and fixed[1e-9] == pytest.approx(1.0, rel=0.2)


@pytest.mark.parametrize(("largest", "ranks"), [(1.0, 1), (0.75, 2), (3e-9, 3), (1e30, 4), (2.0**-126, 128)])
def test_scale_fits_and_gives_no_bit_away(largest: float, ranks: int) -> None:
    scale = accuracy.auto_scale(largest, ranks)
    assert ranks * largest * scale <= 2**31 < 8 * ranks * largest * scale


def test_on_real_sidecars(tmp_path: Path) -> None:
    try:
        python = str(torchenv.interpreter("newest"))
    except torchenv.TorchError as error:
        pytest.skip(str(error))
    with Job(tmp_path, 2, scale="Auto", stallTimeoutSeconds=60) as job:
        rows = accuracy.start(python, "atp", "sums", [worker.socket for worker in job.workers])
    found = errors([{"setting": "auto", **row} for row in rows], "auto")
    assert len(found) == 7 and max(found.values()) < 6e-8
    assert all(row["to_zero"] == 0 and row["values_out_of_range"] == 0 for row in rows if row["part"] == "sums")
    mixed = {row["small"]: row["relative_error"] for row in rows if row["part"] == "mixed"}
    assert mixed[1e-2] < 1e-6, "what is small beside something large keeps an absolute error"
