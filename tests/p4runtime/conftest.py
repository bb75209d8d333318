# SPDX-License-Identifier: Apache-2.0
"""A P4Runtime server in this process, in front of the real library's native data path."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from atp_softswitch.library import SwitchLibrary
from atp_softswitch.pipeline import contract_path, load_p4info
from atp_softswitch.server import P4RuntimeService, start

REPOSITORY = Path(__file__).resolve().parents[2]
LIBRARY = REPOSITORY / "softswitch" / "build" / "libatp_switch.so"


@pytest.fixture(scope="session")
def library_path() -> Path:
    """The built library."""
    if not LIBRARY.exists():
        pytest.skip("softswitch/build/libatp_switch.so is not built: make -C softswitch")
    return LIBRARY


@pytest.fixture
def native(library_path: Path) -> Iterator[SwitchLibrary]:
    """A switch of 1,024 aggregators with the native data path."""
    switch = SwitchLibrary(library_path, bpf=False, aggregators=1024, values=350)
    yield switch
    switch.close()


@dataclass
class Served:
    """A running server: its port and what is behind it."""

    port: int
    switch: SwitchLibrary
    service: P4RuntimeService

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(f"127.0.0.1:{self.port}")


def _in_thread(work: Callable[[asyncio.Event, Callable[[Any], None]], Any]) -> tuple[Any, Callable[[], None]]:
    """Run an async function in a thread of its own until told to stop; returns what it announces."""
    ready = threading.Event()
    box: list[Any] = []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    def announce(value: Any) -> None:
        box.append(value)
        ready.set()

    thread = threading.Thread(target=lambda: loop.run_until_complete(work(stop, announce)), daemon=True)
    thread.start()
    assert ready.wait(15)

    def finish() -> None:
        loop.call_soon_threadsafe(stop.set)
        thread.join(15)
        loop.close()

    return box[0], finish


@pytest.fixture
def served(native: SwitchLibrary) -> Iterator[Served]:
    """A server with empty tables and no pipeline."""

    async def work(stop: asyncio.Event, announce: Callable[[Any], None]) -> None:
        service = P4RuntimeService(native, load_p4info(contract_path()))
        server, port = await start(service, "127.0.0.1:0")
        announce(Served(port, native, service))
        await stop.wait()
        await server.stop(0)

    running, finish = _in_thread(work)
    yield running
    finish()
