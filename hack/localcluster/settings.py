# SPDX-License-Identifier: Apache-2.0
"""Addresses, names and ports of the local cluster. All listen on loopback or on the bridge's address."""

from __future__ import annotations

NODE_NAME = "atp-local"
BRIDGE = "atp0"
BRIDGE_IP = "10.244.0.1"  # the node's address, the pods' gateway, and where the API server listens
POD_CIDR = "10.244.0.0/24"
SERVICE_CIDR = "10.96.0.0/16"
KUBERNETES_SERVICE_IP = "10.96.0.1"
DNS_SERVICE_IP = "10.96.0.10"
CLUSTER_DOMAIN = "cluster.local"
POD_MTU = 1500  # the paper's frames; larger profiles need a larger value here

API_PORT = 6443
API_URL = f"https://{BRIDGE_IP}:{API_PORT}"
ETCD_CLIENT_PORT = 12379  # not 2379: a host may run an etcd of its own
ETCD_PEER_PORT = 12380
CONTROLLER_MANAGER_PORT = 10257
SCHEDULER_PORT = 10259
KUBELET_PORT = 10250
KUBELET_HEALTH_PORT = 10248
PROXY_HEALTH_PORT = 10256
PROXY_METRICS_PORT = 10249

CGROUP = "atp-local"  # the pods' cgroups are below this one, so `down` knows what to remove
NFT_TABLE = "atp_local"
CNI_PLUGINS = "/usr/lib/cni"
