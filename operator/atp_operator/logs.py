# SPDX-License-Identifier: Apache-2.0
"""The operator's logs: the format of all parts."""

from __future__ import annotations

import logging
import sys

from atp_api.service import log

_NOISY = ("aiohttp.access", "asyncio")


def configure(level: str, style: str) -> None:
    """Send all logs to standard error, as JSON (`style` json) or plain text."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        log.JsonFormatter() if style == "json" else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)
