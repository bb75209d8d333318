# SPDX-License-Identifier: Apache-2.0
"""The tables with constant entries of a P4 program, read from its source, and a switch that decides by them.

The decisions of the P4 programs are tables (``p4/include``), the same for Tofino and bmv2. ``TableSwitch`` runs them
without a P4 compiler: what it takes from the source are the entries and the actions' constants, what it does itself are
the registers, in the order of the stages and, as Tofino, in two passes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from conformance.switches import PORTS, Aggregator, Packet

from atp_api.wire import HEADER_BYTES, VALUES_BASE, Header
from atp_switch_agent.targets import DROP_REASONS

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "p4" / "include"
INT32_MAX = 2**31 - 1
INT32_MIN = -(2**31)
LEVEL_BIT = 0x800000
ANY = (0, 0)
INCLUDED = ("guard.p4", "gate.p4", "state.p4", "decide.p4", "emit.p4")
"""Where tables with constant entries are."""


@dataclass(frozen=True)
class Table:
    """Constant entries: one (value, mask) a key field, then action and arguments; the first match counts."""

    keys: tuple[str, ...]
    entries: tuple[tuple[tuple[tuple[int, int], ...], str, tuple[int, ...]], ...]
    default: tuple[str, tuple[int, ...]]

    def apply(self, *key: int) -> tuple[str, tuple[int, ...]]:
        """Action and arguments for a key. ValueError if the number of fields differs."""
        if len(key) != len(self.keys):
            raise ValueError(f"{len(key)} fields for {self.keys}")
        for fields, action, arguments in self.entries:
            if all((k ^ value) & mask == 0 for k, (value, mask) in zip(key, fields, strict=True)):
                return action, arguments
        return self.default


def preprocess(*names: str) -> tuple[str, dict[str, int]]:
    """Expanded text of include files, and the values of their macros."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("no C preprocessor: install gcc")
    text = "".join(f'#include "{name}"\n' for name in ("headers.p4", *names))
    command = [compiler, "-E", "-P", "-x", "c", "-undef", "-nostdinc", "-I", str(INCLUDE), "-"]
    expanded = subprocess.run(command, input=text, check=True, capture_output=True, text=True).stdout
    command.insert(1, "-dM")
    macros = subprocess.run(command, input=text, check=True, capture_output=True, text=True).stdout
    numbers = {
        name: int(value, 0) for name, value in re.findall(r"^#define (\w+) (0x[0-9A-Fa-f]+|\d+)$", macros, re.MULTILINE)
    }
    return expanded, numbers


def split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")] if text.strip() else []


def number(text: str) -> int:
    return int(text == "true") if text in ("true", "false") else int(text, 0)


def pattern(text: str) -> tuple[int, int]:
    if text == "_":
        return ANY
    value, _, mask = text.partition("&&&")
    return number(value.strip()), int(mask.strip(), 0) if mask else -1


def read_tables(expanded: str) -> dict[str, Table]:
    """Tables with constant entries, by name."""
    tables: dict[str, Table] = {}
    for name, body in re.findall(r"\btable (\w+) \{(.*?)\n    \}", expanded, re.DOTALL):
        key_text = re.search(r"key = \{(.*?)\}", body, re.DOTALL)
        found = re.search(r"const entries = \{(.*)\}", body, re.DOTALL)
        if found is None or key_text is None:
            continue
        keys = tuple(re.findall(r"([\w.()]+)\s*:\s*(?:ternary|exact)", key_text[1]))
        entries = []
        for fields, action, arguments in re.findall(r"\(([^()]*)\)\s*:\s*(\w+)\(([^()]*)\);", found[1]):
            row = tuple(pattern(f) for f in split(fields))
            if len(row) != len(keys):
                raise ValueError(f"table {name}: {len(row)} fields in an entry, {len(keys)} keys")
            entries.append((row, action, tuple(number(a) for a in split(arguments))))
        if len(entries) != found[1].count(";"):
            raise ValueError(f"table {name}: an entry was not understood")
        default = re.search(r"default_action = (\w+)\(([^()]*)\)", body)
        if default is None:
            raise ValueError(f"table {name} has no default action")
        tables[name] = Table(keys, tuple(entries), (default[1], tuple(number(a) for a in split(default[2]))))
    return tables


@dataclass
class Job:
    values: int
    full0: int
    full1: int
    group: int
    regions: list[tuple[int, int]]


@dataclass(frozen=True)
class Host:
    """Table `host` of the contract; P4 programs have it in pieces (``p4/include/guard.p4``)."""

    job: int
    port: str
    server: bool
    bitmap0: int = 0
    bitmap1: int = 0
    edge: int = 0


@dataclass
class State:
    """One aggregator: a word of each register."""

    key: int = 0
    stamp_ns: int = 0
    missing: int = 0
    present: int = 0
    cover: int = 0
    mark: int = 0
    values: list[int] = field(default_factory=lambda: [0] * VALUES_BASE)


def sticky_add(a: int, b: int) -> int:
    if INT32_MAX in (a, b):
        return INT32_MAX
    if INT32_MIN in (a, b):
        return INT32_MIN
    return max(INT32_MIN, min(INT32_MAX, a + b))


def plain_add(a: int, b: int) -> int:
    """Tofino's saturating add: not sticky."""
    return max(INT32_MIN, min(INT32_MAX, a + b))


@dataclass
class Meta:
    """What the stages of one pass hand on."""

    kind: int = 0
    key: int = 0
    level_bit: int = 0
    bit: int = 0
    needed: int = 0
    ecn: int = 0
    mark: int = 0
    key_result: int = 0
    missing_result: int = 0
    present: int = 0
    cover: int = 0
    cover_result: int = 0


class TableSwitch:
    """A switch by the tables of ``p4/include``. ``two_passes`` and ``sticky`` as on Tofino or as on bmv2."""

    name = "tables"
    routes_unknown = True
    max_values = VALUES_BASE

    def __init__(self, stale_ns: int, *, two_passes: bool, sticky: bool) -> None:
        expanded, self.codes = preprocess(*INCLUDED)
        self.tables = read_tables(expanded)
        self.events = {v: k for k, v in self.codes.items() if k.startswith("V_")}
        self.stale_ns = stale_ns
        self.two_passes = two_passes
        self.add = sticky_add if sticky else plain_add
        self.now_ns = 0
        self.jobs: dict[int, Job] = {}
        self.admission: set[tuple[int, str, int, int]] = set()
        self.transits: dict[tuple[int, str, int], int] = {}
        self.ps_ports: set[tuple[int, str]] = set()
        self.hosts: dict[str, Host] = {}
        self.dropped: dict[str, dict[str, int]] = {}
        self.groups: dict[int, list[str]] = {}
        self.state: dict[int, State] = {}
        self.counted: dict[tuple[int, str], int] = {}
        self.between_passes: Packet | None = None
        """A packet that comes in between the two passes of the next one, for tests of that race."""
        self.seen: dict[int, tuple[int, int]] = {}
        """Level and sequence of each aggregator, which the key does not tell apart; for looking only."""

    # -- tables of the control plane

    def set_clock(self, now_ns: int) -> None:
        self.now_ns = now_ns

    def set_job(
        self, job: int, values: int, full0: int, full1: int, group: int, regions: Sequence[tuple[int, int]]
    ) -> None:
        self.jobs[job] = Job(values, full0, full1, group, [(a, b) for a, b in regions])

    def delete_job(self, job: int) -> None:
        del self.jobs[job]

    def admit(self, job: int, port: str, edge: int, bit: int) -> None:
        self.admission.add((job, port, edge, bit))

    def revoke(self, job: int, port: str, edge: int, bit: int) -> None:
        self.admission.remove((job, port, edge, bit))

    def transit(self, job: int, port: str, rack: int, mask0: int) -> None:
        self.transits[job, port, rack] = mask0

    def ps_port(self, job: int, port: str) -> None:
        self.ps_ports.add((job, port))

    def set_host(
        self, job: int, host: str, port: str, role: str, bitmap0: int = 0, bitmap1: int = 0, edge: int = 0
    ) -> None:
        self.hosts[host] = Host(job, port, role == "ps", bitmap0, bitmap1, edge)

    def delete_host(self, job: int, host: str) -> None:
        del self.hosts[host]

    def set_group(self, group: int, ports: Sequence[str]) -> None:
        self.groups[group] = list(ports)

    def close(self) -> None:
        pass

    # -- what a test may look at

    def counters(self, job: int) -> dict[str, int]:
        return {name: n for (j, name), n in self.counted.items() if j == job and n}

    def drops(self) -> dict[str, dict[str, int]]:
        return self.dropped

    def aggregator(self, index: int) -> Aggregator:
        s = self.state.get(index, State())
        if s.key == 0:
            return Aggregator(0, 0, 0, 0, False, False, 0, tuple(s.values))
        level, sequence = self.seen[index]
        return Aggregator(
            s.key >> 24,
            sequence,
            level,
            s.cover,
            s.missing == 0,
            bool(s.mark),
            s.stamp_ns,
            tuple(s.values),
        )

    def occupancy(self, job: int) -> int:
        return sum(1 for s in self.state.values() if s.key and job in (0, s.key >> 24))

    # -- packets

    def count(self, verdict: int, job: int) -> None:
        event = self.events[verdict]
        names = COUNTED_BY[event]
        if self.two_passes:
            # The second pass is what releases, so it is what counts as released.
            names = [n for n in names if n != "resend_partials"] + SECOND_PASS.get(event, [])
        for name in names:
            self.counted[job, name] = self.counted.get((job, name), 0) + 1

    def send(self, packet: Packet, dst: str, expected: int) -> list[Packet]:
        del expected
        out = self.process(packet, dst)
        return sorted(out, key=lambda p: PORTS.index(p.port))

    def process(self, packet: Packet, dst: str) -> list[Packet]:
        payload = packet.payload()
        short = len(payload) < HEADER_BYTES
        whole = len(payload) == HEADER_BYTES + 4 * VALUES_BASE
        h = Header() if short else Header.unpack(payload)
        values = list(Packet.parse(packet.port, payload).values) if whole else []
        level = h.edge_switch_identifier
        meta = Meta(kind=self.codes["K_SHORT"] if short else 0)
        meta.key = h.job_id << 24 | h.sequence
        meta.level_bit = 0 if h.is_ack or level else LEVEL_BIT
        meta.bit = h.bitmap1 if level else h.bitmap0
        own_mark = h.ecn
        meta.ecn = int(h.ecn or packet.ce)
        columns = self.guard(packet, dst, h, short)
        verdict, _, out, h, values, cover = self.one_pass(h, values, meta, packet.port, not short, whole, columns)
        self.count_drop(packet.port, meta.kind, columns[0])
        job = h.job_id if h.job_id in self.jobs and not short else 0
        self.count(verdict, job)
        if meta.ecn and not own_mark and self.events[verdict] in STEP_8:
            self.counted[job, "ecn_marked"] = self.counted.get((job, "ecn_marked"), 0) + 1
        names = {self.codes[n]: n for n in self.codes if n.startswith("OUT_")}
        if names[out].startswith("OUT_CARRY") and self.two_passes:
            if self.between_passes is not None:
                other, self.between_passes = self.between_passes, None
                self.process(other, "ps")
            free = names[out] == "OUT_CARRY_FREE"
            second = Meta(kind=self.codes["K_FREE" if free else "K_KEEP"], key=meta.key, bit=cover)
            verdict, _, out, h, values, _ = self.one_pass(h, values, second, packet.port, True, True, second_pass=True)
            self.count(verdict, job)
        elif names[out] == "OUT_CARRY_FREE":
            s = self.state[h.aggregator_index]
            s.key = s.present = 0
        if names[out] == "OUT_DROP":
            return []
        if names[out] == "OUT_MULTICAST" and self.jobs[h.job_id].group:
            return [replace(packet, port=p, header=h, ce=False) for p in self.groups[self.jobs[h.job_id].group]]
        if short or not whole:
            return [Packet.parse(dst, payload)]
        return [Packet(dst, h, tuple(values))]

    def guard(self, packet: Packet, dst: str, h: Header, short: bool) -> tuple[int, ...]:
        """Columns of the guard in `gate`: what its tables say of a packet."""
        source, to = self.hosts.get(packet.src or packet.port), self.hosts.get(dst)
        job = 0 if short else h.job_id
        workers = source is not None and not source.server
        return (
            int(source is not None),
            int(source is not None and source.server),
            int(to is not None),
            int(to is not None and to.server),
            PORTS.index(packet.port) ^ PORTS.index(source.port) if source else 0,
            job ^ source.job if source else 0,
            job ^ to.job if to else 0,
            int(workers and source is not None and h.bitmap1 == source.bitmap1),
            int(
                workers and source is not None
                and (h.bitmap0, h.edge_switch_identifier) == (source.bitmap0, source.edge)
            ),
            int(any(host.job == job for host in self.hosts.values())),
        )  # fmt: skip

    def count_drop(self, port: str, kind: int, from_host: int) -> None:
        if self.tables["refusal"].apply(kind, from_host)[0] == "count_drop":
            cells = self.dropped.setdefault(port, {})
            reason = DROP_REASONS[kind & 7]
            cells[reason] = cells.get(reason, 0) + 1

    def one_pass(
        self,
        h: Header,
        values: list[int],
        meta: Meta,
        port: str,
        atp: bool,
        whole: bool,
        guard: tuple[int, ...] = (0,) * 10,
        second_pass: bool = False,
    ) -> tuple[int, int, int, Header, list[int], int]:
        """Stages 0 to the last. Returns verdict, op, out, header, values, cover."""
        job = self.jobs.get(h.job_id) if atp else None
        index = h.aggregator_index
        admitted = (h.job_id, port, h.edge_switch_identifier, meta.bit) in self.admission and not second_pass
        mask0 = self.transits.get((h.job_id, port, h.bitmap1))
        on_way = mask0 is not None and not admitted and not h.edge_switch_identifier and not second_pass
        excess = h.bitmap0 & ~(mask0 or 0) if on_way else 0
        if admitted:
            meta.key ^= meta.level_bit
        if on_way:
            meta.bit = h.bitmap1
        full = (job.full0, job.full1) if job else (0, 0)
        action, (kind,) = self.tables["gate"].apply(
            int(second_pass),
            meta.kind,
            int(atp),
            int(job is not None),
            h.raw_float,
            int(whole),
            h.is_ack,
            int((h.job_id, port) in self.ps_ports),
            int(job is not None and any(a <= index < a + n for a, n in job.regions)),
            h.edge_switch_identifier,
            int(admitted),
            int(on_way),
            h.resend,
            h.collision,
            h.bitmap0,
            full[0],
            full[1],
            h.bitmap0 & ~full[0],
            h.bitmap1 & ~full[1],
            excess,
            *guard,
        )
        meta.kind = kind
        s = self.state.setdefault(index, State())
        if action != "set_kind":
            getattr(self, action)(s, meta)
        level = int(meta.key == (h.job_id << 24 | h.sequence))
        meta.needed = full[level] & ~meta.bit
        for register in ("missing", "present", "cover", "mark"):
            access, _ = self.tables[f"{register}_access"].apply(meta.kind, meta.key_result)
            if access != "NoAction":
                getattr(self, access)(s, meta)
        _, (verdict, op, out) = self.tables["decision"].apply(
            meta.kind, meta.key_result, meta.missing_result, meta.present, meta.cover_result
        )
        values = self.run_values(s, values, op)
        gradient = meta.kind in (self.codes["K_GRAD0"], self.codes["K_GRAD1"])
        if op == self.codes["OP_WRITE"] or (op == self.codes["OP_ADD"] and gradient):
            s.stamp_ns = self.now_ns
            self.seen[index] = level, h.sequence
        edit, _ = self.tables["emission"].apply(meta.kind, verdict, meta.missing_result)
        h = self.edit(edit, h, meta)
        if self.tables["marking"].apply(verdict, meta.mark, meta.ecn)[0] == "emit_marked":
            h = replace(h, ecn=1)
        return verdict, op, out, h, values, meta.cover

    def run_values(self, s: State, values: list[int], op: int) -> list[int]:
        c = self.codes
        if op == c["OP_WRITE"]:
            s.values = list(values)
        elif op == c["OP_ADD"]:
            s.values = [self.add(a, b) for a, b in zip(s.values, values, strict=True)]
        if op in (c["OP_ADD"], c["OP_READ"]):
            # One pass hands out the first of each pair only.
            both = not self.two_passes
            return [a if both or i % 2 == 0 else b for i, (a, b) in enumerate(zip(s.values, values, strict=True))]
        if op == c["OP_READ_SECOND"]:
            return [a if i % 2 else b for i, (a, b) in enumerate(zip(s.values, values, strict=True))]
        return values

    def edit(self, action: str, h: Header, meta: Meta) -> Header:
        if action == "emit_rack":
            return replace(h, bitmap0=meta.cover, edge_switch_identifier=1)
        if action == "emit_first_rack":
            return replace(h, bitmap0=meta.cover, edge_switch_identifier=1, resend=0, collision=0)
        if action == "emit_first_racks":
            return replace(h, bitmap1=meta.cover, edge_switch_identifier=1, resend=0, collision=0)
        if action == "emit_whole":
            return replace(h, edge_switch_identifier=1)
        if action == "emit_part_of_rack":
            return replace(h, bitmap0=meta.cover)
        if action == "emit_racks":
            return replace(h, bitmap1=meta.cover, edge_switch_identifier=1)
        if action == "emit_collision":
            return replace(h, collision=1, resend=1)
        return h

    # -- register actions, as in p4/tna/atp.p4

    def compare(self, first: bool, second: bool) -> int:
        return 1 << (first + 2 * second)

    def vacant(self, s: State) -> bool:
        return s.key == 0 or self.now_ns - s.stamp_ns > self.stale_ns

    def key_gradient(self, s: State, m: Meta) -> None:
        vacant = self.vacant(s)
        m.key_result = self.compare(s.key == m.key, vacant)
        if vacant:
            s.key = m.key

    def key_resend(self, s: State, m: Meta) -> None:
        own, vacant = s.key == m.key, self.vacant(s)
        m.key_result = self.compare(own, vacant)
        if own and vacant:
            s.key = 0

    def key_ack(self, s: State, m: Meta) -> None:
        own = s.key == m.key, s.key == m.key ^ LEVEL_BIT
        m.key_result = self.compare(*own)
        if any(own):
            s.key = 0

    def key_release(self, s: State, m: Meta) -> None:
        own = s.key == m.key
        m.key_result = self.compare(own, False)
        if own:
            s.key = 0

    def missing_take(self, s: State, m: Meta) -> None:
        m.missing_result = self.compare(m.needed == 0, False)
        s.missing = m.needed

    def missing_add(self, s: State, m: Meta) -> None:
        self.missing_peek(s, m)
        s.missing &= ~m.bit

    def missing_peek(self, s: State, m: Meta) -> None:
        m.missing_result = self.compare(s.missing == m.bit, s.missing == 0)

    def missing_weigh(self, s: State, m: Meta) -> None:
        m.missing_result = self.compare(m.needed == 0, False)

    def present_take(self, s: State, m: Meta) -> None:
        m.present, s.present = s.present, m.bit

    def present_add(self, s: State, m: Meta) -> None:
        m.present = s.present & m.bit
        s.present |= m.bit

    def present_peek(self, s: State, m: Meta) -> None:
        m.present = s.present & m.bit

    def present_clear(self, s: State, m: Meta) -> None:
        s.present = 0

    def cover_take(self, s: State, m: Meta) -> None:
        m.cover = s.cover = m.bit

    def cover_add(self, s: State, m: Meta) -> None:
        s.cover |= m.bit
        m.cover = s.cover

    def cover_read(self, s: State, m: Meta) -> None:
        m.cover = s.cover

    def cover_compare(self, s: State, m: Meta) -> None:
        m.cover_result = self.compare(s.cover == m.bit, False)

    def mark_take(self, s: State, m: Meta) -> None:
        m.mark = s.mark = m.ecn

    def mark_add(self, s: State, m: Meta) -> None:
        s.mark |= m.ecn
        m.mark = s.mark


def counted_by() -> dict[str, list[str]]:
    """Counters that each event moves, from the bmv2 program's ``count.p4``."""
    text = (ROOT / "p4" / "v1model" / "count.p4").read_text(encoding="utf-8")
    result: dict[str, list[str]] = {}
    for condition, counter in re.findall(r"if \((.*?)\) \{\s*(\w+)\.count", text, re.DOTALL):
        for event in re.findall(r"== (V_\w+)", condition):
            result.setdefault(event, []).append(counter)
    for event in preprocess()[1]:
        if event.startswith("V_"):
            result.setdefault(event, [])
    return result


COUNTED_BY = counted_by()
SECOND_PASS = {
    "V_SECOND_FREED": ["resend_partials"],
    "V_SECOND_TORN": ["resend_partials"],
    "V_SECOND_STALE": ["stale_takeovers"],
}
"""docs/p4.md, Counters."""
STEP_8 = [f"V_{n}" for n in (
    "ALLOCATED", "TAKEOVER", "ALLOCATED_DONE", "TAKEOVER_DONE", "ADDED", "COMPLETED", "COLLISION", "DUPLICATE",
    "REEMITTED", "RESEND_PASSED", "RESEND_STALE", "PARTIAL", "PARTIAL_ADDED", "PARTIAL_DONE",
)]  # fmt: skip
