# SPDX-License-Identifier: Apache-2.0
"""Builds the Kubernetes, etcd, CoreDNS and helm executables from the pinned Go modules."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from . import versions
from .errors import ClusterError
from .paths import HACK, Paths

WORDS_FOR_DISK = "the build needs about 6 GB in Go's build and module caches (see `go env GOCACHE GOMODCACHE`)"


def go_build_argv(binary: versions.Binary, output: Path) -> list[str]:
    """The `go build` command line; run it in hack/go/<module>."""
    ldflags = " ".join(("-s", "-w", *binary.ldflags))
    # -mod=readonly: the committed go.sum decides; a build never changes the pins.
    return [
        "go",
        "build",
        "-mod=readonly",
        "-trimpath",
        "-ldflags",
        ldflags,
        "-o",
        str(output),
        binary.package,
    ]


def go_build_env(env: Mapping[str, str]) -> dict[str, str]:
    """Static binaries (CoreDNS and pause run in an empty image), no version control stamps, no go.work."""
    flags = [f for f in env.get("GOFLAGS", "").split() if not f.startswith(("-buildvcs", "-mod"))]
    return {**env, "CGO_ENABLED": "0", "GOFLAGS": " ".join([*flags, "-buildvcs=false"]), "GOWORK": "off"}


def missing(paths: Paths) -> list[versions.Binary]:
    """The binaries that still have to be built for this checkout's pins."""
    folder = versions.bin_dir(paths)
    return [b for b in versions.BINARIES if not (folder / b.name).exists()]


def build(paths: Paths) -> Path:
    """Builds what is missing, one after another, and returns the folder of the binaries.

    Safe to run twice at once (the second waits), and to interrupt: a file appears only when it is whole.
    Raises ClusterError with the compiler's last lines when a build fails.
    """
    folder = versions.bin_dir(paths)
    if not missing(paths):
        return folder
    if shutil.which("go") is None:
        raise ClusterError("go is not installed; run `hack/atp-cluster prereqs` to see how to install it")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        todo = missing(paths)
        for number, binary in enumerate(todo, start=1):
            _build_one(binary, folder, number, len(todo))
    return folder


def _build_one(binary: versions.Binary, folder: Path, number: int, total: int) -> None:
    print(
        f"building {binary.name} {binary.version} ({number} of {total}), takes about {binary.about}",
        file=sys.stderr,
        flush=True,
    )
    began = time.monotonic()
    partial = folder / f".{binary.name}.partial"
    argv = ["nice", "-n", "10", *go_build_argv(binary, partial)]
    module = HACK / "go" / binary.module
    result = subprocess.run(argv, cwd=module, env=go_build_env(os.environ), capture_output=True, text=True)
    if result.returncode != 0:
        last = "\n".join(result.stderr.splitlines()[-15:])
        raise ClusterError(f"building {binary.name} failed in {module}:\n{last}\n({WORDS_FOR_DISK})")
    partial.rename(folder / binary.name)
    print(f"  done in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
