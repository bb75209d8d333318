# SPDX-License-Identifier: Apache-2.0
"""Build wheels of the Rust workspace into ``build/wheels``; ``--install`` puts them in the virtual environment.

The transport's abi3 wheel serves the virtual environment and the sidecar's image; the simulator's holds its program. A
wheel is built again only when one of its sources changed.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "native"
WHEELS = ROOT / "build" / "wheels"


@dataclass(frozen=True)
class Wheel:
    """A distribution of the workspace: its name, its crate, and the folders that it is made from."""

    name: str
    crate: str
    sources: tuple[str, ...]

    @property
    def pattern(self) -> str:
        return f"{self.name.replace('-', '_')}-*.whl"


TRANSPORT = Wheel(
    "atp-transport", "atp-py", ("native/atp-proto", "native/atp-net", "native/atp-py", "native/Cargo.lock")
)
SIMULATOR = Wheel(
    "atp-sim",
    "atp-sim",
    (
        "native/atp-proto",
        "native/atp-switch",
        "native/atp-sim",
        "native/Cargo.lock",
        "softswitch/include",
        "softswitch/core",
        "softswitch/src",
    ),
)
ALL = (TRANSPORT, SIMULATOR)


def sources_digest(wheel: Wheel) -> str:
    """SHA-256 over the names and contents of all sources of a wheel."""
    digest = hashlib.sha256()
    for source in wheel.sources:
        top = ROOT / source
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def build(wheel: Wheel) -> tuple[Path, str]:
    """Return the wheel of the present sources, built if need be, and the sources' digest.

    Raises:
        SystemExit: the build failed; its output has been shown.
    """
    stamp = WHEELS / f"{wheel.name}.digest"
    digest = sources_digest(wheel)
    found = sorted(WHEELS.glob(wheel.pattern))
    if found and stamp.exists() and stamp.read_text() == digest:
        return found[-1], digest
    WHEELS.mkdir(parents=True, exist_ok=True)
    for old in found:
        old.unlink()
    print(f"building {wheel.name} (Rust)", flush=True)
    command = [sys.executable, "-m", "maturin", "build", "--release", "--quiet", "--out", str(WHEELS)]
    command += ["--compatibility", "linux", "--manifest-path", str(NATIVE / wheel.crate / "Cargo.toml")]
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit(f"{wheel.name} did not build; see above")
    stamp.write_text(digest)
    return sorted(WHEELS.glob(wheel.pattern))[-1], digest


def install(wheel: Wheel) -> None:
    """Put the wheel in this interpreter's environment, unless that very build is there."""
    path, digest = build(wheel)
    installed = Path(sys.prefix) / f".{wheel.name}.digest"
    if installed.exists() and installed.read_text() == digest:
        return
    uv = [sys.executable, "-m", "uv", "pip", "install", "-q", "--python", sys.executable, "--no-deps", "--reinstall"]
    subprocess.run([*uv, str(path)], check=True)
    installed.write_text(digest)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=[wheel.name for wheel in ALL], help="the wheels to build")
    parser.add_argument("--install", action="store_true", help="install them in this interpreter's environment")
    options = parser.parse_args()
    for wheel in ALL:
        if wheel.name in options.names:
            (install if options.install else build)(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
