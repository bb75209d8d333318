# SPDX-License-Identifier: Apache-2.0
"""What the P4 programs share with everybody else. Called by ``generate.py``.

Header, values and constants of ``wire.toml`` are in ``p4/include/wire.p4``; events and counters of ``counters.toml`` in
``p4/include/events.p4``, ``p4/v1model/counters.p4``, ``p4/v1model/count.p4`` and ``p4/p4info.txtpb``.

The job ID and the sequence become one field, ``key``: a stateful ALU compares them as one 32-bit word.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import counters as contract
from wire_layout import NOTE as WIRE_NOTE
from wire_layout import Field

import docs

ROOT = Path(__file__).resolve().parent.parent
P4 = ROOT / "p4"
CONSTANTS = ("UDP_PORT", "HEADER_BYTES", "VALUES_BASE", "STALE_NS")
PAIR_PARTS = ("jobId", "sequence")


def wire(constants: dict[str, dict[str, Any]], fields: list[Field]) -> str:
    """Return the text of ``include/wire.p4``.

    Raises:
        ValueError: the first word is not job ID and sequence, or the number of values is odd.
    """
    values: int = constants["VALUES_BASE"]["value"]
    if tuple(f.name for f in fields[:2]) != PAIR_PARTS or sum(f.bits for f in fields[:2]) != 32:
        raise ValueError("the first word of the header must be jobId and sequence: the P4 program keeps it as one key")
    if values % 2:
        raise ValueError("VALUES_BASE must be even: a register holds a pair of values")
    out = [
        "/* SPDX-License-Identifier: Apache-2.0 */",
        f"/* {WIRE_NOTE} */",
        "#ifndef ATP_WIRE_P4",
        "#define ATP_WIRE_P4",
        "",
    ]
    out += [f"#define ATP_{name} {constants[name]['value']}" for name in CONSTANTS]
    out += [
        "#define ATP_VALUE_BYTES (4 * ATP_VALUES_BASE)",
        "",
        f"#define ATP_JOB_ID({'key'}) key[31:{fields[1].bits}]",
        "",
        "header atp_t {",
        "    bit<32> key; /* jobId (8), sequence (24) */",
    ]
    out += [f"    bit<{f.bits}> {f.snake};" for f in fields[2:]]
    out += ["}", "", "header values_t {"]
    out += [f"    bit<32> v{i};" for i in range(values)]
    out += ["}", "", "/* Apply X(instance, first, second) to each pair of values. */", "#define ATP_PAIRS(X) \\"]
    out += [f"    X(pair{i}, v{2 * i}, v{2 * i + 1}) \\" for i in range(values // 2)]
    out[-1] = out[-1].removesuffix(" \\")
    out += ["", "#endif", ""]
    return "\n".join(out)


COUNTER_ID = 0x12000001
COUNTERS_MARK, COUNTERS_END = "# counters: generated from proto/counters.toml\n", "# end of counters\n"


def events(counters: contract.Counters) -> str:
    """Return the text of ``include/events.p4``."""
    out = [
        "/* SPDX-License-Identifier: Apache-2.0 */",
        f"/* What the switch did: the event that is counted, and the reason of the header edits. {contract.NOTE} */",
        "#ifndef ATP_EVENTS_P4",
        "#define ATP_EVENTS_P4",
        "",
    ]
    out += [f"#define V_{event.name} {event.code} /* {event.doc} */" for event in counters.events]
    return "\n".join([*out, "", "#endif", ""])


def declarations(counters: contract.Counters) -> str:
    """Return the text of ``v1model/counters.p4``: an array by job ID each; ``bytes_out`` is in egress."""
    out = [
        "/* SPDX-License-Identifier: Apache-2.0 */",
        f"/* Counters by job ID, in the ingress control. {contract.NOTE} */",
    ]
    out += [
        f"    @id({identifier:#x}) counter(256, CounterType.{each.unit}) {each.name};"
        for identifier, each in _numbered(counters)
        if not each.software and each.name != "bytes_out"
    ]
    return "\n".join([*out, ""])


def count(counters: contract.Counters) -> str:
    """Return the text of ``v1model/count.p4``: which events each counter counts."""
    out = [
        "/* SPDX-License-Identifier: Apache-2.0 */",
        f"/* Which events each counter counts, in the ingress control's apply. {contract.NOTE} */",
    ]
    for each in counters.switch:
        if each.v1model:
            asked = " || ".join(f"meta.verdict == V_{event.name}" for event in each.v1model)
            out += [f"            if ({asked}) {{", f"                {each.name}.count(job_index);", "            }"]
    return "\n".join([*out, ""])


def p4info(text: str, counters: contract.Counters) -> str:
    """Return ``p4info.txtpb`` with its counters renewed.

    Raises:
        ValueError: the marks around them are missing.
    """
    out = []
    for identifier, each in _numbered(counters):
        out += [
            "counters {",
            "  preamble {",
            f"    id: {identifier}",
            f'    name: "AtpIngress.{each.name}"',
            f'    alias: "{each.name}"',
            f'    doc {{ brief: "{each.doc}" }}',
            "  }",
            f"  spec {{ unit: {each.unit.upper()} }}",
            "  size: 256",
            "}",
        ]
    return docs.between(text, COUNTERS_MARK, COUNTERS_END, "\n".join([*out, ""]))


def _numbered(counters: contract.Counters) -> list[tuple[int, contract.Switch]]:
    return [(COUNTER_ID + place, each) for place, each in enumerate(counters.switch)]


def targets(constants: dict[str, dict[str, Any]], fields: list[Field]) -> dict[Path, str]:
    """Map each generated file to its contents."""
    counters = contract.load()
    described = P4 / "p4info.txtpb"
    return {
        P4 / "include" / "wire.p4": wire(constants, fields),
        P4 / "include" / "events.p4": events(counters),
        P4 / "v1model" / "counters.p4": declarations(counters),
        P4 / "v1model" / "count.p4": count(counters),
        described: p4info(described.read_text(encoding="utf-8"), counters),
    }
