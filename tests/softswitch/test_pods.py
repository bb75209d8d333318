# SPDX-License-Identifier: Apache-2.0
"""Pods in network namespaces of their own, and the keeper that learns what addresses they have."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conformance.switches import BUILD, NetworkNamespace, address_of, ip_number, mac_of, run

from atp_api.wire import UDP_PORT
from atp_softswitch.library import SwitchLibrary
from atp_softswitch.ports import PortKeeper, Selection, list_links
from atp_softswitch.serve import TcHook

pytestmark = pytest.mark.root
PODS = ("w0", "w1", "w2")
SPOOF = """
import socket, struct, sys
source, to, port, payload = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4].encode()
udp = struct.pack(">HHHH", 4000, port, 8 + len(payload), 0) + payload
addresses = socket.inet_aton(source) + socket.inet_aton(to)
ip = struct.pack(">BBHHHBBH8s", 0x45, 0, 20 + len(udp), 1, 0, 64, 17, 0, addresses)
with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as s:
    s.sendto(ip + udp, (to, 0))
"""


class Node:
    """A node with a bridge, three pods, and the software switch's library and keeper on it."""

    def __init__(self) -> None:
        self.network = NetworkNamespace(1500)
        self.names = {pod: f"atp-{os.getpid()}-{pod}" for pod in PODS}
        self.library = SwitchLibrary(BUILD / "libatp_switch.so", bpf=True, aggregators=8, values=62, object_dir=BUILD)
        self.keeper = PortKeeper("tc", TcHook(self.library), self.library, Selection.parse(["veth"]))
        for name in self.names.values():
            run("ip", "netns", "add", name)
        for pod in PODS:
            run("ip", "link", "set", f"p-{pod}", "netns", self.names[pod])

    def give_address(self, pod: str) -> None:
        name = self.names[pod]
        run("ip", "-n", name, "address", "add", address_of(pod) + "/24", "dev", f"p-{pod}")
        run("ip", "-n", name, "link", "set", f"p-{pod}", "address", mac_of(pod).hex(":"))
        run("ip", "-n", name, "link", "set", f"p-{pod}", "up")

    def look(self) -> None:
        self.keeper.reconcile(list_links())

    def send(self, pod: str, to: str, payload: str, source: str | None = None, port: int = UDP_PORT) -> None:
        """From inside a pod, with NET_RAW."""
        address = address_of(source or pod)
        inside = ("ip", "netns", "exec", self.names[pod], "python3", "-c", SPOOF)
        run(*inside, address, address_of(to), str(port), payload)

    def listen(self, pod: str, port: int = UDP_PORT) -> socket.socket:
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        inside = os.open(Path("/run/netns") / self.names[pod], os.O_RDONLY)
        try:
            self.network.libc.setns(inside, 0)
            s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            s.bind(("", port))
            s.settimeout(2)
            return s
        finally:
            self.network.libc.setns(before, 0)
            os.close(before)
            os.close(inside)

    def drops(self) -> dict[str, dict[str, int]]:
        found = {}
        for drops in self.library.read_drops():
            pod = next((pod for pod in PODS if ip_number(address_of(pod)) == drops.address), "?")
            found[pod] = {reason: count for reason, count in drops.dropped.items() if count}
        return found

    def close(self) -> None:
        self.keeper.close()
        self.library.close()
        for name in self.names.values():
            subprocess.run(["ip", "netns", "delete", name], check=False)
        self.network.close()


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.close()


def test_no_pod_sends_with_anothers_address(node: Node) -> None:
    """Also when this node knows nothing of the job that the packet is for: the other node could not tell."""
    for pod in PODS:
        node.give_address(pod)
    node.look()
    with node.listen("w1") as atp, node.listen("w1", 9000) as other:
        node.send("w0", "w1", "own")
        assert atp.recvfrom(100) == (b"own", (address_of("w0"), 4000))
        node.send("w0", "w1", "forged", source="w2")
        node.send("w0", "w1", "nobody's", source="r0")
        node.send("w0", "w1", "not ATP", source="w2", port=9000)
        assert other.recv(100) == b"not ATP"
        node.send("w0", "w1", "own again")
        assert atp.recv(100) == b"own again"
    assert node.drops() == {"w0": {"source": 2}}
    (drops,) = node.library.read_drops()
    assert drops.last_source == ip_number(address_of("r0"))
    assert drops.port == socket.if_nametoindex("h-w0")


def test_a_pod_without_an_address_yet_sends_nothing_to_the_atp_port(node: Node) -> None:
    node.give_address("w1")
    run("ip", "-n", node.names["w0"], "link", "set", "p-w0", "up")
    node.look()
    assert node.keeper.waiting
    with node.listen("w1") as atp:
        node.give_address("w0")
        node.send("w0", "w1", "too early")
        node.look()
        node.send("w0", "w1", "known")
        assert atp.recv(100) == b"known"
    assert node.drops() == {"w0": {"source": 1}}


def test_addresses_inside_a_pod_are_the_kernels_word(node: Node) -> None:
    """Not what its packets say: ARP announcements of another's address change nothing."""
    for pod in PODS:
        node.give_address(pod)
    run("ip", "-n", node.names["w0"], "address", "add", "10.83.0.77/32", "dev", "lo")
    node.look()
    links = {link.name: link.addresses for link in list_links()}
    assert links["h-w0"] == (ip_number(address_of("w0")), ip_number("10.83.0.77"))
    assert links["h-w1"] == (ip_number(address_of("w1")),)
    assert links["br0"] is None
    run("bridge", "fdb", "replace", mac_of("w1").hex(":"), "dev", "h-w0", "master", "static")
    time.sleep(0.01)
    assert {link.name: link.addresses for link in list_links()}["h-w1"] == links["h-w1"]
