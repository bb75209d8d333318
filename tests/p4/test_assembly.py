# SPDX-License-Identifier: Apache-2.0
"""The conformance vectors on what p4c's back end made of the Tofino program, frames in and out, in both passes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from assembly import Phv, the_assembly
from bmv2_vectors import Lazily
from conformance.switches import (
    PORTS,
    Aggregator,
    Packet,
    address_of,
    frame_of,
    ip_checksum,
    ip_number,
    mac_of,
    payload_of,
)
from conformance.test_vectors import OF_P4, STALE_NS, START_MS, prepare
from hosts import drops_of, pieces_of
from p4_tables import COUNTED_BY, SECOND_PASS, preprocess
from test_races import STEPS, Checked, covered, sum_of
from test_tables import NOT_STICKY, reason_to_skip

from atp_api.wire import Header
from atp_switch_agent.entries import HOST_PIECES

CHIPS = {"tofino": (8, 68), "tofino2": (24, 6)}
"""Bytes of port metadata in front of a packet, and the port that loops back."""
EVENTS = {v: k for k, v in preprocess()[1].items() if k.startswith("V_")}
FIRST_PORT = 16


class Pipe:
    """One pipe of a chip, its loopback port, and as much of a traffic manager as a packet needs."""

    name = "assembly"
    routes_unknown = True
    max_values = 62

    def __init__(self, chip: str) -> None:
        self.program = the_assembly(chip)
        self.program.reset()
        self.metadata, self.loopback = CHIPS[chip]
        self.now_ns = 0
        self.passes = 0
        self.groups: dict[int, list[str]] = {}
        self.seen: dict[int, tuple[int, int]] = {}
        for port in PORTS:
            self.insert("AtpIngress.l2_forward", [int.from_bytes(mac_of(port), "big")], "forward", port=self.port(port))

    # -- tables

    def port(self, port: str) -> int:
        return FIRST_PORT + PORTS.index(port)

    def insert(self, table: str, key: Sequence[int | tuple[int, int]], action: str, **params: int) -> None:
        ranges = tuple(k if isinstance(k, tuple) else (k, k) for k in key)
        self.program.entries[table].append((ranges, f"{table.partition('.')[0]}.{action}", dict(params)))

    def forget(self, job: int, *tables: str) -> None:
        for table in tables:
            entries = self.program.entries[f"AtpIngress.{table}"]
            entries[:] = [entry for entry in entries if entry[0][0] != (job, job)]

    def set_clock(self, now_ns: int) -> None:
        self.now_ns = now_ns

    def set_job(
        self, job: int, values: int, full0: int, full1: int, group: int, regions: Sequence[tuple[int, int]]
    ) -> None:
        self.forget(job, "job", "region")
        for start, size in regions:
            self.insert("AtpIngress.region", [job, (start, start + size - 1)], "in_region")
        self.insert("AtpIngress.job", [job], "set_job", values=values, full0=full0, full1=full1, group=group)

    def delete_job(self, job: int) -> None:
        self.forget(job, "admission", "transit", "ps_port", "job", "region")

    def admit(self, job: int, port: str, edge: int, bit: int) -> None:
        self.insert("AtpIngress.admission", [job, self.port(port), edge, bit], "admit")

    def revoke(self, job: int, port: str, edge: int, bit: int) -> None:
        key = tuple((k, k) for k in (job, self.port(port), edge, bit))
        entries = self.program.entries["AtpIngress.admission"]
        entries.remove(next(e for e in entries if e[0] == key))

    def transit(self, job: int, port: str, rack: int, mask0: int) -> None:
        self.insert("AtpIngress.transit", [job, self.port(port), rack], "allow", mask0=mask0)

    def ps_port(self, job: int, port: str) -> None:
        self.insert("AtpIngress.ps_port", [job, self.port(port)], "from_ps")

    def set_host(
        self, job: int, host: str, port: str, role: str, bitmap0: int = 0, bitmap1: int = 0, edge: int = 0
    ) -> None:
        for table, key, action, params in pieces_of(job, host, self.port(port), role, bitmap0, bitmap1, edge):
            self.insert(f"AtpIngress.{table}", key, action, **params)

    def delete_host(self, job: int, host: str) -> None:
        address = ip_number(address_of(host))
        for table in HOST_PIECES:
            entries = self.program.entries[f"AtpIngress.{table}"]
            entries[:] = [entry for entry in entries if entry[0][0] != (address, address)]

    def drops(self) -> dict[str, dict[str, int]]:
        return drops_of(self.program.counted.get("drops", {}), {self.port(port): port for port in PORTS})

    def set_group(self, group: int, ports: Sequence[str]) -> None:
        self.groups[group] = list(ports)
        for instance, port in enumerate(ports, 1):
            where = {
                "dst_mac": int.from_bytes(mac_of(port), "big"),
                "dst_ip": ip_number(address_of(port)),
                "dst_port": 0,
            }
            self.insert("AtpEgress.replica", [group, self.port(port), instance], "rewrite", **where)

    def close(self) -> None:
        pass

    # -- what a test may look at

    def counters(self, job: int) -> dict[str, int]:
        counted: dict[str, int] = {}
        for cell, number in self.program.counted.get("events", {}).items():
            event = EVENTS[cell >> 8]
            known = cell & 0xFF if event not in ("V_UNKNOWN", "V_SHORT") else 0
            names = [n for n in COUNTED_BY[event] if n not in ("resend_partials", "bytes_in")]
            for name in [*names, *SECOND_PASS.get(event, [])] if known == job else []:
                counted[name] = counted.get(name, 0) + number
        return counted

    def word(self, register: str, index: int) -> list[int]:
        found = next(r for r in self.program.registers.values() if r.name == f"AtpIngress.{register}")
        return found.words.get(index, [0, 0])

    def aggregator(self, index: int) -> Aggregator:
        halves = [half for i in range(31) for half in self.word(f"pair{i}.sums", index)]
        values = tuple(v - (1 << 32) if v >> 31 else v for v in halves)
        key, stamp = self.word("owners", index)
        if key == 0:
            return Aggregator(0, 0, 0, 0, False, False, 0, values)
        level, sequence = self.seen[index]
        complete = self.word("missing", index)[0] == 0
        mark = bool(self.word("mark", index)[0])
        return Aggregator(key >> 24, sequence, level, self.word("cover", index)[0], complete, mark, stamp << 16, values)

    def occupancy(self, job: int) -> int:
        used = 0
        for j in range(256) if job == 0 else [job]:
            c = self.counters(j)
            used += c.get("allocated", 0) - sum(c.get(n, 0) for n in ("released", "resend_partials", "stale_takeovers"))
        return used

    # -- packets

    def between_passes(self) -> None:
        """What comes in while a packet is on its way through the loopback port."""

    def send(self, packet: Packet, dst: str, expected: int) -> list[Packet]:
        del expected
        payload = packet.payload()
        frame = frame_of(payload, packet.src or packet.port, dst, ce=packet.ce)
        out = [Packet.parse(port, payload_of(data)) for port, data in self.exchange(packet.port, frame)]
        if len(payload) >= 16:
            h = Header.unpack(payload)
            held = self.word("owners", h.aggregator_index)[0]
            for level in (0, 1):
                if held == (h.job_id << 24 | h.sequence) ^ (1 - level) * 0x800000:
                    self.seen[h.aggregator_index] = level, h.sequence
        return out

    def exchange(self, port: str, frame: bytes) -> list[tuple[str, bytes]]:
        """One frame through the pipe; what leaves it, with the port."""
        self.passes = 0
        out = self.one_pass(self.port(port), frame)
        return sorted(out, key=lambda item: PORTS.index(item[0]))

    def one_pass(self, port: int, frame: bytes) -> list[tuple[str, bytes]]:
        program, phv = self.program, Phv()
        self.passes += 1
        assert self.passes <= 2
        in_front = port.to_bytes(2, "big") + self.now_ns.to_bytes(6, "big") + bytes(self.metadata)
        rest = program.parse("ingress", in_front + frame, phv)
        program.pipeline("ingress", phv)
        drop = program.told("ingress", phv, "drop_ctl")
        group = program.told("ingress", phv, "egress_multicast_group_0")
        unicast = program.told("ingress", phv, "egress_unicast_port")
        data = program.deparse("ingress", phv) + rest
        if drop & 1:
            return []
        if program.told("ingress", phv, "bypss_egr"):
            assert unicast == self.loopback and not group
            self.between_passes()
            return self.one_pass(unicast, data)
        copies = [(unicast, 0)] if unicast else []
        copies += [(self.port(p), instance) for instance, p in enumerate(self.groups.get(group, []), 1)]
        out = []
        for egress, instance in copies:
            one = Phv()
            behind = program.parse("egress", bytes(program.intrinsic_bytes) + data, one)
            program.put(one, "egress", "eg_intr_md.egress_port", egress, -1)
            program.put(one, "egress", "eg_intr_md.egress_rid", instance, -1)
            one.told.clear()
            program.pipeline("egress", one)
            if not program.told("egress", one, "drop_ctl") & 1:
                out.append((PORTS[egress - FIRST_PORT], program.deparse("egress", one) + behind))
        return out


class WithoutTimes(Lazily):
    """The stamp is in units of 2^16 ns, and a duplicate refreshes it: docs/p4.md, Differences."""

    def check_state(self, step: dict[str, Any]) -> None:
        wanted = step.get("aggregators", {})
        shown = {i: a if a == "free" else {k: v for k, v in a.items() if k != "at_ms"} for i, a in wanted.items()}
        # Tofino does not count marks: docs/p4.md, Counters.
        counters = {
            job: {k: v for k, v in counted.items() if k != "ecn_marked"}
            for job, counted in step.get("counters", {}).items()
        }
        super().check_state({**step, "aggregators": shown, "counters": counters})


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("name", "setup", "vector"), [pytest.param(n, s, v, id=n) for n, s, v in OF_P4])
def test_vector(chip: str, name: str, setup: dict[str, Any], vector: dict[str, Any]) -> None:
    reason = reason_to_skip(setup, vector)
    if reason is not None:
        pytest.skip(reason)
    if vector["name"] == "the sequence wraps, and the last index works":
        pytest.skip("its index is 65,535; a Tofino has fewer aggregators")
    switch = Pipe(chip)
    switch.set_clock(START_MS * 1_000_000)
    prepare(switch, setup)  # type: ignore[arg-type]
    run = WithoutTimes(switch, setup, vector)  # type: ignore[arg-type]
    try:
        run.run()
    except AssertionError:
        if name in NOT_STICKY:
            pytest.xfail("Tofino's adder saturates, but is not sticky: docs/p4.md, Saturation")
        raise
    assert name not in NOT_STICKY, "sticky after all: correct docs/p4.md"


def test_only_what_carries_values_out_takes_a_second_pass() -> None:
    for chip in CHIPS:
        switch = Pipe(chip)
        switch.set_clock(START_MS * 1_000_000)
        switch.set_job(1, 62, 0b111, 0, 0, [(0, 16)])
        passes = []
        for i in range(3):
            switch.admit(1, f"w{i}", 0, 1 << i)
            header = Header(job_id=1, sequence=7, bitmap0=1 << i, bitmap1=1, fan_in_degree0=3)
            out = switch.send(Packet(f"w{i}", header, tuple(range(i, i + 62))), "ps", 0)
            passes.append(switch.passes)
        assert passes == [1, 1, 2]
        assert [p.values for p in out] == [tuple(3 * v + 3 for v in range(62))]


@pytest.mark.parametrize("chip", CHIPS)
def test_ordinary_traffic_leaves_as_it_came(chip: str) -> None:
    switch = Pipe(chip)
    arp = mac_of("ps") + mac_of("w0") + b"\x08\x06" + bytes(46)
    other_udp = frame_of(b"x" * 300, "w0", "ps", udp_port=53)
    fragment = frame_of(bytes(264), "w0", "ps", fragment=0x2000)
    options = frame_of(bytes(264), "w0", "ps", options=bytes(4))
    unknown = frame_of(Packet("w0", Header(job_id=9), (5,) * 62).payload(), "w0", "ps")
    for frame in (arp, other_udp, fragment, options, unknown):
        assert switch.exchange("w0", frame) == [("ps", frame)]
        assert switch.passes == 1


@pytest.mark.parametrize("chip", CHIPS)
def test_a_flooded_frame_does_not_go_back(chip: str) -> None:
    switch = Pipe(chip)
    switch.groups[77] = ["w0", "w1", "ps"]
    switch.insert("AtpIngress.l2_forward", [0xFFFFFFFFFFFF], "flood", group=77)
    arp = b"\xff" * 6 + mac_of("w0") + b"\x08\x06" + bytes(46)
    assert switch.exchange("w0", arp) == [("w1", arp), ("ps", arp)]
    assert switch.exchange("ps", arp) == [("w0", arp), ("w1", arp)]


@pytest.mark.parametrize("chip", CHIPS)
def test_copies_of_an_ack_have_a_checksum_of_their_own_and_may_go_back(chip: str) -> None:
    switch = Pipe(chip)
    switch.set_group(3, ["w1", "ps"])
    switch.set_job(1, 62, 0b11, 0, 3, [(0, 16)])
    switch.ps_port(1, "ps")
    payload = Packet("ps", Header(job_id=1, sequence=1, is_ack=1), (4,) * 62).payload()
    copies = switch.exchange("ps", frame_of(payload, "ps", "w1"))
    assert [port for port, _ in copies] == ["w1", "ps"]
    for port, frame in copies:
        assert frame[:6] == mac_of(port) and frame[30:34] == ip_number(address_of(port)).to_bytes(4, "big")
        assert ip_checksum(frame[14:34]) == 0
        assert payload_of(frame) == payload


@pytest.mark.parametrize("chip", CHIPS)
def test_a_long_queue_marks_a_sum(chip: str) -> None:
    switch = Pipe(chip)
    switch.set_clock(START_MS * 1_000_000)
    switch.set_job(1, 62, 0b1, 0, 0, [(0, 16)])
    switch.admit(1, "w0", 0, 1)
    switch.insert("AtpEgress.congestion", [3, (0, 1 << 19)], "mark_congestion")  # V_ALLOCATED_DONE, any depth
    header = Header(job_id=1, sequence=1, bitmap0=1, bitmap1=1, fan_in_degree0=1)
    out = switch.send(Packet("w0", header, (1,) * 62), "ps", 1)
    assert [(p.header.ecn, p.header.edge_switch_identifier) for p in out] == [(1, 1)]


class Crossed(Pipe):
    """Random packets in between the passes of others, and a check of all that leaves (as test_races)."""

    def __init__(self, chip: str, rng: random.Random) -> None:
        super().__init__(chip)
        self.source = Checked(rng)
        self.rng = rng
        self.depth = 0
        self.left = 0

    def between_passes(self) -> None:
        if self.depth < 4 and self.rng.random() < 0.5:
            passes, self.passes = self.passes, 0
            self.send(self.source.random_packet(), "ps", 0)
            self.passes = passes

    def send(self, packet: Packet, dst: str, expected: int) -> list[Packet]:
        self.depth += 1
        out = super().send(packet, dst, expected)
        self.depth -= 1
        for p in out:
            if not p.header.is_ack:
                self.left += 1
                assert p.values == sum_of(covered(p.header), p.header.sequence), p.header
        return out


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("seed", range(5))
def test_what_leaves_is_what_it_says_when_packets_cross(chip: str, seed: int) -> None:
    rng = random.Random(seed)
    switch = Crossed(chip, rng)
    switch.set_group(1, ["w0", "w1", "w2", "up"])
    switch.set_job(1, 62, 0b11, 0b11, 1, [(0, 16)])
    for port, edge, bit in (("w0", 0, 1), ("w1", 0, 2), ("up", 1, 1), ("w2", 1, 2)):
        switch.admit(1, port, edge, bit)
    switch.transit(1, "up", 1, 0b11)
    switch.ps_port(1, "ps")
    now = 10 * STALE_NS
    for _ in range(STEPS):
        now += rng.choice([1_000, 1_000_000, STALE_NS * 2 if rng.random() < 0.1 else 1_000])
        switch.set_clock(now)
        switch.send(switch.source.random_packet(), "ps", 0)
    assert switch.left > 5
    held = sum(1 for index in (0, 1) if switch.word("owners", index)[0])
    assert switch.occupancy(1) == held, "occupancy as the agent computes it"


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("edge", [0, 1])
def test_an_ack_from_a_port_that_may_also_send_gradients_releases_either_level(chip: str, edge: int) -> None:
    switch = Pipe(chip)
    switch.set_clock(START_MS * 1_000_000)
    switch.set_job(1, 62, 0b11, 0b11, 0, [(0, 16)])
    switch.ps_port(1, "ps")
    for port, level, bit in (("ps", 0, 1), ("ps", 1, 1), ("w0", edge, 2)):
        switch.admit(1, port, level, bit)
    header = Header(job_id=1, sequence=1, bitmap0=2, bitmap1=2, edge_switch_identifier=edge)
    switch.send(Packet("w0", header, (1,) * 62), "ps", 0)
    assert switch.aggregator(0).level == edge
    # Its bits are those of an entry, which makes no gradient of it.
    ack = Header(job_id=1, sequence=1, is_ack=1, bitmap0=1, bitmap1=1)
    switch.send(Packet("ps", ack, (1,) * 62), "w0", 1)
    assert switch.aggregator(0).job == 0
