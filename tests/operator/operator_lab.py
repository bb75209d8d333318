# SPDX-License-Identifier: Apache-2.0
"""A real kube-apiserver and etcd on loopback, the operator as a process, and a gRPC peer in the place of switch agents.

No kubelet and no scheduler run: `Cluster.run_pods` gives pods their node, address and status, as these would.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
import yaml

from atp_api.switchagent.v1alpha1 import switchagent_pb2 as pb
from atp_api.switchagent.v1alpha1 import switchagent_pb2_grpc as rpc

T = TypeVar("T")
Object = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
SIDECAR_IMAGE = "registry.local/atp-sidecar:test"


def find_binaries() -> Path | None:
    """The newest cached build of the control plane, or ATP_KUBE_BIN, or None."""
    named = os.environ.get("ATP_KUBE_BIN")
    cached = sorted((Path.home() / ".cache/atp/bin").glob("*/kube-apiserver"), key=lambda p: p.stat().st_mtime)
    folders = [Path(named)] if named else [p.parent for p in reversed(cached)]
    for folder in folders:
        if all(os.access(folder / name, os.X_OK) for name in ("kube-apiserver", "etcd", "kubectl")):
            return folder
    return None


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_for(look: Callable[[], T], what: str, seconds: float = 30.0) -> T:
    """Call `look` until it returns something true; AssertionError with `what` and the last value otherwise."""
    end = time.monotonic() + seconds
    value: Any = None
    while time.monotonic() < end:
        with contextlib.suppress(urllib.error.HTTPError, KeyError, IndexError):
            value = look()
            if value:
                return value  # type: ignore[no-any-return]
        time.sleep(0.05)
    raise AssertionError(f"{what} did not come within {seconds:.0f} s; last seen: {value!r}")


def make_certificates(folder: Path) -> None:
    """A CA and one certificate for loopback and the agents' name, good for servers and clients."""
    folder.mkdir(parents=True, exist_ok=True)

    def run(*command: str) -> None:
        subprocess.run(["openssl", *command], check=True, capture_output=True, cwd=folder)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    run("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.crt", "-days", "2", "-subj", "/CN=atp test CA")
    run("req", *key, "-keyout", "tls.key", "-out", "tls.csr", "-subj", "/CN=atp test")
    (folder / "ext").write_text(
        "subjectAltName=DNS:localhost,DNS:atp-switch-agent,IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n"
    )
    sign = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "ext")
    run("x509", "-req", "-in", "tls.csr", "-out", "tls.crt", *sign)


class Cluster:
    """The control plane, with the few calls that tests need."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self.binaries = binaries
        self.folder = folder
        self.port = free_port()
        self.tls = folder / "tls"
        self.webhook_port = free_port()
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        make_certificates(self.tls)
        peer, client = free_port(), free_port()
        self._spawn(
            "etcd",
            "--data-dir",
            str(self.folder / "etcd"),
            "--listen-client-urls",
            f"http://127.0.0.1:{client}",
            "--advertise-client-urls",
            f"http://127.0.0.1:{client}",
            "--listen-peer-urls",
            f"http://127.0.0.1:{peer}",
            "--initial-advertise-peer-urls",
            f"http://127.0.0.1:{peer}",
            "--initial-cluster",
            f"default=http://127.0.0.1:{peer}",
            "--unsafe-no-fsync",
        )
        key = self.folder / "sa.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        (self.folder / "tokens").write_text("admin,admin,1,system:masters\noperator,operator,2\nmallory,mallory,3\n")
        self._spawn(
            "kube-apiserver",
            "--etcd-servers",
            f"http://127.0.0.1:{client}",
            "--bind-address",
            "127.0.0.1",
            "--advertise-address",
            "127.0.0.1",
            "--secure-port",
            str(self.port),
            "--cert-dir",
            str(self.folder / "certs"),
            "--service-cluster-ip-range",
            "10.0.0.0/24",
            "--service-account-issuer",
            "https://localhost",
            "--service-account-key-file",
            str(key),
            "--service-account-signing-key-file",
            str(key),
            "--token-auth-file",
            str(self.folder / "tokens"),
            "--authorization-mode",
            "RBAC",
            "--disable-admission-plugins",
            "ServiceAccount,TaintNodesByCondition",
            "--allow-privileged",
            "--endpoint-reconciler-type",
            "none",
        )
        for user in ("admin", "operator"):
            (self.folder / f"{user}.kubeconfig").write_text(
                yaml.safe_dump(
                    {
                        "apiVersion": "v1",
                        "kind": "Config",
                        "current-context": "test",
                        "clusters": [
                            {
                                "name": "test",
                                "cluster": {
                                    "server": f"https://127.0.0.1:{self.port}",
                                    "insecure-skip-tls-verify": True,
                                },
                            }
                        ],
                        "users": [{"name": user, "user": {"token": user}}],
                        "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
                    }
                )
            )
        wait_for(lambda: self.kubectl("get", "--raw", "/readyz", check=False).stdout == "ok", "the API server", 90)
        self.kubectl("create", "namespace", "atp-system")
        self.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
        self.kubectl("apply", "-f", str(Path(__file__).with_name("rbac.yaml")))
        self.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")

    def install_webhooks(self) -> None:
        text = Path(__file__).with_name("webhooks.yaml").read_text()
        authority = base64.b64encode((self.tls / "ca.crt").read_bytes()).decode()
        text = text.replace("URL", f"https://127.0.0.1:{self.webhook_port}").replace("CA}", f"{authority}}}")
        self.kubectl("apply", "-f", "-", stdin=text)

    def _spawn(self, name: str, *args: str) -> None:
        log = (self.folder / f"{name}.log").open("wb")
        self._processes.append(
            subprocess.Popen([self.binaries / name, *args], stdout=log, stderr=subprocess.STDOUT, cwd=self.folder)
        )

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def kubectl(self, *args: str, stdin: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [self.binaries / "kubectl", "--kubeconfig", self.folder / "admin.kubeconfig", *args],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert not check or done.returncode == 0, f"kubectl {' '.join(args)}: {done.stderr}"
        return done

    def apply(self, obj: Object, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.kubectl("apply", "-f", "-", stdin=json.dumps(obj), check=check)

    def get(self, kind: str, name: str, namespace: str = "default") -> Object:
        """The object, or an empty one when it is not there."""
        done = self.kubectl("get", kind, name, "-n", namespace, "-o", "json", "--ignore-not-found")
        result: Object = json.loads(done.stdout) if done.stdout else {}
        return result

    def pods(self, job: str, namespace: str = "default") -> list[Object]:
        done = self.kubectl("get", "pods", "-n", namespace, "-l", f"atp.dev/job={job}", "-o", "json")
        result: list[Object] = json.loads(done.stdout)["items"]
        return result

    def status(self, job: str, namespace: str = "default") -> Object:
        result: Object = self.get("atpjob", job, namespace).get("status") or {}
        return result

    def patch_status(self, pod: Object, status: Object) -> None:
        meta = pod["metadata"]
        self.kubectl(
            "patch",
            "pod",
            meta["name"],
            "-n",
            meta["namespace"],
            "--subresource=status",
            "--type=merge",
            "-p",
            json.dumps({"status": status}),
        )

    def run_pods(self, job: str, count: int, node: Callable[[str], str] = lambda _: "node-a") -> list[Object]:
        """What scheduler and kubelet do: a node, an address, a running sidecar and trainer."""
        pods = wait_for(
            lambda: (
                (p := self.pods(job))
                if len([x for x in self.pods(job) if not x["metadata"].get("deletionTimestamp")]) == count
                else []
            ),
            f"{count} pods of {job}",
        )
        for pod in pods:
            name = pod["metadata"]["name"]
            if not pod["spec"].get("nodeName"):
                binding = {
                    "apiVersion": "v1",
                    "kind": "Binding",
                    "metadata": {"name": name, "namespace": "default"},
                    "target": {"apiVersion": "v1", "kind": "Node", "name": node(name)},
                }
                self.request("POST", f"/api/v1/namespaces/default/pods/{name}/binding", binding)
            Cluster.addresses += 1
            self.patch_status(
                pod,
                {
                    "phase": "Running",
                    "podIP": (ip := f"10.244.{Cluster.addresses // 250}.{Cluster.addresses % 250 + 1}"),
                    "podIPs": [{"ip": ip}],
                    "initContainerStatuses": [self._container("atp-sidecar", True)],
                    "containerStatuses": [self._container("trainer", True)],
                    "conditions": [{"type": "Ready", "status": "True"}],
                },
            )
        return self.pods(job)

    addresses = 0

    @staticmethod
    def _container(name: str, running: bool, code: int = 0) -> Object:
        state: Object = (
            {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
            if running
            else {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed"}}
        )
        return {
            "name": name,
            "image": "x",
            "imageID": "x",
            "ready": running,
            "restartCount": 0,
            "started": running,
            "state": state,
        }

    def end_pod(self, pod: Object, code: int = 0) -> None:
        self.patch_status(
            pod,
            {
                "phase": "Failed" if code else "Succeeded",
                "containerStatuses": [self._container("trainer", False, code)],
                "conditions": [{"type": "Ready", "status": "False"}],
            },
        )

    def finish_deletions(self, job: str) -> None:
        """What the kubelet does with pods that are marked for deletion."""
        for pod in self.pods(job):
            if pod["metadata"].get("deletionTimestamp"):
                self.kubectl(
                    "delete",
                    "pod",
                    pod["metadata"]["name"],
                    "-n",
                    "default",
                    "--force",
                    "--grace-period=0",
                    check=False,
                )

    def request(
        self,
        method: str,
        path: str,
        body: Object | bytes | None = None,
        user: str = "admin",
        content: str = "application/json",
    ) -> Object:
        """One call as admin, or as mallory, who may do what a test grants; raises HTTPError."""
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.port}{path}",
            method=method,
            data=body if body is None or isinstance(body, bytes) else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {user}", "Content-Type": content},
        )
        with urllib.request.urlopen(request, context=context, timeout=30) as answer:
            result: Object = json.loads(answer.read() or b"{}")
        return result


class Operator:
    """`atp-operator run` as a process of its own."""

    def __init__(self, cluster: Cluster, name: str, webhooks: bool = True, **env: str) -> None:
        self.cluster = cluster
        self.name = name
        self.metrics_port = free_port()
        self.log = cluster.folder / f"{name}.log"
        self._env = {
            **{k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG", "VIRTUAL_ENV")},
            "KUBECONFIG": str(cluster.folder / "operator.kubeconfig"),
            "POD_NAME": name,
            "ATP_NAMESPACE": "atp-system",
            "ATP_SIDECAR_IMAGE": SIDECAR_IMAGE,
            "ATP_SIDECAR_RESOURCES": json.dumps({"requests": {"cpu": "50m", "memory": "64Mi"}}),
            "ATP_AGENT_TLS_DIR": str(cluster.tls),
            "ATP_WEBHOOK_TLS_DIR": str(cluster.tls) if webhooks else "",
            "ATP_WEBHOOK_PORT": str(cluster.webhook_port),
            "ATP_WEBHOOK_ADDRESS": "127.0.0.1",
            "ATP_METRICS_PORT": str(self.metrics_port),
            "ATP_LEASE_SECONDS": "3",
            "ATP_RESYNC_SECONDS": "2",
            "ATP_QUARANTINE_SECONDS": "6",
            "ATP_SWITCH_WAIT_SECONDS": "4",
            "ATP_SWITCH_LOSS_SECONDS": "2",
            "ATP_RELEASE_WAIT_SECONDS": "10",
            "ATP_RESTART_BACKOFF_SECONDS": "0.2",
            **env,
        }
        self.webhook_port = cluster.webhook_port
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, wait: bool = True) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "atp_operator", "run"],
            env=self._env,
            stdout=self.log.open("ab"),
            stderr=subprocess.STDOUT,
        )
        if not wait:
            return
        wait_for(lambda: self.metric("atp_operator_leader") is not None, f"{self.name}'s metrics", 30)

    def metric(self, name: str) -> float | None:
        with contextlib.suppress(OSError):
            text = urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5).read().decode()
            for line in text.splitlines():
                if line.startswith(f"{name} ") or line.startswith(f"{name}{{"):
                    return float(line.rsplit(" ", 1)[1])
        return None

    def kill(self) -> None:
        """As a crash: no clean-up."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            self.process = None


class FakeAgent(rpc.SwitchAgentServicer):
    """The operator's peer: real gRPC with mutual TLS; says PROGRAMMED to everything, or what a test wants."""

    def __init__(
        self, tls: Path, aggregators: int = 4096, values: tuple[int, ...] = (62, 350), sticky: bool = True
    ) -> None:
        self.port = free_port()
        self._tls = tls
        self.aggregators, self.values, self.sticky = aggregators, values, sticky
        self.state = pb.DesiredState()
        self.history: list[pb.DesiredState] = []
        self.connected = True
        self.trouble = ("", "")  # (reason, message) of the whole switch, which is not in sync then
        self.answer: Callable[[pb.Job], tuple[pb.JobStatus.State.ValueType, str, str]] = lambda _: (
            pb.JobStatus.PROGRAMMED,
            "",
            "",
        )
        self.counters: dict[str, int] = {}
        self.refuse = ""
        self._changed = threading.Condition()
        self._server: grpc.Server | None = None

    def start(self) -> None:
        self.state = pb.DesiredState()  # a restarted agent remembers nothing
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(8))
        rpc.add_SwitchAgentServicer_to_server(self, self._server)
        credentials = grpc.ssl_server_credentials(
            [((self._tls / "tls.key").read_bytes(), (self._tls / "tls.crt").read_bytes())],
            (self._tls / "ca.crt").read_bytes(),
            require_client_auth=True,
        )
        assert self._server.add_secure_port(f"127.0.0.1:{self.port}", credentials) == self.port
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None

    def notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def jobs(self) -> list[pb.Job]:
        return list(self.state.jobs)

    def _observed(self) -> pb.ObservedState:
        result = pb.ObservedState(
            switch_name=self.state.switch_name,
            generation=self.state.generation,
            connected=self.connected,
            in_sync=self.connected,
            reason=self.trouble[0],
            message=self.trouble[1],
        )
        for job in self.state.jobs:
            state, reason, message = self.answer(job)
            if self.trouble[0]:
                state, (reason, message) = pb.JobStatus.PENDING, self.trouble
            if state != pb.JobStatus.PROGRAMMED:
                result.in_sync = False
                result.reason, result.message = result.reason or reason, result.message or message
            result.jobs.append(
                pb.JobStatus(
                    job_id=job.job_id,
                    epoch=job.epoch,
                    uid=job.uid,
                    state=state,
                    reason=reason,
                    message=message,
                    advice=f"advice on {reason}" if reason else "",
                )
            )
        if self.trouble[0]:
            result.in_sync = False
        result.advice = f"advice on {result.reason}" if result.reason else ""
        return result

    def GetCapabilities(self, request: Any, context: Any) -> pb.Capabilities:
        return pb.Capabilities(
            switch_name="s",
            target="software-bpf",
            aggregators=self.aggregators,
            values=self.values,
            multicast_groups=254,
            job_ids=255,
            fan_in_max=32,
            version="test",
            sticky_saturation=self.sticky,
        )

    def GetObservedState(self, request: Any, context: Any) -> pb.ObservedState:
        return self._observed()

    def ApplyDesiredState(self, request: pb.DesiredState, context: Any) -> pb.ObservedState:
        if request.writer == self.state.writer and request.generation < self.state.generation:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "generation is lower than the last")
        if self.refuse and request.jobs:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.refuse)
        ids = [job.job_id for job in request.jobs]
        if len(set(ids)) != len(ids):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"job IDs twice: {ids}")
        self.state = request
        self.history.append(request)
        self.notify()
        return self._observed()

    def StreamTelemetry(self, request: pb.TelemetryRequest, context: Any) -> Iterator[pb.Telemetry]:
        while context.is_active():
            yield pb.Telemetry(
                switch_name="s",
                time_seconds=time.time(),
                observed=self._observed(),
                aggregators_in_use=len(self.state.jobs),
                jobs=[
                    pb.JobCounters(job_id=j.job_id, epoch=j.epoch, uid=j.uid, counters=self.counters)
                    for j in self.state.jobs
                ],
            )
            with self._changed:
                self._changed.wait(0.5)


class Lab:
    """What a test works with; removes what it made."""

    wait_for = staticmethod(wait_for)

    def __init__(self, cluster: Cluster, operator: Operator | None) -> None:
        self.cluster = cluster
        self.operator = operator
        self._agents: list[tuple[str, FakeAgent]] = []
        self._jobs: list[str] = []
        self._quotas: list[str] = []

    def agent(self, name: str, nodes: list[str], start: bool = True, **options: Any) -> FakeAgent:
        """An ATPSwitch with a peer behind it."""
        agent = FakeAgent(self.cluster.tls, **options)
        if start:
            agent.start()
        self.cluster.apply(
            {
                "apiVersion": "atp.dev/v1alpha1",
                "kind": "ATPSwitch",
                "metadata": {"name": name},
                "spec": {
                    "type": "Software",
                    "nodes": nodes,
                    "agent": {"address": f"127.0.0.1:{agent.port}", "serverName": "atp-switch-agent"},
                },
            }
        )
        self._agents.append((name, agent))
        if start and self.operator is not None:
            wait_for(lambda: self.ready(name), f"ATPSwitch {name} Ready")
        return agent

    def ready(self, name: str) -> bool:
        status = self.cluster.get("atpswitch", name).get("status") or {}
        return any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ())

    def switch_condition(self, name: str, kind: str) -> Object:
        """A condition of an ATPSwitch; empty when it has none of that type."""
        status = self.cluster.get("atpswitch", name).get("status") or {}
        return next((c for c in status.get("conditions") or () if c["type"] == kind), {})

    def events(self, kind: str, name: str) -> list[tuple[str, str]]:
        """(type, reason) of the events on an object, oldest first."""
        items = json.loads(self.cluster.kubectl("get", "events", "-n", "default", "-o", "json").stdout)["items"]
        mine = [e for e in items if (e["involvedObject"]["kind"], e["involvedObject"]["name"]) == (kind, name)]
        return [(e["type"], e["reason"]) for e in sorted(mine, key=lambda e: e["firstTimestamp"])]

    @staticmethod
    def job(name: str, workers: int = 2, **spec: Any) -> Object:
        """An ATPJob manifest."""
        return {
            "apiVersion": "atp.dev/v1alpha1",
            "kind": "ATPJob",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {
                "workers": {
                    "replicas": workers,
                    "template": {
                        "spec": {"containers": [{"name": "trainer", "image": "trainer:test", "command": ["true"]}]}
                    },
                },
                **spec,
            },
        }

    def apply_job(self, name: str, workers: int = 2, **spec: Any) -> None:
        self.cluster.apply(self.job(name, workers, **spec))
        self._jobs.append(name)

    def quota(self, name: str, **spec: Any) -> None:
        self.cluster.apply(
            {
                "apiVersion": "atp.dev/v1alpha1",
                "kind": "ATPTenantQuota",
                "metadata": {"name": name},
                "spec": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "default"}}, **spec},
            }
        )
        self._quotas.append(name)

    def phase(self, job: str, *phases: str, seconds: float = 30.0) -> Object:
        """Wait until the job is in one of the phases; its status."""

        def look() -> Object | None:
            status = self.cluster.status(job)
            return status if status.get("phase") in phases else None

        try:
            result = wait_for(look, f"{job} in {phases}", seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; status: {json.dumps(self.cluster.status(job), indent=1)}") from error
        assert result is not None
        return result

    def condition(self, job: str, kind: str) -> Object:
        found = [c for c in self.cluster.status(job).get("conditions") or () if c["type"] == kind]
        return found[0] if found else {}

    def delete_job(self, name: str) -> None:
        self.cluster.kubectl("delete", "atpjob", name, "-n", "default", "--wait=false", "--ignore-not-found")

        def gone() -> bool:
            self.cluster.finish_deletions(name)
            return not self.cluster.get("atpjob", name)

        wait_for(gone, f"{name} deleted")

    def close(self) -> None:
        for name in self._jobs:
            with contextlib.suppress(AssertionError):
                self.delete_job(name)
            self.cluster.kubectl(
                "delete",
                "pod",
                "-n",
                "default",
                "-l",
                f"atp.dev/job={name}",
                "--force",
                "--grace-period=0",
                check=False,
            )
            self.cluster.kubectl("delete", "service", name, "-n", "default", "--ignore-not-found")
        for name in self._quotas:
            self.cluster.kubectl("delete", "atptenantquota", name, "--ignore-not-found")
        for name, agent in self._agents:
            self.cluster.kubectl("delete", "atpswitch", name, "--ignore-not-found")
            agent.stop()


def accepts(port: int) -> bool:
    """Whether somebody listens at a port of this machine."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0
