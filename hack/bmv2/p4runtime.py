# SPDX-License-Identifier: Apache-2.0
"""A small synchronous P4Runtime client. Objects are found by name in the p4info, which also has the widths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
from finsy.proto import p4i, p4r, p4r_grpc
from google.protobuf import text_format

Match = dict[str, int | tuple[int, int]]
RPC_SECONDS = 60.0
INSERT, MODIFY, DELETE = p4r.Update.INSERT, p4r.Update.MODIFY, p4r.Update.DELETE


class Controller:
    """The little of a P4Runtime client that tests need: arbitration, pipeline, entries by name, counters."""

    def __init__(self, target: str, p4info: Path, device_config: bytes) -> None:
        """Become master of device 1 and push the pipeline. RuntimeError if another one is master."""
        self.info = text_format.Parse(p4info.read_text(encoding="utf-8"), p4i.P4Info())
        self.channel = grpc.insecure_channel(target)
        self.stub = p4r_grpc.P4RuntimeStub(self.channel)
        self.requests: Queue[Any] = Queue()
        hello = p4r.StreamMessageRequest()
        hello.arbitration.device_id = 1
        hello.arbitration.election_id.low = 1
        self.requests.put(hello)
        self.replies = self.stub.StreamChannel(self.outgoing(), wait_for_ready=True)
        first: Any = next(iter(self.replies))
        if first.arbitration.status.code != 0:
            raise RuntimeError(f"{target} has another master")
        request = p4r.SetForwardingPipelineConfigRequest(
            device_id=1, action=p4r.SetForwardingPipelineConfigRequest.VERIFY_AND_COMMIT
        )
        request.election_id.low = 1
        request.config.p4info.CopyFrom(self.info)
        request.config.p4_device_config = device_config
        self.stub.SetForwardingPipelineConfig(request, timeout=RPC_SECONDS)

    def outgoing(self) -> Iterator[Any]:
        while (request := self.requests.get()) is not None:
            yield request

    def close(self) -> None:
        self.requests.put(None)
        self.channel.close()

    def find(self, objects: Any, alias: str) -> Any:
        return next(item for item in objects if item.preamble.alias == alias)

    def write(self, update_type: int, fill: Callable[[Any], None]) -> None:
        request = p4r.WriteRequest(device_id=1)
        request.election_id.low = 1
        update = request.updates.add(type=update_type)
        fill(update.entity)
        self.stub.Write(request, timeout=RPC_SECONDS)

    def entry(self, operation: int, table: str, match: Match, action: str = "", params: Sequence[int] = ()) -> None:
        """Write one entry; a pair is a range. Without match fields: the table's default action."""
        t = self.find(self.info.tables, table)

        def fill(entity: Any) -> None:
            entry = entity.table_entry
            entry.table_id = t.preamble.id
            entry.is_default_action = not t.match_fields
            for f in t.match_fields:
                value = match[f.name]
                width = (f.bitwidth + 7) // 8
                m = entry.match.add(field_id=f.id)
                if isinstance(value, tuple):
                    m.range.low, m.range.high = (v.to_bytes(width, "big") for v in value)
                    entry.priority = 1
                else:
                    m.exact.value = value.to_bytes(width, "big")
            if operation == DELETE:
                return
            a = self.find(self.info.actions, action)
            entry.action.action.action_id = a.preamble.id
            for p, value in zip(a.params, params, strict=True):
                entry.action.action.params.add(param_id=p.id, value=value.to_bytes((p.bitwidth + 7) // 8, "big"))

        self.write(operation, fill)

    def group(self, number: int, ports: Sequence[int]) -> None:
        """A multicast group; the instance of a replica is its place, from 1."""

        def fill(entity: Any) -> None:
            group = entity.packet_replication_engine_entry.multicast_group_entry
            group.multicast_group_id = number
            for instance, port in enumerate(ports, 1):
                group.replicas.add(egress_port=port, instance=instance)

        self.write(INSERT, fill)

    def read(self, *entities: Any) -> list[Any]:
        request = p4r.ReadRequest(device_id=1, entities=entities)
        return [entity for reply in self.stub.Read(request, timeout=RPC_SECONDS) for entity in reply.entities]

    def counters(self, index: int | None = None) -> dict[int, dict[str, int]]:
        """Counters by job that are not 0, by index; those of one index, or all."""
        names = {c.preamble.id: c for c in self.info.counters if c.preamble.alias != "drops"}
        cells = []
        for counter_id in names:
            cell = p4r.CounterEntry(counter_id=counter_id)
            if index is not None:
                cell.index.index = index
            cells.append(p4r.Entity(counter_entry=cell))
        found: dict[int, dict[str, int]] = {}
        for entity in self.read(*cells):
            counter = names[entity.counter_entry.counter_id]
            data = entity.counter_entry.data
            value = data.byte_count if counter.spec.unit == p4i.CounterSpec.BYTES else data.packet_count
            if value:
                found.setdefault(entity.counter_entry.index.index, {})[counter.preamble.alias] = value
        return found

    def drops(self) -> dict[int, int]:
        """The counter `drops` by cell, what is 0 left out."""
        counter = self.find(self.info.counters, "drops")
        cells = self.read(p4r.Entity(counter_entry=p4r.CounterEntry(counter_id=counter.preamble.id)))
        counted = {cell.counter_entry.index.index: cell.counter_entry.data.packet_count for cell in cells}
        return {index: count for index, count in counted.items() if count}
