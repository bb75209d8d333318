# SPDX-License-Identifier: Apache-2.0
"""The agent's loop against servers that behave unlike the software switch's; all in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atp_api.switchagent.v1alpha1 import switchagent_pb2 as api
from atp_softswitch import cells, device, entries, pipeline, server
from atp_softswitch.errors import Code, P4RuntimeError
from atp_softswitch.library import SwitchLibrary
from atp_switch_agent.codec import Codec, contract_path
from atp_switch_agent.driver import Driver
from atp_switch_agent.entries import GROUP, Entry
from atp_switch_agent.planner import Op, Update
from atp_switch_agent.reconciler import Reconciler, Settings
from atp_switch_agent.resolver import RelayPorts

Check = Callable[[Reconciler, list[int]], Awaitable[None]]


def job() -> api.Job:
    message = api.Job(job_id=5, epoch=1, uid="u", name="ns/j", values=62, multicast_group=7)
    message.regions.add(start=0, size=64)
    message.parameter_servers.add(address="127.77.2.9")
    for rank in range(2):
        message.members.add(rank=rank, bit=rank).endpoint.address = f"127.77.2.1{rank}"
    return message


def run(library: Path, check: Check) -> None:
    """A server over the native data path, and the agent's loop; `changes` counts the calls that changed the server."""

    async def main() -> None:
        switch = SwitchLibrary(library, bpf=False, aggregators=1024, values=62)
        changes: list[int] = []
        service = server.P4RuntimeService(
            switch, pipeline.load_p4info(contract_path()), on_change=lambda: changes.append(1)
        )
        running, port = await server.start(service, "127.0.0.1:0")
        driver = Driver(f"127.0.0.1:{port}", Codec(contract_path()))
        agent = Reconciler(Settings("sw"), driver, RelayPorts())
        primary = asyncio.Event()

        def changed() -> None:
            agent.poke()
            if driver.link.primary:
                primary.set()

        driver.on_change = changed
        tasks = [asyncio.create_task(driver.run()), asyncio.create_task(agent.run())]
        try:
            async with asyncio.timeout(20):
                await primary.wait()
                await check(agent, changes)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await running.stop(0)
            switch.close()

    asyncio.run(main())


def desired(generation: int, *jobs: api.Job) -> api.DesiredState:
    return api.DesiredState(switch_name="sw", generation=generation, writer="w", jobs=jobs)


def test_a_target_that_keeps_no_metadata(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = entries.encode_entry
    monkeypatch.setattr(device, "encode_entry", lambda entry, pipe: encode(replace(entry, metadata=b""), pipe))

    async def check(agent: Reconciler, changes: list[int]) -> None:
        assert (await agent.apply(desired(1, job()))).in_sync
        before = len(changes)
        assert (await agent.apply(desired(2, job()))).in_sync
        assert len(changes) == before, "nothing is written again"
        later = job()
        later.epoch = 2
        assert (await agent.apply(desired(3, later))).in_sync
        assert len(changes) > before, "another epoch is programmed anew"

    run(library, check)


def test_a_target_that_does_not_keep_what_is_written(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = device.Device.read

    def forgetful(self: device.Device, entity: Any, cells: Any) -> Any:
        return (found for found in read(self, entity, cells) if not found.table_entry.priority)

    monkeypatch.setattr(device.Device, "read", forgetful)

    async def check(agent: Reconciler, changes: list[int]) -> None:
        observed = await agent.apply(desired(1, job()))
        assert not observed.in_sync
        assert observed.jobs[0].reason in ("NotConverging", "SwitchRefused"), observed

    run(library, check)


def test_groups_of_others_are_left_alone(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hardware switch floods with groups above the jobs' range; strangers' groups inside it are removed."""
    monkeypatch.setattr(entries, "GROUP_MAX", 4096)

    async def check(agent: Reconciler, changes: list[int]) -> None:
        await agent.driver.ensure_pipeline()
        flood, stray = Entry(GROUP, (2000,), (1, 1)), Entry(GROUP, (9,), (1, 1))
        assert not await agent.driver.write((Update(Op.INSERT, flood), Update(Op.INSERT, stray)))
        assert (await agent.apply(desired(1, job()))).in_sync
        kept = await agent.driver._read(Codec(contract_path()).wildcards())
        groups = {
            entity.packet_replication_engine_entry.multicast_group_entry.multicast_group_id
            for entity in kept
            if entity.HasField("packet_replication_engine_entry")
        }
        assert groups == {7, 2000}

    run(library, check)


def test_without_registers_occupancy_comes_from_the_counters(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bmv2 answers UNIMPLEMENTED for registers."""

    def unimplemented(*_: object) -> Any:
        raise P4RuntimeError(Code.UNIMPLEMENTED, "no registers")

    monkeypatch.setattr(cells.Cells, "read_registers", unimplemented)
    counted = {"allocated": 50, "released": 20, "resend_partials": 3, "stale_takeovers": 2}
    monkeypatch.setattr(
        SwitchLibrary,
        "read_counters",
        lambda self, job_id: dict.fromkeys(self.counter_names, 0) | (counted if job_id == 5 else {}),
    )
    monkeypatch.setattr(cells.Cells, "write_counter", lambda *_: None)

    async def check(agent: Reconciler, changes: list[int]) -> None:
        assert (await agent.apply(desired(1, job()))).in_sync
        told = await agent.telemetry()
        assert {item.job_id: item.aggregators_in_use for item in told.jobs} == {0: 0, 5: 25}
        assert told.aggregators_in_use == 25

    run(library, check)
