# SPDX-License-Identifier: Apache-2.0
"""Train examples/digits with a switch in the middle: hosts in network namespaces, everything else as in a cluster.

The switch is bmv2 with the committed program (``--switch bmv2``), or the software switch (``--switch software``). The
agent programs it, the operator's planner places the job, real sidecars carry the gradients of the example as it is.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import network
from .cluster import NAMESPACE, Cluster
from .network import Host
from .process import ENVIRONMENT, ROOT, Bmv2Process, reason_not_to_run

TRAIN = ROOT / "examples" / "digits" / "train.py"
RESULT = ROOT / "build" / "demo-bmv2" / "result.json"
TORCH = "ATP_TORCH_PYTHON"
SWITCH = "switch"
JOB = "digits"
AGENT = "127.0.0.1:9560"
SOFTWARE_P4RUNTIME = "127.0.0.1:9559"
STALE_SECONDS = 2.0
"""T on bmv2: ranks that share its processors are further apart than those of real machines."""
IN_FLIGHT = 128
"""bmv2 takes a tenth of a second for so many. It has no queue where packets come in that it could mark by, so a window
that nothing bounds grows to a second's packets, and the transport resends what is only late."""
START_SECONDS = 60.0
TRAIN_SECONDS = 1800.0


def say(text: str) -> None:
    print(text, flush=True)


class DemoError(Exception):
    """The run cannot begin or has failed; the text says why and what to do."""


@dataclass(frozen=True)
class Options:
    """bmv2 handles one to a few thousand packets a second. A step of this example is 618 packets of every worker, so
    the default is 72 steps (6 epochs, batches of 64): 89,000 gradient packets."""

    switch: str = "bmv2"
    workers: int = 2
    epochs: int = 6
    batch: int = 64
    lr: float = 0.1
    mode: str = "Reserved"
    aggregators: int = 0
    """That the job asks for; in mode Reserved they bound a worker's window. 0: IN_FLIGHT for all workers together."""
    check_sum: bool = True
    result: Path = RESULT


@dataclass(frozen=True)
class Result:
    """What one run measured."""

    switch: str
    workers: int
    epochs: int
    accuracy: float
    """Test accuracy with the switch in the middle, 0 to 1."""
    gloo_accuracy: float
    """Test accuracy of the same training over gloo on loopback."""
    error_over_bound: float | None
    """Largest error of a summed element divided by its bound (examples/digits/train.py); at most 1."""
    summed_share: float
    """Share of the gradients in the results that came to the parameter server as sums, 0 to 1; from its answers."""
    switch_share: float
    """Share of the gradient packets at the switch, resends too, that it added to a sum, 0 to 1; from its counters."""
    gradient_packets: int
    """At the switch, resends too."""
    packets_per_second: float
    train_seconds: float
    gloo_train_seconds: float
    counters: dict[str, int] = field(default_factory=dict)
    """The switch's, of the job."""
    results: dict[str, int] = field(default_factory=dict)
    """Gradients in the results, by how they came to the parameter server: its sidecar's counters."""
    sidecar: dict[str, Any] = field(default_factory=dict)
    """Rank 0's sidecar."""

    def table(self) -> str:
        rows = [
            ("test accuracy", f"{100 * self.accuracy:.2f} %", f"{100 * self.gloo_accuracy:.2f} %"),
            ("gradients summed in the switch", f"{100 * self.summed_share:.2f} %", "-"),
            ("packets that it added, of all with resends", f"{100 * self.switch_share:.1f} %", "-"),
            ("gradient packets, with resends", str(self.gradient_packets), "-"),
            ("gradient packets a second", f"{self.packets_per_second:.0f}", "-"),
            ("seconds of training", f"{self.train_seconds:.1f}", f"{self.gloo_train_seconds:.1f}"),
        ]
        if self.error_over_bound is not None:
            rows.insert(1, ("largest error / bound", f"{self.error_over_bound:.3f}", "-"))
        width = max(len(row[0]) for row in rows)
        lines = [f"  {'':{width}}  {self.switch:>10}  {'gloo':>10}"]
        lines += [f"  {name:{width}}  {ours:>10}  {gloo:>10}" for name, ours, gloo in rows]
        counted = ", ".join(f"{name} {value}" for name, value in sorted(self.counters.items()))
        return "\n".join([*lines, f"  counters of the switch: {counted}"])


def torch_python() -> str:
    """A Python with torch and scikit-learn. DemoError if there is none."""
    python = os.environ.get(TORCH, "/usr/bin/python3")
    probe = subprocess.run([python, "-c", "import torch, sklearn"], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        raise DemoError(
            f"{python} cannot import torch and sklearn: apt-get install --no-install-recommends python3-torch "
            f"python3-sklearn, or let {TORCH} name a Python that can"
        )
    return python


def missing(options: Options) -> str | None:
    """What this machine lacks, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root: run it as root"
    for tool in ("ip", "ethtool"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed: apt-get install iproute2 ethtool"
    if options.switch == "bmv2":
        return reason_not_to_run()
    return None


def window(workers: int) -> int:
    """Aggregators for so many workers on a slow switch: a power of two, at least 8."""
    return max(8, 1 << (IN_FLIGHT // workers).bit_length() - 1)


def share(counters: dict[str, int]) -> tuple[float, int]:
    """Share of gradient packets that were added to a sum, and how many there were.

    A packet of a gradient is added (``aggregated``), or passes for the parameter server to add. What is answered from a
    sum that has it already (``reemitted``, ``duplicates``) is no new gradient.
    """
    passed = sum(counters.get(n, 0) for n in ("collisions", "resend_passed", "passed_transit", "passed_raw_float"))
    added = counters.get("aggregated", 0)
    return (added / (added + passed) if added + passed else 0.0), added + passed


class Processes:
    """Children with a log each; all of them end with this."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.running: list[tuple[str, subprocess.Popen[bytes]]] = []

    def start(self, name: str, command: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        with (self.directory / f"{name}.log").open("wb") as log:
            child = subprocess.Popen(
                command, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT
            )
        self.running.append((name, child))
        return child

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def check(self) -> None:
        """DemoError if a process that serves has ended."""
        for name, child in self.running:
            if child.poll() not in (None, 0):
                raise DemoError(f"{name} ended with {child.returncode}:\n{self.log(name)[-3000:]}")

    def close(self) -> None:
        for _, child in reversed(self.running):
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
        for _, child in reversed(self.running):
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(10)


def start_bmv2(stack: ExitStack, everyone: Sequence[Host]) -> tuple[list[str], dict[str, int]]:
    """An empty bmv2: the agent loads the program and says where hosts are. Returns its options and ports by host."""
    for host in everyone:
        # With offloads on, libpcap keeps room for 64 KB a frame: 32 frames in all, and a window is lost at once.
        network.run("ethtool", "-K", host.interface, *network.OFFLOADS)
    bmv2 = Bmv2Process({host.number: host.interface for host in everyone}, load=False)
    stack.callback(bmv2.close)
    options = ["--p4runtime", bmv2.address, "--target", "bmv2", "--stale-ms", str(int(STALE_SECONDS * 1000))]
    return options, {host.name: host.number for host in everyone}


async def serving(processes: Processes, name: str) -> None:
    """Wait until a program of the control plane says that it serves."""
    deadline = time.monotonic() + START_SECONDS
    while '"serving"' not in processes.log(name):
        processes.check()
        if time.monotonic() > deadline:
            raise DemoError(f"{name} does not start:\n{processes.log(name)}")
        await asyncio.sleep(0.1)


def start_software(processes: Processes, everyone: Sequence[Host]) -> tuple[list[str], dict[str, int]]:
    """A bridge with the tc program at its ports."""
    network.run("ip", "link", "add", "br0", "type", "bridge")
    network.run("ip", "link", "set", "br0", "up")
    for host in everyone:
        network.run("ip", "link", "set", host.interface, "master", "br0")
        network.run("bridge", "fdb", "replace", host.mac, "dev", host.interface, "master", "static")
    interfaces = [host.interface for host in everyone]
    command = [sys.executable, "-m", "atp_softswitch", "serve", "--listen", SOFTWARE_P4RUNTIME, "--mode", "tc"]
    processes.start(SWITCH, [*command, "--stale-ms", str(int(STALE_SECONDS * 1000)), "--attach", *interfaces])
    ports = {host.name: socket.if_nametoindex(host.interface) for host in everyone}
    return ["--p4runtime", SOFTWARE_P4RUNTIME], ports


def start_sidecars(processes: Processes, everyone: dict[str, Host], folder: Path, assignments: dict[str, str]) -> None:
    """One for each pod; the assignment is there when it starts."""
    for pod, text in assignments.items():
        place = folder / pod
        place.mkdir()
        (place / "assignment.json").write_text(text)
        command = [sys.executable, "-m", "atp_sidecar", "run", "--assignment", str(place / "assignment.json")]
        command += ["--socket", str(place / "atp.sock")]
        role = json.loads(text)["role"]
        host = everyone[pod]
        processes.start(
            f"sidecar-{pod}",
            host.command(*command),
            ATP_ROLE=role,
            POD_NAME=pod,
            POD_NAMESPACE=NAMESPACE,
            POD_IP=host.address,
        )


def train_arguments(options: Options) -> list[str]:
    return ["--epochs", str(options.epochs), "--batch", str(options.batch), "--lr", str(options.lr)]


def last_line(log: str) -> dict[str, Any]:
    lines = [line for line in log.splitlines() if line.startswith("{")]
    if not lines or "accuracy" not in lines[-1]:
        raise DemoError(f"the training did not end well:\n{log[-3000:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def results_of(host: Host) -> dict[str, int]:
    """How the gradients in the results came to the parameter server: ``aggregated`` in sums, ``host_summed`` alone."""
    script = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:9095/metrics').read().decode())"
    done = subprocess.run(host.command(sys.executable, "-c", script), capture_output=True, text=True, check=False)
    found = dict.fromkeys(("aggregated", "host_summed"), 0)
    for line in done.stdout.splitlines():
        for name in found:
            if line.startswith(f"atp_{name}_packets_total{{"):
                found[name] = int(float(line.split()[-1]))
    if not any(found.values()):
        raise DemoError(f"the parameter server's sidecar tells no results: {done.stdout[-500:]}{done.stderr[-500:]}")
    return found


def train_over_gloo(processes: Processes, python: str, options: Options) -> dict[str, Any]:
    """The same training over loopback, for comparison."""
    command = [python, str(TRAIN), "--backend", "gloo", "--spawn", str(options.workers), *train_arguments(options)]
    child = processes.start(
        "gloo", command, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT / "client"), GLOO_SOCKET_IFNAME="lo"
    )
    child.wait(TRAIN_SECONDS)
    return last_line(processes.log("gloo"))


async def train(
    processes: Processes, python: str, options: Options, workers: Sequence[tuple[str, Host]], folder: Path
) -> dict[str, Any]:
    """The example on every worker's host; rank 0's lines are shown as they come."""
    arguments = [*train_arguments(options), *(["--check-sum"] if options.check_sum else [])]
    children = []
    for rank, (pod, host) in enumerate(workers):
        command = host.command(python, str(TRAIN), "--backend", "atp", *arguments)
        children.append(
            processes.start(
                f"trainer-{rank}",
                command,
                RANK=str(rank),
                WORLD_SIZE=str(len(workers)),
                LOCAL_RANK="0",
                MASTER_ADDR=workers[0][1].address,
                MASTER_PORT="29500",
                ATP_SOCKET=str(folder / pod / "atp.sock"),
                ATP_JOB=f"{NAMESPACE}/{JOB}",
                GLOO_SOCKET_IFNAME="eth0",
                OMP_NUM_THREADS="1",
                PYTHONUNBUFFERED="1",
                PYTHONPATH=str(ROOT / "client"),
            )
        )
    shown = 0
    deadline = time.monotonic() + TRAIN_SECONDS
    while any(child.poll() is None for child in children):
        processes.check()
        if time.monotonic() > deadline:
            raise DemoError(f"the training takes longer than {TRAIN_SECONDS:.0f} s:\n{processes.log('trainer-0')}")
        await asyncio.sleep(0.2)
        lines = processes.log("trainer-0").splitlines()
        for line in lines[shown:]:
            say(f"  {line}")
        shown = len(lines)
    processes.check()
    return last_line(processes.log("trainer-0"))


async def run(options: Options, stack: ExitStack, folder: Path) -> Result:
    python = torch_python()
    processes = Processes(folder)
    stack.callback(processes.close)
    pods = [*(f"{JOB}-worker-{rank}" for rank in range(options.workers)), f"{JOB}-ps-0"]
    short = [*(f"w{rank}" for rank in range(options.workers)), "ps"]
    network.enter_own_namespace()
    everyone = stack.enter_context(network.hosts(short))
    hosts = dict(zip(pods, everyone, strict=True))

    say(f"{options.switch} with {len(everyone)} ports, {options.workers} workers and a parameter server")
    if options.switch == "bmv2":
        agent_options, ports = start_bmv2(stack, everyone)
    else:
        agent_options, ports = start_software(processes, everyone)
    port_file = folder / "ports.json"
    table = {host.address: {"port": ports[host.name], "mac": host.mac} for host in everyone}
    port_file.write_text(json.dumps({"ports": sorted(ports.values()), "addresses": table}))
    command = [sys.executable, "-m", "atp_switch_agent", "serve", "--switch-name", SWITCH, "--listen", AGENT]
    command += ["--insecure-loopback", "--health-listen", "127.0.0.1:9562", "--sample-seconds", "1"]
    processes.start("agent", [*command, "--ports", "static", "--port-file", str(port_file), *agent_options])

    await serving(processes, "agent")
    addresses = {pod: host.address for pod, host in hosts.items()}
    spec = {
        "mode": options.mode,
        "valuesPerPacket": 62,
        "aggregators": {"request": options.aggregators or window(options.workers)},
    }
    cluster = Cluster(SWITCH, AGENT, JOB, options.workers, addresses, **spec)
    session = asyncio.create_task(cluster.session.run())
    try:
        try:
            assignments = await cluster.assign(START_SECONDS)
        except TimeoutError as error:
            raise DemoError(f"{error}\n{processes.log('agent')[-3000:]}") from error
        say(f"placed: {cluster.said()}")
        start_sidecars(processes, hosts, folder, assignments)
        workers = [(pod, hosts[pod]) for pod in pods[: options.workers]]
        ours = await train(processes, python, options, workers, folder)
        await asyncio.sleep(6.0)  # one period of telemetry
        counters = cluster.counters()
        results = results_of(everyone[-1])
    finally:
        session.cancel()
    say("the same over gloo, on loopback")
    gloo = train_over_gloo(processes, python, options)
    added, packets = share(counters)
    return Result(
        switch=options.switch,
        workers=options.workers,
        epochs=options.epochs,
        accuracy=ours["accuracy"],
        gloo_accuracy=gloo["accuracy"],
        error_over_bound=ours.get("error_over_bound"),
        summed_share=results["aggregated"] / max(1, sum(results.values())),
        switch_share=added,
        gradient_packets=packets,
        packets_per_second=packets / ours["train_seconds"],
        train_seconds=ours["train_seconds"],
        gloo_train_seconds=gloo["train_seconds"],
        counters={name: value for name, value in counters.items() if value},
        results=results,
        sidecar={name: ours[name] for name in ("mode", "retransmits", "ecn_marks")},
    )


def main(options: Options) -> int:
    """Run it; returns the exit status."""
    lacking = missing(options)
    if lacking is not None:
        print(f"demo-bmv2 cannot run here: {lacking}", file=sys.stderr)
        return 2
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what was started ends with this
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atp-demo-bmv2-")))
        try:
            result = asyncio.run(run(options, stack, folder))
        except (DemoError, RuntimeError, OSError) as error:
            print(f"demo-bmv2 failed: {error}", file=sys.stderr)
            return 1
    options.result.parent.mkdir(parents=True, exist_ok=True)
    options.result.write_text(json.dumps(asdict(result), indent=2) + "\n")
    say(result.table())
    say(f"{time.monotonic() - began:.0f} s; {options.result}")
    return 0


__all__ = ["ENVIRONMENT", "Options", "Result", "main"]
