# SPDX-License-Identifier: Apache-2.0
"""Targets by their p4info: what is recognised, what is refused, counters and ordinary traffic of P4 programs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from finsy.proto import p4i, p4r
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from atp_switch_agent.codec import Codec, PipelineMismatch, bmv2_paths, contract_path, load_p4info, mismatch
from atp_switch_agent.entries import CONGESTION, ECN, FIELDS, GROUP, HOST, L2, STALE, Entry, Key
from atp_switch_agent.forwarding import BROADCAST, FLOOD_GROUP, Forwarding, Tuning, diff, managed, plan
from atp_switch_agent.planner import Op, without_room
from atp_switch_agent.targets import EVENTS, recognise

P4 = Path(__file__).resolve().parents[2] / "p4"
COMPILED = sorted((P4 / "build").glob("*.p4info.txtpb"))
BMV2 = Codec(*bmv2_paths())
TUNING = Tuning(ecn_threshold=40, stale_ms=250)


def tofino(name: str = "tofino") -> p4i.P4Info:
    """What p4c wrote for the program in p4/tna."""
    return load_p4info(P4 / "build" / f"atp.{name}.p4info.txtpb")


TOFINO = Codec(tofino())


def test_the_targets() -> None:
    software, bmv2 = recognise(load_p4info(contract_path())), BMV2.target
    assert (software.name, software.port_bits, software.aggregators, software.values) == ("", 32, 0, ())
    assert (bmv2.name, bmv2.port_bits, bmv2.aggregators, bmv2.values) == ("bmv2", 9, 65536, (62,))
    first, second = Codec(tofino()).target, Codec(tofino("tofino2")).target
    assert (first.name, first.aggregators, first.values) == ("tofino", 22528, (62,))
    assert (second.name, second.aggregators) == ("tofino2", 40960)


@pytest.mark.parametrize("path", [pytest.param(path, id=path.name) for path in COMPILED])
def test_what_the_programs_publish_is_accepted(path: Path) -> None:
    assert mismatch(load_p4info(path)) == []


def remove_table(p4info: p4i.P4Info) -> None:
    p4info.tables.remove(next(item for item in p4info.tables if item.preamble.alias == "transit"))


def widen_port(p4info: p4i.P4Info) -> None:
    next(item for item in p4info.tables if item.preamble.alias == "ps_port").match_fields[1].bitwidth = 48


def change_match(p4info: p4i.P4Info) -> None:
    table = next(item for item in p4info.tables if item.preamble.alias == "region")
    table.match_fields[1].match_type = p4i.MatchField.TERNARY


def add_match(p4info: p4i.P4Info) -> None:
    table = next(item for item in p4info.tables if item.preamble.alias == "job")
    table.match_fields.add(id=9, name="vlan", bitwidth=12, match_type=p4i.MatchField.EXACT)


def rename_parameter(p4info: p4i.P4Info) -> None:
    next(item for item in p4info.actions if item.preamble.alias == "set_job").params[3].name = "tree"


def unbind_action(p4info: p4i.P4Info) -> None:
    del next(item for item in p4info.tables if item.preamble.alias == "replica").action_refs[:]


def remove_counter(p4info: p4i.P4Info) -> None:
    p4info.counters.remove(next(item for item in p4info.counters if item.preamble.alias == "released"))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (remove_table, "table transit is missing"),
        (widen_port, "ps_port.ingress_port has 48 bits, not 32"),
        (change_match, "region.aggregator_index is no RANGE match"),
        (add_match, "job.vlan is not in the contract"),
        (rename_parameter, "action set_job has the parameters"),
        (unbind_action, "action replica.rewrite is missing"),
        (remove_counter, "counters are missing: released"),
    ],
)
def test_what_does_not_match(change: Callable[[p4i.P4Info], None], text: str) -> None:
    p4info = load_p4info(contract_path())
    change(p4info)
    assert len(mismatch(p4info)) == 1
    with pytest.raises(PipelineMismatch, match=re.escape(text)):
        Codec(p4info)


def test_counters_of_tofino_in_its_own_form_are_named() -> None:
    p4info = tofino()
    del p4info.counters[:]
    p4info.externs.add(extern_type_id=131, extern_type_name="Counter")
    assert mismatch(p4info) == ["its counters are target externs: compile with --p4runtime-force-std-externs"]


def test_a_program_without_device_configuration_cannot_be_pushed() -> None:
    with pytest.raises(ValueError, match="comes without a device configuration"):
        Codec(tofino()).config()
    assert Codec(contract_path()).config().p4_device_config


# -- counters --------------------------------------------------------------------------------------


def test_events_are_counted_as_bmv2_counts_them() -> None:
    codes = {
        name: int(number)
        for name, number in re.findall(r"#define (V_\w+) (\d+)", (P4 / "include" / "events.p4").read_text())
    }
    counted: dict[str, set[int]] = {}
    source = (P4 / "v1model" / "count.p4").read_text()
    for condition, name in re.findall(r"if \(([^{]*)\) \{\s*(\w+)\.count", source):
        if name != "bytes_in":
            counted[name] = {codes[event] for event in re.findall(r"== (V_\w+)", condition)}
    # The second pass, which bmv2 does not have, releases on Tofino what a resend carries out (docs/p4.md, Counters).
    counted["resend_partials"] = {codes["V_SECOND_FREED"], codes["V_SECOND_TORN"]}
    counted["stale_takeovers"].add(codes["V_SECOND_STALE"])
    assert {name: set(events) for name, events in EVENTS.items()} == counted


def test_counters_from_events() -> None:
    codec = TOFINO
    cells = codec.counter_cells(7)
    names = {counter.preamble.id: counter.preamble.alias for counter in codec.p4info.counters}
    indexes = [cell.counter_entry.index.index for cell in cells if names[cell.counter_entry.counter_id] == "events"]
    assert indexes == [event << 8 | 7 for event in range(1, 32)]
    for cell in cells:
        entry = cell.counter_entry
        if names[entry.counter_id] == "events":
            entry.data.packet_count = 10 ** (entry.index.index >> 8) if entry.index.index >> 8 < 8 else 0
        elif names[entry.counter_id] == "bytes_in":
            entry.data.byte_count = 4321
    told = codec.tally(cells)
    assert set(told) == {7}
    # ALLOCATED 10, TAKEOVER 100, ALLOCATED_DONE 1,000, TAKEOVER_DONE 10,000, ADDED 10^5, COMPLETED 10^6, COLLISION 10^7
    assert (told[7]["allocated"], told[7]["aggregated"], told[7]["completed"]) == (11_110, 1_111_110, 1_011_000)
    assert (told[7]["collisions"], told[7]["stale_takeovers"], told[7]["bytes_in"]) == (10**7, 10_100, 4321)
    # Tofino's arrays are read whole, the others cell by cell.
    assert [cell.counter_entry.HasField("index") for cell in codec.counter_reads((0, 7))] == [False] * 3
    assert len(BMV2.counter_reads((0, 7))) == 2 * len(BMV2.counters)
    reset = [cell.counter_entry for cell in codec.counter_cells(7, reset=True)]
    assert len(reset) == len(cells) and all(cell.HasField("data") for cell in reset)


# -- ordinary traffic ------------------------------------------------------------------------------

MACS = st.dictionaries(st.integers(1, 6), st.integers(1, 4))
PORTS = st.frozensets(st.integers(1, 4), min_size=1)
FORWARDINGS = st.builds(Forwarding, MACS, PORTS)


@given(FORWARDINGS)
def test_entries_are_read_as_they_were_written(forwarding: Forwarding) -> None:
    for codec in (BMV2, TOFINO):
        for entry in plan(codec.forwarding_tables, forwarding, TUNING).values():
            assert codec.decode(codec.encode_entity(entry)) == entry


def apply(held: dict[Key, Entry], batch: object) -> None:
    for update in batch:  # type: ignore[attr-defined]
        if update.op is Op.DELETE:
            del held[update.entry.key]
            continue
        assert (update.entry.key in held) == (update.op is Op.MODIFY) or not update.entry.match
        held[update.entry.key] = update.entry


@given(FORWARDINGS, FORWARDINGS, st.booleans())
def test_the_group_is_there_whenever_something_floods(now: Forwarding, wanted: Forwarding, empty: bool) -> None:
    tables = BMV2.forwarding_tables
    held: dict[Key, Entry] = {(L2, ()): Entry(L2, (), (), action="discard")}
    if not empty:
        held = plan(tables, now, Tuning())
    goal = plan(tables, wanted, Tuning())
    for batch in diff(held, goal):
        apply(held, batch)
        floods = [entry for entry in held.values() if entry.action == "flood"]
        assert all((GROUP, entry.params) in held for entry in floods)
    assert held == goal
    assert diff(held, goal) == ()


def test_only_what_was_asked_for_is_managed() -> None:
    ports = Forwarding({}, frozenset({1}))
    assert managed(BMV2.forwarding_tables, None, Tuning()) == frozenset()
    assert managed(BMV2.forwarding_tables, ports, Tuning()) == {L2}
    assert managed(BMV2.forwarding_tables, None, TUNING) == {ECN, STALE}
    assert managed(TOFINO.forwarding_tables, None, TUNING) == {CONGESTION}
    assert managed(Codec(contract_path()).forwarding_tables, ports, TUNING) == frozenset()


def test_what_a_top_of_rack_switch_gets() -> None:
    entries = plan(BMV2.forwarding_tables, Forwarding({0xA: 3}, frozenset({3, 1})), TUNING)
    assert entries[L2, (0xA,)].params == (3,)
    assert entries[L2, (BROADCAST,)].params == entries[L2, ()].params == (FLOOD_GROUP,)
    assert entries[GROUP, (FLOOD_GROUP,)].params == (1, 1, 3, 1)
    assert entries[ECN, ()].params == (40,) and entries[STALE, ()].params == (250_000,)
    marked = plan(frozenset({CONGESTION}), None, TUNING)
    assert {entry.match[0] for entry in marked.values()} == set(range(1, 15))
    assert {entry.match[1] for entry in marked.values()} == {(40, (1 << 19) - 1)}


def test_reading_asks_for_defaults_where_there_are_any() -> None:
    asked = [entity.table_entry for entity in BMV2.forwarding_wildcards([L2, ECN]) if entity.HasField("table_entry")]
    assert [entry.is_default_action for entry in asked] == [True, False, True]
    assert not any(entity.HasField("packet_replication_engine_entry") for entity in BMV2.forwarding_wildcards([ECN]))


# -- room ------------------------------------------------------------------------------------------


def rows(table: str, job_id: int, count: int) -> list[Entry]:
    return [Entry(table, (job_id, number)) for number in range(count)]


@given(
    st.dictionaries(st.integers(1, 9), st.integers(1, 5)),
    st.integers(0, 12),
    st.frozensets(st.integers(1, 9)),
)
def test_jobs_that_have_a_place_keep_it(needs: dict[int, int], size: int, seated: frozenset[int]) -> None:
    plans = {job_id: rows("admission", job_id, count) for job_id, count in needs.items()}
    refused = without_room(plans, {"admission": size}, seated)
    kept = {job_id: count for job_id, count in needs.items() if job_id not in refused}
    if size == 0:
        assert not refused, "a table without a size is not limited"
        return
    assert sum(kept.values()) <= size
    for job_id, error in refused.items():
        assert error.reason == "SwitchFull"
        before = [other for other in kept if (other not in seated, other) < (job_id not in seated, job_id)]
        assert sum(needs[other] for other in before) + needs[job_id] > size


def test_sizes_come_from_the_p4info() -> None:
    assert set(BMV2.table_sizes) == set(FIELDS) - {HOST}
    assert BMV2.table_sizes["job"] == 255
    p4info = text_format.Parse(contract_path().read_text(), p4i.P4Info())
    assert isinstance(Codec(p4info).config(), p4r.ForwardingPipelineConfig)
