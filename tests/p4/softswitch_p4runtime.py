# SPDX-License-Identifier: Apache-2.0
"""The software switch behind its P4Runtime server: tables and counters over gRPC, packets over veth pairs and tc."""

from __future__ import annotations

import asyncio
import ctypes
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bmv2.p4runtime import Controller
from conformance.switches import LIBRARY, Aggregator, TcSwitch
from finsy.proto import p4r
from p4runtime_tables import P4RuntimeTables

from atp_softswitch.library import SwitchLibrary
from atp_softswitch.pipeline import contract_path, load_p4info
from atp_softswitch.server import P4RuntimeService, start

STARTED_WITHIN_SECONDS = 15.0


class AdoptedLibrary(SwitchLibrary):
    """The server's data path on a switch that the test opened, so that the test sets its clock and ports."""

    def __init__(self, path: Path, handle: ctypes.c_void_p, aggregators: int, values: int) -> None:
        super().__init__(path, bpf=False, aggregators=1, values=62)
        super().close()
        self._handle, self._aggregators, self._values, self._target = handle, aggregators, values, "software-bpf"


class Server:
    """A P4Runtime server on a unix socket, in a thread of its own."""

    def __init__(self, library: SwitchLibrary, address: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.stop = asyncio.Event()
        self.ready = threading.Event()
        self.thread = threading.Thread(
            target=lambda: self.loop.run_until_complete(self.serve(library, address)), daemon=True
        )
        self.thread.start()
        if not self.ready.wait(STARTED_WITHIN_SECONDS):
            raise TimeoutError("the P4Runtime server did not start")

    async def serve(self, library: SwitchLibrary, address: str) -> None:
        server, _ = await start(P4RuntimeService(library, load_p4info(contract_path())), address)
        self.ready.set()
        await self.stop.wait()
        await server.stop(0)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(STARTED_WITHIN_SECONDS)
        self.loop.close()


class P4RuntimeTcSwitch(P4RuntimeTables, TcSwitch):
    """The tc program, with tables written, and counters and registers read, over P4Runtime."""

    name = "softswitch-p4runtime"

    def __init__(self, aggregators: int, values: int, stale_ns: int) -> None:
        super().__init__(aggregators, values, stale_ns)
        self.held = {}
        self.directory = Path(tempfile.mkdtemp(prefix="atp-p4runtime-"))
        try:
            adopted = AdoptedLibrary(LIBRARY, self.handle, aggregators, values)
            address = f"unix:{self.directory}/grpc"
            self.server = Server(adopted, address)
            self.controller = Controller(address, contract_path(), b"atp")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if hasattr(self, "controller"):
            self.controller.close()
        if hasattr(self, "server"):
            self.server.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        super().close()

    def aggregator(self, index: int) -> Aggregator:
        """From the register `aggregator`; its values, which P4Runtime does not show, from the data path."""
        direct = super().aggregator(index)
        numbers = self.register("aggregator", index)
        read = Aggregator(
            numbers[0],
            numbers[1],
            numbers[2],
            numbers[3],
            bool(numbers[4]),
            bool(numbers[5]),
            numbers[6],
            direct.values,
        )
        assert read == direct, "the register says something else than the data path"
        return read

    def register(self, name: str, index: int) -> Sequence[int]:
        entry = p4r.RegisterEntry(register_id=self.controller.find(self.controller.info.registers, name).preamble.id)
        entry.index.index = index
        found: Any = self.controller.read(p4r.Entity(register_entry=entry))[0]
        members = found.register_entry.data.struct.members
        return [int.from_bytes(member.bitstring, "big") for member in members]
