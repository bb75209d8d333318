# SPDX-License-Identifier: Apache-2.0
"""Random schedules hold every property, reach the rare rules, and are functions of their seeds."""

from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from atp_api.wire import FRAME_HEADER_BYTES, UDP_PORT, Header

Run = Callable[..., subprocess.CompletedProcess[str]]

SEEDS = "1000:1400"

# What the schedules must meet, or they prove little: counters of switches, end hosts and links.
REACHED = [
    "switch.collisions",
    "switch.duplicates",
    "switch.reemitted",
    "switch.stale_takeovers",
    "switch.resend_partials",
    "switch.resend_passed",
    "switch.released",
    "switch.ecn_marked",
    "switch.passed_raw_float",
    "switch.passed_transit",
    "switch.passed_unknown_job",
    "endpoint.raw_float_corrections",
    "endpoint.saturated",
    "endpoint.timeouts",
    "endpoint.fast_retransmits",
    "endpoint.reanswers",
    "endpoint.overlaps",
    "endpoint.notices",
    "endpoint.ops_failed",
    "link.lost",
    "link.duplicated",
    "link.late",
    "link.overflowed",
    "link.cut",
]


@pytest.fixture(scope="module")
def report(atp_sim: Run) -> dict[str, object]:
    done = atp_sim("fuzz", "--seeds", SEEDS, "--coverage", "--json")
    result: dict[str, object] = json.loads(done.stdout)
    result["exit"] = done.returncode
    return result


def test_every_property_holds(report: dict[str, object]) -> None:
    assert report["schedules"] == 400
    assert (report["violations"], report["stuck"], report["leaks"]) == (0, 0, 0), report["failures"]
    assert report["exit"] == 0
    assert isinstance(report["packets_per_second"], float) and report["packets_per_second"] > 0


def test_the_schedules_reach_the_rare_rules(report: dict[str, object]) -> None:
    coverage = report["coverage"]
    assert isinstance(coverage, dict)
    assert [name for name in REACHED if not coverage.get(name)] == []
    assert isinstance(report["restarts"], int) and report["restarts"] > 0


def test_wrong_values_are_noticed(atp_sim: Run) -> None:
    """The checks themselves: a value changed on the way must show as a wrong sum, with a command to replay."""
    done = atp_sim("fuzz", "--seeds", "0:10", "--damage", "0.01", "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 1
    assert result["violations"] > 0
    assert any(f["kind"] == "wrong sum" for f in result["failures"])
    assert result["failures"][0]["replay"].startswith("atp-sim replay ")


def test_a_seed_is_a_run(atp_sim: Run) -> None:
    first, second = (json.loads(atp_sim("fuzz", "--seeds", "7:17", "--coverage", "--json").stdout) for _ in range(2))
    assert first["coverage"] == second["coverage"]
    assert first["packets"] == second["packets"]
    other = json.loads(atp_sim("fuzz", "--seeds", "17:27", "--coverage", "--json").stdout)
    assert first["coverage"] != other["coverage"]


def test_replay_and_its_pcap_agree(atp_sim: Run, tmp_path: Path) -> None:
    file = tmp_path / "run.pcap"
    done = atp_sim("replay", "12", "--pcap", str(file))
    assert done.returncode == 0
    lines = [line for line in done.stdout.splitlines() if " job=" in line and " keeps " not in line]
    data = file.read_bytes()
    magic, major, minor, _, _, _, link_type = struct.unpack_from("<IHHiIII", data)
    assert (magic, major, minor, link_type) == (0xA1B23C4D, 2, 4, 1)
    at = 24
    for line in lines:
        _, _, length, original = struct.unpack_from("<IIII", data, at)
        assert length == original
        frame = data[at + 16 : at + 16 + length]
        at += 16 + length
        assert struct.unpack_from(">H", frame, 36) == (UDP_PORT,)
        assert int.from_bytes(frame[16:18], "big") == length - 14
        words = sum(struct.unpack(">10H", frame[14:34]))
        assert (words & 0xFFFF) + (words >> 16) == 0xFFFF, "checksum of the IP header"
        header = Header.unpack(frame[FRAME_HEADER_BYTES - 16 :])
        assert f" job={header.job_id} seq={header.sequence} b0={header.bitmap0:#x} b1={header.bitmap1:#x} " in line
    assert at == len(data) and lines


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fuzz"], "--seeds"),
        (["fuzz", "--seeds", "9:3"], "A < B"),
        (["scenario", "nothing"], "atp-sim list"),
        (["replay", "x"], "not a seed"),
        (["nonsense"], "not a command"),
        (["fuzz", "--seeds", "0:1", "--wat"], "--wat"),
    ],
)
def test_wrong_command_lines_say_what_to_do(atp_sim: Run, arguments: list[str], words: str) -> None:
    done = atp_sim(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
