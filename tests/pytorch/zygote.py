# SPDX-License-Identifier: Apache-2.0
"""Imports torch and one suite once, and forks a process for each test.

`python -m pytorch.zygote SUITE BACKEND`, in the interpreter with torch. Writes {"torch", "tests"} as a JSON line, then
reads {"test", "log", "seconds", "sockets"} and answers {"outcome", "text", "seconds", "groups"} each time; the outcome
is "passed", "failed" or "skipped".
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import unittest
from pathlib import Path
from typing import Any

import torch

from pytorch import adapt, suites

TAIL = 4000


def case(suite: suites.Suite, name: str) -> dict[str, Any]:
    """Runs one test here; its ranks are forked from this process."""
    result = unittest.TestResult()
    unittest.TestSuite([suite.make(name)]).run(result)
    bad = [text for _, text in result.errors + result.failures]
    if bad or result.unexpectedSuccesses:
        return {"outcome": "failed", "text": "\n".join(bad)[-TAIL:]}
    if result.skipped:
        return {"outcome": "skipped", "text": result.skipped[0][1]}
    return {"outcome": "passed", "text": ""}


def child(suite: suites.Suite, command: dict[str, Any], answer: Path) -> None:
    """The forked process: a group of its own, so that nothing of a test outlives it."""
    os.setpgid(0, 0)
    log = os.open(command["log"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        outcome = case(suite, command["test"])
    except BaseException:
        outcome = {"outcome": "failed", "text": traceback.format_exc()[-TAIL:]}
    temporary = answer.with_suffix(".new")
    temporary.write_text(json.dumps(outcome))
    temporary.replace(answer)


def run(suite: suites.Suite, command: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Forks a test and waits for it."""
    answer, mark = folder / "answer.json", folder / "mark"
    answer.unlink(missing_ok=True)
    mark.write_bytes(b"")
    os.environ[adapt.MARK] = str(mark)
    os.environ[adapt.SOCKETS] = json.dumps(command.get("sockets", {}))
    begin = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            child(suite, command, answer)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    end = begin + command["seconds"]
    ended = False
    while not ended and time.monotonic() < end:
        ended = os.waitpid(pid, os.WNOHANG)[0] == pid
        time.sleep(0.01)
    if not ended:
        # Every process of the test says where it is, in the log.
        _signal(pid, signal.SIGUSR1)
        time.sleep(1.0)
    _signal(pid, signal.SIGKILL)
    if not ended:
        os.waitpid(pid, 0)
    outcome: dict[str, Any] = {"outcome": "failed", "text": f"not finished after {command['seconds']} s"}
    if answer.exists():
        outcome = json.loads(answer.read_text())
    elif ended:
        outcome["text"] = "the process of the test died"
    return {**outcome, "seconds": round(time.monotonic() - begin, 2), "groups": mark.stat().st_size}


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def main() -> None:
    name, backend = sys.argv[1:3]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an import prints is no answer
    adapt.prepare(backend)
    suite = suites.load(name, backend)
    tests = [{"test": test, "skip": reason} for test, reason in suite.tests()]
    print(json.dumps({"torch": torch.__version__, "tests": tests}), file=answers, flush=True)
    with tempfile.TemporaryDirectory(prefix="atp-torch-") as folder:
        for line in iter(sys.stdin.readline, ""):
            print(json.dumps(run(suite, json.loads(line), Path(folder))), file=answers, flush=True)
    os._exit(0)  # a thread that an import has started may not hold this up


main()
