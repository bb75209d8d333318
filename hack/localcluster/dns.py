# SPDX-License-Identifier: Apache-2.0
"""The cluster's DNS: CoreDNS as a Deployment behind the kube-dns Service, and a check that it answers."""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .settings import CLUSTER_DOMAIN, DNS_SERVICE_IP

RESOLV_CONFS = (Path("/run/systemd/resolve/resolv.conf"), Path("/etc/resolv.conf"))


def host_nameservers(files: Sequence[Path] = RESOLV_CONFS) -> list[str]:
    """The host's IPv4 name servers that a pod can reach; loopback stubs are of no use to a pod."""
    found: list[str] = []
    for file in files:
        text = file.read_text() if file.exists() else ""
        words = [line.split() for line in text.splitlines()]
        found += [w[1] for w in words if len(w) > 1 and w[0] == "nameserver"]
    return list(dict.fromkeys(n for n in found if ":" not in n and not n.startswith("127.")))


def corefile(nameservers: Sequence[str]) -> str:
    """CoreDNS's configuration. Without outside name servers it says so at once instead of timing out."""
    forward = f"    forward . {' '.join(nameservers[:3])}\n    cache 30\n" if nameservers else ""
    return f""".:53 {{
    errors
    health :8080
    ready :8181
    kubernetes {CLUSTER_DOMAIN} in-addr.arpa ip6.arpa {{
        pods insecure
        fallthrough in-addr.arpa ip6.arpa
        ttl 5
    }}
    prometheus :9153
{forward}    loadbalance
}}
"""


def manifests(image: str, nameservers: Sequence[str]) -> str:
    """The objects that `up` applies, as a JSON List."""
    labels = {"k8s-app": "kube-dns"}
    meta = {"name": "coredns", "namespace": "kube-system", "labels": labels}
    probe = {"periodSeconds": 1, "failureThreshold": 60}
    container = {
        "name": "coredns",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "args": ["-conf", "/etc/coredns/Corefile"],
        "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns", "readOnly": True}],
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "170Mi"}},
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, **probe},
        "livenessProbe": {
            "httpGet": {"path": "/health", "port": 8080},
            "periodSeconds": 10,
            "failureThreshold": 5,
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]},
        },
    }
    config = corefile(nameservers)
    template = {
        # A changed Corefile changes the template, so the pod is replaced.
        "metadata": {
            "labels": labels,
            "annotations": {"atp.dev/corefile": hashlib.sha256(config.encode()).hexdigest()},
        },
        "spec": {
            "serviceAccountName": "coredns",
            "priorityClassName": "system-cluster-critical",
            "dnsPolicy": "Default",
            "tolerations": [{"operator": "Exists"}],
            "containers": [container],
            "volumes": [{"name": "config", "configMap": {"name": "coredns"}}],
        },
    }
    ports = [
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
        {"name": "metrics", "port": 9153, "protocol": "TCP"},
    ]
    read = {
        "apiGroups": [""],
        "resources": ["endpoints", "services", "pods", "namespaces"],
        "verbs": ["list", "watch"],
    }
    slices = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    items: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": "system:coredns"},
            "rules": [read, slices],
        },
        _binding(
            "system:coredns",
            "system:coredns",
            {"kind": "ServiceAccount", "name": "coredns", "namespace": "kube-system"},
        ),
        # Lets the API server reach the kubelet for logs, exec and port-forward.
        _binding(
            "atp-local:apiserver-kubelet-client",
            "system:kubelet-api-admin",
            {"kind": "User", "name": "atp-apiserver-kubelet-client", "apiGroup": "rbac.authorization.k8s.io"},
        ),
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"Corefile": config}},
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": meta,
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": labels},
                "strategy": {"type": "Recreate"},
                "template": template,
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {**meta, "name": "kube-dns"},
            "spec": {"clusterIP": DNS_SERVICE_IP, "selector": labels, "ports": ports},
        },
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


def _binding(name: str, role: str, subject: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [subject],
    }


def query(name: str, ident: int) -> bytes:
    """A DNS question for the A record of `name` (RFC 1035, section 4)."""
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    return struct.pack(">HHHHHH", ident, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", 1, 1)


def answers(name: str, server: str = DNS_SERVICE_IP, timeout: float = 0.5) -> bool:
    """True if the server answers the question for `name` without an error and with at least one record."""
    ident = secrets.randbelow(1 << 16)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(timeout)
        try:
            sock.sendto(query(name, ident), (server, 53))
            reply = sock.recv(1500)
        except OSError:
            return False
    if len(reply) < 12:
        return False
    got, flags, _, count, _, _ = struct.unpack(">HHHHHH", reply[:12])
    return bool(got == ident and flags & 0x800F == 0x8000 and count > 0)
