# SPDX-License-Identifier: Apache-2.0
"""bmv2 (simple_switch_grpc) as a switch of the conformance vectors: tables over P4Runtime, packets over veth pairs.

It runs in a network namespace of the test, because bmv2 listens on all addresses. Needs root.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

from bmv2.p4runtime import INSERT, MODIFY
from bmv2.process import Bmv2Process
from bmv2.thrift import Thrift
from conformance.switches import PORTS, Aggregator, NetworkNamespace, Packet, VethSwitch, mac_of
from conformance.switches import run as run_command
from hosts import drops_of
from p4runtime_tables import P4RuntimeTables
from registers import Registers

PACE = 10
"""Vectors run this many times slower than they say, and T is as much longer: a test's machine may be busy."""
STALE_MS = 100.5
"""T of the vectors is 100 ms; what is as old is not stale yet, and 101 ms is."""
SETTLE_SECONDS = 0.005
LONG_ENOUGH = 3 * STALE_MS
"""A longer wait says no more than this one."""


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
        self.thrift = Thrift()
        self.registers = Registers(lambda name, index: self.thrift.register(f"AtpIngress.{name}", index))
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
        if hasattr(self, "thrift"):
            self.thrift.close()
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

    def drops(self) -> dict[str, dict[str, int]]:
        return drops_of(self.controller.drops(), {self.port_number(port): port for port in PORTS})

    def send(self, packet: Packet, dst: str, expected: int) -> list[Packet]:
        answers = super().send(packet, dst, expected)
        self.registers.came_by(packet.header)
        return answers

    def aggregator(self, index: int) -> Aggregator:
        """Over Thrift: bmv2's P4Runtime cannot read registers."""
        return self.registers.aggregator(index)
