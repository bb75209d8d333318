# SPDX-License-Identifier: Apache-2.0
"""Wheels and container images made from this checkout.

Each image is built from a staged context that holds only what it copies, so that the image cache (keyed by the
context's contents) sees a change where there is one and none where there is none.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from localcluster import images
from localcluster.errors import ClusterError

ROOT = Path(__file__).resolve().parent.parent.parent
STAGE = ROOT / "build" / "images"
WHEELS = ROOT / "build" / "wheels"


@dataclass(frozen=True)
class Images:
    """References of the images of one demo."""

    control_plane: str
    sidecar: str
    digits: str

    def all(self) -> list[str]:
        return [self.control_plane, self.sidecar, self.digits]


def build_wheel(folder: str, into: Path) -> None:
    """Build the wheel of the package in ``folder`` (reproducible: hatchling writes fixed times)."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(into)]
    done = subprocess.run(command, cwd=ROOT / folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"the wheel of {folder} did not build:\n{done.stderr.strip()}")


def stage(name: str) -> Path:
    """Return an empty context folder for image ``name``."""
    folder = STAGE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def ensure(name: str, containerfile: Path, context: Path, build_args: dict[str, str] | None = None) -> str:
    """Build image ``name`` from everything in the staged ``context``, which git ignores."""
    include = sorted(path.name for path in context.iterdir())
    return images.ensure(name, containerfile, context, build_args, include=include)


def control_plane() -> str:
    requirements = stage("control-plane-requirements")
    shutil.copy(ROOT / "hack/images/control-plane.txt", requirements / "requirements.txt")
    recipe = ROOT / "hack/images/control-plane-requirements.Containerfile"
    base = ensure("control-plane-requirements", recipe, requirements)
    context = stage("control-plane")
    for folder in ("proto", "operator", "switch-agent", "softswitch"):
        build_wheel(folder, context / "wheels")
    (context / "lib").mkdir()
    built = ROOT / "softswitch/build"  # not what is below: objects of the same names, for benchmarks
    for path in (built / "libatp_switch.so", *sorted(built.glob("atp_switch_*.o"))):
        shutil.copy(path, context / "lib" / path.name)
    recipe = ROOT / "hack/images/control-plane.Containerfile"
    return ensure("control-plane", recipe, context, {"REQUIREMENTS": base})


def sidecar() -> str:
    context = stage("sidecar")
    shutil.copy(ROOT / "hack/images/sidecar.txt", context / "requirements.txt")
    build_wheel("sidecar", context / "wheels")
    for wheel in WHEELS.glob("atp_transport-*.whl"):
        shutil.copy(wheel, context / "wheels")
    return ensure("sidecar", ROOT / "sidecar/Containerfile", context)


def digits() -> str:
    context = stage("digits")
    build_wheel("client", context / "wheels")
    shutil.copy(ROOT / "examples/digits/train.py", context / "train.py")
    return ensure("digits", ROOT / "examples/digits/Containerfile", context, {"BASE": images.ensure("torch")})


def build_all() -> Images:
    return Images(control_plane(), sidecar(), digits())
