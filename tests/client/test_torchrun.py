# SPDX-License-Identifier: Apache-2.0
"""torchrun in the pods: several processes in one are refused at once, and restarted ones join the running epoch."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from atp_harness import Job
from torch_ranks import HERE, ROOT, Torch, rendezvous_port

SCRIPT = HERE / "torchrun_script.py"


@pytest.fixture(autouse=True)
def _runs(torch_process: Torch) -> None:
    if torch_process.version.startswith("1."):
        pytest.skip("torchrun of torch 1.13 does not run on Debian's Python 3.11 (AttributeError in to_map)")


def torchrun(torch: Torch, job: Job, pod: int, options: list[str], arguments: list[str]) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "ATP_SOCKET": str(job.workers[pod].socket),
        "PYTHONPATH": str(ROOT / "client"),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    command = [torch.python, "-m", "torch.distributed.run", *options, str(SCRIPT), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    output, errors = process.communicate(timeout=540)
    found = [json.loads(line[line.index("{") :]) for line in output.splitlines() if "{" in line]
    assert found, output + errors
    return found


def test_several_processes_in_a_pod(standing: Job, torch_process: Torch) -> None:
    """Two processes that look like a job of two workers, but share a sidecar; and four for two workers."""
    pods = ["--nnodes=1", f"--master_port={rendezvous_port()}", "--nproc_per_node=2"]
    both = lines(torchrun(torch_process, standing, 0, pods, []))
    assert len(both) == 2
    for line in both:
        # Without what torch takes to start, but with how much later the other process does.
        assert line["seconds"] < 60
        assert line["error"] == "UsageError"
        assert "ranks 0 and 1 of the process group run in the same pod (worker 0 of job team-a/digits)" in line["text"]
    pods = ["--nnodes=1", f"--master_port={rendezvous_port()}", "--nproc_per_node=4"]
    four = lines(torchrun(torch_process, standing, 0, pods, []))
    assert len(four) == 4
    for line in four:
        assert "the process group has 4 ranks, but job team-a/digits has 2 workers" in line["text"]


@pytest.mark.timeout(600)  # each start loads torch in four processes, and torchrun may need several
def test_restarted_processes_join_the_running_epoch(tmp_path: Path, torch_process: Torch) -> None:
    with Job(tmp_path / "job", 2, stallTimeoutSeconds=60) as job:
        where = ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{rendezvous_port()}", "--rdzv_id=job"]
        options = ["--nnodes=2", "--nproc_per_node=1", "--max_restarts=6", "--monitor_interval=0.2", *where]
        started = [torchrun(torch_process, job, pod, options, ["fail"]) for pod in range(2)]
        ended = [lines(process) for process in started]
        assert [process.returncode for process in started] == [0, 0]
        assert sorted(line["rank"] for each in ended for line in each) == [0, 1]
        for each in ended:
            assert each[-1]["restarts"] >= 1
            assert each[-1]["epoch"] == 1
