# SPDX-License-Identifier: Apache-2.0
"""The gate over time: opening, epochs, revisions, faults. Time is an argument, the transport counts what it is told."""

import asyncio
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from atp_harness import assignment

from atp_sidecar.assignment import Assignment
from atp_sidecar.gate import RETRY_SECONDS, VANISH_SECONDS, WAITING, Gate
from atp_sidecar.logs import EventLog

ADDRESSES = ["10.0.0.1", "10.0.0.2", "10.0.0.9"]


class Member:
    """A transport without clients (atp_sidecar.transport.MemberTransport)."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.closed: tuple[str, str] | None = None

    def fileno(self) -> int:
        return self.descriptor

    def attach(self, fd: int, welcome: str, session: int) -> None:
        raise ValueError("no clients here")

    def session_events(self) -> list[tuple[str, int, dict[str, Any]]]:
        return []

    def reply(self, session: int, body: bytes) -> None:
        pass

    def metrics(self) -> dict[str, Any]:
        return {"gradient_packets": 5, "window": 200, "operations": {"ok": 3}}

    def close(self, code: str, message: str) -> None:
        assert self.closed is None
        self.closed = (code, message)

    def join(self) -> None:
        os.close(self.descriptor)


class World:
    """A gate, its file and what it said."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = io.StringIO()
        self.members: list[Member] = []
        self.fail: str | None = None
        self.gate = Gate(path, "worker", None, self.start, EventLog(self.log), lambda clients, session: None)

    def start(self, document: Assignment) -> Member:
        if self.fail is not None:
            raise OSError(self.fail)
        self.members.append(Member())
        return self.members[-1]

    def write(self, **changes: Any) -> None:
        self.path.write_text(json.dumps(assignment(ADDRESSES, **changes)))

    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in self.log.getvalue().splitlines()]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    loop = asyncio.new_event_loop()
    made: list[World] = []

    async def make() -> None:
        made.append(World(tmp_path / "assignment.json"))

    loop.run_until_complete(make())
    asyncio._set_running_loop(loop)
    try:
        yield made[0]
        made[0].gate.close("Shutdown", "end of test")
        made[0].gate.join()
    finally:
        asyncio._set_running_loop(None)
        loop.close()


def test_waits_then_opens(world: World) -> None:
    world.gate.step(0)
    assert not world.gate.is_open
    assert world.gate.reason == WAITING
    world.write()
    world.gate.step(1)
    assert world.gate.is_open
    assert world.events() == ["gate-opened"]


def test_new_epoch_closes_and_opens(world: World) -> None:
    world.write()
    world.gate.step(0)
    first = world.members[0]
    world.write(epoch=2)
    world.gate.step(1)
    assert first.closed is not None
    assert first.closed[0] == "Epoch"
    assert "from epoch 1 to 2" in first.closed[1]
    assert world.gate.is_open
    assert world.gate.assignment is not None
    assert world.gate.assignment.epoch == 2


def test_revision_with_another_mode_keeps_the_transport(world: World) -> None:
    world.write(mode="Shared", regions=[{"start": 0, "size": 64}])
    world.gate.step(0)
    world.write(mode="HostOnly", regions=[{"start": 0, "size": 64}], revision=2)
    world.gate.step(1)
    assert len(world.members) == 1
    assert world.members[0].closed is None
    assert world.gate.assignment is not None
    assert world.gate.assignment.mode == "HostOnly"
    assert "mode-changed" in world.events()


def test_other_changes_within_an_epoch_are_refused(world: World) -> None:
    world.write()
    world.gate.step(0)
    world.write(jobId=9, revision=2)
    world.gate.step(1)
    assert world.gate.assignment is not None
    assert world.gate.assignment.job_id == 3
    assert world.events()[-1] == "assignment-refused"


def test_only_the_job_is_told_of_its_state(world: World) -> None:
    """/status has the job ID, addresses and sequences: all that a forged packet needs."""
    assert world.gate.is_of_the_job("127.0.0.1") and world.gate.is_of_the_job("::1")
    stranger = "203.0.113.7"
    world.write(workers=[{"rank": 0, "address": "10.0.0.1"}], parameterServers=[{"shard": 0, "address": "10.0.0.9"}])
    before = world.gate.is_of_the_job("10.0.0.9")
    world.gate.step(0)
    assert world.gate.assignment is not None, world.events()
    told = [
        address for address in ("10.0.0.1", "10.0.0.9", "10.0.0.2", stranger, "") if world.gate.is_of_the_job(address)
    ]
    assert (before, told) == (False, ["10.0.0.1", "10.0.0.9"])


def test_older_epoch_is_refused(world: World) -> None:
    world.write(epoch=5)
    world.gate.step(0)
    world.write(epoch=4)
    world.gate.step(1)
    assert world.gate.assignment is not None
    assert world.gate.assignment.epoch == 5


def test_invalid_while_open_changes_nothing(world: World) -> None:
    world.write()
    world.gate.step(0)
    world.path.write_text("{")
    world.gate.step(1)
    world.gate.step(2)
    assert world.gate.is_open
    assert world.events().count("assignment-refused") == 1


def test_invalid_while_closed_is_the_reason(world: World) -> None:
    world.write(jobId=0)
    world.gate.step(0)
    assert "jobId" in world.gate.reason
    world.write()
    world.gate.step(1)
    assert world.gate.is_open


def test_vanishing_for_a_moment_is_ignored(world: World) -> None:
    world.write()
    world.gate.step(0)
    world.path.unlink()
    world.gate.step(1)
    world.gate.step(1 + VANISH_SECONDS / 2)
    assert world.gate.is_open
    world.write()
    world.gate.step(4)
    world.path.unlink()
    world.gate.step(5)
    world.gate.step(5 + VANISH_SECONDS)
    assert not world.gate.is_open
    closed = world.members[0].closed
    assert closed is not None and closed[0] == "Epoch"


def test_a_transport_that_cannot_start_is_tried_again(world: World) -> None:
    world.write()
    world.fail = "address in use"
    world.gate.step(0)
    assert "address in use" in world.gate.reason
    world.fail = None
    world.gate.step(RETRY_SECONDS / 2)
    assert not world.gate.is_open
    world.gate.step(RETRY_SECONDS)
    assert world.gate.is_open


def test_counters_survive_the_epoch(world: World) -> None:
    world.write()
    world.gate.step(0)
    world.write(epoch=2)
    world.gate.step(1)
    assert world.gate.snapshot()["gradient_packets"] == 10
    assert world.gate.snapshot()["operations"] == {"ok": 6}
