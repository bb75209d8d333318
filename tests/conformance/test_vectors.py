# SPDX-License-Identifier: Apache-2.0
"""Run the conformance vectors (``vectors/README.md``) on every switch of this project that runs here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conformance.switches import PORTS, SWITCHES, Packet, Switch

from atp_api.wire import Header

VECTORS = Path(__file__).parent / "vectors"
STALE_NS = 100_000_000
START_MS = 1000
FIELDS = {
    "job": "job_id",
    "seq": "sequence",
    "b0": "bitmap0",
    "b1": "bitmap1",
    "n0": "fan_in_degree0",
    "n1": "fan_in_degree1",
    "edge": "edge_switch_identifier",
    "resend": "resend",
    "collision": "collision",
    "ecn": "ecn",
    "ack": "is_ack",
    "raw": "raw_float",
    "index": "aggregator_index",
}
OTHER_FIELDS = {"port", "to", "values", "fill", "ce", "src", "dst", "length"}
STEP_KEYS = {
    "in",
    "out",
    "copies",
    "do",
    "at_ms",
    "aggregators",
    "counters",
    "drops",
    "occupancy",
    "unrouted",
    "each_bit",
    "count",
}
DEFAULTS: dict[str, Any] = {"job": 1, "seq": 0, "b0": 1, "b1": 1, "n0": 1, "n1": 1}
Fields = dict[str, Any]


def load() -> Iterator[tuple[str, Fields, Fields]]:
    for path in sorted(VECTORS.glob("*.yaml")):
        document = yaml.safe_load(path.read_text())
        for vector in document["vectors"]:
            yield f"{path.stem}: {vector['name']}", document["setups"][vector["setup"]], vector


ALL = [vector for vector in load() if "hosts" not in vector[1]]
GUARDED = [vector for vector in load() if "hosts" in vector[1]]
"""Vectors of the guard, for switches that see addresses: the BPF programs and the P4 programs."""
OF_P4 = [vector for vector in [*ALL, *GUARDED] if "p4" not in vector[2]]
"""Those that P4 programs run; `p4` in a vector says why it is not one."""


def values_of(fields: Fields, count: int) -> tuple[int, ...]:
    if "fill" in fields:
        return (int(fields["fill"]),) * count
    values = [int(v) for v in fields.get("values", [])]
    return tuple(values + [0] * (count - len(values)))


def packet_of(fields: Fields, count: int) -> Packet:
    """The packet that these fields describe; ``count`` is the job's number of values."""
    unknown = set(fields) - set(FIELDS) - OTHER_FIELDS
    assert not unknown, f"unknown fields {unknown}"
    header = Header(**{FIELDS[name]: int(value) for name, value in fields.items() if name in FIELDS})
    packet = Packet(
        fields["port"], header, values_of(fields, count), bool(fields.get("ce", False)), src=fields.get("src")
    )
    if "length" in fields:
        length = int(fields["length"])
        payload = packet.payload()
        cut = (payload + bytes(max(0, length - len(payload))))[:length]
        return Packet(packet.port, header, (), packet.ce, cut, packet.src)
    return packet


def merge(fields: Fields, changes: Fields) -> Fields:
    """``values`` and ``fill`` say the same thing: the later one counts."""
    if "values" in changes or "fill" in changes:
        fields = {k: v for k, v in fields.items() if k not in ("values", "fill")}
    return {**fields, **changes}


def prepare(switch: Switch, setup: Fields) -> None:
    for group, ports in setup["groups"].items():
        switch.set_group(group, ports)
    for job, config in setup["jobs"].items():
        switch.set_job(job, **config)
    for job, port, edge, bit in setup.get("admission", []):
        switch.admit(job, port, edge, bit)
    if "admission_all" in setup:
        job, port, edge = setup["admission_all"]
        for i in range(32):
            switch.admit(job, port, edge, 1 << i)
    for job, port, rack, mask0 in setup.get("transit", []):
        switch.transit(job, port, rack, mask0)
    for job, port in setup["ps"]:
        switch.ps_port(job, port)
    for job, host, *place in setup.get("hosts", []):
        switch.set_host(job, host, *place)
    for port, rate, threshold in setup.get("rates", []):
        switch.set_port_rate(port, rate, threshold)


def control(switch: Switch, operations: Fields) -> None:
    for name, argument in operations.items():
        if name == "delete_job":
            switch.delete_job(argument)
        elif name == "set_job":
            switch.set_job(argument[0], **argument[1])
        elif name == "sweep":
            assert switch.sweep() == argument
        elif name == "revoke":
            switch.revoke(*argument)
        elif name == "delete_host":
            switch.delete_host(*argument)
        elif name == "port_rate":
            switch.set_port_rate(*argument)
        else:
            raise AssertionError(f"unknown operation {name}")


class Run:
    """One vector on one switch."""

    def __init__(self, switch: Switch, setup: Fields, vector: Fields) -> None:
        self.switch = switch
        self.setup = setup
        self.vector = vector
        self.shared = merge(DEFAULTS, vector.get("packet", {}))
        self.known = set(setup["jobs"])
        self.no_route = 0
        """Packets that only the relay has to drop, see Switch.routes_unknown."""

    def steps(self) -> Iterator[None]:
        """Run the vector, and stop after each step. An AssertionError names the step."""
        for number, step in enumerate(self.vector["steps"]):
            try:
                self.step(step)
            except AssertionError as error:
                raise AssertionError(f"step {number}: {error}") from error
            yield

    def run(self) -> None:
        """Run the whole vector."""
        for _ in self.steps():
            pass

    def count_of(self, job: int) -> int:
        jobs = self.setup["jobs"]
        return int(jobs[job]["values"] if job in jobs else self.setup["values"])

    def step(self, step: Fields) -> None:
        assert set(step) <= STEP_KEYS, f"unknown keys {set(step) - STEP_KEYS}"
        if "at_ms" in step:
            self.switch.set_clock(step["at_ms"] * 1_000_000)
        if "do" in step:
            control(self.switch, step["do"])
            self.known.discard(step["do"].get("delete_job"))
        if "each_bit" in step:
            for i in range(step["count"]):
                self.packet(merge(self.shared, {**step["each_bit"], "b0": 1 << i}), [], False)
        if "in" in step:
            fields = merge(self.shared, step["in"])
            out = [{"to": port} for port in step["copies"]] if "copies" in step else step["out"]
            self.packet(fields, out, step.get("unrouted", False))
        self.check_state(step)

    def packet(self, fields: Fields, out: list[Fields], unrouted: bool) -> None:
        count = self.count_of(fields["job"])
        if unrouted and not self.switch.routes_unknown and not self.goes_to_ps(fields):
            out = []
            self.no_route += 1
        wanted = []
        for changes in out:
            after = merge(fields, {k: v for k, v in changes.items() if k != "to"})
            after["port"] = changes["to"]
            after.pop("ce", None)
            wanted.append(Packet.parse(after["port"], packet_of(after, count).payload()))
        wanted.sort(key=lambda p: PORTS.index(p.port))
        got = self.switch.send(packet_of(fields, count), fields.get("dst", "ps"), len(wanted))
        assert got == wanted

    def goes_to_ps(self, fields: Fields) -> bool:
        """A relay knows the way to the PS of a job it knows, and only that."""
        return fields["job"] in self.known and fields.get("ack", 0) == 0

    def check_state(self, step: Fields) -> None:
        for index, wanted in step.get("aggregators", {}).items():
            state = self.switch.aggregator(index)
            if wanted == "free":
                assert state.job == 0, f"aggregator {index} is not free"
                continue
            count = self.count_of(wanted["job"])
            got = {
                "job": state.job,
                "seq": state.sequence,
                "level": state.level,
                "bitmap": state.bitmap,
                "complete": state.complete,
                "ecn": state.ecn,
            }
            assert got == {k: wanted[k] for k in got}, f"aggregator {index}"
            assert state.values[:count] == values_of(wanted, count)
            if "at_ms" in wanted:
                assert state.timestamp_ns == wanted["at_ms"] * 1_000_000
        for job, counters in step.get("counters", {}).items():
            got = {k: v for k, v in self.switch.counters(job).items() if not k.startswith("bytes")}
            if job == 0 and self.no_route:
                counters = {**counters, "dropped_no_route": self.no_route}
            assert got == counters, f"counters of job {job}"
        if "drops" in step:
            assert self.switch.drops() == step["drops"]
        for job, used in step.get("occupancy", {}).items():
            assert self.switch.occupancy(job) == used


@pytest.mark.parametrize(
    "kind", [pytest.param(k, id=k.name, marks=pytest.mark.root if k.name in ("tc", "xdp") else ()) for k in SWITCHES]
)
@pytest.mark.parametrize(("setup", "vector"), [pytest.param(s, v, id=n) for n, s, v in ALL])
def test_vector(kind: type[Switch], setup: Fields, vector: Fields) -> None:
    if setup["values"] > kind.max_values:
        pytest.skip("a frame of the jumbo profile does not fit one page, which XDP needs")
    if "relay" in vector and kind.name == "relay":
        pytest.skip("a relay admits raw packets by source and bit: test_the_relay_program, test_end_to_end")
    switch = kind(setup["aggregators"], setup["values"], STALE_NS)
    try:
        switch.set_clock(START_MS * 1_000_000)
        prepare(switch, setup)
        Run(switch, setup, vector).run()
    finally:
        switch.close()


@pytest.mark.root
@pytest.mark.parametrize("kind", [pytest.param(k, id=k.name) for k in SWITCHES if k.name in ("tc", "xdp")])
@pytest.mark.parametrize(("setup", "vector"), [pytest.param(s, v, id=n) for n, s, v in GUARDED])
def test_guarded(kind: type[Switch], setup: Fields, vector: Fields) -> None:
    test_vector(kind, setup, vector)


def test_every_counter_is_reached() -> None:
    """No counter of a rule without a vector that makes it move."""
    native = SWITCHES[0]
    reached: set[str] = set()
    for _, setup, vector in ALL:
        switch = native(setup["aggregators"], setup["values"], STALE_NS)
        try:
            switch.set_clock(START_MS * 1_000_000)
            prepare(switch, setup)
            run = Run(switch, setup, vector)
            for step in vector["steps"]:
                run.step(step)
            for job in range(256):
                reached |= set(switch.counters(job))
            names = set(switch.names)
        finally:
            switch.close()
    # Superframes exist in tc only, unknown destinations in the relay only (tests/softswitch), a lock that stays taken
    # on no healthy machine.
    assert names - reached == {"passed_gso", "dropped_no_route", "dropped_busy"}
