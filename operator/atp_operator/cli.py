# SPDX-License-Identifier: Apache-2.0
"""`atp-operator`. Light: what takes time to import is imported once the port for the kubelet's probes is open."""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys

from . import __version__
from .settings import Settings, SettingsError


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server(("0.0.0.0", port), backlog=64)
    except OSError as error:
        raise SettingsError(f"ATP_METRICS_PORT: port {port} cannot be opened: {error.strerror}") from error


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
        from .check import check_installation

        return asyncio.run(check_installation(expect_switch=options.software_switch == "true"))
    try:
        settings = Settings.from_env()
        listener = _listen(settings.metrics_port)
    except SettingsError as error:
        print(f"atp-operator: {error}", file=sys.stderr)
        return 2
    # The kubelet's first probe waits in the backlog meanwhile, and does not fail.
    from . import logs, service

    logs.configure(settings.log_level, settings.log_format)
    asyncio.run(service.run(settings, listener))
    return 0


if __name__ == "__main__":
    sys.exit(main())
