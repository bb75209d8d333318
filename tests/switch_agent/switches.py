# SPDX-License-Identifier: Apache-2.0
"""Switches that the same tests run against; bmv2 is in a module of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from atp_api.switchagent.v1alpha1 import switchagent_pb2 as api


class Switch(Protocol):
    """A P4Runtime server as a process, and how an agent is to reach it. `kind` is `software` or `bmv2`."""

    kind: str

    def start(self, p4info: Path | None = None) -> None: ...
    def kill(self) -> None: ...

    @property
    def address(self) -> int | str:
        """Where P4Runtime is."""

    def options(self, p4info: Path | None = None) -> list[str]:
        """Of the agent."""

    def endpoint(self, number: int) -> api.Endpoint:
        """Host `number`, from 1."""

    def nowhere(self) -> api.Endpoint:
        """A host at a port that the switch does not have."""


class Software:
    """The software switch as a relay."""

    kind = "software"

    def __init__(self, relay: Callable[..., Any], port: int) -> None:
        self._relay = relay
        self.address = port

    def start(self, p4info: Path | None = None) -> None:
        extra = {"p4info": p4info} if p4info else {}
        self.process = self._relay("127.77.3.1", p4runtime=self.address, stale_ms=60_000, **extra)

    def kill(self) -> None:
        self.process.kill()

    def options(self, p4info: Path | None = None) -> list[str]:
        return ["--p4info", str(p4info)] if p4info else []

    def endpoint(self, number: int) -> api.Endpoint:
        return api.Endpoint(address=f"127.77.3.{10 + number}")

    def nowhere(self) -> api.Endpoint:
        return api.Endpoint(address="127.77.3.99", port=0xE0000001)
