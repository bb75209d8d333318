# SPDX-License-Identifier: Apache-2.0
"""Two passes with other packets in between: no packet may ever claim a coverage that its values are not the sum of."""

from __future__ import annotations

import random

import pytest
from conformance.switches import Packet
from conformance.test_vectors import STALE_NS
from p4_tables import TableSwitch

from atp_api.wire import Header

SEQUENCES = 4
STEPS = 80
RACKS = {1: ("w0", "w1"), 2: ("w2",)}
"""Rack bit and its workers: rack 1 is under this switch, rack 2 is one worker that enters level 1 directly."""


def value_of(worker: str, sequence: int, lane: int) -> int:
    """A number of its own for each worker, sequence and lane: no other set of workers has the same sum."""
    return (sequence + 1) * 1000 + int(10 ** int(worker[1])) * 7 + lane % 2


def sum_of(workers: list[str], sequence: int) -> tuple[int, ...]:
    return tuple(sum(value_of(w, sequence, lane) for w in workers) for lane in range(62))


def covered(h: Header) -> list[str]:
    """Workers that a packet says it holds (docs/protocol.md, Coverage)."""
    if h.edge_switch_identifier:
        return [w for bit, workers in RACKS.items() if h.bitmap1 & bit for w in workers]
    return [w for i, w in enumerate(RACKS[h.bitmap1]) if h.bitmap0 >> i & 1]


class Checked(TableSwitch):
    """Feeds a random packet in between the passes of some packets, and checks all that leaves."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(STALE_NS, two_passes=True, sticky=False)
        self.rng = rng
        self.depth = 0
        self.left = 0

    def process(self, packet: Packet, dst: str) -> list[Packet]:
        self.depth += 1
        if self.depth < 4 and self.rng.random() < 0.5:
            self.between_passes = self.random_packet()
        out = super().process(packet, dst)
        self.between_passes = None
        self.depth -= 1
        for p in out:
            if not p.header.is_ack:
                self.left += 1
                assert p.values == sum_of(covered(p.header), p.header.sequence), p.header
        return out

    def random_packet(self) -> Packet:
        sequence = self.rng.randrange(SEQUENCES)
        fields = {"job_id": 1, "sequence": sequence, "aggregator_index": sequence % 2}
        resend = int(self.rng.random() < 0.3)
        source = self.rng.choice(["w0", "w1", "w2", "up", "up0", "ps"])
        if source == "ps":
            return Packet("ps", Header(**fields, is_ack=1), (0,) * 62)
        if source in ("w0", "w1"):
            bit = 1 << int(source[1])
            return Packet(source, Header(**fields, bitmap0=bit, bitmap1=1, resend=resend), sum_of([source], sequence))
        if source == "w2":
            h = Header(**fields, bitmap0=1, bitmap1=2, edge_switch_identifier=1, resend=resend)
            return Packet("w2", h, sum_of(["w2"], sequence))
        if source == "up0":
            # On its way from another switch: a part of rack 1.
            return Packet("up", Header(**fields, bitmap0=1, bitmap1=1, resend=resend), sum_of(["w0"], sequence))
        h = Header(**fields, bitmap0=3, bitmap1=1, edge_switch_identifier=1, resend=resend)
        return Packet("up", h, sum_of(["w0", "w1"], sequence))


@pytest.mark.parametrize("seed", range(60))
def test_what_leaves_is_what_it_says(seed: int) -> None:
    rng = random.Random(seed)
    switch = Checked(rng)
    switch.set_group(1, ["w0", "w1", "w2", "up"])
    switch.set_job(1, 62, 0b11, 0b11, 1, [(0, 16)])
    for port, edge, bit in (("w0", 0, 1), ("w1", 0, 2), ("up", 1, 1), ("w2", 1, 2)):
        switch.admit(1, port, edge, bit)
    switch.transit(1, "up", 1, 0b11)
    switch.ps_port(1, "ps")
    now = 10 * STALE_NS
    for _ in range(STEPS):
        now += rng.choice([1_000, 1_000, 1_000_000, STALE_NS * 2 if rng.random() < 0.1 else 1_000])
        switch.set_clock(now)
        packet = switch.random_packet()
        switch.depth = 0
        switch.process(packet, "ps")
    assert switch.left > 10
    c = switch.counters(1)
    assert c["aggregated"] >= c["allocated"] > 0
    # Occupancy as the agent computes it: hardware cannot be asked.
    gone = sum(c.get(name, 0) for name in ("released", "resend_partials", "stale_takeovers"))
    assert switch.occupancy(1) == c["allocated"] - gone
