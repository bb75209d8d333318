# SPDX-License-Identifier: Apache-2.0
"""One job's next step, from what is there now. Pure: the time is an argument, the result says what to do.

A step never assumes that an earlier one happened: it looks at status, pods and switches, so a restart of the operator
at any point changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from atp_api import wire

from . import ANNOTATION_ASSIGNMENT, ANNOTATION_REFRESH, ROLE_PARAMETER_SERVER, ROLE_WORKER, desired
from .allocation import Allocation, Ledger, Refusal, addend_limit
from .conditions import PLAN_FAILED, STALLED, STATUS_REJECTED, WRITE_FAILED, drop_condition, set_condition
from .injection import SidecarConfig
from .model import (
    HOST_ONLY_JOB_ID,
    SCALE_AUTO,
    TERMINAL_PHASES,
    Event,
    Job,
    JobStatus,
    Limits,
    Placement,
    Pod,
    Region,
    Switch,
    parse_time,
    rfc3339,
)
from .pods import Wanted, server_name, wanted_objects, worker_name
from .quota import QuotaBook
from .topology import Located, host_only, place

ENDED = ("Succeeded", "Failed")
"""Phases of a pod that runs no more."""


@dataclass
class JobPlan:
    """What is to be done for one job, in this order: finalizer, status, objects, annotations, events, release."""

    job: Job
    status: JobStatus
    add_finalizer: bool = False
    create: list[Wanted] = field(default_factory=list)
    delete_pods: list[Pod] = field(default_factory=list)
    annotate: dict[str, dict[str, str]] = field(default_factory=dict)  # pod name -> annotations
    events: list[Event] = field(default_factory=list)
    remove_finalizer: bool = False
    delete_job: bool = False
    wake_at: float | None = None
    held_back: bool = False  # nothing is done for it in this pass

    @property
    def moves(self) -> bool:
        """True when what the job holds of quota and switches changes: the ledgers say so already, its status must."""
        old, new = self.job.status, self.status
        held = (old.job_id, old.switches, old.regions) if old.holds_switches else None
        holds = (new.job_id, new.switches, new.regions) if new.holds_switches else None
        return old.admitted != new.admitted or held != holds

    @property
    def acts(self) -> bool:
        """True when there is something to do beside writing the status."""
        return bool(
            self.add_finalizer
            or self.create
            or self.delete_pods
            or self.annotate
            or self.events
            or self.remove_finalizer
            or self.delete_job
        )

    def wake(self, at: float) -> None:
        """Ask for another look at a time, Unix seconds."""
        self.wake_at = at if self.wake_at is None else min(self.wake_at, at)

    def tell(self, kind: str, reason: str, message: str) -> None:
        """An event."""
        self.events.append(Event(kind, reason, message))

    def condition(self, kind: str, status: bool | None, reason: str, message: str, now: float) -> None:
        """Set a condition of the new status."""
        set_condition(self.status.conditions, kind, status, reason, message, self.job.generation, now)

    def now_is(self, phase: str, reason: str, message: str) -> None:
        """Set the phase with its reason."""
        self.status.phase, self.status.reason, self.status.message = phase, reason, message


@dataclass
class World:
    """What a step may look at beside its own job; the ledger and the quota book change as jobs take and give back."""

    switches: Mapping[str, Switch]
    ledger: Ledger
    quotas: QuotaBook
    sidecar: SidecarConfig
    limits: Limits
    now: float
    create_errors: Mapping[str, str] = field(default_factory=dict)  # by ATPJob uid: why its pods could not be made
    refused: dict[tuple[object, ...], Refusal] = field(default_factory=dict)  # see `admit`


def hold_back(job: Job, why: str, reason: str, world: World, until: float | None) -> JobPlan:
    """The plan for a job that failed: it keeps what it holds, and says why nothing is done."""
    plan = JobPlan(job, job.status.copy(), held_back=True)
    plan.condition(STALLED, True, reason, why, world.now)
    if until is not None:
        plan.wake(until)
    return plan


def step(job: Job, pods: Sequence[Pod], world: World) -> JobPlan:
    """The next step of a job, all but its admission from the queue (see `admit`)."""
    plan = JobPlan(job, job.status.copy())
    status = plan.status
    status.observed_generation = job.generation
    stalled = status.condition(STALLED)
    if stalled and stalled["reason"] in (WRITE_FAILED, PLAN_FAILED):
        drop_condition(status.conditions, STALLED)
    if job.distrust and job.deleting is None:
        _begin_again(plan, pods, world)
        return plan
    if status.admitted_time is not None and status.scale is None:
        status.scale = _scale_text(job)  # admitted by an earlier version
    _count(plan, pods)
    if job.deleting is not None:
        _delete(plan, pods, world)
    elif status.phase in TERMINAL_PHASES:
        _finished(plan, pods, world)
    elif job.spec.suspend:
        _suspend(plan, pods, world)
    elif status.phase == "Suspended":
        plan.now_is("Pending", "Resumed", "waits in the queue again")
    elif status.admitted:
        _advance(plan, pods, world)
    return plan


def _begin_again(plan: JobPlan, pods: Sequence[Pod], world: World) -> None:
    """Of a job whose status is not the operator's own nothing is believed: it gives all back and queues again.

    Its epoch goes on from the highest that a ledger or a pod knows, so that no pod of before is taken for a new one.
    """
    job, status = plan.job, plan.status
    known = [holder.epoch for s in world.switches.values() for holder in s.holders if holder.uid == job.uid]
    status.epoch = max([0, *known, *(pod.epoch for pod in pods)])
    plan.delete_pods += _live(pods)
    text = (
        f"{job.distrust}: only the operator writes an ATPJob's status. The job gives everything back and begins again"
    )
    plan.now_is("Pending", STATUS_REJECTED, text)
    plan.condition(STALLED, True, STATUS_REJECTED, text, world.now)
    plan.condition("Admitted", False, STATUS_REJECTED, text, world.now)
    plan.tell("Warning", STATUS_REJECTED, text)
    plan.wake(world.now)


def _scale_text(job: Job) -> str:
    return str((job.raw.get("spec") or {}).get("scale", SCALE_AUTO))


def waits_in_queue(plan: JobPlan) -> bool:
    """True when the job wants to be admitted."""
    return (
        not plan.held_back
        and not plan.job.distrust
        and plan.job.deleting is None
        and plan.status.phase == "Pending"
        and not plan.job.spec.suspend
    )


def _count(plan: JobPlan, pods: Sequence[Pod]) -> None:
    workers = [p for p in pods if p.role == ROLE_WORKER and p.epoch == plan.status.epoch]
    if plan.status.phase in TERMINAL_PHASES and not workers:
        return  # the pods were deleted since; what was counted stays
    plan.status.ready = sum(p.ready and not p.deleting for p in workers)
    plan.status.succeeded = sum(p.phase == "Succeeded" for p in workers)
    plan.status.failed = sum(p.phase == "Failed" for p in workers)


def _live(pods: Sequence[Pod]) -> list[Pod]:
    return [p for p in pods if not p.deleting]


def _release(plan: JobPlan, world: World) -> None:
    """Give back switches and quota; mode, job ID and epoch stay readable in a finished job."""
    world.ledger.release(plan.job.uid)
    world.quotas.leave(plan.job)


def _delete(plan: JobPlan, pods: Sequence[Pod], world: World) -> None:
    _release(plan, world)
    if not plan.job.finalized:
        return
    plan.delete_pods += _live(pods)
    assert plan.job.deleting is not None
    holding = [s.name for s in world.switches.values() if s.view.reachable and plan.job.uid in s.view.jobs]
    overdue = world.now >= plan.job.deleting + world.limits.release_wait
    if pods and not overdue:
        plan.status.message = f"waits for {len(pods)} pods to end"
    elif holding and not overdue:
        plan.status.message = f"waits for switches to release the job: {', '.join(holding)}"
    else:
        # A switch that is away keeps nothing for long: its desired state has no such job when it comes back.
        plan.remove_finalizer = True
        return
    plan.wake(plan.job.deleting + world.limits.release_wait)


def _finished(plan: JobPlan, pods: Sequence[Pod], world: World) -> None:
    _release(plan, world)
    plan.delete_pods += [p for p in _live(pods) if p.role == ROLE_PARAMETER_SERVER or p.phase not in ENDED]
    if plan.job.spec.ttl is not None and plan.status.completion_time is not None:
        at = plan.status.completion_time + plan.job.spec.ttl
        if world.now >= at:
            plan.delete_job = True
        else:
            plan.wake(at)


def _suspend(plan: JobPlan, pods: Sequence[Pod], world: World) -> None:
    plan.delete_pods += _live(pods)
    if plan.status.phase == "Suspended":
        return
    _release(plan, world)
    _forget_epoch(plan.status)
    plan.status.admitted_time = plan.status.scale = None
    plan.now_is("Suspended", "Suspended", "spec.suspend is true: pods are deleted, switches and quota given back")
    plan.condition("Admitted", False, "Suspended", plan.status.message, world.now)
    for kind in ("PodsReady", "SwitchProgrammed", "NetworkAggregation"):
        drop_condition(plan.status.conditions, kind)
    plan.tell("Normal", "Suspended", plan.status.message)


def _forget_epoch(status: JobStatus) -> None:
    status.job_id = None
    status.switches, status.regions, status.values = (), (), None
    status.placement = None
    status.mode = None
    status.placed_time = status.not_before = None
    status.aggregation = {}


# --- admission -----------------------------------------------------------------------------------------------------


SHAPED = frozenset(
    {"QuotaExceeded", "AggregatorsExhausted", "JobIDsExhausted", "NoCommonRange", "ValuesUnsupported", "FanInExceeded"}
)
"""Refusals that every job of the same namespace and the same wants gets: within a plan, room only becomes less."""


def admit(plan: JobPlan, world: World) -> bool:
    """Let a job of the queue in when quota and switches have room, or say why not; True when it was let in.

    A job without our finalizer gets that first, and a place in the next plan: an object that takes no finalizer never
    gets into a switch's ledger.
    """
    job, now = plan.job, world.now
    if job.problems:
        _pending(plan, "InvalidSpec", "; ".join(job.problems), now)
        return False
    spec = job.spec
    shape = (job.namespace, spec.workers, spec.mode, spec.switches, spec.request, spec.floor, spec.values)
    refusal = world.refused.get(shape) or world.quotas.refuse_job(job)
    if refusal is None:
        choice = _choose_network(job, world, patient=True)
        if isinstance(choice, _Network) and not job.finalized:
            plan.add_finalizer = True
            _pending(plan, "Admitting", "there is room: admitted once the object carries the operator's finalizer", now)
            plan.wake(now)
            return True
        if isinstance(choice, _Network):
            _take(plan, choice, world, epoch=plan.status.epoch + 1)
            plan.status.admitted_time, plan.status.scale = now, _scale_text(job)
            drop_condition(plan.status.conditions, STALLED)
            where = f"on {', '.join(choice.switches)}" if choice.switches else "without a switch"
            plan.now_is("Admitted", "Admitted", f"admitted in mode {plan.status.mode} {where}")
            plan.condition("Admitted", True, "Admitted", plan.status.message, now)
            plan.tell("Normal", "Admitted", plan.status.message)
            if choice.fallback:
                _fell_back(plan, choice.fallback, now)
            world.quotas.admit(job)
            plan.wake(now)
            return True
        refusal = choice
        if refusal.reason == "WaitingForSwitch":
            plan.wake(now + 1.0)
    if refusal.reason in SHAPED:
        world.refused[shape] = refusal
    _pending(plan, refusal.reason, refusal.message, now)
    return False


def put_off(plan: JobPlan, world: World) -> None:
    """A job that has its turn in one of the next plans: each lets in a few, of all namespaces in turn."""
    if plan.status.reason in ("", "Resumed"):
        _pending(plan, "Queued", "waits for its turn", world.now)
    plan.wake(world.now)


def _pending(plan: JobPlan, reason: str, message: str, now: float) -> None:
    if plan.status.reason != reason:
        plan.tell("Warning" if reason in ("InvalidSpec", "UnknownSwitch") else "Normal", reason, message)
    plan.now_is("Pending", reason, message)
    plan.condition("Admitted", False, reason, message, now)


@dataclass(frozen=True)
class _Network:
    switches: tuple[str, ...]
    job_id: int
    regions: tuple[Region, ...]
    values: int
    mode: str
    fallback: Refusal | None = None


def _no_switch(job: Job, fallback: Refusal | None) -> _Network:
    return _Network((), HOST_ONLY_JOB_ID, (), job.spec.values or wire.VALUES_LARGE, "HostOnly", fallback)


def _allocate(names: tuple[str, ...], job: Job, world: World) -> Allocation | Refusal:
    spec = job.spec
    return world.ledger.allocate(names, spec.mode, spec.request, spec.values, job.uid, spec.floor)


def _choose_network(job: Job, world: World, *, patient: bool) -> _Network | Refusal:
    """Switches that the job may hold before its pods have nodes: all allowed ones with room."""
    if job.spec.mode == "HostOnly":
        return _no_switch(job, None)
    unknown = [name for name in job.spec.switches if name not in world.switches]
    if unknown:
        return Refusal(
            "UnknownSwitch",
            f"spec.switches names {', '.join(unknown)}, which does not exist; there are: "
            f"{', '.join(sorted(world.switches)) or 'none at all'}. Create it or change the list",
        )
    allowed = job.spec.switches or tuple(sorted(world.switches))
    unasked = _unasked(job, world)
    if unasked:
        return Refusal("WaitingForSwitch", f"waits for a first word from switch {', '.join(unasked)}")
    usable = [name for name in allowed if world.switches[name].usable]
    away = [name for name in allowed if name not in usable]
    if away and patient and (job.spec.switches or not usable):
        since = max(job.created, *(world.switches[name].view.since for name in away))
        if world.now < since + world.limits.switch_wait:
            return Refusal(
                "WaitingForSwitch", f"waits for switch {', '.join(away)}: {_why_away(world.switches[away[0]])}"
            )
    if not allowed and patient and world.now < job.created + min(world.limits.switch_wait, 10.0):
        return Refusal("WaitingForSwitch", "there is no ATPSwitch yet; the job starts without one soon")
    if not usable:
        text = "; ".join(f"{name}: {_why_away(world.switches[name])}" for name in allowed) or "there is no ATPSwitch"
        return _no_switch(job, Refusal("NoUsableSwitch", text))

    most = sum(min(wire.FAN_IN_MAX, c.fan_in_max) for n in usable if (c := world.switches[n].capacity))
    if job.spec.workers > most:
        return Refusal(
            "FanInExceeded",
            f"{job.spec.workers} workers need a fan-in of {job.spec.workers}: {most} is what "
            f"{'switch' if len(usable) == 1 else 'switches'} {', '.join(usable)} can do (32 a rack); use more "
            f"switches, fewer workers, or mode HostOnly",
        )
    fitting, refusals = [], []
    for name in usable:
        refusal = world.quotas.refuse_switch(job, name)
        if refusal is None:
            one = _allocate((name,), job, world)
            refusal = one if isinstance(one, Refusal) else None
        if refusal is None:
            fitting.append(name)
        else:
            refusals.append(refusal)
    # A list in the spec means "on these"; without one, switches without room are simply not used.
    if not fitting or (job.spec.switches and refusals):
        return refusals[0]
    chosen = tuple(fitting)
    allocation = _allocate(chosen, job, world)
    if isinstance(allocation, Refusal):
        return allocation
    return _Network(chosen, allocation.job_id, allocation.regions, allocation.values, job.spec.mode)


def _unasked(job: Job, world: World) -> list[str]:
    """Switches the job may use whose agents were not asked yet, as after a restart of the operator.

    Nothing may be concluded from their silence; the first answer, or failure, comes within seconds.
    """
    if job.spec.mode == "HostOnly":
        return []
    allowed = job.spec.switches or tuple(sorted(world.switches))
    return [name for name in allowed if name in world.switches and not world.switches[name].view.known]


def _why_away(switch: Switch) -> str:
    return switch.fault[1] if switch.fault else "its agent answers"


def _take(plan: JobPlan, network: _Network, world: World, epoch: int) -> None:
    status = plan.status
    _forget_epoch(status)
    status.epoch = epoch
    status.revision = 1
    status.mode = network.mode
    status.job_id = network.job_id
    status.switches = network.switches
    status.regions = network.regions
    status.values = network.values
    status.epoch_time = world.now
    world.ledger.release(plan.job.uid)
    if network.switches:
        world.ledger.take(
            plan.job.uid,
            network.switches,
            network.job_id,
            status.regions,
            network.mode == "Reserved",
            plan.job.spec.request,
        )
    for kind in ("PodsReady", "SwitchProgrammed", "NetworkAggregation"):
        drop_condition(status.conditions, kind)


def _fell_back(plan: JobPlan, refusal: Refusal, now: float) -> None:
    text = f"the parameter server sums everything: {refusal.message}"
    plan.condition("NetworkAggregation", False, refusal.reason, text, now)
    plan.tell("Warning", "HostOnly", f"runs HostOnly, {text}")


# --- an admitted job -----------------------------------------------------------------------------------------------


def _advance(plan: JobPlan, pods: Sequence[Pod], world: World) -> None:
    job, status = plan.job, plan.status
    plan.add_finalizer = not job.finalized
    current = {p.name: p for p in pods if p.epoch == status.epoch and not p.deleting}
    stale = [p for p in pods if p.epoch != status.epoch]
    plan.delete_pods += _live(stale)

    if status.phase == "Running" and status.succeeded == job.spec.workers:
        _end(plan, "Succeeded", "AllWorkersSucceeded", f"all workers succeeded ({job.spec.workers})", pods, world)
        return
    deadline = (status.start_time or world.now) + job.spec.deadline if job.spec.deadline else None
    if deadline is not None and status.start_time is not None:
        if world.now >= deadline:
            text = f"ran longer than spec.activeDeadlineSeconds ({job.spec.deadline} s)"
            _end(plan, "Failed", "DeadlineExceeded", text, pods, world)
            return
        plan.wake(deadline)
    failure = _find_failure(job, status, current)
    if failure and _unasked(job, world):
        plan.wake(world.now + 1.0)
        return
    if failure:
        _restart(plan, failure[0], failure[1], pods, world)
        return
    if status.not_before is not None and world.now < status.not_before:
        plan.wake(status.not_before)
        return
    if status.placement is None and stale:
        # A trainer of the old epoch that still runs would meet those of the new one, and break them.
        text = f"epoch {status.epoch} begins when the last {len(stale)} pods of the one before have ended"
        plan.now_is("Admitted", "WaitingForOldPods", text)
        return
    if status.placement is None:
        _gather(plan, current, {p.name for p in pods} - set(current), world)
    if status.placement is not None and status.phase != "Running":
        _open_gate(plan, world)
    if status.phase == "Running":
        _watch_network(plan, world)
        _count_packets(plan, world, final=False)
        _watch_pods(plan, current, world)
        _tell_pods(plan, current, world)


def _trains(plan: JobPlan) -> None:
    """Running; the reason of a job that wanted switches and has none is what keeps them from it."""
    status = plan.status
    network = status.condition("NetworkAggregation") or {}
    text = f"epoch {status.epoch} trains in mode {status.mode}"
    if status.mode == "HostOnly" and plan.job.spec.mode != "HostOnly" and network.get("status") == "False":
        plan.now_is("Running", network["reason"], f"{text}: {network['message']}")
    else:
        plan.now_is("Running", "GateOpen", text)


def _watch_pods(plan: JobPlan, current: Mapping[str, Pod], world: World) -> None:
    """Say what keeps a container of a running job from starting, an image that cannot be pulled for instance."""
    troubles = sorted((p.name, *p.trouble) for p in current.values() if p.trouble and p.phase not in ENDED)
    if troubles:
        name, reason, text = troubles[0]
        message = f"pod {name}: {text}"
        plan.condition("PodsReady", False, reason, message, world.now)
        plan.now_is("Running", reason, message)
    elif (before := plan.status.condition("PodsReady")) and before["status"] == "False":
        plan.condition("PodsReady", True, "AllPodsReady", "no container waits to start any more", world.now)
        _trains(plan)


def _tell_pods(plan: JobPlan, current: Mapping[str, Pod], world: World) -> None:
    """Write the assignments; touch pods whose sidecar does not see its own.

    A kubelet refreshes a pod's downward API files when it syncs the pod. An update that meets the start of the pod's
    containers may be passed over until the next sync, up to a minute later; another changed annotation brings it about.
    """
    status, now = plan.status, world.now
    told = desired.assignments(Job(**{**plan.job.__dict__, "status": status}))
    for pod in current.values():
        if pod.uid not in told or pod.phase in ENDED:
            continue
        if pod.assignment not in (told[pod.uid], desired.assignment_digest(told[pod.uid])):
            plan.annotate[pod.name] = {ANNOTATION_ASSIGNMENT: told[pod.uid]}
        elif not pod.sidecar_ready and now < (status.placed_time or now) + world.limits.refresh_limit:
            period = str(int(now // world.limits.refresh_period))
            if pod.refresh != period:
                plan.annotate[pod.name] = {ANNOTATION_REFRESH: period}
            plan.wake(now + world.limits.refresh_period)


def _find_failure(job: Job, status: JobStatus, current: Mapping[str, Pod]) -> tuple[str, str] | None:
    """(reason, message) of what ended this epoch early, or None."""
    for pod in sorted(current.values(), key=lambda p: (p.role, p.rank)):
        if pod.phase == "Failed":
            kind = "WorkerFailed" if pod.role == ROLE_WORKER else "ParameterServerFailed"
            return kind, f"pod {pod.name}: {pod.failure}"
        if pod.role == ROLE_PARAMETER_SERVER and pod.phase == "Succeeded":
            return "ParameterServerFailed", f"pod {pod.name} ended before the workers"
        if pod.phase == "Succeeded" and status.placement is None:
            return "WorkerFailed", f"pod {pod.name} ended before training began"
    if status.placement is not None:
        expected = [(worker_name(job.name, s.rank), s.pod_uid) for s in status.placement.seats]
        expected += [(server_name(job.name, s.shard), s.pod_uid) for s in status.placement.servers]
        for name, uid in expected:
            found = current.get(name)
            if found is None or found.uid != uid:
                return "PodLost", f"pod {name} is gone (deleted, evicted or replaced)"
    return None


def _restart(plan: JobPlan, reason: str, message: str, pods: Sequence[Pod], world: World) -> None:
    """A new epoch with a new job ID, or the end when there were enough."""
    job, status = plan.job, plan.status
    if status.retries >= job.spec.backoff_limit:
        text = f"{message}; {status.retries} of {job.spec.backoff_limit} restarts used (spec.backoffLimit)"
        _end(plan, "Failed", "BackoffLimitExceeded" if job.spec.backoff_limit else reason, text, pods, world)
        return
    old = status.epoch
    retries = status.retries + 1
    world.ledger.release(job.uid)
    choice = _choose_network(job, world, patient=False)
    if isinstance(choice, Refusal):
        choice = _no_switch(job, choice)  # it holds its quota; a running job does not go back to the queue
    _take(plan, choice, world, epoch=old + 1)
    status.retries = retries
    delay = min(300.0, world.limits.restart_backoff * 2 ** (retries - 1))
    status.not_before = world.now + delay
    status.ready = status.succeeded = status.failed = 0
    plan.delete_pods = _live(pods)
    text = f"{message}: epoch {status.epoch} begins in {delay:.0f} s (restart {retries} of {job.spec.backoff_limit})"
    plan.now_is("Admitted", reason, text)
    plan.tell("Warning", reason, text)
    if choice.fallback:
        _fell_back(plan, choice.fallback, world.now)
    plan.wake(status.not_before)


def _end(plan: JobPlan, phase: str, reason: str, message: str, pods: Sequence[Pod], world: World) -> None:
    _count_packets(plan, world, final=True)
    plan.now_is(phase, reason, message)
    plan.status.completion_time = world.now
    plan.condition("Complete" if phase == "Succeeded" else "Failed", True, reason, message, world.now)
    plan.condition("PodsReady", False, "Finished", "the job has ended", world.now)
    if plan.status.condition("SwitchProgrammed"):
        plan.condition("SwitchProgrammed", False, "Finished", "the job has ended; the switches release it", world.now)
    plan.tell("Normal" if phase == "Succeeded" else "Warning", phase, message)
    plan.delete_pods = []
    _finished(plan, pods, world)


def _gather(plan: JobPlan, current: Mapping[str, Pod], leaving: set[str], world: World) -> None:
    """Make the pods, wait for all of them (gang), then freeze who sits where."""
    job, status, now = plan.job, plan.status, world.now
    wanted = wanted_objects(job)
    missing = [w for w in wanted if w.kind == "Service" or (w.name not in current and w.name not in leaving)]
    if job.problems and any(w.kind == "Pod" for w in missing):
        _end(plan, "Failed", "InvalidSpec", "; ".join(job.problems), list(current.values()), world)
        return
    plan.create += missing
    total = sum(w.kind == "Pod" for w in wanted)
    here = [p for p in current.values() if p.address and p.node and p.sidecar_started and not p.trouble]
    if len(here) < total:
        trouble = sorted((p.name, *p.trouble) for p in current.values() if p.trouble)
        began = max(status.epoch_time or now, status.not_before or 0.0)
        if job.uid in world.create_errors:
            reason, message = "PodCreateFailed", world.create_errors[job.uid]
        elif trouble:
            name, reason, text = trouble[0]
            message = f"{len(here)} of {total} pods are there; pod {name}: {text}"
        else:
            reason, message = (
                "WaitingForPods",
                f"{len(here)} of {total} pods have an address and a running sidecar",
            )
        if now >= began + world.limits.start_timeout:
            _restart(
                plan,
                "PodsNotReady",
                f"{message} after {world.limits.start_timeout:.0f} s",
                list(current.values()),
                world,
            )
            return
        plan.now_is("Starting", reason, message)
        plan.condition("PodsReady", False, reason, message, now)
        plan.wake(began + world.limits.start_timeout)
        return

    if status.mode != "HostOnly" and _unasked(job, world):
        plan.wake(now + 1.0)
        return
    plan.condition("PodsReady", True, "AllPodsReady", f"all {total} pods have an address and a running sidecar", now)
    workers = [_located(p) for p in here if p.role == ROLE_WORKER]
    servers = [_located(p) for p in here if p.role == ROLE_PARAMETER_SERVER]
    placement, refusal = _place(plan, workers, servers, world)
    if refusal:
        _to_host_only(plan, refusal, world)
    status.placement = placement
    status.placed_time = now
    plan.now_is("Starting", "Placed", "all pods are there")
    plan.wake(now)


def _located(pod: Pod) -> Located:
    return Located(pod.rank, pod.node, pod.address, pod.uid)


def _place(
    plan: JobPlan, workers: list[Located], servers: list[Located], world: World
) -> tuple[Placement, Refusal | None]:
    """The tree over the switches that the job may use; keeps its job ID when the tree lies inside what it holds."""
    job, status = plan.job, plan.status
    without = host_only(workers, servers)
    if status.mode == "HostOnly":
        return without, None
    allowed = job.spec.switches or tuple(world.switches)
    usable = {name: world.switches[name] for name in allowed if name in world.switches and world.switches[name].usable}
    tree = place(workers, servers, usable)
    if isinstance(tree, Refusal):
        return without, tree
    names = tree.switches
    if set(names) <= set(status.switches):
        world.ledger.release(job.uid)
    else:
        # Pods landed below a switch that was full, or not there, at admission. Nothing was told to anyone yet.
        world.ledger.release(job.uid)
        for name in names:
            over_quota = world.quotas.refuse_switch(job, name)
            if over_quota:
                return without, over_quota
        allocation = _allocate(names, job, world)
        if isinstance(allocation, Refusal):
            return without, allocation
        status.job_id, status.regions, status.values = (
            allocation.job_id,
            allocation.regions,
            allocation.values,
        )
    status.switches = names
    tree = replace(tree, addend_limit=addend_limit((usable[name] for name in names), job.spec.workers))
    assert status.job_id is not None
    world.ledger.take(job.uid, names, status.job_id, status.regions, status.mode == "Reserved", job.spec.request)
    return tree, None


def _to_host_only(plan: JobPlan, refusal: Refusal, world: World) -> None:
    """Give the switches back before the gate opens: this epoch runs without them."""
    status = plan.status
    world.ledger.release(plan.job.uid)
    status.mode, status.job_id, status.switches, status.regions = "HostOnly", HOST_ONLY_JOB_ID, (), ()
    if status.placement is not None:
        seats = [Located(s.rank, s.node, s.address, s.pod_uid) for s in status.placement.seats]
        servers = [Located(s.shard, s.node, s.address, s.pod_uid) for s in status.placement.servers]
        status.placement = host_only(seats, servers)
    drop_condition(status.conditions, "SwitchProgrammed")
    _fell_back(plan, refusal, world.now)


def _switch_trouble(plan: JobPlan, world: World) -> tuple[Refusal | None, bool]:
    """(what keeps the switches from serving this epoch, whether an agent has refused it for good)."""
    job, status = plan.job, plan.status
    assert status.placement is not None
    for name in status.placement.switches:
        switch = world.switches.get(name)
        if switch is None:
            return Refusal("SwitchDeleted", f"ATPSwitch {name} was deleted"), False
        if not switch.view.known:
            return Refusal("SwitchUnknown", f"switch {name}: its agent was not asked yet"), False
        if switch.fault and switch.fault[0] != "NoCapacity":
            reason = "SwitchUnreachable" if not switch.view.reachable else switch.fault[0]
            return Refusal(reason, f"switch {name}: {switch.fault[1]}"), False
        report = switch.view.jobs.get(job.uid)
        if report is None or report.epoch != status.epoch or report.job_id != status.job_id:
            if switch.view.refused:
                return Refusal("AgentRefused", f"switch {name}: the agent refused: {switch.view.refused}"), True
            return Refusal("NotProgrammed", f"switch {name} does not hold this epoch yet"), False
        if report.state == "FAILED":
            return Refusal(report.reason or "AgentRefused", f"switch {name}: {report.message or report.reason}"), True
        if report.state != "PROGRAMMED":
            return Refusal(report.reason or "NotProgrammed", f"switch {name}: {report.message or report.reason}"), False
    return None, False


def _aggregating(plan: JobPlan, names: str) -> str:
    text = f"gradients are summed on {names}"
    placement = plan.status.placement
    limit = placement.addend_limit if placement else None
    scale = plan.job.spec.scale
    if limit is None or scale == SCALE_AUTO:
        return text  # Auto: the ranks agree on a scale with which every finite value is within the limit
    value = limit / scale
    return f"{text}; values of magnitude above {value:.3g} take the slower raw path (status.addendLimit / spec.scale)"


def _open_gate(plan: JobPlan, world: World) -> None:
    """Starting -> Running once every switch has confirmed, or HostOnly when one will not."""
    status, now = plan.status, world.now
    assert status.placement is not None
    if status.mode != "HostOnly":
        trouble, final = _switch_trouble(plan, world)
        if trouble is not None:
            until = (status.placed_time or now) + world.limits.switch_wait
            if trouble.reason == "SwitchUnknown":
                until = now + 1.0
            if not final and now < until:
                plan.now_is("Starting", trouble.reason, trouble.message)
                plan.condition("SwitchProgrammed", False, trouble.reason, trouble.message, now)
                plan.wake(until)
                return
            _to_host_only(plan, trouble, world)
        else:
            names = ", ".join(status.placement.switches)
            plan.condition("SwitchProgrammed", True, "Programmed", f"switches {names} hold job ID {status.job_id}", now)
            plan.condition("NetworkAggregation", True, "Aggregating", _aggregating(plan, names), now)
    elif plan.job.spec.mode == "HostOnly":
        plan.condition("NetworkAggregation", False, "HostOnlyRequested", "spec.mode is HostOnly", now)
    status.start_time = status.start_time or now
    _trains(plan)
    plan.tell(
        "Normal",
        "GateOpen",
        f"epoch {status.epoch}: job ID {status.job_id}, mode {status.mode}, training begins",
    )


def _watch_network(plan: JobPlan, world: World) -> None:
    """A running job whose switch is away runs on; after a while it is called HostOnly until the switch is back."""
    status, now = plan.status, world.now
    if status.placement is None or not status.placement.switches:
        return
    trouble, _ = _switch_trouble(plan, world)
    if trouble is not None and trouble.reason == "SwitchUnknown":
        return
    before = status.condition("SwitchProgrammed")
    names = ", ".join(status.placement.switches)
    if trouble is None:
        plan.condition("SwitchProgrammed", True, "Programmed", f"switches {names} hold job ID {status.job_id}", now)
        if status.mode == "HostOnly":
            status.mode, status.revision = plan.job.spec.mode, status.revision + 1
            plan.condition("NetworkAggregation", True, "Aggregating", _aggregating(plan, names), now)
            plan.tell("Normal", "Aggregating", f"switches {names} are back")
            _trains(plan)
        return
    plan.condition("SwitchProgrammed", False, trouble.reason, trouble.message, now)
    if status.mode == "HostOnly":
        return
    entry = status.condition("SwitchProgrammed")
    assert entry is not None
    since = now if before is None or before["status"] != "False" else parse_time(entry["lastTransitionTime"]) or now
    if now < since + world.limits.switch_loss:
        plan.wake(since + world.limits.switch_loss)
        return
    status.mode, status.revision = "HostOnly", status.revision + 1
    _fell_back(plan, trouble, now)
    _trains(plan)


COUNTERS = {
    "aggregatedPackets": ("aggregated",),
    "completedAggregations": ("completed",),
    "collisions": ("collisions",),
}


def _count_packets(plan: JobPlan, world: World, *, final: bool) -> None:
    """Copy the switches' counters, at most every `counters_period` s and at the end."""
    status, now = plan.status, world.now
    if status.placement is None or not status.placement.switches:
        return
    last = parse_time(status.aggregation.get("updatedTime")) or 0.0
    period = world.limits.counters_period
    if not final and now < last + period:
        plan.wake(last + period)
        return
    totals = dict.fromkeys((*COUNTERS, "rejectedPackets"), 0)
    heard = False
    for name in status.placement.switches:
        switch = world.switches.get(name)
        counters = switch.view.counters.get(plan.job.uid) if switch else None
        if counters is None:
            continue
        heard = True
        for key, names in COUNTERS.items():
            totals[key] += sum(counters.get(n, 0) for n in names)
        totals["rejectedPackets"] += sum(n for key, n in counters.items() if key.startswith("rejected_"))
    old = {key: status.aggregation.get(key, 0) for key in totals}
    if not heard or (any(totals[key] < old[key] for key in totals) and not final):
        heard = heard and not status.aggregation
    if heard and totals != old:
        # A switch that lost its counters starts at 0 again: what was seen stays.
        best = {key: max(totals[key], old[key]) for key in totals}
        status.aggregation = {**best, "updatedTime": rfc3339(now)}
    if not final:
        plan.wake(now + period)
