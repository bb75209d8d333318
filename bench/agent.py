# SPDX-License-Identifier: Apache-2.0
"""The switch agent: time to program jobs, and to find and reprogram a switch that restarted with empty tables.

``python bench/agent.py [--switch software|bmv2] [--jobs 100] [--workers 8]``. Agent and switch are processes of their
own, as they run in production: the operator's gRPC on one side, P4Runtime on the other. The peer is a bare client that
knows the entries already and only writes them, to a switch of the same kind. bmv2 is found as by the tests: P4_BMV2 or
PATH; it needs root, for a network namespace.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
from finsy.proto import p4r, p4r_grpc

from atp_api.switchagent.v1alpha1 import switchagent_pb2 as api
from atp_api.switchagent.v1alpha1 import switchagent_pb2_grpc as api_grpc
from atp_switch_agent.codec import Codec, bmv2_paths, contract_path
from atp_switch_agent.planner import Batch, EndpointKey, Limits, Port, combine, diff, plan_job

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "tests"))
from switch_agent.bmv2 import Bmv2, reason_not_to_run  # noqa: E402

SOFTWARE, BMV2 = "software", "bmv2"
AGGREGATORS = 8192
CHUNK = 500
"""Updates in one Write, as the agent has it."""
LIMIT_SECONDS = 120.0
RELAY = "127.78.0.1"


def desired(jobs: int, workers: int, kind: str, generation: int) -> api.DesiredState:
    """`jobs` jobs with a rack of workers each; on bmv2, worker by worker on the ports 1 to 4, the PS on 5."""
    state = api.DesiredState(switch_name="bench", generation=generation, writer="bench")
    size = AGGREGATORS // jobs

    def endpoint(host: int, port: int) -> api.Endpoint:
        if kind == SOFTWARE:
            return api.Endpoint(address=str(ipaddress.IPv4Address("127.79.0.0") + host))
        return api.Endpoint(
            address=str(ipaddress.IPv4Address("10.79.0.0") + host),
            port=port,
            mac=f"02:00:00:00:{host >> 8:02x}:{host & 255:02x}",
        )

    for number in range(1, jobs + 1):
        job = state.jobs.add(job_id=number, epoch=1, uid=f"uid-{number}", name=f"bench/job-{number}", values=62)
        job.multicast_group = number
        job.regions.add(start=(number - 1) * size, size=size)
        first = number * 64
        for rank in range(workers):
            job.members.add(rank=rank, bit=rank, endpoint=endpoint(first + rank, 1 + rank % 4))
        job.parameter_servers.append(endpoint(first + 63, 5))
    return state


def batches(state: api.DesiredState, kind: str) -> tuple[Batch, ...]:
    """The updates that a desired state takes on an empty switch."""

    def port(key: EndpointKey) -> Port:
        return Port(key.port or int(ipaddress.IPv4Address(key.address)), key.mac or 0)

    limits = Limits() if kind == SOFTWARE else Limits(port_bits=9)
    return diff({}, combine({job.job_id: plan_job(job, port, limits) for job in state.jobs})).batches


@contextmanager
def process(module: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A part of the product, and what it logs once it serves; killed at the end."""
    command = [sys.executable, "-m", module, *arguments]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY)
    serving: queue.Queue[dict[str, Any]] = queue.Queue()

    def read() -> None:
        assert child.stderr is not None
        for text in child.stderr:
            line = json.loads(text) if text.startswith("{") else {"message": text}
            if line["message"] == "serving":
                serving.put(line)
        serving.put({})

    threading.Thread(target=read, daemon=True).start()
    try:
        told = serving.get(timeout=LIMIT_SECONDS)
        if not told:
            raise RuntimeError(f"{module} ended with {child.wait()}")
        yield child, told
    finally:
        child.kill()
        child.wait()


class SoftwareSwitch:
    """The software switch's P4Runtime server with its native data path, on a port that stays the same."""

    def __init__(self, stack: ExitStack) -> None:
        self._outer = stack
        self._port = 0
        self._stack = ExitStack()
        stack.callback(lambda: self._stack.close())

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        arguments = ("serve", "--mode", "relay", "--relay-address", RELAY, "--health-listen", "127.0.0.1:0")
        listen = ("--listen", f"127.0.0.1:{self._port}", "--aggregators", str(AGGREGATORS))
        _, told = self._stack.enter_context(process("atp_softswitch", *arguments, *listen))
        self._port = told["p4runtime_port"]

    def kill(self) -> None:
        self._stack.close()

    @staticmethod
    def options() -> list[str]:
        return ["--ports", "relay"]


def wait_until(check: Callable[[], bool]) -> float:
    """Poll every 2 ms; the time at which it was true. TimeoutError after the limit."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not check():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {LIMIT_SECONDS:.0f} s")
        time.sleep(0.002)
    return time.monotonic()


def write_barely(address: str, codec: Codec, wanted: tuple[Batch, ...]) -> float:
    """Seconds that a client takes to write the updates, which are encoded already, to an empty switch."""
    with grpc.insecure_channel(address) as channel:
        stub = p4r_grpc.P4RuntimeStub(channel)
        election = p4r.Uint128(low=1)
        done = threading.Event()

        def bid() -> Iterator[p4r.StreamMessageRequest]:
            request = p4r.StreamMessageRequest()
            request.arbitration.device_id = 1
            request.arbitration.election_id.CopyFrom(election)
            yield request
            done.wait(LIMIT_SECONDS)

        answers: Any = stub.StreamChannel(bid())
        next(answers)
        push = p4r.SetForwardingPipelineConfigRequest(
            device_id=1,
            election_id=election,
            action=p4r.SetForwardingPipelineConfigRequest.VERIFY_AND_COMMIT,
            config=codec.config(),
        )
        stub.SetForwardingPipelineConfig(push)
        requests = [
            p4r.WriteRequest(
                device_id=1,
                election_id=election,
                updates=[codec.encode(update) for update in batch[start : start + CHUNK]],
            )
            for batch in wanted
            for start in range(0, len(batch), CHUNK)
        ]
        before = time.monotonic()
        for request in requests:
            stub.Write(request)
        took = time.monotonic() - before
        done.set()
        answers.cancel()
        return took


def report(name: str, value: float, unit: str, conditions: str, peer: float | None = None) -> None:
    line = {
        "name": name,
        "value": round(value, 3),
        "unit": unit,
        "peer": round(peer, 3) if peer is not None else None,
        "ratio": round(value / peer, 2) if peer else None,
        "conditions": conditions,
    }
    print(json.dumps(line), flush=True)


def measure(kind: str, jobs: int, workers: int) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        switch: SoftwareSwitch | Bmv2
        if kind == BMV2:
            switch, codec = stack.enter_context(Bmv2(folder)), Codec(*bmv2_paths())
        else:
            switch, codec = SoftwareSwitch(stack), Codec(contract_path())
        first = desired(jobs, workers, kind, 1)
        wanted = batches(first, kind)
        entries = sum(len(batch) for batch in wanted)
        conditions = (
            f"{kind} switch, {jobs} jobs of {workers} workers, {entries} entries and groups, agent and switch on "
            f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        )

        switch.start()
        peer = write_barely(switch.address, codec, wanted)
        switch.kill()

        switch.start()
        arguments = ("serve", "--switch-name", "bench", "--listen", "127.0.0.1:0", "--health-listen", "127.0.0.1:0")
        reach = ("--p4runtime", switch.address, "--insecure-loopback", *switch.options())
        agent, told = stack.enter_context(process("atp_switch_agent", *arguments, *reach))
        stub = api_grpc.SwitchAgentStub(stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{told['grpc_port']}")))

        def observed() -> api.ObservedState:
            return stub.GetObservedState(api.GetObservedStateRequest(), timeout=LIMIT_SECONDS)

        wait_until(lambda: observed().reason == "NoDesiredState")

        def apply(state: api.DesiredState) -> float:
            before = time.monotonic()
            answer = stub.ApplyDesiredState(state, timeout=LIMIT_SECONDS)
            if answer.in_sync and answer.generation == state.generation:
                return time.monotonic() - before
            return wait_until(lambda: observed().in_sync) - before

        took = apply(first)
        report(f"agent_program_{kind}", took, "s", f"{conditions}; peer: a bare client that only writes", peer)
        report(f"agent_entries_per_second_{kind}", entries / took, "1/s", conditions, entries / peer)

        again = desired(jobs, workers, kind, 2)
        again.jobs[0].epoch = 2
        took = apply(again)
        report(f"agent_program_one_more_{kind}", took, "s", f"{conditions}; one of them in a new epoch")

        killed = time.monotonic()
        switch.kill()
        wait_until(lambda: observed().reason == "SwitchUnreachable")
        switch.start()
        back = time.monotonic()
        wait_until(lambda: observed().connected)
        found = time.monotonic()
        done = wait_until(lambda: observed().in_sync)
        whole = f"{conditions}; from the kill of the switch, which was back after {back - killed:.2f} s"
        report(f"agent_restart_{kind}", done - killed, "s", whole)
        report(f"agent_restart_found_{kind}", found - back, "s", "from the switch serving again to the agent primary")
        report(f"agent_restart_reprogrammed_{kind}", done - found, "s", "from there to all entries programmed again")
        agent.send_signal(signal.SIGTERM)
        agent.wait(15)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--switch", choices=(SOFTWARE, BMV2), default=SOFTWARE)
    parser.add_argument("--jobs", type=int, default=100, help="1..255")
    parser.add_argument("--workers", type=int, default=8, help="of each job, 1..32")
    options = parser.parse_args()
    if not 1 <= options.jobs <= 255 or not 1 <= options.workers <= 32:
        parser.error("--jobs must be 1..255 and --workers 1..32: job IDs and bits of a bitmap")
    if options.switch == BMV2 and (reason := reason_not_to_run()) is not None:
        print(reason, file=sys.stderr)
        return 1
    measure(options.switch, options.jobs, options.workers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
