# SPDX-License-Identifier: Apache-2.0
"""Background processes: started once, recognised by pid and start time, stopped, reported on."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from localcluster import processes
from localcluster.errors import ClusterError
from localcluster.paths import Paths
from localcluster.processes import Spec

SLEEP = Spec("sleeper", ("sleep", "300"))


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[Paths]:
    made = Paths(cache=tmp_path / "cache", state=tmp_path / "state")
    made.state.mkdir()
    yield made
    processes.stop(made, ["sleeper", "stubborn"], patience=0.5)


def test_a_running_process_is_left_alone_and_a_changed_one_is_replaced(paths: Paths) -> None:
    assert processes.ensure(paths, SLEEP) is True
    first = processes.read_record(paths, "sleeper")
    assert processes.is_alive(first)
    assert processes.ensure(paths, SLEEP) is False
    assert processes.read_record(paths, "sleeper") == first
    assert processes.ensure(paths, Spec("sleeper", ("sleep", "301"))) is True
    assert processes.read_record(paths, "sleeper") != first
    assert not processes.is_alive(first)


def test_a_pid_that_now_belongs_to_somebody_else_is_not_ours(paths: Paths) -> None:
    start = processes.start_time(os.getpid())
    assert start is not None
    mine = processes.Record(os.getpid(), start, processes.boot_id(), "")
    assert processes.is_alive(mine)
    assert not processes.is_alive(dataclasses.replace(mine, start=start + 1))
    assert not processes.is_alive(dataclasses.replace(mine, boot="another boot"))
    stale = dataclasses.replace(mine, start=start + 1)
    paths.pids.mkdir()
    (paths.pids / "sleeper.json").write_text(json.dumps(dataclasses.asdict(stale)))
    processes.stop(paths, ["sleeper"])  # would end this very test run if it trusted the pid
    assert not (paths.pids / "sleeper.json").exists()


def test_a_dead_process_is_reported_with_its_log(paths: Paths) -> None:
    processes.ensure(paths, Spec("sleeper", ("sh", "-c", "echo the reason >&2; sleep 0.05; exit 3")))
    deadline = time.monotonic() + 5
    with pytest.raises(ClusterError, match="the reason") as caught:
        while time.monotonic() < deadline:
            processes.check_alive(paths, ["sleeper"])
            time.sleep(0.02)
    assert str(processes.log_path(paths, "sleeper")) in str(caught.value)
    processes.forget_dead(paths)
    assert processes.read_record(paths, "sleeper") is None


def test_a_process_that_ignores_sigterm_is_killed(paths: Paths) -> None:
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(300)"
    processes.ensure(paths, Spec("stubborn", ("python3", "-c", script)))
    record = processes.read_record(paths, "stubborn")
    deadline = time.monotonic() + 10
    while "ready\n" not in processes.log_path(paths, "stubborn").read_text().splitlines(keepends=True):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    began = time.monotonic()
    processes.stop(paths, ["stubborn"], patience=0.2)
    assert 0.2 <= time.monotonic() - began < 5
    assert not processes.is_alive(record)


def test_a_damaged_pid_file_counts_as_none(paths: Paths) -> None:
    paths.pids.mkdir()
    (paths.pids / "sleeper.json").write_text("{")
    assert processes.read_record(paths, "sleeper") is None
