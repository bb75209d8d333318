# SPDX-License-Identifier: Apache-2.0
"""The one exception that the command line turns into a message instead of a traceback."""

from __future__ import annotations

from pathlib import Path


class ClusterError(Exception):
    """Something the user can act on; the message says what to do."""


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
