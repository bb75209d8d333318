# SPDX-License-Identifier: Apache-2.0
"""What `atp-operator run` is made of: the controller, webhooks, metrics and health, in one event loop."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys

from aiohttp import web

from .controller import Controller
from .kube import Kube
from .metrics import Metrics, serve
from .settings import Settings
from .sizes import JSON_DEPTH
from .webhook import Webhooks


async def run(settings: Settings, listener: socket.socket) -> None:
    """Everything until SIGTERM or a part fails; metrics and health are served on `listener`."""
    # As deep as the API server lets anybody nest: what it sends can be read.
    sys.setrecursionlimit(JSON_DEPTH + 2000)
    kube = await Kube.connect()
    metrics = Metrics()
    controller = Controller(settings, kube, metrics)
    webhooks: web.AppRunner | None = None

    async def ready() -> str:
        if settings.webhook_tls_dir and webhooks is None:
            return f"the webhook server at port {settings.webhook_port} does not listen yet"
        return ""

    server = await serve(metrics, listener, controller.problem, ready)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if settings.webhook_tls_dir:
        webhooks = await Webhooks(settings, kube).serve()
    passes = asyncio.create_task(controller.run(), name="controller")
    waiter = asyncio.create_task(stop.wait(), name="stop")
    try:
        done, _ = await asyncio.wait({passes, waiter}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {waiter}:
            task.result()
    finally:
        passes.cancel()
        await asyncio.gather(passes, return_exceptions=True)
        waiter.cancel()
        if webhooks is not None:
            await webhooks.cleanup()
        await server.cleanup()
        await kube.close()
