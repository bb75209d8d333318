# SPDX-License-Identifier: Apache-2.0
"""Nodes with pods, real switches and a real training job, for attackers to try.

Each node is a network namespace with a bridge, the software switch in tc mode and its agent as processes; each pod is a
namespace behind a veth. The operator's own code places the job and says what every switch must hold; the transport that
ships runs in the pods. Only the operator's process and Kubernetes are missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from softswitch.pins import bpf_file_system
from switch_agent.process import Process, ask_agent

from atp_api.switchagent.v1alpha1 import switchagent_pb2 as api
from atp_operator.allocation import Refusal
from atp_operator.desired import assignments, desired_guards, desired_jobs
from atp_operator.model import HOST_ONLY_JOB_ID, AgentView, Capacity, Job, JobStatus, Region, Switch
from atp_operator.topology import Located, host_only, place
from atp_transport import ParameterServer, Worker

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "softswitch" / "build" / "libatp_switch.so"
CLONE_NEWNET = 0x40000000
AGGREGATORS = 1024
_T = TypeVar("_T")


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def inside(namespace: str, work: Callable[[], _T]) -> _T:
    """Run something in a thread of a network namespace; sockets and threads that it makes stay there."""
    result: list[_T] = []
    failure: list[BaseException] = []

    def enter() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
            if libc.setns(handle, CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"setns {namespace}")
            os.close(handle)
            result.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


@dataclass
class Pod:
    name: str
    node: str
    address: str
    namespace: str
    device: str
    """The node's end of its veth."""

    def socket(self, port: int = 0, timeout: float | None = None) -> socket.socket:
        """A UDP socket of the pod, under its own address."""

        def make() -> socket.socket:
            s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
            s.bind((self.address, port))
            s.settimeout(timeout)
            return s

        return inside(self.namespace, make)


@dataclass
class Training:
    """What a job's workers found: rounds that ended, elements that were wrong, errors."""

    rounds: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)


@dataclass
class Running:
    """A job's endpoints in their pods."""

    job: Job
    workers: list[Worker]
    servers: list[ParameterServer]

    def metrics(self) -> list[dict[str, Any]]:
        return [endpoint.metrics() for endpoint in (*self.workers, *self.servers)]

    def close(self) -> None:
        for endpoint in (*self.workers, *self.servers):
            endpoint.close()


class Site:
    """Nodes `n0`, `n1`... with named pods; a context manager."""

    def __init__(
        self, *nodes: Sequence[str], values: int = 62, switch_options: Sequence[str] = (), pinned: bool = False
    ) -> None:
        """`pinned`: switches' tables and programs outlive their processes."""
        self.prefix = f"atk{os.getpid() % 100000}"
        self.values = values
        self.pods: dict[str, Pod] = {}
        self._nodes = list(nodes)
        self._options = tuple(switch_options)
        self._stack = contextlib.ExitStack()
        self._pinned = pinned
        self._pins = Path()
        self._switches: list[Process] = []
        self._agents: list[Process] = []
        self._generation = 0
        self.running: dict[str, Running] = {}

    def __enter__(self) -> Site:
        try:
            if self._pinned:
                self._pins = self._stack.enter_context(bpf_file_system())
            for number, names in enumerate(self._nodes):
                self._node(number, names)
            self._join()
            for number in range(len(self._nodes)):
                self._greet(number)
                self._switch(number)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for running in self.running.values():
            running.close()
        self._stack.close()

    # -- network -----------------------------------------------------------------------------------

    def namespace(self, number: int) -> str:
        return f"{self.prefix}n{number}"

    def _namespace(self, name: str) -> None:
        ip("netns", "add", name)
        self._stack.callback(ip, "netns", "delete", name)
        ip("-n", name, "link", "set", "lo", "up")
        # The kernel's own check of sources would hide that the product has none.
        settings = ["net.ipv4.ip_forward=1", "net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.default.rp_filter=0"]
        settings += ["net.ipv6.conf.all.disable_ipv6=1", "net.ipv6.conf.default.disable_ipv6=1"]
        for setting in settings:
            subprocess.run(["ip", "netns", "exec", name, "sysctl", "-q", "-w", setting], check=False)

    def _node(self, number: int, names: Sequence[str]) -> None:
        node = self.namespace(number)
        self._namespace(node)
        ip("-n", node, "link", "add", "cni0", "type", "bridge")
        ip("-n", node, "address", "add", f"10.86.{number}.1/24", "dev", "cni0")
        ip("-n", node, "link", "set", "cni0", "up")
        for offset, name in enumerate(names):
            pod = Pod(name, f"n{number}", f"10.86.{number}.{10 + offset}", f"{node}-{name}", f"h{offset}")
            self._namespace(pod.namespace)
            ip("-n", node, "link", "add", pod.device, "type", "veth", "peer", "name", "eth0", "netns", pod.namespace)
            ip("-n", node, "link", "set", pod.device, "master", "cni0", "up")
            ip("-n", pod.namespace, "address", "add", f"{pod.address}/24", "dev", "eth0")
            ip("-n", pod.namespace, "link", "set", "eth0", "up")
            ip("-n", pod.namespace, "route", "add", "default", "via", f"10.86.{number}.1")
            self.pods[name] = pod

    def _join(self) -> None:
        """Nodes have one uplink each, to one network that passes whatever comes."""
        if len(self._nodes) < 2:
            return
        fabric = f"{self.prefix}fabric"
        self._namespace(fabric)
        ip("-n", fabric, "link", "add", "br0", "type", "bridge")
        ip("-n", fabric, "link", "set", "br0", "up")
        for number in range(len(self._nodes)):
            node, port = self.namespace(number), f"p{number}"
            ip("-n", node, "link", "add", "up0", "type", "veth", "peer", "name", port, "netns", fabric)
            ip("-n", fabric, "link", "set", port, "master", "br0", "up")
            ip("-n", node, "address", "add", f"10.87.0.{number + 1}/24", "dev", "up0")
            ip("-n", node, "link", "set", "up0", "up")
            for other in set(range(len(self._nodes))) - {number}:
                ip("-n", node, "route", "add", f"10.86.{other}.0/24", "via", f"10.87.0.{other + 1}")

    def _greet(self, number: int) -> None:
        """The node finds out where its pods and the other nodes are, as probes of the kubelet make it do.

        Else the hosts of a job without aggregators, which does not wait for its guard, would get it while it trains.
        """
        addresses = [pod.address for pod in self.pods.values() if pod.node == f"n{number}"]
        addresses += [f"10.87.0.{n + 1}" for n in range(len(self._nodes)) if len(self._nodes) > 1 and n != number]

        def send() -> None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
                for _ in range(3):
                    for address in addresses:
                        s.sendto(b"", (address, 9))
                    time.sleep(0.1)

        inside(self.namespace(number), send)

    def _switch(self, number: int) -> None:
        switch = self._start_switch(number)
        agent = self._start(
            number,
            "atp_switch_agent",
            *("serve", "--switch-name", f"s{number}", "--listen", "127.0.0.1:0", "--health-listen", "127.0.0.1:0"),
            *("--insecure-loopback", "--p4runtime", f"127.0.0.1:{switch.started['p4runtime_port']}"),
            *("--ports", "host-veth"),
        )
        self._switches.append(switch)
        self._agents.append(agent)

    def _start_switch(self, number: int, port: int = 0) -> Process:
        folders = (self._pins / "bpf" / str(number), self._pins / "state" / str(number))
        return self._start(
            number,
            "atp_softswitch",
            *("serve", "--listen", f"127.0.0.1:{port}", "--health-listen", "127.0.0.1:0", "--library", str(LIBRARY)),
            *("--mode", "tc", "--attach", "veth", "--aggregators", str(AGGREGATORS), "--values", str(self.values)),
            *(("--pin-dir", str(folders[0]), "--state-dir", str(folders[1])) if self._pinned else ()),
            *self._options,
        )

    def kill_switch(self, number: int) -> None:
        """Its process is gone at once."""
        self._switches[number].kill()

    def restart_switch(self, number: int) -> Process:
        """Start its process again, and wait until the agent finds everything as the operator wants it."""
        old = self._switches[number]
        self._switches[number] = self._start_switch(number, old.started["p4runtime_port"])
        deadline = time.monotonic() + 20
        while not self._ask(number).observed.in_sync:
            assert time.monotonic() < deadline, "the agent is not in sync"
            time.sleep(0.1)
        return self._switches[number]

    def _start(self, number: int, module: str, *arguments: str) -> Process:
        process = Process.run(module, *arguments, prefix=self._on_node(number))
        self._stack.callback(lambda: process.child.poll() is None and process.stop())
        return process

    def _on_node(self, number: int) -> tuple[str, ...]:
        """Prefix that runs a command on a node."""
        return ("ip", "netns", "exec", self.namespace(number))

    # -- control -----------------------------------------------------------------------------------

    def switches(self) -> dict[str, Switch]:
        capacity = Capacity(aggregators=AGGREGATORS, values=(self.values,), sticky_saturation=True)
        view = AgentView(known=True, reachable=True, connected=True, capacity=capacity)
        return {
            f"s{n}": Switch.from_object(
                {
                    "metadata": {"name": f"s{n}"},
                    "spec": {"type": "Software", "nodes": [f"n{n}"], "agent": {"address": "h:1"}},
                },
                {},
                view,
            )
            for n in range(len(self._nodes))
        }

    def plan(
        self,
        name: str,
        workers: Sequence[str],
        server: str,
        job_id: int = 1,
        aggregate: bool = True,
        shared: int = AGGREGATORS // 2,
        floor: int = 0,
    ) -> Job:
        """A running job on these pods, with so many aggregators that it shares, and so many of its own."""

        def located(names: Iterable[str]) -> list[Located]:
            pods = [self.pods[pod] for pod in names]
            return [Located(index, pod.node, pod.address, pod.name) for index, pod in enumerate(pods)]

        ends = located(workers), located([server])
        placed = place(*ends, self.switches()) if aggregate else host_only(*ends)
        assert not isinstance(placed, Refusal), placed
        raw = {
            "metadata": {"name": name, "namespace": "victims", "uid": name, "generation": 1},
            "spec": {
                "workers": {"replicas": len(workers)},
                "scale": "1e5",
                "stallTimeoutSeconds": 20,
                "aggregators": {"request": shared + floor, "floor": floor},
            },
        }
        regions = [Region(0, shared)] + ([Region(AGGREGATORS - floor, floor, floor=True)] if floor else [])
        status = JobStatus(
            phase="Running",
            mode="Shared" if aggregate else "HostOnly",
            job_id=job_id if aggregate else HOST_ONLY_JOB_ID,
            epoch=1,
            revision=1,
            switches=placed.switches,
            values=self.values,
            regions=tuple(regions) if aggregate else (),
            placement=placed,
        )
        return Job(**{**Job.from_object(raw).__dict__, "status": status})

    def apply(self, jobs: Sequence[Job], guarded: bool = True) -> None:
        """What the operator tells the agents. `guarded` False: as if there were no guard, to show that attacks work."""
        self._generation += 1
        if not guarded:
            self._forget_addresses()
        for number, switch in enumerate(self.switches().values()):
            state = api.DesiredState(
                switch_name=switch.name,
                generation=self._generation,
                writer="test",
                jobs=desired_jobs(switch, jobs),
                guards=desired_guards(switch, jobs) if guarded else (),
            )
            told = self._ask(number, state)
            assert told.observed.in_sync, told.observed

    def _forget_addresses(self) -> None:
        """Each pod looks like a router to the switch, whose ports are not checked for their sources."""
        for index, pod in enumerate(self.pods.values()):
            node = self.namespace(int(pod.node[1:]))
            target = f"192.0.2.{index + 1}/32"
            ip("-n", node, "route", "add", target, "via", pod.address, "dev", pod.device, "onlink")
            ip("-n", node, "link", "set", pod.device, "alias", "router")  # an event: the switch looks again
        time.sleep(1.0)

    def _ask(self, number: int, state: api.DesiredState | None = None) -> api.Telemetry:
        return ask_agent(self._on_node(number), self._agents[number], state)

    def culprits(self) -> dict[str, int]:
        """Packets that were dropped, by the pod that sent them as the switches name it; '?': nobody knows.

        At an uplink only the packets themselves say who sent them; their own node has checked that.
        """
        names = {pod.address: pod.name for pod in self.pods.values()}
        found: dict[str, int] = {}
        for number in range(len(self._nodes)):
            for drops in self._ask(number).drops:
                name = names.get(drops.address or drops.last_source, "?")
                found[name] = found.get(name, 0) + sum(drops.dropped.values())
        return found

    def in_use(self) -> dict[str, int]:
        """Aggregators that hold a sum now, by the job that the switches say it is of."""
        found: dict[str, int] = {}
        for number in range(len(self._nodes)):
            for job in self._ask(number).jobs:
                if job.uid and job.aggregators_in_use:
                    found[job.uid] = found.get(job.uid, 0) + job.aggregators_in_use
        return found

    # -- the victims -------------------------------------------------------------------------------

    def start(self, job: Job) -> Running:
        """The job's transport in its pods."""
        told = assignments(job)
        placement = job.status.placement
        assert placement is not None
        running = Running(job, [], [])
        self.running[job.uid] = running
        for server in placement.servers:
            config = told[server.pod_uid]
            running.servers.append(
                inside(self.pods[server.pod_uid].namespace, lambda config=config: ParameterServer(config))  # type: ignore[misc]
            )
        for seat in placement.seats:
            config = told[seat.pod_uid]
            running.workers.append(
                inside(self.pods[seat.pod_uid].namespace, lambda config=config: Worker(config))  # type: ignore[misc]
            )
        return running

    @contextlib.contextmanager
    def training(self, running: Running, elements: int = 20_000, seed: int = 0) -> Iterator[Training]:
        """All-reduces one after the other until the block ends; each result is compared with the exact sum."""
        found = Training()
        stop = threading.Event()
        count = len(running.workers)
        generator = np.random.default_rng(seed)
        tensors = [generator.integers(-1000, 1000, elements).astype(np.float32) for _ in range(count)]
        wanted = np.sum(tensors, axis=0, dtype=np.float64).astype(np.float32)
        outs = [np.zeros_like(tensor) for tensor in tensors]

        def rounds() -> None:
            number = 0
            while not stop.is_set() and not found.errors:
                number += 1
                for worker, tensor, out in zip(running.workers, tensors, outs, strict=True):
                    out[:] = -1
                    worker.submit(number, "sum", "float32", tensor.data, out.data, tensor.size)
                for worker, out in zip(running.workers, outs, strict=True):
                    done = _completion(worker)
                    if done != (number, None):
                        found.errors.append(f"round {number}: {done}")
                        continue
                    found.wrong += int(np.count_nonzero(out != wanted))
                found.rounds += 1

        thread = threading.Thread(target=rounds)
        thread.start()
        try:
            yield found
        finally:
            stop.set()
            thread.join(60)
            assert not thread.is_alive(), "a worker hangs"


def _completion(worker: Worker) -> tuple[int, str | None] | None:
    deadline = time.monotonic() + 45
    while time.monotonic() < deadline:
        if select.select([worker.fileno()], [], [], 1.0)[0]:
            for done in worker.completions():
                return done
    return None
