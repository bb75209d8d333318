# SPDX-License-Identifier: Apache-2.0
"""Command lines and configuration files of the cluster's processes."""

from __future__ import annotations

import ipaddress
import json
import struct
import tomllib
from pathlib import Path

import pytest
from localcluster import components, dns, hostnet, pki, runtime
from localcluster import settings as s
from localcluster.paths import Paths
from localcluster.processes import Spec

PATHS = Paths(cache=Path("/cache"), state=Path("/state"))
BIN = Path("/bin-dir")
SPECS = [
    components.etcd(PATHS, BIN),
    components.apiserver(PATHS, BIN),
    components.controller_manager(PATHS, BIN),
    components.scheduler(PATHS, BIN),
]


def flags(spec: Spec) -> dict[str, str]:
    return dict(word.removeprefix("--").partition("=")[::2] for word in spec.argv[1:])


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_everything_listens_on_loopback_or_the_bridge(spec: Spec) -> None:
    given = flags(spec)
    listeners = [v for k, v in given.items() if k in ("bind-address", "listen-client-urls", "listen-peer-urls")]
    assert listeners
    for address in listeners:
        host = address.removeprefix("https://").partition(":")[0]
        assert host in ("127.0.0.1", s.BRIDGE_IP)


def test_node_side_listens_on_loopback_or_the_bridge() -> None:
    kubelet = components.kubelet_config(PATHS, "/etc/resolv.conf")
    assert (kubelet["address"], kubelet["healthzBindAddress"]) == (s.BRIDGE_IP, "127.0.0.1")
    assert kubelet["readOnlyPort"] == 0
    assert kubelet["authentication"]["anonymous"]["enabled"] is False
    proxy = components.proxy_config(PATHS)
    assert proxy["healthzBindAddress"].startswith("127.0.0.1:")
    assert proxy["metricsBindAddress"].startswith("127.0.0.1:")


def test_api_server_calls_webhooks_at_their_endpoints_and_authorizes_nodes() -> None:
    given = flags(components.apiserver(PATHS, BIN))
    assert given["enable-aggregator-routing"] == "true"
    assert given["authorization-mode"] == "Node,RBAC"
    assert given["advertise-address"] == s.BRIDGE_IP


def test_every_certificate_named_on_a_command_line_is_made() -> None:
    made = {f"{c.name}.{end}" for c in pki.CERTIFICATES for end in ("crt", "key")}
    made |= {f"{ca}.{end}" for ca in pki.CAS for end in ("crt", "key")} | {"sa.key", "sa.pub"}
    words = [word for spec in SPECS for word in spec.argv]
    words += [v for v in components.kubelet_config(PATHS, "").values() if isinstance(v, str)]
    used = {word.rpartition("/")[2] for word in words if f"{PATHS.pki}/" in word}
    assert len(used) > 15
    assert used <= made


def test_kubelet_keeps_pods_and_images_on_a_full_disk() -> None:
    config = components.kubelet_config(PATHS, "/etc/resolv.conf")
    assert config["imageGCHighThresholdPercent"] == 100
    assert config["evictionHard"]["nodefs.available"] == "1%"
    assert config["failCgroupV1"] is False
    assert config["failSwapOn"] is False


def test_containerd_configuration_is_toml_and_stays_in_its_folder() -> None:
    config = tomllib.loads(runtime.containerd_config(PATHS, "localhost/atp/pause:1"))
    cri = config["plugins"]["io.containerd.grpc.v1.cri"]
    assert cri["sandbox_image"] == "localhost/atp/pause:1"
    assert cri["restrict_oom_score_adj"] is True
    runc = cri["containerd"]["runtimes"]["runc"]["options"]
    for folder in (
        config["root"],
        config["state"],
        config["grpc"]["address"],
        runc["Root"],
        cri["cni"]["conf_dir"],
    ):
        assert folder.startswith("/state/")


def test_cni_configuration_joins_pods_to_the_bridge() -> None:
    (bridge,) = json.loads(runtime.cni_config(PATHS))["plugins"]
    assert bridge["bridge"] == s.BRIDGE
    assert bridge["hairpinMode"] is True
    assert bridge["ipam"]["ranges"][0][0] == {"subnet": s.POD_CIDR, "gateway": s.BRIDGE_IP}


def test_addresses_fit_together() -> None:
    services = ipaddress.ip_network(s.SERVICE_CIDR)
    assert ipaddress.ip_address(s.DNS_SERVICE_IP) in services
    assert ipaddress.ip_address(s.KUBERNETES_SERVICE_IP) == services[1]
    assert ipaddress.ip_address(s.BRIDGE_IP) in ipaddress.ip_network(s.POD_CIDR)
    assert not services.overlaps(ipaddress.ip_network(s.POD_CIDR))


def test_conflicting_routes_are_found_and_our_own_are_not() -> None:
    routes = [
        {"dst": "default", "dev": "eth0"},
        {"dst": s.POD_CIDR, "dev": s.BRIDGE},
        {"dst": "192.0.2.0/24", "dev": "eth0"},
    ]
    assert hostnet.conflicts(routes) == []
    routes.append({"dst": "10.244.0.0/16", "dev": "flannel.1"})
    assert hostnet.conflicts(routes) == ["10.244.0.0/16 on flannel.1"]


def test_cgroup_parents_of_both_versions(tmp_path: Path) -> None:
    for name in ("memory", "pids", "unified"):
        (tmp_path / name).mkdir()
    assert hostnet.cgroup_parents(tmp_path) == [tmp_path / name for name in ("memory", "pids", "unified")]
    (tmp_path / "cgroup.controllers").touch()
    assert hostnet.cgroup_parents(tmp_path) == [tmp_path]


def test_controllers_the_kubelet_needs_are_enabled_as_far_as_there_are_any() -> None:
    assert hostnet.controllers_to_enable("cpuset cpu io memory hugetlb pids rdma misc\n") == (
        "+cpu +cpuset +io +memory +hugetlb +pids"
    )
    assert hostnet.controllers_to_enable("memory pids") == "+memory +pids"
    assert hostnet.controllers_to_enable("\n") == ""


def test_fingerprint_follows_arguments_and_files(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("a")
    spec = Spec("x", ("x", "--flag"), (config,))
    before = spec.fingerprint()
    assert before == Spec("x", ("x", "--flag"), (config,)).fingerprint()
    assert before != Spec("x", ("x", "--other"), (config,)).fingerprint()
    config.write_text("b")
    assert before != spec.fingerprint()


def test_name_servers_on_loopback_are_not_given_to_pods(tmp_path: Path) -> None:
    stub = tmp_path / "resolv.conf"
    stub.write_text("nameserver 127.0.0.53\nnameserver 192.0.2.53\nsearch example.org\nnameserver fd00::1\n")
    assert dns.host_nameservers([tmp_path / "absent", stub]) == ["192.0.2.53"]


def test_corefile_without_outside_servers_does_not_forward() -> None:
    assert "forward" not in dns.corefile([])
    assert "forward . 192.0.2.53" in dns.corefile(["192.0.2.53"])


def test_dns_question_is_well_formed() -> None:
    question = dns.query("a.bc", 0x1234)
    assert question[:12] == struct.pack(">HHHHHH", 0x1234, 0x0100, 1, 0, 0, 0)
    assert question[12:] == b"\x01a\x02bc\x00\x00\x01\x00\x01"


def test_manifests_are_json_with_the_usual_dns_service() -> None:
    items = json.loads(dns.manifests("localhost/atp/coredns:1", []))["items"]
    service = next(item for item in items if item["kind"] == "Service")
    assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == ("kube-dns", s.DNS_SERVICE_IP)
    deployment = next(item for item in items if item["kind"] == "Deployment")
    assert deployment["spec"]["template"]["spec"]["containers"][0]["imagePullPolicy"] == "IfNotPresent"
