# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server for probes and metrics: GET and HEAD, one request a connection."""

import asyncio
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs

_READ_SECONDS = 5.0
_WAIT_SECONDS_MAX = 60.0
_LOOK_SECONDS = 0.05
_STOP_SECONDS = 0.5
_MAX_HEAD_BYTES = 16 * 1024
_REASONS = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
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

    `?wait=SECONDS` (at most 60) holds back a 503 for so long, and answers as soon as there is something else to say: a
    probe that asks so sees a state that only takes its time as slow, not as failed.

    Args:
        routes: path to a function that makes the response for a peer's address.
        on_error: called with the path and the exception of a route that failed.
    """

    def __init__(
        self, routes: Mapping[str, Callable[[str], Response]], on_error: Callable[[str, Exception], None]
    ) -> None:
        self._routes = routes
        self._on_error = on_error
        self._server: asyncio.Server | None = None
        self._stopping = False
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int, listener: socket.socket | None = None) -> int:
        """Listens, or serves a socket that does already; returns the port (useful if `port` is 0).

        Raises:
            OSError: the address is taken or not this machine's.
        """
        if listener is not None:
            self._server = await asyncio.start_server(self._serve, sock=listener, limit=_MAX_HEAD_BYTES)
        else:
            self._server = await asyncio.start_server(self._serve, host, port, limit=_MAX_HEAD_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stops listening; who waits for an answer gets the one there is."""
        self._stopping = True
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None
        if self._connections:
            await asyncio.wait(self._connections, timeout=_STOP_SECONDS)

    async def _answer(self, head: bytes, peer: str) -> tuple[Response, bool]:
        parts = head.split(b"\r\n", 1)[0].split(b" ")
        if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
            return Response(400, "not an HTTP/1 request\n"), False
        method, (target, _, query) = parts[0], parts[1].decode("latin-1").partition("?")
        if method not in (b"GET", b"HEAD"):
            return Response(405, "only GET and HEAD\n"), False
        route = self._routes.get(target)
        if route is None:
            return Response(404, "there are " + " ".join(sorted(self._routes)) + "\n"), method == b"HEAD"
        try:
            wait = float(parse_qs(query).get("wait", ["0"])[-1])
        except ValueError:
            return Response(400, "wait is a number of seconds\n"), method == b"HEAD"
        end = asyncio.get_running_loop().time() + min(wait, _WAIT_SECONDS_MAX)
        try:
            while (response := route(peer)).status == 503 and not self._stopping:
                left = end - asyncio.get_running_loop().time()
                if not left > 0:  # also for what is not a number
                    break
                await asyncio.sleep(min(_LOOK_SECONDS, left))
            return response, method == b"HEAD"
        except Exception as error:  # a broken route must answer, or the probe only sees a closed connection
            self._on_error(target, error)
            return Response(500, f"{error}\n"), method == b"HEAD"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        try:
            async with asyncio.timeout(_READ_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            name = writer.get_extra_info("peername")
            response, head_only = await self._answer(head, str(name[0]) if name else "")
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
