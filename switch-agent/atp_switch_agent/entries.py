# SPDX-License-Identifier: Apache-2.0
"""What a switch holds, as values without protobuf: table entries and multicast groups by name and number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Match = int | tuple[int, int]
Key = tuple[str, tuple[Match, ...]]

JOB, REGION, ADMISSION, TRANSIT, PS_PORT = "job", "region", "admission", "transit", "ps_port"
REPLICA, GROUP = "replica", "group"
# Who the hosts of a job are: one table of the software switch, and the same in pieces in a P4 program, where no table
# of the first stage can read what another one found.
HOST = "host"
SOURCE, DESTINATION, PLACE, OWN, GUARDED = "source", "destination", "place", "own", "guarded"
HOST_PIECES = (SOURCE, DESTINATION, PLACE, OWN)
GUARD = (HOST, *HOST_PIECES, GUARDED)
# Tables that P4 programs have and the software switch has not: it leaves ordinary traffic to the host, and takes the
# rest from its command line. `ecn_threshold` and `stale_time` have no key, only a default action.
L2, ECN, CONGESTION, STALE = "l2_forward", "ecn_threshold", "congestion", "stale_time"

# Match fields and action of each table, as in p4/p4info.txtpb. `group` is the replication engine's.
FIELDS: Mapping[str, tuple[str, ...]] = {
    JOB: ("job_id",),
    REGION: ("job_id", "aggregator_index"),
    ADMISSION: ("job_id", "ingress_port", "edge", "bitmap"),
    TRANSIT: ("job_id", "ingress_port", "bitmap1"),
    PS_PORT: ("job_id", "ingress_port"),
    REPLICA: ("multicast_group", "egress_port", "instance"),
    HOST: ("job_id", "address"),
    SOURCE: ("address",),
    DESTINATION: ("address",),
    PLACE: ("address", "bitmap1"),
    OWN: ("address", "bitmap0", "edge"),
    GUARDED: ("job_id",),
}
ACTIONS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    JOB: ("set_job", ("values", "full0", "full1", "group")),
    REGION: ("in_region", ()),
    ADMISSION: ("admit", ()),
    TRANSIT: ("allow", ("mask0",)),
    PS_PORT: ("from_ps", ()),
    REPLICA: ("rewrite", ("dst_mac", "dst_ip", "dst_port")),
    HOST: ("set_host", ("port", "mark", "role", "bitmap0", "bitmap1", "edge")),
    SOURCE: ("set_source", ("server", "port", "job_id")),
    DESTINATION: ("set_destination", ("server", "job_id")),
    PLACE: ("in_place", ()),
    OWN: ("own_bits", ()),
    GUARDED: ("guard", ()),
}
OPTIONAL = frozenset(GUARD)
"""Tables that a pipeline may lack."""
# The same of those, where entries may choose between actions.
FORWARDING_FIELDS: Mapping[str, tuple[str, ...]] = {
    L2: ("dst_mac",),
    ECN: (),
    CONGESTION: ("verdict", "queue_depth"),
    STALE: (),
}
FORWARDING_ACTIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    L2: {"forward": ("port",), "flood": ("group",), "discard": ()},
    ECN: {"set_ecn_threshold": ("packets",)},
    CONGESTION: {"mark_congestion": ()},
    STALE: {"set_stale_time": ("microseconds",)},
}


@dataclass(frozen=True)
class Entry:
    """One entry.

    `match`: ints, a range is (low, high) inclusive; empty: the default action of the table. `params`: the action's;
    of a group: port, instance, port, instance... in order. `metadata` is the owner's mark, on table `job` alone.
    `action` is empty where the table has only one.
    """

    table: str
    match: tuple[Match, ...]
    params: tuple[int, ...] = ()
    metadata: bytes = b""
    action: str = ""

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
