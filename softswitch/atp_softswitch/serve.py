# SPDX-License-Identifier: Apache-2.0
"""The running software switch: data path, ports, P4Runtime server, health and metrics."""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector

from atp_api.service.httpd import HealthServer, Pulse

from .errors import DataplaneError
from .journal import Journal
from .library import SwitchLibrary, find_library, find_object_dir
from .metrics import SwitchCollector
from .pipeline import contract_path, load_p4info
from .ports import PortKeeper, Selection, no_interface, no_neighbour
from .server import P4RuntimeService, start

_PREDECESSOR_SECONDS = 30.0

log = logging.getLogger("atp_softswitch")


@dataclass(frozen=True)
class TcHook:
    """The tc programs of an open switch."""

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


class _RatedHook:
    """A hook that also gives each attached port its phantom queue."""

    def __init__(self, hook: TcHook | _XdpHook, library: SwitchLibrary, rate: int, threshold: int) -> None:
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
        if self._rate:
            self._library.set_port_rate(ifindex, 0, 0)


def _keepers(
    options: argparse.Namespace, library: SwitchLibrary, used: Callable[[], frozenset[int]]
) -> list[PortKeeper]:
    if options.mode == "relay":
        return []
    words = options.attach or (["veth"] if options.mode == "tc" else ["none"])
    rated = (library, options.port_rate, options.port_threshold)
    keepers = [
        PortKeeper(
            "tc",
            _RatedHook(TcHook(library), *rated),
            library,
            Selection.parse(words, options.xdp),
            used,
            library.left_attached,
        )
    ]
    if options.xdp:
        names = Selection(False, frozenset(options.xdp))
        keepers.append(PortKeeper("xdp", _RatedHook(_XdpHook(library), *rated), library, names))
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


async def _keep(library: SwitchLibrary, seconds: int) -> None:
    """Say again and again that somebody looks after the tables."""
    while True:
        library.keep(seconds)
        await asyncio.sleep(max(1.0, seconds / 10))


async def _open(options: argparse.Namespace, path: Path) -> SwitchLibrary:
    """The data path, with tables that outlive the process where the node has a file system for them.

    A predecessor that is about to end is waited for.
    """
    pin_dir: Path | None = options.pin_dir
    deadline = time.monotonic() + _PREDECESSOR_SECONDS
    while True:
        try:
            return SwitchLibrary(
                path,
                bpf=options.mode != "relay",
                aggregators=options.aggregators,
                values=options.values,
                object_dir=find_object_dir(options.object_dir, path),
                stale_ns=options.stale_ms * 1_000_000,
                pin_dir=pin_dir,
            )
        except DataplaneError as error:
            if pin_dir is not None and error.errno == errno.EMEDIUMTYPE:
                log.warning("tables go with this process", extra={"reason": str(error)})
                pin_dir = None
            elif pin_dir is not None and error.errno == errno.EBUSY and time.monotonic() < deadline:
                await asyncio.sleep(0.2)
            else:
                raise


async def serve(options: argparse.Namespace) -> int:
    """Run until SIGTERM or SIGINT; returns the exit status. OSError or DataplaneError if it cannot start."""
    path = find_library(options.library)
    library = await _open(options, path)
    journal = Journal(options.state_dir / "entries.journal", library.token) if library.token else None
    keepers: list[PortKeeper] = []
    background: list[asyncio.Task[None]] = []
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        if options.mode == "relay":
            library.start_relay(options.relay_address, options.relay_port)

        def changed() -> None:
            for keeper in keepers:
                keeper.poke()

        contract = load_p4info(options.p4info or contract_path())
        no_port = no_neighbour if options.mode == "relay" else no_interface
        service = P4RuntimeService(library, contract, options.device_id, changed, no_port, journal)
        if journal:
            if service.restore() and service.device:
                log.info("tables taken over", extra={"jobs": len(service.device.jobs())})
            else:
                library.reset()
        keepers = _keepers(options, library, lambda: service.device.ports() if service.device else frozenset())
        server, port = await start(service, options.listen)
        sweeper = _Sweeper(library, options.sweep_seconds)
        background = [asyncio.create_task(keeper.run()) for keeper in keepers]
        if journal:
            background.append(asyncio.create_task(_keep(library, options.keep_seconds)))
        if options.sweep_seconds > 0:
            background.append(asyncio.create_task(sweeper.run()))
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

        pulse = Pulse()
        background.append(asyncio.create_task(pulse.run()))
        http = HealthServer(options.health_listen, registry, pulse.check, ready)
        for task in background:
            task.add_done_callback(lambda _: stop.set())
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
        if journal:
            journal.close()
        else:
            for keeper in keepers:
                keeper.close()
        library.close()
