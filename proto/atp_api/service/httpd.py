# SPDX-License-Identifier: Apache-2.0
"""Health and Prometheus metrics over HTTP, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

Check = Callable[[], tuple[bool, str]]


class Pulse:
    """Beats in the event loop, so that a loop that hangs shows in /healthz, which another thread serves."""

    PERIOD_SECONDS = 1.0
    DEAD_SECONDS = 20.0

    def __init__(self) -> None:
        self._last = time.monotonic()

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            self._last = time.monotonic()
            await asyncio.sleep(self.PERIOD_SECONDS)

    def check(self) -> tuple[bool, str]:
        """Whether the loop has beaten lately."""
        age = time.monotonic() - self._last
        return age < self.DEAD_SECONDS, "alive" if age < self.DEAD_SECONDS else f"no pulse for {age:.0f} s"


class HealthServer:
    """GET /healthz, /readyz (200 or 503 with the reason) and /metrics. `port` is the port really bound."""

    def __init__(self, listen: tuple[str, int], registry: CollectorRegistry, alive: Check, ready: Check) -> None:
        checks = {"/healthz": alive, "/readyz": ready}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._reply(200, CONTENT_TYPE_LATEST, generate_latest(registry))
                elif self.path in checks:
                    good, reason = checks[self.path]()
                    self._reply(200 if good else 503, "text/plain; charset=utf-8", reason.encode() + b"\n")
                else:
                    self._reply(404, "text/plain; charset=utf-8", b"try /healthz, /readyz or /metrics\n")

            def _reply(self, status: int, content_type: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Probes come every few seconds; they are not worth a line."""

        self._server = ThreadingHTTPServer(listen, Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
