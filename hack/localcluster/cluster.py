# SPDX-License-Identifier: Apache-2.0
"""Brings the cluster up, repairs it, reports on it, and takes it down again."""

from __future__ import annotations

import datetime
import fcntl
import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from . import archive, binaries, components, dns, elevate, hostnet, pki, prereqs, processes, runtime, versions
from . import settings as s
from .errors import ClusterError
from .paths import Paths

ALL = (
    "etcd",
    "containerd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kubelet",
)

# CoreDNS listens on port 53: NET_BIND_SERVICE survives exec for root only, so it is root with nothing else.
_OWN_IMAGES = (("pause", "65535:65535"), ("coredns", "0:0"))


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


@contextmanager
def locked(paths: Paths) -> Iterator[None]:
    """One `up` or `down` at a time."""
    while True:
        paths.state.mkdir(parents=True, exist_ok=True)
        name = paths.state / "lock"
        with name.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Whoever held it may have purged the folder: then the file we hold is not the one others see.
            if name.exists() and os.path.samestat(os.fstat(lock.fileno()), name.stat()):
                yield
                return


def up(paths: Paths) -> None:
    """Starts what is not running, restarts what changed, and waits until pods and DNS work.

    Raises ClusterError that shows the log of whatever failed.
    """
    if os.environ.get("ATP_KUBECONTEXT"):
        raise ClusterError("ATP_KUBECONTEXT is set, so that cluster is used and none is started; unset it to start one")
    needed = [m for m in prereqs.find_missing() if m.apt in _RUNTIME_PACKAGES]
    if needed:
        raise ClusterError(prereqs.report(needed, root=True))
    began = time.monotonic()
    folder = binaries.build(paths)
    if elevate.needed():
        elevate.run(["up"], paths)
        return
    with locked(paths):
        changed = _start(paths, folder)
    word = "is up" if changed else "was up already"
    say(f"cluster {word} after {time.monotonic() - began:.1f} s; KUBECONFIG={paths.kubeconfig}")


_RUNTIME_PACKAGES = {
    "containerd",
    "runc",
    "containernetworking-plugins",
    "iproute2",
    "iptables",
    "nftables",
    "conntrack",
    "openssl",
}


def _start(paths: Paths, folder: Path) -> bool:
    """The start sequence; True if anything had to be started."""
    hostnet.check_addresses()
    hostnet.remember(paths)
    processes.forget_dead(paths)
    if hostnet.ensure_network() and runtime.shims(paths):
        # Somebody deleted the bridge under running pods: they hang in the air; the kubelet makes new ones.
        processes.stop(paths, ["kubelet"])
        runtime.remove_all_pods(paths)
    hostnet.ensure_mounts()
    hostnet.ensure_cgroups()
    pki.ensure(paths)
    own_images = _own_images(paths, folder)
    runtime.write_config(paths, own_images["pause"][0])
    components.write_configs(paths, _resolv_conf())

    started = [name for name in ("etcd", "containerd") if _ensure(paths, folder, name)]
    _wait(paths, "etcd", lambda: _port_open("127.0.0.1", s.ETCD_CLIENT_PORT), 20)
    started += ["kube-apiserver"] if _ensure(paths, folder, "kube-apiserver") else []
    _wait(paths, "containerd", lambda: runtime.answers(paths), 20)
    for reference, file in own_images.values():
        if not runtime.image_exists(paths, reference):
            runtime.import_image(paths, file)
    _wait(paths, "kube-apiserver", lambda: api_get(paths, "/readyz")[0] == 200, 60)
    kubelet_since = time.time()
    rest = ("kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet")
    started += [name for name in rest if _ensure(paths, folder, name)]
    if "kubelet" not in started:
        kubelet_since = 0.0

    applied = paths.state / "applied.json"
    manifests = dns.manifests(own_images["coredns"][0], dns.host_nameservers())
    if not applied.exists() or applied.read_text() != manifests:
        _apply(paths, folder, manifests)
        applied.write_text(manifests)
    if started:
        say(f"started {', '.join(started)}; waiting for the node and DNS")
    for name, check in HEALTH.items():
        _wait(paths, name, lambda check=check: check(paths), 30, "is not healthy")  # type: ignore[misc]
    _wait(
        paths,
        "kubelet",
        lambda: node_ready(paths, kubelet_since),
        60,
        "runs, but the node does not become Ready",
    )
    name = f"kubernetes.default.svc.{s.CLUSTER_DOMAIN}"
    _wait(
        paths,
        "kubelet",
        lambda: dns.answers(name),
        60,
        "runs, but CoreDNS does not answer",
        explain=_explain_dns,
    )
    processes.check_alive(paths, ALL)
    return bool(started)


def _spec(paths: Paths, folder: Path, name: str) -> processes.Spec:
    makers: dict[str, Callable[[Paths, Path], processes.Spec]] = {
        "etcd": components.etcd,
        "kube-apiserver": components.apiserver,
        "kube-controller-manager": components.controller_manager,
        "kube-scheduler": components.scheduler,
        "kube-proxy": components.proxy,
        "kubelet": components.kubelet,
        "containerd": lambda p, _: runtime.spec(p),
    }
    return makers[name](paths, folder)


def _ensure(paths: Paths, folder: Path, name: str) -> bool:
    if name == "containerd" and not processes.is_alive(processes.read_record(paths, name)):
        # After a reboot the runtime's state names sandboxes that are gone.
        if not runtime.shims(paths):
            runtime.remove_all_pods(paths)
        paths.containerd.mkdir(parents=True, exist_ok=True)
    return processes.ensure(paths, _spec(paths, folder, name))


def _own_images(paths: Paths, folder: Path) -> dict[str, tuple[str, Path]]:
    """Reference and archive of the images the cluster itself needs; kept with the binaries."""
    result = {}
    for name, user in _OWN_IMAGES:
        marker = folder / f"{name}.key"
        if not marker.exists():
            marker.write_text(archive.content_key(folder / name, user))
        reference = f"localhost/atp/{name}:{marker.read_text()}"
        target = folder / f"{name}.image.tar"
        if not target.exists():
            archive.write_single_binary_image(folder / name, reference, user, target)
        result[name] = (reference, target)
    return result


def _resolv_conf() -> str:
    return str(next((f for f in dns.RESOLV_CONFS if f.exists()), "/etc/resolv.conf"))


def _wait(
    paths: Paths,
    name: str,
    condition: Callable[[], bool],
    seconds: float,
    what: str = "does not answer",
    explain: Callable[[Paths], str] | None = None,
) -> None:
    """Waits for the condition; fails early when a started process dies, with its log."""
    deadline = time.monotonic() + seconds
    while not condition():
        running = [n for n in ALL if processes.read_record(paths, n) is not None]
        processes.check_alive(paths, running)
        if time.monotonic() > deadline:
            more = f"\n{explain(paths)}" if explain else ""
            error = processes.failure(paths, name, f"{what} within {seconds:.0f} s")
            raise ClusterError(f"{error}{more}")
        time.sleep(0.1)


def _explain_dns(paths: Paths) -> str:
    pods = kubectl_output(paths, "-n", "kube-system", "get", "pods", "-o", "wide")
    log = kubectl_output(paths, "-n", "kube-system", "logs", "deployment/coredns", "--tail=5")
    events = kubectl_output(paths, "-n", "kube-system", "get", "events", "--sort-by=.lastTimestamp", "--no-headers")
    return "\n".join(["CoreDNS's pod, log and events:", pods, log, *events.splitlines()[-6:]])


def _port_open(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=0.5):
            return True
    except OSError:
        return False


def api_get(paths: Paths, path: str) -> tuple[int, bytes]:
    """GET on the API server with the admin's certificate; (0, b"") when it does not answer."""
    context = ssl.create_default_context(cafile=str(paths.pki / "ca.crt"))
    context.load_cert_chain(paths.pki / "admin.crt", paths.pki / "admin.key")
    connection = http.client.HTTPSConnection(s.BRIDGE_IP, s.API_PORT, timeout=5, context=context)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def _healthy(url: str, ca: Path | None = None) -> bool:
    context = ssl.create_default_context(cafile=str(ca)) if ca else None
    try:
        with urllib.request.urlopen(url, timeout=2, context=context) as response:
            return bool(response.status == 200)
    except (OSError, http.client.HTTPException):
        return False


HEALTH: dict[str, Callable[[Paths], bool]] = {
    "kube-controller-manager": lambda p: _healthy(
        f"https://127.0.0.1:{s.CONTROLLER_MANAGER_PORT}/healthz", p.pki / "ca.crt"
    ),
    "kube-scheduler": lambda p: _healthy(f"https://127.0.0.1:{s.SCHEDULER_PORT}/healthz", p.pki / "ca.crt"),
    "kube-proxy": lambda _: _healthy(f"http://127.0.0.1:{s.PROXY_HEALTH_PORT}/healthz"),
    "kubelet": lambda _: _healthy(f"http://127.0.0.1:{s.KUBELET_HEALTH_PORT}/healthz"),
}


def node_ready(paths: Paths, since: float = 0.0) -> bool:
    """True if the node is Ready and the kubelet renewed its lease after `since` (seconds since the epoch).

    The Ready condition alone may be what the last kubelet left behind.
    """
    status, body = api_get(paths, f"/api/v1/nodes/{s.NODE_NAME}")
    if status != 200:
        return False
    conditions = json.loads(body)["status"].get("conditions", [])
    if not any(c["type"] == "Ready" and c["status"] == "True" for c in conditions):
        return False
    status, body = api_get(paths, f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{s.NODE_NAME}")
    if status != 200:
        return False
    renewed = datetime.datetime.fromisoformat(json.loads(body)["spec"]["renewTime"])
    return renewed.timestamp() >= since


def kubectl_output(paths: Paths, *args: str) -> str:
    """Output of a kubectl call with the cluster's own kubectl and kubeconfig; errors are part of the text."""
    argv = [str(tool(paths, "kubectl")), "--kubeconfig", str(paths.kubeconfig), *args]
    result = subprocess.run(argv, capture_output=True, text=True)
    return result.stdout + result.stderr


def tool(paths: Paths, name: str) -> Path:
    """Path of a built binary; ClusterError if it is not built yet."""
    path = versions.bin_dir(paths) / name
    if not path.exists():
        raise ClusterError(f"{name} is not built yet; run `hack/atp-cluster build`")
    return path


def _apply(paths: Paths, folder: Path, manifests: str) -> None:
    argv = [str(folder / "kubectl"), "--kubeconfig", str(paths.kubeconfig), "apply", "--server-side"]
    argv += ["--force-conflicts", "--field-manager=atp-cluster", "-f", "-"]
    result = subprocess.run(argv, input=manifests, capture_output=True, text=True)
    if result.returncode != 0:
        raise ClusterError(f"applying CoreDNS failed:\n{result.stderr.strip()}")


def down(paths: Paths, purge: bool) -> None:
    """Stops everything of ours and puts the host back as it was; with `purge` the state goes too.

    Raises ClusterError that lists what could not be removed.
    """
    if not paths.state.exists():
        say("no cluster here")
        return
    if elevate.needed():
        elevate.run(["down", *(["--purge"] if purge else [])], paths)
        return
    with locked(paths):
        processes.stop(paths, ["kubelet", "kube-scheduler", "kube-controller-manager", "kube-proxy"])
        runtime.remove_all_pods(paths)
        processes.stop(paths, ["kube-apiserver"])
        processes.stop(paths, ["etcd"])
        hostnet.unmount_below(paths.state)
        hostnet.remove_network()
        hostnet.remove_cgroups()
        hostnet.restore(paths)
        shutil.rmtree(paths.pids, ignore_errors=True)
        left = leftovers(paths)
        if purge and not left:
            shutil.rmtree(paths.state)
    if left:
        raise ClusterError("could not remove everything:\n  " + "\n  ".join(left))
    say(f"cluster is down{', its state is removed' if purge else f'; its state stays in {paths.state}'}")


def leftovers(paths: Paths) -> list[str]:
    """What still shows that a cluster ran: for `down` to report, empty when the host is clean."""
    found = [f"process {pid} (container shim)" for pid in runtime.shims(paths)]
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    found += [f"mount {m}" for m in mounts if m.startswith(f"{paths.state}/")]
    if Path(f"/sys/class/net/{s.BRIDGE}").exists():
        found.append(f"network device {s.BRIDGE}")
    found += [f"cgroup {p / s.CGROUP}" for p in hostnet.cgroup_parents() if (p / s.CGROUP).exists()]
    return found


def status(paths: Paths) -> tuple[str, bool]:
    """A table of the processes, the node and DNS; and whether all of it is well."""
    lines, well = [], True
    for name in ALL:
        record = processes.read_record(paths, name)
        alive = processes.is_alive(record)
        well &= alive
        what = f"running, pid {record.pid}" if alive and record else "not running"
        lines.append(f"{name:<24} {what}")
    if os.access(paths.pki / "admin.key", os.R_OK):
        ready = well and node_ready(paths)
        answers = well and dns.answers(f"kubernetes.default.svc.{s.CLUSTER_DOMAIN}")
        well = ready and answers
        lines.append(f"{'node ' + s.NODE_NAME:<24} {'Ready' if ready else 'not ready'}")
        lines.append(f"{'DNS ' + s.DNS_SERVICE_IP:<24} {'answers' if answers else 'does not answer'}")
    lines.append(f"{'kubeconfig':<24} {paths.kubeconfig}")
    lines.append(f"{'logs':<24} {paths.logs}")
    return "\n".join(lines), well
