# SPDX-License-Identifier: Apache-2.0
"""The Wireshark dissector has the header's layout, which only proto/wire.toml defines."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LUA = ROOT / "native" / "atp-sim" / "wireshark" / "atp.lua"


def test_layout_is_that_of_the_wire_file() -> None:
    wire = tomllib.loads((ROOT / "proto" / "wire.toml").read_text())
    want = []
    at = 0
    for field in wire["field"]:
        word, shift = at // 32, 32 - at % 32 - field["bits"]
        want.append((field["name"], 4 * word, ((1 << field["bits"]) - 1) << shift))
        at += field["bits"]
    text = LUA.read_text()
    rows = re.findall(r'\{"(\w+)", (\d+), (0x[0-9a-f]+), base', text)
    assert [(name, int(byte), int(mask, 16)) for name, byte, mask in rows] == want
    assert f"local UDP_PORT = {wire['constants']['UDP_PORT']['value']}\n" in text
    assert f"local HEADER_BYTES = {wire['constants']['HEADER_BYTES']['value']}\n" in text


@pytest.mark.skipif(shutil.which("tshark") is None, reason="tshark is not installed (Debian package tshark)")
def test_tshark_reads_a_trace(atp_sim: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    file = tmp_path / "run.pcap"
    trace = atp_sim("replay", "12", "--pcap", str(file)).stdout
    lines = [line for line in trace.splitlines() if " job=" in line and " keeps " not in line]
    names = ["atp_aggregation.jobId", "atp_aggregation.sequence", "atp_aggregation.aggregatorIndex", "_ws.col.Info"]
    fields = ["-T", "fields", *(word for name in names for word in ("-e", name))]
    command = ["tshark", "-X", f"lua_script:{LUA}", "-r", str(file), *fields]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    rows = [row.split("\t") for row in done.stdout.splitlines()]
    assert len(rows) == len(lines)
    for (job, sequence, index, info), line in zip(rows, lines, strict=True):
        assert f" job={job} seq={sequence} " in line and f" index={index}" in line
        assert info.split(",")[0] and f"job {job}, sequence {sequence}," in info
