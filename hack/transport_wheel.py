# SPDX-License-Identifier: Apache-2.0
"""Build the wheel of the Rust transport into ``build/wheels``; ``--install`` puts it in the virtual environment.

One abi3 wheel serves the virtual environment and the sidecar's image. It is built again only when a source changed.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "native"
WHEELS = ROOT / "build" / "wheels"


def sources_digest() -> str:
    """SHA-256 over the names and contents of all sources of the workspace."""
    digest = hashlib.sha256()
    for path in sorted(NATIVE.rglob("*")):
        if path.is_file() and "target" not in path.relative_to(NATIVE).parts:
            digest.update(str(path.relative_to(NATIVE)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def wheel() -> Path:
    """Return the wheel of the present sources, built if need be.

    Raises:
        SystemExit: the build failed; its output has been shown.
    """
    stamp = WHEELS / "digest"
    digest = sources_digest()
    found = sorted(WHEELS.glob("atp_transport-*.whl"))
    if found and stamp.exists() and stamp.read_text() == digest:
        return found[-1]
    WHEELS.mkdir(parents=True, exist_ok=True)
    for old in found:
        old.unlink()
    print("building the transport (Rust)", flush=True)
    command = [sys.executable, "-m", "maturin", "build", "--release", "--quiet", "--out", str(WHEELS)]
    command += ["--compatibility", "linux", "--manifest-path", str(NATIVE / "atp-py" / "Cargo.toml")]
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit("the transport did not build; see above")
    stamp.write_text(digest)
    return sorted(WHEELS.glob("atp_transport-*.whl"))[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--install", action="store_true", help="install it in this interpreter's environment")
    install: bool = parser.parse_args().install
    path = wheel()
    installed = WHEELS / f"installed-{Path(sys.prefix).name}"
    if install and not (installed.exists() and installed.read_text() == (WHEELS / "digest").read_text()):
        uv = [
            sys.executable,
            "-m",
            "uv",
            "pip",
            "install",
            "-q",
            "--python",
            sys.executable,
            "--no-deps",
            "--reinstall",
        ]
        subprocess.run([*uv, str(path)], check=True)
        installed.write_text((WHEELS / "digest").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
