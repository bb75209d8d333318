# SPDX-License-Identifier: Apache-2.0
"""What a switch holds, as values without protobuf: table entries and multicast groups by name and number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Match = int | tuple[int, int]
Key = tuple[str, tuple[Match, ...]]

JOB, REGION, ADMISSION, TRANSIT, PS_PORT = "job", "region", "admission", "transit", "ps_port"
REPLICA, GROUP = "replica", "group"

# Match fields and action of each table, as in p4/p4info.txtpb. `group` is the replication engine's.
FIELDS: Mapping[str, tuple[str, ...]] = {
    JOB: ("job_id",),
    REGION: ("job_id", "aggregator_index"),
    ADMISSION: ("job_id", "ingress_port", "edge", "bitmap"),
    TRANSIT: ("job_id", "ingress_port", "bitmap1"),
    PS_PORT: ("job_id", "ingress_port"),
    REPLICA: ("multicast_group", "egress_port", "instance"),
}
ACTIONS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    JOB: ("set_job", ("values", "full0", "full1", "group")),
    REGION: ("in_region", ()),
    ADMISSION: ("admit", ()),
    TRANSIT: ("allow", ("mask0",)),
    PS_PORT: ("from_ps", ()),
    REPLICA: ("rewrite", ("dst_mac", "dst_ip", "dst_port")),
}


@dataclass(frozen=True)
class Entry:
    """One entry.

    `match`: ints, a range is (low, high) inclusive. `params`: the action's; of a group: port, instance, port,
    instance... in order. `metadata` is the owner's mark, on table `job` alone.
    """

    table: str
    match: tuple[Match, ...]
    params: tuple[int, ...] = ()
    metadata: bytes = b""

    @property
    def key(self) -> Key:
        """What identifies the entry on the switch."""
        return (self.table, self.match)

    def number(self, index: int) -> int:
        """Match value of an exact field."""
        value = self.match[index]
        assert isinstance(value, int)
        return value


State = Mapping[Key, Entry]


def state(entries: Iterable[Entry]) -> dict[Key, Entry]:
    """Entries by key. ValueError if two of them share a key."""
    result: dict[Key, Entry] = {}
    for entry in entries:
        if entry.key in result:
            raise ValueError(f"entry given twice: {entry.key}")
        result[entry.key] = entry
    return result
