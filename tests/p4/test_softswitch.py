# SPDX-License-Identifier: Apache-2.0
"""The conformance vectors on the software switch with the tables that bmv2 gets, written over P4Runtime."""

from __future__ import annotations

from typing import Any

import pytest
from conformance.test_vectors import ALL, STALE_NS, START_MS, Run, prepare
from softswitch_p4runtime import P4RuntimeTcSwitch


@pytest.mark.root
@pytest.mark.parametrize(("setup", "vector"), [pytest.param(s, v, id=n) for n, s, v in ALL])
def test_vector(setup: dict[str, Any], vector: dict[str, Any]) -> None:
    switch = P4RuntimeTcSwitch(setup["aggregators"], setup["values"], STALE_NS)
    try:
        switch.set_clock(START_MS * 1_000_000)
        prepare(switch, setup)
        run = Run(switch, setup, vector)
        for number, step in enumerate(vector["steps"]):
            try:
                run.step(step)
            except AssertionError as error:
                raise AssertionError(f"step {number}: {error}") from error
    finally:
        switch.close()
