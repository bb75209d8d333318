# SPDX-License-Identifier: Apache-2.0
"""The parsers of the Python parts: whatever comes in, each answers with its result or with its own kind of error.

ATP_FUZZ_EXAMPLES is the number of examples of each test (100 in the quick run).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
import yaml
from finsy.proto import p4r
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from atp_operator.model import Job, Quota
from atp_operator.validation import validate_job, validate_quota, validate_switch
from atp_sidecar.assignment import AssignmentError, parse_assignment
from atp_sidecar.frames import FrameError, decode, read_frame
from atp_softswitch.device import Device
from atp_softswitch.errors import P4RuntimeError
from atp_softswitch.library import SwitchLibrary, find_library
from atp_softswitch.pipeline import build, contract_path, load_p4info
from atp_transport import ParameterServer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "sidecar"))

from atp_harness import Job as Sidecars  # noqa: E402
from atp_harness import SidecarProcess, assignment  # noqa: E402
from raw_client import GROUP, SUBMIT, VERSION, RawClient  # noqa: E402

EXAMPLES = int(os.environ.get("ATP_FUZZ_EXAMPLES", "100"))
fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize="ATP_FUZZ_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)

ANY_TEXT = st.text(st.characters(), max_size=20)  # lone surrogates too: JSON can say them
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT
ANY_JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3), max_leaves=6
)


def changed(data: st.DataObject, document: Any) -> Any:
    """The document with one value, anywhere in it, replaced by any other, or taken out."""
    if isinstance(document, dict) and document and data.draw(st.integers(0, 3)):
        name = data.draw(st.sampled_from(sorted(document)))
        if data.draw(st.integers(0, 9)) == 0:
            return {key: value for key, value in document.items() if key != name}
        return {**document, name: changed(data, document[name])}
    if isinstance(document, list) and document and data.draw(st.integers(0, 3)):
        at = data.draw(st.integers(0, len(document) - 1))
        return [*document[:at], changed(data, document[at]), *document[at + 1 :]]
    if isinstance(document, int) and data.draw(st.booleans()):
        return data.draw(st.sampled_from([-1, 0, 1, 31, 32, 255, 256, 65535, 65536, 2**31, 2**32, 2**64, 10**40]))
    return data.draw(ANY_JSON)


# ---- the sidecar's frames ----


@fuzz
@example(b"[" * 200_000)
@example(b'{"type":' + b"[" * 200_000)
@example(b'{"type":"\xff"}')
@example(b'{"type":1e999999}')
@example(b"9" * 5000)
@given(st.binary(max_size=200) | ANY_JSON.map(lambda value: json.dumps(value).encode()))
def test_a_frame_is_a_message_or_an_error(body: bytes) -> None:
    try:
        message = decode(body)
    except FrameError as error:
        assert str(error)
    else:
        assert isinstance(message["type"], str)


@fuzz
@given(st.lists(st.binary(max_size=30), max_size=4), st.binary(max_size=12))
def test_a_stream_is_messages_an_end_or_an_error(bodies: list[bytes], rest: bytes) -> None:
    async def read() -> None:
        reader = asyncio.StreamReader()
        for body in bodies:
            reader.feed_data(struct.pack(">I", len(body)) + body)
        reader.feed_data(rest)
        reader.feed_eof()
        for _ in range(len(bodies) + 4):
            try:
                if await read_frame(reader) is None:
                    return
            except FrameError:
                return
        raise AssertionError("more messages than were sent")

    asyncio.run(read())


HELLO: dict[str, Any] = {"type": "hello", "version": VERSION, "pid": 7, "client": "fuzz"}
MESSAGES: list[dict[str, Any]] = [
    {"type": "grow", "bytes": 4096},
    {"type": "abort", "group": 5, "code": "Timeout", "reason": "late"},
    {"type": "leave", "group": 5},
    {"type": "ping"},
    {"type": "stats"},
    {"type": "bye"},
    HELLO,
]
# type, dtype, kind, zero, segment, op, group, number, total, begin, offset, count
SUBMITS = [
    [1, 0, 0, 0, 0, 1, 5, 0, 4, 0, 0, 4],
    [1, 1, 1, 0, 0, 2, 5, 1, 100, 0, 64, 100],
    [1, 3, 0, 0, 1, 3, 6, 0, 0, 0, 0, 0],
]


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    with Sidecars(tmp_path_factory.mktemp("sidecar"), 1) as job:
        yield job.workers[0]


def _submit(data: st.DataObject, base: int) -> bytes:
    """A frame of a part, with some field changed and of another length perhaps. Groups begin at `base`."""
    fields = list(data.draw(st.sampled_from(SUBMITS)))
    if data.draw(st.integers(0, 2)):
        at = data.draw(st.integers(1, len(fields) - 1))
        limit = 8 if at < 4 else 32 if at in (4, 11) else 64
        fields[at] = data.draw(st.sampled_from([0, 1, 2, 63, 64, 1 << 20]) | st.integers(0, 2**limit - 1)) % 2**limit
    if at_group := fields[6] < 100:
        fields[6] += base * at_group
    body = SUBMIT.pack(*fields)
    return body if data.draw(st.integers(0, 9)) else body[: data.draw(st.integers(1, 63))]


_bases = iter(range(GROUP, GROUP + (1 << 30), 100))


@fuzz
@given(st.data())
def test_a_session_ends_with_a_reason(sidecar: SidecarProcess, data: st.DataObject) -> None:
    script: list[Any] = [HELLO] if data.draw(st.integers(0, 9)) else [changed(data, HELLO)]
    base = next(_bases)
    for _ in range(data.draw(st.integers(0, 6))):
        if data.draw(st.booleans()):
            script.append(_submit(data, base))
            continue
        message = data.draw(st.sampled_from(MESSAGES))
        script.append(changed(data, message) if data.draw(st.integers(0, 2)) else message)
    client = RawClient(sidecar.socket, hello=False)
    try:
        for message in script:
            client.send(message if isinstance(message, dict | bytes) else json.dumps(message).encode())
        client.socket.shutdown(socket.SHUT_WR)
    except ConnectionError:
        pass
    answers = []
    try:
        while True:
            answers.append(client.receive())
    except (EOFError, ConnectionError):
        pass
    finally:
        client.close()
    fatal = [answer for answer in answers if answer["type"] == "fatal"]
    assert all(answer["code"] in ("Protocol", "Memory") for answer in fatal), (script, fatal)
    assert not [event for event in sidecar.events() if event["event"] in ("session-failed", "transport-failed")], script
    with contextlib.closing(RawClient(sidecar.socket)) as after:
        after.welcome()


def test_what_a_client_sends_is_not_repeated_at_any_length(sidecar: SidecarProcess) -> None:
    """An answer that quotes the client must itself fit a frame."""
    for message in (
        {"type": "hello", "version": "\U0001f600" * 80_000},
        {"type": "\x7f" * 1_000_000},
    ):
        client = RawClient(sidecar.socket, hello=False)
        client.send(json.dumps(message, ensure_ascii=False).encode())
        answer = client.expect("fatal")
        assert answer["code"] == "Protocol"
        assert len(answer["message"]) < 5000
        client.close()


# ---- the assignment ----

ADDRESSES = ["127.9.0.1", "127.9.0.2", "127.9.0.3"]


@fuzz
@given(st.data())
def test_an_assignment_is_right_or_says_what_is_wrong(data: st.DataObject) -> None:
    document: Any = assignment(ADDRESSES, "worker", 0, 1)
    document |= {"mode": "Shared", "regions": [{"start": 0, "size": 1024}], "switchAddress": "127.9.0.9"}
    for _ in range(data.draw(st.integers(0, 3))):
        document = changed(data, document)
    try:
        parsed = parse_assignment(json.dumps(document), "worker")
    except AssignmentError as error:
        assert "not valid" in str(error)
        return
    # The transport takes the same text. Told by it that this is a worker's, nothing else was wrong.
    with pytest.raises(ValueError) as caught:
        ParameterServer(parsed.to_json())
    assert str(caught.value)


@fuzz
@given(st.text(max_size=200) | st.binary(max_size=50).map(lambda raw: raw.decode("latin-1")))
def test_any_text_is_no_assignment(text: str) -> None:
    with pytest.raises(AssignmentError):
        parse_assignment(text, "worker")


# ---- P4Runtime ----

P4INFO = load_p4info(contract_path())


def _entry(table: str, match: Mapping[str, tuple[bytes, ...]], action: str, **params: bytes) -> p4r.Entity:
    info = next(each for each in P4INFO.tables if each.preamble.alias == table)
    called = next(each for each in P4INFO.actions if each.preamble.alias == action)
    entity = p4r.Entity()
    entity.table_entry.table_id = info.preamble.id
    for field in info.match_fields:
        part = entity.table_entry.match.add(field_id=field.id)
        value = match[field.name]
        if len(value) == 2:
            part.range.low, part.range.high = value
            entity.table_entry.priority = 1
        else:
            part.exact.value = value[0]
    entity.table_entry.action.action.action_id = called.preamble.id
    for param in called.params:
        entity.table_entry.action.action.params.add(param_id=param.id, value=params[param.name])
    return entity


def _group(group_id: int, *replicas: tuple[int, int]) -> p4r.Entity:
    entity = p4r.Entity()
    message = entity.packet_replication_engine_entry.multicast_group_entry
    message.multicast_group_id = group_id
    for port, instance in replicas:
        message.replicas.add(egress_port=port, instance=instance)
    return entity


JOB = {"job_id": (b"\x03",)}
HOST = IPv4Address("127.0.0.1").packed
ENTITIES = [
    _entry("job", JOB, "set_job", values=b"\x3e", full0=b"\x03", full1=b"\x00", group=b"\x07"),
    _entry("region", {**JOB, "aggregator_index": (b"\x00", b"\x3f")}, "in_region"),
    _entry("admission", {**JOB, "ingress_port": (HOST,), "edge": (b"\x00",), "bitmap": (b"\x01",)}, "admit"),
    _entry("transit", {**JOB, "ingress_port": (HOST,), "bitmap1": (b"\x01",)}, "allow", mask0=b"\x0f"),
    _entry("ps_port", {**JOB, "ingress_port": (HOST,)}, "from_ps"),
    _entry(
        "replica",
        {"multicast_group": (b"\x07",), "egress_port": (b"\x01",), "instance": (b"\x01",)},
        "rewrite",
        dst_mac=b"\x02",
        dst_ip=HOST,
        dst_port=b"\x2a\x30",
    ),
    _group(7, (1, 1), (1, 2)),
]
UPDATES = [
    p4r.Update(type=kind, entity=entity)
    for kind in (p4r.Update.INSERT, p4r.Update.MODIFY, p4r.Update.DELETE)
    for entity in ENTITIES
]
ATOMICITIES = [p4r.WriteRequest.CONTINUE_ON_ERROR, p4r.WriteRequest.ROLLBACK_ON_ERROR]
READS = [
    p4r.Entity(table_entry=p4r.TableEntry()),
    p4r.Entity(counter_entry=p4r.CounterEntry(counter_id=P4INFO.counters[0].preamble.id)),
    *[p4r.Entity(register_entry=p4r.RegisterEntry(register_id=each.preamble.id)) for each in P4INFO.registers],
    *ENTITIES,
]


def _damaged(data: st.DataObject, message: Any) -> Any:
    """The message after some bytes of its encoding were changed, as far as it is still a message."""
    encoded = bytearray(message.SerializeToString())
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, max(0, len(encoded) - 1)))
        piece = data.draw(st.binary(max_size=3))
        encoded[at : at + data.draw(st.integers(0, 2))] = piece
    result = type(message)()
    try:
        result.ParseFromString(bytes(encoded))
    except Exception:
        return message
    return result


@pytest.fixture(scope="module")
def library() -> Iterator[SwitchLibrary]:
    switch = SwitchLibrary(find_library(), bpf=False, aggregators=64, values=62)
    yield switch
    switch.close()


@fuzz
@given(st.data())
def test_p4runtime_writes_and_reads_answer_with_codes(library: SwitchLibrary, data: st.DataObject) -> None:
    device = Device(build(P4INFO), library)
    try:
        for _ in range(data.draw(st.integers(1, 6))):
            batch = [_damaged(data, update) for update in data.draw(st.lists(st.sampled_from(UPDATES), max_size=8))]
            atomicity = data.draw(
                st.sampled_from([p4r.WriteRequest.CONTINUE_ON_ERROR, p4r.WriteRequest.ROLLBACK_ON_ERROR])
            )
            before = _state(device)
            results = device.write(batch, atomicity)
            assert len(results) == len(batch)
            if atomicity == p4r.WriteRequest.ROLLBACK_ON_ERROR and any(results):
                assert _state(device) == before, "a batch that failed left something behind"
            try:
                list(device.read(_damaged(data, data.draw(st.sampled_from(READS))), {}))
            except P4RuntimeError as error:
                assert error.message
    finally:
        device.clear()
    assert _state(device) == ([], [])
    assert library.occupancy(0) == 0


def _state(device: Device) -> tuple[list[Any], list[Any]]:
    tables = [entry for table in device.pipeline.tables.values() for entry in device.entries(table.name)]
    return sorted(tables, key=repr), sorted(device.groups(), key=repr)


# ---- the CRDs ----


def _schema(name: str) -> dict[str, Any]:
    document = yaml.safe_load((ROOT / "crds" / name).read_text())
    schema: dict[str, Any] = document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return schema


def _values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """What the API server lets through to the webhook: right types, everything else as it comes."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"]) | st.just("Other")
    kind = schema.get("type")
    if schema.get("x-kubernetes-int-or-string"):
        return st.integers(-5, 5) | ANY_TEXT
    if kind == "object" and "properties" in schema:
        required = {
            name: _values(each) for name, each in schema["properties"].items() if name in schema.get("required", ())
        }
        optional = {name: _values(each) for name, each in schema["properties"].items() if name not in required}
        return st.fixed_dictionaries(required, optional=optional)
    if kind == "object":
        inner = schema.get("additionalProperties")
        return st.dictionaries(ANY_TEXT, _values(inner) if isinstance(inner, dict) else ANY_JSON, max_size=3)
    if kind == "array":
        return st.lists(_values(schema["items"]), max_size=3)
    if kind == "integer":
        bits = 31 if schema.get("format") == "int32" else 63
        return st.sampled_from([0, 1, 2, 62, 1024]) | st.integers(-(2**bits), 2**bits - 1)
    if kind == "number":
        return st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**40), 2**40)
    if kind == "boolean":
        return st.booleans()
    if kind == "string":
        return ANY_TEXT
    return ANY_JSON


@pytest.mark.parametrize(
    ("file", "validate", "read"),
    [
        ("atpjob.yaml", validate_job, Job.from_object),
        ("atpswitch.yaml", validate_switch, None),
        ("atptenantquota.yaml", validate_quota, Quota.from_object),
    ],
)
def test_objects_are_right_or_say_what_is_wrong(
    file: str, validate: Callable[[Any], list[str]], read: Callable[[Any], Any] | None
) -> None:
    @fuzz
    @given(_values(_schema(file)))
    def check(spec: dict[str, Any]) -> None:
        raw = {"metadata": {"name": "fuzz", "namespace": "team-a", "uid": "1"}, "spec": spec}
        errors = validate(raw)
        assert all(isinstance(text, str) and text for text in errors)
        if not errors and read is not None:
            read(raw)  # what is valid can be planned with

    check()
