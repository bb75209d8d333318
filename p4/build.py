# SPDX-License-Identifier: Apache-2.0
"""Compile the P4 programs with p4c, and write p4info, bmv2 JSON and the resource report.

``python p4/build.py [--tools DIR] [--require] TARGET...`` with targets ``bmv2``, ``tofino``, ``tofino2``; ``--check``
compares what is committed with the checksum of the sources, without any compiler. A target whose compiler is not
installed is left alone and named; with ``--require`` that is an error.

The report (``build/resources.json``) has for each Tofino: ``stages``, ``aggregators``, ``values_per_pass``,
``sram_percent``, ``stateful_alus``, ``phv_percent``, ``sources_sha256`` and ``compiler``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
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
PHV_BITS = 4096
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
    # The program's path, then "Version 1.2.5 (SHA: ...)".
    return f"{Path(compiler).name} " + " ".join((done.stdout + done.stderr).partition("ersion")[2].split())


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
    # The driver runs compiler and assembler: only the assembler says that a program has more stages than the chip.
    run([
        driver, "--target", chip.target, "--arch", chip.arch, "--std", "p4-16", "-g", "--auto-init-metadata",
        "-o", str(out), "--p4runtime-files", str(BUILD / f"atp.{name}.p4info.txtpb"), "tna/atp.p4",
    ])  # fmt: skip
    logs = next(out.rglob("resources.json")).parent
    figures = resources(
        chip,
        json.loads((logs / "resources.json").read_text(encoding="utf-8")),
        json.loads((logs / "metrics.json").read_text(encoding="utf-8")),
    )
    figures |= {"aggregators": aggregators_of(name), "sources_sha256": checksum(name), "compiler": version_of(driver)}
    write_json(REPORT, {name: figures})
    write_json(CHECKSUMS, {name: {"sources_sha256": checksum(name), "compiler": version_of(driver)}})
    return True


def resources(chip: Chip, used: dict[str, Any], metrics: dict[str, Any]) -> dict[str, Any]:
    """Figures from the compiler's ``resources.json`` and ``metrics.json``."""
    stages = used["resources"]["mau"]["mau_stages"]
    busy = [stage["stage_number"] for stage in stages if stage["logical_tables"]["ids"]]
    srams = sum(len(stage["rams"]["srams"]) for stage in stages)
    phv = sum(kind["bit_width"] * kind["containers_occupied"] for kind in metrics["phv"]["normal"])
    return {
        "stages": max(busy) + 1,
        "stages_of_chip": chip.stages,
        "values_per_pass": VALUES,
        "sram_percent": round(100 * srams / (chip.stages * SRAM_PER_STAGE), 1),
        "stateful_alus": sum(len(stage["meter_alus"]["meters"]) for stage in stages),
        "phv_percent": round(100 * phv / PHV_BITS, 1),
    }


def aggregators_of(name: str) -> int:
    """Number of aggregators that the Tofino program declares for a chip."""
    source = (HERE / "tna" / "atp.p4").read_text(encoding="utf-8")
    tofino2, tofino = re.findall(r"#define ATP_AGGREGATORS (\d+)", source)
    return int(tofino2 if name == "tofino2" else tofino)


def check() -> int:
    """Compare the checksums in ``build/`` with the sources; 1 if something is stale."""
    built = json.loads(CHECKSUMS.read_text(encoding="utf-8")) if CHECKSUMS.exists() else {}
    stale = [name for name in built if built[name]["sources_sha256"] != checksum(name)]
    for name in stale:
        print(f"p4/build is older than the sources of {name}: run make -C p4 {name} and commit build/", file=sys.stderr)
    missing = [name for name in SOURCES if name not in built]
    if missing:
        print(f"p4/build has nothing for {', '.join(missing)} yet: make -C p4 where p4c is installed")
    return 1 if stale else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default="", help="directory below which p4c and bfas are, if not on PATH")
    parser.add_argument("--require", action="store_true", help="fail if a compiler is missing")
    parser.add_argument("--check", action="store_true", help="only compare checksums")
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
        built = build_bmv2(arguments.tools) if name == "bmv2" else build_tofino(arguments.tools, name)
        print(f"{name}: {'compiled' if built else 'compiler not installed, left alone'}")
        if not built:
            missing.append(name)
    return 1 if missing and arguments.require else 0


if __name__ == "__main__":
    sys.exit(main())
