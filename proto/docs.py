# SPDX-License-Identifier: Apache-2.0
"""Generated sections of files that are written by hand, between two comments. Called by the generators of tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def between(text: str, begin: str, end: str, section: str) -> str:
    """The text with what stands between two lines renewed.

    Raises:
        ValueError: one of the lines is missing.
    """
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"there is no section between {begin.strip()} and {end.strip()}")
    return f"{before}{begin}{section}{end}{after}"


def renewed(name: str, sections: Mapping[str, str], source: str) -> dict[Path, str]:
    """A file of docs/ with these sections renewed, by path.

    Raises:
        ValueError: a section is missing.
    """
    path = DOCS / name
    text = path.read_text(encoding="utf-8")
    for section, table in sections.items():
        begin, end = f"<!-- {section}: generated from proto/{source} -->\n", f"<!-- end of {section} -->\n"
        text = between(text, begin, end, f"\n{table}\n\n")
    return {path: text}
