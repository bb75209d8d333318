# SPDX-License-Identifier: Apache-2.0
"""bmv2's Thrift interface, as much of it as P4Runtime on bmv2 lacks: registers, and the rate of a port's queue.

Messages are those of Thrift's binary protocol over TCP, unframed; a method is ``service:name``.
"""

from __future__ import annotations

import socket
import struct

BOOL, I32, I64, STRING = 2, 8, 10, 11
CALL, REPLY = 0x80010001, 0x80010002
SECONDS = 10.0


class ThriftError(Exception):
    """bmv2 answered with an exception, or with what is no answer."""


class Thrift:
    """A connection to bmv2's Thrift server on loopback."""

    def __init__(self, port: int = 9090) -> None:
        """OSError if nothing listens."""
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
        self.stream = self.socket.makefile("rb")

    def close(self) -> None:
        self.stream.close()
        self.socket.close()

    def call(self, method: str, *arguments: tuple[int, int | str]) -> int:
        """Call a method that returns an integer; arguments are (type, value) in order. ThriftError if it refuses."""
        fields = b"".join(
            struct.pack(">BH", kind, number) + encode(kind, value) for number, (kind, value) in enumerate(arguments, 1)
        )
        self.socket.sendall(struct.pack(">I", CALL) + encode(STRING, method) + bytes(4) + fields + b"\0")
        kind = self.number(">I")
        self.take(self.number(">I") + 4)  # name and sequence ID
        field = self.number(">B")
        identifier = self.number(">H") if field else -1
        if kind != REPLY or identifier != 0 or field not in (I32, I64):
            raise ThriftError(f"bmv2 refuses {method}{arguments}")
        value = self.number(">i" if field == I32 else ">q")
        self.take(1)
        return value

    def take(self, count: int) -> bytes:
        data = self.stream.read(count)
        if len(data) < count:
            raise ThriftError("bmv2 closed the connection")
        return data

    def number(self, layout: str) -> int:
        value: int = struct.unpack(layout, self.take(struct.calcsize(layout)))[0]
        return value

    def register(self, name: str, index: int) -> int:
        """One cell of a register, as an unsigned number of 64 bits."""
        return self.call("standard:bm_register_read", (I32, 0), (STRING, name), (I32, index)) % (1 << 64)

    def set_queue_rate(self, port: int, packets_a_second: int) -> None:
        """How fast a port's queue drains."""
        self.call("simple_switch:set_egress_queue_rate", (I32, port), (I64, packets_a_second))


def encode(kind: int, value: int | str) -> bytes:
    if isinstance(value, str):
        return struct.pack(">I", len(value)) + value.encode()
    return struct.pack(">i" if kind == I32 else ">q", value)
