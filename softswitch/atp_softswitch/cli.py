# SPDX-License-Identifier: Apache-2.0
"""Command line of the software switch."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector

from . import __version__
from . import log as logs
from .dataplane import PROFILES
from .errors import DataplaneError
from .httpd import HealthServer
from .library import ENV_LIBRARY, ENV_OBJECT_DIR, SwitchLibrary, find_library, find_object_dir
from .metrics import SwitchCollector
from .pipeline import contract_path, load_p4info
from .ports import PortKeeper, Selection
from .server import P4RuntimeService, start

ATP_PORT = 10800

log = logging.getLogger("atp_softswitch")


@dataclass(frozen=True)
class _TcHook:
    library: SwitchLibrary

    def attach(self, ifindex: int) -> None:
        self.library.attach_tc(ifindex)

    def detach(self, ifindex: int) -> None:
        self.library.detach_tc(ifindex)


@dataclass(frozen=True)
class _XdpHook:
    library: SwitchLibrary

    def attach(self, ifindex: int) -> None:
        self.library.attach_xdp(ifindex)

    def detach(self, ifindex: int) -> None:
        self.library.detach_xdp(ifindex)


def _endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port")
    return host, int(port)


def _ipv4(text: str) -> int:
    try:
        return int(ipaddress.IPv4Address(text))
    except ipaddress.AddressValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not an IPv4 address") from error


def build_parser() -> argparse.ArgumentParser:
    """The argument parser; every option is in docs and in --help."""
    parser = argparse.ArgumentParser(prog="atp-softswitch", description="ATP software switch with P4Runtime.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="run the switch until SIGTERM")
    serve.add_argument("--listen", default="127.0.0.1:9559", help="P4Runtime host:port; keep it on loopback")
    serve.add_argument(
        "--http", type=_endpoint, default=("0.0.0.0", 9562), help="health and metrics host:port"
    )
    serve.add_argument("--device-id", type=int, default=1, help="P4Runtime device ID")
    serve.add_argument(
        "--mode",
        choices=("tc", "xdp", "relay"),
        default="tc",
        help="tc: BPF between pods; xdp: BPF at NICs; relay: UDP relay, needs no privilege",
    )
    serve.add_argument(
        "--attach",
        nargs="+",
        metavar="veth|none|IFNAME",
        help="tc interfaces (default: veth in mode tc, none in mode xdp)",
    )
    serve.add_argument("--xdp", nargs="+", default=[], metavar="IFNAME", help="NICs that get the XDP program")
    serve.add_argument("--relay-address", type=_ipv4, help="IPv4 address of the relay")
    serve.add_argument("--relay-port", type=int, default=ATP_PORT, help="UDP port of the relay")
    serve.add_argument("--aggregators", type=int, default=8192, help="number of aggregators, 1..65536")
    serve.add_argument(
        "--values", type=int, choices=PROFILES, default=350, help="largest profile: 32-bit values per packet"
    )
    serve.add_argument(
        "--stale-ms", type=int, default=0, help="T in ms: idle aggregators are free (0: default)"
    )
    serve.add_argument("--sweep-seconds", type=float, default=5.0, help="free stale aggregators this often")
    serve.add_argument(
        "--port-rate", type=int, default=0, help="phantom queue rate of each port, bit/s; 0: off"
    )
    serve.add_argument("--port-threshold", type=int, default=65536, help="phantom queue threshold, bytes")
    serve.add_argument(
        "--p4info", type=Path, default=contract_path(), help="contract that a pushed p4info must match"
    )
    serve.add_argument("--library", help=f"libatp_switch.so (or ${ENV_LIBRARY})")
    serve.add_argument("--object-dir", help=f"folder of the compiled BPF objects (or ${ENV_OBJECT_DIR})")
    serve.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser


def _check(options: argparse.Namespace) -> str | None:
    if options.mode == "relay" and options.relay_address is None:
        return "--mode relay needs --relay-address"
    if options.mode == "relay" and (options.attach or options.xdp):
        return "--attach and --xdp belong to the BPF modes; a relay has a UDP socket"
    if options.mode == "xdp" and not options.xdp:
        return "--mode xdp needs --xdp IFNAME"
    if not 1 <= options.aggregators <= 65536:
        return "--aggregators must be 1..65536"
    return None


class _RatedHook:
    """A hook that also gives each attached port its phantom queue."""

    def __init__(self, hook: _TcHook | _XdpHook, library: SwitchLibrary, rate: int, threshold: int) -> None:
        self._hook = hook
        self._library = library
        self._rate = rate
        self._threshold = threshold

    def attach(self, ifindex: int) -> None:
        self._hook.attach(ifindex)
        if self._rate:
            self._library.set_port_rate(ifindex, self._rate, self._threshold)

    def detach(self, ifindex: int) -> None:
        self._hook.detach(ifindex)


def _keepers(options: argparse.Namespace, library: SwitchLibrary) -> list[PortKeeper]:
    if options.mode == "relay":
        return []
    words = options.attach or (["veth"] if options.mode == "tc" else ["none"])
    rated = (library, options.port_rate, options.port_threshold)
    keepers = [PortKeeper("tc", _RatedHook(_TcHook(library), *rated), Selection.parse(words))]
    if options.xdp:
        names = Selection(False, frozenset(options.xdp))
        keepers.append(PortKeeper("xdp", _RatedHook(_XdpHook(library), *rated), names))
    return keepers


class _Sweeper:
    """Frees stale aggregators on a timer. For hygiene and metrics only: the data path reclaims them lazily."""

    def __init__(self, library: SwitchLibrary, period: float) -> None:
        self._library = library
        self._period = period
        self.total = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._period)
            freed = await asyncio.to_thread(self._library.sweep)
            self.total += freed
            if freed:
                log.info("swept stale aggregators", extra={"freed": freed})


async def _serve(options: argparse.Namespace) -> int:
    path = find_library(options.library)
    library = SwitchLibrary(
        path,
        bpf=options.mode != "relay",
        aggregators=options.aggregators,
        values=options.values,
        object_dir=find_object_dir(options.object_dir, path),
        stale_ns=options.stale_ms * 1_000_000,
    )
    keepers: list[PortKeeper] = []
    background: list[asyncio.Task[None]] = []
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        keepers = _keepers(options, library)
        if options.mode == "relay":
            library.start_relay(options.relay_address, options.relay_port)
        service = P4RuntimeService(library, load_p4info(options.p4info), options.device_id)
        server, port = await start(service, options.listen)
        sweeper = _Sweeper(library, options.sweep_seconds)
        background = [asyncio.create_task(keeper.run()) for keeper in keepers]
        if options.sweep_seconds > 0:
            background.append(asyncio.create_task(sweeper.run()))
        for task in background:
            task.add_done_callback(lambda _: stop.set())
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(
            SwitchCollector(
                library,
                service,
                lambda: {keeper.label: len(keeper.attached) for keeper in keepers},
                lambda: sweeper.total,
            )
        )

        def ready() -> tuple[bool, str]:
            missing = [name for keeper in keepers for name in keeper.missing]
            return not missing, f"not attached: {', '.join(missing)}" if missing else "ready"

        http = HealthServer(options.http[0], options.http[1], registry, lambda: (True, "alive"), ready)
        log.info(
            "serving",
            extra={
                "mode": options.mode,
                "p4runtime_port": port,
                "http_port": http.port,
                "aggregators": options.aggregators,
                "values": options.values,
                "library": str(path),
            },
        )
        await stop.wait()
        log.info("stopping")
        await server.stop(0.5)
        http.close()
        failed = [task for task in background if task.done() and not task.cancelled() and task.exception()]
        for task in failed:
            log.error("a background task failed", exc_info=task.exception())
        return 1 if failed else 0
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        for keeper in keepers:
            keeper.close()
        library.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    wrong = _check(options)
    if wrong:
        parser.error(wrong)
    logs.configure(options.log_level)
    try:
        return asyncio.run(_serve(options))
    except (OSError, DataplaneError) as error:
        log.error("cannot run: %s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
