# SPDX-License-Identifier: Apache-2.0
"""bmv2's own queue in place of the vectors' phantom one: sums leave with ECN while more than the threshold wait."""

from __future__ import annotations

import socket

import pytest
from bmv2.p4runtime import MODIFY
from bmv2.process import reason_not_to_run
from bmv2_switch import Bmv2Switch
from conformance.switches import NO_REPLY_SECONDS, Packet, frame_of, payload_of

from atp_api.wire import Header

MISSING = reason_not_to_run()
pytestmark = [pytest.mark.root, pytest.mark.skipif(MISSING is not None, reason=MISSING or "")]
PACKETS_A_SECOND = 20
THRESHOLD = 3
SENT = 10


def test_sums_are_marked_while_the_queue_of_their_port_is_long() -> None:
    switch = Bmv2Switch()
    try:
        switch.set_group(1, ["w0"])
        switch.set_job(1, 62, 0b1, 0, 1, [(0, 64)])
        switch.admit(1, "w0", 0, 1)
        switch.ps_port(1, "ps")
        switch.controller.entry(MODIFY, "ecn_threshold", {}, "set_ecn_threshold", [THRESHOLD])
        switch.thrift.set_queue_rate(switch.port_number("ps"), PACKETS_A_SECOND)
        for sequence in range(SENT):
            packet = Packet(
                "w0",
                Header(job_id=1, sequence=sequence, bitmap0=1, bitmap1=1, fan_in_degree0=1, aggregator_index=sequence),
                (sequence,) * 62,
            )
            switch.sockets["w0"].send(frame_of(packet.payload(), "w0", "ps"))
        ps = switch.sockets["ps"]
        ps.settimeout(NO_REPLY_SECONDS)
        sums: list[Packet] = []
        while len(sums) < SENT:
            frame, link = ps.recvfrom(2048)
            if link[2] != socket.PACKET_OUTGOING:
                sums.append(Packet.parse("ps", payload_of(frame)))
    finally:
        switch.close()
    assert [p.header.sequence for p in sums] == list(range(SENT))
    assert all(p.values == (p.header.sequence,) * 62 and p.header.edge_switch_identifier for p in sums)
    marks = [p.header.ecn for p in sums]
    # Those with more than the threshold behind them; the queue only drains, so no mark comes after one without.
    assert 1 in marks[1:3], marks
    assert marks[-THRESHOLD:] == [0] * THRESHOLD, marks
