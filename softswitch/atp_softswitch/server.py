# SPDX-License-Identifier: Apache-2.0
"""The P4Runtime 1.x service: streams, pipeline configuration, writes and reads. Thin; the state is in `device`."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from finsy.proto import p4i, p4r, p4r_grpc, rpc_status
from google.protobuf import any_pb2, struct_pb2

from .arbitration import Arbiter, Notice
from .dataplane import GROUP_MAX, PROFILES, AggregatorState, Dataplane, Host, JobConfig, PortDrops, Replica
from .device import Device, NoPort
from .errors import Code, P4RuntimeError
from .journal import Journal
from .pipeline import Pipeline, verify

API_VERSION = "1.5.0"
MESSAGE_BYTES_MAX = 16 << 20
_READ_BATCH = 512

log = logging.getLogger("atp_softswitch.server")

_GRPC_CODE = {code.value[0]: code for code in grpc.StatusCode}
_SetRequest = p4r.SetForwardingPipelineConfigRequest
_GetRequest = p4r.GetForwardingPipelineConfigRequest
Context = grpc.aio.ServicerContext[Any, Any]


class _StagedDataplane:
    """Takes every change and does nothing: what is written between VERIFY_AND_SAVE and COMMIT has no data path yet."""

    def __init__(self, live: Dataplane) -> None:
        self._live = live
        self.target = live.target
        self.aggregators = live.aggregators
        self.values = live.values

    def set_job(self, job_id: int, config: JobConfig) -> None: ...
    def delete_job(self, job_id: int) -> None: ...
    def set_admission(self, job_id: int, port: int, edge: int, bitmap: int) -> None: ...
    def delete_admission(self, job_id: int, port: int, edge: int, bitmap: int) -> None: ...
    def set_transit(self, job_id: int, port: int, bitmap1: int, mask0: int) -> None: ...
    def delete_transit(self, job_id: int, port: int, bitmap1: int) -> None: ...
    def set_ps_port(self, job_id: int, port: int) -> None: ...
    def delete_ps_port(self, job_id: int, port: int) -> None: ...
    def set_host(self, job_id: int, address: int, host: Host) -> None: ...
    def delete_host(self, address: int) -> None: ...
    def set_group(self, group: int, replicas: Sequence[Replica]) -> None: ...

    def read_drops(self) -> Sequence[PortDrops]:
        return self._live.read_drops()

    def read_counters(self, job_id: int) -> Mapping[str, int]:
        return self._live.read_counters(job_id)

    def read_aggregator(self, index: int) -> AggregatorState:
        return self._live.read_aggregator(index)

    def occupancy(self, job_id: int) -> int:
        return self._live.occupancy(job_id)

    def sweep(self) -> int:
        return self._live.sweep()


@dataclass
class _Loaded:
    """A pipeline configuration in force or saved, and the state that belongs to it."""

    config: p4r.ForwardingPipelineConfig
    device: Device


def election_number(message: p4r.Uint128) -> int:
    """A Uint128 as an int."""
    return (message.high << 64) | message.low


def _role_name(role: str, role_id: int) -> str:
    return role or (f"id:{role_id}" if role_id else "")


def _error_details(results: Iterable[P4RuntimeError | None]) -> rpc_status.Status:
    """The status of a failed batch: one p4.v1.Error an update, in order (section "Write RPC", error reporting)."""
    status = rpc_status.Status(code=Code.UNKNOWN, message="some updates of the batch failed; see the details")
    for result in results:
        error = p4r.Error(canonical_code=Code.OK)
        if result is not None:
            error = p4r.Error(canonical_code=result.code, message=result.message, space="atp", code=result.detail)
        packed = any_pb2.Any()
        packed.Pack(error)
        status.details.append(packed)
    return status


async def _abort(context: Context, error: P4RuntimeError) -> NoReturn:
    await context.abort(_GRPC_CODE[error.code], error.message)
    raise AssertionError("abort returned")


class P4RuntimeService(p4r_grpc.P4RuntimeServicer):
    """One switch. Tables are empty and no pipeline is loaded at start: a controller must push it, and its state; unless
    there is a journal of tables that were there before (`restore`).

    All state is touched in the event loop's thread only.
    """

    def __init__(
        self,
        dataplane: Dataplane,
        contract: p4i.P4Info,
        device_id: int = 1,
        on_change: Callable[[], None] = lambda: None,
        no_port: NoPort = lambda port: None,
        journal: Journal | None = None,
    ) -> None:
        """`on_change` is called after entries of the committed pipeline may have changed; `no_port`: see Device."""
        self._journal = journal
        self._no_port = no_port
        self._on_change = on_change
        self._dataplane = dataplane
        self._contract = contract
        self._arbiter = Arbiter(device_id)
        self._sessions: dict[int, asyncio.Queue[p4r.StreamMessageResponse]] = {}
        self._numbers = itertools.count(1)
        self._live: _Loaded | None = None
        self._saved: _Loaded | None = None

    @property
    def device(self) -> Device | None:
        """State of the committed pipeline; None before the first push."""
        return self._live.device if self._live else None

    @property
    def streams(self) -> int:
        """Open controller streams."""
        return len(self._sessions)

    # -- state that outlives the process -----------------------------------------------------------

    def restore(self) -> bool:
        """Take over what the journal says of the data path's tables. False: nothing, and they have to be emptied."""
        saved = self._journal.load() if self._journal else None
        if saved is None:
            return False
        try:
            pipeline = verify(saved.config.p4info, self._contract)
            staged = Device(pipeline, _StagedDataplane(self._dataplane))
            results = staged.write(saved.updates, p4r.WriteRequest.CONTINUE_ON_ERROR)
            if any(results):
                return False
            staged.counter_bases = saved.counter_bases
            device = Device(pipeline, self._dataplane, self._no_port)
            staged.copy_into(device)
        except P4RuntimeError as error:
            log.warning("cannot take over", extra={"code": error.code.name, "reason": error.message})
            return False
        self._live = _Loaded(saved.config, device)
        self._write_down()
        return True

    def _write_down(self) -> None:
        if self._journal and self._live:
            device = self._live.device
            self._journal.rewrite(self._live.config, device.entities(), device.counter_bases)

    def _write_live(self, request: p4r.WriteRequest) -> list[P4RuntimeError | None]:
        """Carry out a batch, written down before and after."""
        device = self._current().device
        updates = list(request.updates)
        if self._journal is None or self._saved is not None:
            return device.write(updates, request.atomicity)
        bases = dict(device.counter_bases)
        self._journal.begin(updates)
        results = device.write(updates, request.atomicity)
        changed = {cell: base for cell, base in device.counter_bases.items() if bases.get(cell) != base}
        self._journal.end((result is None for result in results), changed)
        if self._journal.is_long:
            self._write_down()
        return results

    # -- StreamChannel -----------------------------------------------------------------------------

    def _deliver(self, notices: list[Notice]) -> None:
        for notice in notices:
            queue = self._sessions.get(notice.session)
            if queue is None:
                continue
            message = p4r.StreamMessageResponse()
            update = message.arbitration
            update.device_id = self._arbiter.device_id
            if notice.role:
                update.role.name = notice.role
            if notice.election_id is not None:
                update.election_id.high = notice.election_id >> 64
                update.election_id.low = notice.election_id & 0xFFFFFFFFFFFFFFFF
            update.status.code = notice.code
            if notice.code != Code.OK:
                there = notice.code == Code.ALREADY_EXISTS
                update.status.message = "another controller is primary" if there else "there is no primary"
            queue.put_nowait(message)

    def _arbitrate(self, session: int, update: p4r.MasterArbitrationUpdate) -> None:
        if update.role.HasField("config"):
            raise P4RuntimeError(Code.UNIMPLEMENTED, "role configurations are not offered; leave role.config out")
        election_id = election_number(update.election_id) if update.HasField("election_id") else None
        role = _role_name(update.role.name, update.role.id)
        notices = self._arbiter.update(session, update.device_id, role, election_id)
        log.info("arbitration", extra={"session": session, "role": role, "election_id": election_id})
        self._deliver(notices)

    async def _receive(
        self,
        session: int,
        requests: AsyncIterator[p4r.StreamMessageRequest],
        queue: asyncio.Queue[p4r.StreamMessageResponse],
    ) -> None:
        arbitrated = False
        async for request in requests:
            kind = request.WhichOneof("update")
            if kind == "arbitration":
                self._arbitrate(session, request.arbitration)
                arbitrated = True
            elif not arbitrated:
                raise P4RuntimeError(
                    Code.FAILED_PRECONDITION,
                    "the first message of a stream must be a MasterArbitrationUpdate",
                )
            else:
                reply = p4r.StreamMessageResponse()
                reply.error.canonical_code = Code.UNIMPLEMENTED
                reply.error.message = "this pipeline has no packet I/O and no digests"
                if kind == "packet":
                    reply.error.packet_out.packet_out.CopyFrom(request.packet)
                elif kind == "digest_ack":
                    reply.error.digest_list_ack.digest_list_ack.CopyFrom(request.digest_ack)
                else:
                    reply.error.other.SetInParent()
                queue.put_nowait(reply)

    async def StreamChannel(
        self, request_iterator: AsyncIterator[p4r.StreamMessageRequest], context: Context
    ) -> AsyncIterator[p4r.StreamMessageResponse]:
        session = next(self._numbers)
        queue: asyncio.Queue[p4r.StreamMessageResponse] = asyncio.Queue()
        self._sessions[session] = queue
        receiver = asyncio.create_task(self._receive(session, request_iterator, queue))
        getter: asyncio.Task[p4r.StreamMessageResponse] | None = None
        try:
            while True:
                getter = asyncio.create_task(queue.get())
                await asyncio.wait({receiver, getter}, return_when=asyncio.FIRST_COMPLETED)
                if getter.done():
                    yield getter.result()
                    continue
                error = receiver.exception()
                if isinstance(error, P4RuntimeError):
                    await _abort(context, error)
                return
        finally:
            receiver.cancel()
            if getter is not None:
                getter.cancel()
            del self._sessions[session]
            self._deliver(self._arbiter.leave(session))
            log.info("stream closed", extra={"session": session})

    # -- pipeline configuration --------------------------------------------------------------------

    def _configure(self, request: _SetRequest) -> None:
        election_id = election_number(request.election_id) if request.HasField("election_id") else None
        self._arbiter.check(request.device_id, _role_name(request.role, request.role_id), election_id)
        if request.action == _SetRequest.COMMIT:
            if request.HasField("config"):
                raise P4RuntimeError(Code.INVALID_ARGUMENT, "COMMIT takes no config; it realises the saved one")
            if self._saved is None:
                raise P4RuntimeError(Code.FAILED_PRECONDITION, "no config is saved; use VERIFY_AND_COMMIT")
            saved, self._saved = self._saved, None
            device = self._fresh(saved.device.pipeline)
            saved.device.copy_into(device)
            self._live = _Loaded(saved.config, device)
            self._write_down()
            return
        if not request.HasField("config"):
            raise P4RuntimeError(Code.INVALID_ARGUMENT, "the request has no config")
        pipeline = verify(request.config.p4info, self._contract)
        if request.action == _SetRequest.VERIFY:
            return
        config = p4r.ForwardingPipelineConfig()
        config.CopyFrom(request.config)
        if request.action == _SetRequest.VERIFY_AND_SAVE:
            self._saved = _Loaded(config, Device(pipeline, _StagedDataplane(self._dataplane), self._no_port))
        elif request.action == _SetRequest.VERIFY_AND_COMMIT:
            self._saved = None
            self._live = _Loaded(config, self._fresh(pipeline))
            self._write_down()
        elif request.action == _SetRequest.RECONCILE_AND_COMMIT:
            # One program is realisable, so every entry stays valid under the new config.
            device = self._live.device if self._live else self._fresh(pipeline)
            device.pipeline = pipeline
            self._saved = None
            self._live = _Loaded(config, device)
            self._write_down()
        else:
            raise P4RuntimeError(Code.INVALID_ARGUMENT, "the action of the request is not set")

    def _fresh(self, pipeline: Pipeline) -> Device:
        if self._journal:
            self._journal.forget()
        if self._live is not None:
            self._live.device.clear()
        return Device(pipeline, self._dataplane, self._no_port)

    async def SetForwardingPipelineConfig(
        self, request: _SetRequest, context: Context
    ) -> p4r.SetForwardingPipelineConfigResponse:
        try:
            self._configure(request)
        except P4RuntimeError as error:
            log.warning("pipeline config refused", extra={"code": error.code.name, "reason": error.message})
            await _abort(context, error)
        self._on_change()
        action = _SetRequest.Action.Name(request.action)
        log.info("pipeline config", extra={"action": action, "cookie": request.config.cookie.cookie})
        return p4r.SetForwardingPipelineConfigResponse()

    async def GetForwardingPipelineConfig(
        self, request: _GetRequest, context: Context
    ) -> p4r.GetForwardingPipelineConfigResponse:
        try:
            self._check_device(request.device_id)
            config = self._current().config
        except P4RuntimeError as error:
            await _abort(context, error)
        reply = p4r.GetForwardingPipelineConfigResponse()
        if config.HasField("cookie"):
            reply.config.cookie.CopyFrom(config.cookie)
        else:
            reply.config.SetInParent()
        if request.response_type in (_GetRequest.ALL, _GetRequest.P4INFO_AND_COOKIE):
            reply.config.p4info.CopyFrom(config.p4info)
        if request.response_type in (_GetRequest.ALL, _GetRequest.DEVICE_CONFIG_AND_COOKIE):
            reply.config.p4_device_config = config.p4_device_config
        return reply

    def _check_device(self, device_id: int) -> None:
        if device_id != self._arbiter.device_id:
            raise P4RuntimeError(
                Code.NOT_FOUND,
                f"device_id {device_id} is not served here; this switch is {self._arbiter.device_id}",
            )

    def _current(self) -> _Loaded:
        """The saved configuration if one waits for its COMMIT, else the committed one."""
        loaded = self._saved or self._live
        if loaded is None:
            raise P4RuntimeError(
                Code.FAILED_PRECONDITION, "no pipeline is loaded; push it with SetForwardingPipelineConfig"
            )
        return loaded

    # -- Write, Read, Capabilities -----------------------------------------------------------------

    async def Write(self, request: p4r.WriteRequest, context: Context) -> p4r.WriteResponse:
        try:
            election_id = election_number(request.election_id) if request.HasField("election_id") else None
            self._arbiter.check(request.device_id, _role_name(request.role, request.role_id), election_id)
            results = self._write_live(request)
        except P4RuntimeError as error:
            await _abort(context, error)
        self._on_change()
        failed = [result for result in results if result is not None]
        if failed:
            log.warning("write failed", extra={"failed": len(failed), "first": str(failed[0])})
            details = (("grpc-status-details-bin", _error_details(results).SerializeToString()),)
            await context.abort(
                grpc.StatusCode.UNKNOWN,
                f"{len(failed)} of {len(results)} updates failed: {failed[0]}",
                details,
            )
        return p4r.WriteResponse()

    async def Read(self, request: p4r.ReadRequest, context: Context) -> AsyncIterator[p4r.ReadResponse]:
        try:
            self._check_device(request.device_id)
            device = self._current().device
            cells: dict[int, dict[str, int]] = {}
            reply = p4r.ReadResponse()
            for entity in request.entities:
                for found in device.read(entity, cells):
                    reply.entities.append(found)
                    if len(reply.entities) >= _READ_BATCH:
                        yield reply
                        reply = p4r.ReadResponse()
                        await asyncio.sleep(0)
        except P4RuntimeError as error:
            await _abort(context, error)
        yield reply

    async def Capabilities(self, request: p4r.CapabilitiesRequest, context: Context) -> p4r.CapabilitiesResponse:
        """API version; `experimental` is a google.protobuf.Struct that says what this switch can hold."""
        try:
            if request.device_id:
                self._check_device(request.device_id)
        except P4RuntimeError as error:
            await _abort(context, error)
        plane = self._dataplane
        facts = struct_pb2.Struct()
        facts.update(
            {
                "target": plane.target,
                "aggregators": plane.aggregators,
                "values": [profile for profile in PROFILES if profile <= plane.values],
                "multicastGroups": GROUP_MAX,
                "jobIds": 255,
            }
        )
        reply = p4r.CapabilitiesResponse(p4runtime_api_version=API_VERSION)
        reply.experimental.Pack(facts)
        return reply


async def start(service: P4RuntimeService, listen: str) -> tuple[grpc.aio.Server, int]:
    """Serve on host:port without TLS and return (server, port).

    P4Runtime has no authentication here, so the address should be loopback. Raises OSError if it cannot be bound.
    """
    server = grpc.aio.server(
        options=(
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.so_reuseport", 0),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
            ("grpc.keepalive_permit_without_calls", 1),
        )
    )
    p4r_grpc.add_P4RuntimeServicer_to_server(service, server)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {listen}: {error}") from error
    await server.start()
    return server, port
