# SPDX-License-Identifier: Apache-2.0
"""The operator's logs: the format of all parts, without what kopf hangs on its records."""

from __future__ import annotations

import copy
import logging
import sys

from atp_api.service import log

# kopf gives its records its whole settings, a flag for its event poster, and a reference to the object at hand.
_KOPF = ("settings", "k8s_skip", "k8s_ref")
_NOISY = ("kopf.objects", "aiohttp.access", "asyncio")


class JsonFormatter(log.JsonFormatter):
    """One JSON object a line, as every part writes it; `object` is what a record of kopf is about."""

    def format(self, record: logging.LogRecord) -> str:
        reference = getattr(record, "k8s_ref", None)
        if any(hasattr(record, name) for name in _KOPF):
            record = copy.copy(record)  # other handlers of kopf read these
            for name in _KOPF:
                vars(record).pop(name, None)
        if isinstance(reference, dict):
            parts = (reference.get(key) for key in ("kind", "namespace", "name"))
            record.object = "/".join(str(part) for part in parts if part)
        return super().format(record)


def no_refusals(record: logging.LogRecord) -> bool:
    """False for what kopf logs, as an error, of each object that is refused: its user is told, and can do it often."""
    return record.exc_info is not None or " failed permanently: " not in record.getMessage()


def configure(level: str, style: str) -> None:
    """Send all logs to standard error, as JSON (`style` json) or plain text."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter() if style == "json" else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("kopf.objects").addFilter(no_refusals)
