# SPDX-License-Identifier: Apache-2.0
"""Small all-reduces over atp beside gloo: the same processes, in turns, on this machine.

    bench/torch_latency.py                  # JSON lines: name, value (us), unit, peer, ratio, conditions
    bench/torch_latency.py --ranks 4 --rounds 10

Each rank is a process with a sidecar of its own (mode HostOnly, over loopback). A value is the median over the rounds
of the median call of rank 0; the ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for folder in ("tests/sidecar", "hack"):
    sys.path.insert(0, str(ROOT / folder))

import torchenv  # noqa: E402
from atp_harness import Job  # noqa: E402


def measure(python: str, ranks: int, rounds: int, tiny: int, only: str) -> dict[str, Any]:
    """What rank 0 prints.

    Raises:
        RuntimeError: a rank has failed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, str(ROOT / "bench" / "torch_latency_rank.py"), "--rounds", str(rounds), "--tiny", str(tiny)]
    command += ["--only", only]
    with tempfile.TemporaryDirectory() as directory, Job(Path(directory) / "job", ranks) as job:
        processes = []
        for rank in range(ranks):
            own = {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "ATP_SOCKET": str(job.workers[rank].socket),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT / "client"),
            }
            processes.append(subprocess.Popen(command, env={**os.environ, **own}, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate()[0] for process in processes]
        if any(process.returncode for process in processes):
            raise RuntimeError("a rank has failed")
    return dict(json.loads(outputs[0].splitlines()[-1]))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Latency of small all-reduces over atp and gloo.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tiny", type=int, default=20_000, help="how many tensors are in flight at once")
    parser.add_argument("--torch", default="newest", help="oldest, middle, newest or a version")
    parser.add_argument("--only", default="", help="one figure")
    arguments = parser.parse_args()
    python = str(torchenv.interpreter(arguments.torch))
    result = measure(python, arguments.ranks, arguments.rounds, arguments.tiny, arguments.only)
    conditions = {
        "ranks": arguments.ranks,
        "torch": result["torch"],
        "cores": result["cores"],
        "load": round(os.getloadavg()[0], 1),
    }
    for name, seconds in result["seconds"].items():
        if not seconds["atp"]:
            continue
        ratios = [atp / gloo for atp, gloo in zip(seconds["atp"], seconds["gloo"], strict=True)]
        line = {
            "name": f"torch_all_reduce {name}",
            "value": round(1e6 * statistics.median(seconds["atp"]), 1),
            "unit": "us",
            "peer": {"name": "gloo", "value": round(1e6 * statistics.median(seconds["gloo"]), 1)},
            "ratio": round(statistics.median(ratios), 2),
            "conditions": conditions,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
