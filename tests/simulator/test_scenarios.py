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


def test_losses_cost_little(scenario: Scenario) -> None:
    figures = scenario("loss")
    atp, switchml = figures["atp_relative_goodput"], figures["switchml_relative_goodput"]
    assert atp["0.1"] >= 0.98
    assert atp["1"] > 0.5
    assert all(atp[percent] > switchml[percent] for percent in ("0.001", "0.01", "0.1", "1"))


def test_shared_aggregators_serve_more_than_reserved_ones(scenario: Scenario) -> None:
    assert scenario("sharing")["dynamic_over_static"] > 1.3


def test_a_floor_holds_what_it_promises_and_pays(scenario: Scenario) -> None:
    figures = scenario("floor")
    alone = figures["alone"]["0"]["goodput"]
    for attack in ("attacked", "attacked_tenfold"):
        without = figures[attack]["0"]
        assert without["aggregated"] < 0.01 and without["goodput"] < 0.2 * alone
        for size in ("64", "128", "256"):
            assert figures[attack][size]["aggregated"] >= figures[attack][size]["promised"]
            assert figures[attack][size]["goodput"] > 0.5 * alone
            assert figures["alone"][size]["goodput"] > 0.99 * alone


def test_a_slow_switch_that_marks_nothing_is_not_flooded(scenario: Scenario) -> None:
    """Drops and late packets at a queue that outlasts many smallest round trips must not start resending for good."""
    figures = scenario("slow")
    for order in ("ordered", "reordered"):
        assert figures[f"{order}_sent_again"] < 0.06
        assert figures[f"{order}_goodput"] > 1.85


def test_congestion_control_keeps_jobs_going_on_half_of_their_aggregators(scenario: Scenario) -> None:
    figures = scenario("congestion")
    assert figures["aggregators"] == figures["peak_aggregators"] // 2
    assert figures["with"] > 2 * figures["without"]
    assert min(low for low, _ in figures["with_range"]) > max(high for _, high in figures["without_range"])
