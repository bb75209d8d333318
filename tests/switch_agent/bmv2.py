# SPDX-License-Identifier: Apache-2.0
"""bmv2 (simple_switch_grpc) without a program, in a network namespace of its own: it listens on all addresses."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from atp_api.switchagent.v1alpha1 import switchagent_pb2 as api
from atp_switch_agent.codec import bmv2_paths

PORTS = range(1, 6)
ATP_PORT = 10800
_CLONE_NEWNET = 0x40000000
_STARTED_WITHIN_SECONDS = 60.0


def find() -> str | None:
    """simple_switch_grpc: what P4_BMV2 names, or on PATH."""
    return os.environ.get("P4_BMV2") or shutil.which("simple_switch_grpc")


def reason_not_to_run() -> str | None:
    """What is missing, or None."""
    found = find()
    if found is None:
        return "bmv2 is not installed: build p4lang/behavioral-model and set P4_BMV2 to its simple_switch_grpc"
    if not os.access(found, os.X_OK):
        return f"P4_BMV2 is {found}, which is no program"
    if os.geteuid() != 0:
        return "a network namespace needs root"
    return None


def mac_of(number: int) -> str:
    """Of the host at a port."""
    return f"02:0a:77:00:00:{number:02x}"


def address_of(number: int) -> str:
    return f"10.77.3.{10 + number}"


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """This thread in a named network namespace; sockets stay where they were opened."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open("rb") as home, Path(f"/run/netns/{namespace}").open("rb") as there:
        if libc.setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        try:
            yield
        finally:
            libc.setns(home.fileno(), _CLONE_NEWNET)


def frame(source: int, destination: int, payload: bytes) -> bytes:
    """Ethernet, IPv4 and UDP around a payload, from host to host."""
    macs = b"".join(bytes.fromhex(mac_of(number).replace(":", "")) for number in (destination, source))
    addresses = b"".join(socket.inet_aton(address_of(number)) for number in (source, destination))
    header = struct.pack(">BBHHHBBH", 0x45, 0, 28 + len(payload), 0, 0, 64, 17, 0) + addresses
    total = sum(struct.unpack(">10H", header))
    total = (total & 0xFFFF) + (total >> 16)
    checksum = ~(total + (total >> 16)) & 0xFFFF
    header = header[:10] + struct.pack(">H", checksum) + header[12:]
    return macs + b"\x08\x00" + header + struct.pack(">4H", ATP_PORT, ATP_PORT, 8 + len(payload), 0) + payload


class Bmv2:
    """One bmv2 with a host at each port. P4Runtime is on a unix socket, which is reached from any namespace."""

    kind = "bmv2"

    def __init__(self, folder: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="atp-bmv2-"))  # a unix socket's path must be short
        self._log = folder / "bmv2.log"
        self._namespace = f"atp-agent-{os.getpid()}"
        self._process: subprocess.Popen[bytes] | None = None
        self._sockets: dict[int, socket.socket] = {}

    def __enter__(self) -> Bmv2:
        self._run("ip", "netns", "add", self._namespace)
        try:
            within = ("ip", "netns", "exec", self._namespace)
            self._run(*within, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
            self._run(*within, "ip", "link", "set", "lo", "up")
            for port in PORTS:
                ends = ("type", "veth", "peer", "name", f"host{port}", "address", mac_of(port))
                self._run(*within, "ip", "link", "add", f"port{port}", *ends)
                for name in (f"port{port}", f"host{port}"):
                    self._run(*within, "ip", "link", "set", name, "up")
            with inside(self._namespace):
                for port in PORTS:
                    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
                    opened.bind((f"host{port}", 0x0800))
                    opened.settimeout(5)
                    self._sockets[port] = opened
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def _run(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True)

    def close(self) -> None:
        self.kill()
        for opened in self._sockets.values():
            opened.close()
        subprocess.run(["ip", "netns", "del", self._namespace], check=False, capture_output=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- as a switch of the tests -------------------------------------------------------------------

    @property
    def address(self) -> str:
        return f"unix:{self._folder}/grpc"

    def start(self, p4info: Path | None = None) -> None:
        """Start it empty. RuntimeError with what it printed if it ends."""
        del p4info  # it takes what is pushed
        (self._folder / "grpc").unlink(missing_ok=True)
        command = ["ip", "netns", "exec", self._namespace, find() or "simple_switch_grpc", "--no-p4"]
        command += ["--device-id", "1", "--notifications-addr", f"ipc://{self._folder}/notifications"]
        for port in PORTS:
            command += ["-i", f"{port}@port{port}"]
        command += ["--", "--grpc-server-addr", self.address]
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=self._folder
            )
        deadline = time.monotonic() + _STARTED_WITHIN_SECONDS
        while not (self._folder / "grpc").exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"bmv2 did not start: {self._log.read_text(errors='replace')}")
            time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def options(self, p4info: Path | None = None) -> list[str]:
        ours, program = bmv2_paths()
        return ["--ports", "static", "--p4info", str(p4info or ours), "--device-config", str(program)]

    def endpoint(self, number: int) -> api.Endpoint:
        return api.Endpoint(address=address_of(number), port=number, mac=mac_of(number))

    def nowhere(self) -> api.Endpoint:
        return api.Endpoint(address=address_of(99), port=600, mac=mac_of(99))

    # -- hosts --------------------------------------------------------------------------------------

    def send(self, source: int, destination: int, payload: bytes) -> None:
        """A UDP datagram between ATP ports."""
        self._sockets[source].send(frame(source, destination, payload))

    def receive(self, at: int) -> bytes | None:
        """Payload of the next datagram from another host; None after a while of silence."""
        while True:
            try:
                data, where = self._sockets[at].recvfrom(9000)
            except TimeoutError:
                return None
            if where[2] != socket.PACKET_OUTGOING:
                return data[42:]

    def quiet(self, seconds: float) -> None:
        """How long `receive` waits."""
        for opened in self._sockets.values():
            opened.settimeout(seconds)
