# SPDX-License-Identifier: Apache-2.0
"""Memory of the long-running parts: proportional set size of their processes on this machine.

Measured where they run (after `make demo`, or while a job trains); a part that does not run is started alone where
that needs no cluster: the parameter server's sidecar on loopback. One JSON line a part.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PARTS = {
    "operator": "atp-operator",
    "agent": "atp-switch-agent",
    "softswitch": "atp-softswitch",
    "sidecar": "atp-sidecar",
}
ASSIGNMENT = {
    "apiVersion": "atp.dev/v1alpha1",
    "job": "bench/memory",
    "uid": "0",
    "epoch": 1,
    "revision": 1,
    "jobId": 1,
    "mode": "HostOnly",
    "role": "parameterServer",
    "rank": 0,
    "valuesPerPacket": 350,
    "scale": 1e8,
    "port": 10800,
    "regions": [],
    "indexTableSize": 1024,
    "maxWindow": 1024,
    "stallTimeoutSeconds": 60,
    "workers": [{"rank": 0, "address": "127.201.7.2", "rack": 0, "bit": 0, "edge": False}],
    "parameterServers": [{"shard": 0, "address": "127.201.7.1"}],
    "switchAddress": None,
}


def proportional_set_size(pid: str) -> int:
    """Bytes of memory that the process is accountable for (proc(5), smaps_rollup)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def running(program: str) -> list[int]:
    """Sizes of all processes whose command line runs ``program``, bytes."""
    sizes = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            if any(Path(word.decode(errors="replace")).name == program for word in words[:2]) and b"park" not in words:
                sizes.append(proportional_set_size(path.name))
        except (OSError, ValueError):
            continue
    return sizes


def report(part: str, sizes: list[int], conditions: str) -> None:
    value = round(max(sizes) / 2**20, 1)
    line = {
        "name": f"memory_{part}",
        "value": value,
        "unit": "MiB",
        "peer": None,
        "ratio": None,
        "conditions": conditions,
    }
    print(json.dumps(line), flush=True)


def sidecar_alone() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assignment = Path(folder) / "assignment.json"
        assignment.write_text(json.dumps(ASSIGNMENT))
        command = [sys.executable, "-m", "atp_sidecar", "run", "--assignment", str(assignment), "--metrics-port", "0"]
        command += ["--socket", f"{folder}/atp.sock"]
        with subprocess.Popen(
            command, env={**os.environ, "ATP_ROLE": "parameterServer"}, stdout=subprocess.DEVNULL
        ) as process:
            try:
                time.sleep(3)
                report(
                    "sidecar",
                    [proportional_set_size(str(process.pid))],
                    "one parameter server on loopback, gate open, idle",
                )
            finally:
                process.terminate()
                process.wait(10)


def main() -> int:
    for part, program in PARTS.items():
        if sizes := running(program):
            report(part, sizes, f"largest of {len(sizes)} running on this machine, proportional set size")
        elif part == "sidecar":
            sidecar_alone()
        else:
            print(f"memory_{part}: not running here; start the cluster with make demo", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
