# SPDX-License-Identifier: Apache-2.0
"""Which interfaces are attached, as they come and go. The real hooks: tests/switch_agent/test_host_veth.py."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Sequence

import pytest

from atp_softswitch.errors import DataplaneError
from atp_softswitch.ports import Link, PortKeeper, Selection, no_interface, no_neighbour

POD = Link(11, "veth1", "veth", True)
LOCAL_VETH = Link(12, "veth2", "veth", False)
NIC = Link(2, "eth0", "", False)
BRIDGE = Link(5, "cni0", "bridge", False)
LINKS = [POD, LOCAL_VETH, NIC, BRIDGE]


class Hook:
    """Remembers what is attached, and the addresses of pods; `errors` by ifindex."""

    def __init__(self) -> None:
        self.attached: set[int] = set()
        self.errors: dict[int, int] = {}
        self.sources: dict[int, tuple[int, ...]] = {}

    def set_sources(self, ifindex: int, addresses: Sequence[int]) -> None:
        self.sources[ifindex] = tuple(addresses)

    def delete_sources(self, ifindex: int) -> None:
        del self.sources[ifindex]

    def attach(self, ifindex: int) -> None:
        if ifindex in self.errors:
            raise DataplaneError("attach", self.errors[ifindex], "refused")
        assert ifindex not in self.attached
        self.attached.add(ifindex)

    def detach(self, ifindex: int) -> None:
        self.attached.remove(ifindex)
        if ifindex in self.errors:
            raise DataplaneError("detach", self.errors[ifindex], "gone")


@pytest.mark.parametrize(
    ("words", "used", "wanted"),
    [
        (["veth"], set(), {11}),
        (["veth"], {2, 99}, {11, 2}),
        (["none"], {2}, set()),
        (["eth0"], set(), {2}),
        (["veth,eth0"], set(), {11, 2}),
        (["veth", "eth0"], set(), {11, 2}),
    ],
)
def test_selection(words: list[str], used: set[int], wanted: set[int]) -> None:
    assert set(Selection.parse(words).wanted(LINKS, used)) == wanted


def test_what_xdp_has_tc_leaves_alone() -> None:
    assert set(Selection.parse(["veth"], never=["eth0"]).wanted(LINKS, {2})) == {11}


def test_interfaces_come_and_go() -> None:
    hook, used = Hook(), set[int]()
    keeper = PortKeeper("tc", hook, hook, Selection.parse(["veth"]), lambda: used)
    keeper.reconcile(LINKS)
    assert hook.attached == {11}
    keeper.reconcile([*LINKS, Link(13, "veth3", "veth", True)])
    assert hook.attached == {11, 13}
    used.add(NIC.ifindex)
    keeper.reconcile(LINKS)
    assert hook.attached == {11, 2}
    used.clear()
    hook.errors[11] = errno.ENODEV  # it vanished, and its hook with it
    keeper.reconcile([NIC])
    assert hook.attached == set() and not keeper.attached
    hook.errors.clear()
    keeper.reconcile(LINKS)
    keeper.close()
    assert hook.attached == set()


def test_what_pods_have_as_addresses_is_told_before_they_are_attached() -> None:
    hook = Hook()
    keeper = PortKeeper("tc", hook, hook, Selection.parse(["veth"]))
    new = Link(13, "veth3", "veth", True, ())
    hook.errors[13] = errno.EPERM
    keeper.reconcile([POD, new, NIC])
    assert hook.sources == {13: ()} and hook.attached == {11}
    assert keeper.waiting, "an address inside a pod raises no event here"
    hook.errors.clear()
    keeper.reconcile([POD, Link(13, "veth3", "veth", True, (7, 8)), NIC])
    assert hook.sources == {13: (7, 8)} and not keeper.waiting
    keeper.reconcile([POD, Link(13, "veth3", "veth", True, None), NIC])
    assert hook.sources == {13: (7, 8)}, "what was known holds while the kernel does not say"
    keeper.reconcile([POD, Link(13, "veth3", "veth", True, tuple(range(1, 11))), NIC])
    assert hook.sources == {13: tuple(range(1, 9))}
    keeper.reconcile([POD, Link(13, "veth3", "veth", True, None, uplink=True), NIC])
    assert hook.sources == {} and hook.attached == {11, 13}, "the node is a container, and that its way out"
    keeper.reconcile([POD, Link(13, "veth3", "veth", True, (7,)), NIC])
    hook.errors[13] = errno.ENODEV
    keeper.reconcile([NIC])
    assert hook.sources == {}


def test_a_pod_that_never_has_an_address_is_not_watched_for_ever() -> None:
    """One with IPv6 alone: looking at all pods five times a second would be for nothing."""
    hook = Hook()
    keeper = PortKeeper("tc", hook, hook, Selection.parse(["veth"]))
    bare = Link(13, "veth3", "veth", True, ())
    looks = 0
    while looks == 0 or keeper.waiting:
        keeper.reconcile([bare])
        looks += 1
        assert looks < 100
    assert looks > 10 and hook.sources == {13: ()}
    keeper.reconcile([bare, Link(14, "veth4", "veth", True, ())])
    assert keeper.waiting, "the next new pod is"
    keeper.reconcile([bare])
    assert not keeper.waiting


def test_a_refused_interface_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    hook = Hook()
    keeper = PortKeeper("tc", hook, hook, Selection.parse(["veth", "eth0"]))
    hook.errors[NIC.ifindex] = errno.EPERM
    keeper.reconcile(LINKS)
    keeper.reconcile(LINKS)
    assert keeper.missing == ["eth0"]
    assert [record.message for record in caplog.records].count("cannot attach") == 1, "said once"
    hook.errors.clear()
    keeper.reconcile(LINKS)
    assert keeper.missing == [] and hook.attached == {11, 2}


def test_ports_that_do_not_exist() -> None:
    assert no_interface(socket.if_nametoindex("lo")) is None
    for number in (0, 987_654, 1 << 32):
        assert f"port {number} does not exist" in str(no_interface(number))
    assert no_neighbour(int(ipaddress.IPv4Address("10.0.0.7"))) is None
    for address in ("0.0.0.0", "224.0.0.1", "255.255.255.255"):
        assert f"no host is {address}" in str(no_neighbour(int(ipaddress.IPv4Address(address))))
