# SPDX-License-Identifier: Apache-2.0
"""The sidecars that the ranks of a test use: one job for each world size, kept from test to test."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from sidecar.atp_harness import Job

# A test that kills a rank must be over before torch's own time-outs.
STALL_SECONDS = 10


def _end(job: Job) -> None:
    """Ends the sidecars of a job; one that does not in time, on a busy machine, is killed."""
    for sidecar in job.workers + job.servers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            sidecar.stop()


class Jobs:
    """Jobs by their number of workers.

    Args:
        directory: for their files.
        fresh: whether each test gets jobs of its own.
        scale: of the jobs.
    """

    def __init__(self, directory: Path, fresh: bool, scale: str | float) -> None:
        self._directory = directory
        self._fresh = fresh
        self._scale = scale
        self._count = 0
        self._jobs: dict[int, Job] = {}

    def start(self, sizes: Iterable[int]) -> None:
        """Makes sure that there are jobs of just these sizes."""
        for size in set(self._jobs) - set(sizes):
            _end(self._jobs.pop(size))
        for size in set(sizes) - set(self._jobs):
            self._jobs[size] = self._start(size)

    def _start(self, size: int) -> Job:
        self._count += 1
        folder = self._directory / f"job-{self._count}"
        return Job(folder, size, stallTimeoutSeconds=STALL_SECONDS, scale=self._scale)

    def sockets(self) -> dict[str, list[str]]:
        """The sidecars' sockets by world size and rank."""
        return {str(size): [str(worker.socket) for worker in job.workers] for size, job in self._jobs.items()}

    def dead(self) -> list[str]:
        """Sidecars that have ended; a test may not do that to them. Their jobs are started anew."""
        dead = []
        for size, job in self._jobs.items():
            ended = [
                each for each in job.workers + job.servers if each.process is None or each.process.poll() is not None
            ]
            dead += [f"{each.directory.name} of {size}: {each.log_path.read_text()[-500:]}" for each in ended]
            if ended or self._fresh:
                _end(job)
                self._jobs[size] = self._start(size)
        return dead

    def stop(self) -> None:
        """Ends all of them and removes their files."""
        for job in self._jobs.values():
            _end(job)
        shutil.rmtree(self._directory, ignore_errors=True)
