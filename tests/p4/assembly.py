# SPDX-License-Identifier: Apache-2.0
"""Interprets the assembly that p4c's Tofino back end made of the program (``p4/build/atp.tofino*.bfa.xz``).

No chip and no vendor's model: it runs what the compiler hands to the assembler, in terms of containers, match keys,
instructions of the stages and of the stateful ALUs, parser states, deparser. So parser, allocation of fields, table
entries, header edits and both passes are those of the chip's program. What it takes for granted is what each
instruction does, and what surrounds a pipe (traffic manager, loopback port). It knows what this program uses and
refuses anything else.
"""

from __future__ import annotations

import lzma
import re
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

BUILD = Path(__file__).resolve().parents[2] / "p4" / "build"
WIDTH = {"B": 8, "H": 16, "W": 32}
CONTAINER = re.compile(r"[TM]?([BHW])\d+")
REFERENCE = re.compile(r"(?P<name>[^()]+)(?:\((?P<low>\d+)(?:\.\.(?P<high>\d+))?\))?")
ALIAS = re.compile(r"([\w.$-]+): ([\w.$-]+(?:\(\d+(?:\.\.\d+)?\))?)")
PREDICATE_SHIFT = 4
"""Where a stateful ALU puts its predicate in the word that it hands out."""


@dataclass
class Node:
    """A line, ``key: value``, and what is indented below it. Keys may come twice."""

    key: str
    value: str = ""
    children: list[Node] = field(default_factory=list)

    def find(self, key: str) -> Node | None:
        return next((c for c in self.children if c.key == key), None)

    def get(self, key: str, default: str = "") -> str:
        found = self.find(key)
        return default if found is None else found.value

    def all(self, pattern: str) -> list[Node]:
        return [c for c in self.children if re.fullmatch(pattern, c.key)]


def read(text: str) -> Node:
    """The assembly as a tree."""
    root = Node("")
    stack = [(-1, root)]
    for line in text.splitlines():
        content = re.sub(r"(^|\s+)#.*", "", line)
        indent = len(content) - len(content.lstrip())
        content = content.strip()
        depth = 2 * indent
        while content:
            item = content.startswith("- ")
            if item:
                depth += 1
            while stack[-1][0] >= depth:
                stack.pop()
            node = Node("-") if item else of_line(content)
            stack[-1][1].children.append(node)
            stack.append((depth, node))
            content = content[2:].strip() if item else ""
            depth += 3
    return root


def of_line(content: str) -> Node:
    if content.startswith("{"):
        return Node(content)
    key, colon, value = content.partition(": ")
    return Node(key.strip(), value.strip()) if colon else Node(content.removesuffix(":").strip())


def slices(text: str) -> tuple[str, int | None, int | None]:
    """Name and bits of a reference: ``H3(0..8)``, ``B4(7)``, ``W5``."""
    found = REFERENCE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"reference {text}")
    if found["low"] is None:
        return found["name"], None, None
    return found["name"], int(found["low"]), int(found["high"] or found["low"])


@cache
def pattern(text: str) -> tuple[int, int]:
    """Value and mask of ``0b1*0``, ``0x2a**`` or ``0o7*``; ``*`` alone matches all."""
    if text == "*":
        return 0, 0
    size = {"0b": 1, "0x": 4, "0o": 3}[text[:2]]
    value = mask = 0
    for digit in text[2:]:
        value, mask = value << size, mask << size
        if digit != "*":
            value |= int(digit, 16)
            mask |= (1 << size) - 1
    return value, mask


def flow(text: str) -> list[tuple[str, str]]:
    """Pairs of ``{ 0: meta.known, 13: hdr.atp.ecn }``."""
    return [(k.strip(), v.strip()) for k, _, v in (part.partition(":") for part in text.strip("{} ").split(",")) if v]


def names(text: str) -> list[str]:
    """Tables of ``[ job_0, region_0 ]``."""
    return re.findall(r"[\w$.]+", text)


class Phv(dict[str, int]):
    """Containers of one packet. ``told`` are those that a stage wrote: the traffic manager is told of no others."""

    def __init__(self) -> None:
        super().__init__()
        self.told: set[str] = set()
        self.clots: dict[str, bytes] = {}
        self.sums: dict[str, int] = {}

    def copy(self) -> Phv:
        other = Phv()
        other.update(self)
        return other


Params = dict[str, int]
Range = tuple[int, int]
Entry = tuple[tuple[Range, ...], str, Params]


@dataclass
class Table:
    """A table with its place, where its actions are, and its constant entries."""

    kind: str
    name: str
    stage: int
    node: Node
    actions_node: Node
    gateway: Node | None
    keys: list[tuple[str, str, int, int]]
    constant: list[tuple[list[tuple[int, int]], str, Params]]
    p4_name: str

    @cached_property
    def actions(self) -> dict[str, Node]:
        found = self.actions_node.find("actions")
        return {} if found is None else {c.key.partition("(")[0]: c for c in found.children}

    @cached_property
    def hash_bits(self) -> list[tuple[int, int, str]]:
        """Bits of the identity hash and what they are of. Hashes are combined by xor: a 0 leaves bits to others."""
        out = []
        for crossbar in self.actions_node.all("input_xbar"):
            for bits in (c for h in crossbar.all(r"hash \d+") for c in h.children):
                low, _, high = bits.key.partition("..")
                if "random" not in bits.value and bits.value != "0":
                    out.append((int(low), int(high or low), bits.value))
        return out

    @property
    def default(self) -> tuple[str, Params]:
        name = self.actions_node.get("default_action") or self.actions_node.get("default_only_action")
        given = self.actions_node.find("default_action_parameters")
        return name, {c.key: int(c.value.strip('"'), 0) for c in (given.children if given else [])}


class Register:
    """A stateful table: its words, its actions, and which fields its two operands are."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.words: dict[int, list[int]] = {}
        sizes = dict(flow(node.get("format")))
        self.bits = int(sizes["lo"])
        p4 = dict(flow(node.get("p4")))
        self.name, self.size = p4["name"], int(p4["size"])
        self.operands: list[tuple[int, str]] = []
        crossbar = node.find("input_xbar")
        for group in crossbar.all(r"exact group \d+") if crossbar else []:
            self.operands += [(int(at) % 64, ref) for at, ref in flow(group.value)]
        found = node.find("actions")
        assert found is not None
        self.actions = {a.key: [i.children[0].key for i in a.children] for a in found.children}

    def execute(self, action: str, index: int, operand: int) -> int:
        """One access; returns the word that is handed out."""
        # No RAM answers to an address behind the table: nothing is read, nothing kept.
        old = self.words.setdefault(index, [0, 0]) if index < self.size else [0, 0]
        values = {"lo": old[0], "hi": old[1], "phv_lo": operand & 0xFFFFFFFF, "phv_hi": operand >> 32}
        tests = {"cmplo": False, "cmphi": False}
        new = dict(values)
        out = 0
        for instruction in self.actions[action]:
            op, _, rest = instruction.partition(" ")
            words = [w.strip() for w in rest.split(",")]
            if op in ("equ", "grt.u"):
                test = {"lo": "cmplo", "hi": "cmphi", "cmp0": "cmplo", "cmp1": "cmphi"}[words[0]]
                total = sum(self.term(w, values) for w in words[1:])
                tests[test] = total == 0 if op == "equ" else total > 0
                continue
            if op == "output":
                if words[-1] == "predicate":
                    out = 1 << tests["cmplo"] + 2 * tests["cmphi"] << PREDICATE_SHIFT
                else:
                    where, _, half = words[-1].partition("_")
                    out = {"mem": values, "alu": new}[where][half]
                continue
            if words[0] not in ("lo", "hi"):
                condition = words.pop(0)
                if not self.holds(condition, tests):
                    continue
            new[words[0]] = self.compute(op, [self.term(w, values) for w in words[1:]]) & (1 << self.bits) - 1
        if index < self.size:
            self.words[index] = [new["lo"], new["hi"]]
        return out

    @staticmethod
    def term(word: str, values: dict[str, int]) -> int:
        negative, word = word.startswith("-"), word.removeprefix("-")
        value = values[word] if word in values else int(word)
        return -value if negative else value

    @staticmethod
    def holds(condition: str, tests: dict[str, bool]) -> bool:
        names = {**tests, "cmp0": tests["cmplo"], "cmp1": tests["cmphi"]}
        words = re.findall(r"\w+|[()&|!]", condition)
        spoken = {"&": "and", "|": "or", "!": "not"}
        return bool(eval(" ".join(str(names[w]) if w in names else spoken.get(w, w) for w in words), {}))

    @staticmethod
    def compute(op: str, operands: list[int]) -> int:
        if op == "alu_a":
            return operands[0]
        a, b = operands
        if op == "sadds":
            both = [x - (1 << 32) if x >> 31 else x for x in (a, b)]
            return max(-(1 << 31), min((1 << 31) - 1, sum(both)))
        return {"or": a | b, "and": a & b, "andcb": a & ~b}[op]


class Assembly:
    """The program of one chip: both parsers, pipelines and deparsers."""

    def __init__(self, chip: str) -> None:
        path = BUILD / f"atp.{chip}.bfa.xz"
        self.root = read(lzma.decompress(path.read_bytes()).decode("utf-8"))
        self.fields = {g: self.fields_of(g) for g in ("ingress", "egress")}
        self.tables: dict[str, Table] = {}
        self.registers: dict[str, Register] = {}
        self.order: dict[str, list[Table]] = {"ingress": [], "egress": []}
        self.entries: dict[str, list[Entry]] = {}
        self.counted: dict[str, dict[int, int]] = {}
        self.intrinsic_bytes = int(self.section("parser egress").get("hdr_len_adj"))
        """What the traffic manager puts in front of a packet."""
        for gress in ("ingress", "egress"):
            for stage in self.root.all(rf"stage \d+ {gress}"):
                self.read_stage(stage, int(stage.key.split()[1]), gress)

    def section(self, key: str) -> Node:
        found = self.root.find(key)
        if found is None:
            raise ValueError(f"no {key}")
        return found

    def fields_of(self, gress: str) -> dict[str, list[tuple[int, int, str]]]:
        """Places of each field by stage; without stages it is in one place."""
        out: dict[str, list[tuple[int, int, str]]] = {}
        for node in self.section(f"phv {gress}").children:
            if node.key == "context_json":
                continue
            if not node.value.startswith("{"):
                out[node.key] = [(0, 99, node.value)]
                continue
            places = []
            for stages, place in re.findall(r"stage ([\d.]+): *([^,}]+)", node.value):
                low, _, high = stages.partition("..")
                places.append((int(low), int(high or low), place.strip()))
            out[node.key] = places
        return out

    def read_stage(self, stage: Node, number: int, gress: str) -> None:
        order: list[tuple[int, str]] = []
        by_name = {c.key.split()[1]: c for c in stage.children if len(c.key.split()) > 1}
        for node in stage.children:
            kind, name, *identity = [*node.key.split(), "", ""][:3]
            if kind == "stateful":
                self.registers[name] = Register(node)
            if kind not in ("exact_match", "ternary_match", "hash_action"):
                continue
            indirect = node.get("indirect")
            actions = by_name[indirect] if indirect else node
            p4 = dict(flow(node.get("p4")))
            keys = self.keys_of(node)
            table = Table(kind, name, number, node, actions, node.find("gateway"), keys, [], p4["name"])
            handles = {self.item(a, "handle"): n for n, a in table.actions.items()}
            static = node.find("context_json")
            for entry in static.children[0].children if static else []:
                fields = {}
                given: Params = {}
                for part in entry.children:
                    if part.key == "match_key_fields_values":
                        for f in part.children:
                            numbers = [int(f.get(k).strip('"'), 0) for k in ("value", "mask")]
                            fields[f.get("field_name")] = (numbers[0], numbers[1])
                    if part.key == "action_parameters_values":
                        given = {f.get("parameter_name"): int(f.get("value").strip('"'), 0) for f in part.children}
                table.constant.append(([fields[k[0]] for k in keys], handles[entry.get("action_handle")], given))
            self.tables[name] = table
            self.entries[table.p4_name] = []
            order.append((int(identity[0]), name))
        self.order[gress] += [self.tables[name] for _, name in sorted(order)]

    @staticmethod
    def item(action: Node, key: str) -> str:
        return next((i.children[0].value for i in action.children if i.children[0].key == key), "")

    @staticmethod
    def keys_of(node: Node) -> list[tuple[str, str, int, int]]:
        """Name, field, first bit and bits of each key, in the order of the P4 program."""
        order = node.find("p4_param_order")
        out = []
        for key in order.children if order else []:
            told = dict(flow(key.value))
            name = told.get("key_name", "").strip('"') or key.key
            out.append((name, key.key, int(told.get("start_bit", "0")), int(told["size"])))
        return out

    def reset(self) -> None:
        for entries in self.entries.values():
            entries.clear()
        for register in self.registers.values():
            register.words.clear()
        self.counted.clear()

    # -- containers

    def place(self, gress: str, name: str, stage: int) -> str | None:
        """Container and bits of a field."""
        places = self.fields[gress].get(name)
        if places is None:
            return None
        return next((p for low, high, p in places if low <= stage <= high), None)

    def get(self, phv: Phv, gress: str, reference: str, stage: int) -> int:
        name, low, high = slices(reference)
        found = CONTAINER.fullmatch(name)
        if found is not None:
            value, width = phv.get(name, 0), WIDTH[found[1]]
        else:
            place = self.place(gress, name, stage)
            if place is not None:
                value, width = self.get(phv, gress, place, stage), 64
            else:
                value, width = self.pieces(phv, gress, name, stage), 64
        if low is None or high is None:
            return value & (1 << width) - 1
        return value >> low & (1 << high - low + 1) - 1

    def pieces(self, phv: Phv, gress: str, name: str, stage: int) -> int:
        """A field in several containers."""
        value, found = 0, False
        for other in self.fields[gress]:
            bits = re.fullmatch(re.escape(name) + r"\.(\d+)-(\d+)", other)
            if bits is not None:
                found = True
                value |= self.get(phv, gress, other, stage) << int(bits[1])
        if not found:
            raise KeyError(f"{name} in stage {stage}")
        return value

    def put(self, phv: Phv, gress: str, reference: str, value: int, stage: int) -> None:
        name, low, high = slices(reference)
        found = CONTAINER.fullmatch(name)
        if found is None:
            place = self.place(gress, name, stage + 1) or self.place(gress, name, stage)
            if place is None:
                raise KeyError(f"{name} after stage {stage}")
            container, at, end = slices(place)
            if low is not None and high is not None:
                at, end = (at or 0) + low, (at or 0) + high
            self.put(phv, gress, container if at is None else f"{container}({at}..{end})", value, stage)
            return
        phv.told.add(name)
        if low is None or high is None:
            low, high = 0, WIDTH[found[1]] - 1
        mask = (1 << high - low + 1) - 1
        phv[name] = phv.get(name, 0) & ~(mask << low) | (value & mask) << low

    # -- parser and deparser

    def parse(self, gress: str, data: bytes, phv: Phv) -> bytes:
        """Fill containers; return what is left of the packet."""
        parser = self.section(f"parser {gress}")
        states = parser.find("states")
        assert states is not None
        adds = set(re.findall(r"\w+", parser.get("bitwise_or")))
        name, at, counter = parser.get("start"), 0, 0
        registers: dict[str, int] = {}
        while name != "end":
            state = states.find(name)
            if state is None:
                raise ValueError(f"no parser state {name}")
            registers |= {"ctr_neg": int(counter < 0), "ctr_zero": int(counter == 0)}
            value = 0
            for register in re.findall(r"\w+", state.get("match")):
                size = {"half": 16, "ctr_neg": 1, "ctr_zero": 1}.get(register, 8)
                value = value << size | registers[register]
            taken = next(
                c
                for c in state.children
                if c.key not in ("match", "option") and (value ^ pattern(c.key)[0]) & pattern(c.key)[1] == 0
            )
            shift = int(taken.get("shift", "0"))
            for op in taken.children:
                key, _, clot = op.key.partition(" ")
                if key in ("shift", "buf_req", "next", "intr_md"):
                    continue
                if key == "counter":
                    counter = int(op.get("imm")) if op.children else counter - int(op.value.removeprefix("dec "))
                elif key == "load":
                    for register, where in flow(op.value):
                        low, _, high = where.partition("..")
                        registers[register] = int.from_bytes(data[at + int(low) : at + int(high or low) + 1], "big")
                elif key == "checksum" and op.get("type") == "CLOT":
                    total = 0
                    for low, high in re.findall(r"(\d+)(?:\.\.(\d+))?", op.get("mask")):
                        for byte in range(int(low), int(high or low) + 1):
                            total += data[at + byte] << 8 * (1 - byte % 2)
                    phv.sums[op.get("dest")] = total
                elif key == "clot":
                    start = at + int(op.get("start"))
                    phv.clots.setdefault(clot.strip(), data[start : start + int(op.get("length"))])
                elif CONTAINER.fullmatch(key):
                    phv[key] = phv.get(key, 0) | int(op.value, 0) if key in adds else int(op.value, 0)
                else:
                    low, _, high = key.partition("..")
                    phv[slices(op.value)[0]] = int.from_bytes(data[at + int(low) : at + int(high or low) + 1], "big")
            at += shift
            name = taken.get("next")
        return data[at:]

    def deparse(self, gress: str, phv: Phv) -> bytes:
        deparser = self.section(f"deparser {gress}")
        dictionary = deparser.find("dictionary")
        assert dictionary is not None
        out = b""
        for part in dictionary.children:
            pov = part.value or part.get("pov")
            if not self.get(phv, gress, pov, 99):
                continue
            kind, _, rest = part.key.partition(" ")
            if kind == "clot":
                data = bytearray(phv.clots[rest.strip()])
                for other in part.children:
                    if other.key.isdigit():
                        out_of = self.bytes_of(deparser, gress, other.value, phv)
                        data[int(other.key) : int(other.key) + len(out_of)] = out_of
                out += bytes(data)
            else:
                out += self.bytes_of(deparser, gress, part.key, phv)
        return out

    def bytes_of(self, deparser: Node, gress: str, source: str, phv: Phv) -> bytes:
        if source.startswith("full_checksum"):
            return self.checksum(deparser, source.removeprefix("full_"), phv)
        found = CONTAINER.fullmatch(source)
        if found is None:
            raise ValueError(f"deparser source {source}")
        return phv.get(source, 0).to_bytes(WIDTH[found[1]] // 8, "big")

    def checksum(self, deparser: Node, unit: str, phv: Phv) -> bytes:
        """One's complement of the sum of containers and of what the parser summed of a CLOT."""
        whole = deparser.find(f"full_{unit}")
        partial = deparser.find(f"partial_{unit}")
        assert whole is not None and partial is not None
        total = 0
        for part in partial.children:
            value = phv.get(part.children[0].key, 0)
            total += (value >> 16) + (value & 0xFFFF)
        for part in whole.children:
            if part.children[0].key.startswith("clot"):
                total += phv.sums[part.children[0].key]
        while total >> 16:
            total = (total >> 16) + (total & 0xFFFF)
        return (~total & 0xFFFF).to_bytes(2, "big")

    def told(self, gress: str, phv: Phv, what: str) -> int:
        """What the traffic manager is told; 0 if nothing."""
        node = self.section(f"deparser {gress}").find(what)
        if node is None:
            return 0
        # `H5(0..8)`, or with the bit that says whether it counts, `{ H5(0..8): H0(1) }`; groups are items of a list.
        text = node.value or node.children[0].children[0].key
        source, _, pov = (part.strip() for part in text.strip("{} ").partition(":"))
        valid = self.get(phv, gress, pov, 99) if pov else slices(source)[0] in phv.told
        return self.get(phv, gress, source, 99) if valid else 0

    # -- stages

    def pipeline(self, gress: str, phv: Phv) -> None:
        """Stage by stage; what a stage writes it does not see itself."""
        wanted = {self.order[gress][0].name} | {t.name for t in self.order[gress] if t.node.get("always_run") == "true"}
        stage, before = -1, phv
        for table in self.order[gress]:
            if table.name in wanted:
                if table.stage > stage:
                    before, stage = phv.copy(), table.stage
                wanted |= set(names(self.apply(table, gress, before, phv)))

    def apply(self, table: Table, gress: str, before: Phv, after: Phv) -> str:
        """Gateway, lookup and action; returns the tables that follow."""
        if table.gateway is not None:
            found, hit = self.gateway(table, gress, before)
            follow = found.get("next") or (found.value if not found.children else "")
            if table.kind == "hash_action":
                if hit:
                    self.run(table, *table.default, gress, before, after)
                    return follow
                return table.node.get("next")
            if found.find("action") is not None:
                name = next(n for n in table.actions if n.rpartition(".")[2] == found.get("action"))
                self.run(table, name, {}, gress, before, after)
                return follow
            if found.find("run_table") is None:
                return follow
        entry = self.lookup(table, gress, before)
        action, params = entry if entry is not None else table.default
        self.run(table, action, params, gress, before, after)
        if entry is None:
            return table.node.get("miss")
        # One item for each way on: a name, or several in brackets.
        hits = re.findall(r"\[[^\[\]]*\]|[\w$.]+", table.node.get("hit").strip()[1:-1])
        return str(hits[int(self.item(table.actions[action], "next_table") or 0)])

    def gateway(self, table: Table, gress: str, phv: Phv) -> tuple[Node, bool]:
        gateway = table.gateway
        assert gateway is not None
        value = 0
        # Patterns begin at the lowest bit that is matched.
        base = min((int(at) for at, _ in flow(gateway.get("match"))), default=0)
        for place in ("match", "xor"):
            for at, reference in flow(gateway.get(place)):
                value ^= self.get(phv, gress, reference, table.stage) << int(at) - base
        for node in gateway.children:
            if re.fullmatch(r"0[bxo][\da-f*]+", node.key):
                wanted, mask = pattern(node.key)
                if (value ^ wanted) & mask == 0:
                    return node, True
        missed = gateway.find("miss")
        assert missed is not None
        return missed, False

    def lookup(self, table: Table, gress: str, phv: Phv) -> tuple[str, Params] | None:
        key = []
        for _, name, start, size in table.keys:
            key.append(self.get(phv, gress, name, table.stage) >> start & (1 << size) - 1)
        for fields, action, params in table.constant:
            if all((k ^ v) & m == 0 for k, (v, m) in zip(key, fields, strict=True)):
                return action, params
        for ranges, action, params in self.entries[table.p4_name]:
            if all(low <= k <= high for k, (low, high) in zip(key, ranges, strict=True)):
                return action, params
        return None

    def run(self, table: Table, action: str, params: Params, gress: str, before: Phv, after: Phv) -> None:
        if action not in table.actions:
            if action.endswith("NoAction"):
                return
            raise ValueError(f"{table.name} has no action {action}")
        lines = [i.children[0].key for i in table.actions[action].children if not i.children[0].value]
        aliases = [pair for line in lines if line.startswith("{") for pair in ALIAS.findall(line)]
        handed: dict[str, int] = {}
        instructions = [line for line in lines if not line.startswith("{")]
        # The stateful ALU first: its word is an operand of the others.
        for line in instructions:
            found = re.fullmatch(r"([\w$.]+)\((?:(\w+), )?\$hash_dist\)", line)
            if found is None:
                continue
            index = 0
            # A unit of the hash distribution takes 16 of the hash's bits.
            base = min(low for low, _, _ in table.hash_bits)
            for low, high, reference in table.hash_bits:
                index |= (self.get(before, gress, reference, table.stage) & (1 << high - low + 1) - 1) << low - base
            if "$stats" in found[1]:
                cells = self.counted.setdefault(found[1].rpartition(".")[2], {})
                cells[index] = cells.get(index, 0) + 1
                continue
            register = self.registers[found[1]]
            operand = 0
            for at, reference in register.operands:
                operand |= self.get(before, gress, reference, table.stage) << at
            handed[found[1]] = register.execute(found[2], index, operand)

        def value_of(word: str) -> int:
            return self.operand(word, table, aliases, params, handed, gress, before)

        for line in instructions:
            op, _, rest = line.partition(" ")
            if "$hash_dist" in op or "$hash_dist" in rest:
                continue
            words = [w.strip() for w in re.split(r",\s*(?![^()]*\))", rest)]
            if op == "invalidate":
                after.told.discard(words[0])
                continue
            target = words[0]
            if op == "set":
                value = value_of(words[1])
            elif op == "deposit-field":
                container = slices(target)[0]
                self.put(after, gress, container, value_of(words[2]), table.stage)
                value = value_of(words[1])
            elif op == "bitmasked-set":
                # Data and mask lie in their words of the action data bus as their bits do in the container.
                low = slices(next(place for alias, place in aliases if alias == words[1]))[1] or 0
                at = low % WIDTH[CONTAINER.fullmatch(target)[1]]  # type: ignore[index]
                mask = value_of(words[1].replace("data", "mask")) << at
                value = value_of(words[1]) << at & mask | value_of(words[2]) & ~mask
            else:
                a, b = value_of(words[1]), value_of(words[2])
                value = {"xor": a ^ b, "or": a | b, "and": a & b, "andcb": a & ~b}[op]
            self.put(after, gress, target, value, table.stage)

    def operand(
        self,
        word: str,
        table: Table,
        aliases: list[tuple[str, str]],
        params: Params,
        handed: dict[str, int],
        gress: str,
        phv: Phv,
    ) -> int:
        if word.isdigit():
            return int(word)
        if word.startswith("hash_dist"):
            bits = ((self.get(phv, gress, reference, table.stage), at) for at, _, reference in table.hash_bits)
            return sum(value << at for value, at in bits)
        name, low, high = slices(word)
        if name in handed:
            return handed[name] >> (low or 0) & (1 << (31 if high is None else high) - (low or 0) + 1) - 1
        if any(slices(place)[0] == name for _, place in aliases) and name.startswith("$"):
            value = 0
            for alias, place in aliases:
                where, at, _ = slices(place)
                if where == name:
                    value |= self.constant(alias, aliases, params) << (at or 0)
            return value
        known = self.parameter(name, params)
        if known is not None:
            return known
        if name.startswith("$"):
            return self.constant(name, aliases, params)
        return self.get(phv, gress, word, table.stage)

    @staticmethod
    def parameter(name: str, params: Params) -> int | None:
        if name in params:
            return params[name]
        bits = re.fullmatch(r"(\w+)\.(\d+)-(\d+)", name)
        if bits is not None and bits[1] in params:
            return params[bits[1]] >> int(bits[2]) & (1 << int(bits[3]) - int(bits[2]) + 1) - 1
        plain = re.sub(r"_\d+$", "", name)
        return params.get(plain)

    def constant(self, alias: str, aliases: list[tuple[str, str]], params: Params) -> int:
        known = self.parameter(alias, params)
        if known is not None:
            return known
        for name, value in aliases:
            if name == alias and value.isdigit():
                return int(value)
            if value == alias and name in params:
                return params[name]
        raise KeyError(alias)


@cache
def the_assembly(chip: str) -> Assembly:
    return Assembly(chip)
