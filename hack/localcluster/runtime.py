# SPDX-License-Identifier: Apache-2.0
"""The node's container runtime: a containerd of our own (own root, state and socket) and its CNI network."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from . import hostnet, processes
from .errors import ClusterError, write_if_changed
from .paths import Paths
from .processes import Spec
from .settings import BRIDGE, BRIDGE_IP, CNI_PLUGINS, POD_CIDR, POD_MTU

NAMESPACE = "k8s.io"  # where the kubelet's images and containers live in containerd


def containerd_config(paths: Paths, pause_image: str) -> str:
    """containerd's configuration (version 2, understood by 1.6 and later)."""
    base = paths.containerd
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    # restrict_oom_score_adj: where lowering the score is forbidden, runc fails without a usable message.
    # netns_mounts_under_state_dir: so that one unmount below our folder leaves no network namespace behind.
    return f"""version = 2
root = "{base}/root"
state = "{base}/run"
disabled_plugins = [
  "io.containerd.internal.v1.opt",
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
]

[grpc]
  address = "{paths.containerd_socket}"

[{cri}]
  sandbox_image = "{pause_image}"
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  max_container_log_line_size = 65536

  [{cri}.cni]
    bin_dir = "{CNI_PLUGINS}"
    conf_dir = "{paths.config}/cni"

  [{cri}.containerd]
    snapshotter = "overlayfs"

    [{cri}.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"

      [{cri}.containerd.runtimes.runc.options]
        SystemdCgroup = false
        Root = "{base}/runc"
"""


def cni_config(paths: Paths) -> str:
    """The pod network: veths are ports of one bridge; a pod may reach itself through a Service (hairpin).

    There is no portmap plugin, so hostPort has no effect: it would listen on all of the host's addresses.
    """
    bridge = {
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": True,
        "ipMasq": False,  # hostnet's egress chain does it, in a table that `down` removes
        "hairpinMode": True,
        "mtu": POD_MTU,
        "ipam": {
            "type": "host-local",
            "dataDir": str(paths.state / "ipam"),
            "ranges": [[{"subnet": POD_CIDR, "gateway": BRIDGE_IP}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    return json.dumps({"cniVersion": "0.4.0", "name": "atp-local", "plugins": [bridge]}, indent=1)


def spec(paths: Paths) -> Spec:
    config = paths.config / "containerd.toml"
    return Spec("containerd", ("containerd", "--config", str(config)), config_files=(config,))


def write_config(paths: Paths, pause_image: str) -> None:
    (paths.config / "cni").mkdir(parents=True, exist_ok=True)
    write_if_changed(paths.config / "cni" / "10-atp.conflist", cni_config(paths))
    write_if_changed(paths.config / "containerd.toml", containerd_config(paths, pause_image))


def ctr_argv(paths: Paths, *args: str) -> list[str]:
    """A `ctr` command line for our containerd and the kubelet's namespace."""
    return ["ctr", "--address", str(paths.containerd_socket), "--namespace", NAMESPACE, *args]


def ctr(paths: Paths, *args: str, check: bool = True) -> str:
    return hostnet.run(*ctr_argv(paths, *args), check=check)


def answers(paths: Paths) -> bool:
    """True once containerd serves requests."""
    if not paths.containerd_socket.exists():
        return False
    return subprocess.run(ctr_argv(paths, "version"), capture_output=True).returncode == 0


def image_exists(paths: Paths, reference: str) -> bool:
    return reference in ctr(paths, "images", "ls", "-q", f"name=={reference}").split()


def import_image(paths: Paths, archive: Path) -> None:
    """Imports a docker or OCI archive under the names written in it, for the kubelet to use."""
    hostnet.run(*import_argv(paths, str(archive)))


def import_argv(paths: Paths, archive: str) -> list[str]:
    """The `ctr` command line that imports an archive; "-" reads it from standard input."""
    return ctr_argv(paths, "images", "import", "--snapshotter", "overlayfs", archive)


def shims(paths: Paths) -> list[int]:
    """Pids of the container shims that belong to our containerd (they outlive it by design)."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                argv = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if argv[0].endswith(b"containerd-shim-runc-v2") and str(paths.containerd_socket).encode() in argv:
                found.append(int(folder.name))
    return found


def children(pid: int) -> list[int]:
    """Pids of the direct children of a process; empty when it is gone."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def remove_all_pods(paths: Paths) -> None:
    """Ends every container and sandbox, also when containerd itself has died. The kubelet must be down."""
    if processes.is_alive(processes.read_record(paths, "containerd")) and answers(paths):
        tasks = ctr(paths, "tasks", "ls", "-q", check=False).split()
        if tasks:
            ctr(paths, "tasks", "rm", "--force", *tasks, check=False)
        containers = ctr(paths, "containers", "ls", "-q", check=False).split()
        if containers:
            ctr(paths, "containers", "rm", *containers, check=False)
    processes.stop(paths, ["containerd"])
    _kill_leftover_shims(paths)
    hostnet.unmount_below(paths.containerd)
    shutil.rmtree(paths.containerd / "run", ignore_errors=True)
    shutil.rmtree(paths.containerd / "runc", ignore_errors=True)
    shutil.rmtree(paths.state / "ipam", ignore_errors=True)


def _kill_leftover_shims(paths: Paths) -> None:
    # A shim whose containerd is gone cannot be asked; its children are the pods' first processes.
    left = shims(paths)
    for pid in [child for shim in left for child in children(shim)] + left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if not wait_until(lambda: not shims(paths), 5.0):
        raise ClusterError(f"these container shims do not end: {shims(paths)}")


def wait_until(condition: Callable[[], bool], seconds: float, interval: float = 0.05) -> bool:
    """Polls until the condition holds; False if it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True
