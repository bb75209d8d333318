# SPDX-License-Identifier: Apache-2.0
"""Entries to P4Runtime messages and back."""

from __future__ import annotations

from pathlib import Path

import pytest
from finsy.proto import p4i, p4r
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from atp_switch_agent.codec import Codec, contract_path
from atp_switch_agent.entries import (
    ACTIONS,
    ADMISSION,
    FIELDS,
    GROUP,
    JOB,
    PS_PORT,
    REGION,
    REPLICA,
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


def test_names_are_those_of_the_contract() -> None:
    tables = {table.preamble.alias: table for table in CODEC.p4info.tables}
    actions = {action.preamble.alias: action for action in CODEC.p4info.actions}
    assert {name: tuple(field.name for field in table.match_fields) for name, table in tables.items()} == FIELDS
    for table, (action, params) in ACTIONS.items():
        assert tables[table].action_refs[0].id == actions[action].preamble.id
        assert tuple(param.name for param in actions[action].params) == params
