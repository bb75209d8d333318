# SPDX-License-Identifier: Apache-2.0
"""What belongs where in the C code: who may include whom, what the shipped library offers, under which licence."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from conformance.switches import BUILD, LIBRARY

SOFTSWITCH = BUILD.parent
PUBLIC = "include"
MAY_INCLUDE = {
    "include": {PUBLIC},
    "core": {PUBLIC, "core"},
    "bpf": {PUBLIC, "core", "bpf"},
    "src": {PUBLIC, "core", "src"},
    "src/kernel": {PUBLIC, "core", "src", "src/kernel", "bpf/shared.h"},
    "relay": {PUBLIC},
}
DATA_PATHS = {"native.h", "kernel.h"}
CONTROL_PLANE = ("switch", "jobs", "hosts", "groups", "queues", "aggregators", "tables")
GPL_COMPATIBLE = {
    "GPL",
    "GPL v2",
    "GPL and additional rights",
    "Dual BSD/GPL",
    "Dual MIT/GPL",
    "Dual MPL/GPL",
}
"""The kernel's list, include/linux/license.h."""


def included(path: Path) -> list[Path]:
    """The project's own headers that a file includes, from the folder of the C code."""
    found: list[Path] = []
    for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE):
        places = (path.parent / name, SOFTSWITCH / "include" / name, SOFTSWITCH / name)
        found.append(next(place for place in places if place.exists()).resolve().relative_to(SOFTSWITCH))
    return found


@pytest.mark.parametrize("folder", MAY_INCLUDE)
def test_includes_go_one_way(folder: str) -> None:
    files = sorted((SOFTSWITCH / folder).glob("*.[ch]"))
    assert files
    for path in files:
        for header in included(path):
            allowed = MAY_INCLUDE[folder]
            assert str(header.parent) in allowed or str(header) in allowed, f"{path.name} includes {header}"


def test_what_needs_no_bpf_includes_no_bpf() -> None:
    for path in (SOFTSWITCH / "src").glob("*.[ch]"):
        assert "<bpf/" not in path.read_text(), path.name


def test_the_control_plane_knows_no_data_path() -> None:
    for name in CONTROL_PLANE:
        assert not DATA_PATHS & {header.name for header in included(SOFTSWITCH / "src" / f"{name}.c")}, name


def test_the_native_data_path_knows_no_relay() -> None:
    for name in ("native.c", "native.h"):
        assert "atp_relay" not in (SOFTSWITCH / "src" / name).read_text(), name


def exported(library: Path) -> set[str]:
    listing = subprocess.run(["nm", "-D", "--defined-only", str(library)], check=True, capture_output=True, text=True)
    return {line.split()[-1] for line in listing.stdout.splitlines()}


def functions(header: str) -> set[str]:
    text = re.sub(r"/\*.*?\*/", "", (SOFTSWITCH / header).read_text(), flags=re.DOTALL)
    return set(re.findall(r"\b(atp_(?!emit_fn)\w+)\(", text))


def test_the_shipped_library_offers_its_interface_and_nothing_else() -> None:
    assert exported(BUILD / "libatp_switch.so") == functions("include/atp_control.h")


def test_the_library_for_tests_offers_theirs_too() -> None:
    assert exported(LIBRARY) == functions("include/atp_control.h") | functions("testing/atp_testing.h")


def test_the_licence_string_is_one_that_the_spdx_line_offers() -> None:
    source = (SOFTSWITCH / "bpf/atp_switch.bpf.c").read_text()
    spdx = re.search(r"SPDX-License-Identifier: (.*?) \*/", source)
    string = re.search(r'SEC\("license"\) = "(.*?)"', source)
    assert spdx and string
    assert string.group(1) in GPL_COMPATIBLE, "without it the kernel keeps GPL-only helpers from the programs"
    offered = {name.split("-")[0] for name in spdx.group(1).split(" OR ")}
    named = set(string.group(1).removeprefix("Dual ").split("/")) - {"GPL"}
    assert "GPL" in offered
    assert named <= offered, "the string names a licence that the file is not under"
