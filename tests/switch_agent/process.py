# SPDX-License-Identifier: Apache-2.0
"""Programs of the product as processes, and how to tell an agent in another network namespace what to do."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from atp_api.switchagent.v1alpha1 import switchagent_pb2 as api

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Process:
    """A child that logs JSON lines; `started` is its line with the message `serving`."""

    child: subprocess.Popen[str]
    lines: list[dict[str, Any]] = field(default_factory=list)
    _serving: queue.Queue[dict[str, Any]] = field(default_factory=queue.Queue)
    started: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def run(cls, module: str, *arguments: str, prefix: tuple[str, ...] = ()) -> Process:
        command = [*prefix, sys.executable, "-m", module, *arguments]
        child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY)
        process = cls(child)
        threading.Thread(target=process._read, daemon=True).start()
        try:
            process.started = process._serving.get(timeout=30)
        except queue.Empty:
            process.stop()
            raise AssertionError(f"{module} did not start: {process.lines}") from None
        if not process.started:
            raise AssertionError(f"{module} ended with {child.wait()}: {process.lines}")
        return process

    def _read(self) -> None:
        assert self.child.stderr is not None
        for text in self.child.stderr:
            try:
                line = json.loads(text)
            except ValueError:
                line = {"message": text}
            self.lines.append(line)
            if line["message"] == "serving":
                self._serving.put(line)
        self._serving.put({})

    def kill(self) -> None:
        """End it at once, as a crash does."""
        self.child.kill()
        self.child.wait(timeout=10)

    def stop(self) -> int:
        """SIGTERM, and its exit status."""
        self.child.terminate()
        return self.child.wait(timeout=15)


_APPLY = """
import sys, time
import grpc
from google.protobuf import text_format
from atp_api.switchagent.v1alpha1 import switchagent_pb2 as api, switchagent_pb2_grpc as api_grpc
stub = api_grpc.SwitchAgentStub(grpc.insecure_channel(sys.argv[1]))
text = sys.stdin.read()
if text:
    stub.ApplyDesiredState(text_format.Parse(text, api.DesiredState()), timeout=20, wait_for_ready=True)
    deadline = time.monotonic() + 15
    while not stub.GetObservedState(api.GetObservedStateRequest()).in_sync and time.monotonic() < deadline:
        time.sleep(0.05)
told = next(iter(stub.StreamTelemetry(api.TelemetryRequest(), timeout=10)))
print(text_format.MessageToString(told))
"""


def ask_agent(prefix: tuple[str, ...], agent: Process, wanted: api.DesiredState | None = None) -> api.Telemetry:
    """Apply a state, if there is one, wait a while for the switch to hold it, and read the telemetry.

    `prefix` runs a command where the agent listens. AssertionError: the agent refuses, or does not answer.
    """
    done = subprocess.run(
        [*prefix, sys.executable, "-c", _APPLY, f"127.0.0.1:{agent.started['grpc_port']}"],
        input=text_format.MessageToString(wanted) if wanted is not None else "",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return text_format.Parse(done.stdout, api.Telemetry())
