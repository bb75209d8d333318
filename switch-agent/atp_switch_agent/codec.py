# SPDX-License-Identifier: Apache-2.0
"""Entries to P4Runtime messages and back, by the names of the p4info in force."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from importlib import resources
from pathlib import Path

import finsy as fy
from finsy.proto import p4i, p4r
from google.protobuf import text_format

from .entries import (
    ACTIONS,
    CONGESTION,
    FIELDS,
    FORWARDING_ACTIONS,
    FORWARDING_FIELDS,
    GROUP,
    L2,
    REGION,
    Entry,
    Match,
)
from .planner import Op, Update
from .targets import DROP_REASONS, DROP_SHIFT, EVENT_CODES, EVENT_SHIFT, EVENTS, problems, recognise, short

_TYPES = {Op.INSERT: p4r.Update.INSERT, Op.MODIFY: p4r.Update.MODIFY, Op.DELETE: p4r.Update.DELETE}
_PRIORITY = 1
_JOB_MASK = (1 << EVENT_SHIFT) - 1


class PipelineMismatch(ValueError):
    """A p4info that is no ATP pipeline; the text says what differs from the contract."""


def _packaged(name: str, in_tree: str) -> Path:
    """A file of the P4 program: beside this package when installed, in p4/ in a source tree."""
    packaged = Path(str(resources.files(__package__))) / name
    if packaged.exists():
        return packaged
    return Path(__file__).resolve().parents[2] / "p4" / in_tree


def contract_path() -> Path:
    """The contract, which is the software switch's p4info."""
    return _packaged("p4info.txtpb", "p4info.txtpb")


def bmv2_paths() -> tuple[Path, Path]:
    """p4info and device configuration (JSON) of the compiled bmv2 program."""
    folder = "build"
    return (
        _packaged("atp.bmv2.p4info.txtpb", f"{folder}/atp.bmv2.p4info.txtpb"),
        _packaged("atp.bmv2.json", f"{folder}/atp.bmv2.json"),
    )


def load_p4info(path: Path) -> p4i.P4Info:
    """A p4info in protobuf text format. OSError or text_format.ParseError if it cannot be read."""
    return text_format.Parse(path.read_text(encoding="utf-8"), p4i.P4Info())


def mismatch(p4info: p4i.P4Info) -> list[str]:
    """What a p4info lacks of the contract; empty: an ATP pipeline."""
    return problems(p4info, load_p4info(contract_path()))


class Codec:
    """One pipeline: p4info, device configuration, cookie, and the translation of entries."""

    def __init__(
        self, p4info: Path | p4i.P4Info, device_config: Path | None = None, *, cookie: int | None = None
    ) -> None:
        """`cookie`: of a pipeline that the switch runs already; default: a digest of p4info and configuration.

        Raises OSError or text_format.ParseError, and PipelineMismatch if the p4info lacks something of the contract.
        """
        self.p4info = load_p4info(p4info) if isinstance(p4info, Path) else p4info
        wrong = mismatch(self.p4info)
        if wrong:
            where = p4info if isinstance(p4info, Path) else f"pipeline {describe(self.p4info)}"
            raise PipelineMismatch(f"{where} is no ATP pipeline of this version: {'; '.join(wrong[:6])}")
        self.target = recognise(self.p4info)
        if device_config is not None:
            self.device_config: bytes | None = device_config.read_bytes()
        else:
            # The software switch needs no device configuration, but a client of it may not send an empty one.
            self.device_config = None if self.target.name else b"atp"
        self._schema = fy.P4Schema(self.p4info)
        digest = hashlib.sha256(self.p4info.SerializeToString(deterministic=True) + (self.device_config or b""))
        self.cookie = int.from_bytes(digest.digest()[:8], "big") if cookie is None else cookie
        self.counters = {
            counter.preamble.id: (short(counter.preamble), counter.spec.unit == p4i.CounterSpec.BYTES)
            for counter in self.p4info.counters
            if short(counter.preamble) != "drops"
        }
        self.drops_counter = next((c.preamble.id for c in self.p4info.counters if short(c.preamble) == "drops"), None)
        self._events = next((number for number, (name, _) in self.counters.items() if name == "events"), None)
        registers = {short(item.preamble): item for item in self.p4info.registers}
        self.occupancy_register = registers["occupancy"].preamble.id if "occupancy" in registers else None
        self.dropped_register = registers["dropped"].preamble.id if "dropped" in registers else None
        self._dropped_members = (
            [member.name for member in self.p4info.type_info.structs["dropped_t"].members]
            if "dropped" in registers
            else []
        )
        self._tables = {short(table.preamble): table for table in self.p4info.tables}
        self.table_sizes = {name: table.size for name, table in self._tables.items() if name in FIELDS}
        self.forwarding_tables = frozenset(name for name in self._tables if name in FORWARDING_FIELDS)

    @property
    def name(self) -> str:
        """Name, version and cookie of the pipeline."""
        return f"{describe(self.p4info)} {self.cookie:016x}"

    def config(self) -> p4r.ForwardingPipelineConfig:
        """What to push. ValueError if there is no device configuration."""
        if self.device_config is None:
            raise ValueError(f"pipeline {self.name} comes without a device configuration")
        return p4r.ForwardingPipelineConfig(
            p4info=self.p4info,
            p4_device_config=self.device_config,
            cookie=p4r.ForwardingPipelineConfig.Cookie(cookie=self.cookie),
        )

    def encode(self, update: Update) -> p4r.Update:
        """One update. ValueError if a number does not fit, for example a port wider than the target's."""
        return p4r.Update(type=_TYPES[update.op], entity=self.encode_entity(update.entry))

    def encode_entity(self, entry: Entry) -> p4r.Entity:
        """One entry. A group's ports go as `egress_port`, which every server takes."""
        if entry.table == GROUP:
            message = p4r.MulticastGroupEntry(multicast_group_id=entry.number(0))
            for port, instance in zip(entry.params[::2], entry.params[1::2], strict=True):
                message.replicas.add(egress_port=port, instance=instance)
            entity = p4r.Entity()
            entity.packet_replication_engine_entry.multicast_group_entry.CopyFrom(message)
            return entity
        if entry.table in FORWARDING_FIELDS:
            fields, action = FORWARDING_FIELDS[entry.table], entry.action
            names = FORWARDING_ACTIONS[entry.table][action]
        else:
            fields = FIELDS[entry.table]
            action, names = ACTIONS[entry.table]
        match = {
            name: value
            for name, value in zip(fields, entry.match, strict=bool(entry.match))
            if value != (0, 0xFFFF)  # a range over everything is left out
        }
        raw = fy.P4TableEntry(
            entry.table,
            match=fy.P4TableMatch(match) if match else None,
            action=fy.P4TableAction(action, **dict(zip(names, entry.params, strict=True))),
            is_default_action=not entry.match,
            priority=_PRIORITY if entry.table in (REGION, CONGESTION) else 0,
            metadata=entry.metadata,
        )
        return raw.encode(self._schema)

    def decode(self, entity: p4r.Entity) -> Entry:
        """An entity of a read reply."""
        if entity.WhichOneof("entity") == "packet_replication_engine_entry":
            group = entity.packet_replication_engine_entry.multicast_group_entry
            members: list[int] = []
            for replica in sorted(group.replicas, key=lambda replica: (_port(replica), replica.instance)):
                members += (_port(replica), replica.instance)
            return Entry(GROUP, (group.multicast_group_id,), tuple(members))
        raw = fy.P4TableEntry.decode(entity, self._schema)
        table = raw.table_id.rsplit(".", 1)[-1]
        given = dict(raw.match or {})
        if table in FORWARDING_FIELDS:
            action = raw.action if isinstance(raw.action, fy.P4TableAction) else None
            name = action.name.rsplit(".", 1)[-1] if action else ""
            names = FORWARDING_ACTIONS[table].get(name, ())
            numbers = tuple(int(action.args[param]) for param in names) if action else ()
            found = () if raw.is_default_action else tuple(given[field] for field in FORWARDING_FIELDS[table])
            return Entry(table, found, numbers, action=name)
        match: list[Match] = [given.get(name, (0, 0xFFFF)) for name in FIELDS[table]]
        arguments = raw.action.args if isinstance(raw.action, fy.P4TableAction) else {}
        params = tuple(int(arguments[name]) for name in ACTIONS[table][1])
        return Entry(table, tuple(match), params, raw.metadata)

    def tally_drops(self, cells: Iterable[p4r.Entity]) -> list[dict[str, int]]:
        """The counter `drops` by port, in the form of the register `dropped`. It does not say who is behind a port."""
        ports: dict[int, dict[str, int]] = {}
        for entity in cells:
            cell = entity.counter_entry
            reason, port = cell.index.index >> DROP_SHIFT, cell.index.index & (1 << DROP_SHIFT) - 1
            if cell.data.packet_count and reason < len(DROP_REASONS):
                counted = ports.setdefault(port, {"port": port, "address": 0, "last_source": 0})
                name = DROP_REASONS[reason]
                counted[name] = counted.get(name, 0) + cell.data.packet_count
        return list(ports.values())

    def decode_dropped(self, entity: p4r.Entity) -> dict[str, int]:
        """One cell of the register `dropped`, by the names of its members."""
        members = entity.register_entry.data.struct.members
        numbers = (int.from_bytes(member.bitstring, "big") for member in members)
        return dict(zip(self._dropped_members, numbers, strict=True))

    def wildcards(self) -> list[p4r.Entity]:
        """What reads every entry and group of jobs."""
        entities = [
            p4r.Entity(table_entry=p4r.TableEntry(table_id=self._tables[name].preamble.id)) for name in self.table_sizes
        ]
        return [*entities, _every_group()]

    def forwarding_wildcards(self, tables: Collection[str]) -> list[p4r.Entity]:
        """What reads these tables with their default actions, and the groups if they may flood."""
        entities = []
        for name in sorted(tables):
            table_id = self._tables[name].preamble.id
            if FORWARDING_FIELDS[name]:
                entities.append(p4r.Entity(table_entry=p4r.TableEntry(table_id=table_id)))
            if name != CONGESTION:
                entities.append(p4r.Entity(table_entry=p4r.TableEntry(table_id=table_id, is_default_action=True)))
        return [*entities, _every_group()] if L2 in tables else entities

    def counter_reads(self, job_ids: Iterable[int]) -> list[p4r.Entity]:
        """What reads the counters of jobs.

        Tofino's `events` whole: its server syncs an array with the chip at each read, which a read a cell repeats.
        """
        if self._events is None:
            return [cell for job_id in job_ids for cell in self.counter_cells(job_id)]
        return [p4r.Entity(counter_entry=p4r.CounterEntry(counter_id=counter_id)) for counter_id in self.counters]

    def counter_cells(self, job_id: int, *, reset: bool = False) -> list[p4r.Entity]:
        """The counters of one job, to read or to set to zero."""
        cells = []
        for counter_id in self.counters:
            indexes = [job_id]
            if counter_id == self._events:
                indexes = [event << EVENT_SHIFT | job_id for event in range(1, EVENT_CODES)]
            for index in indexes:
                cell = p4r.CounterEntry(counter_id=counter_id)
                cell.index.index = index
                if reset:
                    cell.data.SetInParent()
                cells.append(p4r.Entity(counter_entry=cell))
        return cells

    def tally(self, cells: Iterable[p4r.Entity]) -> dict[int, dict[str, int]]:
        """Counters of the contract by job ID and name, from cells that were read."""
        result: dict[int, dict[str, int]] = {}
        events: dict[int, dict[int, int]] = {}
        for entity in cells:
            cell = entity.counter_entry
            if cell.counter_id not in self.counters:
                continue
            name, counts_bytes = self.counters[cell.counter_id]
            value = cell.data.byte_count if counts_bytes else cell.data.packet_count
            index = cell.index.index
            if cell.counter_id == self._events:
                events.setdefault(index & _JOB_MASK, {})[index >> EVENT_SHIFT] = value
            else:
                result.setdefault(index, {})[name] = value
        for job_id, counted in events.items():
            counters = result.setdefault(job_id, {})
            for name, codes in EVENTS.items():
                counters[name] = sum(counted.get(code, 0) for code in codes)
        return result


def describe(p4info: p4i.P4Info) -> str:
    """Name and version of a pipeline."""
    info = p4info.pkg_info
    return f"{info.name} {info.version}".strip() or "without a name"


def _every_group() -> p4r.Entity:
    groups = p4r.Entity()
    groups.packet_replication_engine_entry.multicast_group_entry.SetInParent()
    return groups


def _port(replica: p4r.Replica) -> int:
    if replica.WhichOneof("port_kind") == "port":
        return int.from_bytes(replica.port, "big")
    return replica.egress_port
