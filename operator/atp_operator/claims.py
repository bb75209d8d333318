# SPDX-License-Identifier: Apache-2.0
"""Whether what a job's status says it holds is what the operator gave it.

A status is in a tenant's namespace: whoever may write `atpjobs/status` there writes what he likes. The ledger of a
switch (`ATPSwitch.status.jobs`) is cluster-wide and out of a tenant's reach. For every job ID it has the seals of the
statuses that the operator gave the job with it: a digest of all that makes switches do something. It is written before
the status itself, so a status of the operator's own always finds its seal; one that finds none is somebody else's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from .model import Job, JobStatus, Pod, Seat, Server, Switch


def seal(job: Job, status: JobStatus) -> str:
    """Digest of what the job holds on its switches, with what of its spec decides how much that is."""
    told = [
        job.uid,
        status.job_id,
        status.epoch,
        list(status.switches),
        [[region.start, region.size, *(["floor"] if region.floor else [])] for region in status.regions],
        status.values,
        status.placement.to_dict() if status.placement else None,
        status.admitted_time is not None,
        # Without a floor as before there were any: a job that runs keeps its seal over an upgrade.
        [job.spec.mode, job.spec.request, job.spec.workers, job.spec.servers, *filter(None, [job.spec.floor])],
    ]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]


def _hosts(job: Job) -> dict[str, tuple[str, str]]:
    """(address, node) of all that the placement names, by pod UID."""
    placement = job.status.placement
    places: tuple[Seat | Server, ...] = (*placement.seats, *placement.servers) if placement else ()
    return {place.pod_uid: (place.address, place.node) for place in places}


def vouched(job: Job, switches: Mapping[str, Switch], pods: Sequence[Pod]) -> bool:
    """True when the hosts of the job's placement are its own, for a job that `doubt` has nothing against.

    Either a ledger has the seal, or all of them are pods of the job, at the addresses that the kubelet gave them.
    """
    if job.status.holds_switches and any(name in switches for name in job.status.switches):
        return True
    live = {pod.uid: (pod.address, pod.node) for pod in pods}
    return all(live.get(uid) == place for uid, place in _hosts(job).items())


def doubt(job: Job, switches: Mapping[str, Switch], pods: Sequence[Pod] = ()) -> str:
    """Why the job's status is not taken for the operator's own; empty when it is, or claims nothing.

    A switch that does not exist is not asked: nothing can be programmed there. An entry without seals is of an earlier
    version of the operator; its job ID, UID and epoch count alone. `pods`: of the job.
    """
    if job.distrust:
        return job.distrust
    status = job.status
    hosts = _hosts(job)
    for pod in pods:
        if (
            pod.address
            and pod.phase == "Running"
            and hosts.get(pod.uid, (pod.address, pod.node)) != (pod.address, pod.node)
        ):
            return f"the status has another place for pod {pod.name} than the pod itself"
    if not status.holds_switches or job.deleting is not None:
        return ""
    named = {*status.switches, *(status.placement.switches if status.placement else ())}
    own = seal(job, status)
    for name in sorted(named & switches.keys()):
        entry = next((h for h in switches[name].holders if h.job_id == status.job_id and h.uid == job.uid), None)
        if entry is None or entry.epoch != status.epoch:
            return f"the operator did not give it job ID {status.job_id} on switch {name} in epoch {status.epoch}"
        if entry.seals and own not in entry.seals:
            return f"what the status says of switch {name} is not what the operator wrote there"
    return ""
