# SPDX-License-Identifier: Apache-2.0
"""What a pod can put on the wire with the container runtime's default capabilities (NET_RAW)."""

from __future__ import annotations

import socket
import struct

from conformance.switches import ip_checksum

from atp_api.wire import UDP_PORT, Header

UDP_SEGMENT = 103


def datagram(
    source: str,
    to: str,
    payload: bytes,
    *,
    port: int = UDP_PORT,
    fragment: int = 0,
    options: bytes = b"",
    udp_length: int | None = None,
) -> bytes:
    """An IP packet. `udp_length`: what the UDP header says, if not the truth."""
    udp = struct.pack(">HHHH", UDP_PORT, port, 8 + len(payload) if udp_length is None else udp_length, 0) + payload
    length = 20 + len(options)
    head = struct.pack(
        ">BBHHHBBH4s4s",
        0x40 | length // 4,
        0,
        length + len(udp),
        7,
        fragment,
        64,
        socket.IPPROTO_UDP,
        0,
        socket.inet_aton(source),
        socket.inet_aton(to),
    )
    head += options
    return head[:10] + struct.pack(">H", ip_checksum(head)) + head[12:] + udp


def raw_socket() -> socket.socket:
    """Sends whole IP packets, whatever their source."""
    return socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)


def superframe(s: socket.socket, to: str, payloads: list[bytes]) -> None:
    """Packets of one length in one buffer, which the kernel cuts into datagrams behind every hook on the way."""
    s.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, len(payloads[0]))
    s.sendto(b"".join(payloads), (to, UDP_PORT))


def packet(values: int, fill: int | float, **fields: int) -> bytes:
    """An ATP packet; a float fills it with float32, as raw packets have them."""
    word = struct.pack(">f", fill) if isinstance(fill, float) else struct.pack(">i", fill)
    return Header(**fields).pack() + word * values
