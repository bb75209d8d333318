# SPDX-License-Identifier: Apache-2.0
"""What `atp-operator run` is made of: kopf, the controller, metrics and health, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket

import kopf
from kopf._core.engines import peering

from .controller import Controller
from .handlers import register
from .kube import Kube
from .metrics import Metrics, serve
from .settings import Settings


async def _webhooks_answer(settings: Settings) -> str:
    """Empty once the webhook server listens, as the API server needs it; kopf starts it after its first look around."""
    if not settings.webhook_tls_dir:
        return ""
    host = "127.0.0.1" if settings.webhook_address in ("0.0.0.0", "") else settings.webhook_address
    try:
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_connection(host, settings.webhook_port)
    except (OSError, TimeoutError) as error:
        return f"the webhook server at port {settings.webhook_port} does not listen yet: {error or 'no answer'}"
    with contextlib.suppress(OSError):
        writer.close()
        await writer.wait_closed()
    return ""


async def run(settings: Settings, listener: socket.socket) -> None:
    """Everything until SIGTERM or a part fails; metrics and health are served on `listener`."""
    kube = await Kube.connect()
    metrics = Metrics()
    controller = Controller(settings, kube, metrics)
    registry = kopf.OperatorRegistry()
    register(registry, settings, controller)
    server = await serve(metrics, listener, controller.problem, lambda: _webhooks_answer(settings))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    operator = asyncio.create_task(
        # The identity is given: kopf would ask for the user's name, which an arbitrary UID does not have.
        kopf.operator(
            registry=registry,
            clusterwide=True,
            standalone=True,
            stop_flag=stop,
            identity=peering.Identity(settings.identity),
        ),
        name="kopf",
    )
    await asyncio.sleep(0.1)  # kopf sets signal handlers of its own when it starts; these replace them
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    passes = asyncio.create_task(controller.run(), name="controller")
    waiter = asyncio.create_task(stop.wait(), name="stop")
    try:
        done, _ = await asyncio.wait({operator, passes, waiter}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {waiter}:
            task.result()
    finally:
        stop.set()
        passes.cancel()
        await asyncio.gather(passes, return_exceptions=True)
        try:
            await asyncio.wait_for(asyncio.gather(operator, return_exceptions=True), 10)
        except TimeoutError:
            operator.cancel()
        waiter.cancel()
        await server.cleanup()
        await kube.close()
