# SPDX-License-Identifier: Apache-2.0
"""The client over real sidecars and the native transport, in processes, with both ends of the range of torch."""

import signal
import time
from pathlib import Path

import pytest
from atp_harness import Job
from torch_ranks import Ranks, Torch


def test_dtypes_kinds_and_shapes(pair: Job, ranks: Ranks) -> None:
    for child in ranks(pair, "dtypes"):
        worst = child.value()
        assert worst["int32"] == 0.0
        assert 0 < worst["float32"] <= 1


def test_not_finite_and_out_of_range(pair: Job, ranks: Ranks) -> None:
    for child in ranks(pair, "not_finite"):
        child.value()


def test_many_in_flight_and_larger_than_the_shared_file(pair: Job, ranks: Ranks) -> None:
    for child in ranks(pair, "in_flight"):
        sizes = child.value()
        assert sizes["before"] < sizes["after"] <= 32 << 20


def test_a_small_shared_file_is_enough(pair: Job, ranks: Ranks) -> None:
    for child in ranks(pair, "in_flight", {"ATP_SHM_BYTES": str(5 << 20)}):
        assert child.value()["after"] <= 5 << 20


def test_other_collectives(tmp_path: Path, ranks: Ranks) -> None:
    with Job(tmp_path / "job", 3) as job:
        for child in ranks(job, "other_collectives"):
            child.value()


def test_one_worker(tmp_path: Path, ranks: Ranks) -> None:
    with Job(tmp_path / "job", 1) as job:
        (child,) = ranks(job, "dtypes")
        child.value()


@pytest.mark.parametrize("scale", ["Auto", 1e8])
def test_hook_and_backend_give_the_same_bits(tmp_path: Path, ranks: Ranks, scale: str | float) -> None:
    """Where DDP's division before the sum is exact: n is a power of two, and the scale follows the magnitude."""
    fixed = scale != "Auto"
    with Job(tmp_path / "job", 2, scale=scale) as job:
        found = [
            child.value() for hook in (False, True) for child in ranks(job, "gradients", hook=hook, fixed_scale=fixed)
        ]
    for other in found[1:]:
        assert other["mean"] == found[0]["mean"]
        if not fixed:
            assert other == found[0]


@pytest.mark.parametrize("hook", [False, True], ids=["backend", "hook"])
@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [("plain", 1e-6), ("unused", 1e-6), ("view", 1e-6), ("accumulate", 1e-6), ("bfloat16", 0.02), ("float64", 1e-12)],
)
def test_ddp(pair: Job, ranks: Ranks, torch_process: Torch, kind: str, hook: bool, tolerance: float) -> None:
    if kind == "bfloat16" and hook and torch_process.version.startswith("1."):
        pytest.skip("gloo of torch 1.13 cannot send bfloat16 weights, so DDP cannot start with it")
    for child in ranks(pair, "ddp", kind=kind, hook=hook):
        assert child.value() <= tolerance


def test_no_sidecar(ranks: Ranks, tmp_path: Path) -> None:
    for environment in ({}, {"ATP_SOCKET": str(tmp_path / "none.sock")}):
        begin = time.monotonic()
        (child,) = ranks(None, "only_init", environment, count=1)
        kind, text = child.error()
        assert kind == "NoSidecarError"
        assert "label atp.dev/job" in text
        assert "set ATP_SOCKET" in text
        assert time.monotonic() - begin < 60


def test_gate_that_stays_closed(tmp_path: Path, ranks: Ranks) -> None:
    with Job(tmp_path / "job", 1, gate=False) as job:
        (child,) = ranks(job, "only_init", {"ATP_CONNECT_TIMEOUT": "3"})
        kind, text = child.error()
        assert kind == "GateTimeoutError"
        assert "within 3 s (ATP_CONNECT_TIMEOUT)" in text
        assert "annotation atp.dev/assignment is empty" in text
        assert "ATP: waiting to start: the operator has not assigned" in child.output()


def test_gate_that_opens_late(tmp_path: Path, ranks: Ranks) -> None:
    with Job(tmp_path / "job", 2, gate=False) as job:
        children = ranks(job, "only_init")
        for child in children:
            child.says("waiting to start")
        job.assign_all()
        assert [child.value() for child in children] == [0, 1]


def test_wrong_number_of_ranks(pair: Job, ranks: Ranks) -> None:
    (child,) = ranks(None, "only_init", {"ATP_SOCKET": str(pair.workers[0].socket)}, count=1)
    kind, text = child.error()
    assert kind == "UsageError"
    assert "the process group has 1 ranks, but job team-a/digits has 2 workers" in text


def test_hook_with_wrong_number_of_ranks(pair: Job, ranks: Ranks) -> None:
    environment = {"ATP_SOCKET": str(pair.workers[0].socket)}
    (child,) = ranks(None, "hook_with_wrong_group", environment, count=1)
    assert "averages over one process per worker pod" in child.error()[1]


def test_shapes_that_differ(pair: Job, ranks: Ranks) -> None:
    for rank, child in enumerate(ranks(pair, "mismatch")):
        text = child.value()
        assert f"rank {1 - rank} has {101 - rank} float32 elements, this rank ({rank}) has {100 + rank}" in text
        assert "every rank must call the same collectives" in text


def test_peer_killed(pair: Job, ranks: Ranks) -> None:
    children = ranks(pair, "wait_for_peer")
    children[0].says("submitted")
    children[1].says("ready")
    children[1].kill()
    kind, text = children[0].error(60)
    assert kind == "PeerError"
    assert "rank 1" in text
    assert "kubectl get pods" in text


def test_peer_gone_under_ddp(pair: Job, ranks: Ranks) -> None:
    children = ranks(pair, "ddp_with_peer_that_leaves")
    children[1].says("ready")
    children[1].kill()
    _, text = children[0].error(60)
    assert "ATP PeerGone" in text
    assert "rank 1 has left the process group" in text


def test_sidecar_killed(tmp_path: Path, ranks: Ranks) -> None:
    with Job(tmp_path / "job", 2, stallTimeoutSeconds=60) as job:
        children = ranks(job, "wait_for_peer")
        children[0].says("submitted")
        begin = time.monotonic()
        job.workers[0].kill()
        kind, text = children[0].error(30)
        assert kind == "SidecarLostError"
        assert "it was killed or restarted" in text
        assert time.monotonic() - begin < 20


def test_sidecar_frozen(tmp_path: Path, ranks: Ranks) -> None:
    with Job(tmp_path / "job", 2, stallTimeoutSeconds=60) as job:
        children = ranks(job, "wait_for_peer", {"ATP_SIDECAR_TIMEOUT": "3"})
        children[0].says("submitted")
        job.workers[0].signal(signal.SIGSTOP)
        kind, text = children[0].error(60)
        assert kind == "SidecarLostError"
        assert "has not answered for 3 s" in text


def test_a_slow_peer_is_not_a_lost_sidecar(tmp_path: Path, ranks: Ranks) -> None:
    with Job(tmp_path / "job", 2, stallTimeoutSeconds=2) as job:
        children = ranks(job, "wait_for_peer", {"ATP_SIDECAR_TIMEOUT": "3"}, seconds=12.0)
        kind, text = children[0].error(90)
        assert kind == "OperationTimeoutError", text


def test_timeout_of_the_process_group(tmp_path: Path, ranks: Ranks) -> None:
    with Job(tmp_path / "job", 2, stallTimeoutSeconds=120) as job:
        children = ranks(job, "wait_for_peer", seconds=5.0)
        kind, text = children[0].error(90)
        assert kind == "OperationTimeoutError"
        assert "did not finish within its timeout" in text


def test_new_epoch_and_again(pair: Job, ranks: Ranks) -> None:
    children = ranks(pair, "epoch_then_again")
    for child in children:
        child.says("ready")
    pair.assign_all(epoch=2, jobId=9)
    assert [child.value() for child in children] == [2, 2]
    assert any("EpochError" in child.output() for child in children)
