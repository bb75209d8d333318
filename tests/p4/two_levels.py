# SPDX-License-Identifier: Apache-2.0
"""Two switches in a row: a rack's ToR (level 0) and the parameter server's ToR (level 1), and packets through both.

::

    w0, w1 -- rack switch -- up -- root switch -- ps
                                        +-- w2

w0 and w1 are rack 0 (bit 1 of bitmap1); w2, under the PS's ToR, enters level 1 directly with bit 2. A pair of switches
is two cores of the software switch (``NativePair``) or two processes of bmv2 with a veth pair between them
(``Bmv2Pair``).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bmv2.p4runtime import INSERT, MODIFY
from bmv2.process import Bmv2Process
from bmv2_switch import PACE, STALE_MS, Bmv2Exchange, no_ipv6, veth
from conformance.recording import describe, of_every_job, path_of, without_bytes
from conformance.switches import (
    PORTS,
    NativeSwitch,
    NetworkNamespace,
    Packet,
    Replica,
    address_of,
    ip_number,
    mac_of,
    run,
)
from conformance.test_vectors import START_MS, merge, packet_of
from p4runtime_tables import P4RuntimeTables

VALUES = 62
STALE_NS = 100_000_000
JOB, GROUP, REGIONS = 1, 1, [(0, 16)]
HOSTS = {"rack": ("w0", "w1"), "root": ("w2", "ps")}
LINK = "up"
"""Name of the port towards the other switch, on both."""
OTHER = {"rack": "root", "root": "rack"}
COPIES = {"rack": [("w0", "w0"), ("w1", "w1")], "root": [(LINK, "w0"), ("w2", "w2")]}
"""An ACK's copies, as (port, host): the rack gets one, and its own switch makes two of it."""
Fields = dict[str, Any]
SHARED: Fields = {"job": JOB, "seq": 7, "index": 5, "n0": 2, "n1": 2}
W0: Fields = {"port": "w0", "b0": 1, "b1": 1}
W1: Fields = {"port": "w1", "b0": 2, "b1": 1}
W2: Fields = {"port": "w2", "b0": 1, "b1": 2, "n0": 1, "edge": 1}
ACK: Fields = {"port": "ps", "b0": 0, "b1": 3, "ack": 1, "dst": "w0"}


@dataclass(frozen=True)
class Step:
    """A packet from a host, what hosts get (``to``, and fields that differ), and counters of both switches after it."""

    packet: Fields
    out: Sequence[Fields] = ()
    rack: Fields | None = None
    root: Fields | None = None


@dataclass(frozen=True)
class Scenario:
    name: str
    steps: Sequence[Step]


def copies(*hosts: str, **changes: int) -> list[Fields]:
    return [{"to": host, **changes} for host in hosts]


SCENARIOS = [
    Scenario(
        "one sum of both racks at the PS, one result at every worker",
        [
            Step({**W0, "values": [1]}, rack={"allocated": 1, "aggregated": 1}),
            Step({**W1, "values": [10]}, rack={"allocated": 1, "aggregated": 2, "completed": 1}),
            Step(
                {**W2, "values": [100]},
                [{"to": "ps", "b1": 3, "values": [111]}],
                root={"allocated": 1, "aggregated": 2, "completed": 1},
            ),
            Step(
                {**ACK, "values": [111]},
                copies("w0", "w1", "w2"),
                rack={"allocated": 1, "aggregated": 2, "completed": 1, "released": 1, "acks": 1},
                root={"allocated": 1, "aggregated": 2, "completed": 1, "released": 1, "acks": 1},
            ),
        ],
    ),
    Scenario(
        "a resend fetches the rack's sum again, and the root's partial sum with it",
        [
            Step({**W0, "values": [1]}),
            Step({**W1, "values": [10]}),
            Step({**W0, "resend": 1, "values": [1]}, [{"to": "ps", "b0": 3, "edge": 1, "values": [11]}]),
            Step(
                {**W2, "values": [100]},
                rack={"allocated": 1, "aggregated": 2, "completed": 1, "reemitted": 1},
                root={"allocated": 2, "aggregated": 2, "resend_partials": 1},
            ),
            Step({**ACK}, copies("w0", "w1", "w2")),
        ],
    ),
    Scenario(
        "a resend of an incomplete rack passes the root, which keeps what it has",
        [
            Step({**W2, "values": [100]}),
            Step({**W0, "values": [1]}),
            Step(
                {**W0, "resend": 1, "values": [1]},
                [{"to": "ps"}],
                rack={"allocated": 1, "aggregated": 1, "resend_partials": 1},
            ),
            Step(
                {**W1, "resend": 1, "values": [10]},
                [{"to": "ps"}],
                root={"allocated": 1, "aggregated": 1, "resend_passed": 2},
            ),
            Step(
                {**W2, "resend": 1, "values": [100]},
                [{"to": "ps"}],
                root={"allocated": 1, "aggregated": 1, "resend_partials": 1, "resend_passed": 2},
            ),
        ],
    ),
    Scenario(
        "a collision in the rack passes the root as a resend",
        [
            Step({**W0, "seq": 6, "values": [5]}),
            Step({**W0, "values": [1]}, [{"to": "ps", "collision": 1, "resend": 1}]),
            Step(
                {**W2, "values": [100]},
                rack={"allocated": 1, "aggregated": 1, "collisions": 1},
                root={"allocated": 1, "aggregated": 1, "resend_passed": 1},
            ),
            Step({**W1, "values": [10]}, [{"to": "ps", "collision": 1, "resend": 1}]),
        ],
    ),
    Scenario(
        "a duplicate of a complete sum is answered by the rack and by the root",
        [
            Step({**W2, "values": [100]}),
            Step({**W0, "values": [1]}),
            Step({**W1, "values": [10]}, [{"to": "ps", "b0": 3, "b1": 3, "edge": 1, "values": [111]}]),
            Step({**W1, "values": [10]}, [{"to": "ps", "b0": 3, "b1": 3, "edge": 1, "values": [111]}]),
            Step(
                {**W2, "values": [100]},
                [{"to": "ps", "b1": 3, "values": [111]}],
                rack={"allocated": 1, "aggregated": 2, "completed": 1, "reemitted": 1},
                root={"allocated": 1, "aggregated": 2, "completed": 1, "reemitted": 2},
            ),
        ],
    ),
    Scenario(
        "congestion at one worker reaches the PS through both sums, and all workers in the result",
        [
            Step({**W0, "values": [1]}),
            Step(
                {**W1, "ce": True, "values": [10]},
                rack={"allocated": 1, "aggregated": 2, "completed": 1, "ecn_marked": 1},
            ),
            Step({**W2, "values": [100]}, [{"to": "ps", "b1": 3, "ecn": 1, "values": [111]}]),
            Step({**ACK, "ecn": 1, "values": [111]}, copies("w0", "w1", "w2")),
        ],
    ),
    Scenario(
        "repeats of all workers add the gradient that was lost, and bring one copy of each rack's result",
        [
            Step({**W2, "values": [100]}),
            Step({**W1, "values": [10]}),
            Step(
                {**W0, "collision": 1, "values": [1]},
                [{"to": "ps", "b0": 3, "b1": 3, "edge": 1, "collision": 0, "values": [111]}],
                rack={"allocated": 1, "aggregated": 2, "completed": 1},
                root={"allocated": 1, "aggregated": 2, "completed": 1},
            ),
            Step(
                {**W1, "collision": 1, "values": [10]},
                rack={"allocated": 1, "aggregated": 2, "completed": 1, "duplicates": 1},
            ),
            # Bit 0 of the rack, and of the racks: the result again, as a repeat of the rack.
            Step(
                {**W0, "collision": 1, "values": [1]},
                [{"to": "ps", "b0": 3, "b1": 3, "edge": 1, "values": [111]}],
                root={"allocated": 1, "aggregated": 2, "completed": 1, "reemitted": 1},
            ),
            Step(
                {**W2, "collision": 1, "values": [100]},
                root={"allocated": 1, "aggregated": 2, "completed": 1, "reemitted": 1, "duplicates": 1},
            ),
        ],
    ),
    Scenario(
        "a repeat that finds nobody waiting passes both switches and allocates nothing",
        [
            Step(
                {**W0, "collision": 1, "values": [1]},
                [{"to": "ps"}],
                rack={"resend_passed": 1},
                root={"passed_transit": 1},
            ),
            Step(
                {**W2, "collision": 1, "values": [100]}, [{"to": "ps"}], root={"passed_transit": 1, "resend_passed": 1}
            ),
        ],
    ),
    Scenario(
        "an ACK for one worker releases on its way and reaches that one alone",
        [
            Step({**W0, "values": [1]}),
            Step({**W1, "values": [10]}),
            Step({**ACK, "edge": 1, "dst": "w1"}, copies("w1")),
            Step(
                {**W0, "values": [1]},
                rack={"allocated": 2, "aggregated": 3, "completed": 1, "released": 1},
                root={"allocated": 1, "aggregated": 1, "released": 1},
            ),
        ],
    ),
    Scenario(
        "raw packets pass both switches, in both directions",
        [
            Step({**W0, "raw": 1, "values": [-1, 3]}, [{"to": "ps"}]),
            Step(
                {**ACK, "raw": 1, "dst": "w1", "values": [7]},
                copies("w1"),
                rack={"passed_raw_float": 2},
                root={"passed_raw_float": 2},
            ),
        ],
    ),
    Scenario(
        "nobody speaks for another worker or another rack",
        [
            Step({**W0, "b0": 2, "values": [1]}, rack={"rejected_bit": 1}),
            Step({**W0, "edge": 1, "values": [1]}, rack={"rejected_bit": 2}),
            Step({**W2, "b1": 1, "values": [1]}, root={"rejected_bit": 1}),
            Step({**W2, **ACK, "port": "w2"}, root={"rejected_bit": 1, "rejected_ack_source": 1}),
            Step({**ACK, "port": "w0", "dst": "w1"}, rack={"rejected_bit": 2, "rejected_ack_source": 1}),
        ],
    ),
    Scenario(
        "the sum of racks saturates as one of workers does",
        [
            Step({**W0, "values": [2**31 - 10, -(2**31) + 10]}),
            Step({**W1, "values": [100, -100]}),
            Step({**W2, "values": [-5, 5]}, [{"to": "ps", "b1": 3, "values": [2**31 - 1, -(2**31)]}]),
        ],
    ),
]


class Pair(Protocol):
    """Two switches with the tables of one job of three workers."""

    def send(self, packet: Packet, dst: str, expected: int) -> list[Packet]:
        """What hosts get for one packet of a host, in order of ports."""

    def all_counters(self) -> dict[str, dict[int, dict[str, int]]]:
        """By switch, by job."""

    def close(self) -> None: ...


class NativePair:
    """Two C cores; what one sends to a host of the other goes there."""

    def __init__(self) -> None:
        self.switches = {name: NativeSwitch(16, VALUES, STALE_NS) for name in HOSTS}
        for name, switch in self.switches.items():
            switch.set_clock(START_MS * 1_000_000)
            fill(name, switch)

    def send(self, packet: Packet, dst: str, expected: int) -> list[Packet]:
        del expected
        name = next(name for name, hosts in HOSTS.items() if packet.port in hosts)
        waiting = [(name, packet.port, dst, packet.ce, packet.payload())]
        got: list[Packet] = []
        while waiting:
            name, port, dst, ce, payload = waiting.pop(0)
            for _, host, data in self.switches[name].process(port, dst, ce, payload):
                if host in HOSTS[name]:
                    got.append(Packet.parse(host, data))
                else:
                    waiting.append((OTHER[name], LINK, host, False, data))
        return sorted(got, key=lambda p: PORTS.index(p.port))

    def all_counters(self) -> dict[str, dict[int, dict[str, int]]]:
        return {name: of_every_job(switch.counters) for name, switch in self.switches.items()}

    def close(self) -> None:
        for switch in self.switches.values():
            switch.close()


def fill(name: str, switch: Any) -> None:
    """The tables of one of the two."""
    pairs = COPIES[name]
    if isinstance(switch, NativeSwitch):
        replicas = (Replica * len(pairs))()
        for replica, (port, host) in zip(replicas, pairs, strict=True):
            replica.port, replica.dst_ip = switch.port_number(port), ip_number(address_of(host))
            replica.dst_mac = type(replica.dst_mac)(*mac_of(host))
        switch.check(switch.library.atp_switch_set_group(switch.handle, GROUP, replicas, len(pairs)), "set_group")
    else:
        switch.set_copies(GROUP, pairs)
    if name == "rack":
        switch.set_job(JOB, VALUES, 0b11, 0, GROUP, REGIONS)
        switch.admit(JOB, "w0", 0, 1)
        switch.admit(JOB, "w1", 0, 2)
        switch.ps_port(JOB, LINK)
    else:
        switch.set_job(JOB, VALUES, 0, 0b11, GROUP, REGIONS)
        switch.admit(JOB, LINK, 1, 1)
        switch.admit(JOB, "w2", 1, 2)
        switch.transit(JOB, LINK, 1, 0b11)
        switch.ps_port(JOB, "ps")


class Wires(NetworkNamespace):
    """A veth pair for each host, and one between the two switches."""

    def build(self, mtu: int) -> None:
        no_ipv6()
        run("ip", "link", "set", "lo", "up")
        for name, hosts in HOSTS.items():
            for host in hosts:
                veth(f"{name}-{host}", f"p-{host}", mtu, mac_of(host).hex(":"))
        veth(f"rack-{LINK}", f"root-{LINK}", mtu, "02:0a:79:00:01:00")


class Bmv2Tables(P4RuntimeTables):
    """The tables of one of the two processes."""

    def __init__(self, name: str, thrift_port: int) -> None:
        self.ports = [*HOSTS[name], LINK]
        self.held = {}
        self.process = Bmv2Process({self.port_number(port): f"{name}-{port}" for port in self.ports}, thrift_port)
        self.controller = self.process.controller
        self.controller.entry(MODIFY, "stale_time", {}, "set_stale_time", [int(STALE_MS * PACE * 1000)])
        for host in (*HOSTS["rack"], *HOSTS["root"]):
            port = host if host in HOSTS[name] else LINK
            match: dict[str, int | tuple[int, int]] = {"dst_mac": int.from_bytes(mac_of(host), "big")}
            self.controller.entry(INSERT, "l2_forward", match, "forward", [self.port_number(port)])
        fill(name, self)

    def port_number(self, port: str) -> int:
        return self.ports.index(port) + 1


class Bmv2Pair(Bmv2Exchange):
    """Two bmv2 in one network namespace, with a wire between them."""

    name = "bmv2-pair"

    def __init__(self) -> None:
        self.sockets: dict[str, socket.socket] = {}
        self.switches: dict[str, Bmv2Tables] = {}
        self.network = Wires(1500)
        try:
            for number, name in enumerate(HOSTS):
                self.switches[name] = Bmv2Tables(name, 9090 + number)
            for host in (*HOSTS["rack"], *HOSTS["root"]):
                s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
                s.bind((f"p-{host}", 0x0800))
                s.setblocking(False)
                self.sockets[host] = s
        except BaseException:
            self.close()
            raise

    def all_counters(self) -> dict[str, dict[int, dict[str, int]]]:
        return {name: without_bytes(switch.controller.counters()) for name, switch in self.switches.items()}

    def close(self) -> None:
        for s in self.sockets.values():
            s.close()
        for switch in self.switches.values():
            switch.process.close()
        self.network.close()


def answers_of(scenario: Scenario, kind: Callable[[], Pair]) -> list[dict[str, Any]]:
    """Run a scenario on new switches, checking all it says; what they answered, by step."""
    pair = kind()
    answered: list[dict[str, Any]] = []
    try:
        for number, step in enumerate(scenario.steps):
            fields = merge(SHARED, step.packet)
            wanted = []
            for changes in step.out:
                after = merge(fields, {k: v for k, v in changes.items() if k != "to"})
                after["port"] = changes["to"]
                after.pop("ce", None)
                wanted.append(packet_of(after, VALUES))
            packet = packet_of(fields, VALUES)
            got = pair.send(packet, fields.get("dst", "ps"), len(wanted))
            assert got == wanted, f"step {number}"
            counters = pair.all_counters()
            for name, expected in (("rack", step.rack), ("root", step.root)):
                if expected is not None:
                    assert counters[name].get(JOB, {}) == expected, f"step {number}: counters of {name}"
            exchange = {"in": describe(packet, "port"), "out": [describe(answer, "to") for answer in got]}
            answered.append({"packets": [exchange], "counters": counters})
    finally:
        pair.close()
    return answered


def path_of_scenario(scenario: Scenario) -> Path:
    """Where its recording is."""
    return path_of("bmv2", f"two-levels: {scenario.name}")


__all__ = ["SCENARIOS", "Bmv2Pair", "NativePair", "Scenario", "answers_of", "path_of_scenario"]
