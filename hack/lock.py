# SPDX-License-Identifier: Apache-2.0
"""Lock the Python requirements, with hashes: one resolution for the workspace, and from it what each image installs.

``requirements-dev.txt`` is the lock; ``images/*.txt`` beside this script are subsets of it with the same versions.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEVELOPMENT = ROOT / "requirements-dev.in"
LOCK = ROOT / "requirements-dev.txt"
PACKAGES = ["proto", "operator", "switch-agent", "softswitch", "sidecar", "client"]
IMAGES = {
    "control-plane": ["proto", "operator", "switch-agent", "softswitch"],
    "sidecar": ["sidecar"],
}
NOT_HERE = re.compile(r"^(atp-|torch\b)")
"""Our own packages come from the checkout; torch is whatever the user's image has."""


def dependencies(folder: str) -> list[str]:
    """Third-party run-time requirements of the package in ``folder``."""
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    return [r for r in project.get("dependencies", []) if not NOT_HERE.match(r)]


def compile_lock(requirements: list[str], output: Path, constraint: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.txt"
        source.write_text("\n".join(requirements) + "\n")
        command = [sys.executable, "-m", "uv", "pip", "compile", "-q", "--generate-hashes", "--python-version", "3.11"]
        command += ["--universal", "--no-annotate", "--no-header", "--no-emit-index-url", "--no-emit-find-links"]
        command += ["-o", str(output), str(source)]
        if constraint:
            command += ["-c", str(constraint)]
        env = {k: v for k, v in os.environ.items() if k != "PIP_FIND_LINKS"}
        subprocess.run(command, check=True, env=env)
    header = "# Locked by hack/lock.py (make lock); edit the pyproject.toml files or requirements-dev.in.\n"
    output.write_text(header + output.read_text())


def main() -> int:
    wanted = [line for line in DEVELOPMENT.read_text().splitlines() if line and not line.startswith("#")]
    for folder in PACKAGES:
        wanted += dependencies(folder)
    compile_lock(wanted, LOCK, None)
    for image, folders in IMAGES.items():
        requirements = [r for folder in folders for r in dependencies(folder)]
        compile_lock(requirements, ROOT / "hack" / "images" / f"{image}.txt", LOCK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
