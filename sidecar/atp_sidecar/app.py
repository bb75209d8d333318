# SPDX-License-Identifier: Apache-2.0
"""`atp-sidecar run`: gate, unix socket and HTTP in one asyncio loop."""

import asyncio
import json
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from atp_sidecar import __version__
from atp_sidecar.assignment import Role
from atp_sidecar.clients import Clients
from atp_sidecar.gate import Gate
from atp_sidecar.http import HttpServer, Response
from atp_sidecar.logs import EventLog
from atp_sidecar.metrics import CONTENT_TYPE
from atp_sidecar.server import SHUTDOWN, SocketServer
from atp_sidecar.totals import JobTotals
from atp_sidecar.transport import native_factory


@dataclass(frozen=True)
class Settings:
    """What `run` is started with."""

    role: Role
    assignment: Path
    socket: Path
    metrics_port: int
    metrics_host: str = "0.0.0.0"
    pod_ip: str | None = None
    pod: str = ""


async def serve(
    settings: Settings,
    log: EventLog,
    stop: asyncio.Event | None = None,
    listener: socket.socket | None = None,
) -> None:
    """Runs the sidecar until it is told to stop.

    Args:
        settings: where everything is.
        log: where events go.
        stop: ends it when set; None: SIGTERM and SIGINT do.
        listener: serves HTTP; None: one on the settings' address and port is opened.

    Raises:
        OSError: the socket or the metrics port cannot be opened.
    """
    if stop is None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def on_stats(clients: Clients, session: int) -> None:
        server.answer(clients, session)

    factory = native_factory(settings.socket.parent)
    gate = Gate(settings.assignment, settings.role, settings.pod_ip, factory, log, on_stats)
    server = SocketServer(gate, JobTotals(settings.metrics_port), settings.socket, log)

    def readyz(_: str) -> Response:
        return Response(200, "ok\n") if gate.is_open else Response(503, f"gate closed: {gate.reason}\n")

    def status(peer: str) -> Response:
        if not gate.is_of_the_job(peer):
            return Response(403, "only this pod and the pods of its job are told\n")
        return Response(200, json.dumps(gate.status(), indent=2) + "\n", "application/json")

    http = HttpServer(
        {
            "/healthz": lambda _: Response(200, "ok\n"),
            "/readyz": readyz,
            "/metrics": lambda _: Response(200, gate.expose(), CONTENT_TYPE),
            "/status": status,
        },
        lambda path, error: log.error("http-route-failed", path=path, reason=repr(error)),
    )
    watcher: asyncio.Task[None] | None = None
    try:
        await server.start()
        port = await http.start(settings.metrics_host, settings.metrics_port, listener)
        log.info(
            "started",
            version=__version__,
            socket=str(settings.socket),
            assignment=str(settings.assignment),
            metricsPort=port,
        )
        watcher = asyncio.create_task(gate.run())
        stopper = asyncio.create_task(stop.wait())
        await asyncio.wait({watcher, stopper}, return_when=asyncio.FIRST_COMPLETED)
        stopper.cancel()
        if watcher.done():
            watcher.result()  # a fault of the gate: end loudly, the kubelet restarts the sidecar
        log.info("stopping")
    finally:
        if watcher is not None:
            watcher.cancel()
        gate.close("Shutdown", SHUTDOWN)
        await server.stop()
        await asyncio.to_thread(gate.join)
        await http.stop()
    log.info("stopped")
