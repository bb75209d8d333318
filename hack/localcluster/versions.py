# SPDX-License-Identifier: Apache-2.0
"""What is built, at which version, and the key under which a set of built binaries is cached."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .paths import HACK, Paths

KUBERNETES = "v1.36.3"
ETCD = "v3.6.16"
HELM = "v3.22.0"
COREDNS = "v1.15.0"

MIN_GO = (1, 26)
MIN_RUST = (1, 95)  # as native/Cargo.toml says
MIN_PYTHON = (3, 11)

_BUILD_RECIPE = 1  # raise when the build flags change in a way that the fields below do not show


@dataclass(frozen=True)
class Binary:
    """One executable: the Go module under hack/go that pins it, and what to build there."""

    name: str
    module: str
    package: str
    version: str
    ldflags: tuple[str, ...]
    about: str  # rough build time, two cores


def _kube_ldflags(version: str) -> tuple[str, ...]:
    # Clients compare versions: without gitVersion the server calls itself v0.0.0 and is refused.
    major, minor, _ = version.removeprefix("v").split(".")
    at = "k8s.io/component-base/version"
    return (
        f"-X {at}.gitVersion={version}",
        f"-X {at}.gitMajor={major}",
        f"-X {at}.gitMinor={minor}",
        f"-X {at}.gitTreeState=clean",
    )


def _kube(name: str, about: str) -> Binary:
    return Binary(name, "kubernetes", f"k8s.io/kubernetes/cmd/{name}", KUBERNETES, _kube_ldflags(KUBERNETES), about)


BINARIES: tuple[Binary, ...] = (
    _kube("kube-apiserver", "four minutes"),
    _kube("kubelet", "a minute"),
    _kube("kube-controller-manager", "half a minute"),
    _kube("kube-scheduler", "ten seconds"),
    _kube("kube-proxy", "ten seconds"),
    _kube("kubectl", "half a minute"),
    Binary("etcd", "etcd", "go.etcd.io/etcd/server/v3", ETCD, (), "half a minute"),
    Binary("etcdctl", "etcd", "go.etcd.io/etcd/etcdctl/v3", ETCD, (), "ten seconds"),
    Binary("coredns", "coredns", ".", COREDNS, (), "two minutes"),
    Binary(
        "helm",
        "helm",
        "helm.sh/helm/v3/cmd/helm",
        HELM,
        (f"-X helm.sh/helm/v3/internal/version.version={HELM}",),
        "a minute",
    ),
    Binary("pause", "pause", ".", "local", (), "a few seconds"),
)


def cache_key(binaries: Iterable[Binary], modules: Path, arch: str) -> str:
    """16 hex digits over everything that decides the built files.

    modules: the folder holding <module>/go.mod, go.sum and any Go source, all of which count.
    """
    digest = hashlib.sha256(f"{_BUILD_RECIPE} {arch}\n".encode())
    for binary in sorted(binaries, key=lambda b: b.name):
        digest.update(f"{binary.name} {binary.module} {binary.package} {binary.version} {binary.ldflags}\n".encode())
        for path in sorted((modules / binary.module).glob("*")):
            if path.name in ("go.mod", "go.sum") or path.suffix == ".go":
                digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def bin_dir(paths: Paths) -> Path:
    """The folder that holds (or will hold) the binaries of this checkout's pins."""
    return paths.cache / "bin" / cache_key(BINARIES, HACK / "go", platform.machine())
