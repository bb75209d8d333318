# SPDX-License-Identifier: Apache-2.0
"""Random packet sequences: the C core and the BPF programs must agree on packets, state and counters, and both with a
sum made in Python that knows nothing of lanes, offsets and pairs."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conformance.switches import (
    BUILD,
    PROGRAM_TC,
    PROGRAM_TC_ACK,
    PROGRAM_XDP,
    NativeSwitch,
    Packet,
    Switch,
    frame_of,
    payload_of,
)

from atp_api.wire import Header

INT32_MAX = 2**31 - 1
INT32_MIN = -(2**31)
AGGREGATORS = 8
STALE_NS = 100_000_000
LOOPBACK = 1
TC_FORWARD, TC_DROP = -1, 2
XDP_DROP, XDP_PASS = 1, 2
INTERESTING = [
    0,
    1,
    -1,
    INT32_MAX,
    INT32_MIN,
    INT32_MAX - 1,
    INT32_MIN + 1,
    2**30,
    -(2**30),
    2**30 - 1,
    2**29,
    2**26,
    -(2**26),
]


class TestRunSwitch(Switch):
    """A BPF program run on single frames. Every port is the loopback interface: these tests are not about ports."""

    __test__ = False
    name = "test-run"
    program = PROGRAM_TC

    def opener(self) -> Any:
        return self.library.atp_test_open_bpf

    def port_number(self, port: str) -> int:
        return LOOPBACK

    def run(self, program: int, frame: bytes) -> tuple[int, bytes]:
        """Return verdict and what the frame has become."""
        data = (ctypes.c_uint8 * len(frame)).from_buffer_copy(frame)
        out = (ctypes.c_uint8 * 8192)()
        length = ctypes.c_size_t()
        verdict = ctypes.c_int32()
        elapsed = ctypes.c_uint32()
        result = self.library.atp_test_run(
            self.handle, program, ctypes.c_uint32(LOOPBACK), data, ctypes.c_size_t(len(frame)), ctypes.c_uint32(1),
            out, ctypes.c_size_t(len(out)), ctypes.byref(length), ctypes.byref(verdict), ctypes.byref(elapsed),
        )  # fmt: skip
        self.check(result, "test run")
        return verdict.value, bytes(out[: length.value])

    def payload(self, frame: bytes) -> bytes | None:
        """The payload that goes on, None if the packet was dropped."""
        if self.program == PROGRAM_XDP:
            verdict, out = self.run(PROGRAM_XDP, frame)
            if verdict == XDP_DROP:
                return None
            assert verdict == XDP_PASS
            # As on an interface: the tc program beside it sees all that passes, and must touch ACKs only.
            verdict, after = self.run(PROGRAM_TC_ACK, out)
            if verdict == TC_DROP and Header.unpack(payload_of(out)).is_ack:
                return None
            assert verdict == TC_FORWARD
            assert payload_of(after) == payload_of(out)
            return payload_of(after)
        verdict, out = self.run(self.program, frame)
        if verdict == TC_DROP:
            return None
        assert verdict == TC_FORWARD
        return payload_of(out)


class XdpRunSwitch(TestRunSwitch):
    program = PROGRAM_XDP


class OnePort(NativeSwitch):
    """The C core with every port the same, like TestRunSwitch."""

    def port_number(self, port: str) -> int:
        return LOOPBACK

    def port_name(self, number: int) -> str:
        return "ps"


def prepare(switch: Switch, values: int, full0: int, full1: int) -> None:
    # Job 1 has both levels here, job 2 shares its aggregators; group 0 forwards ACKs as they are.
    switch.set_job(1, values, full0, full1, 0, [(0, 5), (6, 2)])
    switch.set_job(2, values, 0b11, 0, 0, [(0, AGGREGATORS)])
    for i in range(32):
        if full0 >> i & 1 and i != 2:
            switch.admit(1, "w0", 0, 1 << i)
        if full1 >> i & 1:
            switch.admit(1, "w0", 1, 1 << i)
    for bit in (1, 2):
        switch.admit(2, "w0", 0, bit)
    switch.transit(1, "w0", 0b10, 0b111)
    switch.ps_port(1, "ps")
    switch.ps_port(2, "ps")
    switch.set_port_rate("ps", 100_000_000, 2000)


def random_values(rng: random.Random, count: int) -> tuple[int, ...]:
    kind = rng.randrange(4)
    if kind == 0:
        return tuple(rng.randint(-1000, 1000) for _ in range(count))
    if kind == 1:
        return tuple(rng.randint(-(2**29), 2**29) for _ in range(count))
    if kind == 2:
        values = [rng.randint(-1000, 1000) for _ in range(count)]
        values[rng.randrange(count)] = rng.choice(INTERESTING)
        return tuple(values)
    return tuple(rng.choice(INTERESTING) for _ in range(count))


def random_packet(rng: random.Random, values: int, full0: int) -> tuple[Packet, int]:
    """A packet that is mostly plausible, and the length of its payload."""
    few = [1 << i for i in range(32) if full0 >> i & 1]
    header = Header(
        job_id=rng.choice([1, 1, 1, 1, 2, 2, 3]),
        sequence=rng.choice([0, 1, 0xFFFFFF]),
        bitmap0=rng.choice(few) if rng.random() < 0.9 else rng.getrandbits(4),
        bitmap1=rng.choice([1, 1, 2, 2, 2, 4, 3, 0]),
        fan_in_degree0=full0.bit_count() & 31,
        fan_in_degree1=2,
        edge_switch_identifier=int(rng.random() < 0.3),
        resend=int(rng.random() < 0.2),
        collision=int(rng.random() < 0.2),
        ecn=int(rng.random() < 0.1),
        is_ack=int(rng.random() < 0.08),
        raw_float=int(rng.random() < 0.03),
        aggregator_index=rng.choice([0, 1, 2, 5, 7]) if rng.random() < 0.97 else rng.getrandbits(16),
    )
    packet = Packet("w0", header, random_values(rng, values), rng.random() < 0.05)
    length = len(packet.payload())
    if rng.random() < 0.03:
        length = rng.choice([0, 4, 15, 16, length - 4, length - 1])
    return packet, length


@pytest.fixture(params=[TestRunSwitch, XdpRunSwitch], ids=["tc", "xdp"])
def kind(request: pytest.FixtureRequest) -> type[TestRunSwitch]:
    chosen: type[TestRunSwitch] = request.param
    return chosen


@pytest.mark.root
@pytest.mark.parametrize(
    ("values", "full0", "packets"),
    [(62, 0b11, 1500), (62, 0b1011, 1500), (62, 0xFFFFFFFF, 1500), (350, 0b1111, 500), (870, 0b11, 250)],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_core_and_bpf_agree(kind: type[TestRunSwitch], values: int, full0: int, packets: int, seed: int) -> None:
    if values > 350 and kind is XdpRunSwitch:
        pytest.skip("a frame of the jumbo profile does not fit one page, which XDP needs")
    rng = random.Random(seed)
    core = OnePort(AGGREGATORS, values, STALE_NS)
    bpf = kind(AGGREGATORS, values, STALE_NS, BUILD)
    try:
        prepare(core, values, full0, 0b111)
        prepare(bpf, values, full0, 0b111)
        now_ns = 10**12
        for number in range(packets):
            now_ns += rng.choice([1000, 100_000, 5_000_000, 5_000_000, 60_000_000])
            core.set_clock(now_ns)
            bpf.set_clock(now_ns)
            packet, length = random_packet(rng, values, full0)
            payload = packet.payload()[:length]
            sent = core.process("w0", "ps", packet.ce, payload)
            assert len(sent) <= 1
            wanted = sent[0][2] if sent else None
            frame = frame_of(payload, "w0", "ps", packet.ce, padding=rng.choice([0, 0, 7]))
            assert bpf.payload(frame) == wanted, f"packet {number}: {packet.header}"
            index = packet.header.aggregator_index
            if index < AGGREGATORS:
                assert bpf.aggregator(index) == core.aggregator(index), f"packet {number}: {packet.header}"
        for job in range(4):
            assert bpf.counters(job) == core.counters(job)
        assert bpf.sweep() == core.sweep()
        for job in range(3):
            assert bpf.occupancy(job) == core.occupancy(job)
        assert core.counters(1)["aggregated"] > packets // 20
    finally:
        core.close()
        bpf.close()


def saturating_add(a: int, b: int) -> int:
    for end in (INT32_MAX, INT32_MIN):
        if end in (a, b):
            return end
    return max(INT32_MIN, min(INT32_MAX, a + b))


@pytest.fixture
def core() -> Iterator[NativeSwitch]:
    switch = OnePort(AGGREGATORS, 62, STALE_NS)
    yield switch
    switch.close()


@pytest.mark.parametrize("fan_in", [1, 2, 3, 4, 5, 8, 17, 31, 32])
@pytest.mark.parametrize("seed", range(6))
def test_sums_are_those_of_plain_arithmetic(core: NativeSwitch, fan_in: int, seed: int) -> None:
    """Any order of any values: value by value the sticky saturating sum, at every step."""
    rng = random.Random(1000 * fan_in + seed)
    core.set_job(1, 62, (1 << fan_in) - 1, 0, 0, [(0, AGGREGATORS)])
    bits = [1 << i for i in range(fan_in)]
    for bit in bits:
        core.admit(1, "w0", 0, bit)
    rng.shuffle(bits)
    sums: list[int] | None = None
    for bit in bits:
        values = random_values(rng, 62)
        # Values at the very edge of what this fan-in can add without a check.
        limit = 2**31 // fan_in
        if seed % 2:
            values = tuple(
                rng.choice([v, -limit, limit - 1, min(limit, INT32_MAX)]) if abs(v) < 2**30 else v for v in values
            )
        sums = list(values) if sums is None else [saturating_add(a, b) for a, b in zip(sums, values, strict=True)]
        packet = Packet("w0", Header(job_id=1, sequence=5, bitmap0=bit, bitmap1=1, aggregator_index=3), values)
        sent = core.process("w0", "ps", False, packet.payload())
        assert list(core.aggregator(3).values) == sums
    assert Packet.parse("ps", sent[0][2]).values == tuple(sums or ())


def test_objects_are_where_the_library_looks() -> None:
    assert {p.name for p in Path(BUILD).glob("atp_switch_*.o")} == {f"atp_switch_{n}.o" for n in (62, 350, 870)}
