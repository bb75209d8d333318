# SPDX-License-Identifier: Apache-2.0
"""What `atp-operator run` is made of: kopf, the controller, metrics and health, in one event loop."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from typing import Any

import kopf

from .controller import Controller
from .handlers import register
from .kube import Kube
from .metrics import Metrics, serve
from .settings import Settings
from .sizes import JSON_DEPTH
from .webhook import WebhookServer

STOP_SECONDS = 10.0
"""So long may kopf take to end, before it is cancelled."""


async def run(settings: Settings, listener: socket.socket) -> None:
    """Everything until SIGTERM or a part fails; metrics and health are served on `listener`."""
    # As deep as the API server lets anybody nest: what it sends can be read.
    sys.setrecursionlimit(JSON_DEPTH + 2000)
    kube = await Kube.connect()
    metrics = Metrics()
    controller = Controller(settings, kube, metrics)
    webhooks = WebhookServer(settings, kube) if settings.webhook_tls_dir else None
    if webhooks is not None:
        webhooks.bind()

    async def ready() -> str:
        if webhooks is not None and not webhooks.listening:
            return f"the webhook server at port {settings.webhook_port} does not listen yet"
        return ""

    server = await serve(metrics, listener, controller.problem, ready)
    registry = kopf.OperatorRegistry()
    register(registry, settings, kube, controller, webhooks)
    stop, idle = asyncio.Event(), asyncio.Event()
    # kopf cancels what it finds when it ends, but for these.
    ours = asyncio.all_tasks()
    # It is given: kopf would ask for the user's name, which an arbitrary UID does not have. Its type is not public.
    identity: Any = settings.identity
    parts = await kopf.spawn_tasks(
        registry=registry,
        clusterwide=True,
        standalone=True,
        stop_flag=idle,
        identity=identity,
    )
    loop = asyncio.get_running_loop()
    # In the place of kopf's: first the passes end, and the lease is given back.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    passes = asyncio.create_task(controller.run(), name="controller")
    waiter = asyncio.create_task(stop.wait(), name="stop")
    ours |= {passes, waiter}
    operator = asyncio.create_task(kopf.run_tasks(parts, ignored=ours), name="kopf")
    try:
        done, _ = await asyncio.wait({operator, passes, waiter}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {waiter}:
            task.result()
    finally:
        passes.cancel()
        waiter.cancel()
        await asyncio.gather(passes, waiter, return_exceptions=True)
        await server.cleanup()
        idle.set()
        await asyncio.wait({operator}, timeout=STOP_SECONDS)
        operator.cancel()
        await asyncio.gather(operator, return_exceptions=True)
        await kube.close()
