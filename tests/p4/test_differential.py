# SPDX-License-Identifier: Apache-2.0
"""Random packets: the bmv2 program answers what the C core does, packet by packet, with its counters and registers.

Everywhere by the interpreter of the compiled program; on bmv2 itself where it is installed, without the clock.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from bmv2.process import reason_not_to_run
from bmv2_switch import Bmv2Switch
from conformance.switches import NativeSwitch, Packet
from json_switch import JsonSwitch

from atp_api.wire import Header

VALUES = 62
AGGREGATORS = 16
STALE_NS = 100_000_000
WORKERS = ("w0", "w1", "w2")
LARGE = (2**31 - 1, -(2**31), 2**30, -(2**30), 2**31 - 2)
MISSING = reason_not_to_run()


def prepare(switch: Any) -> None:
    """Job 1: three workers here, level 1 of three racks (two behind ``up``, w3). Job 2 shares its aggregators."""
    switch.set_group(1, ["w0", "w1", "w2", "up", "w3"])
    switch.set_group(2, ["w0", "w3"])
    switch.set_job(1, VALUES, 0b111, 0b111, 1, [(0, 5), (6, 2)])
    switch.set_job(2, VALUES, 0b11, 0, 2, [(0, 8)])
    for bit, port in enumerate(WORKERS):
        switch.admit(1, port, 0, 1 << bit)
    switch.admit(1, "up", 1, 1)
    switch.admit(1, "up", 1, 2)
    switch.admit(1, "w3", 1, 4)
    switch.transit(1, "up", 1, 0b11)
    switch.transit(1, "up", 2, 0b1)
    switch.admit(2, "w0", 0, 1)
    switch.admit(2, "w3", 0, 2)
    for job in (1, 2):
        switch.ps_port(job, "ps")


def random_values(rng: random.Random) -> tuple[int, ...]:
    if rng.random() < 0.7:
        return tuple(rng.randint(-1000, 1000) for _ in range(VALUES))
    return tuple(rng.choice(LARGE) if rng.random() < 0.3 else rng.randint(-(2**29), 2**29) for _ in range(VALUES))


def random_packet(rng: random.Random) -> tuple[Packet, str]:
    """A packet that is mostly plausible, and whom it is for."""
    kind = rng.random()
    port, job, edge, ack = rng.choice(WORKERS), 1, 0, 0
    bits = 1 << WORKERS.index(port), 1
    if kind < 0.15:
        port, edge, bits = "up", 1, (3, rng.choice([1, 2]))
    elif kind < 0.25:
        port, edge, bits = "w3", 1, (1, 4)
    elif kind < 0.35:
        port, bits = "up", (rng.choice([1, 2, 3]), rng.choice([1, 2]))
    elif kind < 0.45:
        job, port = 2, rng.choice(["w0", "w3"])
        bits = (1 if port == "w0" else 2), 1
    elif kind < 0.51:
        port, ack, bits, job, edge = "ps", 1, (0, 7), rng.choice([1, 1, 1, 2]), int(rng.random() < 0.3)
    if rng.random() < 0.05:
        port = rng.choice(["w0", "w1", "w2", "w3", "up", "ps"])
    if rng.random() < 0.03:
        bits = rng.getrandbits(4), rng.getrandbits(3)
    sequence = rng.randrange(3)
    header = Header(
        job_id=job if rng.random() < 0.98 else 9,
        sequence=(0, 1, 0xFFFFFF)[sequence],
        bitmap0=bits[0],
        bitmap1=bits[1],
        fan_in_degree0=3,
        fan_in_degree1=3,
        edge_switch_identifier=edge,
        resend=int(rng.random() < 0.2),
        collision=int(rng.random() < 0.15),
        ecn=int(rng.random() < 0.1),
        is_ack=ack,
        raw_float=int(rng.random() < 0.03),
        aggregator_index=sequence if rng.random() < 0.9 else rng.randrange(16),
    )
    packet = Packet(port, header, random_values(rng), rng.random() < 0.05)
    if rng.random() < 0.03:
        payload = packet.payload()
        cut = rng.choice([0, 4, 15, 16, len(payload) - 4])
        packet = Packet(port, header, (), packet.ce, payload[:cut])
    return packet, ("w0" if ack else "ps")


def compare(switch: Any, seed: int, packets: int, *, clock: bool) -> set[str]:
    """Send the same packets through both; returns the counters that moved."""
    rng = random.Random(seed)
    core = NativeSwitch(AGGREGATORS, VALUES, STALE_NS)
    try:
        now_ns = 10**12
        for each in (core, switch):
            prepare(each)
            each.set_clock(now_ns)
        for number in range(packets):
            if clock:
                now_ns += rng.choice([1_000, 100_000, 1_000_000, 1_000_000, 1_000_000, 60_000_000])
                core.set_clock(now_ns)
                switch.set_clock(now_ns)
            packet, dst = random_packet(rng)
            wanted = core.send(packet, dst, 0)
            got = switch.send(packet, dst, len(wanted))
            where = f"seed {seed}, packet {number}: {packet}"
            assert got == wanted, where
            index = packet.header.aggregator_index
            ours, theirs = switch.aggregator(index), core.aggregator(index)
            assert ours.job == theirs.job, where
            if theirs.job:
                assert (ours.sequence, ours.level, ours.bitmap, ours.complete, ours.ecn) == (
                    theirs.sequence, theirs.level, theirs.bitmap, theirs.complete, theirs.ecn
                ), where  # fmt: skip
                if clock:
                    assert (ours.timestamp_ns, ours.values) == (theirs.timestamp_ns, theirs.values), where
        moved: set[str] = set()
        for job in (0, 1, 2):
            wanted_counters = {k: v for k, v in core.counters(job).items() if not k.startswith("bytes")}
            assert {k: v for k, v in switch.counters(job).items() if not k.startswith("bytes")} == wanted_counters
            moved |= set(wanted_counters)
        return moved
    finally:
        core.close()
        switch.close()


@pytest.mark.parametrize("seed", range(4))
def test_the_program_answers_as_the_core_does(seed: int) -> None:
    moved = compare(JsonSwitch(), seed, 1000, clock=True)
    assert {"aggregated", "completed", "reemitted", "duplicates", "collisions", "resend_partials", "released"} <= moved
    assert {"stale_takeovers", "passed_transit", "ecn_marked", "rejected_bit", "rejected_length"} <= moved


@pytest.mark.root
@pytest.mark.skipif(MISSING is not None, reason=MISSING or "")
@pytest.mark.parametrize("seed", [101, 102])
def test_bmv2_answers_as_the_core_does(seed: int) -> None:
    """T is out of reach: bmv2's clock is real."""
    moved = compare(Bmv2Switch(pace=100_000), seed, 600, clock=False)
    assert {"aggregated", "completed", "reemitted", "duplicates", "collisions", "resend_partials", "released"} <= moved
