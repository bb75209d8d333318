# SPDX-License-Identifier: Apache-2.0
"""Torch in versions of the supported range (hack/torchenv.py), and processes that run scenarios in it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torchenv

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


_ports = itertools.count(21_000 + os.getpid() * 97 % 10_000)


def rendezvous_port() -> int:
    """A TCP port for rank 0's store.

    Below the range that the kernel gives out by itself: a port of that range that is free now may be somebody else's
    outgoing connection when the rank has started.
    """
    while True:
        port = 21_000 + next(_ports) % 11_000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _python(name: str) -> str:
    try:
        return str(torchenv.interpreter(name))
    except torchenv.TorchError as error:
        pytest.skip(str(error))


def old_python() -> str:
    """Debian's python3-torch, or the interpreter that ATP_TEST_PYTHON_TORCH_1 names."""
    return _python("oldest")


def middle_python() -> str:
    """A version of torch between the ends of the range, in the user's cache."""
    return _python("middle")


def new_python() -> str:
    """The newest torch, in the user's cache, or the interpreter that ATP_TEST_PYTHON_TORCH_2 names."""
    return _python("newest")


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
        self.python = python
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
        self.process.wait(60)


Ranks = Callable[..., list[Child]]
