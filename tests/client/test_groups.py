# SPDX-License-Identifier: Apache-2.0
"""Process groups over real sidecars: orders that differ between ranks, mismatches, time-outs, groups that go."""

from pathlib import Path

import pytest
from atp_harness import Job
from torch_ranks import Child, Ranks


def values(children: list[Child]) -> list:
    return [child.value() for child in children]


@pytest.mark.parametrize("threads", [False, True], ids=["one thread", "a thread a group"])
@pytest.mark.parametrize("seed", range(2))
def test_groups_interleave_as_each_rank_likes(standing_three: Job, ranks: Ranks, seed: int, threads: bool) -> None:
    values(ranks(standing_three, "interleaved", groups=5, calls=12, largest=400_000, seed=seed, threads=threads))


def test_groups_do_not_wait_for_each_others_memory(standing: Job, ranks: Ranks) -> None:
    """Each rank fills the least shared memory there can be with other groups than the other rank does."""
    environment = {"ATP_SHM_BYTES": str(2 << 20)}
    used = values(ranks(standing, "groups_against_each_other", environment, groups=9, elements=1_500_000))
    assert max(used) <= 32 << 20


def test_many_groups_in_little_memory(standing: Job, ranks: Ranks) -> None:
    environment = {"ATP_SHM_BYTES": str(2 << 20)}
    values(ranks(standing, "interleaved", environment, groups=12, calls=4, largest=1_500_000, seed=9))


def test_two_threads_share_a_group(standing: Job, ranks: Ranks) -> None:
    values(ranks(standing, "one_group_from_two_threads"))


def test_groups_come_and_go(standing: Job, ranks: Ranks) -> None:
    values(ranks(standing, "groups_come_and_go", rounds=12))


@pytest.mark.parametrize("seed", range(2))
def test_mismatches_are_seen_by_all_and_passed_over(standing: Job, ranks: Ranks, seed: int) -> None:
    texts = values(ranks(standing, "mismatches", seed=seed, rounds=15))
    assert len(texts[0]) == len(texts[1]) > 5
    for rank, seen in enumerate(texts):
        assert all(f"rank {1 - rank} has " in text and f"this rank ({rank}) has " in text for text in seen)
        assert all("every rank must call the same collectives" in text for text in seen)


def test_two_small_ones_for_a_large_one(standing: Job, ranks: Ranks) -> None:
    """The tensors of the ranks share their first parts, and differ as a whole."""
    for texts in values(ranks(standing, "a_larger_one_or_two")):
        assert len(texts) == 1
        assert "786432" in texts[0]
        assert "1048576" in texts[0]


def test_a_late_rank_is_no_stall(tmp_path: Path, ranks: Ranks) -> None:
    """Waiting for a rank that lives ends with the time-out of the process group alone."""
    with Job(tmp_path / "job", 2, stallTimeoutSeconds=2) as job:
        assert min(values(ranks(job, "late", {"ATP_SIDECAR_TIMEOUT": "3"}, seconds=9.0, timeout=60.0))) > 8


@pytest.mark.parametrize("how", ["init", "set", "wait"])
def test_a_time_out_is_that_of_the_group(standing: Job, ranks: Ranks, how: str) -> None:
    """It breaks the group on all ranks, the late one too, and nothing else."""
    early, late = values(ranks(standing, "timed_out", how=how, seconds=3.0))
    for result in (early, late):
        assert result["first"][0] == "OperationTimeoutError", result
        assert result["behind"] in ("OperationTimeoutError", "UnboundLocalError")
        assert result["later"][0] == "OperationTimeoutError"
        assert "this process group cannot be used any more" in result["later"][1]
        assert "rank 0" in result["later"][1] or "did not finish within its timeout" in result["later"][1]
    assert 2 < early["seconds"] < 7
    assert "rank 0 gave up" in late["first"][1]


def test_a_process_that_dies_breaks_its_groups(tmp_path: Path, ranks: Ranks) -> None:
    with Job(tmp_path / "job", 2, stallTimeoutSeconds=5) as job:
        children = ranks(job, "killed_in_one_group")
        for child in children:
            child.says("ready")
        children[1].kill()
        kind, text = children[0].error(60)
        assert kind == "PeerError"
        assert "rank 1" in text
        # The epoch goes on: processes that start anew may use it.
        for value in values(ranks(job, "only_init")):
            assert value in (0, 1)
