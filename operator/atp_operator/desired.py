# SPDX-License-Identifier: Apache-2.0
"""What each switch must hold, and what each sidecar is told; both from job statuses alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

from atp_api import wire
from atp_api.switchagent.v1alpha1 import switchagent_pb2 as pb

from .model import ACTIVE_PHASES, HOST_ONLY_JOB_ID, Job, Placement, Seat, Switch

MAX_WINDOW = 1024
"""Packets of one worker on their way."""
MAX_OPEN = 4 * MAX_WINDOW
"""Sequences of one worker that are open: beyond the window, so that a lost packet does not stop those behind it."""
ANSWERS_BYTES = 16 << 20
"""What a parameter server may keep of answers; it keeps four for each slot of the index table."""


def desired_jobs(switch: Switch, jobs: Iterable[Job]) -> list[pb.Job]:
    """The jobs that one switch must hold, in the order of their job IDs."""
    result = []
    for job in jobs:
        status = job.status
        if (
            job.deleting is None
            and status.holds_switches
            and status.placement is not None
            and switch.name in status.placement.switches
        ):
            result.append(_job(switch, job, status.placement))
    return sorted(result, key=lambda entry: (entry.job_id, entry.uid))


def desired_guards(switch: Switch, jobs: Iterable[Job]) -> list[pb.Guard]:
    """The hosts of every placed job that has a pod below this switch or a level on it, in the order of their names.

    Also of jobs without aggregators: what their pods may send, and who may send to them, does not hang on that.
    """
    result = []
    for job in jobs:
        status, placement = job.status, job.status.placement
        if job.deleting is not None or placement is None or status.phase not in ACTIVE_PHASES:
            continue
        nodes = {seat.node for seat in placement.seats} | {server.node for server in placement.servers}
        if switch.name in placement.switches or not nodes.isdisjoint(switch.nodes):
            result.append(_guard(switch, job, placement))
    return sorted(result, key=lambda guard: (guard.name, guard.uid))


def _guard(switch: Switch, job: Job, placement: Placement) -> pb.Guard:
    workers = [
        pb.Host(endpoint=_endpoint(switch, s.address, s.node), bit=s.bit, rack=s.rack, edge=s.edge)
        for s in placement.seats
    ]
    servers = [pb.Host(endpoint=_endpoint(switch, s.address, s.node), parameter_server=True) for s in placement.servers]
    return pb.Guard(
        uid=job.uid,
        name=job.key,
        epoch=job.status.epoch,
        job_id=job.status.job_id or HOST_ONLY_JOB_ID,
        hosts=[*workers, *servers],
    )


def _endpoint(switch: Switch, address: str, node: str) -> pb.Endpoint:
    return pb.Endpoint(address=address, node=node, port=switch.ports.get(node, 0))


def _job(switch: Switch, job: Job, placement: Placement) -> pb.Job:
    status = job.status
    members, uplinks = [], dict[int, list[Seat]]()
    for seat in placement.seats:
        if seat.switch == switch.name:
            members.append(
                pb.Member(
                    rank=seat.rank,
                    endpoint=_endpoint(switch, seat.address, seat.node),
                    bit=seat.rack if seat.edge else seat.bit,
                    edge=seat.edge,
                )
            )
        elif placement.level1 == switch.name:
            uplinks.setdefault(seat.rack, []).append(seat)
    racks = [
        # The rack's ACK copy goes to its first worker; the rack's own switch replicates it further.
        pb.Rack(bit=rack, workers=len(seats), uplink=_endpoint(switch, seats[0].address, seats[0].node))
        for rack, seats in sorted(uplinks.items())
    ]
    return pb.Job(
        job_id=status.job_id or 0,
        epoch=status.epoch,
        uid=job.uid,
        name=job.key,
        values=status.values or wire.VALUES_BASE,
        regions=[pb.Region(start=r.start, size=r.size) for r in status.regions],
        members=members,
        racks=racks,
        parameter_servers=[_endpoint(switch, s.address, s.node) for s in placement.servers],
        multicast_group=status.job_id or 0,
    )


def assignment_digest(text: str) -> str:
    """What the operator keeps of an assignment that it has seen in a pod."""
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _key(job: Job, placement: Placement) -> str:
    """The epoch's key for the tags of raw packets (docs/protocol.md, "Tags"), 16 bytes in hexadecimal.

    From the UIDs of its pods: random numbers that the API server draws, new in each epoch, the same whenever they are
    asked for, and told to nobody but those who may read the pods.
    """
    uids = [seat.pod_uid for seat in placement.seats] + [server.pod_uid for server in placement.servers]
    text = "\n".join(["atp raw packets", job.uid, str(job.status.epoch), *uids])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def assignments(job: Job) -> Mapping[str, str]:
    """The assignment (JSON text) of every pod of a running job, by pod UID."""
    status = job.status
    placement = status.placement
    if status.phase != "Running" or placement is None:
        return {}
    # A window larger than the job's aggregators would only collide with itself. The index table (slot = sequence mod P)
    # is at least the largest window, and a power of two so that slots stay continuous where the 24-bit sequence wraps.
    # So is the number of shards: with P at least that number, a slot and its index belong to one shard. Up to P
    # sequences may be open at once.
    values = status.values or wire.VALUES_BASE
    table = sum(region.size for region in status.regions)
    window = min(MAX_WINDOW, table) if table else MAX_WINDOW
    affordable = min(MAX_OPEN, ANSWERS_BYTES // (4 * 4 * values))
    opened = max(window, min(table or MAX_OPEN, 1 << (affordable.bit_length() - 1)))
    slots = max(1 << (opened - 1).bit_length(), len(placement.servers))
    common: dict[str, object] = {
        "apiVersion": "atp.dev/v1alpha1",
        "job": job.key,
        "uid": job.uid,
        "epoch": status.epoch,
        "revision": status.revision,
        "jobId": status.job_id,
        "mode": status.mode,
        "valuesPerPacket": values,
        "scale": job.spec.scale,
        "port": wire.UDP_PORT,
        "regions": [region.to_dict() for region in status.regions],
        "indexTableSize": slots,
        "maxWindow": window,
        "stallTimeoutSeconds": job.spec.stall_timeout,
        "workers": [
            {"rank": s.rank, "address": s.address, "rack": s.rack, "bit": s.bit, "edge": s.edge}
            for s in placement.seats
        ],
        "parameterServers": [{"shard": s.shard, "address": s.address} for s in placement.servers],
        "switchAddress": None,
    }
    if placement.tagged:
        common["key"] = _key(job, placement)
    if placement.addend_limit is not None:
        common["addendLimit"] = placement.addend_limit
    result = {
        seat.pod_uid: json.dumps({**common, "role": "worker", "rank": seat.rank}, separators=(",", ":"))
        for seat in placement.seats
    }
    for server in placement.servers:
        text = json.dumps({**common, "role": "parameterServer", "rank": server.shard}, separators=(",", ":"))
        result[server.pod_uid] = text
    return result
