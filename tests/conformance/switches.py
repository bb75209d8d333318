# SPDX-License-Identifier: Apache-2.0
"""The switches that the conformance vectors run on, behind one interface.

``native``: the C core called with packets. ``relay``: the core behind UDP sockets on loopback addresses. ``tc`` and
``xdp``: the BPF programs, with real frames over veth pairs and a bridge in a network namespace of the test.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atp_api.wire import HEADER_BYTES, UDP_PORT, Header

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "softswitch" / "build"
PORTS = ["w0", "w1", "w2", "w3", "up", "ps"]
"""Ports of the switch in the vectors: four workers, an uplink, the PS."""
HOSTS = [*PORTS, "r0", "r1"]
"""Whose addresses packets carry: the host of each port, and two behind the uplink."""
ROLES = {"worker": 1, "ps": 2}
PROGRAM_TC, PROGRAM_TC_ACK, PROGRAM_XDP, PROGRAM_XDP_BENCH = range(4)
CLONE_NEWNET = 0x40000000
NO_REPLY_SECONDS = 2.0
"""How long to wait for a packet that must come; the tests fail after it."""


class Options(ctypes.Structure):
    _fields_ = [
        ("aggregators", ctypes.c_uint32),
        ("values", ctypes.c_uint32),
        ("stale_ns", ctypes.c_uint64),
        ("object_dir", ctypes.c_char_p),
        ("pin_dir", ctypes.c_char_p),
    ]


class Region(ctypes.Structure):
    _fields_ = [("start", ctypes.c_uint32), ("size", ctypes.c_uint32)]


class JobConfig(ctypes.Structure):
    _fields_ = [
        ("values", ctypes.c_uint32),
        ("full0", ctypes.c_uint32),
        ("full1", ctypes.c_uint32),
        ("group", ctypes.c_uint32),
        ("region_count", ctypes.c_uint32),
        ("region", Region * 4),
    ]


class AdmissionKey(ctypes.Structure):
    _fields_ = [
        ("port", ctypes.c_uint32),
        ("bitmap", ctypes.c_uint32),
        ("job_id", ctypes.c_uint8),
        ("edge", ctypes.c_uint8),
        ("zero", ctypes.c_uint16),
    ]


class TransitKey(ctypes.Structure):
    _fields_ = [
        ("port", ctypes.c_uint32),
        ("bitmap1", ctypes.c_uint32),
        ("job_id", ctypes.c_uint8),
        ("zero", ctypes.c_uint8 * 3),
    ]


class Replica(ctypes.Structure):
    _fields_ = [
        ("port", ctypes.c_uint32),
        ("dst_ip", ctypes.c_uint32),
        ("dst_mac", ctypes.c_uint8 * 6),
        ("dst_port", ctypes.c_uint16),
    ]


class Host(ctypes.Structure):
    _fields_ = [
        ("port", ctypes.c_uint32),
        ("mark", ctypes.c_uint32),
        ("bitmap0", ctypes.c_uint32),
        ("bitmap1", ctypes.c_uint32),
        ("job_id", ctypes.c_uint8),
        ("role", ctypes.c_uint8),
        ("edge", ctypes.c_uint8),
        ("zero", ctypes.c_uint8),
    ]


class PortDrops(ctypes.Structure):
    _fields_ = [("port", ctypes.c_uint32), ("last_source", ctypes.c_uint32), ("dropped", ctypes.c_uint64 * 5)]


class AggregatorState(ctypes.Structure):
    _fields_ = [
        ("key", ctypes.c_uint32),
        ("level", ctypes.c_uint32),
        ("bitmap", ctypes.c_uint32),
        ("complete", ctypes.c_uint32),
        ("ecn", ctypes.c_uint32),
        ("timestamp_ns", ctypes.c_uint64),
    ]


EMIT = ctypes.CFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.c_uint32,
    ctypes.c_uint32,
    ctypes.POINTER(ctypes.c_uint8),
    ctypes.c_size_t,
    ctypes.c_int,
)


LIBRARY = BUILD / "testing" / "libatp_switch_testing.so"
"""The shipped library and, linked with it, what tests need (softswitch/testing)."""


def load_library(path: Path = LIBRARY) -> ctypes.CDLL:
    """Load the control library with the functions of atp_testing.h.

    Raises:
        FileNotFoundError: it is not built.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run make -C softswitch all bench-objects")
    library = ctypes.CDLL(str(path))
    library.atp_counter_names.restype = ctypes.POINTER(ctypes.c_char_p)
    library.atp_drop_names.restype = ctypes.POINTER(ctypes.c_char_p)
    library.atp_switch_close.restype = None
    library.atp_switch_token.restype = ctypes.c_uint64
    return library


def counter_names(library: ctypes.CDLL) -> list[str]:
    return names_of(library.atp_counter_names())


def names_of(table: Any) -> list[str]:
    names: list[str] = []
    while table[len(names)] is not None:
        names.append(table[len(names)].decode())
    return names


@dataclass(frozen=True)
class Packet:
    """ATP header and values, and what the network adds; ``port`` is where it came in or went out."""

    port: str
    header: Header
    values: tuple[int, ...] = ()
    ce: bool = False
    raw: bytes | None = None
    """The payload as it is, for lengths that no packet has."""
    src: str | None = field(default=None, compare=False)
    """Whose address it carries; None: that of the host at ``port``."""

    def payload(self) -> bytes:
        if self.raw is not None:
            return self.raw
        return self.header.pack() + struct.pack(f">{len(self.values)}i", *self.values)

    @staticmethod
    def parse(port: str, payload: bytes) -> Packet:
        if len(payload) < HEADER_BYTES or len(payload) % 4:
            return Packet(port, Header(), raw=payload)
        count = (len(payload) - HEADER_BYTES) // 4
        return Packet(port, Header.unpack(payload), struct.unpack(f">{count}i", payload[HEADER_BYTES:]))


@dataclass(frozen=True)
class Aggregator:
    job: int
    sequence: int
    level: int
    bitmap: int
    complete: bool
    ecn: bool
    timestamp_ns: int
    values: tuple[int, ...]


def address_of(port: str) -> str:
    """Host behind a port, or one of those behind the uplink: 10.83.0.1 and up."""
    return f"10.83.0.{HOSTS.index(port) + 1}"


def mac_of(port: str) -> bytes:
    return bytes([2, 0x0A, 0x79, 0, 0, HOSTS.index(port) + 1])


def ip_number(address: str) -> int:
    return int.from_bytes(socket.inet_aton(address), "big")


class Switch:
    """Tables, packets, state. ``send`` returns what the switch sent for one packet, in order of ports."""

    name = "abstract"
    routes_unknown = True
    """Whether a packet of an unknown job reaches the PS: not through a relay, which packets are addressed to."""
    max_values = 870

    def __init__(self, aggregators: int, values: int, stale_ns: int, object_dir: Path = BUILD) -> None:
        self.library = load_library()
        self.names = counter_names(self.library)
        self.values = values
        self.aggregators = aggregators
        self.handle = ctypes.c_void_p()
        self._now_ns = 0
        self.options = Options(aggregators, values, stale_ns, str(object_dir).encode())
        self.open()

    def open(self) -> None:
        self.check(self.opener()(ctypes.byref(self.options), ctypes.byref(self.handle)), "open")

    def opener(self) -> Any:
        raise NotImplementedError

    def port_number(self, port: str) -> int:
        raise NotImplementedError

    def send(self, packet: Packet, dst: str, expected: int) -> list[Packet]:
        raise NotImplementedError

    def close(self) -> None:
        self.library.atp_switch_close(self.handle)
        self.handle = ctypes.c_void_p()

    def check(self, result: int, what: str) -> int:
        if result < 0:
            raise OSError(-result, f"{what}: {os.strerror(-result)}")
        return result

    def set_clock(self, now_ns: int) -> None:
        self._now_ns = now_ns
        self.library.atp_test_set_clock(self.handle, ctypes.c_uint64(now_ns))

    def set_job(
        self,
        job: int,
        values: int,
        full0: int,
        full1: int,
        group: int,
        regions: Sequence[tuple[int, int]],
    ) -> None:
        config = JobConfig(values, full0, full1, group, len(regions))
        for i, (start, size) in enumerate(regions):
            config.region[i] = Region(start, size)
        self.check(self.library.atp_switch_set_job(self.handle, job, ctypes.byref(config)), "set_job")

    def delete_job(self, job: int) -> None:
        self.check(self.library.atp_switch_delete_job(self.handle, job), "delete_job")

    def admit(self, job: int, port: str, edge: int, bit: int) -> None:
        key = AdmissionKey(self.port_number(port), bit, job, edge, 0)
        self.check(self.library.atp_switch_set_admission(self.handle, ctypes.byref(key)), "set_admission")

    def revoke(self, job: int, port: str, edge: int, bit: int) -> None:
        key = AdmissionKey(self.port_number(port), bit, job, edge, 0)
        self.check(self.library.atp_switch_delete_admission(self.handle, ctypes.byref(key)), "delete_admission")

    def transit(self, job: int, port: str, rack: int, mask0: int) -> None:
        key = TransitKey(self.port_number(port), rack, job)
        self.check(
            self.library.atp_switch_set_transit(self.handle, ctypes.byref(key), ctypes.c_uint32(mask0)),
            "set_transit",
        )

    def ps_port(self, job: int, port: str) -> None:
        self.check(
            self.library.atp_switch_set_ps_port(self.handle, job, ctypes.c_uint32(self.port_number(port))),
            "set_ps_port",
        )

    def set_host(
        self, job: int, host: str, port: str, role: str, bitmap0: int = 0, bitmap1: int = 0, edge: int = 0
    ) -> None:
        value = Host(self.port_number(port), 0x100 + job, bitmap0, bitmap1, job, ROLES[role], edge, 0)
        address = ctypes.c_uint32(ip_number(address_of(host)))
        self.check(self.library.atp_switch_set_host(self.handle, address, ctypes.byref(value)), "set_host")

    def delete_host(self, job: int, host: str) -> None:
        address = ctypes.c_uint32(ip_number(address_of(host)))
        self.check(self.library.atp_switch_delete_host(self.handle, address), "delete_host")

    def drops(self) -> dict[str, dict[str, int]]:
        """What was dropped, by port and reason; what is 0 left out."""
        names = names_of(self.library.atp_drop_names())
        out = (PortDrops * 64)()
        count = self.check(self.library.atp_switch_read_drops(self.handle, out, ctypes.c_uint32(64)), "read_drops")
        ports = {self.port_number(port): port for port in PORTS}
        return {
            ports[entry.port]: {name: n for name, n in zip(names, entry.dropped, strict=True) if n}
            for entry in out[:count]
        }

    def set_group(self, group: int, ports: Sequence[str]) -> None:
        replicas = (Replica * len(ports))()
        for replica, port in zip(replicas, ports, strict=True):
            replica.port = self.port_number(port)
            replica.dst_ip = self.replica_address(port)
            replica.dst_mac = (ctypes.c_uint8 * 6)(*mac_of(port))
        self.check(self.library.atp_switch_set_group(self.handle, group, replicas, len(ports)), "set_group")

    def replica_address(self, port: str) -> int:
        return ip_number(address_of(port))

    def set_port_rate(self, port: str, bits_per_second: int, threshold: int) -> None:
        result = self.library.atp_switch_set_port_rate(
            self.handle,
            ctypes.c_uint32(self.port_number(port)),
            ctypes.c_uint64(bits_per_second),
            ctypes.c_uint32(threshold),
        )
        self.check(result, "set_port_rate")

    def sweep(self) -> int:
        return self.check(self.library.atp_switch_sweep(self.handle), "sweep")

    def occupancy(self, job: int) -> int:
        return self.check(self.library.atp_switch_occupancy(self.handle, job), "occupancy")

    def counters(self, job: int) -> dict[str, int]:
        """Counters that are not 0."""
        out = (ctypes.c_uint64 * len(self.names))()
        self.check(self.library.atp_switch_read_counters(self.handle, job, out), "read_counters")
        return {name: value for name, value in zip(self.names, out, strict=True) if value}

    def aggregator(self, index: int) -> Aggregator:
        state = AggregatorState()
        values = (ctypes.c_int32 * self.values)()
        self.check(
            self.library.atp_switch_read_aggregator(self.handle, index, ctypes.byref(state), values),
            "read_aggregator",
        )
        return Aggregator(
            state.key >> 24,
            state.key & 0xFFFFFF,
            state.level,
            state.bitmap,
            bool(state.complete),
            bool(state.ecn),
            state.timestamp_ns,
            tuple(values),
        )


class NativeSwitch(Switch):
    """The C core, one call for each packet."""

    name = "native"

    def opener(self) -> Any:
        return self.library.atp_test_open_native

    def port_number(self, port: str) -> int:
        return ip_number(address_of(port))

    def port_name(self, number: int) -> str:
        return PORTS[(number & 0xFF) - 1]

    def process(self, port: str, dst: str, ce: bool, payload: bytes) -> list[tuple[str, str, bytes]]:
        """Return (egress port, destination host, payload) of what came out."""
        sent: list[tuple[str, str, bytes]] = []

        def emit(_: Any, egress: int, dst_ip: int, data: Any, length: int, __: int) -> None:
            to = self.port_name(dst_ip)
            sent.append((self.port_name(egress) if egress else to, to, ctypes.string_at(data, length)))

        buffer = (ctypes.c_uint8 * max(1, len(payload))).from_buffer_copy(payload or b"\0")
        result = self.library.atp_switch_process(
            self.handle,
            ctypes.c_uint32(self.port_number(port)),
            ctypes.c_uint32(ip_number(address_of(dst))),
            int(ce),
            buffer,
            ctypes.c_size_t(len(payload)),
            ctypes.c_uint64(self._now_ns),
            EMIT(emit),
            None,
        )
        self.check(result, "process")
        return sent

    def send(self, packet: Packet, dst: str, expected: int) -> list[Packet]:
        sent = self.process(packet.port, dst, packet.ce, packet.payload())
        return sorted((Packet.parse(to, data) for _, to, data in sent), key=lambda p: PORTS.index(p.port))


class RelaySwitch(Switch):
    """The core behind sockets: a port is a loopback address, and everyone sends to the relay."""

    name = "relay"
    routes_unknown = False
    own = "127.83.1.1"

    def __init__(self, aggregators: int, values: int, stale_ns: int, object_dir: Path = BUILD) -> None:
        super().__init__(aggregators, values, stale_ns, object_dir)
        probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        probe.bind((self.own, 0))
        self.udp_port = int(probe.getsockname()[1])
        probe.close()
        self.sockets = {}
        for port in PORTS:
            s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            s.bind((self.host(port), self.udp_port))
            self.sockets[port] = s
        self.check(
            self.library.atp_relay_start(
                self.handle, ctypes.c_uint32(ip_number(self.own)), ctypes.c_uint16(self.udp_port)
            ),
            "relay_start",
        )

    def opener(self) -> Any:
        return self.library.atp_test_open_native

    def host(self, port: str) -> str:
        return f"127.83.0.{PORTS.index(port) + 1}"

    def port_number(self, port: str) -> int:
        return ip_number(self.host(port))

    def replica_address(self, port: str) -> int:
        return self.port_number(port)

    def close(self) -> None:
        for s in self.sockets.values():
            s.close()
        super().close()

    def seen_bytes(self) -> int:
        return sum(self.counters(job).get("bytes_in", 0) for job in range(256))

    def send(self, packet: Packet, dst: str, expected: int) -> list[Packet]:
        before = self.seen_bytes()
        sender = self.sockets[packet.port]
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 3 if packet.ce else 0)
        sender.sendto(packet.payload(), (self.own, self.udp_port))
        deadline = time.monotonic() + NO_REPLY_SECONDS
        while self.seen_bytes() == before:
            if time.monotonic() > deadline:
                raise TimeoutError("the relay did not take the packet")
        got: list[Packet] = []
        names = {s: port for port, s in self.sockets.items()}
        # The relay sends right after it has counted: nothing may follow what is expected.
        while True:
            wait = max(0.0, deadline - time.monotonic()) if len(got) < expected else 0.003
            ready = select.select(list(names), [], [], wait)[0]
            if not ready:
                break
            got += [Packet.parse(names[s], s.recv(8192)) for s in ready]
        return sorted(got, key=lambda p: PORTS.index(p.port))


def run(*command: str, text: str = "") -> None:
    """Run a command, ``text`` on its input.

    Raises:
        RuntimeError: it failed, with what it said.
    """
    done = subprocess.run(command, check=False, capture_output=True, text=True, input=text)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


class NetworkNamespace:
    """A namespace of this process's thread, with a bridge and one veth pair for each port; it ends with ``close``."""

    def __init__(self, mtu: int) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        if self.libc.unshare(CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "unshare: a network namespace needs root")
        self.cpus = os.sched_getaffinity(0)
        # One core: frames then keep their order, and a last frame shows that those before it are through.
        os.sched_setaffinity(0, {min(self.cpus)})
        try:
            self.build(mtu)
        except BaseException:
            self.close()
            raise

    def build(self, mtu: int) -> None:
        for name in ("all", "default"):
            switch = Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6")
            if switch.exists():
                switch.write_text("1")
        links = ["link set lo up", "link add br0 type bridge", "link set br0 up"]
        entries = []
        for port in PORTS:
            mac = mac_of(port).hex(":")
            links += [
                f"link add h-{port} mtu {mtu} type veth peer name p-{port} mtu {mtu} address {mac}",
                f"link set h-{port} master br0 up",
                f"link set p-{port} up",
            ]
            entries.append(f"fdb replace {mac} dev h-{port} master static")
        run("ip", "-batch", "-", text="\n".join(links))
        run("bridge", "-batch", "-", text="\n".join(entries))

    def close(self) -> None:
        os.sched_setaffinity(0, self.cpus)
        self.libc.setns(self.before, CLONE_NEWNET)
        os.close(self.before)


def ip_checksum(header: bytes) -> int:
    total: int = sum(struct.unpack(f">{len(header) // 2}H", header))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def frame_of(
    payload: bytes,
    src: str,
    dst: str,
    ce: bool = False,
    udp_port: int = UDP_PORT,
    udp_checksum: int = 0,
    fragment: int = 0,
    options: bytes = b"",
    padding: int = 0,
) -> bytes:
    """An Ethernet frame from one port's host to another's."""
    header_bytes = 20 + len(options)
    total = header_bytes + 8 + len(payload)
    ip = struct.pack(
        ">BBHHHBBH4s4s",
        0x40 | header_bytes // 4,
        3 if ce else 0,
        total,
        0,
        fragment,
        64,
        17,
        0,
        socket.inet_aton(address_of(src)),
        socket.inet_aton(address_of(dst)),
    )
    ip += options
    ip = ip[:10] + struct.pack(">H", ip_checksum(ip)) + ip[12:]
    udp = struct.pack(">HHHH", 40000, udp_port, 8 + len(payload), udp_checksum)
    return mac_of(dst) + mac_of(src) + b"\x08\x00" + ip + udp + payload + bytes(padding)


def payload_of(frame: bytes) -> bytes:
    """UDP payload of a frame without IP options, padding cut."""
    total = int.from_bytes(frame[16:18], "big")
    return frame[42 : 14 + total]


SENTINEL_PORT = 9
SENTINEL = b"through"


class VethSwitch(Switch):
    """The BPF programs on the host ends of veth pairs; the other ends play the hosts."""

    xdp = False

    def __init__(self, aggregators: int, values: int, stale_ns: int, object_dir: Path = BUILD) -> None:
        super().__init__(aggregators, values, stale_ns, object_dir)
        self.sockets: dict[str, socket.socket] = {}
        try:
            self.network = NetworkNamespace(1500 if values <= 350 else 3600)
            try:
                self.attach()
            except BaseException:
                self.network.close()
                raise
        except BaseException:
            super().close()
            raise

    def attach(self) -> None:
        for port in PORTS:
            self.attach_port(port)
            s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
            s.bind((f"p-{port}", 0x0800))
            s.setblocking(False)
            self.sockets[port] = s

    def attach_port(self, port: str) -> None:
        attach = self.library.atp_switch_attach_xdp if self.xdp else self.library.atp_switch_attach_tc
        self.check(attach(self.handle, self.port_number(port)), "attach")

    def opener(self) -> Any:
        return self.library.atp_test_open_bpf

    def port_number(self, port: str) -> int:
        index: int = socket.if_nametoindex(f"h-{port}")
        return index

    def close(self) -> None:
        for s in self.sockets.values():
            s.close()
        super().close()
        self.network.close()

    def exchange(self, port: str, frame: bytes, expected: int) -> list[tuple[str, bytes]]:
        """Send a frame from the host at ``port``; return (port, frame) of all that hosts receive."""
        self.sockets[port].send(frame)
        got: list[tuple[str, bytes]] = []
        deadline = time.monotonic() + NO_REPLY_SECONDS
        other = "ps" if port != "ps" else "w0"
        self.sockets[port].send(frame_of(SENTINEL, port, other, udp_port=SENTINEL_PORT))
        through = False
        while not through or len(got) < expected:
            ready = select.select(list(self.sockets.values()), [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                break
            through |= self.drain(got)
        time.sleep(0.001)
        self.drain(got)
        if not through:
            raise TimeoutError("the sentinel was lost: the test's network does not forward")
        return sorted(got, key=lambda item: PORTS.index(item[0]))

    def drain(self, got: list[tuple[str, bytes]]) -> bool:
        """Read all sockets; return whether the sentinel came."""
        through = False
        for port, s in self.sockets.items():
            while True:
                try:
                    frame, link = s.recvfrom(8192)
                except BlockingIOError:
                    break
                if link[2] == socket.PACKET_OUTGOING:
                    continue
                if frame[23] != socket.IPPROTO_UDP:
                    continue  # the kernel's own multicast housekeeping
                if frame[36:38] == SENTINEL_PORT.to_bytes(2, "big"):
                    through = True
                else:
                    got.append((port, frame))
        return through

    def send(self, packet: Packet, dst: str, expected: int) -> list[Packet]:
        frames = self.exchange(
            packet.port, frame_of(packet.payload(), packet.src or packet.port, dst, packet.ce), expected
        )
        for port, frame in frames:
            assert frame[:6] == mac_of(port), "destination MAC"
            assert socket.inet_ntoa(frame[30:34]) == address_of(port), "destination IP"
            assert ip_checksum(frame[14:34]) == 0, "IP checksum"
            assert frame[40:42] == b"\0\0", "UDP checksum"
        return [Packet.parse(port, payload_of(frame)) for port, frame in frames]


class TcSwitch(VethSwitch):
    name = "tc"


class XdpSwitch(VethSwitch):
    name = "xdp"
    xdp = True
    max_values = 350


SWITCHES: list[type[Switch]] = [NativeSwitch, RelaySwitch, TcSwitch, XdpSwitch]
