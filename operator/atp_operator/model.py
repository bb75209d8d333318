# SPDX-License-Identifier: Apache-2.0
"""The cluster's objects as the planner sees them: frozen values read from API objects, and the job status it writes."""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from atp_api import wire

from . import ANNOTATION_ASSIGNMENT, ANNOTATION_REFRESH, FINALIZER, LABEL_EPOCH, LABEL_RANK, LABEL_ROLE, SIDECAR_NAME

Object = dict[str, Any]

ACTIVE_PHASES = frozenset({"Admitted", "Starting", "Running"})
TERMINAL_PHASES = frozenset({"Succeeded", "Failed"})

# HostOnly packets must be of a job that no switch knows, else a switch would drop them as foreign. One job ID is never
# given to a switch and serves all of them; end hosts tell such jobs apart by addresses.
HOST_ONLY_JOB_ID = wire.JOB_ID_MAX
JOB_ID_LAST = wire.JOB_ID_MAX - 1


def rfc3339(seconds: float) -> str:
    """Unix time in seconds as RFC 3339 in UTC, whole seconds (as the API server's own times)."""
    return dt.datetime.fromtimestamp(math.floor(seconds), dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str | None) -> float | None:
    """RFC 3339 text as Unix seconds; None for None or an empty text."""
    if not text:
        return None
    return dt.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


Scale = float | Literal["Auto"]
"""The fixed-point factor of a job's tensors; "Auto": the ranks agree on one for each part of a tensor."""
SCALE_AUTO: Final = "Auto"
SCALE_MAX = float(2**31)
# As in the schema: the digits of the exponent are such that it is a finite number.
_DECIMAL = re.compile(r"[+-]?[0-9]+([.][0-9]+)?([eE]([+]?[0-9]{1,2}|-[0-9]{1,3}))?")


def read_scale(value: object) -> Scale:
    """`spec.scale`: "Auto", a number in a string, an integer, or a float as earlier versions of the schema stored it.

    Raises:
        ValueError: it is none of these or out of bounds; the text says what to write.
    """
    if value == SCALE_AUTO:
        return SCALE_AUTO
    if isinstance(value, str) and value.lower() == "auto":
        raise ValueError(f"{value!r}: write Auto with a capital A and small letters")
    numeric = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not numeric and not (isinstance(value, str) and len(value) <= 32 and _DECIMAL.fullmatch(value)):
        raise ValueError(
            f'{value!r}: it must be Auto, an integer (100000000), or a decimal number in quotes ("0.5", "1e8")'
        )
    assert isinstance(value, int | float | str)
    scale = float(value)
    if not 0 < scale <= SCALE_MAX:
        raise ValueError(
            f"{scale:.12g}: it must be above 0 and at most 2147483648 (2^31), for a value x travels as "
            f"round(x * scale) in 32 bits; Auto suits all magnitudes"
        )
    return scale


def stored_fraction(value: object) -> str | None:
    """The text that stands for a scale which an earlier version of the schema stored as a fraction; None for others.

    The API server refuses every update of an object with such a value in a field that is now int-or-string, also of
    its finalizers and status.
    """
    return repr(value) if isinstance(value, float) and math.isfinite(value) and not value.is_integer() else None


def _number(value: object, least: int, most: int) -> int:
    """The value, if it is an integer within the bounds; ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{str(value)[:40]!r} is no integer of {least} to {most}")
    return value


def _text(value: object, most: int = 1024) -> str:
    """The value, if it is a text of at most so many characters; ValueError otherwise."""
    if not isinstance(value, str) or len(value) > most:
        raise ValueError(f"{str(value)[:40]!r} is no text of at most {most} characters")
    return value


EPOCH_LAST = 2**31 - 1
"""Counters of a status beyond this are nobody's: the operator never counts so far."""


@dataclass(frozen=True, order=True)
class Region:
    """A contiguous range of aggregator indexes: `start` .. `start + size - 1`."""

    start: int
    size: int
    floor: bool = False  # of a job in mode Shared: its own all the same

    @property
    def end(self) -> int:
        """One past the last index."""
        return self.start + self.size

    def to_dict(self) -> Object:
        return {"start": self.start, "size": self.size, **({"floor": True} if self.floor else {})}

    def overlaps(self, other: Region) -> bool:
        """True when both hold an index in common."""
        return self.start < other.end and other.start < self.end


@dataclass(frozen=True)
class JobSpec:
    """`ATPJob.spec` with every default filled in; without its pod templates, which the planner does not look at."""

    workers: int
    servers: int = 1  # parameter server shards
    mode: str = "Shared"
    switches: tuple[str, ...] = ()
    request: int = 1024
    floor: int = 0  # of the request: exclusive
    values: int | None = None
    scale: Scale = SCALE_AUTO
    suspend: bool = False
    backoff_limit: int = 3
    ttl: int | None = None
    deadline: int | None = None
    stall_timeout: int = 60

    @staticmethod
    def from_dict(spec: Mapping[str, Any]) -> JobSpec:
        """Read a spec that the schema let pass; absent fields take the schema's defaults."""
        workers = spec.get("workers") or {}
        servers = spec.get("parameterServers") or {}
        aggregators = spec.get("aggregators") or {}
        try:
            scale = read_scale(spec.get("scale", SCALE_AUTO))
        except ValueError:
            scale = SCALE_AUTO  # validate_job refuses it at admission; other jobs must be read all the same
        return JobSpec(
            workers=int(workers.get("replicas", 0)),
            servers=int(servers.get("replicas", 1)),
            mode=spec.get("mode") or "Shared",
            switches=tuple(spec.get("switches") or ()),
            request=int(aggregators.get("request", 1024)),
            floor=int(aggregators.get("floor", 0)),
            values=spec.get("valuesPerPacket"),
            scale=scale,
            suspend=bool(spec.get("suspend", False)),
            backoff_limit=int(spec.get("backoffLimit", 3)),
            ttl=spec.get("ttlSecondsAfterFinished"),
            deadline=spec.get("activeDeadlineSeconds"),
            stall_timeout=int(spec.get("stallTimeoutSeconds", 60)),
        )


@dataclass(frozen=True)
class Seat:
    """One worker's place in the aggregation tree of an epoch."""

    rank: int
    node: str
    address: str
    pod_uid: str
    rack: int  # bit number in bitmap1
    bit: int  # bit number in bitmap0
    edge: bool  # enters level 1 directly, as a rack of one
    switch: str | None  # switch that serves this worker's rack at level 0, or its edge bit at level 1

    def to_dict(self) -> Object:
        return {
            "rank": self.rank,
            "node": self.node,
            "address": self.address,
            "podUid": self.pod_uid,
            "rack": self.rack,
            "bit": self.bit,
            "edge": self.edge,
            "switch": self.switch or "",
        }

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> Seat:
        return Seat(
            rank=_number(value["rank"], 0, wire.WORKERS_MAX - 1),
            node=_text(value["node"]),
            address=_text(value["address"]),
            pod_uid=_text(value["podUid"]),
            rack=_number(value["rack"], 0, wire.WORKERS_MAX - 1),
            bit=_number(value["bit"], 0, wire.WORKERS_MAX - 1),
            edge=bool(value["edge"]),
            switch=_text(value["switch"]) or None,
        )


@dataclass(frozen=True)
class Server:
    """One parameter server's place."""

    shard: int
    node: str
    address: str
    pod_uid: str

    def to_dict(self) -> Object:
        return {"shard": self.shard, "node": self.node, "address": self.address, "podUid": self.pod_uid}

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> Server:
        return Server(
            shard=_number(value["shard"], 0, wire.WORKERS_MAX - 1),
            node=_text(value["node"]),
            address=_text(value["address"]),
            pod_uid=_text(value["podUid"]),
        )


@dataclass(frozen=True)
class Placement:
    """Where an epoch's pods are, with their bits: frozen once all pods are there, so a switch's state never flaps."""

    seats: tuple[Seat, ...]
    servers: tuple[Server, ...]
    level1: str | None  # switch of the parameter servers, when the job has several racks
    addend_limit: int | None = None  # greatest |round(x * scale)| of a value that travels as an integer
    tagged: bool = True  # raw packets have tags; an epoch that an older operator began goes on without

    @property
    def switches(self) -> tuple[str, ...]:
        """Names of all switches of the tree, sorted; empty for HostOnly."""
        names = {seat.switch for seat in self.seats if seat.switch}
        if self.level1:
            names.add(self.level1)
        return tuple(sorted(names))

    def to_dict(self) -> Object:
        limit = {} if self.addend_limit is None else {"addendLimit": self.addend_limit}
        return {
            "workers": [seat.to_dict() for seat in self.seats],
            "parameterServers": [server.to_dict() for server in self.servers],
            "level1": self.level1 or "",
            "tagged": self.tagged,
            **limit,
        }

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> Placement:
        limit = value.get("addendLimit")
        return Placement(
            seats=tuple(Seat.from_dict(seat) for seat in value["workers"]),
            servers=tuple(Server.from_dict(server) for server in value["parameterServers"]),
            level1=_text(value["level1"]) or None,
            addend_limit=None if limit is None else _number(limit, 1, 2**31 - 1),
            tagged=value.get("tagged") is True,
        )


@dataclass
class JobStatus:
    """`ATPJob.status`. Everything the operator must know of a job after a restart is in here."""

    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    mode: str | None = None
    job_id: int | None = None
    epoch: int = 0
    revision: int = 0
    retries: int = 0
    switches: tuple[str, ...] = ()
    values: int | None = None
    scale: str | None = None  # `spec.scale` when the job was admitted, as text
    regions: tuple[Region, ...] = ()
    placement: Placement | None = None
    ready: int = 0
    succeeded: int = 0
    failed: int = 0
    aggregation: Object = field(default_factory=dict)
    admitted_time: float | None = None
    epoch_time: float | None = None
    not_before: float | None = None
    placed_time: float | None = None
    start_time: float | None = None
    completion_time: float | None = None
    conditions: list[Object] = field(default_factory=list)
    observed_generation: int = 0

    @property
    def holds_switches(self) -> bool:
        """True while a job ID and regions on `switches` are this job's."""
        return self.job_id is not None and bool(self.switches) and self.phase in ACTIVE_PHASES

    @property
    def admitted(self) -> bool:
        """True while the job counts against quotas."""
        return self.admitted_time is not None and self.phase in ACTIVE_PHASES

    def copy(self) -> JobStatus:
        """A status to change: what is shared with this one is never changed in place."""
        return replace(self, conditions=[dict(c) for c in self.conditions], aggregation=dict(self.aggregation))

    def condition(self, kind: str) -> Object | None:
        """The condition of that type, or None."""
        return next((c for c in self.conditions if c["type"] == kind), None)

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> JobStatus:
        """Read a status, whoever wrote it.

        Raises:
            KeyError, TypeError, ValueError: the operator did not write it. What it says of switches may be forged all
                the same, see `claims`.
        """
        workers = value.get("workers") or {}
        placement = value.get("placement")
        job_id, values = value.get("jobId"), value.get("valuesPerPacket")
        return JobStatus(
            phase=value.get("phase", "Pending"),
            reason=value.get("reason", ""),
            message=value.get("message", ""),
            mode=value.get("mode"),
            job_id=None if job_id is None else _number(job_id, 1, HOST_ONLY_JOB_ID),
            epoch=_number(value.get("epoch", 0), 0, EPOCH_LAST),
            revision=_number(value.get("revision", 0), 0, EPOCH_LAST),
            retries=_number(value.get("retries", 0), 0, EPOCH_LAST),
            switches=tuple(_text(name) for name in value.get("switches") or ()),
            values=None if values is None else _number(values, 1, 2**16),
            scale=value.get("scale"),
            regions=tuple(
                Region(
                    _number(r["start"], 0, wire.AGGREGATOR_INDEX_MAX),
                    _number(r["size"], 1, wire.AGGREGATOR_INDEX_MAX + 1),
                    r.get("floor", False) is True,
                )
                for r in value.get("regions") or ()
            ),
            placement=Placement.from_dict(placement) if placement else None,
            ready=workers.get("ready", 0),
            succeeded=workers.get("succeeded", 0),
            failed=workers.get("failed", 0),
            aggregation=dict(value.get("aggregation") or {}),
            admitted_time=parse_time(value.get("admittedTime")),
            epoch_time=parse_time(value.get("epochTime")),
            not_before=parse_time(value.get("notBefore")),
            placed_time=parse_time(value.get("placedTime")),
            start_time=parse_time(value.get("startTime")),
            completion_time=parse_time(value.get("completionTime")),
            conditions=[dict(c) for c in value.get("conditions") or ()],
            observed_generation=value.get("observedGeneration", 0),
        )

    def to_dict(self, workers: int) -> Object:
        """As the API object's status; `workers` is the number that the spec asks for."""
        done = self.phase == "Succeeded" or self.succeeded > 0
        result: Object = {
            "observedGeneration": self.observed_generation,
            "phase": self.phase,
            "reason": self.reason,
            "message": self.message,
            "epoch": self.epoch,
            "revision": self.revision,
            "retries": self.retries,
            "workers": {
                "summary": f"{max(self.ready, self.succeeded) if done else self.ready}/{workers}",
                "ready": self.ready,
                "succeeded": self.succeeded,
                "failed": self.failed,
            },
            "conditions": self.conditions,
        }
        optional: Object = {
            "mode": self.mode,
            "jobId": self.job_id,
            "switches": list(self.switches) or None,
            "valuesPerPacket": self.values,
            "scale": self.scale,
            "regions": [region.to_dict() for region in self.regions] or None,
            "floor": sum(region.size for region in self.regions if region.floor) or None,
            # For people. What counts is in the placement, which an older definition of ATPJob in the cluster keeps.
            "addendLimit": self.placement.addend_limit if self.placement else None,
            "placement": self.placement.to_dict() if self.placement else None,
            "aggregation": self.aggregation or None,
        }
        times = {
            "admittedTime": self.admitted_time,
            "epochTime": self.epoch_time,
            "notBefore": self.not_before,
            "placedTime": self.placed_time,
            "startTime": self.start_time,
            "completionTime": self.completion_time,
        }
        optional.update({key: rfc3339(value) for key, value in times.items() if value is not None})
        result.update({key: value for key, value in optional.items() if value is not None})
        return result


@dataclass(frozen=True)
class Job:
    """One ATPJob."""

    namespace: str
    name: str
    uid: str
    generation: int
    created: float
    deleting: float | None  # deletionTimestamp, Unix seconds
    finalized: bool  # carries our finalizer
    spec: JobSpec
    status: JobStatus
    problems: tuple[str, ...] = ()  # what keeps it from ever running, see `intake`
    distrust: str = ""  # why its status is not taken for the operator's own; `status` is then a fresh one
    raw: Object = field(default_factory=dict, compare=False, repr=False)

    @property
    def key(self) -> str:
        """namespace/name."""
        return f"{self.namespace}/{self.name}"

    @property
    def queue_key(self) -> tuple[float, str, str]:
        """First come, first served; ties by name, so that every replica orders alike."""
        return (self.created, self.namespace, self.name)

    @staticmethod
    def from_object(raw: Object) -> Job:
        """Read an ATPJob that the schema let pass; one whose status nobody can read is distrusted, not refused."""
        meta = raw["metadata"]
        status, distrust = JobStatus(), str(raw.get("unreadable") or "")
        if not distrust:
            try:
                status = JobStatus.from_dict(raw.get("status") or {})
            except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
                distrust = f"the status cannot be read ({str(error)[:200]})"
        return Job(
            namespace=meta.get("namespace", ""),
            name=meta["name"],
            uid=meta.get("uid", ""),
            generation=meta.get("generation", 0),
            created=parse_time(meta.get("creationTimestamp")) or 0.0,
            deleting=parse_time(meta.get("deletionTimestamp")),
            finalized=FINALIZER in (meta.get("finalizers") or ()),
            spec=JobSpec.from_dict(raw.get("spec") or {}),
            status=status,
            problems=tuple(raw.get("problems") or ()),
            distrust=distrust,
            raw=raw,
        )


@dataclass(frozen=True)
class Holder:
    """An entry of a switch's ledger (`ATPSwitch.status.jobs`): who holds a job ID, and with which statuses."""

    job_id: int
    uid: str
    epoch: int
    name: str
    seals: tuple[str, ...] = ()  # of the statuses that the operator gave the job with this ID, see `claims`


@dataclass(frozen=True)
class Capacity:
    """What a switch can hold, as its agent told."""

    aggregators: int
    values: tuple[int, ...] = (wire.VALUES_BASE,)
    multicast_groups: int = JOB_ID_LAST
    job_ids: int = wire.JOB_ID_MAX
    fan_in_max: int = wire.FAN_IN_MAX
    target: str = ""
    pipeline: str = ""
    version: str = ""
    # A sum that left int32 stays at its end and is seen. Not known, as from an older agent, counts as no.
    sticky_saturation: bool = False

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> Capacity | None:
        if not value.get("aggregators"):
            return None
        return Capacity(
            aggregators=value["aggregators"],
            values=tuple(value.get("values") or (wire.VALUES_BASE,)),
            multicast_groups=value.get("multicastGroups", 0),
            job_ids=value.get("jobIds", 0),
            fan_in_max=value.get("fanInMax", 0),
            target=value.get("target", ""),
            pipeline=value.get("pipeline", ""),
            version=value.get("agentVersion", ""),
            sticky_saturation=value.get("stickySaturation") is True,
        )

    def to_dict(self) -> Object:
        return {
            "aggregators": self.aggregators,
            "values": list(self.values),
            "multicastGroups": self.multicast_groups,
            "jobIds": self.job_ids,
            "fanInMax": self.fan_in_max,
            "target": self.target,
            "pipeline": self.pipeline,
            "agentVersion": self.version,
            "stickySaturation": self.sticky_saturation,
        }


@dataclass(frozen=True)
class JobReport:
    """What an agent said of one job."""

    job_id: int
    epoch: int
    state: str  # PROGRAMMED, PENDING, FAILED
    reason: str = ""
    message: str = ""


@dataclass(frozen=True)
class AgentView:
    """What the operator last heard from one agent. A cache of the switch, lost and regained freely."""

    known: bool = False  # a first contact was made or failed; before that nothing is concluded
    reachable: bool = False
    since: float = 0.0  # Unix seconds of the last change of `reachable`
    error: str = ""
    capacity: Capacity | None = None
    connected: bool = False
    in_sync: bool = False
    generation: int = 0
    reason: str = ""
    message: str = ""
    jobs: Mapping[str, JobReport] = field(default_factory=dict)  # by ATPJob uid
    counters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # by ATPJob uid
    aggregators_in_use: int = 0
    refused: str = ""  # text with which the agent refused the whole desired state


def of_pipeline(reason: str) -> bool:
    """True when an agent's reason is the P4 program of its switch."""
    return reason.startswith("Pipeline")


@dataclass(frozen=True)
class Switch:
    """One ATPSwitch with what its agent last said."""

    name: str
    kind: str
    address: str
    server_name: str
    nodes: frozenset[str]
    ports: Mapping[str, int]
    shared_limit: int | None
    capacity: Capacity | None
    holders: tuple[Holder, ...]  # as last written to status.jobs
    quarantine: tuple[tuple[int, float], ...]  # (job ID, until)
    view: AgentView = field(default_factory=AgentView)
    raw: Object = field(default_factory=dict, compare=False, repr=False)

    @property
    def fault(self) -> tuple[str, str] | None:
        """(reason, message) of what keeps every job from this switch, as its agent said it; None when it serves."""
        view = self.view
        if not view.known:
            return "Connecting", f"the agent at {self.address} was not asked yet"
        if not view.reachable:
            return "AgentUnreachable", f"the agent at {self.address} does not answer ({view.error or 'no connection'})"
        if not view.connected:
            return view.reason or "SwitchUnreachable", view.message or "the agent has no connection to the switch"
        if of_pipeline(view.reason) and not view.in_sync:
            return view.reason, view.message or "the switch does not run the P4 program of its agent"
        if self.capacity is None:
            return "NoCapacity", "the agent told no capacity"
        return None

    @property
    def usable(self) -> bool:
        """True when jobs may be put on it: the agent answers, is its primary, and its program and size are known."""
        return self.fault is None

    @property
    def shared_pool(self) -> int:
        """Shared jobs use indexes [0, n)."""
        if self.capacity is None:
            return 0
        total = min(self.capacity.aggregators, wire.AGGREGATOR_INDEX_MAX + 1)
        if self.shared_limit is not None:
            return min(self.shared_limit, total)
        return total - total // 4

    @staticmethod
    def from_object(raw: Object, node_labels: Mapping[str, Mapping[str, str]], view: AgentView) -> Switch:
        spec, status = raw.get("spec") or {}, raw.get("status") or {}
        nodes = set(spec.get("nodes") or ())
        selector = spec.get("nodeSelector") or {}
        if selector:
            nodes |= {n for n, labels in node_labels.items() if all(labels.get(k) == v for k, v in selector.items())}
        agent = spec.get("agent") or {}
        return Switch(
            name=raw["metadata"]["name"],
            kind=spec.get("type", ""),
            address=agent.get("address", ""),
            server_name=agent.get("serverName", ""),
            nodes=frozenset(nodes),
            ports={p["node"]: p["port"] for p in spec.get("ports") or ()},
            shared_limit=spec.get("sharedAggregators"),
            capacity=view.capacity or Capacity.from_dict(status.get("capacity") or {}),
            holders=tuple(
                Holder(j["jobId"], j["uid"], j["epoch"], j["name"], tuple(j.get("seals") or ()))
                for j in status.get("jobs") or ()
            ),
            quarantine=tuple((q["jobId"], parse_time(q["until"]) or 0.0) for q in status.get("quarantine") or ()),
            view=view,
            raw=raw,
        )


@dataclass(frozen=True)
class Quota:
    """One ATPTenantQuota."""

    name: str
    selector: Mapping[str, Any]
    max_jobs: int | None
    aggregators: int | None
    raw: Object = field(default_factory=dict, compare=False, repr=False)

    def selects(self, labels: Mapping[str, str]) -> bool:
        """True when a namespace with these labels is this tenant's (LabelSelector semantics)."""
        for key, value in (self.selector.get("matchLabels") or {}).items():
            if labels.get(key) != value:
                return False
        for rule in self.selector.get("matchExpressions") or ():
            key, values = rule["key"], rule.get("values") or ()
            present = key in labels
            match rule["operator"]:
                case "In":
                    ok = present and labels[key] in values
                case "NotIn":
                    ok = not present or labels[key] not in values
                case "Exists":
                    ok = present
                case _:
                    ok = not present
            if not ok:
                return False
        return True

    @staticmethod
    def from_object(raw: Object) -> Quota:
        spec = raw.get("spec") or {}
        return Quota(
            name=raw["metadata"]["name"],
            selector=spec.get("namespaceSelector") or {},
            max_jobs=spec.get("maxJobs"),
            aggregators=(spec.get("nominalQuota") or {}).get("aggregators"),
            raw=raw,
        )


@dataclass(frozen=True)
class Pod:
    """What the planner needs to know of a job's pod."""

    name: str
    uid: str
    role: str
    rank: int
    epoch: int
    phase: str
    deleting: bool
    node: str
    address: str  # empty for a pod on its node's network: that address is the node's, not the pod's
    sidecar_started: bool
    ready: bool
    trouble: tuple[str, str] | None  # (reason, message) of what keeps the pod from starting
    failure: str  # why it failed, for people; empty unless phase is Failed
    assignment: str
    sidecar_ready: bool = True  # its gate is open
    refresh: str = ""

    @staticmethod
    def from_object(raw: Object) -> Pod:
        meta, status, spec = raw["metadata"], raw.get("status") or {}, raw.get("spec") or {}
        labels = meta.get("labels") or {}
        inits = status.get("initContainerStatuses") or ()
        conditions = status.get("conditions") or ()
        return Pod(
            name=meta["name"],
            uid=meta.get("uid", ""),
            role=labels.get(LABEL_ROLE, ""),
            rank=-1 if (rank := _count(labels.get(LABEL_RANK, ""))) is None else rank,
            epoch=_count(labels.get(LABEL_EPOCH, "")) or 0,
            phase=status.get("phase", "Pending"),
            deleting=bool(meta.get("deletionTimestamp")),
            node=spec.get("nodeName") or "",
            address="" if spec.get("hostNetwork") else status.get("podIP") or "",
            sidecar_started=any(c["name"] == SIDECAR_NAME and c.get("started") for c in inits),
            ready=any(c["type"] == "Ready" and c["status"] == "True" for c in conditions),
            trouble=_trouble(status),
            failure=_failure(status) if status.get("phase") == "Failed" else "",
            assignment=(meta.get("annotations") or {}).get(ANNOTATION_ASSIGNMENT, ""),
            sidecar_ready=any(c["name"] == SIDECAR_NAME and c.get("ready") for c in inits),
            refresh=(meta.get("annotations") or {}).get(ANNOTATION_REFRESH, ""),
        )


def _count(label: str) -> int | None:
    """The number in a label; None when it is none, or one that the operator never wrote."""
    return int(label) if label.isascii() and label.isdigit() and len(label) < 10 else None


def _trouble(status: Mapping[str, Any]) -> tuple[str, str] | None:
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return condition.get("reason", "Unschedulable"), condition.get("message", "the pod has no node yet")
    for entry in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
        waiting = (entry.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") and waiting["reason"] not in ("PodInitializing", "ContainerCreating"):
            return waiting["reason"], f"container {entry['name']}: {waiting.get('message', waiting['reason'])}"
    return None


LAST_WORDS = 600
"""Characters of a failed container's message that are kept, from its end."""


def _failure(status: Mapping[str, Any]) -> str:
    for entry in [*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ())]:
        ended = (entry.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            words = str(ended.get("message") or "").strip()
            detail = f": {words[-LAST_WORDS:]}" if words else ""
            return f"container {entry['name']} exited with {ended['exitCode']} ({ended.get('reason', 'Error')}){detail}"
    return ": ".join(filter(None, [status.get("reason", ""), status.get("message", "")])) or "the pod failed"


@dataclass(frozen=True)
class Limits:
    """Times and policies of the planner, seconds."""

    switch_wait: float = 30.0  # how long a start waits for a switch before it goes HostOnly
    switch_loss: float = 10.0  # how long a running job's switch may be away before the job is called HostOnly
    start_timeout: float = 900.0  # how long pods may take to be all there
    quarantine: float = 30.0  # rest of a job ID
    release_wait: float = 60.0  # how long deletion waits for the switch to confirm
    restart_backoff: float = 2.0  # doubled with every retry, at most 300 s
    counters_period: float = 15.0
    refresh_period: float = 3.0  # how often a pod whose sidecar has not seen its assignment is touched
    refresh_limit: float = 120.0  # for how long; the kubelet's own period is a minute
    usage_period: float = 30.0


@dataclass(frozen=True)
class Event:
    """A Kubernetes event on an ATPJob."""

    kind: str  # Normal or Warning
    reason: str
    message: str
