# SPDX-License-Identifier: Apache-2.0
"""A switch's tables of the conformance vectors over P4Runtime: the same calls serve bmv2 and the software switch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bmv2.p4runtime import DELETE, INSERT, MODIFY, Controller, Match
from conformance.switches import ROLES, address_of, ip_number, mac_of
from hosts import pieces_of

from atp_switch_agent.entries import FIELDS, HOST_PIECES


class P4RuntimeTables:
    """What a conformance vector writes, through a controller. The switch that inherits it has ports."""

    controller: Controller
    held: dict[tuple[str, tuple[tuple[str, Any], ...]], Match]

    if TYPE_CHECKING:

        def port_number(self, port: str) -> int: ...

    def put(self, table: str, match: Match, action: str, params: Sequence[int] = ()) -> None:
        """Insert an entry, or change the one that is there."""
        key = table, tuple(match.items())
        self.controller.entry(MODIFY if key in self.held else INSERT, table, match, action, params)
        self.held[key] = match

    def take(self, table: str, match: Match) -> None:
        del self.held[table, tuple(match.items())]
        self.controller.entry(DELETE, table, match)

    def of_job(self, job: int, *tables: str) -> list[tuple[str, Match]]:
        return [(table, match) for (table, _), match in self.held.items() if table in tables and match["job_id"] == job]

    def set_job(
        self, job: int, values: int, full0: int, full1: int, group: int, regions: Sequence[tuple[int, int]]
    ) -> None:
        wanted = [(start, start + size - 1) for start, size in regions]
        for table, match in self.of_job(job, "region"):
            if match["aggregator_index"] not in wanted:
                self.take(table, match)
        for bounds in wanted:
            self.put("region", {"job_id": job, "aggregator_index": bounds}, "in_region")
        self.put("job", {"job_id": job}, "set_job", [values, full0, full1, group])

    def delete_job(self, job: int) -> None:
        """Rights first, as the agent does."""
        for table in ("admission", "transit", "ps_port", "job", "region"):
            for _, match in self.of_job(job, table):
                self.take(table, match)

    def admit(self, job: int, port: str, edge: int, bit: int) -> None:
        self.put("admission", self.admission_key(job, port, edge, bit), "admit")

    def revoke(self, job: int, port: str, edge: int, bit: int) -> None:
        self.take("admission", self.admission_key(job, port, edge, bit))

    def admission_key(self, job: int, port: str, edge: int, bit: int) -> Match:
        return {"job_id": job, "ingress_port": self.port_number(port), "edge": edge, "bitmap": bit}

    def transit(self, job: int, port: str, rack: int, mask0: int) -> None:
        match: Match = {"job_id": job, "ingress_port": self.port_number(port), "bitmap1": rack}
        self.put("transit", match, "allow", [mask0])

    def ps_port(self, job: int, port: str) -> None:
        self.put("ps_port", {"job_id": job, "ingress_port": self.port_number(port)}, "from_ps")

    def set_host(
        self, job: int, host: str, port: str, role: str, bitmap0: int = 0, bitmap1: int = 0, edge: int = 0
    ) -> None:
        """One entry, or its pieces in a P4 program."""
        number = self.port_number(port)
        if self.has("host"):
            place = [number, 0x100 + job, ROLES[role], bitmap0, bitmap1, edge]
            self.put("host", self.host_key(job, host), "set_host", place)
            return
        for table, key, action, params in pieces_of(job, host, number, role, bitmap0, bitmap1, edge):
            self.put(table, dict(zip(FIELDS[table], key, strict=True)), action, list(params.values()))

    def delete_host(self, job: int, host: str) -> None:
        if self.has("host"):
            self.take("host", self.host_key(job, host))
            return
        address = ip_number(address_of(host))
        for table, key in list(self.held):
            if table in HOST_PIECES and dict(key)["address"] == address:
                self.take(table, self.held[table, key])

    def host_key(self, job: int, host: str) -> Match:
        return {"job_id": job, "address": ip_number(address_of(host))}

    def has(self, table: str) -> bool:
        return any(t.preamble.alias == table for t in self.controller.info.tables)

    def set_group(self, group: int, ports: Sequence[str]) -> None:
        self.set_copies(group, [(port, port) for port in ports])

    def set_copies(self, group: int, copies: Sequence[tuple[str, str]]) -> None:
        """A group whose copies leave at a port for a host."""
        for instance, (port, host) in enumerate(copies, 1):
            match: Match = {"multicast_group": group, "egress_port": self.port_number(port), "instance": instance}
            mac, ip = int.from_bytes(mac_of(host), "big"), ip_number(address_of(host))
            self.put("replica", match, "rewrite", [mac, ip, 0])
        self.controller.group(group, [self.port_number(port) for port, _ in copies])

    def counters(self, job: int) -> dict[str, int]:
        """Counters of a job that are not 0."""
        return self.controller.counters(job).get(job, {})
