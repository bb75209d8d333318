# SPDX-License-Identifier: Apache-2.0
"""The conformance vectors on the compiled bmv2 program, registers included, without bmv2."""

from __future__ import annotations

from typing import Any

import pytest
from bmv2_vectors import Lazily, reason_to_skip
from conformance.switches import Packet, frame_of, mac_of
from conformance.test_vectors import OF_P4, START_MS, prepare
from json_switch import PROGRAM, JsonSwitch

from atp_api.wire import Header

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason=f"{PROGRAM.name} is not built: make -C p4 bmv2")


@pytest.mark.parametrize(("setup", "vector"), [pytest.param(s, v, id=n) for n, s, v in OF_P4])
def test_vector(setup: dict[str, Any], vector: dict[str, Any]) -> None:
    reason = reason_to_skip(setup, vector)
    if reason is not None:
        pytest.skip(reason)
    switch = JsonSwitch()
    switch.set_clock(START_MS * 1_000_000)
    prepare(switch, setup)  # type: ignore[arg-type]
    Lazily(switch, setup, vector).run()  # type: ignore[arg-type]


def test_ordinary_traffic_leaves_as_it_came() -> None:
    switch = JsonSwitch()
    arp = mac_of("ps") + mac_of("w0") + b"\x08\x06" + bytes(46)
    other_udp = frame_of(b"x" * 300, "w0", "ps", udp_port=53)
    fragment = frame_of(bytes(264), "w0", "ps", fragment=0x2000)
    options = frame_of(bytes(264), "w0", "ps", options=bytes(4))
    for frame in (arp, other_udp, fragment, options):
        assert switch.exchange("w0", frame) == [("ps", frame)]
    assert switch.exchange("w0", bytes([2, 9, 9, 9, 9, 9]) + arp[6:]) == []


def test_hosts_get_no_fragments_and_no_options() -> None:
    """The parser sees neither behind options nor into later fragments; between strangers both are ordinary traffic."""
    switch = JsonSwitch()
    for host, role in (("w0", "worker"), ("ps", "ps")):
        switch.set_host(1, host, host, role, int(role == "worker"), int(role == "worker"))
    own = Packet("w0", Header(job_id=1, bitmap0=1, bitmap1=1, raw_float=1), (7,) * 62).payload()
    odd = [frame_of(own, "w0", "ps", fragment=0x2000), frame_of(own, "w0", "ps", options=bytes(4))]
    later = frame_of(own, "w0", "ps", fragment=0x2004)
    other = frame_of(b"x" * 300, "w0", "ps", udp_port=53, fragment=0x2000)
    whole = frame_of(own, "w0", "ps")
    assert [switch.exchange("w0", frame) for frame in odd] == [[], []]
    assert switch.drops() == {"w0": {"malformed": 2}}
    assert [switch.exchange("w0", frame) for frame in (later, other, whole)] == [
        [("ps", later)],
        [("ps", other)],
        [("ps", whole)],
    ]
    for frame in (frame_of(own, "w2", "w3", fragment=0x2000), frame_of(own, "w2", "w3", options=bytes(4))):
        assert switch.exchange("w2", frame) == [("w3", frame)]
    assert switch.exchange("w2", frame_of(own, "w2", "ps", options=bytes(4))) == []
    assert switch.drops()["w2"] == {"source": 1}


def test_broadcast_goes_to_the_group_that_flooding_names() -> None:
    switch = JsonSwitch()
    switch.groups[77] = ["w1", "ps"]
    switch.insert("AtpIngress.l2_forward", [0xFFFFFFFFFFFF], "AtpIngress.flood", [77])
    arp = b"\xff" * 6 + mac_of("w0") + b"\x08\x06" + bytes(46)
    assert switch.exchange("w0", arp) == [("w1", arp), ("ps", arp)]
