# SPDX-License-Identifier: Apache-2.0
"""Pods on a bridge: where they are, and a sum through tc between them. The pods are network namespaces of the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from switch_agent.process import ask_agent

from atp_switch_agent.host_veth import ForwardingEntry, HostVethPorts, HostView, Neighbour, Route
from atp_switch_agent.planner import EndpointKey, Port
from atp_switch_agent.resolver import Unresolved

SO_NO_CHECK = 11
REPOSITORY = Path(__file__).resolve().parents[2]
MAC = 0x0AFE00000001

needs_root = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces: needs root"),
]


# -- the rule, without a host ----------------------------------------------------------------------


def view(kinds: dict[int, str], mac: int | None = MAC, port: int | None = None) -> HostView:
    neighbours = [] if mac is None else [Neighbour(5, "10.0.0.1", mac)]
    forwarding = [] if port is None else [ForwardingEntry(5, port, MAC)]
    return HostView.of(kinds, neighbours, forwarding)


KEY = EndpointKey("10.0.0.1")
ROUTE = Route(5, "10.0.0.1", False)


@pytest.mark.parametrize(
    ("host", "route", "port", "ask"),
    [
        (view({5: "bridge"}, port=8), ROUTE, Port(8, MAC), False),
        (view({5: "veth"}), ROUTE, Port(5, MAC), False),
        (view({5: ""}), ROUTE, Port(5, MAC), False),
        (view({5: "bridge"}), ROUTE, None, True),
        (view({5: "bridge"}, mac=None), ROUTE, None, True),
        (view({}), None, None, False),
        (view({5: ""}), Route(1, "10.0.0.1", True), None, False),
    ],
)
def test_locate(host: HostView, route: Route | None, port: Port | None, ask: bool) -> None:
    answer, provoke = host.locate(KEY, route)
    assert provoke == ask
    if port is None:
        assert isinstance(answer, Unresolved) and "10.0.0.1" in answer.message
    else:
        assert answer == port


def test_an_interface_that_does_not_exist_is_wrong_not_late() -> None:
    key = EndpointKey("10.0.0.1", port=987_654, mac=5)
    answer = asyncio.run(HostVethPorts().resolve([key]))[key]
    assert isinstance(answer, Unresolved) and answer.wrong
    assert "this host has no interface with that index" in answer.message
    real = EndpointKey("10.0.0.1", port=socket.if_nametoindex("lo"), mac=5)
    assert asyncio.run(HostVethPorts().resolve([real]))[real] == Port(real.port, 5)


# -- on a host -------------------------------------------------------------------------------------


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


@dataclass
class Node:
    """A node's namespace with a bridge, pods behind it, and one pod with a /32 route."""

    name: str
    pods: dict[str, str]

    def ifindex(self, device: str) -> int:
        return int(json.loads(ip("-j", "-n", self.name, "link", "show", "dev", device))[0]["ifindex"])

    def mac(self, address: str) -> str:
        pod = self.pods[address]
        return str(json.loads(ip("-j", "-n", pod, "link", "show", "dev", "eth0"))[0]["address"])

    def command(self) -> tuple[str, ...]:
        """Prefix that runs a command on the node."""
        return ("ip", "netns", "exec", self.name)

    def run(self, *command: str, **named: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self.command(), *command], capture_output=True, text=True, check=False, **named)

    def resolve(self, *addresses: str, wait: str = "3") -> list[str]:
        command = [sys.executable, "-m", "atp_switch_agent", "resolve", "--ports", "host-veth", "--wait", wait]
        done = self.run(*command, *addresses, cwd=REPOSITORY)
        return done.stdout.splitlines() or [done.stderr]

    def socket(self, address: str, port: int = 10800) -> socket.socket:
        """A UDP socket of a pod, at the ATP port unless told otherwise."""
        made: list[socket.socket] = []

        def enter() -> None:
            from pyroute2 import netns

            netns.setns(self.pods[address])
            opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            opened.setsockopt(socket.SOL_SOCKET, SO_NO_CHECK, 1)
            opened.bind((address, port))
            opened.settimeout(3)
            made.append(opened)

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        return made[0]


BRIDGED = ("10.88.0.11", "10.88.0.12", "10.88.0.13", "10.88.0.9")
ROUTED = "10.99.0.1"


@pytest.fixture
def node() -> Iterator[Node]:
    prefix = f"atpt{os.getpid() % 100000}"
    made = Node(f"{prefix}n", {})
    with contextlib.ExitStack() as stack:

        def namespace(name: str) -> None:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            ip("-n", name, "link", "set", "lo", "up")

        def pod(number: int, address: str, device: str) -> str:
            name = f"{prefix}p{number}"
            namespace(name)
            made.pods[address] = name
            ip("-n", made.name, "link", "add", device, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", made.name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "eth0", "up")
            return name

        namespace(made.name)
        ip("-n", made.name, "link", "add", "cni0", "type", "bridge")
        ip("-n", made.name, "addr", "add", "10.88.0.1/24", "dev", "cni0")
        ip("-n", made.name, "link", "set", "cni0", "up")
        for number, address in enumerate(BRIDGED):
            name = pod(number, address, f"vethb{number}")
            ip("-n", made.name, "link", "set", f"vethb{number}", "master", "cni0")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        name = pod(9, ROUTED, "cali9")
        ip("-n", made.name, "addr", "add", "169.254.1.1/32", "dev", "cali9")
        ip("-n", made.name, "route", "add", f"{ROUTED}/32", "dev", "cali9")
        ip("-n", name, "addr", "add", f"{ROUTED}/32", "dev", "eth0")
        ip("-n", name, "route", "add", "169.254.1.1", "dev", "eth0")
        ip("-n", name, "route", "add", "default", "via", "169.254.1.1")
        assert made.run("sysctl", "-q", "-w", "net.ipv4.ip_forward=1").returncode == 0
        yield made


class TestResolver:
    pytestmark = needs_root

    def test_pods_of_a_node(self, node: Node) -> None:
        """Nobody has spoken yet: the resolver makes them answer, then finds bridge ports and the routed pod."""
        lines = node.resolve(*BRIDGED, ROUTED)
        expected = [
            f"{address} port {node.ifindex(f'vethb{number}')} mac {node.mac(address)}"
            for number, address in enumerate(BRIDGED)
        ]
        assert lines == [*expected, f"{ROUTED} port {node.ifindex('cali9')} mac {node.mac(ROUTED)}"]

    def test_what_has_no_port(self, node: Node) -> None:
        lines = node.resolve("10.88.0.77", "10.88.0.1", "203.0.113.5", wait="1")
        assert lines == [
            "10.88.0.77 unresolved: 10.88.0.77 has not answered ARP yet; is its pod running?",
            "10.88.0.1 unresolved: 10.88.0.1 is an address of this host itself, not of a pod",
            "203.0.113.5 unresolved: no route to 203.0.113.5 on this host",
        ]


def gradient(rank: int, sequence: int, values: list[int], *, ack: bool = False) -> bytes:
    bitmap0 = 0b111 if ack else 1 << rank
    flags = 3 << 27 | 1 << 22 | int(ack) << 17 | 5
    return struct.pack(f">4I{len(values)}i", 7 << 24 | sequence, bitmap0, 1, flags, *values)


class TestTc:
    """The whole product path on one node: agent, P4Runtime, BPF between the pods."""

    pytestmark = needs_root

    def test_a_sum_between_pods(
        self, node: Node, processes: Callable[..., Any], library: Path, until: Callable[..., Any]
    ) -> None:
        from atp_api.switchagent.v1alpha1 import switchagent_pb2 as api

        switch = processes(
            "atp_softswitch",
            *("serve", "--listen", "127.0.0.1:0", "--health-listen", "127.0.0.1:0", "--library", str(library)),
            *("--mode", "tc", "--attach", "veth", "--aggregators", "256", "--values", "62"),
            prefix=node.command(),
        )
        agent = processes(
            "atp_switch_agent",
            *("serve", "--switch-name", "sw", "--listen", "127.0.0.1:0", "--health-listen", "127.0.0.1:0"),
            *("--insecure-loopback", "--p4runtime", f"127.0.0.1:{switch.started['p4runtime_port']}"),
            *("--ports", "host-veth"),
            prefix=node.command(),
        )
        workers, server = BRIDGED[:3], BRIDGED[3]
        wanted = api.DesiredState(switch_name="sw", generation=1, writer="test")
        job = wanted.jobs.add(job_id=7, epoch=1, uid="u", name="ns/j", values=62, multicast_group=3)
        job.regions.add(start=0, size=64)
        job.parameter_servers.add(address=server)
        for rank, address in enumerate(workers):
            job.members.add(rank=rank, bit=rank).endpoint.address = address
        guard = wanted.guards.add(job_id=7, epoch=1, uid="u", name="ns/j")
        guard.hosts.add(parameter_server=True).endpoint.address = server
        for rank, address in enumerate(workers):
            guard.hosts.add(bit=rank).endpoint.address = address

        def apply() -> api.Telemetry:
            return ask_agent(node.command(), agent, wanted)

        told = apply()
        assert told.observed.in_sync, (told.observed, agent.lines)
        with contextlib.ExitStack() as stack:
            sockets = {address: stack.enter_context(node.socket(address)) for address in BRIDGED}
            for sequence in range(3):
                for rank, address in enumerate(workers):
                    sockets[address].sendto(gradient(rank, sequence, [rank + 1] * 62), (server, 10800))
                received = sockets[server].recv(4096)
                assert struct.unpack(">62i", received[16:]) == (6,) * 62
                sockets[server].sendto(gradient(0, sequence, [6] * 62, ack=True), (workers[0], 10800))
                for address in workers:
                    assert struct.unpack(">62i", sockets[address].recv(4096)[16:]) == (6,) * 62
            # A worker that pretends to be another one is stopped at its own port.
            sockets[workers[0]].sendto(gradient(1, 9, [100] * 62), (server, 10800))
            sockets[server].settimeout(0.3)
            with pytest.raises(TimeoutError):
                sockets[server].recv(4096)
            # So is a pod of somebody else, whatever it sends; and the switch says which pod that was.
            with node.socket(ROUTED) as stranger, node.socket(server, 9000) as other:
                stranger.sendto(b"other traffic", (server, 9000))
                assert other.recv(100) == b"other traffic"
                for data in (gradient(0, 10, [100] * 62), struct.pack(">4I", 7 << 24 | 10, 1, 1, 1 << 16), b"x"):
                    stranger.sendto(data, (server, 10800))
                stranger.sendto(gradient(0, 0, [9] * 62, ack=True), (workers[0], 10800))
            with pytest.raises(TimeoutError):
                sockets[server].recv(4096)
            (stopped, strange) = sorted(apply().drops, key=lambda drops: drops.dropped["source"])
            assert (strange.address, strange.last_source, strange.port) == (ROUTED, ROUTED, node.ifindex("cali9"))
            assert dict(strange.dropped) == {
                "source": 4, "destination": 0, "malformed": 0, "forged": 0, "admission": 0
            }  # fmt: skip
            assert (stopped.address, stopped.dropped["admission"]) == (workers[0], 1)
        counters = {item.job_id: dict(item.counters) for item in apply().jobs}[7]
        assert (counters["aggregated"], counters["completed"], counters["acks"]) == (9, 3, 3)
        assert counters["rejected_bit"] == 1

        # A pod that goes takes its port along: the job waits, and the switch goes on.
        ip("-n", node.name, "link", "del", "vethb2")
        until(lambda: any("PENDING" in str(line.get("jobs")) for line in agent.lines))
        until(lambda: any(line["message"] == "detached" for line in switch.lines))
        del job.members[2]
        del guard.hosts[3]
        wanted.generation = 2
        assert apply().observed.in_sync
        with node.socket(workers[0]) as worker, node.socket(server) as receiver:
            receiver.settimeout(0.3)
            worker.sendto(gradient(0, 20, [1] * 62), (server, 10800))
            with pytest.raises(TimeoutError):
                receiver.recv(4096)  # the switch keeps it until the other worker's comes
            assert agent.stop() == 0
            assert switch.stop() == 0
            worker.sendto(gradient(0, 21, [1] * 62), (server, 10800))
            receiver.settimeout(3)
            assert receiver.recv(4096)[:4] == struct.pack(">I", 7 << 24 | 21), "detached: ordinary traffic"
