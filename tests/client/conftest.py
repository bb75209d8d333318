# SPDX-License-Identifier: Apache-2.0
"""Ranks of a job, in torch of both ends and of the middle of the supported range."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "sidecar"):
    sys.path.insert(0, str(folder))

from atp_harness import Job  # noqa: E402
from torch_ranks import Child, Ranks, Torch, middle_python, new_python, old_python, rendezvous_port  # noqa: E402

PYTHONS = {"oldest": old_python, "middle": middle_python, "newest": new_python}


@pytest.fixture(scope="session", params=list(PYTHONS))
def torch_process(request: pytest.FixtureRequest) -> Iterator[Torch]:
    made = Torch(PYTHONS[request.param]())
    yield made
    made.close()


@pytest.fixture
def ranks(torch_process: Torch, tmp_path: Path) -> Iterator[Ranks]:
    """Starts a scenario in every rank of a job: ranks(job, function, environment={}, **arguments)."""
    before = len(torch_process.children)

    def run(
        job: Job | None, function: str, environment: dict[str, str] | None = None, count: int = 0, **arguments: Any
    ) -> list[Child]:
        port = rendezvous_port()
        size = len(job.workers) if job is not None else count
        shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        children = []
        for rank in range(size):
            own = {"RANK": str(rank)}
            if job is not None:
                own["ATP_SOCKET"] = str(job.workers[rank].socket)
            own.update(environment or {})
            children.append(torch_process.start(tmp_path, function, {**shared, **own}, **arguments))
        return children

    yield run
    for child in torch_process.children[before:]:
        child.kill(signal.SIGCONT)
        child.kill()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Job]:
    """The sidecars of a job of two workers."""
    with Job(tmp_path / "job", 2) as job:
        yield job


@pytest.fixture(scope="session")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """The same for many tests in turn: processes come and go, and the epoch goes on."""
    with Job(tmp_path_factory.mktemp("standing") / "job", 2, scale="Auto") as job:
        yield job


@pytest.fixture(scope="session")
def standing_three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """As `standing`, with three workers."""
    with Job(tmp_path_factory.mktemp("standing") / "job", 3, scale="Auto") as job:
        yield job
