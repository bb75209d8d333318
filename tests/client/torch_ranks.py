# SPDX-License-Identifier: Apache-2.0
"""Torch of both ends of the supported range, and processes that run scenarios in it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OLD = "1.13"
NEW = "2.15.0"


def _version(python: str) -> str:
    command = [python, "-c", "import torch, sklearn; print(torch.__version__)"]
    answer = subprocess.run(command, capture_output=True, text=True)
    return answer.stdout.strip()


def old_python() -> str:
    """Debian's python3-torch, or the interpreter that ATP_TEST_PYTHON_TORCH_1 names."""
    python = os.environ.get("ATP_TEST_PYTHON_TORCH_1", "/usr/bin/python3")
    if not _version(python).startswith(OLD):
        pytest.skip(
            f"{python} has no torch {OLD}: apt-get install --no-install-recommends python3-torch python3-sklearn, "
            "or set ATP_TEST_PYTHON_TORCH_1"
        )
    return python


def new_python() -> str:
    """A virtual environment with torch NEW in the user's cache, made once (5 GB), or ATP_TEST_PYTHON_TORCH_2."""
    if "ATP_TEST_PYTHON_TORCH_2" in os.environ:
        return os.environ["ATP_TEST_PYTHON_TORCH_2"]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "atp"
    folder = cache / f"venv-torch-{NEW}"
    python = folder / "bin" / "python"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"venv-torch-{NEW}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not python.exists() or not _version(str(python)).startswith(NEW):
            uv = [sys.executable, "-m", "uv"]
            wanted = [f"torch=={NEW}", "numpy==2.4.6", "scikit-learn==1.9.1"]
            commands = [
                [*uv, "venv", "-q", "--allow-existing", "--python", "3.11", str(folder)],
                [*uv, "pip", "install", "-q", "--python", str(python), *wanted],
            ]
            for command in commands:
                made = subprocess.run(command, capture_output=True, text=True)
                if made.returncode != 0:
                    pytest.skip(f"torch {NEW} cannot be installed: {' '.join(command)}: {made.stderr[-500:]}")
    return str(python)


class Child:
    """A scenario that runs in a process of its own."""

    def __init__(self, pid: int, output: Path, result: Path) -> None:
        self.pid = pid
        self._output = output
        self._result = result

    def output(self) -> str:
        """What it has printed."""
        return self._output.read_text() if self._output.exists() else ""

    def says(self, words: str, seconds: float = 120.0) -> None:
        """Waits until it has printed the words."""
        end = time.monotonic() + seconds
        while words not in self.output():
            assert time.monotonic() < end and (self.alive() or words in self.output()), self.output()
            time.sleep(0.05)

    def alive(self) -> bool:
        """Whether it runs."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends it a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def outcome(self, seconds: float = 150.0) -> dict[str, Any]:
        """How it ended: its value or its error. It must end within `seconds`, and cleanly."""
        end = time.monotonic() + seconds
        while self.alive():
            if time.monotonic() > end:
                self.kill()
                raise AssertionError(f"still running after {seconds} s; its output:\n{self.output()}")
            time.sleep(0.02)
        assert self._result.exists(), f"it died; its output:\n{self.output()}"
        outcome = dict(json.loads(self._result.read_text()))
        assert not outcome["ok"] or "terminate called" not in self.output(), self.output()
        return outcome

    def value(self, seconds: float = 150.0) -> Any:
        """What it returned; it must not have failed."""
        outcome = self.outcome(seconds)
        assert outcome["ok"], f"{outcome}\n{self.output()}"
        return outcome["value"]

    def error(self, seconds: float = 150.0) -> tuple[str, str]:
        """Class and text of the error it ended with; it must have failed."""
        outcome = self.outcome(seconds)
        assert not outcome["ok"], f"it did not fail: {outcome}\n{self.output()}"
        return outcome["type"], outcome["error"]


class Torch:
    """An interpreter with torch, loaded, that forks scenarios."""

    def __init__(self, python: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "client"), str(HERE)])
        self.process = subprocess.Popen(
            [python, str(HERE / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.version = str(self._answer()["torch"])
        self.children: list[Child] = []
        self._count = 0

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the interpreter with torch has died"
        return dict(json.loads(line))

    def start(self, directory: Path, function: str, environment: dict[str, str], **arguments: Any) -> Child:
        """Runs a function of scenarios.py in a new process."""
        self._count += 1
        output, result = directory / f"child-{self._count}.log", directory / f"child-{self._count}.json"
        command = {"function": function, "arguments": arguments, "environment": environment}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({**command, "output": str(output), "result": str(result)}) + "\n")
        self.process.stdin.flush()
        child = Child(int(self._answer()["pid"]), output, result)
        self.children.append(child)
        return child

    def close(self) -> None:
        """Ends it and whatever it started."""
        for child in self.children:
            child.kill()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)


Ranks = Callable[..., list[Child]]
