# SPDX-License-Identifier: Apache-2.0
"""Sidecars for tests: real processes over the native transport."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_jobs = itertools.count(1)


def _unused(address: str, port: int = 9095) -> bool:
    """Whether nobody listens there. Processes share a part of the addresses if their IDs do not differ enough."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True


def loopback_addresses(count: int) -> list[str]:
    """Addresses of 127.0.0.0/8 that no other test and no other test process uses."""
    high = os.getpid() % 250 + 2
    while True:
        job = next(_jobs)
        addresses = [f"127.{high}.{job % 250 + 1}.{number + 1}" for number in range(count)]
        if all(_unused(address) for address in addresses):
            return addresses


def assignment(
    addresses: list[str], role: str = "worker", rank: int = 0, servers: int = 1, **changes: Any
) -> dict[str, Any]:
    """An assignment; the last `servers` addresses are the parameter server's shards."""
    workers, shards = addresses[:-servers], addresses[-servers:]
    document = {
        "apiVersion": "atp.dev/v1alpha1",
        "job": "team-a/digits",
        "uid": "11111111-2222-3333-4444-555555555555",
        "epoch": 1,
        "revision": 1,
        "jobId": 3,
        "mode": "HostOnly",
        "role": role,
        "rank": rank,
        "valuesPerPacket": 62,
        "scale": 1e8,
        "port": 10800,
        "regions": [],
        "indexTableSize": 1024,
        "maxWindow": 1024,
        "stallTimeoutSeconds": 3,
        "workers": [
            {"rank": number, "address": address, "rack": 0, "bit": number, "edge": False}
            for number, address in enumerate(workers)
        ],
        "parameterServers": [{"shard": number, "address": address} for number, address in enumerate(shards)],
        "switchAddress": None,
    }
    return {**document, **changes}


def eventually(condition: Callable[[], Any], seconds: float = 60.0, what: str = "condition") -> Any:
    """Waits until the condition is true and returns its value.

    Raises:
        AssertionError: it did not become true.
    """
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= end:
            raise AssertionError(f"{what} did not become true within {seconds} s")
        time.sleep(0.05)


def fetch(sidecar: SidecarProcess, path: str) -> tuple[int, str]:
    """GET from a sidecar's HTTP server: (status, body)."""
    try:
        url = f"http://{sidecar.host}:{sidecar.port}{path}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class SidecarProcess:
    """`atp-sidecar run` as a process of its own."""

    def __init__(
        self,
        directory: Path,
        role: str,
        document: dict[str, Any] | None,
        host: str = "127.0.0.1",
        metrics_port: int = 0,
        **environment: str,
    ) -> None:
        self.host = host
        self._metrics_port = metrics_port
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.assignment_path = directory / "assignment.json"
        self.socket = directory / "run" / "atp.sock"
        self.log_path = directory / "sidecar.log"
        self._environment = {
            **os.environ,
            "ATP_ROLE": role,
            "POD_NAME": directory.name,
            "POD_NAMESPACE": "team-a",
        }
        self._environment.pop("POD_IP", None)
        self._environment.update(environment)
        if document is not None:
            self.assign(document)
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Starts the process."""
        command = [sys.executable, "-m", "atp_sidecar", "run", "--assignment", str(self.assignment_path)]
        command += ["--socket", str(self.socket), "--metrics-port", str(self._metrics_port)]
        command += ["--metrics-host", self.host]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(command, env=self._environment, stdout=log, stderr=subprocess.STDOUT)

    @property
    def pid(self) -> int:
        """Process ID."""
        assert self.process is not None
        return self.process.pid

    def assign(self, document: dict[str, Any] | str) -> None:
        """Writes the assignment as the kubelet does: all at once."""
        text = document if isinstance(document, str) else json.dumps(document)
        temporary = self.assignment_path.with_suffix(".new")
        temporary.write_text(text)
        temporary.replace(self.assignment_path)

    def events(self) -> list[dict[str, Any]]:
        """What it has logged."""
        lines = []
        for line in self.log_path.read_text().splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
        return lines

    def event(self, name: str, seconds: float = 60.0) -> dict[str, Any]:
        """Waits for an event of this name and returns the last one."""

        def find() -> dict[str, Any] | None:
            found = [event for event in self.events() if event["event"] == name]
            return found[-1] if found else None

        try:
            return dict(eventually(find, seconds, f"log event {name}"))
        except AssertionError as error:
            raise AssertionError(f"{error}; the log is:\n{self.log_path.read_text()}") from None

    @property
    def port(self) -> int:
        """Port of its HTTP server."""
        return int(self.event("started")["metricsPort"])

    def signal(self, number: int) -> None:
        """Sends a signal to the process."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it at once."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        """Ends it with SIGTERM; returns its status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
            raise


class Job:
    """The sidecars of a job, workers and parameter servers, as processes on loopback addresses."""

    def __init__(self, directory: Path, workers: int, servers: int = 1, gate: bool = True, **changes: Any) -> None:
        self.addresses = loopback_addresses(workers + servers)
        self.servers_count = servers
        self.changes = changes
        self.workers = [
            SidecarProcess(
                directory / f"worker-{rank}",
                "worker",
                self.document("worker", rank) if gate else None,
                self.addresses[rank],
                9095,
            )
            for rank in range(workers)
        ]
        self.servers = [
            SidecarProcess(
                directory / f"ps-{rank}",
                "parameterServer",
                self.document("parameterServer", rank) if gate else None,
                self.addresses[workers + rank],
                9095,
            )
            for rank in range(servers)
        ]
        for sidecar in self.workers + self.servers:
            sidecar.event("gate-opened" if gate else "started")

    def document(self, role: str, rank: int, **changes: Any) -> dict[str, Any]:
        """The assignment of one member."""
        return assignment(self.addresses, role, rank, self.servers_count, **{**self.changes, **changes})

    def assign_all(self, **changes: Any) -> None:
        """Writes every member's assignment."""
        for rank, sidecar in enumerate(self.workers):
            sidecar.assign(self.document("worker", rank, **changes))
        for rank, sidecar in enumerate(self.servers):
            sidecar.assign(self.document("parameterServer", rank, **changes))

    def stop(self) -> None:
        """Ends all of them."""
        for sidecar in self.workers + self.servers:
            with contextlib.suppress(Exception):
                sidecar.signal(signal.SIGCONT)
            sidecar.kill() if sidecar.process is None else sidecar.stop()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
