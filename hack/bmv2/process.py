# SPDX-License-Identifier: Apache-2.0
"""bmv2 (simple_switch_grpc) as a process with the committed program. Run it in a network namespace: it listens on all
addresses (Thrift)."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from .p4runtime import Controller

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "p4" / "build"
JSON = BUILD / "atp.bmv2.json"
P4INFO = BUILD / "atp.bmv2.p4info.txtpb"
ENVIRONMENT = "P4_BMV2"
STARTED_WITHIN_SECONDS = 60.0


def find_bmv2() -> str | None:
    """simple_switch_grpc: what P4_BMV2 names, or on PATH."""
    named = os.environ.get(ENVIRONMENT)
    return str(Path(named).absolute()) if named else shutil.which("simple_switch_grpc")


def reason_not_to_run() -> str | None:
    """What is missing to run bmv2 here, or None."""
    found = find_bmv2()
    if found is None:
        return f"bmv2 is not installed: build p4lang/behavioral-model and set {ENVIRONMENT} to its simple_switch_grpc"
    if not os.access(found, os.X_OK):
        return f"{ENVIRONMENT} is {found}, which is no program"
    if not JSON.exists() or not P4INFO.exists():
        return f"{JSON.relative_to(ROOT)} is missing: make -C p4 bmv2, which needs p4c"
    if os.geteuid() != 0:
        return "a network namespace needs root"
    return None


@functools.cache
def version() -> str:
    """Name and version of the bmv2 that is found."""
    command = [find_bmv2() or "simple_switch_grpc", "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return "simple_switch_grpc " + (said[-1] if said else "of unknown version")


class Bmv2Process:
    """A running bmv2 with the committed program: interfaces by port number, P4Runtime on a unix socket."""

    def __init__(self, interfaces: Mapping[int, str], thrift_port: int = 9090, *, load: bool = True) -> None:
        """Start it in this network namespace and load the program. RuntimeError with what it said if it fails."""
        self.directory = Path(tempfile.mkdtemp(prefix="atp-bmv2-"))
        self.address = f"unix:{self.directory}/grpc"
        command = [
            find_bmv2() or "simple_switch_grpc",
            "--no-p4",
            "--device-id",
            "1",
            "--thrift-port",
            str(thrift_port),
        ]
        command += ["--notifications-addr", f"ipc://{self.directory}/notifications"]
        for number, name in interfaces.items():
            command += ["-i", f"{number}@{name}"]
        command += ["--", "--grpc-server-addr", self.address]
        try:
            with (self.directory / "output").open("wb") as output:
                self.process = subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, cwd=self.directory, stdin=subprocess.DEVNULL
                )
            deadline = time.monotonic() + STARTED_WITHIN_SECONDS
            while not (self.directory / "grpc").exists():
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"bmv2 did not start: {self.output()}")
                time.sleep(0.02)
            if load:
                self.controller = Controller(self.address, P4INFO, JSON.read_bytes())
        except BaseException:
            self.close()
            raise

    def output(self) -> str:
        return (self.directory / "output").read_text(errors="replace")

    def close(self) -> None:
        if hasattr(self, "controller"):
            self.controller.close()
        if hasattr(self, "process"):
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        shutil.rmtree(self.directory, ignore_errors=True)
