# SPDX-License-Identifier: Apache-2.0
"""Generate what crosses languages: wire constants and header layout (``wire.toml``), counters (``counters.toml``),
reasons (``reasons.toml``).

Usage: ``python proto/generate.py [--check]``. With ``--check`` nothing is written and the exit code is 1
when a generated file differs from what the source says.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import counters
import p4_sources
import reasons
from wire_layout import NOTE, Field, load

ROOT = Path(__file__).resolve().parent.parent


def python_module(constants: dict[str, dict[str, Any]], fields: list[Field]) -> str:
    out = ["# SPDX-License-Identifier: Apache-2.0", f'"""ATP wire constants and header layout. {NOTE}"""', ""]
    out += ["from __future__ import annotations", "", "from dataclasses import dataclass", ""]
    for name, entry in constants.items():
        out += [f"{name} = {entry['value']}", f'"""{entry["doc"]}"""']
    out += ["", "", "@dataclass(frozen=True)", "class Header:", '    """The 16-byte ATP header, host order."""', ""]
    for f in fields:
        out += [f"    {f.snake}: int = 0", f'    """{f.doc}"""']
    out += ["", "    def pack(self) -> bytes:", '        """Return the 16 header bytes, big endian."""']
    for w in range(4):
        parts = " | ".join(f"((self.{f.snake} & {f.mask:#x}) << {f.shift})" for f in fields if f.word == w)
        if len(parts) > 90:
            parts = parts.replace(" | ", "\n            | ")
            out.append(f"        word{w} = (\n            {parts}\n        )")
        else:
            out.append(f"        word{w} = {parts}")
    out += ['        return b"".join(w.to_bytes(4, "big") for w in (word0, word1, word2, word3))', ""]
    out += ["    @classmethod", "    def unpack(cls, data: bytes) -> Header:"]
    out += ['        """Read the first HEADER_BYTES bytes of ``data``.', "", "        Raises:"]
    out += ["            ValueError: ``data`` is shorter than the header.", '        """']
    out += ["        if len(data) < HEADER_BYTES:"]
    out += ['            raise ValueError(f"{len(data)} bytes are too few for an ATP header of {HEADER_BYTES}")']
    out += ['        words = [int.from_bytes(data[4 * i : 4 * i + 4], "big") for i in range(4)]', "        return cls("]
    out += [f"            {f.snake}=(words[{f.word}] >> {f.shift}) & {f.mask:#x}," for f in fields]
    out += ["        )", ""]
    return "\n".join(out)


def c_header(constants: dict[str, dict[str, Any]], fields: list[Field]) -> str:
    out = [
        "/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */",
        f"/* ATP wire constants and header layout. {NOTE} */",
    ]
    out += ["#ifndef ATP_WIRE_H", "#define ATP_WIRE_H", ""]
    masks = {f"{f.snake.upper()}_MASK" for f in fields}
    for name, entry in constants.items():
        if name not in masks:  # the field's own mask says the same
            out += [f"/* {entry['doc']} */", f"#define ATP_{name} {entry['value']}u"]
    out += [
        "",
        "/*",
        " * The header is read as four big-endian 32-bit words already converted to host order.",
        " * ATP_<FIELD>_WORD is the word, _SHIFT and _MASK the place within it.",
        " */",
    ]
    for f in fields:
        n = f.snake.upper()
        out += [
            f"/* {f.doc} */",
            f"#define ATP_{n}_WORD {f.word}",
            f"#define ATP_{n}_SHIFT {f.shift}",
            f"#define ATP_{n}_MASK {f.mask:#x}u",
        ]
    out += ["", "#endif", ""]
    return "\n".join(out)


def rust_module(constants: dict[str, dict[str, Any]], fields: list[Field]) -> str:
    out = [
        "// SPDX-License-Identifier: Apache-2.0",
        f"//! ATP wire constants and header layout. {NOTE}",
        "#![allow(clippy::identity_op, clippy::cast_possible_truncation, clippy::unreadable_literal, unused_parens)]",
        "#![cfg_attr(rustfmt, rustfmt_skip)]",
        "",
    ]
    for name, entry in constants.items():
        kind = (
            "usize" if name.endswith("BYTES") or name.startswith("VALUES") else "u64" if name == "STALE_NS" else "u32"
        )
        out += [f"/// {entry['doc']}", f"pub const {name}: {kind} = {entry['value']};"]
    out += [
        "",
        "/// The 16-byte ATP header, host order.",
        "#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]",
        "pub struct Header {",
    ]
    for f in fields:
        kind = "bool" if f.bits == 1 else "u8" if f.bits <= 8 else "u16" if f.bits <= 16 else "u32"
        out += [f"    /// {f.doc}", f"    pub {f.snake}: {kind},"]
    out += [
        "}",
        "",
        "impl Header {",
        "    /// The 16 header bytes, big endian.",
        "    #[must_use]",
        "    pub fn pack(&self) -> [u8; HEADER_BYTES] {",
        "        let mut bytes = [0u8; HEADER_BYTES];",
    ]
    for w in range(4):
        parts = [f"((u32::from(self.{f.snake}) & {f.mask:#x}) << {f.shift})" for f in fields if f.word == w]
        out += [
            f"        let word: u32 = {' | '.join(parts)};",
            f"        bytes[{4 * w}..{4 * w + 4}].copy_from_slice(&word.to_be_bytes());",
        ]
    out += [
        "        bytes",
        "    }",
        "",
        "    /// Read the header from the front of `data`; `None` when `data` is shorter than it.",
        "    #[must_use]",
        "    pub fn unpack(data: &[u8]) -> Option<Self> {",
        "        let word = |i: usize| -> Option<u32> {",
        "            Some(u32::from_be_bytes(data.get(4 * i..4 * i + 4)?.try_into().ok()?))",
        "        };",
        "        let words = [word(0)?, word(1)?, word(2)?, word(3)?];",
        "        Some(Self {",
    ]
    for f in fields:
        get = f"(words[{f.word}] >> {f.shift}) & {f.mask:#x}"
        if f.bits == 1:
            out.append(f"            {f.snake}: {get} != 0,")
        elif f.bits <= 16:
            kind = "u8" if f.bits <= 8 else "u16"
            out.append(f"            {f.snake}: ({get}) as {kind},")
        else:
            out.append(f"            {f.snake}: {get},")
    out += ["        })", "    }", "}", ""]
    return "\n".join(out)


def targets() -> dict[Path, str]:
    """Map each generated file to its contents."""
    constants, fields = load()
    return {
        ROOT / "proto/atp_api/wire.py": python_module(constants, fields),
        ROOT / "softswitch/include/atp_wire.h": c_header(constants, fields),
        ROOT / "native/atp-proto/src/wire.rs": rust_module(constants, fields),
        **counters.targets(),
        **p4_sources.targets(constants, fields),
        **reasons.targets(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say what is stale")
    check: bool = parser.parse_args().check
    stale = 0
    for path, text in targets().items():
        if path.exists() and path.read_text() == text:
            continue
        stale += 1
        if check:
            print(f"{path.relative_to(ROOT)} is stale: run python proto/generate.py", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
