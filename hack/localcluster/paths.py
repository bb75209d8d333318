# SPDX-License-Identifier: Apache-2.0
"""Where things live: the checkout, the cache of built files, and the state of the running cluster."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HACK = Path(__file__).resolve().parent.parent
CHECKOUT = HACK.parent


@dataclass(frozen=True)
class Paths:
    """Folders of one user's cluster.

    cache: what can be rebuilt at the cost of time (binaries, root file systems, image archives).
    state: what belongs to this cluster (certificates, etcd, containerd's data, logs, pid files).
    """

    cache: Path
    state: Path

    @classmethod
    def from_env(cls, env: Mapping[str, str], home: Path) -> Paths:
        """ATP_CACHE and ATP_CLUSTER_STATE win, then the XDG folder for the cache.

        The state is in one place for everybody: the cluster runs as root, and its bridge, cgroups and
        addresses exist once in a machine.
        """
        xdg_cache = Path(env.get("XDG_CACHE_HOME") or home / ".cache")
        cache = Path(env.get("ATP_CACHE") or xdg_cache / "atp")
        state = Path(env.get("ATP_CLUSTER_STATE") or "/var/lib/atp-cluster")
        return cls(cache=cache.absolute(), state=state.absolute())

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def config(self) -> Path:
        return self.state / "config"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def pids(self) -> Path:
        return self.state / "pids"

    @property
    def kubeconfig(self) -> Path:
        return self.state / "kubeconfig"

    @property
    def containerd(self) -> Path:
        return self.state / "containerd"

    @property
    def containerd_socket(self) -> Path:
        return self.state / "containerd" / "containerd.sock"

    @property
    def kubelet(self) -> Path:
        return self.state / "kubelet"

    @property
    def host_before(self) -> Path:
        """What `up` found on the host (kernel settings, folders), for `down` to put back."""
        return self.state / "host-before.json"

    @property
    def images(self) -> Path:
        return self.cache / "images"


def current() -> Paths:
    """The paths of this process; under sudo the cache is the calling user's, where the binaries are."""
    uid = os.getuid()
    if uid == 0 and os.environ.get("SUDO_UID"):
        return Paths.from_env({**os.environ, "XDG_CACHE_HOME": ""}, _home(int(os.environ["SUDO_UID"])))
    return Paths.from_env(os.environ, Path(os.environ["HOME"]) if os.environ.get("HOME") else _home(uid))


def _home(uid: int) -> Path:
    try:
        return Path(pwd.getpwuid(uid).pw_dir)
    except KeyError:
        return Path("/root")
