# SPDX-License-Identifier: Apache-2.0
"""The operator writes the log lines that every part writes."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import logging
from atp_operator.logs import configure
configure("info", "json")
log = logging.getLogger("atp_operator.controller")
log.info("handled %d", 3, extra={"job": "team-a/digits"})
log.debug("not told")
logging.getLogger("aiohttp.access").info("not told either")
try:
    raise RuntimeError("leadership was lost")
except RuntimeError:
    log.exception("pass failed")
"""


def test_one_object_a_line_with_what_was_given_and_the_error() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == ""
    first, second = [json.loads(line) for line in done.stderr.splitlines()]
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "info",
        "logger": "atp_operator.controller",
        "message": "handled 3",
        "job": "team-a/digits",
    }
    assert second["level"] == "error" and "RuntimeError: leadership was lost" in second["error"]
