# SPDX-License-Identifier: Apache-2.0
"""Endpoints of one job on loopback addresses, in this process."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from atp_transport import ParameterServer, Worker

Array = npt.NDArray[Any]

JOB_ID = 7
SERVER = "127.0.0.100"


def free_port() -> int:
    """A UDP port that is free on all loopback addresses now."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def assignment(role: str, rank: int, workers: int, port: int, **changes: Any) -> dict[str, Any]:
    """The assignment of one endpoint; `changes` replaces fields."""
    base: dict[str, Any] = {
        "job": "test/job",
        "epoch": 1,
        "jobId": JOB_ID,
        "mode": "HostOnly",
        "role": role,
        "rank": rank,
        "valuesPerPacket": 62,
        "scale": 1e8,
        "port": port,
        "regions": [],
        "indexTableSize": 1024,
        "maxWindow": 1024,
        "stallTimeoutSeconds": 20,
        "workers": [
            {"rank": r, "address": f"127.0.0.{r + 1}", "rack": r // 32, "bit": r % 32, "edge": False}
            for r in range(workers)
        ],
        "parameterServers": [{"shard": 0, "address": SERVER}],
        "switchAddress": None,
        "somethingNew": {"unknown": "fields are ignored"},
    }
    return base | changes


class Job:
    """One parameter server and `workers` workers; a context manager."""

    def __init__(self, workers: int, **changes: Any) -> None:
        self.port = free_port()
        self.servers: list[ParameterServer] = []
        self.workers: list[Worker] = []
        self._held: list[tuple[Array, Array]] = []
        shards = len(changes.get("parameterServers", [None]))
        try:
            for shard in range(shards):
                config = assignment("parameterServer", shard, workers, self.port, **changes)
                self.servers.append(ParameterServer(json.dumps(config)))
            for rank in range(workers):
                config = assignment("worker", rank, workers, self.port, **changes)
                self.workers.append(Worker(json.dumps(config)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        for server in self.servers:
            server.close()

    def collect(self, rank: int, count: int = 1, timeout: float = 30.0) -> list[tuple[int, str | None]]:
        """Wait for `count` completions of `rank`."""
        worker = self.workers[rank]
        got: list[tuple[int, str | None]] = []
        deadline = time.monotonic() + timeout
        while len(got) < count:
            left = deadline - time.monotonic()
            assert left > 0, f"rank {rank}: {len(got)} of {count} completions in {timeout} s; {worker.metrics()}"
            if select.select([worker.fileno()], [], [], left)[0]:
                got += worker.completions()
        return got

    def settled(self, endpoint: Worker | ParameterServer) -> dict[str, Any]:
        """Metrics of an idle endpoint; they may be 20 ms old while it works."""
        before: dict[str, Any] = {}
        while (now := endpoint.metrics()) != before:
            before = now
            time.sleep(0.05)
        return now

    def all_reduce(
        self,
        tensors: Sequence[Array],
        dtype: str,
        kind: str = "sum",
        op_id: int = 1,
        in_place: bool = False,
    ) -> list[Array]:
        """Reduce one tensor of each rank; the result of each rank."""
        outs = [t if in_place else np.zeros_like(t) for t in tensors]
        for rank, (tensor, out) in enumerate(zip(tensors, outs, strict=True)):
            self.workers[rank].submit(op_id, kind, dtype, tensor.data, out.data, tensor.size)
        for rank in range(len(tensors)):
            assert self.collect(rank) == [(op_id, None)]
        return outs


def fixed_point_sum(tensors: Sequence[Array], scale: float = 1e8, divisor: float = 1.0) -> npt.NDArray[np.float64]:
    """What ATP's fixed point gives for float tensors, in float64."""
    total = sum(np.rint(t.astype(np.float64) * scale) for t in tensors)
    return np.asarray(total / scale / divisor)
