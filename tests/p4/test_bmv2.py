# SPDX-License-Identifier: Apache-2.0
"""The conformance vectors on bmv2: real packets on veth pairs, tables over P4Runtime."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from bmv2_switch import Bmv2Switch, reason_not_to_run
from conformance.test_vectors import ALL, STALE_NS, START_MS, Run, prepare
from test_tables import reason_to_skip

MISSING = reason_not_to_run()
pytestmark = [pytest.mark.root, pytest.mark.skipif(MISSING is not None, reason=MISSING or "")]
STALE_MS = STALE_NS // 1_000_000


class PacketsAndCounters(Run):
    """A vector without its checks of registers, which P4Runtime on bmv2 cannot read."""

    def check_state(self, step: dict[str, Any]) -> None:
        super().check_state({k: v for k, v in step.items() if k != "aggregators"})


def times(vector: dict[str, Any]) -> list[int]:
    return [START_MS, *(step["at_ms"] for step in vector["steps"] if "at_ms" in step)]


def runnable() -> Iterator[Any]:
    for name, setup, vector in ALL:
        reason = reason_to_skip(setup, vector)
        at = times(vector)
        if reason is None and any(STALE_MS / 2 < b - a <= 2 * STALE_MS for a in at for b in at):
            reason = "needs a clock that the test sets: its steps are a few milliseconds from T"
        if reason is None and any(b - a > 10_000 for a, b in pairwise(at)):
            reason = "waits too long on a real clock"
        marks = [pytest.mark.skip(reason=reason)] if reason else []
        yield pytest.param(setup, vector, id=name, marks=marks)


@pytest.mark.parametrize(("setup", "vector"), list(runnable()))
def test_vector(setup: dict[str, Any], vector: dict[str, Any]) -> None:
    switch = Bmv2Switch(setup["aggregators"], setup["values"], STALE_NS)
    try:
        prepare(switch, setup)
        switch.set_clock(START_MS * 1_000_000)
        run = PacketsAndCounters(switch, setup, vector)
        for number, step in enumerate(vector["steps"]):
            try:
                run.step(step)
            except AssertionError as error:
                raise AssertionError(f"step {number}: {error}") from error
    finally:
        switch.close()
