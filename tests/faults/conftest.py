# SPDX-License-Identifier: Apache-2.0
"""Ranks in torch for the faults that only a training script shows."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
for folder in (TESTS / "client", TESTS / "sidecar"):
    sys.path.insert(0, str(folder))

from atp_harness import Job as Sidecars  # noqa: E402
from torch_ranks import Child, Torch, old_python  # noqa: E402


@pytest.fixture(scope="module")
def torch_process() -> Iterator[Torch]:
    """Debian's torch 1.13, which starts quickly."""
    made = Torch(old_python())
    yield made
    made.close()


@pytest.fixture
def scenario(torch_process: Torch, tmp_path: Path) -> Iterator[Any]:
    """Runs a function of tests/client/scenarios.py in both ranks of a job of two."""
    children: list[Child] = []
    with Sidecars(tmp_path / "job", 2, stallTimeoutSeconds=30) as job:

        def run(function: str, **arguments: Any) -> list[Any]:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = str(free.getsockname()[1])
            mine = []
            for rank, worker in enumerate(job.workers):
                environment = {
                    "WORLD_SIZE": "2",
                    "RANK": str(rank),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "ATP_SOCKET": str(worker.socket),
                }
                mine.append(torch_process.start(tmp_path, function, environment, **arguments))
            children.extend(mine)
            return [child.value(60) for child in mine]

        yield run
        for child in children:
            child.kill(signal.SIGKILL)
