# SPDX-License-Identifier: Apache-2.0
"""Hosts around one switch, each in a network namespace of its own. The switch's end is this process's namespace."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNET = 0x40000000
MTU = 1500
OFFLOADS = [word for name in ("tx", "sg", "tso", "gso", "gro") for word in (name, "off")]


@dataclass(frozen=True)
class Host:
    """A machine: its namespace and address, and the switch's port to it (number from 1, interface of the switch)."""

    name: str
    number: int
    namespace: str

    @property
    def address(self) -> str:
        return f"10.84.0.{self.number}"

    @property
    def mac(self) -> str:
        return f"02:0a:84:00:00:{self.number:02x}"

    @property
    def interface(self) -> str:
        return f"port{self.number}"

    def command(self, *words: str) -> list[str]:
        """The command line that runs ``words`` on this host."""
        return ["ip", "netns", "exec", self.namespace, *words]


def run(*words: str) -> None:
    """Run a command. RuntimeError with what it said if it fails."""
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")


def enter_own_namespace() -> None:
    """Move this thread, and what it starts, to a new network namespace. OSError without root."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "a network namespace needs root")
    for name in ("all", "default"):
        switch = Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6")
        if switch.exists():
            switch.write_text("1")
    run("ip", "link", "set", "lo", "up")


@contextmanager
def hosts(names: Sequence[str]) -> Iterator[list[Host]]:
    """Namespaces with one interface eth0 each, wired to this one; they are deleted at the end."""
    made = [Host(name, number, f"atp-{os.getpid()}-{name}") for number, name in enumerate(names, 1)]
    try:
        for host in made:
            build(host, made)
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "del", host.namespace], check=False, capture_output=True)


def build(host: Host, everyone: Sequence[Host]) -> None:
    run("ip", "netns", "add", host.namespace)
    run("ip", "link", "add", host.interface, "mtu", str(MTU), "type", "veth", "peer", "name", "eth0",
        "netns", host.namespace, "mtu", str(MTU), "address", host.mac)  # fmt: skip
    run("ip", "link", "set", host.interface, "up")
    # A switch copies frames as they are: checksums and segments that are left to the NIC would never be made.
    run(*host.command("ethtool", "-K", "eth0", *OFFLOADS))
    run(*host.command("ip", "link", "set", "lo", "up"))
    run(*host.command("ip", "address", "add", f"{host.address}/24", "dev", "eth0"))
    run(*host.command("ip", "link", "set", "eth0", "up"))
    for other in everyone:
        if other != host:
            run(
                *host.command(
                    "ip", "neigh", "add", other.address, "lladdr", other.mac, "dev", "eth0", "nud", "permanent"
                )
            )
