# SPDX-License-Identifier: Apache-2.0
"""Entries to P4Runtime messages and back, by the names of the p4info in force."""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path

import finsy as fy
from finsy.proto import p4i, p4r
from google.protobuf import text_format

from .entries import ACTIONS, FIELDS, GROUP, REGION, Entry, Match
from .planner import Op, Update

_TYPES = {Op.INSERT: p4r.Update.INSERT, Op.MODIFY: p4r.Update.MODIFY, Op.DELETE: p4r.Update.DELETE}
_PRIORITY = 1


def contract_path() -> Path:
    """The contract: beside this package when installed, in p4/ in a source tree."""
    packaged = Path(str(resources.files(__package__))) / "p4info.txtpb"
    if packaged.exists():
        return packaged
    return Path(__file__).resolve().parents[2] / "p4" / "p4info.txtpb"


class Codec:
    """One pipeline: p4info, device configuration, cookie, and the translation of entries."""

    def __init__(self, p4info_path: Path, device_config: Path | None = None) -> None:
        """Raises OSError or text_format.ParseError, and ValueError if the p4info lacks a table of the contract."""
        self.p4info = text_format.Parse(p4info_path.read_text(encoding="utf-8"), p4i.P4Info())
        # The software switch needs no device configuration, but a client of it may not send an empty one.
        self.device_config = device_config.read_bytes() if device_config else b"atp"
        self._schema = fy.P4Schema(p4info_path)
        missing = [name for name in (*FIELDS, *(ACTIONS[table][0] for table in FIELDS)) if self._lacks(name)]
        if missing:
            raise ValueError(f"{p4info_path} is no ATP pipeline, it lacks: {', '.join(sorted(set(missing)))}")
        digest = hashlib.sha256(self.p4info.SerializeToString(deterministic=True) + self.device_config)
        self.cookie = int.from_bytes(digest.digest()[:8], "big")
        self.counters = {
            counter.preamble.id: (_short(counter.preamble), counter.spec.unit == p4i.CounterSpec.BYTES)
            for counter in self.p4info.counters
        }
        self.occupancy_register = next(
            (item.preamble.id for item in self.p4info.registers if _short(item.preamble) == "occupancy"), None
        )

    def _lacks(self, name: str) -> bool:
        schema = self._schema
        return schema.tables.get(name) is None and schema.actions.get(name) is None

    @property
    def name(self) -> str:
        """Name, version and cookie of the pipeline."""
        info = self.p4info.pkg_info
        return f"{info.name} {info.version} {self.cookie:016x}"

    def config(self) -> p4r.ForwardingPipelineConfig:
        """What to push."""
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
        action, names = ACTIONS[entry.table]
        match = {
            name: value
            for name, value in zip(FIELDS[entry.table], entry.match, strict=True)
            if value != (0, 0xFFFF)  # a range over everything is left out
        }
        raw = fy.P4TableEntry(
            entry.table,
            match=fy.P4TableMatch(match),
            action=fy.P4TableAction(action, **dict(zip(names, entry.params, strict=True))),
            priority=_PRIORITY if entry.table == REGION else 0,
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
        match: list[Match] = [given.get(name, (0, 0xFFFF)) for name in FIELDS[table]]
        arguments = raw.action.args if isinstance(raw.action, fy.P4TableAction) else {}
        params = tuple(int(arguments[name]) for name in ACTIONS[table][1])
        return Entry(table, tuple(match), params, raw.metadata)

    def wildcards(self) -> list[p4r.Entity]:
        """What reads every entry and group."""
        entities = []
        for table in self.p4info.tables:
            if _short(table.preamble) in FIELDS:
                entities.append(p4r.Entity(table_entry=p4r.TableEntry(table_id=table.preamble.id)))
        groups = p4r.Entity()
        groups.packet_replication_engine_entry.multicast_group_entry.SetInParent()
        return [*entities, groups]

    def counter_cells(self, job_id: int, *, reset: bool = False) -> list[p4r.Entity]:
        """The counters of one job, to read or to set to zero."""
        cells = []
        for counter_id in self.counters:
            cell = p4r.CounterEntry(counter_id=counter_id)
            cell.index.index = job_id
            if reset:
                cell.data.SetInParent()
            cells.append(p4r.Entity(counter_entry=cell))
        return cells


def _short(preamble: p4i.Preamble) -> str:
    return preamble.alias or preamble.name.rsplit(".", 1)[-1]


def _port(replica: p4r.Replica) -> int:
    if replica.WhichOneof("port_kind") == "port":
        return int.from_bytes(replica.port, "big")
    return replica.egress_port
