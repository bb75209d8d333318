# SPDX-License-Identifier: Apache-2.0
"""What the cluster changes on the host besides its own files, and how that is put back.

The bridge, two small nftables tables, kernel settings, mounts, and folders that the kubelet insists on.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ClusterError
from .paths import Paths
from .settings import BRIDGE, BRIDGE_IP, CGROUP, NFT_TABLE, POD_CIDR, POD_MTU, SERVICE_CIDR

# The kubelet and we write these; `down` restores what was there before.
SYSCTLS = (
    "net/ipv4/ip_forward",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)

# Paths that the kubelet, containerd or the CNI plugins create whatever their configuration says.
FOLDERS = (
    "/var/lib/kubelet",
    "/var/log/containers",
    "/run/containerd",
    "/run/flannel",
    "/var/lib/cni",
    "/etc/cni",
    "/opt/cni",
    "/opt/containerd",
)

# What pods of the cluster leave on the node for their successors.
POD_FOLDERS = ("/sys/fs/bpf/atp", "/run/atp-softswitch")

CGROUP_CONTROLLERS = (
    "cpu",
    "cpuacct",
    "cpuset",
    "memory",
    "devices",
    "freezer",
    "blkio",
    "pids",
    "hugetlb",
    "systemd",
    "unified",
)


def run(*argv: str, stdin: str | None = None, check: bool = True) -> str:
    """Runs a command and returns its output; ClusterError with its stderr if it fails."""
    try:
        result = subprocess.run(argv, input=stdin, capture_output=True, text=True)
    except FileNotFoundError:
        raise ClusterError(f"{argv[0]} is not installed; run `hack/atp-cluster prereqs --install`") from None
    if check and result.returncode != 0:
        raise ClusterError(f"`{' '.join(argv)}` failed: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout


def remember(paths: Paths) -> None:
    """Records the host as it is, once: an `up` after a crash must not record our own changes."""
    if paths.host_before.exists():
        return
    paths.state.mkdir(parents=True, exist_ok=True)
    before = {
        "sysctls": {name: _read_sysctl(name) for name in SYSCTLS},
        "folders": [folder for folder in (*FOLDERS, *POD_FOLDERS) if Path(folder).exists()],
        "bpffs": _is_mounted("/sys/fs/bpf"),
    }
    partial = paths.host_before.with_suffix(".partial")
    partial.write_text(json.dumps(before, indent=1))
    partial.rename(paths.host_before)


def _read_sysctl(name: str) -> str | None:
    path = Path("/proc/sys") / name
    return path.read_text().strip() if path.exists() else None


def _is_mounted(target: str) -> bool:
    return any(line.split()[1] == target for line in Path("/proc/mounts").read_text().splitlines())


def firewall_rules() -> str:
    """Our nftables table, replacing an older one of the same name.

    guard: with ip_forward on, a neighbour on the host's own network could otherwise route to pods and
    Services; packets for them may only come from this host or its pods.
    egress: pods reach the outside under the host's address.
    """
    return f"""
table ip {NFT_TABLE}
delete table ip {NFT_TABLE}
table ip {NFT_TABLE} {{
  chain guard {{
    type filter hook prerouting priority raw; policy accept;
    iifname != {{ "lo", "{BRIDGE}" }} ip daddr {{ {POD_CIDR}, {SERVICE_CIDR} }} drop
  }}
  chain egress {{
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr {POD_CIDR} ip daddr != {{ {POD_CIDR}, {SERVICE_CIDR} }} oifname != "{BRIDGE}" masquerade
  }}
}}
"""


def conflicts(routes: list[dict[str, Any]]) -> list[str]:
    """Routes of other devices (as `ip -json route` prints them) that overlap our pod or service addresses."""
    ours = [ipaddress.ip_network(cidr) for cidr in (POD_CIDR, SERVICE_CIDR)]
    found = []
    for route in routes:
        if route["dst"] != "default" and route.get("dev") != BRIDGE:
            network = ipaddress.ip_network(route["dst"], strict=False)
            found += [f"{route['dst']} on {route.get('dev')}" for own in ours if network.overlaps(own)]
    return found


def check_addresses() -> None:
    """Raises ClusterError when the host's network already uses our addresses."""
    found = conflicts(json.loads(run("ip", "-json", "-4", "route", "show") or "[]"))
    if found:
        raise ClusterError(
            f"the addresses {POD_CIDR} and {SERVICE_CIDR} are in use here ({', '.join(found)}); "
            "end what uses them, or change them in hack/localcluster/settings.py"
        )


def ensure_network() -> bool:
    """The bridge with its address, forwarding, and the firewall table; True if the bridge is new."""
    new = not Path(f"/sys/class/net/{BRIDGE}").exists()
    if new:
        run("ip", "link", "add", BRIDGE, "type", "bridge")
    prefix = POD_CIDR.split("/")[1]
    run("ip", "link", "set", BRIDGE, "mtu", str(POD_MTU), "up")
    run("ip", "address", "replace", f"{BRIDGE_IP}/{prefix}", "dev", BRIDGE)
    # Without a default route (a laptop that is offline) the host could not reach Service addresses.
    run("ip", "route", "replace", SERVICE_CIDR, "dev", BRIDGE, "src", BRIDGE_IP)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    run("nft", "-f", "-", stdin=firewall_rules())
    _open_forward_chain()
    return new


def _open_forward_chain() -> None:
    # Docker sets the FORWARD policy to DROP; an accept in our own table could not override that.
    policy = _forward_chain()
    if "-P FORWARD DROP" not in policy:
        return
    for match in (("-i", BRIDGE), ("-o", BRIDGE)):
        rule = (*match, "-m", "comment", "--comment", NFT_TABLE, "-j", "ACCEPT")
        if f"-A FORWARD {' '.join(match)} " not in policy:
            run("iptables", "-w", "-I", "FORWARD", *rule)


def _forward_chain() -> str:
    # Asking iptables creates its tables, so it is only asked when somebody uses it already.
    in_use = "table ip filter" in run("nft", "list", "tables", check=False).splitlines()
    return run("iptables", "-w", "-S", "FORWARD", check=False) if in_use else ""


def ensure_mounts() -> None:
    """A BPF file system, for pods that pin programs; shared, so that pods may ask for mount propagation."""
    if not _is_mounted("/sys/fs/bpf"):
        run("mount", "-t", "bpf", "bpf", "/sys/fs/bpf")
        run("mount", "--make-shared", "/sys/fs/bpf")


def cgroup_parents(root: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """The folders below which pods' cgroups live: one per v1 controller, or the single v2 root."""
    if (root / "cgroup.controllers").exists():
        return [root]
    return [root / name for name in CGROUP_CONTROLLERS if (root / name).is_dir()]


def controllers_to_enable(available: str) -> str:
    """What to write to cgroup.subtree_control (version 2), given the content of cgroup.controllers."""
    wanted = ("cpu", "cpuset", "io", "memory", "hugetlb", "pids")
    return " ".join(f"+{name}" for name in wanted if name in available.split())


def ensure_cgroups() -> None:
    """The parent cgroup of all pods, in every hierarchy.

    The kubelet wants it to exist, with every controller that it uses; systemd enables only some of them.
    """
    for parent in cgroup_parents():
        controllers = parent / "cgroup.controllers"
        # In a mixed setup `unified` is version 2 as well, but without controllers of its own.
        if wanted := controllers_to_enable(controllers.read_text()) if controllers.exists() else "":
            try:
                (parent / "cgroup.subtree_control").write_text(wanted)
            except OSError as error:
                raise ClusterError(
                    f"cannot enable cgroup controllers ({wanted}) in {parent}: {error}; "
                    "a container or a virtual machine without its own cgroup root cannot run a kubelet"
                ) from None
        (parent / CGROUP).mkdir(exist_ok=True)
    cpuset = Path("/sys/fs/cgroup/cpuset")
    if (cpuset / "cpuset.cpus").exists():  # version 1: a new cpuset is empty and takes no process
        for name in ("cpuset.cpus", "cpuset.mems"):
            target = cpuset / CGROUP / name
            if not target.read_text().strip():
                target.write_text((cpuset / name).read_text())


def remove_network() -> None:
    """Removes the bridge (its veths vanish with the pods' namespaces) and every nftables table of ours."""
    if Path(f"/sys/class/net/{BRIDGE}").exists():
        run("ip", "link", "delete", BRIDGE)
    tables = run("nft", "list", "tables", check=False).splitlines()
    for family, name in ((t.split()[1], t.split()[2]) for t in tables if len(t.split()) == 3):
        if name in (NFT_TABLE, "kube-proxy"):
            run("nft", "delete", "table", family, name)
    for match in (("-i", BRIDGE), ("-o", BRIDGE)):
        rule = (*match, "-m", "comment", "--comment", NFT_TABLE, "-j", "ACCEPT")
        if f"-A FORWARD {' '.join(match)} " in _forward_chain():
            run("iptables", "-w", "-D", "FORWARD", *rule)


def remove_cgroups() -> None:
    """Removes our cgroups, deepest first; they are empty once the pods are gone."""
    for parent in cgroup_parents():
        top = parent / CGROUP
        if top.exists():
            for folder in sorted((p for p in top.rglob("*") if p.is_dir()), reverse=True):
                _rmdir(folder)
            _rmdir(top)


def _rmdir(folder: Path) -> None:
    with contextlib.suppress(OSError):  # what stays is reported by `leftovers`
        folder.rmdir()


def unmount_below(folder: Path) -> None:
    """Unmounts everything mounted below `folder`, the innermost first."""
    prefix = f"{folder}/"
    targets = [line.split()[1].replace("\\040", " ") for line in Path("/proc/mounts").read_text().splitlines()]
    for target in reversed([t for t in targets if t.startswith(prefix)]):
        if subprocess.run(["umount", target], capture_output=True).returncode != 0:
            run("umount", "--lazy", target, check=False)


def _pinned() -> list[Path]:
    # maps.debug and progs.debug are there in every BPF file system.
    return [p for p in Path("/sys/fs/bpf").iterdir() if not p.name.endswith(".debug")]


def restore(paths: Paths) -> None:
    """Puts back the kernel settings, and removes folders and mounts that were not there before `up`."""
    if not paths.host_before.exists():
        return
    before: Mapping[str, Any] = json.loads(paths.host_before.read_text())
    for name, value in before["sysctls"].items():
        if value is not None and _read_sysctl(name) != value:
            (Path("/proc/sys") / name).write_text(value)
    for folder in (*FOLDERS, *POD_FOLDERS):
        if folder not in before["folders"]:
            unmount_below(Path(folder))
            shutil.rmtree(folder, ignore_errors=True)
    logs = Path("/var/log/containers")
    if logs.is_dir():
        for link in logs.iterdir():
            if link.is_symlink() and str(link.readlink()).startswith(f"{paths.state}/"):
                link.unlink()
    if not before["bpffs"] and _is_mounted("/sys/fs/bpf") and not _pinned():
        run("umount", "/sys/fs/bpf", check=False)
    paths.host_before.unlink()
