# SPDX-License-Identifier: Apache-2.0
"""The service over gRPC, in front of the real library."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import finsy as fy
import grpc
import pytest
from finsy.proto import p4r, p4r_grpc, rpc_status
from google.protobuf import struct_pb2

from atp_softswitch.pipeline import contract_path, load_p4info

SCHEMA = fy.P4Schema(contract_path())
P4INFO = load_p4info(contract_path())
SetConfig = p4r.SetForwardingPipelineConfigRequest
GetConfig = p4r.GetForwardingPipelineConfigRequest


class Controller:
    """One P4Runtime client: a stream, and calls with its election ID."""

    def __init__(self, port: int, election: int | None, device_id: int = 1, role: str = "") -> None:
        self.election = election
        self.device_id = device_id
        self.role = role
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self.stub = p4r_grpc.P4RuntimeStub(self.channel)
        self.outgoing: queue.Queue[p4r.StreamMessageRequest | None] = queue.Queue()
        self.stream: Any = self.stub.StreamChannel(iter(self.outgoing.get, None))
        self.bid(election)

    def bid(self, election: int | None) -> None:
        request = p4r.StreamMessageRequest()
        request.arbitration.device_id = self.device_id
        if self.role:
            request.arbitration.role.name = self.role
        if election is not None:
            request.arbitration.election_id.high = election >> 64
            request.arbitration.election_id.low = election & (1 << 64) - 1
        self.election = election
        self.outgoing.put(request)

    def heard(self) -> tuple[int, int]:
        """Status code and election ID of the next arbitration message."""
        update = next(self.stream).arbitration
        return update.status.code, update.election_id.high << 64 | update.election_id.low

    def _election(self) -> p4r.Uint128:
        number = self.election or 0
        return p4r.Uint128(high=number >> 64, low=number & (1 << 64) - 1)

    def configure(self, action: int, config: p4r.ForwardingPipelineConfig | None = None) -> None:
        request = SetConfig(
            device_id=self.device_id,
            election_id=self._election(),
            role=self.role,
            action=action,  # type: ignore[arg-type]
            config=config,
        )
        self.stub.SetForwardingPipelineConfig(request, timeout=10)

    def push(self, cookie: int = 77) -> None:
        self.configure(SetConfig.VERIFY_AND_COMMIT, config(cookie))

    def write(self, *updates: p4r.Update, atomicity: int = 0) -> None:
        request = p4r.WriteRequest(
            device_id=self.device_id,
            election_id=self._election(),
            role=self.role,
            updates=updates,
            atomicity=atomicity,  # type: ignore[arg-type]
        )
        self.stub.Write(request, timeout=10)

    def read(self, *entities: p4r.Entity) -> list[p4r.Entity]:
        request = p4r.ReadRequest(device_id=self.device_id, entities=entities)
        return [entity for reply in self.stub.Read(request, timeout=10) for entity in reply.entities]

    def entries(self) -> list[p4r.Entity]:
        return self.read(p4r.Entity(table_entry=p4r.TableEntry()))

    def close(self) -> None:
        self.outgoing.put(None)
        self.channel.close()


def config(cookie: int) -> p4r.ForwardingPipelineConfig:
    return p4r.ForwardingPipelineConfig(
        p4info=P4INFO,
        p4_device_config=b"\x01\x02",
        cookie=p4r.ForwardingPipelineConfig.Cookie(cookie=cookie),
    )


def job(job_id: int, values: int = 62) -> p4r.Update:
    action = fy.P4TableAction("set_job", values=values, full0=3, full1=0, group=0)
    entry = fy.P4TableEntry("job", match=fy.P4TableMatch(job_id=job_id), action=action, metadata=b"mark")
    return p4r.Update(type=p4r.Update.INSERT, entity=entry.encode(SCHEMA))


def region(job_id: int, low: int, high: int) -> p4r.Update:
    match = fy.P4TableMatch(job_id=job_id, aggregator_index=(low, high))
    entry = fy.P4TableEntry("region", match=match, action=fy.P4TableAction("in_region"), priority=1)
    return p4r.Update(type=p4r.Update.INSERT, entity=entry.encode(SCHEMA))


def refused(call: Any, *arguments: Any, **named: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **named)
    return caught.value.code(), str(caught.value.details())


@pytest.fixture
def controllers(served: Any) -> Iterator[Any]:
    opened: list[Controller] = []

    def connect(election: int | None, **named: Any) -> Controller:
        controller = Controller(served.port, election, **named)
        opened.append(controller)
        return controller

    yield connect
    for controller in opened:
        controller.close()


def test_nothing_works_before_the_pipeline(controllers: Any) -> None:
    controller = controllers(1)
    assert controller.heard() == (0, 1)
    get = GetConfig(device_id=1)
    assert refused(controller.stub.GetForwardingPipelineConfig, get)[0] == (grpc.StatusCode.FAILED_PRECONDITION)
    assert refused(controller.write, job(3))[0] == grpc.StatusCode.FAILED_PRECONDITION
    assert refused(controller.entries)[0] == grpc.StatusCode.FAILED_PRECONDITION
    assert refused(controller.configure, SetConfig.COMMIT)[0] == grpc.StatusCode.FAILED_PRECONDITION
    controller.push()
    controller.write(job(3))
    assert controller.entries() == [job(3).entity], "the metadata comes back, too"


def test_arbitration_over_streams(controllers: Any) -> None:
    first = controllers(10)
    assert first.heard() == (0, 10)
    second = controllers(5)
    assert second.heard() == (6, 10)
    first.push()
    assert refused(second.push)[0] == grpc.StatusCode.PERMISSION_DENIED
    assert refused(second.write, job(3))[0] == grpc.StatusCode.PERMISSION_DENIED
    second.bid(1 << 70)
    assert second.heard() == (0, 1 << 70)
    assert first.heard() == (6, 1 << 70)
    assert refused(first.write, job(3))[0] == grpc.StatusCode.PERMISSION_DENIED
    second.write(job(3))
    assert len(first.entries()) == 1, "a backup may read"
    second.close()
    assert first.heard() == (5, 1 << 70)
    assert refused(first.write, job(4))[0] == grpc.StatusCode.PERMISSION_DENIED


def test_streams_that_end(controllers: Any) -> None:
    controllers(10).heard()
    same = controllers(10)
    assert refused(same.heard)[0] == grpc.StatusCode.INVALID_ARGUMENT
    elsewhere = controllers(11, device_id=9)
    assert refused(elsewhere.heard)[0] == grpc.StatusCode.NOT_FOUND
    assert refused(elsewhere.write, job(3))[0] == grpc.StatusCode.NOT_FOUND
    assert refused(elsewhere.entries)[0] == grpc.StatusCode.NOT_FOUND


def test_a_stream_begins_with_arbitration(served: Any) -> None:
    with served.channel() as channel:
        packet = p4r.StreamMessageRequest(packet=p4r.PacketOut(payload=b"x"))
        stream = p4r_grpc.P4RuntimeStub(channel).StreamChannel(iter([packet]))
        assert refused(next, stream)[0] == grpc.StatusCode.FAILED_PRECONDITION


def test_packet_io_is_answered_with_a_stream_error(controllers: Any) -> None:
    controller = controllers(1)
    controller.heard()
    controller.outgoing.put(p4r.StreamMessageRequest(packet=p4r.PacketOut(payload=b"x")))
    error = next(controller.stream).error
    assert error.canonical_code == 12
    assert error.packet_out.packet_out.payload == b"x"


def test_roles(controllers: Any) -> None:
    main, other = controllers(10), controllers(3, role="metrics")
    main.heard()
    update = next(other.stream).arbitration
    assert (update.status.code, update.role.name) == (0, "metrics")
    main.push()
    other.write(job(3))


def test_pipeline_configuration(controllers: Any) -> None:
    controller = controllers(1)
    controller.heard()
    controller.configure(SetConfig.VERIFY, config(1))
    assert refused(controller.entries)[0] == grpc.StatusCode.FAILED_PRECONDITION, "VERIFY loads nothing"
    wrong = config(1)
    wrong.p4info.tables[0].match_fields[0].bitwidth = 9
    code, text = refused(controller.configure, SetConfig.VERIFY_AND_COMMIT, wrong)
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "AtpIngress.job differs" in text
    assert refused(controller.configure, SetConfig.VERIFY)[0] == grpc.StatusCode.INVALID_ARGUMENT
    assert refused(controller.configure, 0, config(1))[0] == grpc.StatusCode.INVALID_ARGUMENT

    controller.push(cookie=77)

    def get(kind: int) -> p4r.ForwardingPipelineConfig:
        request = GetConfig(device_id=1, response_type=kind)  # type: ignore[arg-type]
        found: p4r.ForwardingPipelineConfig = controller.stub.GetForwardingPipelineConfig(request).config
        return found

    assert get(GetConfig.ALL) == config(77)
    assert get(GetConfig.COOKIE_ONLY) == p4r.ForwardingPipelineConfig(cookie=config(77).cookie)
    assert get(GetConfig.P4INFO_AND_COOKIE).p4_device_config == b""
    assert get(GetConfig.DEVICE_CONFIG_AND_COOKIE).p4_device_config == b"\x01\x02"
    assert not get(GetConfig.DEVICE_CONFIG_AND_COOKIE).HasField("p4info")

    controller.write(job(3), region(3, 0, 9))
    controller.configure(SetConfig.RECONCILE_AND_COMMIT, config(78))
    assert get(GetConfig.COOKIE_ONLY).cookie.cookie == 78
    assert len(controller.entries()) == 2, "RECONCILE_AND_COMMIT keeps the entries"
    controller.push(cookie=79)
    assert controller.entries() == [], "VERIFY_AND_COMMIT clears them"


def test_saved_and_committed_later(controllers: Any, served: Any) -> None:
    controller = controllers(1)
    controller.heard()
    controller.push()
    controller.write(job(3), region(3, 0, 9))
    controller.configure(SetConfig.VERIFY_AND_SAVE, config(80))
    assert controller.entries() == [], "reads and writes refer to the saved config now"
    controller.write(job(4), region(4, 10, 19))
    assert served.service.device.jobs() == [3], "the switch still runs the old one"
    code, _ = refused(controller.configure, SetConfig.COMMIT, config(80))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    controller.configure(SetConfig.COMMIT)
    assert served.service.device.jobs() == [4], "the writes since then are replayed"
    assert len(controller.entries()) == 2


def errors_of(call: Any, *arguments: Any, **named: Any) -> list[int]:
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **named)
    assert caught.value.code() == grpc.StatusCode.UNKNOWN
    trailing: Any = caught.value.trailing_metadata()
    metadata = dict(trailing)
    status = rpc_status.Status.FromString(metadata["grpc-status-details-bin"])
    assert status.code == 2
    codes = []
    for detail in status.details:
        error = p4r.Error()
        assert detail.Unpack(error)
        assert bool(error.message) == bool(error.canonical_code)
        codes.append(error.canonical_code)
    return codes


def test_write_errors_one_for_each_update(controllers: Any) -> None:
    controller = controllers(1)
    controller.heard()
    controller.push()
    batch = (job(3), job(3), job(4, values=99), job(5))
    assert errors_of(controller.write, *batch) == [0, 6, 3, 0]
    assert len(controller.entries()) == 2, "CONTINUE_ON_ERROR"
    batch = (job(6), job(7), job(3), job(8))
    assert errors_of(controller.write, *batch, atomicity=1) == [10, 10, 6, 10]
    assert len(controller.entries()) == 2, "ROLLBACK_ON_ERROR"
    assert refused(controller.write, job(9), atomicity=2)[0] == grpc.StatusCode.UNIMPLEMENTED


def test_the_data_path_has_what_the_tables_have(controllers: Any, served: Any) -> None:
    controller = controllers(1)
    controller.heard()
    controller.push()
    controller.write(job(3), region(3, 0, 9))
    aggregated = next(c.preamble.id for c in P4INFO.counters if c.preamble.alias == "aggregated")
    cells = controller.read(p4r.Entity(counter_entry=p4r.CounterEntry(counter_id=aggregated)))
    assert [cell.counter_entry.index.index for cell in cells] == list(range(256))
    occupancy = p4r.RegisterEntry(register_id=369098754)
    occupancy.index.index = 3
    (found,) = controller.read(p4r.Entity(register_entry=occupancy))
    assert found.register_entry.data.bitstring == b"\x00"
    aggregators = controller.read(p4r.Entity(register_entry=p4r.RegisterEntry(register_id=369098753)))
    assert len(aggregators) == served.switch.aggregators


def test_the_contract_names_the_counters_of_the_library(native: Any) -> None:
    assert [counter.preamble.alias for counter in P4INFO.counters] == list(native.counter_names)


def test_capabilities(served: Any) -> None:
    with served.channel() as channel:
        reply = p4r_grpc.P4RuntimeStub(channel).Capabilities(p4r.CapabilitiesRequest())
    assert reply.p4runtime_api_version == "1.5.0"
    facts = struct_pb2.Struct()
    assert reply.experimental.Unpack(facts)
    assert dict(facts)["aggregators"] == 1024
    assert list(facts["values"]) == [62, 350]  # type: ignore[arg-type]
