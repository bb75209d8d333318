# SPDX-License-Identifier: Apache-2.0
"""What is generated and committed under p4/ belongs to the sources, and says what the P4Runtime contract says."""

from __future__ import annotations

import importlib.util
import json
import lzma
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from finsy.proto import p4i
from google.protobuf import text_format

from atp_api.counters import SWITCH
from atp_switch_agent.codec import Codec
from atp_switch_agent.entries import ACTIONS, FIELDS, Entry

ROOT = Path(__file__).resolve().parents[2]
P4 = ROOT / "p4"
PUBLISHED = sorted((P4 / "build").glob("*.p4info.txtpb"))
SOFTWARE_ONLY = {each.name for each in SWITCH if each.software}
SOFTWARE_ONLY_TABLES = {"host"}
SOFTWARE_ONLY_ACTIONS = {"set_host"}


def load_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("atp_p4_build", P4 / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def read(path: Path) -> p4i.P4Info:
    return text_format.Parse(path.read_text(encoding="utf-8"), p4i.P4Info())


def test_each_target_is_published() -> None:
    assert [path.name.split(".")[1] for path in PUBLISHED] == ["bmv2", "tofino", "tofino2"]


def test_what_is_generated_is_what_the_contract_says() -> None:
    subprocess.run([sys.executable, str(ROOT / "proto" / "generate.py"), "--check"], check=True)


def test_nothing_committed_is_older_than_its_sources() -> None:
    subprocess.run([sys.executable, str(P4 / "build.py"), "--check"], check=True)


def test_a_changed_source_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = load_build()
    for name in ("CHECKSUMS", "REPORT"):
        monkeypatch.setattr(build, name, tmp_path / f"{name}.json")
    assert build.check() == 1, "nothing was built"
    build.write_json(build.CHECKSUMS, {name: {"sources_sha256": build.checksum(name)} for name in build.SOURCES})
    assert build.check() == 1, "no report"
    build.write_json(build.REPORT, {name: {"sources_sha256": build.checksum(name)} for name in build.CHIPS})
    assert build.check() == 0
    build.write_json(build.CHECKSUMS, {"bmv2": {"sources_sha256": build.checksum("tofino")}})
    assert build.check() == 1
    build.write_json(build.CHECKSUMS, {"bmv2": {"sources_sha256": build.checksum("bmv2")}})
    build.write_json(build.REPORT, {"tofino2": {"sources_sha256": build.checksum("bmv2")}})
    assert build.check() == 1


def test_nothing_committed_names_the_place_where_it_was_compiled() -> None:
    for path in (P4 / "build").glob("*.*"):
        data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        found = re.search(r"[\"' ]/\w+/[^\"' ]+", data.decode("utf-8"))
        assert found is None, f"{path.name}: {found[0]}"


def test_figures_come_from_the_compilers_reports() -> None:
    build = load_build()

    def stage(number: int, tables: int, srams: int, alus: int) -> dict[str, object]:
        return {
            "stage_number": number,
            "logical_tables": {"ids": list(range(tables))},
            "rams": {"srams": [{}] * srams},
            "map_rams": {"maprams": [{}] * (srams - srams % 2)},
            "tcams": {"tcams": [{}] * tables},
            "meter_alus": {"meters": [{}] * alus},
        }

    stages = [stage(0, 3, 48, 1), stage(1, 1, 48, 4), stage(2, 0, 0, 0)]
    sizes = {
        "normal": [{"units": 64, "width": 32}, {"units": 128, "width": 16}],
        "tagalong": [{"units": 32, "width": 32}],
    }
    used = {"resources": {"mau": {"mau_stages": stages}, "phv_containers": sizes}}
    containers = [{"bit_width": 32, "container_type": "normal"}] * 64 + [
        {"bit_width": 16, "container_type": "tagalong"}
    ]
    figures = build.resources(build.CHIPS["tofino"], used, {"containers": containers})
    assert figures == {
        "stages": 2,
        "stages_of_chip": 12,
        "values_per_pass": 62,
        "sram_percent": 10.0,
        "map_ram_percent": 16.7,
        "tcam_percent": 1.4,
        "stateful_alus": 5,
        "phv_percent": 50.0,
    }
    assert build.aggregators_of("tofino") >= 22_528
    assert build.aggregators_of("tofino2") >= 40_960


@pytest.mark.parametrize("path", [pytest.param(p, id=p.name) for p in PUBLISHED])
def test_published_objects_are_those_of_the_contract(path: Path) -> None:
    contract, ours = read(P4 / "p4info.txtpb"), read(path)
    tables = {t.preamble.alias: t for t in ours.tables}
    assert not SOFTWARE_ONLY_TABLES & set(tables), "published after all: correct the contract's notes"
    for wanted in contract.tables:
        if wanted.preamble.alias in SOFTWARE_ONLY_TABLES:
            continue
        got = tables[wanted.preamble.alias]
        assert got.preamble.id == wanted.preamble.id
        assert [(f.id, f.name, f.match_type) for f in got.match_fields] == [
            (f.id, f.name, f.match_type) for f in wanted.match_fields
        ]
    actions = {a.preamble.alias: a for a in ours.actions}
    for wanted_action in contract.actions:
        if wanted_action.preamble.alias not in {"NoAction", *SOFTWARE_ONLY_ACTIONS}:
            found = actions[wanted_action.preamble.alias]
            assert found.preamble.id == wanted_action.preamble.id
            assert [(p.id, p.name, p.bitwidth) for p in found.params] == [
                (p.id, p.name, p.bitwidth) for p in wanted_action.params
            ]
    if "tofino" in path.name:
        # Events instead of one counter for each name: docs/p4.md.
        sizes = {"events": 8192, "drops": 4096, "bytes_in": 256, "bytes_out": 256}
        assert {c.preamble.alias: c.size for c in ours.counters} == sizes
        return
    counters = {c.preamble.alias: c.preamble.id for c in ours.counters if c.preamble.alias != "drops"}
    wanted_counters = {c.preamble.alias: c.preamble.id for c in contract.counters}
    assert counters == {name: i for name, i in wanted_counters.items() if name not in SOFTWARE_ONLY}


@pytest.mark.parametrize("path", [pytest.param(p, id=p.name) for p in PUBLISHED])
def test_the_agent_writes_and_reads_every_table_of_the_target(path: Path) -> None:
    """Same names, other widths: a port has 9 bits here and 32 in the software switch."""
    codec = Codec(path)
    assert codec.name.startswith("atp 0.1.0 ")
    assert set(codec.table_sizes) == set(FIELDS) - SOFTWARE_ONLY_TABLES
    for table in codec.table_sizes:
        fields, (_, names) = FIELDS[table], ACTIONS[table]
        match = tuple((8, 15) if field == "aggregator_index" else 1 for field in fields)
        entry = Entry(table, match, tuple(range(1, 1 + len(names))))
        assert codec.decode(codec.encode_entity(entry)) == entry
    too_wide = Entry("ps_port", (1, 512), ())
    with pytest.raises(ValueError, match=r"512|ingress_port"):
        codec.encode_entity(too_wide)


def test_the_program_fits_both_chips() -> None:
    report = json.loads((P4 / "build" / "resources.json").read_text(encoding="utf-8"))
    for name, aggregators in (("tofino", 22_528), ("tofino2", 40_960)):
        figures = report[name]
        assert figures["stages"] <= figures["stages_of_chip"]
        assert figures["aggregators"] >= aggregators
        assert figures["max_aggregators"] >= figures["aggregators"]
        assert figures["values_per_pass"] == 62
        assert {"sram_percent", "stateful_alus", "phv_percent", "sources_sha256", "compiler"} <= set(figures)
