# SPDX-License-Identifier: Apache-2.0
"""IPv4 addresses inside the network namespace at the other end of a pod's veth, by netlink from this side.

RTM_GETADDR with IFA_TARGET_NETNSID (Linux 4.20, rtnetlink(7)) asks the kernel, which knows what the pod has; ARP and
bridge tables would repeat what a pod with NET_RAW says. pyroute2 encodes that attribute as text, so the message is made
by hand.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

_RTM_GETADDR = 22
_NLM_F_REQUEST_DUMP = 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_IFA_LOCAL, _IFA_TARGET_NETNSID = 2, 10
_SOL_NETLINK, _NETLINK_GET_STRICT_CHK = 270, 12
_HEADER = struct.Struct("=IHHII")
_IFADDRMSG_BYTES = 8
_TIMEOUT_SECONDS = 2.0


def pod_addresses(netnsid: int) -> tuple[int, ...]:
    """Addresses (host order, loopback left out) of all interfaces of a namespace, by its ID in this one; sorted.

    Raises:
        OSError: the kernel refuses (no CAP_NET_ADMIN there), or the namespace is gone.
    """
    request = struct.pack("=BBBBI", socket.AF_INET, 0, 0, 0, 0) + struct.pack("=HHi", 8, _IFA_TARGET_NETNSID, netnsid)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.settimeout(_TIMEOUT_SECONDS)
        netlink.setsockopt(_SOL_NETLINK, _NETLINK_GET_STRICT_CHK, 1)
        netlink.send(_HEADER.pack(_HEADER.size + len(request), _RTM_GETADDR, _NLM_F_REQUEST_DUMP, 1, 0) + request)
        found = set(_answers(netlink))
    return tuple(sorted(address for address in found if address >> 24 != 127))


def _answers(netlink: socket.socket) -> Iterator[int]:
    while True:
        data = netlink.recv(1 << 16)
        while data:
            length, kind, _, _, _ = _HEADER.unpack_from(data)
            body, data = data[_HEADER.size : length], data[(length + 3) & ~3 :]
            if kind == _NLMSG_DONE:
                return
            if kind == _NLMSG_ERROR:
                number = -struct.unpack_from("=i", body)[0]
                raise OSError(number, os.strerror(number))
            attributes = body[_IFADDRMSG_BYTES:]
            while len(attributes) >= 4:
                size, name = struct.unpack_from("=HH", attributes)
                if name == _IFA_LOCAL:
                    yield int.from_bytes(attributes[4:8], "big")
                attributes = attributes[(max(size, 4) + 3) & ~3 :]
