# SPDX-License-Identifier: Apache-2.0
"""Table entries and multicast groups as validated values, and their protobuf form."""

from __future__ import annotations

from dataclasses import dataclass

from finsy.proto import p4r

from . import bytestring
from .dataplane import GROUP_MAX, REPLICAS_MAX
from .errors import Code, P4RuntimeError
from .pipeline import Action, Field, Pipeline, Table

Match = int | tuple[int, int]
Key = tuple[tuple[Match, ...], int]


@dataclass(frozen=True)
class Entry:
    """One table entry. `match` is in the order of the table's fields: an int, or (low, high) inclusive."""

    table: str
    match: tuple[Match, ...]
    priority: int
    action: str
    params: tuple[int, ...]
    metadata: bytes = b""
    controller_metadata: int = 0

    @property
    def key(self) -> Key:
        """What identifies the entry in its table."""
        return (self.match, self.priority)

    def exact(self, index: int) -> int:
        """Match value of an exact field."""
        value = self.match[index]
        assert isinstance(value, int)
        return value

    def range(self, index: int) -> tuple[int, int]:
        """Match value of a range field, inclusive."""
        value = self.match[index]
        assert isinstance(value, tuple)
        return value


@dataclass(frozen=True)
class GroupReplica:
    """One replica of a multicast group. `port_bytes`: written as the bytes field `port`, read back in the same
    form."""

    port: int
    instance: int
    port_bytes: bool = False


@dataclass(frozen=True)
class Group:
    """A multicast group of the packet replication engine."""

    group_id: int
    replicas: tuple[GroupReplica, ...]
    metadata: bytes = b""


def _decode_match(message: p4r.FieldMatch, field: Field, what: str) -> Match:
    kind = message.WhichOneof("field_match_type")
    expected = "range" if field.ranged else "exact"
    if kind != expected:
        raise P4RuntimeError(Code.INVALID_ARGUMENT, f"{what}: {expected} match expected, {kind or 'none'} given")
    if kind == "exact":
        return bytestring.decode(message.exact.value, field.bitwidth, what)
    low = bytestring.decode(message.range.low, field.bitwidth, what)
    high = bytestring.decode(message.range.high, field.bitwidth, what)
    if low > high:
        raise P4RuntimeError(Code.INVALID_ARGUMENT, f"{what}: low {low} is above high {high}")
    if low == 0 and high == (1 << field.bitwidth) - 1:
        raise P4RuntimeError(Code.INVALID_ARGUMENT, f"{what}: omit a match on every value")
    return (low, high)


def _decode_key(message: p4r.TableEntry, table: Table) -> tuple[Match, ...]:
    given: dict[int, p4r.FieldMatch] = {}
    known = {field.id for field in table.fields}
    for match in message.match:
        if match.field_id not in known:
            raise P4RuntimeError(
                Code.INVALID_ARGUMENT, f"table {table.name} has no match field with ID {match.field_id}"
            )
        if match.field_id in given:
            raise P4RuntimeError(
                Code.INVALID_ARGUMENT, f"table {table.name}: match field {match.field_id} is given twice"
            )
        given[match.field_id] = match
    key: list[Match] = []
    for field in table.fields:
        what = f"{table.name}.{field.name}"
        if field.id in given:
            key.append(_decode_match(given[field.id], field, what))
        elif field.ranged:
            key.append((0, (1 << field.bitwidth) - 1))
        else:
            raise P4RuntimeError(Code.INVALID_ARGUMENT, f"{what}: an exact match field must be given")
    return tuple(key)


def _decode_action(message: p4r.TableEntry, table: Table) -> tuple[str, tuple[int, ...]]:
    if message.action.WhichOneof("type") != "action":
        raise P4RuntimeError(Code.INVALID_ARGUMENT, f"table {table.name}: an entry needs a direct action")
    given = message.action.action
    action = _action(table, given.action_id)
    values: dict[int, bytes] = {}
    for param in given.params:
        if param.param_id in values:
            raise P4RuntimeError(
                Code.INVALID_ARGUMENT, f"action {action.name}: parameter {param.param_id} is given twice"
            )
        values[param.param_id] = param.value
    if set(values) != {param_id for param_id, _, _ in action.params}:
        names = ", ".join(name for _, name, _ in action.params) or "none"
        raise P4RuntimeError(Code.INVALID_ARGUMENT, f"action {action.name} takes these parameters: {names}")
    decoded = tuple(
        bytestring.decode(values[param_id], width, f"{action.name}.{name}") for param_id, name, width in action.params
    )
    return action.name, decoded


def _action(table: Table, action_id: int) -> Action:
    for action in table.actions:
        if action.id == action_id:
            return action
    raise P4RuntimeError(Code.INVALID_ARGUMENT, f"table {table.name} has no action with ID {action_id} for entries")


def find_table(pipeline: Pipeline, table_id: int) -> Table:
    """The table of an ID, or NOT_FOUND."""
    table = pipeline.tables.get(table_id)
    if table is None:
        raise P4RuntimeError(Code.NOT_FOUND, f"there is no table with ID {table_id:#x}")
    return table


def decode_key(message: p4r.TableEntry, pipeline: Pipeline) -> tuple[Table, tuple[Match, ...], int]:
    """Table, match and priority of an entry; its action is not looked at (reads and deletes)."""
    table = find_table(pipeline, message.table_id)
    if message.is_default_action:
        raise P4RuntimeError(Code.PERMISSION_DENIED, f"the default action of table {table.name} is constant")
    match = _decode_key(message, table)
    if table.ternary and message.priority <= 0:
        raise P4RuntimeError(Code.INVALID_ARGUMENT, f"table {table.name} has a range match: priority must be 1 or more")
    if not table.ternary and message.priority != 0:
        raise P4RuntimeError(
            Code.INVALID_ARGUMENT, f"table {table.name} has exact matches only: leave the priority out"
        )
    return table, match, message.priority


def decode_entry(message: p4r.TableEntry, pipeline: Pipeline) -> Entry:
    """A whole entry, validated against the p4info. Raises P4RuntimeError."""
    table, match, priority = decode_key(message, pipeline)
    for name in ("meter_config", "counter_data", "meter_counter_data", "time_since_last_hit"):
        if message.HasField(name):
            raise P4RuntimeError(Code.INVALID_ARGUMENT, f"table {table.name} has no direct resource: {name}")
    if message.idle_timeout_ns:
        raise P4RuntimeError(Code.INVALID_ARGUMENT, f"table {table.name} has no idle timeout")
    action, params = _decode_action(message, table)
    return Entry(table.name, match, priority, action, params, message.metadata, message.controller_metadata)


def encode_entry(entry: Entry, pipeline: Pipeline) -> p4r.Entity:
    """The canonical protobuf form of an entry."""
    table = pipeline.table(entry.table)
    message = p4r.TableEntry(
        table_id=table.id,
        priority=entry.priority,
        metadata=entry.metadata,
        controller_metadata=entry.controller_metadata,
    )
    for field, value in zip(table.fields, entry.match, strict=True):
        if isinstance(value, int):
            message.match.add(field_id=field.id).exact.value = bytestring.encode(value)
        elif value != (0, (1 << field.bitwidth) - 1):
            match = message.match.add(field_id=field.id)
            match.range.low = bytestring.encode(value[0])
            match.range.high = bytestring.encode(value[1])
    action = next(action for action in table.actions if action.name == entry.action)
    message.action.action.action_id = action.id
    for (param_id, _, _), number in zip(action.params, entry.params, strict=True):
        message.action.action.params.add(param_id=param_id, value=bytestring.encode(number))
    return p4r.Entity(table_entry=message)


def encode_default(table: Table, pipeline: Pipeline) -> p4r.Entity:
    """The constant default entry of a table."""
    raw = next(item for item in pipeline.p4info.tables if item.preamble.id == table.id)
    message = p4r.TableEntry(table_id=table.id, is_default_action=True, is_const=True)
    message.action.action.action_id = raw.const_default_action_id
    return p4r.Entity(table_entry=message)


def decode_group(message: p4r.MulticastGroupEntry) -> Group:
    """A multicast group, validated. Raises INVALID_ARGUMENT."""
    group_id = message.multicast_group_id
    if not 1 <= group_id <= GROUP_MAX:
        raise P4RuntimeError(
            Code.INVALID_ARGUMENT, f"multicast_group_id {group_id}: this switch has groups 1..{GROUP_MAX}"
        )
    if len(message.replicas) > REPLICAS_MAX:
        raise P4RuntimeError(
            Code.RESOURCE_EXHAUSTED,
            f"multicast group {group_id}: {len(message.replicas)} replicas, at most {REPLICAS_MAX}",
        )
    replicas: list[GroupReplica] = []
    seen: set[tuple[int, int]] = set()
    for raw in message.replicas:
        what = f"multicast group {group_id}: replica port"
        if raw.backup_replicas:
            raise P4RuntimeError(Code.UNIMPLEMENTED, f"multicast group {group_id}: no backup replicas here")
        kind = raw.WhichOneof("port_kind")
        if kind is None:
            raise P4RuntimeError(Code.INVALID_ARGUMENT, f"{what} is not set")
        port = raw.egress_port if kind == "egress_port" else bytestring.decode(raw.port, 32, what)
        if port == 0:
            raise P4RuntimeError(Code.INVALID_ARGUMENT, f"{what} is 0, which no port has")
        if raw.instance > 0xFFFF:
            raise P4RuntimeError(
                Code.OUT_OF_RANGE, f"multicast group {group_id}: instance {raw.instance} is above 65535"
            )
        if (port, raw.instance) in seen:
            raise P4RuntimeError(
                Code.INVALID_ARGUMENT,
                f"multicast group {group_id}: port {port} instance {raw.instance} is given twice",
            )
        seen.add((port, raw.instance))
        replicas.append(GroupReplica(port, raw.instance, kind == "port"))
    return Group(group_id, tuple(replicas), message.metadata)


def encode_group(group: Group) -> p4r.Entity:
    """The protobuf form of a multicast group, ports in the form in which they were written."""
    message = p4r.MulticastGroupEntry(multicast_group_id=group.group_id, metadata=group.metadata)
    for replica in group.replicas:
        if replica.port_bytes:
            message.replicas.add(port=bytestring.encode(replica.port), instance=replica.instance)
        else:
            message.replicas.add(egress_port=replica.port, instance=replica.instance)
    entity = p4r.Entity()
    entity.packet_replication_engine_entry.multicast_group_entry.CopyFrom(message)
    return entity
