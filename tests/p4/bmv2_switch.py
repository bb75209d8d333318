# SPDX-License-Identifier: Apache-2.0
"""bmv2 (simple_switch_grpc) as a switch of the conformance vectors: tables over P4Runtime, packets over veth pairs.

It runs in a network namespace of the test, because bmv2 listens on all addresses. Needs root.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
from conformance.switches import PORTS, Aggregator, NetworkNamespace, VethSwitch, address_of, ip_number, mac_of
from conformance.switches import run as run_command
from finsy.proto import p4i, p4r, p4r_grpc
from google.protobuf import text_format

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "p4" / "build"
JSON = BUILD / "atp.bmv2.json"
P4INFO = BUILD / "atp.bmv2.p4info.txtpb"
STARTED_WITHIN_SECONDS = 30.0
Match = dict[str, int | tuple[int, int]]


def find_bmv2() -> str | None:
    """simple_switch_grpc: from ATP_BMV2, or on PATH."""
    return os.environ.get("ATP_BMV2") or shutil.which("simple_switch_grpc")


def reason_not_to_run() -> str | None:
    """What is missing to run bmv2 here, or None."""
    if find_bmv2() is None:
        return "bmv2 is not installed: build p4lang/behavioral-model and set ATP_BMV2 to its simple_switch_grpc"
    if not JSON.exists() or not P4INFO.exists():
        return f"{JSON.relative_to(ROOT)} is missing: make -C p4 bmv2, which needs p4c"
    if os.geteuid() != 0:
        return "a network namespace needs root"
    return None


class Links(NetworkNamespace):
    """One veth pair a port, without a bridge: bmv2 is the bridge."""

    def build(self, mtu: int) -> None:
        for name in ("all", "default"):
            switch = Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6")
            if switch.exists():
                switch.write_text("1")
        run_command("ip", "link", "set", "lo", "up")
        for port in PORTS:
            run_command("ip", "link", "add", f"h-{port}", "mtu", str(mtu), "type", "veth", "peer", "name", f"p-{port}",
                        "mtu", str(mtu), "address", mac_of(port).hex(":"))  # fmt: skip
            run_command("ip", "link", "set", f"h-{port}", "up")
            run_command("ip", "link", "set", f"p-{port}", "up")


class Controller:
    """The little of a P4Runtime client that a test needs: master arbitration, pipeline, entries by name, counters."""

    def __init__(self, target: str, p4info: Path, device_config: bytes) -> None:
        self.info = text_format.Parse(p4info.read_text(encoding="utf-8"), p4i.P4Info())
        self.channel = grpc.insecure_channel(target)
        self.stub = p4r_grpc.P4RuntimeStub(self.channel)
        self.requests: Queue[Any] = Queue()
        hello = p4r.StreamMessageRequest()
        hello.arbitration.device_id = 1
        hello.arbitration.election_id.low = 1
        self.requests.put(hello)
        self.replies = self.stub.StreamChannel(self.outgoing(), wait_for_ready=True)
        first: Any = next(iter(self.replies))
        if first.arbitration.status.code != 0:
            raise RuntimeError("bmv2 has another master")
        request = p4r.SetForwardingPipelineConfigRequest(
            device_id=1, action=p4r.SetForwardingPipelineConfigRequest.VERIFY_AND_COMMIT
        )
        request.election_id.low = 1
        request.config.p4info.CopyFrom(self.info)
        request.config.p4_device_config = device_config
        self.stub.SetForwardingPipelineConfig(request)

    def outgoing(self) -> Iterator[Any]:
        while (request := self.requests.get()) is not None:
            yield request

    def close(self) -> None:
        self.requests.put(None)
        self.channel.close()

    def find(self, objects: Any, alias: str) -> Any:
        return next(item for item in objects if item.preamble.alias == alias)

    def write(self, update_type: int, fill: Callable[[Any], None]) -> None:
        request = p4r.WriteRequest(device_id=1)
        request.election_id.low = 1
        update = request.updates.add(type=update_type)
        fill(update.entity)
        self.stub.Write(request)

    def entry(
        self,
        table: str,
        match: dict[str, int | tuple[int, int]],
        action: str,
        params: Sequence[int] = (),
        *,
        delete: bool = False,
    ) -> None:
        """Insert or delete an entry; a pair is a range."""
        t = self.find(self.info.tables, table)

        def fill(entity: Any) -> None:
            entry = entity.table_entry
            entry.table_id = t.preamble.id
            for f in t.match_fields:
                value = match[f.name]
                width = (f.bitwidth + 7) // 8
                m = entry.match.add(field_id=f.id)
                if isinstance(value, tuple):
                    m.range.low, m.range.high = (v.to_bytes(width, "big") for v in value)
                    entry.priority = 1
                else:
                    m.exact.value = value.to_bytes(width, "big")
            if delete:
                return
            a = self.find(self.info.actions, action)
            entry.action.action.action_id = a.preamble.id
            for p, value in zip(a.params, params, strict=True):
                entry.action.action.params.add(param_id=p.id, value=value.to_bytes((p.bitwidth + 7) // 8, "big"))

        self.write(p4r.Update.DELETE if delete else p4r.Update.INSERT, fill)

    def group(self, number: int, ports: Sequence[int]) -> None:
        """A multicast group; the instance of a replica is its place, from 1."""

        def fill(entity: Any) -> None:
            group = entity.packet_replication_engine_entry.multicast_group_entry
            group.multicast_group_id = number
            for instance, port in enumerate(ports, 1):
                group.replicas.add(egress_port=port, instance=instance)

        self.write(p4r.Update.INSERT, fill)

    def counters(self, index: int) -> dict[str, int]:
        """All counters at this index that are not 0."""
        request = p4r.ReadRequest(device_id=1)
        names = {c.preamble.id: c for c in self.info.counters}
        for counter_id in names:
            request.entities.add().counter_entry.counter_id = counter_id
            request.entities[-1].counter_entry.index.index = index
        found: dict[str, int] = {}
        for reply in self.stub.Read(request):
            for entity in reply.entities:
                counter = names[entity.counter_entry.counter_id]
                data = entity.counter_entry.data
                value = data.byte_count if counter.spec.unit == p4i.CounterSpec.BYTES else data.packet_count
                if value:
                    found[counter.preamble.alias] = value
        return found


class Bmv2Switch(VethSwitch):
    """One bmv2 for each vector; its clock is real."""

    name = "bmv2"
    routes_unknown = True
    max_values = 62

    def __init__(self, aggregators: int, values: int, stale_ns: int) -> None:
        del aggregators, values, stale_ns  # the program's
        self.sockets: dict[str, socket.socket] = {}
        self.groups: dict[int, list[str]] = {}
        self.jobs: dict[int, list[tuple[int, int]]] = {}
        self.start_ns: int | None = None
        self.network = Links(1500)
        self.directory = Path(tempfile.mkdtemp(prefix="atp-bmv2-"))
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        address = f"unix:{self.directory}/grpc"
        command = [find_bmv2() or "simple_switch_grpc", "--no-p4", "--device-id", "1"]
        for number, port in enumerate(PORTS, 1):
            command += ["-i", f"{number}@h-{port}"]
        command += ["--log-file", str(self.directory / "log"), "--", "--grpc-server-addr", address]
        with (self.directory / "output").open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + STARTED_WITHIN_SECONDS
        while not (self.directory / "grpc").exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.directory / "output").read_text(errors="replace"))
            time.sleep(0.05)
        self.controller = Controller(address, P4INFO, JSON.read_bytes())
        for port in PORTS:
            self.controller.entry(
                "l2_forward", {"dst_mac": int.from_bytes(mac_of(port), "big")}, "forward", [self.port_number(port)]
            )
            s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
            s.bind((f"p-{port}", 0x0800))
            s.setblocking(False)
            self.sockets[port] = s

    def close(self) -> None:
        for s in self.sockets.values():
            s.close()
        if hasattr(self, "controller"):
            self.controller.close()
        if hasattr(self, "process"):
            self.process.terminate()
            self.process.wait(10)
        self.network.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def port_number(self, port: str) -> int:
        return PORTS.index(port) + 1

    def set_clock(self, now_ns: int) -> None:
        """Wait until as much time has gone by."""
        if self.start_ns is None:
            self.start_ns, self.started = now_ns, time.monotonic_ns()
        time.sleep(max(0, now_ns - self.start_ns - (time.monotonic_ns() - self.started)) / 1e9)

    def set_job(
        self, job: int, values: int, full0: int, full1: int, group: int, regions: Sequence[tuple[int, int]]
    ) -> None:
        for start, size in regions:
            self.controller.entry("region", {"job_id": job, "aggregator_index": (start, start + size - 1)}, "in_region")
        self.controller.entry("job", {"job_id": job}, "set_job", [values, full0, full1, group])

    def admit(self, job: int, port: str, edge: int, bit: int) -> None:
        self.admission(job, port, edge, bit, delete=False)

    def revoke(self, job: int, port: str, edge: int, bit: int) -> None:
        self.admission(job, port, edge, bit, delete=True)

    def admission(self, job: int, port: str, edge: int, bit: int, *, delete: bool) -> None:
        match = {"job_id": job, "ingress_port": self.port_number(port), "edge": edge, "bitmap": bit}
        self.controller.entry("admission", {**match}, "admit", delete=delete)

    def transit(self, job: int, port: str, rack: int, mask0: int) -> None:
        match = {"job_id": job, "ingress_port": self.port_number(port), "bitmap1": rack}
        self.controller.entry("transit", {**match}, "allow", [mask0])

    def ps_port(self, job: int, port: str) -> None:
        self.controller.entry("ps_port", {"job_id": job, "ingress_port": self.port_number(port)}, "from_ps")

    def set_group(self, group: int, ports: Sequence[str]) -> None:
        self.controller.group(group, [self.port_number(port) for port in ports])
        for instance, port in enumerate(ports, 1):
            match = {"multicast_group": group, "egress_port": self.port_number(port), "instance": instance}
            mac, ip = int.from_bytes(mac_of(port), "big"), ip_number(address_of(port))
            self.controller.entry("replica", {**match}, "rewrite", [mac, ip, 0])

    def counters(self, job: int) -> dict[str, int]:
        return self.controller.counters(job)

    def occupancy(self, job: int) -> int:
        """From the counters, as the agent does: bmv2's P4Runtime cannot read registers."""
        used = 0
        for j in range(256) if job == 0 else [job]:
            c = self.counters(j)
            used += c.get("allocated", 0) - sum(c.get(n, 0) for n in ("released", "resend_partials", "stale_takeovers"))
        return used

    def aggregator(self, index: int) -> Aggregator:
        raise NotImplementedError("bmv2's P4Runtime cannot read registers")
