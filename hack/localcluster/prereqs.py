# SPDX-License-Identifier: Apache-2.0
"""What must be on the machine before anything works; every missing thing is named at once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import versions
from .errors import ClusterError

_SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin"


@dataclass(frozen=True)
class AptPackage:
    """A Debian package, and what shows that it is there.

    probes: commands (a bare name), files (a path) or Python modules (python:NAME); all must exist.
    """

    name: str
    probes: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Toolchain:
    """A compiler or interpreter that is not installed with apt here, because Debian's is too old."""

    name: str
    command: str
    version_args: tuple[str, ...]
    minimum: tuple[int, ...]
    how: str


@dataclass(frozen=True)
class Missing:
    """One thing that is not there, with the command or the advice that fixes it."""

    name: str
    problem: str
    fix: str
    apt: str | None = None


APT: tuple[AptPackage, ...] = (
    AptPackage("containerd", ("containerd", "ctr"), "runs the pods"),
    AptPackage("runc", ("runc",), "starts containers"),
    AptPackage("containernetworking-plugins", ("/usr/lib/cni/bridge", "/usr/lib/cni/host-local"), "pod network"),
    AptPackage("iproute2", ("ip", "tc"), "pod network"),
    AptPackage("iptables", ("iptables",), "pod network and kubelet"),
    AptPackage("nftables", ("nft",), "Service addresses (kube-proxy)"),
    AptPackage("conntrack", ("conntrack",), "Service addresses (kube-proxy)"),
    AptPackage("openssl", ("openssl",), "the cluster's certificates"),
    AptPackage("ca-certificates", ("/etc/ssl/certs/ca-certificates.crt",), "downloads"),
    AptPackage("buildah", ("buildah",), "container images"),
    AptPackage("debootstrap", ("debootstrap",), "the base image"),
    AptPackage("build-essential", ("gcc", "make", "/usr/include/stdio.h"), "Rust's linker, the C switch core"),
    AptPackage("clang-14", ("clang-14",), "BPF programs"),
    AptPackage("clang-format-14", ("clang-format-14",), "lint"),
    AptPackage("llvm-14", ("llvm-strip-14",), "BPF programs"),
    AptPackage("libbpf-dev", ("/usr/include/bpf/bpf.h",), "BPF loader"),
    AptPackage("libelf-dev", ("/usr/include/libelf.h",), "BPF loader"),
    AptPackage("bpftool", ("bpftool",), "BPF programs"),
    AptPackage("protobuf-compiler", ("protoc",), "gRPC stubs"),
    AptPackage("ethtool", ("ethtool",), "network tests"),
    AptPackage("tcpdump", ("tcpdump",), "debugging"),
    AptPackage("python3-venv", ("python:ensurepip",), "the tests' and demo's environment"),
    AptPackage("git", ("git",), "this checkout"),
)

# What only the tests need.
APT_TESTS: tuple[AptPackage, ...] = (
    AptPackage(
        "python3-torch", ("/usr/lib/python3/dist-packages/torch/__init__.py",), "tests of the client, old torch"
    ),
    AptPackage("python3-sklearn", ("/usr/lib/python3/dist-packages/sklearn/__init__.py",), "tests of the client"),
    AptPackage("spin", ("spin",), "the protocol's model"),
    AptPackage(
        "libclang-rt-14-dev", ("/usr/lib/llvm-14/lib/clang/14.0.6/lib/linux/libclang_rt.fuzzer-x86_64.a",), "fuzzing"
    ),
)

TOOLCHAINS: tuple[Toolchain, ...] = (
    Toolchain(
        "Go",
        "go",
        ("version",),
        versions.MIN_GO,
        "unpack a current release from https://go.dev/dl into /usr/local",
    ),
    Toolchain("Rust", "cargo", ("--version",), versions.MIN_RUST, "install with rustup, see https://rustup.rs"),
    Toolchain(
        "Python",
        "python3",
        ("--version",),
        versions.MIN_PYTHON,
        "apt-get install python3 (Debian 12 has 3.11)",
    ),
)


def parse_version(text: str) -> tuple[int, ...] | None:
    """The first dotted number in a tool's version output: 'go version go1.26.8 linux' -> (1, 26, 8)."""
    match = re.search(r"(\d+(?:\.\d+)+)", text)
    return tuple(int(part) for part in match.group(1).split(".")) if match else None


def probe_exists(probe: str) -> bool:
    """True if the command (also in sbin, which users' PATH may lack), file or Python module exists."""
    if probe.startswith("python:"):
        argv = ["python3", "-c", f"import {probe.removeprefix('python:')}"]
        return shutil.which("python3") is not None and subprocess.run(argv, capture_output=True).returncode == 0
    if probe.startswith("/"):
        return Path(probe).exists()
    return shutil.which(probe) is not None or shutil.which(probe, path=_SYSTEM_PATH) is not None


def installed_version(tool: Toolchain) -> tuple[int, ...] | None:
    """The version a toolchain reports, or None when it is absent or silent."""
    if shutil.which(tool.command) is None:
        return None
    result = subprocess.run([tool.command, *tool.version_args], capture_output=True, text=True)
    return parse_version(result.stdout) if result.returncode == 0 else None


def apt_command(packages: Iterable[str], root: bool) -> list[str]:
    """The command that installs packages; waits for another apt instead of failing."""
    argv = ["apt-get", "install", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300", *packages]
    return argv if root else ["sudo", *argv]


def find_missing(
    apt: Sequence[AptPackage] = APT,
    toolchains: Sequence[Toolchain] = TOOLCHAINS,
    exists: Callable[[str], bool] = probe_exists,
    version_of: Callable[[Toolchain], tuple[int, ...] | None] = installed_version,
) -> list[Missing]:
    """Everything that is missing, in the order of the tables; empty when all is there."""
    found = []
    for package in apt:
        absent = [probe for probe in package.probes if not exists(probe)]
        if absent:
            fix = f"apt-get install {package.name}"
            found.append(Missing(package.name, f"no {', '.join(absent)} ({package.why})", fix, package.name))
    for tool in toolchains:
        wanted = ".".join(map(str, tool.minimum))
        version = version_of(tool)
        if version is None:
            found.append(Missing(tool.name, f"{tool.name} {wanted} or newer is not installed", tool.how))
        elif version < tool.minimum:
            have = ".".join(map(str, version))
            found.append(Missing(tool.name, f"{tool.name} {have} is older than {wanted}", tool.how))
    return found


def report(missing: Sequence[Missing], root: bool) -> str:
    """The text for the user: one line for each missing thing, then one command that fixes all it can."""
    if not missing:
        return "all prerequisites are installed"
    lines = [f"{len(missing)} missing:"]
    width = max(len(item.name) for item in missing)
    lines += [f"  {item.name:<{width}}  {item.problem}\n  {'':<{width}}  fix: {item.fix}" for item in missing]
    packages = [item.apt for item in missing if item.apt]
    if packages:
        lines += ["", "all packages at once (or `hack/atp-cluster prereqs --install`):"]
        lines += ["  " + " ".join(apt_command(packages, root))]
    return "\n".join(lines)


def install(missing: Sequence[Missing], apt: Sequence[AptPackage] = APT) -> list[Missing]:
    """Installs the apt packages among `missing`; returns what of `apt` is still missing afterwards."""
    packages = [item.apt for item in missing if item.apt]
    if packages:
        root = os.getuid() == 0
        update = ["apt-get", "update", "-o", "DPkg::Lock::Timeout=300"]
        for argv in (update if root else ["sudo", *update], apt_command(packages, root)):
            if subprocess.run(argv).returncode != 0:
                raise ClusterError(f"this command failed, see its output above: {' '.join(argv)}")
    return find_missing(apt)
