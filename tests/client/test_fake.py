# SPDX-License-Identifier: Apache-2.0
"""The client against sidecars that do what real ones do not do at will (fake_sidecar.py)."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_sidecar import FakeSidecars
from torch_ranks import Child, Ranks


def values(children: list[Child]) -> list:
    return [child.value() for child in children]


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeSidecars]:
    with FakeSidecars(tmp_path / "fake", 2) as made:
        yield made


@pytest.mark.parametrize("elements", [1, 300_000])
def test_last_words_win_over_a_broken_pipe(fake: FakeSidecars, ranks: Ranks, elements: int) -> None:
    children = ranks(fake, "last_words", elements=elements)
    for child in children:
        child.says("ready")
    fake.hold = True
    time.sleep(0.3)
    for rank in range(2):
        words = {"type": "fatal", "code": "Epoch", "message": "the operator has started epoch 2"}
        fake.say(rank, words, then_hang_up=True)
    for ends in values(children):
        assert set(ends) <= {"EpochError", "done"}
        assert "EpochError" in ends


def test_a_sidecar_that_says_nothing_is_lost(fake: FakeSidecars, ranks: Ranks) -> None:
    children = ranks(fake, "last_words", elements=1)
    for child in children:
        child.says("ready")
    for rank in range(2):
        fake.say(rank, {"type": "pong"}, then_hang_up=True)
    for ends in values(children):
        assert set(ends) <= {"SidecarLostError", "done"}
        assert "SidecarLostError" in ends


def test_bytes_that_are_no_frames_end_the_session(fake: FakeSidecars, ranks: Ranks) -> None:
    children = ranks(fake, "last_words", elements=1)
    for child in children:
        child.says("ready")
    with fake.lock:
        for client in list(fake._clients):
            client.connection.sendall(b"HTTP/1.1 400 Bad Request")
    for ends in values(children):
        assert "SidecarLostError" in ends


def test_the_garbage_collector_may_come_anywhere(fake: FakeSidecars, ranks: Ranks) -> None:
    values(ranks(fake, "collected_while_locked"))
    assert [each["type"] for each in fake.heard].count("leave") >= 4


def test_a_warning_is_logged_once(fake: FakeSidecars, ranks: Ranks) -> None:
    children = ranks(fake, "warned")
    for child in children:
        child.says("ready")
    for _ in range(3):
        fake.say(0, {"type": "warning", "text": "values round to zero at scale 1e8"})
    values(children)
    assert children[0].output().count("ATP: values round to zero at scale 1e8") == 1


@pytest.mark.parametrize("may_grow", [True, False])
def test_more_memory_is_asked_for_and_not_needed(tmp_path: Path, ranks: Ranks, may_grow: bool) -> None:
    with FakeSidecars(tmp_path / "fake", 2, 2 << 20, may_grow) as fake:
        children = ranks(fake, "large_ones", elements=1_000_000, tensors=3)
        for used in values(children):
            assert used == 2 << 20 if not may_grow else 2 << 20 < used <= 32 << 20
        assert ("shared memory stays at" in children[0].output()) == (not may_grow)


@pytest.mark.parametrize(
    ("other", "kind", "words"),
    [
        ({"job": "team-b/else"}, "UsageError", "runs in a pod of job team-a/fake, rank 1 in one of team-b/else"),
        ({"epoch": 2}, "EpochError", "has joined epoch 1 of job team-a/fake, rank 1 epoch 2"),
    ],
)
def test_ranks_of_different_jobs_or_epochs_are_no_group(
    tmp_path: Path, ranks: Ranks, other: dict, kind: str, words: str
) -> None:
    with FakeSidecars(tmp_path / "one", 2) as one, FakeSidecars(tmp_path / "two", 2) as two:
        for name, value in other.items():
            setattr(two, name, value)
        mixed = SimpleNamespace(workers=[one.workers[0], two.workers[1]])
        for child in ranks(mixed, "only_init"):
            assert child.error()[0] == kind
            assert words in child.error()[1]


def test_all_ranks_fail_at_once_when_one_has_no_sidecar(fake: FakeSidecars, tmp_path: Path, ranks: Ranks) -> None:
    mixed = SimpleNamespace(workers=[fake.workers[0], SimpleNamespace(socket=tmp_path / "none.sock")])
    begin = time.monotonic()
    first, second = ranks(mixed, "only_init")
    assert second.error()[0] == "NoSidecarError"
    kind, text = first.error()
    assert kind == "PeerError"
    assert "rank 1 of the process group cannot use ATP: no ATP sidecar at" in text
    assert time.monotonic() - begin < 60
