# SPDX-License-Identifier: Apache-2.0
"""P4Runtime client of one switch: stream, arbitration, reconnection, pipeline, reads and writes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import grpc
from finsy.proto import p4r, p4r_grpc, rpc_status
from google.protobuf import struct_pb2

from atp_api import reasons

from .codec import Codec, contract_path, describe, mismatch
from .entries import GROUP, JOB, REPLICA, Entry, Key, state
from .forwarding import FLOOD_GROUP
from .planner import GROUP_MAX, Batch, Limits
from .targets import is_software

OK, NOT_FOUND, ALREADY_EXISTS, RESOURCE_EXHAUSTED, OUT_OF_RANGE = 0, 5, 6, 8, 11
# p4.v1.Error.code in the error space of the software switch: the update names a port that it has not.
_SPACE, _NO_SUCH_PORT = "atp", 1
_CHUNK = 500
_RPC_SECONDS = 10.0
_PUSH_SECONDS = 60.0
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
    """One update that the switch refused. `code` is a gRPC canonical code, `reason` CamelCase."""

    entry: Entry
    code: int
    message: str
    reason: str = reasons.SWITCH_REFUSED


@dataclass(frozen=True)
class Facts:
    """What the switch says of itself; empty where it says nothing."""

    target: str = ""
    limits: Limits = field(default_factory=Limits)


def explain(error: grpc.RpcError) -> str:
    """Text of an RPC error."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)


@cache
def _software_pipeline() -> Codec:
    return Codec(contract_path())


class Driver:
    """Keeps one stream to a P4Runtime server open, as primary if it can.

    Election IDs: `election_id` at first (default: the time in milliseconds, so that a restarted agent outbids its
    predecessor). The agent does not outbid a higher one that is connected; when that one leaves, the agent takes
    over with the highest ID seen.

    `pipeline` is what the switch is to run. Without one, a software switch gets the contract, and any other switch
    keeps the ATP pipeline that it runs. A switch that runs something else is left alone unless `replace` is set.
    `problem`: why the pipeline that was asked for cannot be used at all.
    """

    def __init__(
        self,
        address: str,
        pipeline: Codec | None = None,
        *,
        problem: str = "",
        replace: bool = False,
        device_id: int = 1,
        election_id: int | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._given = pipeline
        self._problem = problem
        self._replace = replace
        self._codec = pipeline
        self._told_target = ""
        self._adopted = False
        self._address = address
        self._device_id = device_id
        self._election_id = election_id or time.time_ns() // 1_000_000
        self.on_change = on_change
        self._stub: p4r_grpc.P4RuntimeAsyncStub | None = None
        self._no_registers = -1
        self._written: dict[Key, Entry] = {}
        self.link = Link(False, False, reasons.SWITCH_UNREACHABLE, f"no connection to {address} yet")

    @property
    def codec(self) -> Codec | None:
        """The pipeline in force; None while it is not known."""
        return self._codec

    def _pipeline(self) -> Codec:
        if self._codec is None:
            raise SwitchLost(reasons.PIPELINE_MISSING, "the agent knows no pipeline of this switch yet")
        return self._codec

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
                self._lost(*self._why(error))
            finally:
                self._stub = None
            if self.link.session > before:
                backoff = _BACKOFF_FIRST
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(backoff * 2, _BACKOFF_LAST)

    def _why(self, error: grpc.RpcError) -> tuple[str, str]:
        """Reason and message for a stream that failed."""
        text = f"P4Runtime server {self._address}: {explain(error)}"
        code = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
        if code == grpc.StatusCode.NOT_FOUND:
            return reasons.DEVICE_NOT_FOUND, f"{text}; give the agent the --device-id of the switch"
        if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ALREADY_EXISTS):
            return reasons.NOT_MASTER, (
                f"{text}; the switch does not take the bid with election ID {self._election_id}: is there another "
                "agent of this switch with the same --election-id?"
            )
        return reasons.SWITCH_UNREACHABLE, f"{text}; trying again"

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        stub: p4r_grpc.P4RuntimeAsyncStub = p4r_grpc.P4RuntimeStub(channel)
        channel_call: Any = stub.StreamChannel  # its type asks for an iterator of requests; writing goes without
        stream: grpc.aio.StreamStreamCall[Any, p4r.StreamMessageResponse] = channel_call()
        try:
            await self._send_bid(stream)
            async for message in stream:
                if message.WhichOneof("update") == "arbitration" and self._arbitrated(message.arbitration, stub):
                    await self._send_bid(stream)
        finally:
            stream.cancel()
        self._lost(reasons.SWITCH_UNREACHABLE, f"P4Runtime server {self._address} closed the stream; trying again")

    async def _send_bid(self, stream: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        request = p4r.StreamMessageRequest()
        request.arbitration.device_id = self._device_id
        request.arbitration.election_id.CopyFrom(self._election())
        # A stream that has ended refuses to be written; why it ended is what reading it raises.
        with contextlib.suppress(asyncio.InvalidStateError):
            await stream.write(request)

    def _election(self) -> p4r.Uint128:
        return p4r.Uint128(high=self._election_id >> 64, low=self._election_id & 0xFFFFFFFFFFFFFFFF)

    def _arbitrated(
        self,
        update: p4r.MasterArbitrationUpdate,
        stub: p4r_grpc.P4RuntimeAsyncStub,
    ) -> bool:
        """Take note of who is primary. True: bid again."""
        highest = (update.election_id.high << 64) | update.election_id.low
        code = update.status.code
        self._stub = stub
        if code == OK:
            session = self.link.session if self.link.primary else self.link.session + 1
            self._set(Link(True, True, "", "", session))
        elif code == NOT_FOUND:
            # Nobody is primary: the one who outbid this agent is gone.
            self._election_id = max(highest, self._election_id)
            self._set(Link(True, False, reasons.NOT_MASTER, "the switch has no primary; bidding", self.link.session))
            return True
        else:
            self._set(
                Link(
                    True,
                    False,
                    reasons.NOT_MASTER,
                    f"another controller, election ID {highest}, is primary of this switch; "
                    f"this agent ({self._election_id}) waits for it to leave",
                    self.link.session,
                )
            )
        return False

    # -- calls -------------------------------------------------------------------------------------

    def _ready(self, *, primary: bool) -> p4r_grpc.P4RuntimeAsyncStub:
        if self._stub is None or (primary and not self.link.primary):
            raise SwitchLost(self.link.reason or reasons.SWITCH_UNREACHABLE, self.link.message)
        return self._stub

    @staticmethod
    def _raise(error: grpc.aio.AioRpcError) -> None:
        if error.code() in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.DEADLINE_EXCEEDED,
            grpc.StatusCode.CANCELLED,
        ):
            raise SwitchLost(reasons.SWITCH_UNREACHABLE, explain(error)) from error
        if error.code() == grpc.StatusCode.PERMISSION_DENIED:
            raise SwitchLost(reasons.NOT_MASTER, explain(error)) from error

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
        self._told_target = told.fields["target"].string_value
        return Facts(
            target=told.fields["target"].string_value,
            limits=Limits(
                aggregators=_number(told, "aggregators"),
                values=_numbers(told, "values"),
                multicast_groups=_number(told, "multicastGroups") or Limits().multicast_groups,
            ),
        )

    async def ensure_pipeline(self) -> bool:
        """See that the switch runs the pipeline; True if it was pushed: all tables are empty then.

        Call after `facts`. Raises SwitchLost with PipelineMismatch (the switch runs another program, refuses this one,
        or the one asked for is no ATP pipeline), PipelineMissing (the switch runs none, and the agent has none for it)
        or PipelineRefused (the switch failed to load it).
        """
        if self._problem:
            raise SwitchLost(reasons.PIPELINE_MISMATCH, self._problem)
        running = await self._running(p4r.GetForwardingPipelineConfigRequest.COOKIE_ONLY)
        cookie = running.cookie.cookie if running is not None and running.HasField("cookie") else None
        wanted = self._given
        if wanted is None and is_software(self._told_target):
            wanted = _software_pipeline()
        held = wanted or self._codec
        if cookie is not None and held is not None and cookie == held.cookie:
            self._codec = held
            return False
        if running is not None:
            running = await self._running(p4r.GetForwardingPipelineConfigRequest.P4INFO_AND_COOKIE)
        if running is not None and running.HasField("p4info"):
            wrong = mismatch(running.p4info)
            if wanted is None and not wrong:
                self._adopt(running)
                return False
            if wrong and not self._replace:
                raise SwitchLost(
                    reasons.PIPELINE_MISMATCH,
                    f"the switch runs pipeline {describe(running.p4info)}, which is not that of ATP "
                    f"({'; '.join(wrong[:3])}): load the ATP program, or start the agent with --replace-pipeline if "
                    "the other one may go",
                )
        if wanted is None:
            raise SwitchLost(
                reasons.PIPELINE_MISSING,
                "the switch runs no ATP pipeline and the agent has none for it: start the agent with --target bmv2, "
                "or with --p4info and --device-config of the program compiled for the switch",
            )
        await self._push(wanted)
        return True

    async def _running(
        self, part: p4r.GetForwardingPipelineConfigRequest.ResponseType.ValueType
    ) -> p4r.ForwardingPipelineConfig | None:
        """The pipeline that the switch runs; None if none."""
        request = p4r.GetForwardingPipelineConfigRequest(device_id=self._device_id, response_type=part)
        try:
            reply = await self._ready(primary=True).GetForwardingPipelineConfig(request, timeout=_RPC_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND):
                return None
            self._raise(error)
            raise SwitchLost(reasons.PIPELINE_UNKNOWN, explain(error)) from error
        return reply.config

    def _adopt(self, running: p4r.ForwardingPipelineConfig) -> None:
        if self._adopted and self._codec is not None and self._codec.p4info == running.p4info:
            return  # a switch that keeps no cookie
        try:
            self._codec = Codec(running.p4info, cookie=running.cookie.cookie)
        except ValueError as error:
            raise SwitchLost(reasons.PIPELINE_MISMATCH, str(error)) from error
        self._adopted = True
        log.info("pipeline adopted", extra={"pipeline": self._codec.name, "target": self._codec.target.name})

    async def _push(self, wanted: Codec) -> None:
        if wanted.device_config is None:
            raise SwitchLost(
                reasons.PIPELINE_MISMATCH,
                f"the switch does not run pipeline {wanted.name}, and the agent cannot load it without a "
                "--device-config: load it by the means of the switch, or give the file",
            )
        push = p4r.SetForwardingPipelineConfigRequest(
            device_id=self._device_id,
            election_id=self._election(),
            action=p4r.SetForwardingPipelineConfigRequest.VERIFY_AND_COMMIT,
            config=wanted.config(),
        )
        try:
            await self._ready(primary=True).SetForwardingPipelineConfig(push, timeout=_PUSH_SECONDS)
        except grpc.aio.AioRpcError as error:
            self._raise(error)
            text = f"the switch refuses pipeline {wanted.name}: {explain(error)}"
            if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                raise SwitchLost(
                    reasons.PIPELINE_MISMATCH,
                    f"{text}; give the agent --p4info and --device-config of this switch's program",
                ) from error
            raise SwitchLost(reasons.PIPELINE_REFUSED, text) from error
        self._codec = wanted
        self._written.clear()
        log.info("pipeline pushed", extra={"pipeline": wanted.name, "target": wanted.target.name})

    async def read(self) -> dict[Key, Entry]:
        """Every entry and group of jobs that the switch holds.

        Groups above the jobs' range are not the agent's: a hardware switch floods with them.
        """
        codec = self._pipeline()
        found = [codec.decode(entity) for entity in await self._read(codec.wildcards())]
        return state(
            self._marked(entry)
            for entry in found
            if entry.table not in (GROUP, REPLICA) or entry.number(0) <= GROUP_MAX
        )

    async def read_forwarding(self, tables: Collection[str]) -> dict[Key, Entry]:
        """Entries and default actions of these tables for ordinary traffic, and the group of all ports."""
        codec = self._pipeline()
        cells = codec.forwarding_wildcards(tables)
        if not cells:
            return {}
        found = [codec.decode(entity) for entity in await self._read(cells)]
        return state(entry for entry in found if entry.table != GROUP or entry.number(0) == FLOOD_GROUP)

    def _marked(self, entry: Entry) -> Entry:
        """The entry with the owner's mark that the agent wrote, on targets that do not keep metadata."""
        written = self._written.get(entry.key)
        if entry.table == JOB and not entry.metadata and written and written.params == entry.params:
            return written
        return entry

    async def write(self, batch: Batch) -> list[Refusal]:
        """Write one batch, in chunks; returns what the switch refused."""
        codec = self._pipeline()
        refused: list[Refusal] = []
        for start in range(0, len(batch), _CHUNK):
            chunk = batch[start : start + _CHUNK]
            messages: list[p4r.Update] = []
            sent: list[Entry] = []
            for update in chunk:
                try:
                    messages.append(codec.encode(update))
                    sent.append(update.entry)
                except ValueError as error:
                    refused.append(Refusal(update.entry, OUT_OF_RANGE, str(error)))
            errors = await self._write(messages)
            self._written.update((entry.key, entry) for entry in sent if entry.table == JOB)
            refused += [
                Refusal(entry, error.canonical_code, error.message, _reason(error))
                for entry, error in zip(sent, errors, strict=True)
                if error.canonical_code != OK
            ]
        return refused

    async def reset_counters(self, job_ids: Iterable[int]) -> None:
        """Set the counters of jobs to zero, so that they count from the start of their epoch."""
        codec = self._pipeline()
        updates = [
            p4r.Update(type=p4r.Update.MODIFY, entity=cell)
            for job_id in job_ids
            for cell in codec.counter_cells(job_id, reset=True)
        ]
        for start in range(0, len(updates), _CHUNK):
            errors = await self._write(updates[start : start + _CHUNK])
            failed = [error.message for error in errors if error.canonical_code != OK]
            if failed:
                log.warning("counters not reset", extra={"cells": len(failed), "reason": failed[0]})

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
            return [p4r.Error(canonical_code=code, message=explain(error)) for _ in updates]
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
            raise SwitchLost(reasons.READ_FAILED, explain(error)) from error
        return found

    async def counters(self, job_ids: Iterable[int]) -> dict[int, dict[str, int]]:
        """Counters of each job by name."""
        codec = self._pipeline()
        job_ids = list(job_ids)
        counted = codec.tally(await self._read(codec.counter_reads(job_ids)))
        return {job_id: counted.get(job_id, {}) for job_id in job_ids}

    async def occupancy(self, job_ids: Iterable[int]) -> dict[int, int] | None:
        """Aggregators in use by job ID (0: by all), None where the target does not let registers be read."""
        register = self._pipeline().occupancy_register
        if register is None:
            return None
        cells = []
        for job_id in job_ids:
            cell = p4r.RegisterEntry(register_id=register)
            cell.index.index = job_id
            cells.append(p4r.Entity(register_entry=cell))
        found = await self._read_registers(cells)
        if found is None:
            return None
        return {
            entity.register_entry.index.index: int.from_bytes(entity.register_entry.data.bitstring, "big")
            for entity in found
        }

    async def _read_registers(self, cells: Sequence[p4r.Entity]) -> list[p4r.Entity] | None:
        """None where the target does not let registers be read, which is asked once a session."""
        if self._no_registers == self.link.session:
            return None
        try:
            return await self._read(cells)
        except SwitchLost as error:
            if error.reason != reasons.READ_FAILED:
                raise
            self._no_registers = self.link.session
            return None

    async def drops(self) -> list[dict[str, int]]:
        """Ports at which something was dropped, from the register `dropped` or the counter `drops`; empty without."""
        codec = self._pipeline()
        if codec.drops_counter is not None:
            whole = p4r.Entity(counter_entry=p4r.CounterEntry(counter_id=codec.drops_counter))
            return codec.tally_drops(await self._read([whole]))
        if codec.dropped_register is None:
            return []
        cell = p4r.RegisterEntry(register_id=codec.dropped_register)
        cells = await self._read_registers([p4r.Entity(register_entry=cell)]) or ()
        found = [codec.decode_dropped(entity) for entity in cells]
        return [drops for drops in found if drops["port"]]


def _reason(error: p4r.Error) -> str:
    """Reason of a refused update."""
    if error.canonical_code == RESOURCE_EXHAUSTED:
        return reasons.SWITCH_FULL
    if error.space == _SPACE and error.code == _NO_SUCH_PORT:
        return reasons.PORT_NOT_FOUND
    return reasons.SWITCH_REFUSED


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
