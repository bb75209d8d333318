# SPDX-License-Identifier: Apache-2.0
"""The software switch answers what bmv2 answered (``tests/conformance/recorded``), where bmv2 is not installed too."""

from __future__ import annotations

from typing import Any

import pytest
from bmv2_vectors import compared_with_bmv2, reason_to_skip
from conformance.recording import RECORDED, path_of, program_checksum, read
from conformance.switches import NativeSwitch, Switch
from conformance.test_vectors import OF_P4, STALE_NS
from two_levels import SCENARIOS, NativePair, Scenario, answers_of, path_of_scenario

RUN_BY_BMV2 = [(name, setup, vector) for name, setup, vector in OF_P4 if reason_to_skip(setup, vector) is None]
WITHOUT_ADDRESSES = [vector for vector in RUN_BY_BMV2 if "hosts" not in vector[1]]
"""What the C core can run, which sees no addresses."""


def test_every_vector_is_recorded_and_nothing_else_is() -> None:
    wanted = {path_of("bmv2", name) for name, _, _ in RUN_BY_BMV2} | {path_of_scenario(s) for s in SCENARIOS}
    assert set((RECORDED / "bmv2").rglob("*.yaml")) == wanted, "make -C p4 record, where bmv2 is installed"


def test_recordings_are_of_the_committed_program() -> None:
    program = program_checksum()
    old = [p.name for p in sorted((RECORDED / "bmv2").rglob("*.yaml")) if read(p)["program_sha256"] != program]
    assert not old, f"recorded with another p4/build/atp.bmv2.json: make -C p4 record: {old}"


@pytest.mark.parametrize(("name", "setup", "vector"), [pytest.param(n, s, v, id=n) for n, s, v in WITHOUT_ADDRESSES])
def test_the_c_core_answers_what_bmv2_did(name: str, setup: dict[str, Any], vector: dict[str, Any]) -> None:
    """Every packet out, and every counter after every step. Over P4Runtime and tc: ``test_softswitch.py``."""

    def open_switch() -> Switch:
        return NativeSwitch(setup["aggregators"], setup["values"], STALE_NS)

    compared_with_bmv2(open_switch, name, setup, vector)


@pytest.mark.parametrize("scenario", [pytest.param(s, id=s.name) for s in SCENARIOS])
def test_two_software_switches_answer_what_two_bmv2_did(scenario: Scenario) -> None:
    assert answers_of(scenario, NativePair) == read(path_of_scenario(scenario))["steps"]
