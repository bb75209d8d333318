# SPDX-License-Identifier: Apache-2.0
"""What ends an epoch early, and the epoch after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .. import ROLE_PARAMETER_SERVER, ROLE_WORKER, reasons
from ..allocation import Refusal
from ..model import Job, JobStatus, Pod
from ..pods import server_name, worker_name
from .ending import end
from .network import choose_network, fell_back, no_switch, take
from .plan import JobPlan, World, live


def find_failure(job: Job, status: JobStatus, current: Mapping[str, Pod]) -> tuple[str, str] | None:
    """(reason, message) of what ended this epoch early, or None."""
    for pod in sorted(current.values(), key=lambda p: (p.role, p.rank)):
        if pod.phase == "Failed":
            kind = reasons.WORKER_FAILED if pod.role == ROLE_WORKER else reasons.PARAMETER_SERVER_FAILED
            return kind, f"pod {pod.name}: {pod.failure}"
        if pod.role == ROLE_PARAMETER_SERVER and pod.phase == "Succeeded":
            return reasons.PARAMETER_SERVER_FAILED, f"pod {pod.name} ended before the workers"
        if pod.phase == "Succeeded" and status.placement is None:
            return reasons.WORKER_FAILED, f"pod {pod.name} ended before training began"
    if status.placement is not None:
        expected = [(worker_name(job.name, s.rank), s.pod_uid) for s in status.placement.seats]
        expected += [(server_name(job.name, s.shard), s.pod_uid) for s in status.placement.servers]
        for name, uid in expected:
            found = current.get(name)
            if found is None or found.uid != uid:
                return reasons.POD_LOST, f"pod {name} is gone (deleted, evicted or replaced)"
    return None


def restart(plan: JobPlan, reason: str, message: str, pods: Sequence[Pod], world: World) -> None:
    """A new epoch with a new job ID, or the end when there were enough."""
    job, status = plan.job, plan.status
    if status.retries >= job.spec.backoff_limit:
        text = f"{message}; {status.retries} of {job.spec.backoff_limit} restarts used (spec.backoffLimit)"
        end(plan, "Failed", reasons.BACKOFF_LIMIT_EXCEEDED if job.spec.backoff_limit else reason, text, pods, world)
        return
    old = status.epoch
    retries = status.retries + 1
    world.ledger.release(job.uid)
    choice = choose_network(job, world, patient=False)
    if isinstance(choice, Refusal):
        choice = no_switch(job, choice)  # it holds its quota; a running job does not go back to the queue
    take(plan, choice, world, epoch=old + 1)
    status.retries = retries
    delay = min(300.0, world.limits.restart_backoff * 2 ** (retries - 1))
    status.not_before = world.now + delay
    status.ready = status.succeeded = status.failed = 0
    plan.delete_pods = live(pods)
    text = f"{message}: epoch {status.epoch} begins in {delay:.0f} s (restart {retries} of {job.spec.backoff_limit})"
    plan.now_is("Admitted", reason, text)
    plan.tell("Warning", reason, text)
    if choice.fallback:
        fell_back(plan, choice.fallback, world.now)
    plan.wake(status.not_before)
