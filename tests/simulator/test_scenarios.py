# SPDX-License-Identifier: Apache-2.0
"""The figures' direction and rough size; the exact numbers are in docs/simulator.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Scenario = Callable[..., dict[str, Any]]


def test_two_levels_send_the_ps_one_packet_for_all_racks(scenario: Scenario) -> None:
    figures = scenario("two-level")
    assert 0.65 < figures["ps_traffic_reduction"] < 0.68
    assert 0.85 < figures["ps_traffic_reduction_by_racks"]["8"] < 0.9


def test_hashed_indexes_beat_linear_ones(scenario: Scenario) -> None:
    figures = scenario("hash")
    assert figures["hash_over_linear"] > 1.2
    assert figures["hash_collisions"] < figures["linear_collisions"]


def test_equal_jobs_get_equal_shares(scenario: Scenario) -> None:
    figures = scenario("fairness")
    assert figures["two_jobs_gap"] < 0.05
    assert figures["jain"] > 0.8
