# SPDX-License-Identifier: Apache-2.0
"""The exception that the command line turns into a message instead of a traceback, and small file helpers."""

from __future__ import annotations

from pathlib import Path


class ClusterError(Exception):
    """Something the user can act on; the message says what to do."""


def write_if_changed(path: Path, text: str) -> None:
    """Writes a configuration file unless it already says that: kube-proxy ends when its file is touched."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def tail(path: Path, lines: int = 15) -> str:
    """The last `lines` lines of a log, or a note that there is none. Never raises."""
    try:
        with path.open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - 64 * 1024))
            text = log.read().decode(errors="replace")
    except OSError:
        return "(no log yet)"
    return "\n".join(text.splitlines()[-lines:]) or "(the log is empty)"
