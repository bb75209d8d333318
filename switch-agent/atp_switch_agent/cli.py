# SPDX-License-Identifier: Apache-2.0
"""Command line of the switch agent."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from google.protobuf import text_format
from prometheus_client import CollectorRegistry, ProcessCollector

from atp_api.service import log as logs
from atp_api.service.httpd import HealthServer, Pulse

from . import __version__
from .codec import Codec, PipelineMismatch, bmv2_paths
from .driver import Driver, Facts
from .forwarding import Tuning
from .host_veth import HostVethPorts
from .metrics import AgentCollector
from .planner import EndpointKey, Limits, Port
from .reconciler import Reconciler, Settings
from .resolver import PortResolver, RelayPorts, StaticPorts
from .service import SwitchAgentService, start
from .tls import server_credentials

log = logging.getLogger("atp_switch_agent")

TARGETS = ("software-bpf", "software-relay", "bmv2", "tofino", "tofino2")


def _endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port")
    return host, int(port)


def build_parser() -> argparse.ArgumentParser:
    """The argument parser."""
    parser = argparse.ArgumentParser(prog="atp-switch-agent", description="Agent of one ATP switch.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    serve = commands.add_parser("serve", help="run the agent until SIGTERM")
    serve.add_argument("--switch-name", required=True, help="name of the ATPSwitch that this agent serves")
    serve.add_argument("--listen", default="0.0.0.0:9560", help="gRPC host:port for the operator")
    serve.add_argument(
        "--health-listen", type=_endpoint, default=("0.0.0.0", 9562), help="health and metrics host:port"
    )
    serve.add_argument("--p4runtime", default="127.0.0.1:9559", help="P4Runtime server of the switch")
    serve.add_argument("--device-id", type=int, default=1, help="P4Runtime device ID")
    serve.add_argument("--election-id", type=int, default=None, help="P4Runtime election ID (default: time in ms)")
    security = serve.add_mutually_exclusive_group()
    security.add_argument(
        "--tls-dir", type=Path, default=Path("/etc/atp/tls"), help="folder with ca.crt, tls.crt, tls.key"
    )
    security.add_argument("--insecure-loopback", action="store_true", help="no TLS; allowed on a loopback address only")
    serve.add_argument(
        "--allow-client",
        action="append",
        default=[],
        metavar="NAME",
        help="only certificates with this SAN or CN",
    )
    _port_options(serve)
    serve.add_argument(
        "--target",
        choices=TARGETS,
        help="kind of switch (default: what the switch says); with bmv2 its program comes with the agent",
    )
    serve.add_argument("--aggregators", type=int, default=0, help="number of aggregators (default: ask)")
    serve.add_argument("--values", type=int, nargs="+", default=[], help="profiles (default: ask)")
    serve.add_argument(
        "--p4info", type=Path, help="p4info of the pipeline (default: that of the switch, or of --target)"
    )
    serve.add_argument("--device-config", type=Path, help="the compiled pipeline as the switch's server takes it")
    serve.add_argument(
        "--replace-pipeline", action="store_true", help="load the pipeline also over a program that is not ATP's"
    )
    serve.add_argument(
        "--ecn-threshold",
        type=int,
        default=0,
        help="queue length from which on sums are marked: packets (bmv2), cells (Tofino); default: the program's",
    )
    serve.add_argument("--stale-ms", type=int, default=0, help="T of a bmv2 in ms (default: the program's)")
    serve.add_argument("--audit-seconds", type=float, default=30.0, help="compare the switch this often")
    serve.add_argument("--sample-seconds", type=float, default=5.0, help="read counters for metrics this often")
    serve.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))

    resolve = commands.add_parser("resolve", help="say behind which port addresses are, once")
    _port_options(resolve)
    resolve.add_argument("--wait", type=float, default=3.0, help="seconds to wait for neighbours to answer")
    resolve.add_argument("addresses", nargs="+", metavar="ADDRESS")
    return parser


def _port_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ports",
        choices=("host-veth", "static", "relay"),
        default="host-veth",
        help="host-veth: interfaces of this host; static: --port-file; relay: the IPv4 address",
    )
    parser.add_argument("--port-file", type=Path, help="JSON file of --ports static")


def make_resolver(options: argparse.Namespace) -> PortResolver:
    """The resolver that the options name. OSError or ValueError for a bad file."""
    if options.ports == "static":
        return StaticPorts(options.port_file)
    if options.ports == "relay":
        return RelayPorts()
    return HostVethPorts()


def _check(options: argparse.Namespace) -> str | None:
    if options.port_file and options.ports != "static":
        return "--port-file belongs to --ports static"
    if options.command == "serve" and options.device_config and not options.p4info:
        return "--device-config needs the --p4info that was compiled with it"
    if options.command == "serve" and options.insecure_loopback:
        host = options.listen.rpartition(":")[0]
        try:
            loopback = host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
        except ValueError:
            loopback = False
        if not loopback:
            return f"--insecure-loopback needs a loopback --listen, not {host}"
    return None


def make_pipeline(options: argparse.Namespace) -> tuple[Codec | None, str]:
    """The pipeline that the options name, if any, and why it cannot be used.

    A file that cannot be read is an error of the command line (OSError, text_format.ParseError); one that is no ATP
    pipeline is told to the operator, so that it is seen where the switch is looked at.
    """
    try:
        if options.p4info:
            return Codec(options.p4info, options.device_config), ""
        if options.target == "bmv2":
            return Codec(*bmv2_paths()), ""
    except PipelineMismatch as error:
        return None, str(error)
    return None, ""


async def _serve(options: argparse.Namespace) -> int:
    credentials = None if options.insecure_loopback else server_credentials(options.tls_dir)
    pipeline, problem = make_pipeline(options)
    given = Facts(options.target or "", Limits(options.aggregators, tuple(options.values)))
    driver = Driver(
        options.p4runtime,
        pipeline,
        problem=problem,
        replace=options.replace_pipeline,
        device_id=options.device_id,
        election_id=options.election_id,
    )
    settings = Settings(
        options.switch_name,
        given,
        audit_seconds=options.audit_seconds,
        tuning=Tuning(options.ecn_threshold, options.stale_ms),
    )
    reconciler = Reconciler(settings, driver, make_resolver(options))
    driver.on_change = reconciler.poke
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server, port = await start(SwitchAgentService(reconciler, options.allow_client), options.listen, credentials)
    pulse = Pulse()
    tasks = [
        asyncio.create_task(pulse.run()),
        asyncio.create_task(driver.run()),
        asyncio.create_task(reconciler.run()),
        asyncio.create_task(reconciler.sample(options.sample_seconds)),
    ]
    for task in tasks:
        task.add_done_callback(lambda _: stop.set())
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(AgentCollector(reconciler))
    # Ready means: the operator can ask. That the switch is away is part of the answer, not a reason to be
    # unreachable.
    http = HealthServer(options.health_listen, registry, pulse.check, lambda: (True, "ready"))
    log.info(
        "serving",
        extra={
            "switch": options.switch_name,
            "grpc_port": port,
            "http_port": http.port,
            "p4runtime": options.p4runtime,
            "pipeline": pipeline.name if pipeline else "",
            "tls": credentials is not None,
        },
    )
    await stop.wait()
    log.info("stopping")
    await server.stop(0.5)
    http.close()
    failed = [task for task in tasks if task.done() and not task.cancelled() and task.exception()]
    for task in failed:
        log.error("a background task failed", exc_info=task.exception())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return 1 if failed else 0


async def _resolve(options: argparse.Namespace) -> int:
    resolver = make_resolver(options)
    keys = [EndpointKey(address) for address in options.addresses]
    deadline = asyncio.get_running_loop().time() + options.wait
    while True:
        answers = await resolver.resolve(keys)
        missing = [key for key in keys if not isinstance(answers[key], Port)]
        if not missing or asyncio.get_running_loop().time() >= deadline:
            break
        await asyncio.sleep(0.2)
    for key in keys:
        answer = answers[key]
        if isinstance(answer, Port):
            mac = ":".join(f"{byte:02x}" for byte in answer.mac.to_bytes(6, "big"))
            print(f"{key.address} port {answer.number} mac {mac}")
        else:
            print(f"{key.address} unresolved: {answer.message}")
    return 1 if missing else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    wrong = _check(options)
    if wrong:
        parser.error(wrong)
    logs.configure(getattr(options, "log_level", "warning"))
    try:
        return asyncio.run(_serve(options) if options.command == "serve" else _resolve(options))
    except (OSError, ValueError, text_format.ParseError) as error:
        log.error("cannot run: %s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
