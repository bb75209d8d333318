# SPDX-License-Identifier: Apache-2.0
"""The conformance vectors on bmv2: real packets on veth pairs, tables over P4Runtime."""

from __future__ import annotations

from typing import Any

import pytest
from bmv2.process import reason_not_to_run
from bmv2_vectors import reason_to_skip, run_on_bmv2
from conformance.recording import path_of, read
from conformance.test_vectors import OF_P4
from two_levels import SCENARIOS, Bmv2Pair, Scenario, answers_of, path_of_scenario

MISSING = reason_not_to_run()
pytestmark = [pytest.mark.root, pytest.mark.skipif(MISSING is not None, reason=MISSING or "")]


@pytest.mark.parametrize(("name", "setup", "vector"), [pytest.param(n, s, v, id=n) for n, s, v in OF_P4])
def test_vector(name: str, setup: dict[str, Any], vector: dict[str, Any]) -> None:
    reason = reason_to_skip(setup, vector)
    if reason is not None:
        pytest.skip(reason)
    answered = run_on_bmv2(setup, vector)
    assert answered == read(path_of("bmv2", name))["steps"], "not what is recorded: make -C p4 record"


@pytest.mark.parametrize("scenario", [pytest.param(s, id=s.name) for s in SCENARIOS])
def test_two_levels_on_two_switches(scenario: Scenario) -> None:
    answered = answers_of(scenario, Bmv2Pair)
    assert answered == read(path_of_scenario(scenario))["steps"], "not what is recorded: make -C p4 record"
