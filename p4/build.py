# SPDX-License-Identifier: Apache-2.0
"""Compile the P4 programs with p4c, and write p4info, bmv2 JSON and the resource report.

``python p4/build.py [--tools DIR] [--require] TARGET...`` with targets ``bmv2``, ``tofino``, ``tofino2``; ``--check``
compares what is committed with the checksum of the sources, without any compiler. A target whose compiler is not
installed is left alone and named; with ``--require`` that is an error. ``--largest`` looks for the largest number of
aggregators that still fits, by compiling.

The report (``build/resources.json``) has for each Tofino: ``stages``, ``stages_of_chip``, ``aggregators`` (what the
program declares), ``values_per_pass``, ``sram_percent``, ``map_ram_percent``, ``tcam_percent``, ``phv_percent``,
``stateful_alus``, ``sources_sha256``, ``compiler`` and, once looked for, ``max_aggregators``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BUILD = HERE / "build"
REPORT = BUILD / "resources.json"
CHECKSUMS = BUILD / "checksums.json"
VALUES = 62


@dataclass(frozen=True)
class Chip:
    """A Tofino: name of p4c's target, architecture, stages."""

    target: str
    arch: str
    stages: int


CHIPS = {"tofino": Chip("tofino", "tna", 12), "tofino2": Chip("tofino2", "t2na", 20)}
SRAM_PER_STAGE = 80
"""RAM blocks of 128 x 1,024 bits."""
MAP_RAM_PER_STAGE = 48
TCAM_PER_STAGE = 24
BLOCK = 2048
"""Pairs in a RAM block: what `--largest` adds in one step."""
SOURCES = {"bmv2": "v1model", "tofino": "tna", "tofino2": "tna"}


def sources_of(target: str) -> list[Path]:
    """The files that a target is compiled from, in a stable order."""
    return sorted([*(HERE / "include").glob("*.p4"), *(HERE / SOURCES[target]).glob("*.p4")])


def checksum(target: str) -> str:
    """SHA-256 over names and contents of a target's sources."""
    digest = hashlib.sha256()
    for path in sources_of(target):
        digest.update(str(path.relative_to(HERE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def find(tools: str, *names: str) -> str | None:
    """Path of the first of these programs on PATH or below ``tools``."""
    for name in names:
        found = shutil.which(name)
        if found:
            return found
        if tools:
            for path in Path(tools).rglob(name):
                if path.is_file() and os.access(path, os.X_OK):
                    return str(path)
    return None


def run(command: list[str]) -> str:
    """Run a compiler; return what it printed. SystemExit with its output if it fails."""
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{output}\nexit code {done.returncode}")
    return output


def version_of(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    # The program's path, then "Version 1.2.5 (SHA: ...)"; the driver's name, then the number.
    words = (done.stdout + done.stderr).split()[1:]
    return " ".join([Path(compiler).name, *(word for word in words if word != "Version")])


def write_json(path: Path, change: dict[str, Any]) -> None:
    data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    data.update(change)
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def build_bmv2(tools: str) -> bool:
    compiler = find(tools, "p4c-bm2-ss")
    if compiler is None:
        return False
    run([
        compiler, "--arch", "v1model", "--std", "p4-16", "-o", "build/atp.bmv2.json",
        "--p4runtime-files", "build/atp.bmv2.p4info.txtpb", "v1model/atp.p4",
    ])  # fmt: skip
    program = BUILD / "atp.bmv2.json"
    program.write_text(
        json.dumps(without_positions(json.loads(program.read_text(encoding="utf-8"))), separators=(",", ":")) + "\n"
    )
    write_json(CHECKSUMS, {"bmv2": {"sources_sha256": checksum("bmv2"), "compiler": version_of(compiler)}})
    return True


def without_positions(node: Any) -> Any:
    """A bmv2 program without the places in the sources, which are half of it and bmv2 uses in messages only."""
    if isinstance(node, dict):
        return {k: without_positions(v) for k, v in node.items() if k not in ("source_info", "program")}
    return [without_positions(v) for v in node] if isinstance(node, list) else node


def build_tofino(tools: str, name: str) -> bool:
    chip = CHIPS[name]
    driver = find(tools, "p4c")
    if driver is None or find(tools, "p4c-barefoot") is None or find(tools, "bfas") is None:
        return False
    out = BUILD / name
    shutil.rmtree(out, ignore_errors=True)
    # -g makes the compiler write its reports. They name the place that it ran at, so they stay out of the repository.
    run(tofino_command(driver, chip, out, BUILD / f"atp.{name}.p4info.txtpb", "-g"))
    logs = next(out.rglob("resources.json")).parent
    figures = resources(
        chip,
        json.loads((logs / "resources.json").read_text(encoding="utf-8")),
        json.loads((logs / "phv.json").read_text(encoding="utf-8")),
    )
    # What the assembler got, for tests that run it (tests/p4/assembly.py); without the one line that differs each time.
    assembly = next(out.rglob("atp.bfa")).read_text(encoding="utf-8")
    assembly = re.sub(r"^  run_id: .*\n", "", assembly, flags=re.MULTILINE)
    (BUILD / f"atp.{name}.bfa.xz").write_bytes(lzma.compress(assembly.encode(), preset=9))
    sources = {"sources_sha256": checksum(name), "compiler": version_of(driver)}
    figures |= {"aggregators": aggregators_of(name), **sources}
    known = (json.loads(REPORT.read_text(encoding="utf-8")) if REPORT.exists() else {}).get(name, {})
    if "max_aggregators" in known and known["sources_sha256"] == figures["sources_sha256"]:
        figures["max_aggregators"] = known["max_aggregators"]
    write_json(REPORT, {name: figures})
    write_json(CHECKSUMS, {name: sources})
    return True


def tofino_command(driver: str, chip: Chip, out: Path, p4info: Path, *options: str) -> list[str]:
    """The driver runs compiler and assembler: only the assembler says that a program has more stages than the chip."""
    return [
        driver, "--target", chip.target, "--arch", chip.arch, "--std", "p4-16", "--auto-init-metadata", *options,
        "--p4runtime-force-std-externs", "--p4runtime-files", str(p4info), "-o", str(out), "tna/atp.p4",
    ]  # fmt: skip


def largest(tools: str, name: str) -> bool:
    """Add aggregators, a RAM block at a time, until the program does not fit; report the last number that did."""
    chip, driver = CHIPS[name], find(tools, "p4c")
    if driver is None or find(tools, "p4c-barefoot") is None or find(tools, "bfas") is None:
        return False
    most = aggregators_of(name)
    while most + BLOCK <= 1 << 16:
        tried = most + BLOCK
        with tempfile.TemporaryDirectory() as out:
            command = tofino_command(driver, chip, Path(out), Path(out) / "p4info.txtpb", f"-DATP_AGGREGATORS={tried}")
            done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
        reason = next((line for line in (done.stdout + done.stderr).splitlines() if "error: " in line), "")
        print(f"{name}: {tried} aggregators {'fit' if done.returncode == 0 else f'do not fit: {reason}'}")
        if done.returncode != 0:
            break
        most = tried
    report = json.loads(REPORT.read_text(encoding="utf-8"))
    write_json(REPORT, {name: report[name] | {"max_aggregators": most}})
    return True


def resources(chip: Chip, used: dict[str, Any], phv: dict[str, Any]) -> dict[str, Any]:
    """Figures from the compiler's ``resources.json`` and ``phv.json``.

    PHV is counted by containers, without the tagalong ones, which no stage sees.
    """
    stages = used["resources"]["mau"]["mau_stages"]
    busy = [stage["stage_number"] for stage in stages if stage["logical_tables"]["ids"]]

    def percent(what: str, blocks: str, per_stage: int) -> float:
        return round(100 * sum(len(stage[what][blocks]) for stage in stages) / (chip.stages * per_stage), 1)

    kinds = {kind: groups for kind, groups in used["resources"]["phv_containers"].items() if kind != "tagalong"}
    bits = sum(group["units"] * group["width"] for groups in kinds.values() for group in groups)
    occupied = sum(c["bit_width"] for c in phv["containers"] if c["container_type"] in kinds)
    return {
        "stages": max(busy) + 1,
        "stages_of_chip": chip.stages,
        "values_per_pass": VALUES,
        "sram_percent": percent("rams", "srams", SRAM_PER_STAGE),
        "map_ram_percent": percent("map_rams", "maprams", MAP_RAM_PER_STAGE),
        "tcam_percent": percent("tcams", "tcams", TCAM_PER_STAGE),
        "stateful_alus": sum(len(stage["meter_alus"]["meters"]) for stage in stages),
        "phv_percent": round(100 * occupied / bits, 1),
    }


def aggregators_of(name: str) -> int:
    """Number of aggregators that the Tofino program declares for a chip."""
    source = (HERE / "tna" / "atp.p4").read_text(encoding="utf-8")
    tofino2, tofino = re.findall(r"#define ATP_AGGREGATORS (\d+)", source)
    return int(tofino2 if name == "tofino2" else tofino)


def check() -> int:
    """Compare the checksums in ``build/`` with the sources; 1 if something is stale or missing."""
    built = json.loads(CHECKSUMS.read_text(encoding="utf-8")) if CHECKSUMS.exists() else {}
    report = json.loads(REPORT.read_text(encoding="utf-8")) if REPORT.exists() else {}
    places = [(name, built) for name in SOURCES] + [(name, report) for name in CHIPS]
    stale = sorted({name for name, place in places if place.get(name, {}).get("sources_sha256") != checksum(name)})
    for name in stale:
        print(f"p4/build is older than the sources of {name}: run make -C p4 {name} and commit build/", file=sys.stderr)
    return 1 if stale else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default="", help="directory below which p4c and bfas are, if not on PATH")
    parser.add_argument("--require", action="store_true", help="fail if a compiler is missing")
    parser.add_argument("--check", action="store_true", help="only compare checksums")
    parser.add_argument("--largest", action="store_true", help="how many aggregators fit (tofino, tofino2; minutes)")
    parser.add_argument("targets", nargs="*", help="bmv2, tofino, tofino2")
    arguments = parser.parse_args()
    if arguments.check:
        return check()
    unknown = set(arguments.targets) - set(SOURCES)
    if unknown or not arguments.targets:
        parser.error(f"targets are {', '.join(SOURCES)}")
    BUILD.mkdir(exist_ok=True)
    missing = []
    for name in arguments.targets:
        if arguments.largest:
            built = name != "bmv2" and largest(arguments.tools, name)
        else:
            built = build_bmv2(arguments.tools) if name == "bmv2" else build_tofino(arguments.tools, name)
        print(f"{name}: {'done' if built else 'compiler not installed, left alone'}")
        if not built:
            missing.append(name)
    return 1 if missing and arguments.require else 0


if __name__ == "__main__":
    sys.exit(main())
