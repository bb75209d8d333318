# SPDX-License-Identifier: Apache-2.0
"""P4Runtime client of one switch: stream, arbitration, reconnection, pipeline, reads and writes."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from finsy.proto import p4r, p4r_grpc, rpc_status
from google.protobuf import struct_pb2

from .codec import Codec
from .entries import GROUP, JOB, REPLICA, Entry, Key, state
from .planner import GROUP_MAX, Batch, Limits

OK, NOT_FOUND, ALREADY_EXISTS, RESOURCE_EXHAUSTED = 0, 5, 6, 8
_CHUNK = 500
_RPC_SECONDS = 10.0
_BACKOFF_FIRST, _BACKOFF_LAST = 0.2, 5.0

log = logging.getLogger("atp_switch_agent.driver")

_CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 10000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    # Each attempt makes a channel of its own; without this they would share one subchannel and its back-off.
    ("grpc.use_local_subchannel_pool", 1),
)


class SwitchLost(Exception):
    """The switch cannot be reached, or the agent is not its primary any more. `reason` is CamelCase."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True)
class Link:
    """The stream to the switch. `session` grows each time the agent becomes primary on a new or regained stream."""

    connected: bool
    primary: bool
    reason: str
    message: str
    session: int = 0


@dataclass(frozen=True)
class Refusal:
    """One update that the switch refused. `code` is a gRPC canonical code."""

    entry: Entry
    code: int
    message: str


@dataclass(frozen=True)
class Facts:
    """What the switch says of itself; empty where it says nothing."""

    target: str = ""
    limits: Limits = field(default_factory=Limits)


def describe(error: grpc.RpcError) -> str:
    """Text of an RPC error."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)


class Driver:
    """Keeps one stream to a P4Runtime server open, as primary if it can.

    Election IDs: `election_id` at first (default: the time in milliseconds, so that a restarted agent outbids its
    predecessor). The agent does not outbid a higher one that is connected; when that one leaves, the agent takes
    over with the highest ID seen.
    """

    def __init__(
        self,
        address: str,
        codec: Codec,
        *,
        device_id: int = 1,
        election_id: int | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.codec = codec
        self._address = address
        self._device_id = device_id
        self._election_id = election_id or time.time_ns() // 1_000_000
        self.on_change = on_change
        self._stub: p4r_grpc.P4RuntimeAsyncStub | None = None
        self._no_registers = -1
        self._written: dict[Key, Entry] = {}
        self.link = Link(False, False, "SwitchUnreachable", f"no connection to {address} yet")

    # -- the stream --------------------------------------------------------------------------------

    def _set(self, link: Link) -> None:
        if link != self.link:
            self.link = link
            log.info(
                "switch link",
                extra={
                    "connected": link.connected,
                    "primary": link.primary,
                    "reason": link.reason,
                    "detail": link.message,
                },
            )
            self.on_change()

    def _lost(self, reason: str, message: str) -> None:
        self._stub = None
        self._set(Link(False, False, reason, message, self.link.session))

    async def run(self) -> None:
        """Connect, arbitrate, follow the stream, and again, until cancelled."""
        backoff = _BACKOFF_FIRST
        while True:
            before = self.link.session
            try:
                async with grpc.aio.insecure_channel(self._address, options=_CHANNEL_OPTIONS) as channel:
                    await self._follow(channel)
            except grpc.RpcError as error:
                self._lost("SwitchUnreachable", f"P4Runtime server {self._address}: {describe(error)}; trying again")
            finally:
                self._stub = None
            if self.link.session > before:
                backoff = _BACKOFF_FIRST
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(backoff * 2, _BACKOFF_LAST)

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        stub: p4r_grpc.P4RuntimeAsyncStub = p4r_grpc.P4RuntimeStub(channel)
        outgoing: asyncio.Queue[p4r.StreamMessageRequest] = asyncio.Queue()
        outgoing.put_nowait(self._bid())

        async def requests() -> AsyncIterator[p4r.StreamMessageRequest]:
            while True:
                yield await outgoing.get()

        stream = stub.StreamChannel(requests())
        try:
            async for message in stream:
                if message.WhichOneof("update") == "arbitration":
                    self._arbitrated(message.arbitration, stub, outgoing)
        finally:
            stream.cancel()
        self._lost("SwitchUnreachable", f"P4Runtime server {self._address} closed the stream; trying again")

    def _bid(self) -> p4r.StreamMessageRequest:
        request = p4r.StreamMessageRequest()
        request.arbitration.device_id = self._device_id
        request.arbitration.election_id.CopyFrom(self._election())
        return request

    def _election(self) -> p4r.Uint128:
        return p4r.Uint128(high=self._election_id >> 64, low=self._election_id & 0xFFFFFFFFFFFFFFFF)

    def _arbitrated(
        self,
        update: p4r.MasterArbitrationUpdate,
        stub: p4r_grpc.P4RuntimeAsyncStub,
        outgoing: asyncio.Queue[p4r.StreamMessageRequest],
    ) -> None:
        highest = (update.election_id.high << 64) | update.election_id.low
        code = update.status.code
        self._stub = stub
        if code == OK:
            session = self.link.session if self.link.primary else self.link.session + 1
            self._set(Link(True, True, "", "", session))
        elif code == NOT_FOUND:
            # Nobody is primary: the one who outbid this agent is gone.
            self._election_id = max(highest, self._election_id)
            self._set(Link(True, False, "NotMaster", "the switch has no primary; bidding", self.link.session))
            outgoing.put_nowait(self._bid())
        else:
            self._set(
                Link(
                    True,
                    False,
                    "NotMaster",
                    f"another controller, election ID {highest}, is primary of this switch; "
                    f"this agent ({self._election_id}) waits for it to leave",
                    self.link.session,
                )
            )

    # -- calls -------------------------------------------------------------------------------------

    def _ready(self, *, primary: bool) -> p4r_grpc.P4RuntimeAsyncStub:
        if self._stub is None or (primary and not self.link.primary):
            raise SwitchLost(self.link.reason or "SwitchUnreachable", self.link.message)
        return self._stub

    @staticmethod
    def _raise(error: grpc.aio.AioRpcError) -> None:
        if error.code() in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.DEADLINE_EXCEEDED,
            grpc.StatusCode.CANCELLED,
        ):
            raise SwitchLost("SwitchUnreachable", describe(error)) from error
        if error.code() == grpc.StatusCode.PERMISSION_DENIED:
            raise SwitchLost("NotMaster", describe(error)) from error

    async def facts(self) -> Facts:
        """What the switch can hold, if its server says so in Capabilities.experimental; other servers say nothing."""
        stub = self._ready(primary=False)
        try:
            reply = await stub.Capabilities(p4r.CapabilitiesRequest(device_id=self._device_id), timeout=_RPC_SECONDS)
        except grpc.aio.AioRpcError as error:
            self._raise(error)
            return Facts()
        told = struct_pb2.Struct()
        if not reply.experimental.Unpack(told):
            return Facts()
        return Facts(
            target=told.fields["target"].string_value,
            limits=Limits(
                aggregators=_number(told, "aggregators"),
                values=_numbers(told, "values"),
                multicast_groups=_number(told, "multicastGroups") or Limits().multicast_groups,
            ),
        )

    async def ensure_pipeline(self) -> bool:
        """Push the pipeline unless the switch runs it already. True if it was pushed: all tables are empty then."""
        stub = self._ready(primary=True)
        request = p4r.GetForwardingPipelineConfigRequest(
            device_id=self._device_id, response_type=p4r.GetForwardingPipelineConfigRequest.COOKIE_ONLY
        )
        try:
            reply = await stub.GetForwardingPipelineConfig(request, timeout=_RPC_SECONDS)
            if reply.config.HasField("cookie") and reply.config.cookie.cookie == self.codec.cookie:
                return False
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND):
                self._raise(error)
                raise SwitchLost("PipelineUnknown", describe(error)) from error
        push = p4r.SetForwardingPipelineConfigRequest(
            device_id=self._device_id,
            election_id=self._election(),
            action=p4r.SetForwardingPipelineConfigRequest.VERIFY_AND_COMMIT,
            config=self.codec.config(),
        )
        try:
            await stub.SetForwardingPipelineConfig(push, timeout=60.0)
        except grpc.aio.AioRpcError as error:
            self._raise(error)
            raise SwitchLost("PipelineRefused", f"the switch refuses the pipeline: {describe(error)}") from error
        self._written.clear()
        log.info("pipeline pushed", extra={"pipeline": self.codec.name})
        return True

    async def read(self) -> dict[Key, Entry]:
        """Every entry and group of jobs that the switch holds.

        Groups above the jobs' range are not the agent's: a hardware switch floods with them.
        """
        found = [self.codec.decode(entity) for entity in await self._read(self.codec.wildcards())]
        return state(
            self._marked(entry)
            for entry in found
            if entry.table not in (GROUP, REPLICA) or entry.number(0) <= GROUP_MAX
        )

    def _marked(self, entry: Entry) -> Entry:
        """The entry with the owner's mark that the agent wrote, on targets that do not keep metadata."""
        written = self._written.get(entry.key)
        if entry.table == JOB and not entry.metadata and written and written.params == entry.params:
            return written
        return entry

    async def write(self, batch: Batch) -> list[Refusal]:
        """Write one batch, in chunks; returns what the switch refused."""
        refused: list[Refusal] = []
        for start in range(0, len(batch), _CHUNK):
            chunk = batch[start : start + _CHUNK]
            messages: list[p4r.Update] = []
            sent: list[Entry] = []
            for update in chunk:
                try:
                    messages.append(self.codec.encode(update))
                    sent.append(update.entry)
                except ValueError as error:
                    refused.append(Refusal(update.entry, 11, str(error)))
            errors = await self._write(messages)
            self._written.update((entry.key, entry) for entry in sent if entry.table == JOB)
            refused += [
                Refusal(entry, error.canonical_code, error.message)
                for entry, error in zip(sent, errors, strict=True)
                if error.canonical_code != OK
            ]
        return refused

    async def reset_counters(self, job_ids: Iterable[int]) -> None:
        """Set the counters of jobs to zero, so that they count from the start of their epoch."""
        for job_id in job_ids:
            cells = self.codec.counter_cells(job_id, reset=True)
            errors = await self._write([p4r.Update(type=p4r.Update.MODIFY, entity=cell) for cell in cells])
            failed = [error.message for error in errors if error.canonical_code != OK]
            if failed:
                log.warning("counters not reset", extra={"job_id": job_id, "reason": failed[0]})

    async def _write(self, updates: Sequence[p4r.Update]) -> list[p4r.Error]:
        """One p4.v1.Error an update."""
        if not updates:
            return []
        stub = self._ready(primary=True)
        request = p4r.WriteRequest(device_id=self._device_id, election_id=self._election(), updates=updates)
        try:
            await stub.Write(request, timeout=_RPC_SECONDS)
        except grpc.aio.AioRpcError as error:
            self._raise(error)
            details = _details(error)
            if len(details) == len(updates):
                return details
            code = int(error.code().value[0])
            return [p4r.Error(canonical_code=code, message=describe(error)) for _ in updates]
        return [p4r.Error() for _ in updates]

    async def _read(self, entities: Sequence[p4r.Entity]) -> list[p4r.Entity]:
        stub = self._ready(primary=False)
        request = p4r.ReadRequest(device_id=self._device_id, entities=entities)
        found: list[p4r.Entity] = []
        try:
            async for reply in stub.Read(request, timeout=_RPC_SECONDS):
                found += reply.entities
        except grpc.aio.AioRpcError as error:
            self._raise(error)
            raise SwitchLost("ReadFailed", describe(error)) from error
        return found

    async def counters(self, job_ids: Iterable[int]) -> dict[int, dict[str, int]]:
        """Counters of each job by name."""
        job_ids = list(job_ids)
        cells = [cell for job_id in job_ids for cell in self.codec.counter_cells(job_id)]
        result: dict[int, dict[str, int]] = {job_id: {} for job_id in job_ids}
        for entity in await self._read(cells):
            cell = entity.counter_entry
            name, counts_bytes = self.codec.counters[cell.counter_id]
            value = cell.data.byte_count if counts_bytes else cell.data.packet_count
            result[cell.index.index][name] = value
        return result

    async def occupancy(self, job_ids: Iterable[int]) -> dict[int, int] | None:
        """Aggregators in use by job ID (0: by all), None where the target does not let registers be read."""
        register = self.codec.occupancy_register
        if register is None or self._no_registers == self.link.session:
            return None
        cells = []
        for job_id in job_ids:
            cell = p4r.RegisterEntry(register_id=register)
            cell.index.index = job_id
            cells.append(p4r.Entity(register_entry=cell))
        try:
            found = await self._read(cells)
        except SwitchLost as error:
            if error.reason != "ReadFailed":
                raise
            self._no_registers = self.link.session
            return None
        return {
            entity.register_entry.index.index: int.from_bytes(entity.register_entry.data.bitstring, "big")
            for entity in found
        }


def _number(told: struct_pb2.Struct, name: str) -> int:
    return int(told.fields[name].number_value)


def _numbers(told: struct_pb2.Struct, name: str) -> tuple[int, ...]:
    return tuple(int(item.number_value) for item in told.fields[name].list_value.values)


def _details(error: grpc.aio.AioRpcError) -> list[p4r.Error]:
    """The p4.v1.Error of each update of a failed batch; empty if the server sent none."""
    metadata: Iterable[Any] = error.trailing_metadata() or ()
    for name, value in metadata:
        if name == "grpc-status-details-bin" and isinstance(value, bytes):
            status = rpc_status.Status.FromString(value)
            found = []
            for packed in status.details:
                detail = p4r.Error()
                packed.Unpack(detail)
                found.append(detail)
            return found
    return []
