# SPDX-License-Identifier: Apache-2.0
"""Tables and what follows from them for the data path: pure, with a data path that only remembers."""

from __future__ import annotations

import copy
import errno
import random
from collections.abc import Mapping, Sequence

import finsy as fy
import pytest
from finsy.proto import p4r
from hypothesis import given, settings
from hypothesis import strategies as st

from atp_softswitch import bytestring
from atp_softswitch.dataplane import AggregatorState, Host, JobConfig, PortDrops, Region, Replica
from atp_softswitch.device import Device
from atp_softswitch.errors import Code, DataplaneError, Detail, P4RuntimeError
from atp_softswitch.pipeline import build, contract_path, load_p4info, verify

SCHEMA = fy.P4Schema(contract_path())
P4INFO = load_p4info(contract_path())
COUNTERS = [counter.preamble.alias for counter in P4INFO.counters]
CONTINUE, ROLLBACK = p4r.WriteRequest.CONTINUE_ON_ERROR, p4r.WriteRequest.ROLLBACK_ON_ERROR


class Memory:
    """A data path that remembers what it was told, and refuses what it is told to refuse."""

    target, aggregators, values = "memory", 1024, 350

    def __init__(self) -> None:
        self.jobs: dict[int, JobConfig] = {}
        self.admission: set[tuple[int, int, int, int]] = set()
        self.transit: dict[tuple[int, int, int], int] = {}
        self.ps_ports: set[tuple[int, int]] = set()
        self.groups: dict[int, tuple[Replica, ...]] = {}
        self.hosts: dict[int, tuple[int, Host]] = {}
        self.drops: list[PortDrops] = []
        self.counted = 100
        self.refuse: int | None = None
        self.occupancy_calls = 0

    def _may(self) -> None:
        if self.refuse is not None:
            raise DataplaneError("call", self.refuse, "refused")

    def set_job(self, job_id: int, config: JobConfig) -> None:
        self._may()
        self.jobs[job_id] = config

    def delete_job(self, job_id: int) -> None:
        del self.jobs[job_id]

    def set_admission(self, job_id: int, port: int, edge: int, bitmap: int) -> None:
        self._may()
        self.admission.add((job_id, port, edge, bitmap))

    def delete_admission(self, job_id: int, port: int, edge: int, bitmap: int) -> None:
        self.admission.remove((job_id, port, edge, bitmap))

    def set_transit(self, job_id: int, port: int, bitmap1: int, mask0: int) -> None:
        self.transit[job_id, port, bitmap1] = mask0

    def delete_transit(self, job_id: int, port: int, bitmap1: int) -> None:
        del self.transit[job_id, port, bitmap1]

    def set_ps_port(self, job_id: int, port: int) -> None:
        self.ps_ports.add((job_id, port))

    def delete_ps_port(self, job_id: int, port: int) -> None:
        self.ps_ports.remove((job_id, port))

    def set_group(self, group: int, replicas: Sequence[Replica]) -> None:
        if replicas:
            self.groups[group] = tuple(replicas)
        else:
            del self.groups[group]

    def set_host(self, job_id: int, address: int, host: Host) -> None:
        self._may()
        assert self.hosts.get(address, (job_id, host))[1].mark == host.mark, "the library says EEXIST"
        self.hosts[address] = (job_id, host)

    def delete_host(self, address: int) -> None:
        del self.hosts[address]

    def read_drops(self) -> Sequence[PortDrops]:
        return self.drops

    def read_counters(self, job_id: int) -> Mapping[str, int]:
        return dict.fromkeys(COUNTERS, self.counted)

    def read_aggregator(self, index: int) -> AggregatorState:
        return AggregatorState(3, index, 1, 0b11, True, False, 5)

    def occupancy(self, job_id: int) -> int:
        self.occupancy_calls += 1
        return 17

    def sweep(self) -> int:
        return 0

    def state(self) -> object:
        """Everything it holds."""
        return self.jobs, self.admission, self.transit, self.ps_ports, self.groups, self.hosts


def entry(table: str, match: dict[str, object], action: str, **params: int) -> p4r.Entity:
    ranged = table == "region"
    return fy.P4TableEntry(
        table,
        match=fy.P4TableMatch(match),
        action=fy.P4TableAction(action, **params),
        priority=1 if ranged else 0,
    ).encode(SCHEMA)


def job(job_id: int = 3, **params: int) -> p4r.Entity:
    return entry("job", {"job_id": job_id}, "set_job", **({"values": 62, "full0": 3, "full1": 0, "group": 7} | params))


def region(low: int, high: int, job_id: int = 3) -> p4r.Entity:
    return entry("region", {"job_id": job_id, "aggregator_index": (low, high)}, "in_region")


def admission(port: int, bitmap: int, job_id: int = 3, edge: int = 0) -> p4r.Entity:
    return entry("admission", {"job_id": job_id, "ingress_port": port, "edge": edge, "bitmap": bitmap}, "admit")


def rewrite(group: int, port: int, instance: int, ip: int) -> p4r.Entity:
    return entry(
        "replica",
        {"multicast_group": group, "egress_port": port, "instance": instance},
        "rewrite",
        dst_mac=0x020000000001,
        dst_ip=ip,
        dst_port=10800,
    )


def group(group_id: int, *replicas: tuple[int, int]) -> p4r.Entity:
    entity = p4r.Entity()
    message = entity.packet_replication_engine_entry.multicast_group_entry
    message.multicast_group_id = group_id
    for port, instance in replicas:
        message.replicas.add(egress_port=port, instance=instance)
    return entity


def insert(entity: p4r.Entity) -> p4r.Update:
    return p4r.Update(type=p4r.Update.INSERT, entity=entity)


def modify(entity: p4r.Entity) -> p4r.Update:
    return p4r.Update(type=p4r.Update.MODIFY, entity=entity)


def delete(entity: p4r.Entity) -> p4r.Update:
    return p4r.Update(type=p4r.Update.DELETE, entity=entity)


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def device(memory: Memory) -> Device:
    return Device(build(P4INFO), memory)


def codes(device: Device, *updates: p4r.Update, atomicity: int = CONTINUE) -> list[Code]:
    results = device.write(list(updates), atomicity)  # type: ignore[arg-type]
    return [Code.OK if result is None else result.code for result in results]


def one(device: Device, update: p4r.Update) -> P4RuntimeError:
    (result,) = device.write([update], CONTINUE)
    assert result is not None
    return result


def host(address: int, job_id: int = 3, **place: int) -> p4r.Entity:
    params = {"port": 1, "mark": 77, "role": 1, "bitmap0": 1, "bitmap1": 1, "edge": 0} | place
    return entry("host", {"job_id": job_id, "address": address}, "set_host", **params)


WHOLE = [
    host(0x0A000001),
    host(0x0A000009, port=9, role=2, bitmap0=0, bitmap1=0),
    job(),
    region(0, 63),
    region(128, 255),
    admission(1, 1),
    admission(2, 2),
    entry("transit", {"job_id": 3, "ingress_port": 9, "bitmap1": 1}, "allow", mask0=15),
    entry("ps_port", {"job_id": 3, "ingress_port": 9}, "from_ps"),
    rewrite(7, 1, 1, 0x0A000001),
    rewrite(7, 2, 2, 0x0A000002),
    group(7, (1, 1), (2, 2)),
]


@settings(max_examples=80, deadline=None)
@given(st.permutations(range(len(WHOLE))), st.permutations(range(len(WHOLE))))
def test_order_does_not_matter(there: list[int], back: list[int]) -> None:
    memory = Memory()
    device = Device(build(P4INFO), memory)
    assert set(codes(device, *(insert(WHOLE[index]) for index in there))) == {Code.OK}
    mac = 0x020000000001
    assert memory.jobs == {3: JobConfig(62, 3, 0, 7, (Region(0, 64), Region(128, 128)))}
    assert memory.admission == {(3, 1, 0, 1), (3, 2, 0, 2)}
    assert memory.transit == {(3, 9, 1): 15}
    assert memory.ps_ports == {(3, 9)}
    assert memory.hosts == {
        0x0A000001: (3, Host(1, 77, 1, 1, 1, 0)),
        0x0A000009: (3, Host(9, 77, 2, 0, 0, 0)),
    }
    assert set(memory.groups[7]) == {
        Replica(1, mac, 0x0A000001, 10800),
        Replica(2, mac, 0x0A000002, 10800),
    }
    assert set(codes(device, *(delete(WHOLE[index]) for index in back))) == {Code.OK}
    assert memory.state() == Memory().state()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, len(WHOLE) - 1), max_size=40), st.randoms(use_true_random=False))
def test_a_failed_batch_is_rolled_back(picks: list[int], rng: random.Random) -> None:
    """ROLLBACK_ON_ERROR leaves what the tables and the data path held before."""
    memory = Memory()
    device = Device(build(P4INFO), memory)
    device.write([insert(entity) for entity in WHOLE if rng.random() < 0.5], CONTINUE)
    before = copy.deepcopy(memory.state()), sorted(map(str, _read_all(device)))
    updates = [rng.choice((insert, delete, modify))(WHOLE[pick]) for pick in picks]
    results = device.write([*updates, delete(job(200))], ROLLBACK)
    assert all(results), "every update is reported as failed"
    failed = [result for result in results if result is not None and result.code != Code.ABORTED]
    assert len(failed) == 1
    assert memory.state() == before[0]
    assert sorted(map(str, _read_all(device))) == before[1]


def _read_all(device: Device) -> list[p4r.Entity]:
    everything = p4r.Entity(table_entry=p4r.TableEntry())
    groups = p4r.Entity()
    groups.packet_replication_engine_entry.multicast_group_entry.SetInParent()
    return [*device.read(everything, {}), *device.read(groups, {})]


def test_a_job_is_known_once_it_has_a_region(device: Device, memory: Memory) -> None:
    codes(device, insert(job()))
    assert not memory.jobs
    codes(device, insert(region(0, 9)))
    assert memory.jobs[3].regions == (Region(0, 10),)
    codes(device, insert(region(20, 29)), delete(region(0, 9)))
    assert memory.jobs[3].regions == (Region(20, 10),)
    codes(device, delete(region(20, 29)))
    assert not memory.jobs
    assert codes(device, delete(job())) == [Code.OK]


def test_an_address_is_one_jobs_and_changes_hands(device: Device, memory: Memory) -> None:
    assert codes(device, insert(host(5)), insert(host(5, 4))) == [Code.OK, Code.FAILED_PRECONDITION]
    assert one(device, insert(host(5, 255))).message == "host: 0.0.0.5 is a host of job 3; take that entry away first"
    assert codes(device, modify(host(5, port=8))) == [Code.OK]
    assert codes(device, modify(host(5, port=8, mark=78))) == [Code.OK], "a new epoch of the job"
    assert memory.hosts == {5: (3, Host(8, 78, 1, 1, 1, 0))}
    assert device.ports() == {8}
    assert codes(device, delete(host(5)), insert(host(5, 255))) == [Code.OK] * 2
    assert memory.hosts == {5: (255, Host(1, 77, 1, 1, 1, 0))}
    device.clear()
    assert memory.hosts == {}


def test_what_was_dropped_is_read_as_a_register(device: Device, memory: Memory) -> None:
    reasons = ("source", "destination", "malformed", "forged", "admission")

    def read(index: int | None = None) -> list[tuple[int, list[int]]]:
        entity = p4r.Entity()
        entity.register_entry.register_id = 369098755
        if index is not None:
            entity.register_entry.index.index = index
        return [
            (
                found.register_entry.index.index,
                [int.from_bytes(m.bitstring, "big") for m in found.register_entry.data.struct.members],
            )
            for found in device.read(entity, {})
        ]

    assert read() == [] and read(0) == [(0, [0] * 8)]
    memory.drops = [
        PortDrops(4, 0x0A000004, 0x0A000001, dict(zip(reasons, range(1, 6), strict=True))),
        PortDrops(7, 0, 9, dict.fromkeys(reasons, 0) | {"forged": 1 << 40}),
    ]
    assert read() == [(0, [4, 0x0A000004, 0x0A000001, 1, 2, 3, 4, 5]), (1, [7, 0, 9, 0, 0, 0, 1 << 40, 0])]
    assert read(1) == read()[1:]
    with pytest.raises(P4RuntimeError):
        read(1024)


def test_table_rules(device: Device) -> None:
    assert codes(device, insert(job()), insert(job()), modify(job(full0=1)), delete(job()), delete(job())) == [
        Code.OK,
        Code.ALREADY_EXISTS,
        Code.OK,
        Code.OK,
        Code.NOT_FOUND,
    ]
    assert codes(device, modify(job()), modify(group(7, (1, 1))), delete(group(7))) == [Code.NOT_FOUND] * 3
    assert codes(device, insert(group(7, (1, 1))), insert(group(7))) == [Code.OK, Code.ALREADY_EXISTS]
    assert codes(device, p4r.Update(entity=job())) == [Code.INVALID_ARGUMENT]


def test_what_the_switch_cannot_hold(device: Device) -> None:
    assert one(device, insert(job(values=100))).message == (
        "set_job.values is 100; this switch aggregates [62, 350] values a packet"
    )
    assert one(device, insert(job(0))).code == Code.INVALID_ARGUMENT
    assert one(device, insert(region(1000, 1024))).code == Code.OUT_OF_RANGE
    assert one(device, insert(admission(1, 3))).code == Code.INVALID_ARGUMENT
    assert codes(device, *(insert(region(n * 10, n * 10 + 5)) for n in range(5))) == [
        *([Code.OK] * 4),
        Code.RESOURCE_EXHAUSTED,
    ]
    assert one(device, insert(group(1024, (1, 1)))).code == Code.INVALID_ARGUMENT
    assert one(device, insert(group(7, *((n + 1, 1) for n in range(65))))).code == Code.RESOURCE_EXHAUSTED
    assert one(device, insert(group(7, (1, 1), (1, 1)))).code == Code.INVALID_ARGUMENT


def test_ports_that_do_not_exist_are_refused_and_can_be_deleted(memory: Memory) -> None:
    """A pod's interface may go before its entries do."""
    gone = {9}
    device = Device(build(P4INFO), memory, lambda port: f"port {port} does not exist" if port in gone else None)
    assert codes(device, insert(admission(8, 1)), insert(rewrite(7, 8, 1, 1))) == [Code.OK] * 2
    for update in (insert(admission(9, 1)), insert(rewrite(7, 9, 1, 1)), insert(group(7, (8, 1), (9, 2)))):
        refused = one(device, update)
        assert (refused.code, refused.detail) == (Code.NOT_FOUND, Detail.NO_SUCH_PORT)
        assert "port 9 does not exist" in refused.message
    assert "multicast group 7" in refused.message
    assert not memory.groups.get(7)
    gone.add(8)
    assert codes(device, delete(admission(8, 1)), delete(rewrite(7, 8, 1, 1))) == [Code.OK] * 2
    assert one(device, insert(job(0))).detail == Detail.NONE


def test_malformed_entries(device: Device) -> None:
    def broken(change: object, entity: p4r.Entity) -> Code:
        changed = p4r.Entity()
        changed.CopyFrom(entity)
        assert callable(change)
        change(changed.table_entry)
        return one(device, insert(changed)).code

    def set_value(value: bytes) -> object:
        def change(message: p4r.TableEntry) -> None:
            message.match[0].exact.value = value

        return change

    assert broken(set_value(b""), job()) == Code.INVALID_ARGUMENT
    assert broken(set_value(b"\x01\x00"), job()) == Code.OUT_OF_RANGE
    assert broken(lambda m: setattr(m, "table_id", 5), job()) == Code.NOT_FOUND
    assert broken(lambda m: setattr(m, "priority", 1), job()) == Code.INVALID_ARGUMENT
    assert broken(lambda m: setattr(m, "priority", 0), region(0, 1)) == Code.INVALID_ARGUMENT
    assert broken(lambda m: m.ClearField("match"), job()) == Code.INVALID_ARGUMENT
    assert broken(lambda m: m.match.add(field_id=9), job()) == Code.INVALID_ARGUMENT
    assert broken(lambda m: m.match.append(m.match[0]), job()) == Code.INVALID_ARGUMENT
    assert broken(lambda m: m.ClearField("action"), job()) == Code.INVALID_ARGUMENT
    assert broken(lambda m: m.action.action.params.pop(), job()) == Code.INVALID_ARGUMENT
    assert broken(lambda m: setattr(m.action.action, "action_id", 16777218), job()) == Code.INVALID_ARGUMENT
    assert broken(lambda m: setattr(m, "is_default_action", True), job()) == Code.PERMISSION_DENIED
    assert broken(lambda m: setattr(m, "idle_timeout_ns", 1), job()) == Code.INVALID_ARGUMENT
    whole = region(0, 65535)
    assert one(device, insert(whole)).message.endswith("omit a match on every value")
    del whole.table_entry.match[1]
    assert one(device, insert(whole)).code == Code.OUT_OF_RANGE, "0..65535 is more than this switch has"


def test_leading_zeros_are_taken_and_replies_are_canonical(device: Device) -> None:
    entity = job()
    entity.table_entry.match[0].exact.value = b"\x00\x03"
    assert codes(device, insert(entity)) == [Code.OK]
    (found,) = device.read(p4r.Entity(table_entry=p4r.TableEntry(table_id=33554433)), {})
    assert found == job()


@given(st.integers(0, (1 << 48) - 1))
def test_bytestrings(value: int) -> None:
    data = bytestring.encode(value)
    assert bytestring.decode(data, 48, "x") == value
    assert len(data) == 1 or data[0] != 0


def test_the_tables_follow_a_data_path_that_refuses(device: Device, memory: Memory) -> None:
    memory.refuse = errno.ENOSPC
    assert one(device, insert(admission(1, 1))).code == Code.RESOURCE_EXHAUSTED
    memory.refuse = errno.EIO
    assert one(device, insert(admission(1, 1))).code == Code.INTERNAL
    assert not device.entries("admission")
    memory.refuse = None
    assert codes(device, insert(admission(1, 1))) == [Code.OK]


def test_counters_can_be_written(device: Device, memory: Memory) -> None:
    cell = p4r.CounterEntry(counter_id=P4INFO.counters[0].preamble.id)

    def value() -> int:
        (found,) = device.read(p4r.Entity(counter_entry=cell), {})
        return found.counter_entry.data.packet_count

    cell.index.index = 3
    assert value() == 100
    cell.data.packet_count = 5
    assert codes(device, modify(p4r.Entity(counter_entry=cell))) == [Code.OK]
    memory.counted = 110
    assert value() == 15
    assert codes(device, insert(p4r.Entity(counter_entry=cell))) == [Code.INVALID_ARGUMENT]
    cell.index.index = 256
    assert codes(device, modify(p4r.Entity(counter_entry=cell))) == [Code.OUT_OF_RANGE]


def test_wildcard_reads(device: Device) -> None:
    codes(device, *(insert(entity) for entity in WHOLE))
    everything = list(device.read(p4r.Entity(table_entry=p4r.TableEntry()), {}))
    assert len(everything) == len(WHOLE) - 1
    regions = list(device.read(p4r.Entity(table_entry=p4r.TableEntry(table_id=33554434)), {}))
    assert regions == [region(0, 63), region(128, 255)]
    exact = p4r.Entity()
    exact.CopyFrom(region(0, 63))
    assert list(device.read(exact, {})) == [region(0, 63)]
    exact.CopyFrom(region(0, 62))
    assert list(device.read(exact, {})) == []
    counters = list(device.read(p4r.Entity(counter_entry=p4r.CounterEntry()), {}))
    assert len(counters) == 256 * len(COUNTERS)
    default = p4r.TableEntry(table_id=33554433, is_default_action=True)
    (found,) = device.read(p4r.Entity(table_entry=default), {})
    assert found.table_entry.is_const and found.table_entry.action.action.action_id == 21257015


def test_registers(device: Device, memory: Memory) -> None:
    aggregators = p4r.RegisterEntry(register_id=369098753)
    assert len(list(device.read(p4r.Entity(register_entry=aggregators), {}))) == memory.aggregators
    aggregators.index.index = 5
    (found,) = device.read(p4r.Entity(register_entry=aggregators), {})
    members = [member.bitstring for member in found.register_entry.data.struct.members]
    assert members == [b"\x03", b"\x05", b"\x01", b"\x03", b"\x01", b"\x00", b"\x05"]
    aggregators.index.index = memory.aggregators
    with pytest.raises(P4RuntimeError, match=r"0\.\.1023"):
        list(device.read(p4r.Entity(register_entry=aggregators), {}))
    assert codes(device, modify(p4r.Entity(register_entry=aggregators))) == [Code.PERMISSION_DENIED]


def test_occupancy_is_counted_at_most_once_a_second(memory: Memory) -> None:
    now = [0.0]
    device = Device(build(P4INFO), memory, clock=lambda: now[0])
    codes(device, insert(job()), insert(region(0, 9)))
    assert [device.occupancy(3) for _ in range(5)] == [17] * 5
    assert memory.occupancy_calls == 1
    now[0] = 1.5
    device.occupancy(3)
    assert memory.occupancy_calls == 2
    assert device.occupancy(9) == 0, "a job that is not there"


def test_only_the_contract_is_realised() -> None:
    verify(P4INFO, P4INFO)
    noted = load_p4info(contract_path())
    noted.tables[0].preamble.annotations.append("@brief(x)")
    noted.pkg_info.version = "9"
    verify(noted, P4INFO)
    other = load_p4info(contract_path())
    other.tables[0].size = 7
    del other.counters[3]
    other.meters.add().preamble.name = "m"
    with pytest.raises(P4RuntimeError) as caught:
        verify(other, P4INFO)
    for text in ("AtpIngress.job differs", "AtpIngress.collisions is missing", "meters are not part"):
        assert text in caught.value.message
