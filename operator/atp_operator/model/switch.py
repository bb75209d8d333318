# SPDX-License-Identifier: Apache-2.0
"""One ATPSwitch, with what its agent says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atp_api import wire

from .. import reasons
from .status import JOB_ID_LAST
from .types import Object, parse_time


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
    advice: str = ""  # what an admin can do about the reason


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
    advice: str = ""  # what an admin can do about the reason
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
            return reasons.CONNECTING, f"the agent at {self.address} was not asked yet"
        if not view.reachable:
            return (
                reasons.AGENT_UNREACHABLE,
                f"the agent at {self.address} does not answer ({view.error or 'no connection'})",
            )
        if not view.connected:
            return (
                view.reason or reasons.SWITCH_UNREACHABLE,
                view.message or "the agent has no connection to the switch",
            )
        if of_pipeline(view.reason) and not view.in_sync:
            return view.reason, view.message or "the switch does not run the P4 program of its agent"
        if self.capacity is None:
            return reasons.NO_CAPACITY, "the agent told no capacity"
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
