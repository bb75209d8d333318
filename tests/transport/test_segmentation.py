# SPDX-License-Identifier: Apache-2.0
"""Runs of packets over a real link: worker and parameter server in two network namespaces joined by a veth pair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

WORKER, SERVER = "10.250.77.1", "10.250.77.2"

# Runs in a namespace of its own. The worker checks its result and prints its metrics; the server lives until
# its input ends.
ENDPOINT = """
import json, select, sys
import numpy as np
from atp_transport import ParameterServer, Worker
config = sys.argv[1]
if json.loads(config)["role"] == "parameterServer":
    server = ParameterServer(config)
    print("ready", flush=True)
    sys.stdin.read()
else:
    worker = Worker(config)
    data = np.random.default_rng(1).normal(0, 0.5, 200_000).astype(np.float32)
    out = np.zeros_like(data)
    worker.submit(1, "sum", "float32", data.data, out.data, data.size)
    select.select([worker.fileno()], [], [], 60)
    assert worker.completions() == [(1, None)], worker.metrics()
    assert np.array_equal(out, (np.rint(data.astype(np.float64) * 1e8) / 1e8).astype(np.float32))
    metrics = worker.metrics()
    worker.close()
    print(json.dumps(metrics))
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two namespaces with a veth pair between them."""
    names = (f"atp-tr-{os.getpid()}-w", f"atp-tr-{os.getpid()}-s")
    made: list[str] = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", "veth0", "netns", names[0], "type", "veth", "peer", "name", "veth0", "netns", names[1])
        for name, address in zip(names, (WORKER, SERVER), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "veth0")
            ip("-n", name, "link", "set", "veth0", "up")
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)


def run(namespaces: tuple[str, str], **changes: Any) -> dict[str, Any]:
    """One all-reduce; the worker's metrics."""
    base = {
        "jobId": 3,
        "mode": "HostOnly",
        "rank": 0,
        "valuesPerPacket": 62,
        "stallTimeoutSeconds": 30,
        "workers": [{"rank": 0, "address": WORKER}],
        "parameterServers": [{"shard": 0, "address": SERVER}],
    } | changes

    def command(role: str, namespace: str) -> list[str]:
        config = json.dumps(base | {"role": role})
        return ["ip", "netns", "exec", namespace, sys.executable, "-c", ENDPOINT, config]

    server = subprocess.Popen(
        command("parameterServer", namespaces[1]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        worker = subprocess.run(
            command("worker", namespaces[0]), capture_output=True, text=True, timeout=90, check=False
        )
        assert worker.returncode == 0, worker.stderr
        metrics: dict[str, Any] = json.loads(worker.stdout)
        return metrics
    finally:
        server.communicate("")


@pytest.mark.parametrize("offload", [True, False])
def test_over_a_link(namespaces: tuple[str, str], offload: bool) -> None:
    metrics = run(namespaces, segmentationOffload=offload)
    assert metrics["ops_completed"] == 1
    assert metrics["rejected_length"] == 0


@pytest.mark.parametrize("device", ["tx-udp-segmentation", "tx-checksum-ip-generic"])
def test_devices_without_offload(namespaces: tuple[str, str], device: str) -> None:
    for name in namespaces:
        command = ["ip", "netns", "exec", name, "ethtool", "-K", "veth0", device, "off"]
        subprocess.run(command, check=True, capture_output=True)
    assert run(namespaces)["ops_completed"] == 1


def test_packets_above_the_mtu_go_in_fragments(namespaces: tuple[str, str]) -> None:
    assert run(namespaces, valuesPerPacket=870)["ops_completed"] == 1
