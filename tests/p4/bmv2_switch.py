# SPDX-License-Identifier: Apache-2.0
"""bmv2 (simple_switch_grpc) as a switch of the conformance vectors: tables over P4Runtime, packets over veth pairs.

It runs in a network namespace of the test, because bmv2 listens on all addresses. Needs root.
"""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from conformance.switches import PORTS, ROOT, Aggregator, NetworkNamespace, VethSwitch, mac_of
from conformance.switches import run as run_command
from p4runtime_tables import INSERT, MODIFY, Controller, P4RuntimeTables

BUILD = ROOT / "p4" / "build"
JSON = BUILD / "atp.bmv2.json"
P4INFO = BUILD / "atp.bmv2.p4info.txtpb"
ENVIRONMENT = "P4_BMV2"
STARTED_WITHIN_SECONDS = 60.0
PACE = 10
"""Vectors run this many times slower than they say, and T is as much longer: a test's machine may be busy."""
STALE_MS = 100.5
"""T of the vectors is 100 ms; what is as old is not stale yet, and 101 ms is."""
SETTLE_SECONDS = 0.005
LONG_ENOUGH = 3 * STALE_MS
"""A longer wait says no more than this one."""


def find_bmv2() -> str | None:
    """simple_switch_grpc: what P4_BMV2 names, or on PATH."""
    return os.environ.get(ENVIRONMENT) or shutil.which("simple_switch_grpc")


def reason_not_to_run() -> str | None:
    """What is missing to run bmv2 here, or None."""
    found = find_bmv2()
    if found is None:
        return f"bmv2 is not installed: build p4lang/behavioral-model and set {ENVIRONMENT} to its simple_switch_grpc"
    if not os.access(found, os.X_OK):
        return f"{ENVIRONMENT} is {found}, which is no program"
    if not JSON.exists() or not P4INFO.exists():
        return f"{JSON.relative_to(ROOT)} is missing: make -C p4 bmv2, which needs p4c"
    if os.geteuid() != 0:
        return "a network namespace needs root"
    return None


@functools.cache
def version() -> str:
    """Name and version of the bmv2 that is found."""
    command = [find_bmv2() or "simple_switch_grpc", "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return "simple_switch_grpc " + (said[-1] if said else "of unknown version")


class Bmv2Process:
    """A running bmv2 with the committed program: interfaces by port number, P4Runtime on a unix socket."""

    def __init__(self, interfaces: Mapping[int, str], thrift_port: int = 9090) -> None:
        """Start it in this thread's network namespace. RuntimeError with its output if it does not."""
        self.directory = Path(tempfile.mkdtemp(prefix="atp-bmv2-"))
        address = f"unix:{self.directory}/grpc"
        command = [
            find_bmv2() or "simple_switch_grpc",
            "--no-p4",
            "--device-id",
            "1",
            "--thrift-port",
            str(thrift_port),
        ]
        for number, name in interfaces.items():
            command += ["-i", f"{number}@{name}"]
        command += ["--", "--grpc-server-addr", address]
        try:
            with (self.directory / "output").open("wb") as output:
                self.process = subprocess.Popen(
                    command, stdout=output, stderr=subprocess.STDOUT, cwd=self.directory, stdin=subprocess.DEVNULL
                )
            deadline = time.monotonic() + STARTED_WITHIN_SECONDS
            while not (self.directory / "grpc").exists():
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"bmv2 did not start: {self.output()}")
                time.sleep(0.02)
            self.controller = Controller(address, P4INFO, JSON.read_bytes())
        except BaseException:
            self.close()
            raise

    def output(self) -> str:
        return (self.directory / "output").read_text(errors="replace")

    def close(self) -> None:
        if hasattr(self, "controller"):
            self.controller.close()
        if hasattr(self, "process"):
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        shutil.rmtree(self.directory, ignore_errors=True)


class Links(NetworkNamespace):
    """One veth pair a port, without a bridge: bmv2 is the bridge."""

    def build(self, mtu: int) -> None:
        no_ipv6()
        run_command("ip", "link", "set", "lo", "up")
        for port in PORTS:
            veth(f"h-{port}", f"p-{port}", mtu, mac_of(port).hex(":"))


def no_ipv6() -> None:
    """No neighbour discovery in this namespace: every packet is a test's."""
    for name in ("all", "default"):
        switch = Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6")
        if switch.exists():
            switch.write_text("1")


def veth(one: str, other: str, mtu: int, mac: str) -> None:
    """A veth pair, both ends up; ``mac`` is the other end's."""
    run_command("ip", "link", "add", one, "mtu", str(mtu), "type", "veth", "peer", "name", other,
                "mtu", str(mtu), "address", mac)  # fmt: skip
    for name in (one, other):
        run_command("ip", "link", "set", name, "up")


class Bmv2Exchange(VethSwitch):
    """Frames through bmv2."""

    def exchange(self, port: str, frame: bytes, expected: int) -> list[tuple[str, bytes]]:
        """bmv2 has several egress threads: what should not come may come after the sentinel."""
        got = super().exchange(port, frame, expected)
        time.sleep(SETTLE_SECONDS)
        self.drain(got)
        return sorted(got, key=lambda item: PORTS.index(item[0]))


class Bmv2Switch(P4RuntimeTables, Bmv2Exchange):
    """One bmv2 for each vector; its clock is real, and T is stretched with the vector's times."""

    name = "bmv2"
    routes_unknown = True
    max_values = 62

    def __init__(self, pace: int = PACE) -> None:
        self.pace = pace
        self.sockets: dict[str, socket.socket] = {}
        self.held = {}
        self.now_ms: float | None = None
        self.network = Links(1500)
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        self.bmv2 = Bmv2Process({self.port_number(port): f"h-{port}" for port in PORTS})
        self.controller = self.bmv2.controller
        self.controller.entry(MODIFY, "stale_time", {}, "set_stale_time", [int(STALE_MS * self.pace * 1000)])
        for port in PORTS:
            match: dict[str, int | tuple[int, int]] = {"dst_mac": int.from_bytes(mac_of(port), "big")}
            self.controller.entry(INSERT, "l2_forward", match, "forward", [self.port_number(port)])
            s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
            s.bind((f"p-{port}", 0x0800))
            s.setblocking(False)
            self.sockets[port] = s

    def close(self) -> None:
        for s in self.sockets.values():
            s.close()
        if hasattr(self, "bmv2"):
            self.bmv2.close()
        self.network.close()

    def port_number(self, port: str) -> int:
        return PORTS.index(port) + 1

    def set_clock(self, now_ns: int) -> None:
        """Wait until as much time has gone by since the first call."""
        now_ms = now_ns / 1e6
        if self.now_ms is None:
            self.due = time.monotonic()
        else:
            self.due += min(now_ms - self.now_ms, LONG_ENOUGH) * self.pace / 1000
        self.now_ms = now_ms
        time.sleep(max(0.0, self.due - time.monotonic()))

    def occupancy(self, job: int) -> int:
        """From the counters, as the agent does: bmv2's P4Runtime cannot read registers."""
        taken_back = ("released", "resend_partials", "stale_takeovers")
        counters = self.controller.counters() if job == 0 else {job: self.counters(job)}
        return sum(c.get("allocated", 0) - sum(c.get(n, 0) for n in taken_back) for c in counters.values())

    def aggregator(self, index: int) -> Aggregator:
        raise NotImplementedError("bmv2's P4Runtime cannot read registers")
