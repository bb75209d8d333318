# SPDX-License-Identifier: Apache-2.0
"""What a switch answered to a conformance vector, as text that people can read and tests can compare.

A recording is one YAML file for each vector, ``recorded/<switch>/<file of the vector>/<name>.yaml``; its README says
what is in it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from conformance.switches import ROOT, Packet

RECORDED = Path(__file__).parent / "recorded"
PROGRAM = ROOT / "p4" / "build" / "atp.bmv2.json"
CHECKSUMS = ROOT / "p4" / "build" / "checksums.json"
SHORT = {
    "job": "job_id",
    "seq": "sequence",
    "b0": "bitmap0",
    "b1": "bitmap1",
    "n0": "fan_in_degree0",
    "n1": "fan_in_degree1",
    "edge": "edge_switch_identifier",
    "resend": "resend",
    "collision": "collision",
    "ecn": "ecn",
    "ack": "is_ack",
    "raw": "raw_float",
    "index": "aggregator_index",
}
HEAD = """\
# SPDX-License-Identifier: Apache-2.0
# What bmv2 answered to a conformance vector. Written by `make -C p4 record`; do not edit.
"""
Counters = Mapping[int, Mapping[str, int]]


def describe(packet: Packet, place: str) -> dict[str, Any]:
    """A packet in the words of the vectors: fields that are 0 are left out, values without the zeros at their end."""
    said: dict[str, Any] = {place: packet.port}
    if packet.raw is not None:
        return {**said, "payload": packet.raw.hex()}
    said |= {short: int(getattr(packet.header, name)) for short, name in SHORT.items()}
    said |= {"ce": int(packet.ce)}
    values = list(packet.values)
    if len(values) > 1 and len(set(values)) == 1 and values[0] != 0:
        said["fill"] = values[0]
    else:
        while values and values[-1] == 0:
            values.pop()
        said["values"] = values
    return {key: value for key, value in said.items() if value not in (0, [])}


class Recording:
    """A switch whose answers are kept; everything else is the switch's own."""

    def __init__(self, switch: Any) -> None:
        self.switch = switch
        self.exchanges: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.switch, name)

    def send(self, packet: Packet, dst: str, expected: int) -> list[Packet]:
        answers: list[Packet] = self.switch.send(packet, dst, expected)
        self.exchanges.append({"in": describe(packet, "port"), "out": [describe(answer, "to") for answer in answers]})
        return answers

    def end_of_step(self, counters: Any) -> None:
        """Close a step with the counters after it."""
        self.steps.append({"packets": self.exchanges, "counters": counters})
        self.exchanges = []


def without_bytes(counters: Counters) -> dict[int, dict[str, int]]:
    """Counters of packets that are not 0: bytes are those of frames, which a switch without Ethernet does not know."""
    found = {
        job: {name: c[name] for name in sorted(c) if c[name] and not name.startswith("bytes")}
        for job, c in sorted(counters.items())
    }
    return {job: c for job, c in found.items() if c}


def of_every_job(read: Callable[[int], Mapping[str, int]]) -> dict[int, dict[str, int]]:
    """Counters of all 256 job IDs."""
    return without_bytes({job: read(job) for job in range(256)})


def path_of(switch: str, name: str) -> Path:
    """Where the recording of a vector is: ``level0: a resend passes`` -> level0/a-resend-passes.yaml."""
    file, _, vector = name.partition(": ")
    return RECORDED / switch / file / (re.sub(r"[^a-z0-9]+", "-", vector.lower()).strip("-") + ".yaml")


def program_checksum() -> str:
    return hashlib.sha256(PROGRAM.read_bytes()).hexdigest()


def origin(version: str) -> dict[str, str]:
    """What answered: version of bmv2, the compiled program, and the sources it was compiled from."""
    sources: str = json.loads(CHECKSUMS.read_text(encoding="utf-8"))["bmv2"]["sources_sha256"]
    return {"switch": version, "program_sha256": program_checksum(), "sources_sha256": sources}


def write(path: Path, name: str, version: str, steps: Iterable[Mapping[str, Any]]) -> None:
    document = {"vector": name, **origin(version), "steps": list(steps)}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(document, sort_keys=False, width=150, default_flow_style=None)
    path.write_text(HEAD + text, encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return document
