# SPDX-License-Identifier: Apache-2.0
"""Interpreters with torch, one for each version that is tested: the only place that names these versions.

    hack/torchenv.py                 # the versions
    hack/torchenv.py middle newest   # paths of the interpreters; installs them (5 GB, a minute or two each) if need be

`oldest` is Debian's python3-torch; the others are virtual environments in the user's cache (ATP_CACHE), one for each
version. Wants `uv` in the interpreter that runs this (the workspace's .venv has it).
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


class TorchError(RuntimeError):
    """No interpreter with that torch; the text says what to do."""


@dataclass(frozen=True)
class Torch:
    """One torch and what is installed beside it."""

    version: str
    numpy: str
    sklearn: str
    setuptools: str = ""

    @property
    def requirements(self) -> list[str]:
        """What pip installs. expecttest is for torch's own tests."""
        versions = {"torch": self.version, "numpy": self.numpy, "scikit-learn": self.sklearn, "expecttest": "0.3.0"}
        versions |= {"setuptools": self.setuptools} if self.setuptools else {}
        return [f"{name}=={version}" for name, version in versions.items()]


PYTHON = "3.11"
DEBIAN = "1.13"  # of python3-torch, see APT_TESTS in localcluster/prereqs.py
# The last release of each minor version. numpy 2 came while torch 2.2 was current. The tests of several versions want
# setuptools (2.1, 2.6, 2.9), with pkg_resources.packaging; those that all runs use do not.
MATRIX: tuple[Torch, ...] = (
    *(Torch(version, "1.26.4", "1.5.2", "69.5.1") for version in ("2.0.1", "2.1.2", "2.2.2", "2.3.1")),
    Torch("2.4.1", "1.26.4", "1.5.2"),
    Torch("2.5.1", "1.26.4", "1.5.2", "69.5.1"),
    *(Torch(version, "2.4.6", "1.9.1", "69.5.1") for version in ("2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0")),
    *(Torch(version, "2.4.6", "1.9.1", "69.5.1") for version in ("2.11.0", "2.12.1", "2.13.0", "2.14.1")),
    Torch("2.15.0", "2.4.6", "1.9.1"),
)
NAMED = {"oldest": DEBIAN, "middle": "2.4.1", "newest": MATRIX[-1].version}
"""What `make test` runs."""


def cache() -> Path:
    """Where the environments are."""
    base = os.environ.get("ATP_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "atp"


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise TorchError(f"`{' '.join(command)}` failed: {done.stderr.strip()[-1000:]}")
    return done.stdout.strip()


def _has(python: Path, wanted: str) -> bool:
    """Whether this interpreter has torch `wanted` and all that goes with it."""
    command = [str(python), "-c", "import torch, sklearn; print(torch.__version__)"]
    done = subprocess.run(command, capture_output=True, text=True)
    version = done.stdout.strip().split("+")[0]
    return version == wanted or version.startswith(f"{wanted}.")


def interpreter(name: str) -> Path:
    """The interpreter with a torch, installed if need be.

    Args:
        name: oldest, middle, newest or a version of MATRIX.

    Raises:
        TorchError: there is no such version here, or it cannot be installed.
    """
    version = NAMED.get(name, name)
    if version == DEBIAN:
        python = Path(os.environ.get("ATP_TEST_PYTHON_TORCH_1", "/usr/bin/python3"))
        if not _has(python, DEBIAN):
            raise TorchError(
                f"{python} has no torch {DEBIAN}: apt-get install --no-install-recommends python3-torch "
                "python3-sklearn, or set ATP_TEST_PYTHON_TORCH_1"
            )
        return python
    if name == "newest" and os.environ.get("ATP_TEST_PYTHON_TORCH_2"):
        return Path(os.environ["ATP_TEST_PYTHON_TORCH_2"])
    chosen = next((each for each in MATRIX if each.version == version), None)
    if chosen is None:
        raise TorchError(f"no torch {name}: {', '.join([*NAMED, *(each.version for each in MATRIX)])}")
    return _environment(chosen)


def _environment(torch: Torch) -> Path:
    folder = cache() / f"venv-torch-{torch.version}"
    python, made = folder / "bin" / "python", folder / "requirements.txt"
    text = "\n".join([f"python=={PYTHON}", *torch.requirements]) + "\n"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if python.exists() and made.exists() and made.read_text() == text:
            return python
        uv = [sys.executable, "-m", "uv"]
        _run([*uv, "venv", "-q", "--allow-existing", "--python", PYTHON, str(folder)])
        _run([*uv, "pip", "install", "-q", "--python", str(python), *torch.requirements])
        if not _has(python, torch.version):
            raise TorchError(f"{python} does not import torch {torch.version} after its installation")
        made.write_text(text)
    return python


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Interpreters with torch, for tests and figures.")
    parser.add_argument("names", nargs="*", help="oldest, middle, newest or a version")
    arguments = parser.parse_args()
    if not arguments.names:
        for version in (DEBIAN, *(each.version for each in MATRIX)):
            names = [name for name, named in NAMED.items() if named == version]
            print(version, *names)
        return 0
    try:
        for name in arguments.names:
            print(interpreter(name), flush=True)
    except TorchError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
