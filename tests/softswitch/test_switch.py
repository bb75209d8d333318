# SPDX-License-Identifier: Apache-2.0
"""The software switch beyond the protocol's vectors: ordinary traffic, attachment, superframes, clocks, cores at once,
the relay program, and what the control interface refuses."""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conformance.switches import (
    BUILD,
    PORTS,
    PROGRAM_TC,
    PROGRAM_XDP,
    NativeSwitch,
    Packet,
    Switch,
    TcSwitch,
    XdpSwitch,
    address_of,
    frame_of,
    ip_number,
    mac_of,
    payload_of,
    run,
)
from softswitch.test_differential import LOOPBACK, TestRunSwitch

from atp_api.wire import UDP_PORT, Header

STALE_NS = 100_000_000
UDP_SEGMENT = 103
SO_BINDTODEVICE = 25


def job_of_two(switch: Switch, values: int = 62) -> None:
    switch.set_group(1, ["w0", "w1"])
    switch.set_job(1, values, 0b11, 0, 1, [(0, 8)])
    switch.admit(1, "w0", 0, 1)
    switch.admit(1, "w1", 0, 2)
    switch.ps_port(1, "ps")


def gradient(port: str, bit: int, sequence: int = 1, index: int = 0, fill: int = 1, count: int = 62) -> Packet:
    header = Header(job_id=1, sequence=sequence, bitmap0=bit, bitmap1=1, fan_in_degree0=2, fan_in_degree1=1,
                    aggregator_index=index)  # fmt: skip
    return Packet(port, header, (fill,) * count)


@pytest.fixture(params=[TcSwitch, XdpSwitch], ids=["tc", "xdp"])
def veth(request: pytest.FixtureRequest) -> Iterator[Any]:
    switch = request.param(8, 62, STALE_NS)
    switch.set_clock(10**9)
    job_of_two(switch)
    yield switch
    switch.close()


@pytest.fixture
def tc() -> Iterator[TcSwitch]:
    switch = TcSwitch(8, 62, STALE_NS)
    switch.set_clock(10**9)
    job_of_two(switch)
    yield switch
    switch.close()


@pytest.fixture
def native() -> Iterator[NativeSwitch]:
    switch = NativeSwitch(8, 62, STALE_NS)
    yield switch
    switch.close()


@pytest.mark.root
def test_ordinary_traffic_is_not_touched(veth: Any) -> None:
    payload = gradient("w0", 1).payload()
    other_port = frame_of(payload, "w0", "ps", udp_port=UDP_PORT + 1, udp_checksum=0x1234)
    fragment = frame_of(payload, "w0", "ps", fragment=0x2000, udp_checksum=0x1234)
    later_fragment = frame_of(payload, "w0", "ps", fragment=1, udp_checksum=0x1234)
    options = frame_of(payload, "w0", "ps", options=b"\x01\x01\x01\x00", udp_checksum=0x1234)
    for frame in (other_port, fragment, later_fragment, options):
        assert veth.exchange("w0", frame, 1) == [("ps", frame)]
    assert veth.counters(0) == {}
    assert veth.counters(1) == {}


@pytest.mark.root
def test_ethernet_padding_is_not_payload(veth: Any) -> None:
    padded = frame_of(gradient("w0", 1).payload(), "w0", "ps", padding=9)
    assert veth.exchange("w0", padded, 0) == []
    short = frame_of(b"1234", "w0", "ps", padding=14)
    assert veth.exchange("w0", short, 0) == []
    assert veth.counters(1)["aggregated"] == 1
    assert veth.counters(0)["rejected_short"] == 1


@pytest.mark.root
def test_a_rewritten_packet_has_no_udp_checksum(veth: Any) -> None:
    veth.exchange("w0", frame_of(gradient("w0", 1).payload(), "w0", "ps", udp_checksum=0x1234), 0)
    got = veth.exchange("w1", frame_of(gradient("w1", 2).payload(), "w1", "ps", udp_checksum=0x1234), 1)
    assert [port for port, _ in got] == ["ps"]
    assert got[0][1][40:42] == b"\0\0"
    assert Packet.parse("ps", payload_of(got[0][1])).values == (2,) * 62


@pytest.mark.root
def test_an_ack_for_sixty_four(tc: TcSwitch) -> None:
    tc.set_group(2, ["w0", "w1", "w2", "w3"] * 16)
    tc.set_job(1, 62, 0b11, 0, 2, [(0, 8)])
    ack = Packet("ps", Header(job_id=1, sequence=1, is_ack=1), (3,) * 62)
    got = tc.send(ack, "w0", 64)
    assert [p.port for p in got] == [port for port in PORTS[:4] for _ in range(16)]
    assert {p.payload() for p in got} == {ack.payload()}
    assert tc.counters(1)["bytes_out"] == 64 * 306


@pytest.mark.root
def test_superframes_pass_and_are_counted(tc: TcSwitch) -> None:
    run("ip", "address", "add", address_of("w0") + "/24", "dev", "p-w0")
    run("ip", "neighbour", "replace", address_of("ps"), "lladdr", mac_of("ps").hex(":"), "dev", "p-w0")
    payload = gradient("w0", 1).payload()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.setsockopt(socket.SOL_SOCKET, SO_BINDTODEVICE, b"p-w0\0")
        s.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, len(payload))
        s.sendto(payload * 3, (address_of("ps"), UDP_PORT))
    time.sleep(0.05)
    assert tc.counters(0) == {"passed_gso": 1}
    assert tc.counters(1) == {}


def guard(switch: Switch) -> None:
    """The job of two is of w0 and w1 alone; w2, w3 and up are nobody's."""
    switch.set_host(1, "w0", "w0", "worker", 1, 1)
    switch.set_host(1, "w1", "w1", "worker", 2, 1)
    switch.set_host(1, "ps", "ps", "ps")


@pytest.mark.root
def test_what_a_host_must_not_get_in_any_wrapping(veth: Any) -> None:
    """Fragments, IP options and lengths that disagree: dropped at a job's host, untouched elsewhere."""
    guard(veth)
    payload = gradient("w0", 1).payload()
    longer = bytearray(frame_of(payload, "w0", "ps"))
    longer[38:40] = (8 + len(payload) - 4).to_bytes(2, "big")  # UDP length against IP length
    odd = [
        frame_of(payload, "w0", "ps", fragment=0x2000, udp_checksum=0x1234),
        frame_of(payload, "w0", "ps", options=b"\x01\x01\x01\x00"),
        frame_of(payload, "w0", "ps", options=b"\x01" * 40),
        bytes(longer),
    ]
    for frame in odd:
        assert veth.exchange("w0", frame, 0) == []
    assert veth.drops() == {"w0": {"malformed": 4}}
    for src in ("w2", "w0"):
        for options in (b"", b"\x01\x01\x01\x00", b"\x01" * 40):
            frame = frame_of(payload, src, "ps", fragment=0x2000, options=options)
            assert veth.exchange("w2", frame, 0) == []
    assert veth.drops() == {"w0": {"malformed": 4}, "w2": {"source": 6}}
    foreign = [
        frame_of(payload, "w2", "w3", fragment=0x2000, udp_checksum=0x1234),
        frame_of(payload, "w2", "w3", options=b"\x01" * 40, udp_checksum=0x1234),
        frame_of(payload, "w2", "ps", fragment=0x2005, udp_checksum=0x1234),  # no UDP header: nobody completes it
        frame_of(payload, "w2", "ps", udp_port=UDP_PORT + 1, udp_checksum=0x1234),
    ]
    for frame in foreign:
        assert [f for _, f in veth.exchange("w2", frame, 1)] == [frame]
    assert veth.counters(0) == {}
    assert veth.counters(1) == {}


@pytest.mark.root
@pytest.mark.parametrize("tpid", [0x8100, 0x88A8])
def test_tagged_frames_are_ordinary_traffic(veth: Any, tpid: int) -> None:
    """Two VLANs do not meet in one sum, nor does a tag hide a packet: it goes where the network takes it."""
    guard(veth)
    got = []
    for port, bit, vlan in (("w0", 1, 5), ("w1", 2, 6), ("w2", 1, 5)):
        plain = frame_of(gradient(port, bit).payload(), port, "ps")
        tagged = plain[:12] + struct.pack(">HH", tpid, vlan) + plain[12:]
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as s:
            s.bind(("p-ps", 3))
            s.settimeout(2)
            veth.sockets[port].send(tagged)
            while len(frame := s.recv(2048)) < 200:
                pass
            got.append((port, frame[-len(plain) + 14 :]))
        assert got[-1] == (port, plain[14:])
    assert veth.counters(1) == {} and veth.drops() == {}


def superframe(port: str, to: str, payloads: list[bytes], source: str | None = None) -> None:
    """Send packets in one buffer, as a pod with UDP segmentation does."""
    address = address_of(source or port)
    run("ip", "address", "replace", address + "/24", "dev", f"p-{port}")
    run("ip", "neighbour", "replace", address_of(to), "lladdr", mac_of(to).hex(":"), "dev", f"p-{port}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.setsockopt(socket.SOL_SOCKET, SO_BINDTODEVICE, f"p-{port}\0".encode())
        s.bind((address, 0))
        s.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, len(payloads[0]))
        s.sendto(b"".join(payloads), (address_of(to), UDP_PORT))
    run("ip", "address", "flush", "dev", f"p-{port}")


def received(switch: TcSwitch, port: str) -> bytes:
    """All that arrives at a port, UDP payloads joined, also of frames that are superframes still."""
    time.sleep(0.05)
    got = b""
    while True:
        try:
            frame, link = switch.sockets[port].recvfrom(65536)
        except BlockingIOError:
            return got
        if link[2] != socket.PACKET_OUTGOING and frame[23] == socket.IPPROTO_UDP:
            got += frame[42:]


@pytest.mark.root
def test_a_superframe_is_checked_packet_by_packet(tc: TcSwitch) -> None:
    guard(tc)
    own = [gradient("w0", 1, sequence).payload() for sequence in range(1, 6)]
    superframe("w0", "ps", own)
    assert received(tc, "ps") == b"".join(own)
    assert tc.counters(0) == {"passed_gso": 1} and tc.drops() == {}
    forged = {
        "another's bit": gradient("w0", 2).payload(),
        "a sum": Packet("w0", Header(job_id=1, sequence=1, bitmap0=3, bitmap1=1, edge_switch_identifier=1)).payload(),
        "an ACK": Packet("w0", Header(job_id=1, sequence=1, is_ack=1)).payload(),
        "another job": Packet("w0", Header(job_id=2, bitmap0=1, bitmap1=1)).payload(),
        "too short": b"short",
    }
    for number, payload in enumerate(forged.values(), 1):
        padded = payload if payload == b"short" else payload.ljust(len(own[0]), b"\0")
        superframe("w0", "ps", [*own[:3], padded])
        assert received(tc, "ps") == b""
        assert tc.drops() == {"w0": {"forged": number}}
    superframe("w0", "w1", [Packet("w0", Header(job_id=1, sequence=1, is_ack=1), (0,) * 62).payload()] * 2)
    superframe("w2", "ps", own, source="w0")
    superframe("w2", "ps", own)
    assert received(tc, "ps") == b"" and received(tc, "w1") == b""
    assert tc.drops() == {"w0": {"forged": 5, "destination": 1}, "w2": {"source": 2}}


@pytest.mark.root
def test_what_comes_by_another_way_is_guarded_at_the_pod(tc: TcSwitch) -> None:
    """From this machine itself, and from a port where nothing is attached."""
    guard(tc)
    tc.check(tc.library.atp_switch_detach_tc(tc.handle, tc.port_number("w2")), "detach")
    own = (ctypes.c_uint32 * 1)(ip_number(address_of("w2")))
    tc.check(tc.library.atp_switch_set_sources(tc.handle, ctypes.c_uint32(tc.port_number("w2")), own, 1), "sources")
    frame = frame_of(gradient("w0", 1).payload(), "w0", "ps")
    assert tc.exchange("w2", frame, 0) == []
    assert tc.drops() == {"w2": {"source": 1}}
    assert tc.exchange("w2", frame_of(b"x" * 300, "w2", "w3"), 1) != []
    run("ip", "address", "add", "10.83.0.200/24", "dev", "br0")
    run("ip", "neighbour", "replace", address_of("ps"), "lladdr", mac_of("ps").hex(":"), "dev", "br0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.bind(("10.83.0.200", 0))
        s.sendto(gradient("w0", 1).payload(), (address_of("ps"), UDP_PORT))
        s.sendto(b"something else", (address_of("ps"), UDP_PORT + 1))
    assert received(tc, "ps") == b"something else"


@pytest.mark.root
def test_attach_and_detach_what_is_ours(tc: TcSwitch) -> None:
    lib = tc.library
    port = tc.port_number("w3")
    assert lib.atp_switch_attach_tc(tc.handle, port) == 0  # again: it is attached
    assert lib.atp_switch_attach_xdp(tc.handle, port) == -errno.EBUSY
    assert lib.atp_switch_detach_xdp(tc.handle, port) == -errno.ENOENT
    run("tc", "qdisc", "add", "dev", "h-w3", "clsact")
    u32 = ["prio", "7", "protocol", "ip", "u32", "match", "u32", "0", "0", "flowid", "1:1"]
    run("tc", "filter", "add", "dev", "h-w3", "ingress", *u32)
    assert lib.atp_switch_detach_tc(tc.handle, port) == 0
    assert lib.atp_switch_detach_tc(tc.handle, port) == -errno.ENOENT
    show = ["tc", "filter", "show", "dev", "h-w3", "ingress"]
    shown = subprocess.run(show, capture_output=True, text=True, check=True)
    assert "u32" in shown.stdout
    frame = frame_of(gradient("w3", 1).payload(), "w3", "ps")
    assert tc.exchange("w3", frame, 1) == [("ps", frame)]  # nothing aggregates there now
    assert lib.atp_switch_attach_xdp(tc.handle, port) == 0
    assert tc.exchange("w3", frame, 0) == []
    assert tc.counters(1) == {"rejected_bit": 1, "bytes_in": 306}
    assert lib.atp_switch_detach_xdp(tc.handle, port) == 0
    assert lib.atp_switch_attach_tc(tc.handle, 0x7FFFFFF) == -errno.ENODEV


@pytest.mark.root
def test_closing_detaches(tc: TcSwitch) -> None:
    frame = frame_of(gradient("w0", 1).payload(), "w0", "ps")
    assert tc.exchange("w0", frame, 0) == []
    Switch.close(tc)
    assert tc.exchange("w0", frame, 1) == [("ps", frame)]


@pytest.mark.root
def test_classic_tc_of_kernels_before_tcx(tc: TcSwitch) -> None:
    """The same through a clsact filter; it goes with the switch although no process holds it."""
    lib = tc.library
    lib.atp_test_use_classic_tc(tc.handle)
    for port in ("w0", "w1"):
        tc.check(lib.atp_switch_detach_tc(tc.handle, tc.port_number(port)), "detach")
        tc.check(lib.atp_switch_attach_tc(tc.handle, tc.port_number(port)), "attach")
    shown = ["tc", "filter", "show", "dev", "h-w0", "ingress"]
    assert "atp_tc" in subprocess.run(shown, capture_output=True, text=True, check=True).stdout
    assert tc.send(gradient("w0", 1), "ps", 0) == []
    assert [p.values for p in tc.send(gradient("w1", 2), "ps", 1)] == [(2,) * 62]
    Switch.close(tc)
    assert subprocess.run(shown, capture_output=True, text=True, check=True).stdout == ""


class ProductionClock(TestRunSwitch):
    def opener(self) -> Any:
        return self.library.atp_switch_open_bpf


@pytest.mark.root
def test_the_clock_of_production_is_monotonic_time() -> None:
    """Ticks are calibrated: within a few of them of CLOCK_MONOTONIC, and T passes in real time."""
    switch = ProductionClock(8, 62, 60_000_000)
    try:
        job_of_two(switch)
        frame = frame_of(gradient("w0", 1).payload(), "w0", "ps")
        assert switch.payload(frame) is None
        assert abs(switch.aggregator(0).timestamp_ns - time.monotonic_ns()) < 25_000_000
        assert switch.sweep() == 0
        assert switch.payload(frame) is None
        assert switch.counters(1)["duplicates"] == 1
        time.sleep(0.09)
        assert switch.payload(frame) is None
        assert switch.counters(1)["stale_takeovers"] == 1
        time.sleep(0.09)
        assert switch.sweep() == 1
        assert switch.occupancy(0) == 0
    finally:
        switch.close()


def in_threads(*work: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def guarded(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.root
def test_cores_at_once_lose_no_addition() -> None:
    """Two threads send the bits of the same sequences: every sum is whole, whoever came first."""
    switch = TestRunSwitch(8, 350, 10**15, BUILD)
    try:
        switch.set_clock(1)
        switch.set_job(1, 350, 0b111, 0, 0, [(0, 8)])
        for bit in (1, 2, 4):
            switch.admit(1, "w0", 0, bit)
        switch.ps_port(1, "ps")
        rounds = 400
        completed: list[bytes] = []
        barrier = threading.Barrier(2)

        def sender(bits: list[int], step: int) -> Callable[[], None]:
            def work() -> None:
                for sequence in range(rounds):
                    barrier.wait()
                    for bit in bits[::step]:
                        packet = gradient("w0", bit, sequence, sequence % 8, 1000 * bit + sequence, 350)
                        verdict, out = switch.run(PROGRAM_XDP, frame_of(packet.payload(), "w0", "ps"))
                        if verdict == 2:
                            completed.append(payload_of(out))
                    barrier.wait()
                    if step == 1:
                        header = Header(job_id=1, sequence=sequence, is_ack=1, aggregator_index=sequence % 8)
                        switch.run(PROGRAM_TC, frame_of(Packet("ps", header, (0,) * 350).payload(), "ps", "w0"))

            return work

        in_threads(sender([1, 2], 1), sender([4], 1 + 1))
        assert [Packet.parse("ps", c).header.sequence for c in completed] == list(range(rounds))
        for sequence, payload in enumerate(completed):
            assert Packet.parse("ps", payload).values == (7000 + 3 * sequence,) * 350
        assert switch.counters(1)["aggregated"] == 3 * rounds
        assert switch.occupancy(0) == 0
    finally:
        switch.close()


@pytest.mark.root
def test_delete_job_while_its_packets_flow() -> None:
    """After delete_job returns nothing of the job is left and nothing comes back, whatever the other core was doing."""
    switch = TestRunSwitch(8, 62, 10**15, BUILD)
    try:
        stop = threading.Event()
        frames = [frame_of(gradient("w0", 1, 5, index).payload(), "w0", "ps") for index in range(8)]

        def traffic() -> None:
            while not stop.is_set():
                for frame in frames:
                    switch.run(PROGRAM_XDP, frame)

        def control() -> None:
            try:
                for _ in range(60):
                    switch.set_job(1, 62, 0b11, 0, 0, [(0, 8)])
                    switch.admit(1, "w0", 0, 1)
                    time.sleep(0.002)
                    switch.delete_job(1)
                    for _ in range(3):
                        assert switch.occupancy(1) == 0
            finally:
                stop.set()

        in_threads(traffic, control)
        assert switch.counters(1)["allocated"] > 0
    finally:
        switch.close()


def test_the_control_interface_refuses_what_cannot_be(native: NativeSwitch) -> None:
    def refused(number: int, call: Callable[[], object]) -> None:
        with pytest.raises(OSError) as info:
            call()
        assert info.value.errno == number

    everything = [(0, 8)]
    refused(errno.EINVAL, lambda: native.set_job(0, 62, 1, 0, 0, everything))
    refused(errno.EINVAL, lambda: native.set_job(1, 63, 1, 0, 0, everything))
    refused(errno.EMSGSIZE, lambda: native.set_job(1, 350, 1, 0, 0, everything))
    refused(errno.EINVAL, lambda: native.set_job(1, 62, 1, 0, 0, []))
    refused(errno.EINVAL, lambda: native.set_job(1, 62, 1, 0, 0, [(0, 0)]))
    refused(errno.ERANGE, lambda: native.set_job(1, 62, 1, 0, 0, [(4, 5)]))
    refused(errno.ERANGE, lambda: native.set_job(1, 62, 1, 0, 0, [(8, 0xFFFFFFFF)]))
    refused(errno.EINVAL, lambda: native.set_job(1, 62, 1, 0, 1024, everything))
    refused(errno.ENOENT, lambda: native.delete_job(1))
    refused(errno.EINVAL, lambda: native.admit(1, "w0", 0, 3))
    refused(errno.EINVAL, lambda: native.admit(1, "w0", 0, 0))
    refused(errno.EINVAL, lambda: native.admit(1, "w0", 2, 1))
    refused(errno.ENOENT, lambda: native.revoke(1, "w0", 0, 1))
    refused(errno.EINVAL, lambda: native.transit(1, "up", 1, 0))
    refused(errno.EINVAL, lambda: native.set_group(0, ["w0"]))
    refused(errno.EINVAL, lambda: native.set_group(1, ["w0"] * 65))
    refused(errno.ENOENT, lambda: native.set_group(1, []))
    refused(errno.ERANGE, lambda: native.aggregator(8))
    refused(errno.ENOENT, lambda: native.set_port_rate("ps", 0, 0))
    refused(errno.ERANGE, lambda: native.set_port_rate("ps", 1, 1))
    for port in PORTS[:4]:
        native.admit(1, port, 0, 1)
    refused(errno.ENOSPC, lambda: native.admit(1, "up", 0, 1))
    native.revoke(1, "w0", 0, 1)
    native.admit(1, "up", 0, 1)
    refused(errno.EINVAL, lambda: NativeSwitch(0, 62, STALE_NS))
    refused(errno.EINVAL, lambda: NativeSwitch(65537, 62, STALE_NS))
    refused(errno.EINVAL, lambda: NativeSwitch(8, 100, STALE_NS))


@pytest.mark.root
def test_missing_objects_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TestRunSwitch(8, 62, STALE_NS, tmp_path)


def relay_config(port: int) -> str:
    return f"""\
# two workers and a PS
listen 127.83.3.1 {port}
memory 16 62
job 1 62 0x3 0 7 0 16   # full0 0x3, group 7, region 0..15
admission 1 0 0x1 127.83.3.2
admission 1 0 0x2 127.83.3.3
ps 1 127.83.3.9
group 7 127.83.3.2 127.83.3.3
"""


def udp(address: str, port: int = 0) -> socket.socket:
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.settimeout(5)
    s.bind((address, port))
    return s


def test_the_relay_program(tmp_path: Path) -> None:
    """One all-reduce of two workers through the program."""
    with udp("127.83.3.9") as ps:
        port = ps.getsockname()[1]
        config = tmp_path / "relay.conf"
        config.write_text(relay_config(port))
        program = subprocess.Popen([str(BUILD / "atp-relay"), str(config)], stderr=subprocess.PIPE, text=True)
        try:
            with udp("127.83.3.2", port) as first, udp("127.83.3.3", port) as second:
                deadline = time.monotonic() + 5
                relay = ("127.83.3.1", port)
                while True:  # until it listens
                    first.sendto(gradient("w0", 1, fill=20).payload(), relay)
                    second.sendto(gradient("w1", 2, fill=22).payload(), relay)
                    ps.settimeout(0.2)
                    try:
                        data = ps.recv(4096)
                        break
                    except TimeoutError:
                        assert time.monotonic() < deadline, "the relay does not listen"
                result = Packet.parse("ps", data)
                assert result.values == (42,) * 62
                assert (result.header.bitmap0, result.header.edge_switch_identifier) == (3, 1)
                ack = struct.pack(">IIII", 1 << 24 | 1, 0, 0, 1 << 17) + data[16:]
                ps.sendto(ack, relay)
                assert first.recv(4096) == ack
                assert second.recv(4096) == ack
                for stranger, bit in ((udp("127.83.3.66"), 1), (first, 2), (second, 3)):
                    raw = Header(job_id=1, sequence=9, bitmap0=bit, bitmap1=1, raw_float=1)
                    stranger.sendto(Packet("w0", raw, (7,) * 62).payload(), relay)
                    notice = Header(job_id=1, sequence=9, is_ack=1, raw_float=1, aggregator_index=2)
                    stranger.sendto(Packet("w0", notice, (7,) * 62).payload(), relay)
                own = Packet("w0", Header(job_id=1, sequence=9, bitmap0=2, bitmap1=1, raw_float=1), (7,) * 62).payload()
                second.sendto(own, relay)
                ps.settimeout(5)
                while (data := ps.recv(4096)) == result.payload():
                    pass  # repeats of the first sum
                assert data == own, "raw packets of others, and with others' bits, are not passed on"
        finally:
            program.terminate()
            program.wait(10)
        assert program.returncode == 0
        assert program.stderr is not None and program.stderr.read() == ""


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("listen nowhere 1\n", "line 1"),
        ("listen 127.83.3.1 10801\nmemory 16 63\n", "line 2"),
        ("listen 127.83.3.1 10801\nmemory 16 62\njob 1 62 1 0 0 8 9\n", "line 3"),
        ("job 1 62 1 0 0 0 1\n", "line 1"),
        ("listen 127.83.3.1 10801\n\n# no memory\n", "needs the lines listen and memory"),
        ("listen 127.83.3.1 10801\nmemory 16 62\nswitch on\n", "line 3"),
    ],
)
def test_the_relay_program_says_what_is_wrong(tmp_path: Path, text: str, complaint: str) -> None:
    config = tmp_path / "relay.conf"
    config.write_text(text)
    done = subprocess.run([str(BUILD / "atp-relay"), str(config)], capture_output=True, text=True, timeout=10)
    assert done.returncode == 2
    assert complaint in done.stderr


def test_loopback_is_the_first_interface() -> None:
    """The test runs name it by number."""
    assert socket.if_indextoname(LOOPBACK) == "lo"
