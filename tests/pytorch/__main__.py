# SPDX-License-Identifier: Apache-2.0
"""Runs the suites on gloo and on atp and writes build/torch: `make test-torch`, `make test-torch-quick`.

A test is a process of its own, forked from an interpreter that has torch and the suite loaded. On atp each rank has a
real sidecar, and each job a parameter server; they outlive the tests.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torchenv

from pytorch.jobs import Jobs
from pytorch.results import BACKENDS, Outcome, Results, read_exceptions, replace_section

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WHEEL = ("distributed_test", "distributed_test_of_8", "ddp_under_dist_autograd_test", "own")
# World sizes for which a suite needs a job.
SIZES = {"distributed_test": (4,), "distributed_test_of_8": (8,), "ddp_under_dist_autograd_test": (4, 6), "own": (4,)}
SIZES_OF_SOURCE = (1, 2, 3, 4, 8)
# Test files of torch's source that have tests on CPU and are about what a backend does. Their places have changed.
SOURCE = (
    "test_c10d_gloo.py",
    "test_c10d_common.py",
    "test_c10d_spawn_gloo.py",
    "test_c10d_object_collectives.py",
    "test_c10d_functional_native.py",
    "test_functional_api.py",
    "test_pg_wrapper.py",
    "test_device_mesh.py",
    "algorithms/test_join.py",
    "algorithms/ddp_comm_hooks/test_ddp_hooks.py",
    "algorithms/quantization/test_quantization.py",
    "optim/test_zero_redundancy_optimizer.py",
    "_composable/test_replicate.py",
    "_composable/fsdp/test_fully_shard_init.py",
    "_composable/fsdp/test_fully_shard_training.py",
    "_composable/fsdp/test_fully_shard_comm.py",
    "_tensor/test_dtensor.py",
    "_tensor/test_redistribute.py",
    "tensor/test_dtensor.py",
    "tensor/test_redistribute.py",
    "tensor/parallel/test_tp_examples.py",
    "pipelining/test_stage.py",
    "pipelining/test_schedule.py",
    "checkpoint/test_checkpoint.py",
    "checkpoint/test_file_system_checkpoint_cpu.py",
    "checkpoint/test_save_load_api.py",
)
QUICK_SUITES = ("distributed_test", "own")
# Enough of distributed_test.py to see that a version of torch and this backend work together.
QUICK = (
    "*.test_all_gather",
    "*.test_all_gather_object_default_pg",
    "*.test_all_reduce_*",
    "*.test_all_to_all*",
    "*.test_barrier*",
    "*.test_broadcast",
    "*.test_broadcast_object_list",
    "*.test_ddp_hook_*",
    "*.test_ddp_join_model_equivalence",
    "*.test_ddp_uneven_inputs",
    "*.test_destroy_*",
    "*.test_DistributedDataParallelCPU*",
    "*.test_gather",
    "*.test_get_backend",
    "*.test_irecv",
    "*.test_isend",
    "*.test_monitored_barrier_gloo*",
    "*.test_new_subgroups*",
    "*.test_reduce_*",
    "*.test_scatter",
    "*.test_send_recv",
    "*.test_send_recv_any_source",
)


class DeadError(RuntimeError):
    """The interpreter with torch has ended."""


@functools.cache
def extra_path(python: str) -> list[str]:
    """Where an interpreter finds what torch's test helpers import, if it has not got it itself."""
    if subprocess.run([python, "-c", "import expecttest"], capture_output=True).returncode == 0:
        return []
    folder = torchenv.cache() / "expecttest"
    if not (folder / "expecttest").exists():
        wanted = next(each for each in torchenv.MATRIX[-1].requirements if each.startswith("expecttest"))
        command = [sys.executable, "-m", "uv", "pip", "install", "-q", "--no-deps", "--target", str(folder), wanted]
        subprocess.run(command, check=True)
    return [str(folder)]


class Zygote:
    """An interpreter with torch and one suite, for one backend."""

    def __init__(
        self, python: str, suite: str, backend: str, log: Path, seconds: int, environment: dict[str, str]
    ) -> None:
        path = [str(ROOT / "client"), str(ROOT / "tests"), *extra_path(python)]
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TP_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
            "WORLD_SIZE": "4",
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(seconds),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of processes, and no threads before a fork
            **environment,
        }
        variables.pop("ATP_SOCKET", None)
        self.backend = backend
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [python, "-m", "pytorch.zygote", suite, backend],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=variables,
        )
        self._path = log
        first = self._answer()
        self.torch = str(first["torch"])
        self.tests: dict[str, str | None] = {each["test"]: each["skip"] for each in first["tests"]}

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise DeadError(f"the interpreter with torch has died: {self._path.read_text()[-3000:]}")
        return dict(json.loads(line))

    def run(self, test: str, log: Path, seconds: int, sockets: dict[str, list[str]]) -> Outcome:
        """Runs one test."""
        assert self._process.stdin is not None
        command = {"test": test, "log": str(log), "seconds": seconds, "sockets": sockets}
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return Outcome(**self._answer())

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class Run:
    """One run of some suites on both backends."""

    def __init__(self, arguments: argparse.Namespace, directory: Path) -> None:
        self.arguments = arguments
        self.directory = directory
        self.results = Results()
        self._lock = threading.Lock()

    def wanted(self, suite: str, test: str) -> bool:
        """Whether a test was asked for."""
        patterns = self.arguments.tests or (QUICK if self.arguments.quick and suite == "distributed_test" else ("*",))
        return any(fnmatch.fnmatchcase(test, pattern) for pattern in patterns)

    def suite(self, name: str, jobs: Jobs | None) -> None:
        """Runs a suite on all backends, side by side."""
        title = Path(name).stem
        errors: queue.Queue[BaseException] = queue.Queue()

        def lane(backend: str) -> None:
            try:
                self._lane(name, title, backend, jobs)
            except BaseException as error:
                errors.put(error)

        lanes = [threading.Thread(target=lane, args=(backend,)) for backend in self.arguments.backends]
        for each in lanes:
            each.start()
            if self.arguments.serial:
                each.join()
        for each in lanes:
            each.join()
        if not errors.empty():
            raise errors.get()

    def _lane(self, name: str, title: str, backend: str, jobs: Jobs | None) -> None:
        seconds = self.arguments.seconds
        log = self.directory / "logs" / title / backend
        log.mkdir(parents=True, exist_ok=True)
        zygote = Zygote(self.arguments.python, name, backend, log / "zygote.log", seconds - 20, {})
        self.results.torch = zygote.torch
        try:
            for test, skip in zygote.tests.items():
                if not self.wanted(title, test):
                    continue
                if skip is not None:
                    self._add(title, test, backend, Outcome("skipped", skip))
                    continue
                for attempt in range(1, self.arguments.tries + 1):
                    sockets = jobs.sockets() if jobs is not None and backend == "atp" else {}
                    outcome = zygote.run(test, log / f"{test}.log", seconds, sockets)
                    dead = jobs.dead() if jobs is not None and backend == "atp" else []
                    if dead:
                        outcome = Outcome(
                            "failed", "sidecars died: " + "; ".join(dead), outcome.seconds, outcome.groups
                        )
                    outcome.tries = attempt
                    if outcome.outcome != "failed":
                        break
                self._add(title, test, backend, outcome)
        finally:
            zygote.close()

    def _add(self, suite: str, test: str, backend: str, outcome: Outcome) -> None:
        with self._lock:
            self.results.add(suite, test, backend, outcome)
            if outcome.outcome == "failed" or self.arguments.verbose:
                why = _cause(outcome.text) if outcome.outcome == "failed" else ""
                print(f"{outcome.outcome:8} {backend:5} {suite}.{test} {outcome.seconds:.1f} s {why}", flush=True)


def _cause(text: str) -> str:
    """The line of a traceback that says most."""
    lines = [line for line in text.splitlines() if re.match(r"[\w.]+(Error|Exception|Skip)\b", line)]
    return (lines or text.strip().splitlines()[-1:] or [""])[-1][:300]


def suites(arguments: argparse.Namespace, results: Results) -> Iterator[str]:
    """The suites to run: names, and paths in a checkout of torch."""
    for name in WHEEL:
        if (not arguments.suites or name in arguments.suites) and not (
            arguments.quick and name.startswith("ddp_under")
        ):
            yield name
    if arguments.quick:
        return
    if not arguments.source:
        results.notes.append("The suites of torch's source did not run: no checkout was given (PYTORCH_SOURCE).")
        return
    for file in SOURCE:
        path = Path(arguments.source).resolve() / "test" / "distributed" / file
        if path.exists() and (not arguments.suites or path.stem in arguments.suites):
            yield str(path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="pytorch", description=__doc__)
    parser.add_argument(
        "--python", default="newest", help="the interpreter with torch, or a version that torchenv knows"
    )
    parser.add_argument(
        "--source", default=os.environ.get("PYTORCH_SOURCE", ""), help="a checkout of torch, same version"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "torch")
    parser.add_argument("--suites", nargs="*", default=[], help="only these")
    parser.add_argument("--tests", nargs="*", default=[], help="only tests that match these patterns")
    parser.add_argument("--backends", nargs="*", default=list(BACKENDS))
    parser.add_argument("--quick", action="store_true", help="a subset of a few minutes")
    parser.add_argument("--seconds", type=int, default=150, help="the longest that a test may take")
    parser.add_argument("--tries", type=int, default=2, help="how often a test that fails is run in all")
    parser.add_argument("--merge", action="store_true", help="keeps the results of tests that do not run now")
    parser.add_argument("--serial", action="store_true", help="one backend after the other")
    parser.add_argument("--fresh", action="store_true", help="new sidecars for each test")
    parser.add_argument("--scale", default="Auto", help="of the jobs")
    parser.add_argument("--docs", metavar="SECTION", help="writes the tables to this section of docs/torch-tests.md")
    parser.add_argument("--verbose", action="store_true")
    arguments = parser.parse_args()
    if "/" not in arguments.python:
        arguments.python = str(torchenv.interpreter(arguments.python))
    # The sidecars end with this process, also if it is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    run = Run(arguments, arguments.output)
    if arguments.merge:
        run.results = Results.read(arguments.output)
    begin = time.monotonic()
    bad: list[str] = []
    scale = arguments.scale if arguments.scale == "Auto" else float(arguments.scale)
    jobs = None
    if "atp" in arguments.backends:
        # Unix sockets have short paths.
        jobs = Jobs(Path(tempfile.mkdtemp(prefix="atp-")), arguments.fresh, scale)
    try:
        for name in suites(arguments, run.results):
            if jobs is not None:
                jobs.start(SIZES.get(name, SIZES_OF_SOURCE))
            try:
                run.suite(name, jobs)
            except DeadError as error:
                run.results.notes.append(f"{Path(name).stem} did not run.")
                bad.append(f"{Path(name).stem} did not run: {error}")
            run.results.write(arguments.output)
    finally:
        if jobs is not None:
            jobs.stop()
    exceptions = read_exceptions(HERE / "exceptions.toml", run.results.torch or "0")
    text = run.results.markdown(exceptions)
    if arguments.docs is not None:
        replace_section(ROOT / "docs" / "torch-tests.md", arguments.docs, text)
    print(text)
    bad += run.results.unexplained(exceptions)
    print(*bad, sep="\n")
    print(f"{time.monotonic() - begin:.0f} s; {arguments.output}/result.json")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
