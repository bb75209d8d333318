# SPDX-License-Identifier: Apache-2.0
"""Interprets the compiled bmv2 program (``p4/build/atp.bmv2.json``): frames in and out, registers and counters.

It knows what that program uses of bmv2's JSON format and refuses anything else. bmv2 itself is the reference; this runs
where bmv2 is not installed, has a clock that a test can set, and shows registers, which bmv2's P4Runtime does not.
"""

from __future__ import annotations

import copy
import json
import socket
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from conformance.switches import (
    PORTS,
    Aggregator,
    Packet,
    address_of,
    frame_of,
    ip_checksum,
    ip_number,
    mac_of,
    payload_of,
)
from hosts import drops_of, pieces_of
from registers import Registers

from atp_switch_agent.entries import HOST_PIECES

PROGRAM = Path(__file__).resolve().parents[2] / "p4" / "build" / "atp.bmv2.json"
DROP_PORT = 511
Key = tuple[str, str]
Expression = Callable[["Phv", Sequence[int]], int]
Step = Callable[["Phv", Sequence[int]], int | None]


class Phv(dict[Key, int]):
    """Fields of one packet by (header, field); ``$valid$`` is a field."""


class Program:
    """A bmv2 JSON program: parser, two pipelines, deparser, one checksum."""

    def __init__(self, path: Path) -> None:
        data = json.loads(path.read_text(encoding="utf-8"))
        types = {t["name"]: t for t in data["header_types"]}
        self.fields = {h["name"]: [(f[0], f[1]) for f in types[h["header_type"]]["fields"]] for h in data["headers"]}
        self.width = {(h, f): w for h, fields in self.fields.items() for f, w in fields}
        self.metadata = [h["name"] for h in data["headers"] if h["metadata"]]
        self.registers: dict[str, dict[int, int]] = {r["name"]: defaultdict(int) for r in data["register_arrays"]}
        self.data = data
        self.register_width = {r["name"]: r["bitwidth"] for r in data["register_arrays"]}
        self.register_size = {r["name"]: r["size"] for r in data["register_arrays"]}
        self.counted: dict[str, dict[int, int]] = {c["name"]: defaultdict(int) for c in data["counter_arrays"]}
        self.states = {s["name"]: s for s in data["parsers"][0]["parse_states"]}
        self.init_state = data["parsers"][0]["init_state"]
        self.order = data["deparsers"][0]["order"]
        self.checksum = data["checksums"][0]
        self.inputs = data["calculations"][0]["input"]
        self.actions = {a["id"]: [self.primitive(p) for p in a["primitives"]] for a in data["actions"]}
        self.names = {a["id"]: a["name"] for a in data["actions"]}
        self.pipelines = {p["name"]: p for p in data["pipelines"]}
        self.nodes: dict[str, Any] = {}
        self.entries: dict[str, list[tuple[list[tuple[int, int]], int, list[int]]]] = {}
        for pipeline in data["pipelines"]:
            for table in pipeline["tables"]:
                self.nodes[table["name"]] = table
            for condition in pipeline["conditionals"]:
                condition["test"] = self.expression(condition["expression"])
                self.nodes[condition["name"]] = condition

    def reset(self) -> None:
        """As after the program was loaded: constant entries only, registers and counters 0."""
        for cells in (*self.registers.values(), *self.counted.values()):
            cells.clear()
        for pipeline in self.data["pipelines"]:
            for table in pipeline["tables"]:
                self.entries[table["name"]] = [self.constant_entry(e) for e in table.get("entries", [])]

    @staticmethod
    def constant_entry(e: dict[str, Any]) -> tuple[list[tuple[int, int]], int, list[int]]:
        key = [(int(k["key"], 16), int(k["mask"], 16) if k["match_type"] == "ternary" else -1) for k in e["match_key"]]
        return key, e["action_entry"]["action_id"], [int(d, 16) for d in e["action_entry"]["action_data"]]

    def expression(self, e: Any) -> Expression:
        """An expression as a function of fields and action data."""
        kind, value = e["type"], e["value"]
        if kind == "field":
            key = value[0], value[1]
            return lambda phv, data: phv.get(key, 0)
        if kind == "hexstr":
            number = int(value, 16)
            return lambda phv, data: number
        if kind == "bool":
            return lambda phv, data: int(value)
        if kind in ("runtime_data", "local"):
            return lambda phv, data: data[value]
        if kind != "expression":
            raise ValueError(f"expression of type {kind}")
        if "op" not in value:
            return self.expression(value)
        op, right = value["op"], self.expression(value["right"])
        if op in ("d2b", "b2d"):
            return (lambda phv, data: int(right(phv, data) != 0)) if op == "d2b" else right
        if op == "~":
            return lambda phv, data: ~right(phv, data)
        if op == "not":
            return lambda phv, data: int(not right(phv, data))
        left = self.expression(value["left"])
        if op == "and":
            return lambda phv, data: int(bool(left(phv, data)) and bool(right(phv, data)))
        if op == "or":
            return lambda phv, data: int(bool(left(phv, data)) or bool(right(phv, data)))
        apply = BINARY[op]
        return lambda phv, data: apply(left(phv, data), right(phv, data))

    def primitive(self, p: dict[str, Any]) -> Step:
        """A primitive as a function; it returns where to jump, or None."""
        op, parameters = p["op"], p["parameters"]
        if op == "assign":
            target = parameters[0]["value"][0], parameters[0]["value"][1]
            mask, value = (1 << self.width[target]) - 1, self.expression(parameters[1])

            def assign(phv: Phv, data: Sequence[int]) -> None:
                phv[target] = value(phv, data) & mask

            return assign
        if op == "register_read":
            target = parameters[0]["value"][0], parameters[0]["value"][1]
            name, index = parameters[1]["value"], self.expression(parameters[2])

            def read(phv: Phv, data: Sequence[int]) -> None:
                phv[target] = self.registers[name][self.checked(name, index(phv, data))]

            return read
        if op == "register_write":
            name, index, value = parameters[0]["value"], self.expression(parameters[1]), self.expression(parameters[2])
            mask = (1 << self.register_width[name]) - 1

            def write(phv: Phv, data: Sequence[int]) -> None:
                self.registers[name][self.checked(name, index(phv, data))] = value(phv, data) & mask

            return write
        if op == "count":
            name, index = parameters[0]["value"], self.expression(parameters[1])

            def count(phv: Phv, data: Sequence[int]) -> None:
                self.counted[name][index(phv, data)] += 1

            return count
        if op == "mark_to_drop":

            def drop(phv: Phv, data: Sequence[int]) -> None:
                phv["standard_metadata", "egress_spec"] = DROP_PORT
                phv["standard_metadata", "mcast_grp"] = 0

            return drop
        if op == "_jump":
            to = int(parameters[0]["value"], 16)
            return lambda phv, data: to
        if op == "_jump_if_zero":
            test, to = self.expression(parameters[0]), int(parameters[1]["value"], 16)
            return lambda phv, data: to if test(phv, data) == 0 else None
        raise ValueError(f"primitive {op}")

    def checked(self, name: str, index: int) -> int:
        if index >= self.register_size[name]:
            raise IndexError(f"{name}[{index}]")
        return index

    def run(self, action: int, data: Sequence[int], phv: Phv) -> None:
        steps, at = self.actions[action], 0
        # Jumps count primitives over the whole program's action: they are relative to its first one.
        while at < len(steps):
            to = steps[at](phv, data)
            at = at + 1 if to is None else to

    def parse(self, frame: bytes, phv: Phv) -> bytes:
        """Fill ``phv``; return what is left of the frame."""
        at, name = 0, self.init_state
        while name is not None:
            state = self.states[name]
            for op in state["parser_ops"]:
                if op["op"] == "extract":
                    header = op["parameters"][0]["value"]
                    size = sum(w for _, w in self.fields[header] if _ != "$valid$") // 8
                    if at + size > len(frame):
                        return frame[at:]
                    self.unpack(header, frame[at : at + size], phv)
                    at += size
                elif op["op"] == "set":
                    target, source = op["parameters"][0]["value"], op["parameters"][1]
                    if source["type"] == "lookahead":
                        first, bits = source["value"]
                        if 8 * (len(frame) - at) < first + bits:
                            return frame[at:]
                        number = int.from_bytes(frame[at : at + (first + bits + 7) // 8], "big")
                        phv[target[0], target[1]] = number >> -(first + bits) % 8 & (1 << bits) - 1
                    else:
                        phv[target[0], target[1]] = self.expression(source)(phv, ())
                else:
                    raise ValueError(f"parser op {op['op']}")
            value = 0
            for part in state["transition_key"]:
                key = part["value"][0], part["value"][1]
                # Fields are padded to whole bytes each; all of ours are.
                value = value << self.width[key] | phv[key]
            name = next(t["next_state"] for t in state["transitions"] if self.takes(t, value))
        return frame[at:]

    @staticmethod
    def takes(t: dict[str, Any], value: int) -> bool:
        if t["type"] == "default":
            return True
        mask = int(t["mask"], 16) if t["mask"] else -1
        return (value ^ int(t["value"], 16)) & mask == 0

    def unpack(self, header: str, data: bytes, phv: Phv) -> None:
        bits, left = int.from_bytes(data, "big"), 8 * len(data)
        for name, width in self.fields[header]:
            if name != "$valid$":
                left -= width
                phv[header, name] = bits >> left & (1 << width) - 1
        phv[header, "$valid$"] = 1

    def pack(self, header: str, phv: Phv) -> bytes:
        bits = size = 0
        for name, width in self.fields[header]:
            if name != "$valid$":
                bits, size = bits << width | phv[header, name], size + width
        return bits.to_bytes(size // 8, "big")

    def pipeline(self, name: str, phv: Phv) -> None:
        at = self.pipelines[name]["init_table"]
        while at is not None:
            node = self.nodes[at]
            if "test" in node:
                at = node["true_next"] if node["test"](phv, ()) else node["false_next"]
                continue
            found = self.match(node, phv)
            default = node["default_entry"]
            action, data = found or (default["action_id"], [int(d, 16) for d in default["action_data"]])
            self.run(action, data, phv)
            following = node["next_tables"]
            if "__HIT__" in following:
                at = following["__HIT__" if found else "__MISS__"]
            else:
                at = following[self.names[action]]

    def match(self, table: dict[str, Any], phv: Phv) -> tuple[int, list[int]] | None:
        key = [phv.get((k["target"][0], k["target"][1]), 0) for k in table["key"]]
        if not key:
            return None
        for fields, action, data in self.entries[table["name"]]:
            if all(
                (k ^ v) & m == 0 if m < 0 or (m >= 0 and v & ~m == 0) else False
                for k, (v, m) in zip(key, fields, strict=True)
            ):
                return action, data
        return None

    def deparse(self, phv: Phv, rest: bytes) -> bytes:
        if self.expression(self.checksum["if_cond"])(phv, ()):
            header = self.pack("ipv4", Phv({**phv, ("ipv4", "checksum"): 0}))
            phv["ipv4", "checksum"] = ip_checksum(header)
        return b"".join(self.pack(h, phv) for h in self.order if phv.get((h, "$valid$"))) + rest


@cache
def the_program() -> Program:
    """The committed program; one for all tests, since it takes a while to read."""
    return Program(PROGRAM)


def shift_left(a: int, b: int) -> int:
    return a << b


BINARY: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "<<": shift_left,
    ">>": lambda a, b: a >> b,
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    ">": lambda a, b: int(a > b),
    "<=": lambda a, b: int(a <= b),
}


class JsonSwitch:
    """The compiled program as a switch of the conformance vectors."""

    name = "bmv2-json"
    routes_unknown = True
    max_values = 62

    def __init__(self) -> None:
        self.program = the_program()
        self.program.reset()
        self.groups: dict[int, list[str]] = {}
        self.now_us = 0
        self.registers = Registers(self.register)
        for port in PORTS:
            self.insert(
                "AtpIngress.l2_forward", [int.from_bytes(mac_of(port), "big")], "AtpIngress.forward", [self.port(port)]
            )

    def port(self, port: str) -> int:
        return PORTS.index(port) + 1

    def close(self) -> None:
        pass

    def insert(self, table: str, key: Sequence[int], action: str, data: Sequence[int]) -> None:
        known = self.program.nodes[table]["actions"]
        if action not in known:
            raise ValueError(f"{table} has no action {action}")
        action_id = self.program.nodes[table]["action_ids"][known.index(action)]
        self.program.entries[table].append(([(k, -1) for k in key], action_id, list(data)))

    def set_clock(self, now_ns: int) -> None:
        self.now_us = now_ns // 1000

    def set_job(
        self, job: int, values: int, full0: int, full1: int, group: int, regions: Sequence[tuple[int, int]]
    ) -> None:
        self.forget(job, "job", "region")
        for start, size in regions:
            for index in range(start, start + size) if size < 256 else []:
                self.insert("AtpIngress.region", [job, index], "AtpIngress.in_region", [])
        self.insert("AtpIngress.job", [job], "AtpIngress.set_job", [values, full0, full1, group])

    def delete_job(self, job: int) -> None:
        self.forget(job, "admission", "transit", "ps_port", "job", "region")

    def forget(self, job: int, *tables: str) -> None:
        """Delete what tables hold of a job, whose ID is the first field of their keys."""
        for table in tables:
            entries = self.program.entries[f"AtpIngress.{table}"]
            entries[:] = [entry for entry in entries if entry[0][0] != (job, -1)]

    def admit(self, job: int, port: str, edge: int, bit: int) -> None:
        self.insert("AtpIngress.admission", [job, self.port(port), edge, bit], "AtpIngress.admit", [])

    def revoke(self, job: int, port: str, edge: int, bit: int) -> None:
        key = [(k, -1) for k in (job, self.port(port), edge, bit)]
        entries = self.program.entries["AtpIngress.admission"]
        entries.remove(next(e for e in entries if e[0] == key))

    def transit(self, job: int, port: str, rack: int, mask0: int) -> None:
        self.insert("AtpIngress.transit", [job, self.port(port), rack], "AtpIngress.allow", [mask0])

    def ps_port(self, job: int, port: str) -> None:
        self.insert("AtpIngress.ps_port", [job, self.port(port)], "AtpIngress.from_ps", [])

    def set_host(
        self, job: int, host: str, port: str, role: str, bitmap0: int = 0, bitmap1: int = 0, edge: int = 0
    ) -> None:
        for table, key, action, params in pieces_of(job, host, self.port(port), role, bitmap0, bitmap1, edge):
            self.insert(f"AtpIngress.{table}", key, f"AtpIngress.{action}", list(params.values()))

    def delete_host(self, job: int, host: str) -> None:
        for table in HOST_PIECES:
            entries = self.program.entries[f"AtpIngress.{table}"]
            entries[:] = [entry for entry in entries if entry[0][0] != (ip_number(address_of(host)), -1)]

    def drops(self) -> dict[str, dict[str, int]]:
        return drops_of(self.program.counted["AtpIngress.drops"], {self.port(port): port for port in PORTS})

    def set_group(self, group: int, ports: Sequence[str]) -> None:
        self.groups[group] = list(ports)
        for instance, port in enumerate(ports, 1):
            data = [int.from_bytes(mac_of(port), "big"), ip_number(address_of(port)), 0]
            self.insert("AtpEgress.replica", [group, self.port(port), instance], "AtpEgress.rewrite", data)

    def counters(self, job: int) -> dict[str, int]:
        counted = {name.rpartition(".")[2]: cells for name, cells in self.program.counted.items()}
        return {name: cells[job] for name, cells in counted.items() if name != "drops" and cells.get(job)}

    def register(self, name: str, index: int) -> int:
        return self.program.registers[f"AtpIngress.{name}"].get(index, 0)

    def aggregator(self, index: int) -> Aggregator:
        return self.registers.aggregator(index)

    def occupancy(self, job: int) -> int:
        """From the counters, as the agent computes it."""
        used = 0
        for j in range(256) if job == 0 else [job]:
            c = self.counters(j)
            used += c.get("allocated", 0) - sum(c.get(n, 0) for n in ("released", "resend_partials", "stale_takeovers"))
        return used

    def exchange(self, port: str, frame: bytes) -> list[tuple[str, bytes]]:
        """One frame through the switch; what leaves it, with the port."""
        phv = Phv()
        standard = "standard_metadata"
        phv[standard, "ingress_port"] = self.port(port)
        phv[standard, "ingress_global_timestamp"] = self.now_us
        rest = self.program.parse(frame, phv)
        self.program.pipeline("ingress", phv)
        group = phv.get((standard, "mcast_grp"), 0)
        if group:
            copies = [(self.port(p), instance) for instance, p in enumerate(self.groups[group], 1)]
        elif phv.get((standard, "egress_spec"), 0) == DROP_PORT:
            copies = []
        else:
            copies = [(phv.get((standard, "egress_spec"), 0), 0)]
        out = []
        for egress, instance in copies:
            one = copy.copy(phv)
            one[standard, "egress_port"], one[standard, "egress_rid"] = egress, instance
            self.program.pipeline("egress", one)
            out.append((PORTS[egress - 1], self.program.deparse(one, rest)))
        return sorted(out, key=lambda item: PORTS.index(item[0]))

    def send(self, packet: Packet, dst: str, expected: int) -> list[Packet]:
        del expected
        frames = self.exchange(packet.port, frame_of(packet.payload(), packet.src or packet.port, dst, packet.ce))
        self.registers.came_by(packet.header)
        for port, frame in frames:
            assert frame[:6] == mac_of(port), "destination MAC"
            assert socket.inet_ntoa(frame[30:34]) == address_of(port), "destination IP"
            assert ip_checksum(frame[14:34]) == 0, "IP checksum"
            assert frame[40:42] == b"\0\0", "UDP checksum"
        return [Packet.parse(port, payload_of(frame)) for port, frame in frames]
