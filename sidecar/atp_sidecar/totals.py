# SPDX-License-Identifier: Apache-2.0
"""Where the job's gradients were summed, as its parameter servers counted; a worker cannot see it."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

TIMEOUT_SECONDS = 1.0
FRESH_SECONDS = 0.1
# After a parameter server did not answer it is not asked again for so long: a question for metrics stays
# quick.
PENALTY_SECONDS = 5.0
_LIMIT_BYTES = 1 << 20
KEYS = ("aggregated_packets", "host_summed_packets")


async def fetch_status(address: str, port: int) -> dict[str, Any]:
    """The /status of another sidecar.

    Raises:
        OSError: it cannot be reached.
        ValueError: its answer is not that of a sidecar.
    """
    reader, writer = await asyncio.open_connection(address, port)
    try:
        writer.write(f"GET /status HTTP/1.0\r\nHost: {address}\r\n\r\n".encode())
        answer = await reader.read(_LIMIT_BYTES)
        while not reader.at_eof() and len(answer) < _LIMIT_BYTES:
            answer += await reader.read(_LIMIT_BYTES)
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise ValueError("it does not answer as a sidecar")
    status = json.loads(body)
    if not isinstance(status, dict):
        raise ValueError("its status is not an object")
    return status


class JobTotals:
    """Asks the parameter servers of a job, at most every 0.1 s.

    Args:
        port: of their HTTP servers.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._lock = asyncio.Lock()
        self._until = 0.0
        self._addresses: tuple[str, ...] = ()
        self._totals: dict[str, int | None] = dict.fromkeys(KEYS)

    async def get(self, addresses: Iterable[str]) -> dict[str, int | None]:
        """aggregated_packets and host_summed_packets of the job; None if a parameter server is silent."""
        wanted = tuple(addresses)
        loop = asyncio.get_running_loop()
        async with self._lock:
            if loop.time() >= self._until or wanted != self._addresses:
                self._addresses = wanted
                try:
                    async with asyncio.timeout(TIMEOUT_SECONDS):
                        answers = await asyncio.gather(*(fetch_status(each, self._port) for each in wanted))
                    metrics = [answer["metrics"] for answer in answers]
                    self._totals = {key: sum(int(each.get(key) or 0) for each in metrics) for key in KEYS}
                    self._until = loop.time() + FRESH_SECONDS
                except (OSError, TimeoutError, ValueError, KeyError, TypeError, AttributeError):
                    self._totals = dict.fromkeys(KEYS)
                    self._until = loop.time() + PENALTY_SECONDS
            return dict(self._totals)
