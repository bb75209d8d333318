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
from collections.abc import Mapping

from .model import Job, JobStatus, Switch


def seal(job: Job, status: JobStatus) -> str:
    """Digest of what the job holds on its switches, with what of its spec decides how much that is."""
    told = [
        job.uid,
        status.job_id,
        status.epoch,
        list(status.switches),
        [[region.start, region.size] for region in status.regions],
        status.values,
        status.placement.to_dict() if status.placement else None,
        status.admitted_time is not None,
        [job.spec.mode, job.spec.request, job.spec.workers, job.spec.servers],
    ]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]


def doubt(job: Job, switches: Mapping[str, Switch]) -> str:
    """Why the job's status is not taken for the operator's own; empty when it is, or claims nothing.

    A switch that does not exist is not asked: nothing can be programmed there. An entry without seals is of an earlier
    version of the operator; its job ID, UID and epoch count alone.
    """
    if job.distrust:
        return job.distrust
    status = job.status
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
