# SPDX-License-Identifier: Apache-2.0
"""Images of a single static binary, written without any tool: the pause image and CoreDNS.

The format is the `docker save` one (manifest.json, a config, layers), which containerd imports.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path


def _tar_member(name: str, size: int, mode: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime, info.uid, info.gid = size, mode, 0, 0, 0
    return info


def content_key(binary: Path, user: str) -> str:
    """12 hex digits that name the image's content."""
    return hashlib.sha256(binary.read_bytes() + user.encode()).hexdigest()[:12]


def write_single_binary_image(binary: Path, reference: str, user: str, target: Path) -> None:
    """Writes an image archive holding /<name of binary> as its entry point, run as `user` ("uid:gid")."""
    layer = io.BytesIO()
    content = binary.read_bytes()
    with tarfile.open(fileobj=layer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(_tar_member(binary.name, len(content), 0o755), io.BytesIO(content))
    layer_digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = json.dumps(
        {
            "architecture": "amd64" if _is_amd64(content) else "arm64",
            "os": "linux",
            "created": "1970-01-01T00:00:00Z",
            "config": {"Entrypoint": [f"/{binary.name}"], "User": user, "WorkingDir": "/"},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
            "history": [{"created": "1970-01-01T00:00:00Z", "created_by": "hack/localcluster"}],
        }
    ).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    layer_name = f"{layer_digest}/layer.tar"
    manifest = [{"Config": config_name, "RepoTags": [reference], "Layers": [layer_name]}]
    partial = target.with_name(f".{target.name}.partial")
    with tarfile.open(partial, mode="w") as tar:
        for name, data in (
            (config_name, config),
            (layer_name, layer.getvalue()),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            tar.addfile(_tar_member(name, len(data), 0o644), io.BytesIO(data))
    partial.rename(target)


def _is_amd64(elf: bytes) -> bool:
    return int.from_bytes(elf[18:20], "little") == 62  # e_machine, EM_X86_64
