# SPDX-License-Identifier: Apache-2.0
"""The command `atp-sidecar`."""

import argparse
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from atp_sidecar.logs import EventLog

ROLES = ("worker", "parameterServer")


def park() -> int:
    """Waits for SIGTERM or SIGINT, then returns at once: the main container of a parameter server's pod."""
    awaited = {signal.SIGTERM, signal.SIGINT}
    # Blocked first, so that a signal that comes before sigwait is kept (PID 1 would lose it).
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    signal.sigwait(awaited)
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError with the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=64)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: {host} port {port} (metrics and probes)") from error


def _run(arguments: argparse.Namespace) -> int:
    role = os.environ.get("ATP_ROLE", "")
    if role not in ROLES:
        print(
            f"atp-sidecar: ATP_ROLE is {role!r}; it must be {' or '.join(ROLES)} (the webhook sets it)",
            file=sys.stderr,
        )
        return 2
    pod = "/".join(part for part in (os.environ.get("POD_NAMESPACE"), os.environ.get("POD_NAME")) if part)
    log = EventLog(level=arguments.log_level, pod=pod, node=os.environ.get("NODE_NAME", ""))
    try:
        # Before anything that takes time: the kubelet's first probe then waits in the backlog and does not fail.
        listener = _listen(arguments.metrics_host, arguments.metrics_port)
    except OSError as error:
        log.error("cannot-start", reason=str(error))
        return 1

    # Imported here so that `park` stays small.
    import asyncio

    from atp_sidecar.app import Settings, serve

    settings = Settings(
        role="worker" if role == "worker" else "parameterServer",
        assignment=arguments.assignment,
        socket=arguments.socket,
        metrics_port=arguments.metrics_port,
        metrics_host=arguments.metrics_host,
        pod_ip=os.environ.get("POD_IP") or None,
        pod=pod,
    )
    try:
        asyncio.run(serve(settings, log, listener=listener))
    except OSError as error:
        log.error("cannot-start", reason=str(error))
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="atp-sidecar", description="ATP transport of one training pod.")
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="run the transport",
        description="Runs the transport of this pod. Environment: ATP_ROLE (worker or parameterServer), "
        "POD_NAME, POD_NAMESPACE, POD_IP, NODE_NAME.",
    )
    run.add_argument(
        "--assignment", type=Path, default=Path("/etc/atp/assignment.json"), help="file the operator fills"
    )
    run.add_argument("--socket", type=Path, default=Path("/run/atp/atp.sock"), help="unix socket for the trainer")
    run.add_argument("--metrics-port", type=int, default=9095, help="port of /metrics, /healthz, /readyz and /status")
    run.add_argument("--metrics-host", default="0.0.0.0", help="address of that port")
    run.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    commands.add_parser("park", help="wait for SIGTERM, then exit (main container of a parameter server's pod)")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    arguments = parser().parse_args(argv)
    return park() if arguments.command == "park" else _run(arguments)
