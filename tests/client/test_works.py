# SPDX-License-Identifier: Apache-2.0
"""Works, Futures, errors and unusual tensors, over real sidecars."""

import pytest
from atp_harness import Job
from torch_ranks import Child, Ranks, Torch


def values(children: list[Child]) -> list:
    return [child.value() for child in children]


def test_every_layout(standing: Job, ranks: Ranks) -> None:
    values(ranks(standing, "layouts"))


def test_means_of_every_dtype(standing_three: Job, ranks: Ranks) -> None:
    values(ranks(standing_three, "means"))


def test_works_and_futures(standing: Job, ranks: Ranks) -> None:
    values(ranks(standing, "handles"))


def test_works_that_only_cpp_holds(standing: Job, ranks: Ranks, torch_process: Torch) -> None:
    for result in values(ranks(standing, "held_by_cpp")):
        assert result["known"]
        assert result["held"] == 0 or result["held"] >= 2000
        assert result["left"] <= 4
        assert torch_process.version.startswith(("1.", "2.0", "2.1", "2.2", "2.3")) or result["held"]


def test_unused_parameters_are_found(standing: Job, ranks: Ranks) -> None:
    values(ranks(standing, "found_unused"))


@pytest.mark.parametrize("where", ["copy", "retire", "take"])
def test_no_handle_hangs_when_a_client_thread_fails(pair: Job, ranks: Ranks, where: str) -> None:
    for seen in values(ranks(pair, "error_in_a_client_thread", where=where)):
        assert set(seen) == {"failed"}


def test_an_error_of_a_callback_is_its_own(standing: Job, ranks: Ranks) -> None:
    values(ranks(standing, "error_of_a_callback"))


def test_errors_reach_whoever_waits(standing: Job, ranks: Ranks) -> None:
    for rank, found in enumerate(values(ranks(standing, "errors_everywhere"))):
        for way, text in found.items():
            assert f"rank {1 - rank} has" in text, (way, text)
        for way in ("wait", "wait with a timeout", "synchronize", "C++"):
            assert found.get(way, "MismatchError").startswith("MismatchError"), (way, found[way])


def test_the_profiler_shows_all_reduce(standing: Job, ranks: Ranks) -> None:
    for names in values(ranks(standing, "profiled")):
        assert names.count("atp:all_reduce") == 2
        assert names.count("gloo:all_reduce") == 1


def test_sums_are_precise_at_any_magnitude(standing: Job, ranks: Ranks) -> None:
    values(ranks(standing, "any_magnitude"))
