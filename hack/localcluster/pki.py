# SPDX-License-Identifier: Apache-2.0
"""The cluster's certificates and kubeconfig files, made with openssl: P-256, valid for ten years."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ClusterError
from .paths import Paths
from .settings import API_URL, BRIDGE_IP, KUBERNETES_SERVICE_IP, NODE_NAME

_DAYS = "3650"


@dataclass(frozen=True)
class Certificate:
    """A leaf certificate. The API server reads the user from the common name and its groups from `groups`."""

    name: str
    common_name: str
    ca: str = "ca"
    groups: tuple[str, ...] = ()
    names: tuple[str, ...] = ()  # subject alternative names, openssl syntax; empty for clients
    server: bool = False


CAS = ("ca", "etcd-ca", "front-proxy-ca")

_LOCAL = ("DNS:localhost", "IP:127.0.0.1")

CERTIFICATES: tuple[Certificate, ...] = (
    Certificate("etcd", "etcd", ca="etcd-ca", names=_LOCAL, server=True),
    Certificate("etcd-client", "kube-apiserver", ca="etcd-ca"),
    Certificate(
        "apiserver",
        "kube-apiserver",
        names=(
            *_LOCAL,
            f"IP:{BRIDGE_IP}",
            f"IP:{KUBERNETES_SERVICE_IP}",
            "DNS:kubernetes",
            "DNS:kubernetes.default",
            "DNS:kubernetes.default.svc",
            "DNS:kubernetes.default.svc.cluster.local",
        ),
        server=True,
    ),
    Certificate("apiserver-kubelet-client", "atp-apiserver-kubelet-client"),
    Certificate("front-proxy-client", "front-proxy-client", ca="front-proxy-ca"),
    Certificate("kubelet-server", NODE_NAME, names=(f"DNS:{NODE_NAME}", f"IP:{BRIDGE_IP}"), server=True),
    Certificate("kubelet", f"system:node:{NODE_NAME}", groups=("system:nodes",)),
    Certificate("kube-controller-manager", "system:kube-controller-manager", names=_LOCAL, server=True),
    Certificate("kube-scheduler", "system:kube-scheduler", names=_LOCAL, server=True),
    Certificate("kube-proxy", "system:kube-proxy"),
    Certificate("admin", "atp-admin", groups=("system:masters",)),
)

KUBECONFIGS = ("kubelet", "kube-controller-manager", "kube-scheduler", "kube-proxy", "admin")


def _openssl(*args: str, stdin: str | None = None) -> None:
    try:
        result = subprocess.run(["openssl", *args], input=stdin, capture_output=True, text=True)
    except FileNotFoundError:
        raise ClusterError("openssl is not installed; run `hack/atp-cluster prereqs --install`") from None
    if result.returncode != 0:
        raise ClusterError(f"openssl {args[0]} failed: {result.stderr.strip()}")


def extensions(cert: Certificate) -> str:
    """The openssl extension section of a leaf certificate."""
    usage = "clientAuth,serverAuth" if cert.server else "clientAuth"
    lines = [
        "basicConstraints=critical,CA:false",
        "keyUsage=critical,digitalSignature",
        f"extendedKeyUsage={usage}",
    ]
    if cert.names:
        lines.append(f"subjectAltName={','.join(cert.names)}")
    return "\n".join(lines) + "\n"


def subject(cert: Certificate) -> str:
    return "".join(f"/O={group}" for group in cert.groups) + f"/CN={cert.common_name}"


def _make_key(path: Path) -> None:
    _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(path))


def ensure(paths: Paths) -> None:
    """Makes what is missing below <state>/pki and <state>/config; keeps what is there."""
    paths.pki.mkdir(parents=True, exist_ok=True)
    paths.pki.chmod(0o700)
    previous = os.umask(0o077)
    try:
        for ca in CAS:
            if not (paths.pki / f"{ca}.crt").exists():
                _make_ca(paths.pki, ca)
        for cert in CERTIFICATES:
            if not (paths.pki / f"{cert.name}.crt").exists():
                _make_leaf(paths.pki, cert)
        if not (paths.pki / "sa.pub").exists():
            _make_key(paths.pki / "sa.key")
            _openssl("ec", "-in", str(paths.pki / "sa.key"), "-pubout", "-out", str(paths.pki / "sa.pub"))
        paths.config.mkdir(parents=True, exist_ok=True)
        for name in KUBECONFIGS:
            target = paths.kubeconfig if name == "admin" else paths.config / f"{name}.kubeconfig"
            _write_private(target, json.dumps(kubeconfig(paths.pki, name), indent=1))
    finally:
        os.umask(previous)
    _hand_over(paths.kubeconfig)


def _hand_over(path: Path) -> None:
    """Under sudo the person who called gets the kubeconfig, since kubectl needs no root."""
    if os.getuid() == 0 and os.environ.get("SUDO_UID"):
        os.chown(path, int(os.environ["SUDO_UID"]), int(os.environ.get("SUDO_GID", "-1")))


def _write_private(path: Path, text: str) -> None:
    if path.exists() and path.read_text() == text:
        return
    partial = path.with_name(f".{path.name}.partial")
    partial.touch(mode=0o600)
    partial.write_text(text)
    partial.rename(path)


def _make_ca(pki: Path, name: str) -> None:
    key, crt = pki / f"{name}.key", pki / f"{name}.crt"
    _make_key(key)
    _openssl(
        *(
            "req",
            "-x509",
            "-new",
            "-key",
            str(key),
            "-subj",
            f"/CN=atp-local {name}",
            "-days",
            _DAYS,
            "-sha256",
        ),
        *("-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature", "-out", str(crt)),
    )


def _make_leaf(pki: Path, cert: Certificate) -> None:
    key, csr, ext, crt = (pki / f"{cert.name}.{end}" for end in ("key", "csr", "ext", "crt"))
    _make_key(key)
    ext.write_text(extensions(cert))
    _openssl("req", "-new", "-key", str(key), "-subj", subject(cert), "-out", str(csr))
    ca = ("-CA", str(pki / f"{cert.ca}.crt"), "-CAkey", str(pki / f"{cert.ca}.key"), "-CAcreateserial")
    _openssl(
        *(
            "x509",
            "-req",
            "-in",
            str(csr),
            *ca,
            "-days",
            _DAYS,
            "-sha256",
            "-extfile",
            str(ext),
            "-out",
            str(crt),
        )
    )
    csr.unlink()
    ext.unlink()


def kubeconfig(pki: Path, name: str) -> dict[str, Any]:
    """A kubeconfig (JSON is YAML) with everything embedded; context `atp-local`."""

    def data(file: str) -> str:
        return base64.b64encode((pki / file).read_bytes()).decode()

    user = f"atp-local-{name}"
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "atp-local",
        "clusters": [
            {
                "name": "atp-local",
                "cluster": {"server": API_URL, "certificate-authority-data": data("ca.crt")},
            }
        ],
        "users": [
            {
                "name": user,
                "user": {
                    "client-certificate-data": data(f"{name}.crt"),
                    "client-key-data": data(f"{name}.key"),
                },
            }
        ],
        "contexts": [{"name": "atp-local", "context": {"cluster": "atp-local", "user": user}}],
    }
