# SPDX-License-Identifier: Apache-2.0
"""Counters and registers over P4Runtime: cells with an index, read from the data path."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from finsy.proto import p4d, p4r

from . import bytestring
from .dataplane import Dataplane
from .errors import Code, P4RuntimeError
from .pipeline import Counter, Pipeline, Register
from .tables import Tables

_MODIFY = p4r.Update.MODIFY


class Cells:
    """Counters and registers of one switch."""

    def __init__(
        self,
        pipeline: Pipeline,
        dataplane: Dataplane,
        tables: Tables,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pipeline = pipeline
        self._dataplane = dataplane
        self._tables = tables
        self._clock = clock
        self.counter_bases: dict[tuple[int, int], int] = {}
        """(counter ID, index) -> what the data path had counted at the controller's zero."""
        self._occupancy: dict[int, tuple[float, int]] = {}

    def _counter(self, counter_id: int) -> Counter:
        counter = self._pipeline.counters.get(counter_id)
        if counter is None:
            raise P4RuntimeError(Code.NOT_FOUND, f"there is no counter with ID {counter_id:#x}")
        return counter

    def write_counter(self, kind: p4r.Update.Type.ValueType, message: p4r.CounterEntry) -> None:
        if kind != _MODIFY:
            raise P4RuntimeError(Code.INVALID_ARGUMENT, "a counter entry can only be MODIFYed")
        counter = self._counter(message.counter_id)
        if not message.HasField("index"):
            raise P4RuntimeError(Code.INVALID_ARGUMENT, f"counter {counter.name}: a write needs an index")
        index = _index(message.index.index, counter.size, f"counter {counter.name}")
        value = message.data.byte_count if counter.counts_bytes else message.data.packet_count
        # The data path only counts up; a written value is an offset kept here.
        self.counter_bases[counter.id, index] = self._dataplane.read_counters(index)[counter.name] - value

    def read_counter(self, counter: Counter, index: int, raw: int) -> int:
        """Value of a counter cell from what the data path counted."""
        return raw - self.counter_bases.get((counter.id, index), 0)

    def read_counters(self, message: p4r.CounterEntry, cells: dict[int, dict[str, int]]) -> Iterator[p4r.Entity]:
        if message.counter_id == 0:
            counters = list(self._pipeline.counters.values())
        else:
            counters = [self._counter(message.counter_id)]
        for counter in counters:
            if message.HasField("index"):
                indexes = [_index(message.index.index, counter.size, f"counter {counter.name}")]
            else:
                indexes = list(range(counter.size))
            for index in indexes:
                if index not in cells:
                    cells[index] = dict(self._dataplane.read_counters(index))
                value = self.read_counter(counter, index, cells[index][counter.name])
                reply = p4r.CounterEntry(counter_id=counter.id)
                reply.index.index = index
                if counter.counts_bytes:
                    reply.data.byte_count = value
                else:
                    reply.data.packet_count = value
                yield p4r.Entity(counter_entry=reply)

    def read_registers(self, message: p4r.RegisterEntry) -> Iterator[p4r.Entity]:
        if message.register_id == 0:
            registers: list[Register] = list(self._pipeline.registers.values())
        else:
            register = self._pipeline.registers.get(message.register_id)
            if register is None:
                raise P4RuntimeError(Code.NOT_FOUND, f"there is no register with ID {message.register_id:#x}")
            registers = [register]
        for register in registers:
            if register.name == "dropped":
                yield from self._read_dropped(register, message)
                continue
            aggregator = register.name == "aggregator"
            # The array is as long as the switch has aggregators, whatever the p4info's size allows.
            size = self._dataplane.aggregators if aggregator else register.size
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
        members = [member.name for member in self._pipeline.p4info.type_info.structs["dropped_t"].members]
        cells: list[dict[str, int]] = [
            {"port": d.port, "address": d.address, "last_source": d.last_source, **d.dropped}
            for d in self._dataplane.read_drops()
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
        state = self._dataplane.read_aggregator(index)
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
        if job_id and not self._tables.is_known(job_id):
            return 0
        now = self._clock()
        cached = self._occupancy.get(job_id)
        if cached is None or now - cached[0] >= 1.0:
            cached = (now, self._dataplane.occupancy(job_id))
            self._occupancy[job_id] = cached
        return cached[1]


def _index(index: int, size: int, what: str) -> int:
    if not 0 <= index < size:
        raise P4RuntimeError(Code.OUT_OF_RANGE, f"{what}: index {index} is outside 0..{size - 1}")
    return index
