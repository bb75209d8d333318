# SPDX-License-Identifier: Apache-2.0
"""State of the switch behind P4Runtime: tables and groups, and the data path calls that follow from them."""

from __future__ import annotations

import errno
import ipaddress
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from finsy.proto import p4d, p4r

from . import bytestring
from .dataplane import PROFILES, REGIONS_MAX, Dataplane, Host, JobConfig, Region, Replica
from .entries import (
    Entry,
    Group,
    GroupReplica,
    Key,
    decode_entry,
    decode_group,
    decode_key,
    encode_default,
    encode_entry,
    encode_group,
    find_table,
)
from .errors import Code, DataplaneError, Detail, P4RuntimeError
from .pipeline import Counter, Pipeline, Register, Table

_INSERT, _MODIFY, _DELETE = p4r.Update.INSERT, p4r.Update.MODIFY, p4r.Update.DELETE

_INSERT_ORDER = ("replica", "region", "host", "job", "admission", "transit", "ps_port")
"""In which each state in between is safe: a job is never known without its guard."""
_WITH_PORT = frozenset({"admission", "transit", "ps_port", "replica"})
_OWNER = {"replica": "multicast group"}

_CODE_OF_ERRNO = {
    errno.EINVAL: Code.INVALID_ARGUMENT,
    errno.ERANGE: Code.OUT_OF_RANGE,
    errno.EMSGSIZE: Code.INVALID_ARGUMENT,
    errno.ENOSPC: Code.RESOURCE_EXHAUSTED,
    errno.EEXIST: Code.FAILED_PRECONDITION,
    errno.E2BIG: Code.RESOURCE_EXHAUSTED,
    errno.ENOMEM: Code.RESOURCE_EXHAUSTED,
}


def _refused(error: DataplaneError) -> P4RuntimeError:
    return P4RuntimeError(_CODE_OF_ERRNO.get(error.errno, Code.INTERNAL), f"the data path refused: {error}")


@dataclass(frozen=True)
class _Undo:
    """How to take one update back: what the key held before."""

    table: str | None
    key: Key | int
    before: Entry | Group | None


NoPort = Callable[[int], str | None]


class Device:
    """Tables, multicast groups and counters of one switch, and its data path.

    Not safe for use from several threads. The data path holds no entry that the tables do not hold, and a job is
    known to it exactly while the table `job` has it and the table `region` has a range for it.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        dataplane: Dataplane,
        no_port: NoPort = lambda port: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`no_port` says why a number cannot be a port, or None; asked when an entry or group is written."""
        self._no_port = no_port
        self.pipeline = pipeline
        self.dataplane = dataplane
        self._clock = clock
        self._tables: dict[str, dict[Key, Entry]] = {table.name: {} for table in pipeline.tables.values()}
        self._regions: dict[int, dict[Key, Entry]] = {}
        self._rewrites: dict[int, dict[tuple[int, int], Entry]] = {}
        self._hosts: dict[int, int] = {}  # address -> job ID
        self._groups: dict[int, Group] = {}
        self._known_jobs: set[int] = set()
        self._live_groups: set[int] = set()
        self.counter_bases: dict[tuple[int, int], int] = {}
        """(counter ID, index) -> what the data path had counted at the controller's zero."""
        self._occupancy: dict[int, tuple[float, int]] = {}

    # -- state -------------------------------------------------------------------------------------

    def entries(self, table: str) -> list[Entry]:
        """Every entry of a table, by short name."""
        return list(self._tables[table].values())

    def groups(self) -> list[Group]:
        """Every multicast group."""
        return list(self._groups.values())

    def jobs(self) -> list[int]:
        """IDs of the jobs in table `job`."""
        return sorted(entry.exact(0) for entry in list(self._tables["job"].values()))

    def ports(self) -> frozenset[int]:
        """Ports that table entries name."""
        ingress = (entry for name in ("admission", "transit", "ps_port") for entry in self.entries(name))
        hosts = (entry.params[0] for entry in self.entries("host"))
        return frozenset((*(entry.exact(1) for entry in (*ingress, *self.entries("replica"))), *hosts))

    def clear(self) -> None:
        """Delete every entry and group, in the order that keeps each state in between safe."""
        for name in ("admission", "transit", "ps_port", "job", "host", "region", "replica"):
            for entry in self.entries(name):
                self._put(name, entry.key, None)
        for group in self.groups():
            self._put(None, group.group_id, None)
        self.counter_bases.clear()

    def copy_into(self, other: Device) -> None:
        """Insert all entries and groups of this device into another one, which is empty.

        Its data path may hold some of them already, and forwards by them meanwhile: so it is told of each job and group
        once, when they are whole.
        """
        for group in self.groups():
            other._store(None, group.group_id, group)
        for name in _INSERT_ORDER:
            for entry in self.entries(name):
                other._store(name, entry.key, entry)
        try:
            for group_id in other._groups:
                other._realise_group(group_id)
            for name in _INSERT_ORDER:
                if name not in ("replica", "region"):
                    for entry in self.entries(name):
                        other._realise(name, entry.key, None, entry)
        except DataplaneError as error:
            raise _refused(error) from error
        other.counter_bases.update(self.counter_bases)

    def entities(self) -> Iterator[p4r.Entity]:
        """All entries and groups, in an order in which they can be inserted."""
        yield from map(encode_group, self.groups())
        for name in _INSERT_ORDER:
            for entry in self.entries(name):
                yield encode_entry(entry, self.pipeline)

    # -- writes ------------------------------------------------------------------------------------

    def write(
        self, updates: list[p4r.Update], atomicity: p4r.WriteRequest.Atomicity.ValueType
    ) -> list[P4RuntimeError | None]:
        """Apply a batch in order; one result an update, None for success.

        CONTINUE_ON_ERROR tries each one. ROLLBACK_ON_ERROR stops at the first error and takes the others back,
        which are reported ABORTED. DATAPLANE_ATOMIC raises UNIMPLEMENTED.
        """
        if atomicity == p4r.WriteRequest.DATAPLANE_ATOMIC:
            raise P4RuntimeError(Code.UNIMPLEMENTED, "DATAPLANE_ATOMIC is not offered; use ROLLBACK_ON_ERROR")
        rollback = atomicity == p4r.WriteRequest.ROLLBACK_ON_ERROR
        results: list[P4RuntimeError | None] = []
        undo: list[_Undo] = []
        for index, update in enumerate(updates):
            try:
                step = self._apply(update)
                if step is not None:
                    undo.append(step)
                results.append(None)
            except P4RuntimeError as error:
                results.append(error)
                if rollback:
                    self._roll_back(undo)
                    aborted = P4RuntimeError(Code.ABORTED, f"rolled back: update {index} of the batch failed")
                    return [error if position == index else aborted for position in range(len(updates))]
        return results

    def _roll_back(self, undo: list[_Undo]) -> None:
        for step in reversed(undo):
            self._put(step.table, step.key, step.before)

    def _apply(self, update: p4r.Update) -> _Undo | None:
        if update.type not in (_INSERT, _MODIFY, _DELETE):
            raise P4RuntimeError(Code.INVALID_ARGUMENT, "the type of an update must be INSERT, MODIFY or DELETE")
        kind = update.entity.WhichOneof("entity")
        if kind == "table_entry":
            return self._apply_entry(update.type, update.entity.table_entry)
        if kind == "packet_replication_engine_entry":
            pre = update.entity.packet_replication_engine_entry
            if pre.WhichOneof("type") != "multicast_group_entry":
                raise P4RuntimeError(Code.UNIMPLEMENTED, "this switch has multicast groups, no clone sessions")
            return self._apply_group(update.type, pre.multicast_group_entry)
        if kind == "counter_entry":
            self._write_counter(update.type, update.entity.counter_entry)
            return None
        if kind == "register_entry":
            raise P4RuntimeError(Code.PERMISSION_DENIED, "the registers of this switch are read only")
        if kind is None:
            raise P4RuntimeError(Code.INVALID_ARGUMENT, "the update has no entity")
        raise P4RuntimeError(Code.UNIMPLEMENTED, f"the pipeline has no {kind}")

    def _apply_entry(self, kind: p4r.Update.Type.ValueType, message: p4r.TableEntry) -> _Undo:
        if kind == _DELETE:
            table, match, priority = decode_key(message, self.pipeline)
            key: Key = (match, priority)
            before = self._tables[table.name].get(key)
            if before is None:
                raise P4RuntimeError(Code.NOT_FOUND, f"table {table.name} has no such entry")
            self._put(table.name, key, None)
            return _Undo(table.name, key, before)
        entry = decode_entry(message, self.pipeline)
        self._check_entry(entry)
        rows = self._tables[entry.table]
        before = rows.get(entry.key)
        if kind == _INSERT:
            if before is not None:
                raise P4RuntimeError(Code.ALREADY_EXISTS, f"table {entry.table} has this entry; use MODIFY")
            size = self.pipeline.table(entry.table).size
            if len(rows) >= size:
                raise P4RuntimeError(Code.RESOURCE_EXHAUSTED, f"table {entry.table} is full ({size} entries)")
        elif before is None:
            raise P4RuntimeError(Code.NOT_FOUND, f"table {entry.table} has no such entry; use INSERT")
        self._put(entry.table, entry.key, entry)
        return _Undo(entry.table, entry.key, before)

    def _apply_group(self, kind: p4r.Update.Type.ValueType, message: p4r.MulticastGroupEntry) -> _Undo:
        group_id = message.multicast_group_id
        before = self._groups.get(group_id)
        if kind == _DELETE:
            if before is None:
                raise P4RuntimeError(Code.NOT_FOUND, f"there is no multicast group {group_id}")
            self._put(None, group_id, None)
            return _Undo(None, group_id, before)
        group = decode_group(message)
        for port in {member.port for member in group.replicas}:
            self._check_port(port, f"multicast group {group_id}")
        if kind == _INSERT and before is not None:
            raise P4RuntimeError(Code.ALREADY_EXISTS, f"multicast group {group_id} exists; use MODIFY")
        if kind == _MODIFY and before is None:
            raise P4RuntimeError(Code.NOT_FOUND, f"there is no multicast group {group_id}; use INSERT")
        self._put(None, group_id, group)
        return _Undo(None, group_id, before)

    def _check_entry(self, entry: Entry) -> None:
        """What the p4info cannot say: job ID 0, the size of this switch, the profile of its values."""
        if entry.table != "replica" and entry.exact(0) == 0:
            raise P4RuntimeError(Code.INVALID_ARGUMENT, f"{entry.table}.job_id is 0, which marks free aggregators")
        if entry.table == "job":
            values = entry.params[0]
            offered = [profile for profile in PROFILES if profile <= self.dataplane.values]
            if values not in offered:
                raise P4RuntimeError(
                    Code.INVALID_ARGUMENT,
                    f"set_job.values is {values}; this switch aggregates {offered} values a packet",
                )
        elif entry.table == "region":
            low, high = entry.range(1)
            if high >= self.dataplane.aggregators:
                raise P4RuntimeError(
                    Code.OUT_OF_RANGE,
                    f"region {low}..{high}: this switch has {self.dataplane.aggregators} aggregators",
                )
            held = self._regions.get(entry.exact(0), {})
            if entry.key not in held and len(held) >= REGIONS_MAX:
                raise P4RuntimeError(
                    Code.RESOURCE_EXHAUSTED,
                    f"job {entry.exact(0)} has {REGIONS_MAX} regions, the most it can have",
                )
        if entry.table in _WITH_PORT:
            self._check_port(
                entry.exact(1), f"{entry.table} entry of {_OWNER.get(entry.table, 'job')} {entry.exact(0)}"
            )
        if entry.table == "host":
            self._check_host(entry)
        if entry.table in ("admission", "transit"):
            bitmap = entry.exact(len(entry.match) - 1)
            if bitmap.bit_count() != 1:
                raise P4RuntimeError(
                    Code.INVALID_ARGUMENT, f"{entry.table}: bitmap {bitmap:#x} must have exactly one bit"
                )

    def _check_host(self, entry: Entry) -> None:
        job_id, address = entry.exact(0), entry.exact(1)
        self._check_port(entry.params[0], f"host entry of job {job_id}")
        holder = self._hosts.get(address, job_id)
        if holder != job_id:
            raise P4RuntimeError(
                Code.FAILED_PRECONDITION,
                f"host: {ipaddress.IPv4Address(address)} is a host of job {holder}; take that entry away first",
            )

    def _check_port(self, port: int, what: str) -> None:
        reason = self._no_port(port)
        if reason is not None:
            raise P4RuntimeError(Code.NOT_FOUND, f"{what}: {reason}", Detail.NO_SUCH_PORT)

    # -- one key changes: tables first, then the data path, and back again if that refuses ---------

    def _put(self, table: str | None, key: Key | int, value: Entry | Group | None) -> None:
        before = self._store(table, key, value)
        try:
            self._realise(table, key, before, value)
        except DataplaneError as error:
            self._store(table, key, before)
            raise _refused(error) from error

    def _store(self, table: str | None, key: Key | int, value: Entry | Group | None) -> Entry | Group | None:
        if table is None:
            assert isinstance(key, int)
            group_before = self._groups.pop(key, None)
            if isinstance(value, Group):
                self._groups[key] = value
            return group_before
        assert isinstance(key, tuple)
        rows = self._tables[table]
        before = rows.get(key)
        if isinstance(value, Entry):
            rows[key] = value
        else:
            rows.pop(key, None)
        if table == "region":
            self._index(self._regions, key[0][0], key, value)
        elif table == "host":
            if isinstance(value, Entry):
                self._hosts[value.exact(1)] = value.exact(0)
            elif before is not None:
                self._hosts.pop(before.exact(1), None)
        elif table == "replica":
            self._index(self._rewrites, key[0][0], (key[0][1], key[0][2]), value)
        return before

    @staticmethod
    def _index(index: dict, outer: object, inner: object, value: object) -> None:  # type: ignore[type-arg]
        if value is None:
            index.get(outer, {}).pop(inner, None)
            if not index.get(outer):
                index.pop(outer, None)
        else:
            index.setdefault(outer, {})[inner] = value

    def _realise(
        self, table: str | None, key: Key | int, before: Entry | Group | None, after: Entry | Group | None
    ) -> None:
        if table is None:
            assert isinstance(key, int)
            self._realise_group(key)
            return
        entry = after if after is not None else before
        if not isinstance(entry, Entry):
            return
        if table in ("job", "region"):
            self._realise_job(entry.exact(0))
        elif table == "replica":
            self._realise_group(entry.exact(0))
        elif table == "admission":
            numbers = (entry.exact(0), entry.exact(1), entry.exact(2), entry.exact(3))
            if after is None:
                self.dataplane.delete_admission(*numbers)
            elif before is None:
                self.dataplane.set_admission(*numbers)
        elif table == "host":
            address = entry.exact(1)
            old = before if isinstance(before, Entry) else None
            new = after if isinstance(after, Entry) else None
            if old is not None and (new is None or old.params[1] != new.params[1]):
                self.dataplane.delete_host(address)
            if new is not None:
                self.dataplane.set_host(new.exact(0), address, Host(*new.params))
        elif table == "transit":
            if after is None:
                self.dataplane.delete_transit(entry.exact(0), entry.exact(1), entry.exact(2))
            else:
                self.dataplane.set_transit(entry.exact(0), entry.exact(1), entry.exact(2), entry.params[0])
        elif table == "ps_port":
            if after is None:
                self.dataplane.delete_ps_port(entry.exact(0), entry.exact(1))
            elif before is None:
                self.dataplane.set_ps_port(entry.exact(0), entry.exact(1))

    def _realise_job(self, job_id: int) -> None:
        job = self._tables["job"].get(((job_id,), 0))
        regions = self._regions.get(job_id)
        if job is not None and regions:
            values, full0, full1, group = job.params
            ranges = sorted(entry.range(1) for entry in regions.values())
            config = JobConfig(values, full0, full1, group, tuple(Region(low, high - low + 1) for low, high in ranges))
            self.dataplane.set_job(job_id, config)
            self._known_jobs.add(job_id)
        elif job_id in self._known_jobs:
            self.dataplane.delete_job(job_id)
            self._known_jobs.discard(job_id)

    def _realise_group(self, group_id: int) -> None:
        group = self._groups.get(group_id)
        rewrites = self._rewrites.get(group_id, {})
        replicas: list[Replica] = []
        for member in group.replicas if group else ():
            rewrite = rewrites.get((member.port, member.instance))
            if rewrite is not None:
                replicas.append(Replica(member.port, *rewrite.params))
        if replicas:
            self.dataplane.set_group(group_id, replicas)
            self._live_groups.add(group_id)
        elif group_id in self._live_groups:
            self.dataplane.set_group(group_id, ())
            self._live_groups.discard(group_id)

    # -- counters ----------------------------------------------------------------------------------

    def _counter(self, counter_id: int) -> Counter:
        counter = self.pipeline.counters.get(counter_id)
        if counter is None:
            raise P4RuntimeError(Code.NOT_FOUND, f"there is no counter with ID {counter_id:#x}")
        return counter

    def _write_counter(self, kind: p4r.Update.Type.ValueType, message: p4r.CounterEntry) -> None:
        if kind != _MODIFY:
            raise P4RuntimeError(Code.INVALID_ARGUMENT, "a counter entry can only be MODIFYed")
        counter = self._counter(message.counter_id)
        if not message.HasField("index"):
            raise P4RuntimeError(Code.INVALID_ARGUMENT, f"counter {counter.name}: a write needs an index")
        index = _index(message.index.index, counter.size, f"counter {counter.name}")
        value = message.data.byte_count if counter.counts_bytes else message.data.packet_count
        # The data path only counts up; a written value is an offset kept here.
        self.counter_bases[counter.id, index] = self.dataplane.read_counters(index)[counter.name] - value

    def read_counter(self, counter: Counter, index: int, raw: int) -> int:
        """Value of a counter cell from what the data path counted."""
        return raw - self.counter_bases.get((counter.id, index), 0)

    # -- reads -------------------------------------------------------------------------------------

    def read(self, entity: p4r.Entity, cells: dict[int, dict[str, int]]) -> Iterator[p4r.Entity]:
        """Entities that match one entity of a ReadRequest; unset or zero fields are wildcards.

        `cells` caches the data path's counters by job ID for one request.
        """
        kind = entity.WhichOneof("entity")
        if kind == "table_entry":
            yield from self._read_entries(entity.table_entry)
        elif kind == "packet_replication_engine_entry":
            pre = entity.packet_replication_engine_entry
            if pre.WhichOneof("type") == "clone_session_entry":
                raise P4RuntimeError(Code.UNIMPLEMENTED, "this switch has multicast groups, no clone sessions")
            wanted = pre.multicast_group_entry.multicast_group_id
            for group in self.groups():
                if wanted in (0, group.group_id):
                    yield encode_group(group)
        elif kind == "counter_entry":
            yield from self._read_counters(entity.counter_entry, cells)
        elif kind == "register_entry":
            yield from self._read_registers(entity.register_entry)
        elif kind is None:
            raise P4RuntimeError(Code.INVALID_ARGUMENT, "an entity of the read request is empty")
        else:
            raise P4RuntimeError(Code.UNIMPLEMENTED, f"the pipeline has no {kind}")

    def _read_entries(self, message: p4r.TableEntry) -> Iterator[p4r.Entity]:
        if message.table_id == 0:
            if message.match:
                raise P4RuntimeError(Code.INVALID_ARGUMENT, "a match needs a table_id")
            tables: list[Table] = list(self.pipeline.tables.values())
        else:
            tables = [find_table(self.pipeline, message.table_id)]
        if message.is_default_action:
            for table in tables:
                yield encode_default(table, self.pipeline)
            return
        if message.match:
            table, match, priority = decode_key(message, self.pipeline)
            entry = self._tables[table.name].get((match, priority))
            if entry is not None:
                yield encode_entry(entry, self.pipeline)
            return
        for table in tables:
            for entry in self.entries(table.name):
                if message.priority in (0, entry.priority):
                    yield encode_entry(entry, self.pipeline)

    def _read_counters(self, message: p4r.CounterEntry, cells: dict[int, dict[str, int]]) -> Iterator[p4r.Entity]:
        if message.counter_id == 0:
            counters = list(self.pipeline.counters.values())
        else:
            counters = [self._counter(message.counter_id)]
        for counter in counters:
            if message.HasField("index"):
                indexes = [_index(message.index.index, counter.size, f"counter {counter.name}")]
            else:
                indexes = list(range(counter.size))
            for index in indexes:
                if index not in cells:
                    cells[index] = dict(self.dataplane.read_counters(index))
                value = self.read_counter(counter, index, cells[index][counter.name])
                reply = p4r.CounterEntry(counter_id=counter.id)
                reply.index.index = index
                if counter.counts_bytes:
                    reply.data.byte_count = value
                else:
                    reply.data.packet_count = value
                yield p4r.Entity(counter_entry=reply)

    def _read_registers(self, message: p4r.RegisterEntry) -> Iterator[p4r.Entity]:
        if message.register_id == 0:
            registers: list[Register] = list(self.pipeline.registers.values())
        else:
            register = self.pipeline.registers.get(message.register_id)
            if register is None:
                raise P4RuntimeError(Code.NOT_FOUND, f"there is no register with ID {message.register_id:#x}")
            registers = [register]
        for register in registers:
            if register.name == "dropped":
                yield from self._read_dropped(register, message)
                continue
            aggregator = register.name == "aggregator"
            # The array is as long as the switch has aggregators, whatever the p4info's size allows.
            size = self.dataplane.aggregators if aggregator else register.size
            if message.HasField("index"):
                indexes = [_index(message.index.index, size, f"register {register.name}")]
            else:
                indexes = list(range(size))
            for index in indexes:
                reply = p4r.RegisterEntry(register_id=register.id)
                reply.index.index = index
                reply.data.CopyFrom(self._aggregator(index) if aggregator else self._occupied(index))
                yield p4r.Entity(register_entry=reply)

    def _read_dropped(self, register: Register, message: p4r.RegisterEntry) -> Iterator[p4r.Entity]:
        """The ports at which something was dropped; a whole read leaves out the empty rest of the array."""
        members = [member.name for member in self.pipeline.p4info.type_info.structs["dropped_t"].members]
        cells: list[dict[str, int]] = [
            {"port": d.port, "address": d.address, "last_source": d.last_source, **d.dropped}
            for d in self.dataplane.read_drops()
        ][: register.size]
        if message.HasField("index"):
            index = _index(message.index.index, register.size, f"register {register.name}")
            chosen = {index: cells[index] if index < len(cells) else dict.fromkeys(members, 0)}
        else:
            chosen = dict(enumerate(cells))
        for index, cell in chosen.items():
            reply = p4r.RegisterEntry(register_id=register.id)
            reply.index.index = index
            numbers = [p4d.P4Data(bitstring=bytestring.encode(cell[name])) for name in members]
            reply.data.CopyFrom(p4d.P4Data(struct=p4d.P4StructLike(members=numbers)))
            yield p4r.Entity(register_entry=reply)

    def _aggregator(self, index: int) -> p4d.P4Data:
        state = self.dataplane.read_aggregator(index)
        numbers = (
            state.job_id,
            state.sequence,
            state.level,
            state.bitmap,
            int(state.complete),
            int(state.ecn),
            state.timestamp_ns,
        )
        members = [p4d.P4Data(bitstring=bytestring.encode(number)) for number in numbers]
        return p4d.P4Data(struct=p4d.P4StructLike(members=members))

    def _occupied(self, job_id: int) -> p4d.P4Data:
        return p4d.P4Data(bitstring=bytestring.encode(self.occupancy(job_id)))

    def occupancy(self, job_id: int) -> int:
        """Aggregators in use by a job (0: by all), at most one second old: counting them scans the switch."""
        if job_id and job_id not in self._known_jobs:
            return 0
        now = self._clock()
        cached = self._occupancy.get(job_id)
        if cached is None or now - cached[0] >= 1.0:
            cached = (now, self.dataplane.occupancy(job_id))
            self._occupancy[job_id] = cached
        return cached[1]


def _index(index: int, size: int, what: str) -> int:
    if not 0 <= index < size:
        raise P4RuntimeError(Code.OUT_OF_RANGE, f"{what}: index {index} is outside 0..{size - 1}")
    return index


__all__ = ["Device", "GroupReplica", "NoPort"]
