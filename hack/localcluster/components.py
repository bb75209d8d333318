# SPDX-License-Identifier: Apache-2.0
"""Command lines and configuration files of etcd, the control plane, the kubelet and kube-proxy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import settings as s
from .errors import write_if_changed
from .paths import Paths
from .processes import Spec

CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
NODE = ("kube-proxy", "kubelet")


def etcd(paths: Paths, binaries: Path) -> Spec:
    """etcd on loopback with client certificates: any local user could otherwise own the cluster."""
    client, peer = f"https://127.0.0.1:{s.ETCD_CLIENT_PORT}", f"https://127.0.0.1:{s.ETCD_PEER_PORT}"
    pki = paths.pki
    return Spec(
        "etcd",
        (
            str(binaries / "etcd"),
            "--name=atp-local",
            f"--data-dir={paths.state}/etcd",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=atp-local={peer}",
            "--client-cert-auth",
            f"--trusted-ca-file={pki}/etcd-ca.crt",
            f"--cert-file={pki}/etcd.crt",
            f"--key-file={pki}/etcd.key",
            "--peer-client-cert-auth",
            f"--peer-trusted-ca-file={pki}/etcd-ca.crt",
            f"--peer-cert-file={pki}/etcd.crt",
            f"--peer-key-file={pki}/etcd.key",
            # A development cluster may lose its last writes at a power cut; an fsync per write on a
            # laptop's disk costs more than that.
            "--unsafe-no-fsync",
            "--log-level=warn",
        ),
    )


def apiserver(paths: Paths, binaries: Path) -> Spec:
    """The API server on the bridge's address, reached from pods through the `kubernetes` Service."""
    pki = paths.pki
    issuer = f"https://kubernetes.default.svc.{s.CLUSTER_DOMAIN}"
    return Spec(
        "kube-apiserver",
        (
            str(binaries / "kube-apiserver"),
            f"--bind-address={s.BRIDGE_IP}",
            f"--advertise-address={s.BRIDGE_IP}",
            f"--secure-port={s.API_PORT}",
            f"--etcd-servers=https://127.0.0.1:{s.ETCD_CLIENT_PORT}",
            f"--etcd-cafile={pki}/etcd-ca.crt",
            f"--etcd-certfile={pki}/etcd-client.crt",
            f"--etcd-keyfile={pki}/etcd-client.key",
            f"--client-ca-file={pki}/ca.crt",
            f"--tls-cert-file={pki}/apiserver.crt",
            f"--tls-private-key-file={pki}/apiserver.key",
            f"--kubelet-certificate-authority={pki}/ca.crt",
            f"--kubelet-client-certificate={pki}/apiserver-kubelet-client.crt",
            f"--kubelet-client-key={pki}/apiserver-kubelet-client.key",
            "--kubelet-preferred-address-types=InternalIP",
            f"--service-account-issuer={issuer}",
            f"--service-account-key-file={pki}/sa.pub",
            f"--service-account-signing-key-file={pki}/sa.key",
            f"--service-cluster-ip-range={s.SERVICE_CIDR}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",  # PodSecurity and the webhooks are on by default
            "--enable-aggregator-routing=true",  # webhooks are called at their endpoints, not at a ClusterIP
            f"--requestheader-client-ca-file={pki}/front-proxy-ca.crt",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={pki}/front-proxy-client.crt",
            f"--proxy-client-key-file={pki}/front-proxy-client.key",
            "--allow-privileged=true",  # the software switch's DaemonSet loads BPF programs
            "--anonymous-auth=false",
            "--profiling=false",
            "--shutdown-delay-duration=0s",
        ),
    )


def controller_manager(paths: Paths, binaries: Path) -> Spec:
    pki, config = paths.pki, f"{paths.config}/kube-controller-manager.kubeconfig"
    return Spec(
        "kube-controller-manager",
        (
            str(binaries / "kube-controller-manager"),
            "--bind-address=127.0.0.1",
            f"--secure-port={s.CONTROLLER_MANAGER_PORT}",
            f"--tls-cert-file={pki}/kube-controller-manager.crt",
            f"--tls-private-key-file={pki}/kube-controller-manager.key",
            f"--kubeconfig={config}",
            f"--authentication-kubeconfig={config}",
            f"--authorization-kubeconfig={config}",
            "--leader-elect=false",  # there is one
            "--use-service-account-credentials=true",
            f"--root-ca-file={pki}/ca.crt",
            f"--service-account-private-key-file={pki}/sa.key",
            f"--cluster-signing-cert-file={pki}/ca.crt",
            f"--cluster-signing-key-file={pki}/ca.key",
            f"--service-cluster-ip-range={s.SERVICE_CIDR}",
            "--profiling=false",
        ),
    )


def scheduler(paths: Paths, binaries: Path) -> Spec:
    config = f"{paths.config}/kube-scheduler.kubeconfig"
    return Spec(
        "kube-scheduler",
        (
            str(binaries / "kube-scheduler"),
            "--bind-address=127.0.0.1",
            f"--secure-port={s.SCHEDULER_PORT}",
            f"--tls-cert-file={paths.pki}/kube-scheduler.crt",
            f"--tls-private-key-file={paths.pki}/kube-scheduler.key",
            f"--kubeconfig={config}",
            f"--authentication-kubeconfig={config}",
            f"--authorization-kubeconfig={config}",
            "--leader-elect=false",
            "--profiling=false",
        ),
    )


def proxy_config(paths: Paths) -> dict[str, Any]:
    """kube-proxy in nftables mode.

    masqueradeAll: two pods on one bridge answer each other directly, past the address translation, unless
    bridged frames go through netfilter (a setting of the whole host, and a cost for every ATP packet).
    """
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "nftables": {"masqueradeAll": True, "minSyncPeriod": "0s", "syncPeriod": "30s"},
        "hostnameOverride": s.NODE_NAME,
        "clusterCIDR": s.POD_CIDR,
        "clientConnection": {"kubeconfig": f"{paths.config}/kube-proxy.kubeconfig"},
        "healthzBindAddress": f"127.0.0.1:{s.PROXY_HEALTH_PORT}",
        "metricsBindAddress": f"127.0.0.1:{s.PROXY_METRICS_PORT}",
        "nodePortAddresses": [s.POD_CIDR],
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "oomScoreAdj": 0,
    }


def proxy(paths: Paths, binaries: Path) -> Spec:
    config = paths.config / "kube-proxy.json"
    return Spec("kube-proxy", (str(binaries / "kube-proxy"), f"--config={config}"), config_files=(config,))


def kubelet_config(paths: Paths, resolv_conf: str) -> dict[str, Any]:
    """The kubelet's configuration: a node that keeps its pods and images on a nearly full disk."""
    low = "1%"
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": s.BRIDGE_IP,
        "port": s.KUBELET_PORT,
        "readOnlyPort": 0,
        "healthzBindAddress": "127.0.0.1",
        "healthzPort": s.KUBELET_HEALTH_PORT,
        "tlsCertFile": f"{paths.pki}/kubelet-server.crt",
        "tlsPrivateKeyFile": f"{paths.pki}/kubelet-server.key",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{paths.pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{paths.containerd_socket}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{s.CGROUP}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "localStorageCapacityIsolation": True,
        "clusterDNS": [s.DNS_SERVICE_IP],
        "clusterDomain": s.CLUSTER_DOMAIN,
        "resolvConf": resolv_conf,
        "podLogsDir": f"{paths.state}/pod-logs",
        "volumePluginDir": f"{paths.state}/kubelet/volume-plugins",
        "oomScoreAdj": 0,
        "makeIPTablesUtilChains": False,  # leaves chains behind, and nothing here uses iptables
        "maxPods": 110,
        # Images come from this machine and cannot be pulled again: never collect them, evict late.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {
            "memory.available": "50Mi",
            "nodefs.available": low,
            "nodefs.inodesFree": low,
            "imagefs.available": low,
            "imagefs.inodesFree": low,
        },
        "shutdownGracePeriod": "0s",
        "logging": {"verbosity": 1},
    }


def kubelet(paths: Paths, binaries: Path) -> Spec:
    config = paths.config / "kubelet.json"
    return Spec(
        "kubelet",
        (
            str(binaries / "kubelet"),
            f"--config={config}",
            f"--kubeconfig={paths.config}/kubelet.kubeconfig",
            f"--hostname-override={s.NODE_NAME}",
            f"--node-ip={s.BRIDGE_IP}",
            f"--root-dir={paths.kubelet}",
            f"--cert-dir={paths.kubelet}/pki",
        ),
        config_files=(config,),
    )


def write_configs(paths: Paths, resolv_conf: str) -> None:
    """Writes the configuration files; unchanged settings give unchanged files, so nothing restarts."""
    paths.config.mkdir(parents=True, exist_ok=True)
    write_if_changed(paths.config / "kube-proxy.json", json.dumps(proxy_config(paths), indent=1))
    write_if_changed(paths.config / "kubelet.json", json.dumps(kubelet_config(paths, resolv_conf), indent=1))
