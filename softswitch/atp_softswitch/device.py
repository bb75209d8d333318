# SPDX-License-Identifier: Apache-2.0
"""The switch behind P4Runtime: what an update or a read request means for its tables, counters and registers."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from finsy.proto import p4r

from .cells import Cells
from .dataplane import PROFILES, REGIONS_MAX, Dataplane
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
from .errors import Code, Detail, P4RuntimeError
from .pipeline import Pipeline, Table
from .tables import INSERT_ORDER, Tables

_INSERT, _MODIFY, _DELETE = p4r.Update.INSERT, p4r.Update.MODIFY, p4r.Update.DELETE

_WITH_PORT = frozenset({"admission", "transit", "ps_port", "replica"})
_OWNER = {"replica": "multicast group"}


@dataclass(frozen=True)
class _Undo:
    """How to take one update back: what the key held before."""

    table: str | None
    key: Key | int
    before: Entry | Group | None


NoPort = Callable[[int], str | None]


class Device:
    """Tables, multicast groups and counters of one switch, and its data path.

    Not safe for use from several threads.
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
        self._tables = Tables(pipeline, dataplane)
        self._cells = Cells(pipeline, dataplane, self._tables, clock)

    # -- state -------------------------------------------------------------------------------------

    @property
    def counter_bases(self) -> dict[tuple[int, int], int]:
        """(counter ID, index) -> what the data path had counted at the controller's zero."""
        return self._cells.counter_bases

    @counter_bases.setter
    def counter_bases(self, bases: dict[tuple[int, int], int]) -> None:
        self._cells.counter_bases = bases

    def occupancy(self, job_id: int) -> int:
        """Aggregators in use by a job (0: by all), at most one second old."""
        return self._cells.occupancy(job_id)

    def entries(self, table: str) -> list[Entry]:
        """Every entry of a table, by short name."""
        return self._tables.entries(table)

    def groups(self) -> list[Group]:
        """Every multicast group."""
        return self._tables.groups()

    def jobs(self) -> list[int]:
        """IDs of the jobs in table `job`."""
        return sorted(entry.exact(0) for entry in self.entries("job"))

    def ports(self) -> frozenset[int]:
        """Ports that table entries name."""
        ingress = (entry for name in ("admission", "transit", "ps_port") for entry in self.entries(name))
        hosts = (entry.params[0] for entry in self.entries("host"))
        return frozenset((*(entry.exact(1) for entry in (*ingress, *self.entries("replica"))), *hosts))

    def clear(self) -> None:
        """Delete every entry and group."""
        self._tables.clear()
        self.counter_bases.clear()

    def copy_into(self, other: Device) -> None:
        """Insert all entries and groups of this device into another one, which is empty."""
        self._tables.copy_into(other._tables)
        other.counter_bases.update(self.counter_bases)

    def entities(self) -> Iterator[p4r.Entity]:
        """All entries and groups, in an order in which they can be inserted."""
        yield from map(encode_group, self.groups())
        for name in INSERT_ORDER:
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
            self._tables.put(step.table, step.key, step.before)

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
            self._cells.write_counter(update.type, update.entity.counter_entry)
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
            before = self._tables.entry(table.name, key)
            if before is None:
                raise P4RuntimeError(Code.NOT_FOUND, f"table {table.name} has no such entry")
            self._tables.put(table.name, key, None)
            return _Undo(table.name, key, before)
        entry = decode_entry(message, self.pipeline)
        self._check_entry(entry)
        before = self._tables.entry(entry.table, entry.key)
        if kind == _INSERT:
            if before is not None:
                raise P4RuntimeError(Code.ALREADY_EXISTS, f"table {entry.table} has this entry; use MODIFY")
            size = self.pipeline.table(entry.table).size
            if self._tables.count(entry.table) >= size:
                raise P4RuntimeError(Code.RESOURCE_EXHAUSTED, f"table {entry.table} is full ({size} entries)")
        elif before is None:
            raise P4RuntimeError(Code.NOT_FOUND, f"table {entry.table} has no such entry; use INSERT")
        self._tables.put(entry.table, entry.key, entry)
        return _Undo(entry.table, entry.key, before)

    def _apply_group(self, kind: p4r.Update.Type.ValueType, message: p4r.MulticastGroupEntry) -> _Undo:
        group_id = message.multicast_group_id
        before = self._tables.group(group_id)
        if kind == _DELETE:
            if before is None:
                raise P4RuntimeError(Code.NOT_FOUND, f"there is no multicast group {group_id}")
            self._tables.put(None, group_id, None)
            return _Undo(None, group_id, before)
        group = decode_group(message)
        for port in {member.port for member in group.replicas}:
            self._check_port(port, f"multicast group {group_id}")
        if kind == _INSERT and before is not None:
            raise P4RuntimeError(Code.ALREADY_EXISTS, f"multicast group {group_id} exists; use MODIFY")
        if kind == _MODIFY and before is None:
            raise P4RuntimeError(Code.NOT_FOUND, f"there is no multicast group {group_id}; use INSERT")
        self._tables.put(None, group_id, group)
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
            held = self._tables.regions_of(entry.exact(0))
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
        holder = self._tables.job_of_host(address)
        if holder not in (None, job_id):
            raise P4RuntimeError(
                Code.FAILED_PRECONDITION,
                f"host: {ipaddress.IPv4Address(address)} is a host of job {holder}; take that entry away first",
            )

    def _check_port(self, port: int, what: str) -> None:
        reason = self._no_port(port)
        if reason is not None:
            raise P4RuntimeError(Code.NOT_FOUND, f"{what}: {reason}", Detail.NO_SUCH_PORT)

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
            yield from self._cells.read_counters(entity.counter_entry, cells)
        elif kind == "register_entry":
            yield from self._cells.read_registers(entity.register_entry)
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
            entry = self._tables.entry(table.name, (match, priority))
            if entry is not None:
                yield encode_entry(entry, self.pipeline)
            return
        for table in tables:
            for entry in self.entries(table.name):
                if message.priority in (0, entry.priority):
                    yield encode_entry(entry, self.pipeline)


__all__ = ["Device", "GroupReplica", "NoPort"]
