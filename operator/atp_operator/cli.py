# SPDX-License-Identifier: Apache-2.0
"""`atp-operator run`."""

from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import json
import logging
import signal
import sys

import kopf
from kopf._core.engines import peering

from . import __version__
from .check import check_installation
from .controller import Controller
from .handlers import register
from .kube import Kube
from .metrics import Metrics, serve
from .settings import Settings, SettingsError


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": dt.datetime.fromtimestamp(record.created, dt.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def setup_logging(level: str, style: str) -> None:
    """Logs on standard error, as JSON or plain text."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter() if style == "json" else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("kopf.objects", "aiohttp.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


async def run(settings: Settings) -> None:
    """Everything until SIGTERM or a part fails."""
    kube = await Kube.connect()
    metrics = Metrics()
    controller = Controller(settings, kube, metrics)
    registry = kopf.OperatorRegistry()
    register(registry, settings, controller)
    server = await serve(metrics, settings.metrics_port, controller.problem)
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


def main(argv: list[str] | None = None) -> int:
    """Entry point; exit code 2 for wrong settings."""
    parser = argparse.ArgumentParser(prog="atp-operator", description="The operator of ATP on Kubernetes.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "run", help="run the operator; settings come from ATP_* variables, see docs/atpjob-reference.md"
    )
    check = commands.add_parser("check-installation", help="what `helm test` runs: does this cluster serve ATP?")
    check.add_argument("--software-switch", choices=("true", "false"), default="true", help="expect one per node")
    options = parser.parse_args(argv)
    if options.command == "check-installation":
        return asyncio.run(check_installation(expect_switch=options.software_switch == "true"))
    try:
        settings = Settings.from_env()
    except SettingsError as error:
        print(f"atp-operator: {error}", file=sys.stderr)
        return 2
    setup_logging(settings.log_level, settings.log_format)
    asyncio.run(run(settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
