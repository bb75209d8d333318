# SPDX-License-Identifier: Apache-2.0
"""Entries to P4Runtime messages and back."""

from __future__ import annotations

from pathlib import Path

import pytest
from finsy.proto import p4i, p4r
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from atp_switch_agent.codec import Codec, contract_path, mismatch
from atp_switch_agent.entries import (
    ACTIONS,
    ADMISSION,
    DESTINATION,
    FIELDS,
    GROUP,
    GUARDED,
    HOST,
    HOST_PIECES,
    JOB,
    OWN,
    PLACE,
    PS_PORT,
    REGION,
    REPLICA,
    SOURCE,
    TRANSIT,
    Entry,
)
from atp_switch_agent.planner import Op, Update

CODEC = Codec(contract_path())
U8, U16, U32, U48 = (st.integers(0, (1 << bits) - 1) for bits in (8, 16, 32, 48))
RANGES = st.tuples(U16, U16).map(lambda pair: (min(pair), max(pair)))
ENTRIES = st.one_of(
    st.builds(
        Entry,
        st.just(JOB),
        st.tuples(U8),
        st.tuples(U16, U32, U32, U16),
        st.binary(max_size=40),
    ),
    st.builds(Entry, st.just(REGION), st.tuples(U8, RANGES)),
    st.builds(Entry, st.just(ADMISSION), st.tuples(U8, U32, st.integers(0, 1), U32)),
    st.builds(Entry, st.just(TRANSIT), st.tuples(U8, U32, U32), st.tuples(U32)),
    st.builds(Entry, st.just(PS_PORT), st.tuples(U8, U32)),
    st.builds(Entry, st.just(REPLICA), st.tuples(U16, U32, U16), st.tuples(U48, U32, U16)),
    st.builds(
        Entry,
        st.just(GROUP),
        st.tuples(U16),
        st.lists(st.tuples(U32, U16), unique=True, max_size=64).map(
            lambda copies: tuple(number for copy in sorted(copies) for number in copy)
        ),
    ),
)


@given(ENTRIES)
def test_what_is_written_is_what_is_read(entry: Entry) -> None:
    assert CODEC.decode(CODEC.encode_entity(entry)) == entry


def test_a_range_over_everything_is_left_out() -> None:
    entity = CODEC.encode_entity(Entry(REGION, (3, (0, 65535))))
    assert len(entity.table_entry.match) == 1


def test_a_group_is_read_in_whatever_order_the_switch_keeps_it() -> None:
    entity = p4r.Entity()
    group = entity.packet_replication_engine_entry.multicast_group_entry
    group.multicast_group_id = 4
    group.replicas.add(egress_port=9, instance=1)
    group.replicas.add(port=b"\x02", instance=7)
    assert CODEC.decode(entity) == Entry(GROUP, (4,), (2, 7, 9, 1))


def narrow(folder: Path) -> Path:
    """The contract with ports of 9 bits, as a hardware target publishes it."""
    p4info = text_format.Parse(contract_path().read_text(), p4i.P4Info())
    for table in p4info.tables:
        for field in table.match_fields:
            if field.type_name.name == "PortId_t":
                field.bitwidth = 9
                field.ClearField("type_name")
    path = folder / "narrow.txtpb"
    path.write_text(text_format.MessageToString(p4info))
    return path


def test_port_widths_are_the_targets(tmp_path: Path) -> None:
    codec = Codec(narrow(tmp_path))
    assert codec.cookie != CODEC.cookie
    fits, beyond = Entry(PS_PORT, (3, 511)), Entry(PS_PORT, (3, 512))
    assert codec.decode(codec.encode(Update(Op.INSERT, fits)).entity) == fits
    with pytest.raises(ValueError, match="512"):
        codec.encode(Update(Op.INSERT, beyond))


def test_a_foreign_pipeline_is_refused(tmp_path: Path) -> None:
    p4info = text_format.Parse(contract_path().read_text(), p4i.P4Info())
    del p4info.tables[2]
    path = tmp_path / "other.txtpb"
    path.write_text(text_format.MessageToString(p4info))
    with pytest.raises(ValueError, match="table admission is missing"):
        Codec(path)


def p4_program() -> p4i.P4Info:
    """The contract as a P4 program publishes it: hosts in pieces, drops in a counter, ports of 9 bits."""
    p4info = text_format.Parse(contract_path().read_text(), p4i.P4Info())
    kept = [table for table in p4info.tables if table.preamble.alias != HOST]
    del p4info.tables[:]
    p4info.tables.extend(kept)
    widths = {"address": 32, "bitmap0": 32, "bitmap1": 32, "edge": 1, "server": 1, "port": 9, "job_id": 8}
    for number, name in enumerate((*HOST_PIECES, GUARDED), 8):
        action_name, params = ACTIONS[name]
        table = p4info.tables.add(size=1024)
        table.preamble.id, table.preamble.name, table.preamble.alias = 0x02000000 + number, f"AtpIngress.{name}", name
        for field_id, field in enumerate(FIELDS[name], 1):
            table.match_fields.add(id=field_id, name=field, bitwidth=widths[field], match_type=p4i.MatchField.EXACT)
        action = p4info.actions.add()
        action.preamble.id, action.preamble.name = 0x01000000 + number, f"AtpIngress.{action_name}"
        action.preamble.alias = action_name
        for param_id, param in enumerate(params, 1):
            action.params.add(id=param_id, name=param, bitwidth=widths[param])
        table.action_refs.add(id=action.preamble.id)
    counter = p4info.counters.add(size=4096)
    counter.preamble.id, counter.preamble.name, counter.preamble.alias = 0x12000020, "AtpIngress.drops", "drops"
    counter.spec.unit = p4i.CounterSpec.PACKETS
    return p4info


def test_names_are_those_of_the_contract() -> None:
    """Of hosts the contract has one table, a P4 program its pieces."""
    tables = {table.preamble.alias: table for table in CODEC.p4info.tables}
    actions = {action.preamble.alias: action for action in CODEC.p4info.actions}
    assert set(tables) == set(FIELDS) - {*HOST_PIECES, GUARDED}
    for name, table in tables.items():
        action, params = ACTIONS[name]
        assert tuple(field.name for field in table.match_fields) == FIELDS[name]
        assert table.action_refs[0].id == actions[action].preamble.id
        assert tuple(param.name for param in actions[action].params) == params


@pytest.mark.parametrize(
    "entry",
    [
        Entry(SOURCE, (0x0A000001,), (0, 511, 7)),
        Entry(DESTINATION, (0x0A000001,), (1, 255)),
        Entry(PLACE, (0x0A000001, 1 << 31)),
        Entry(OWN, (0x0A000001, 1 << 31, 1)),
        Entry(GUARDED, (7,)),
    ],
)
def test_hosts_in_pieces(entry: Entry) -> None:
    codec = Codec(p4_program())
    assert codec.decode(codec.encode(Update(Op.INSERT, entry)).entity) == entry


def test_a_guard_is_whole_or_not_there() -> None:
    p4info = p4_program()

    def without(*names: str) -> list[str]:
        left = p4i.P4Info()
        left.CopyFrom(p4info)
        del left.tables[:]
        left.tables.extend(table for table in p4info.tables if table.preamble.alias not in names)
        return mismatch(left)

    assert without() == []
    assert without(OWN) == ["table own is missing"]
    assert without(*HOST_PIECES, GUARDED) == []
    next(table for table in p4info.tables if table.preamble.alias == SOURCE).match_fields[0].name = "ip"
    assert without() == ["table source has other fields than address"]


def test_drops_of_a_p4_program_are_told_by_port() -> None:
    codec = Codec(p4_program())
    assert codec.drops_counter is not None and codec.drops_counter not in codec.counters
    cells = []
    for reason, port, count in ((0, 4, 2), (3, 4, 1), (5, 4, 3), (7, 4, 4), (2, 511, 1), (1, 9, 0)):
        cell = p4r.CounterEntry(counter_id=codec.drops_counter)
        cell.index.index, cell.data.packet_count = reason << 9 | port, count
        cells.append(p4r.Entity(counter_entry=cell))
    nobody = {"address": 0, "last_source": 0}
    assert codec.tally_drops(cells) == [
        {"port": 4, **nobody, "source": 2, "forged": 1, "admission": 7},
        {"port": 511, **nobody, "malformed": 1},
    ]
