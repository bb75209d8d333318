# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server for probes and metrics: GET and HEAD, one request a connection."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_READ_SECONDS = 5.0
_MAX_HEAD_BYTES = 16 * 1024
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


@dataclass(frozen=True)
class Response:
    """What a route answers."""

    status: int
    body: str
    content_type: str = "text/plain; charset=utf-8"


class HttpServer:
    """Serves routes on all addresses.

    Args:
        routes: path to a function that makes the response.
        on_error: called with the path and the exception of a route that failed.
    """

    def __init__(
        self, routes: Mapping[str, Callable[[], Response]], on_error: Callable[[str, Exception], None]
    ) -> None:
        self._routes = routes
        self._on_error = on_error
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port (useful if `port` is 0).

        Raises:
            OSError: the address is taken or not this machine's.
        """
        self._server = await asyncio.start_server(self._serve, host, port, limit=_MAX_HEAD_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stops listening."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None

    def _answer(self, head: bytes) -> tuple[Response, bool]:
        parts = head.split(b"\r\n", 1)[0].split(b" ")
        if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
            return Response(400, "not an HTTP/1 request\n"), False
        method, target = parts[0], parts[1].split(b"?", 1)[0].decode("latin-1")
        if method not in (b"GET", b"HEAD"):
            return Response(405, "only GET and HEAD\n"), False
        route = self._routes.get(target)
        if route is None:
            return Response(404, "there are " + " ".join(sorted(self._routes)) + "\n"), method == b"HEAD"
        try:
            return route(), method == b"HEAD"
        except Exception as error:  # a broken route must answer, or the probe only sees a closed connection
            self._on_error(target, error)
            return Response(500, f"{error}\n"), method == b"HEAD"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_READ_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            response, head_only = self._answer(head)
            body = response.body.encode()
            writer.write(
                f"HTTP/1.1 {response.status} {_REASONS[response.status]}\r\n"
                f"Content-Type: {response.content_type}\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
            )
            if not head_only:
                writer.write(body)
            async with asyncio.timeout(_READ_SECONDS):
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()
