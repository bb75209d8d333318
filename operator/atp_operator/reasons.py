# SPDX-License-Identifier: Apache-2.0
"""Every reason that the operator gives: of conditions, of `status.reason` and of events, each with its meaning.

Reasons are an interface (people alert on them), in CamelCase as the Kubernetes API conventions want them, and Kueue's
words where it has one. What a user does about a reason is in docs/atpjob-reference.md and docs/admin.md; those of the
switch agent (docs/switch-agent.md) are passed on as they come: the contract has them, and those that the
operator itself looks at are here by name.
"""

from __future__ import annotations

from typing import Final

from atp_api.reasons import (
    AGENT_REFUSED as AGENT_REFUSED,
)
from atp_api.reasons import (
    AGENT_UNREACHABLE as AGENT_UNREACHABLE,
)
from atp_api.reasons import (
    CONNECTING as CONNECTING,
)
from atp_api.reasons import (
    FAN_IN_EXCEEDED as FAN_IN_EXCEEDED,
)
from atp_api.reasons import (
    NO_CAPACITY as NO_CAPACITY,
)
from atp_api.reasons import (
    NO_DESIRED_STATE as NO_DESIRED_STATE,
)
from atp_api.reasons import (
    NOT_PROGRAMMED as NOT_PROGRAMMED,
)
from atp_api.reasons import (
    PORT_UNRESOLVED as PORT_UNRESOLVED,
)
from atp_api.reasons import (
    PROGRAMMING as PROGRAMMING,
)
from atp_api.reasons import (
    SWITCH_UNREACHABLE as SWITCH_UNREACHABLE,
)
from atp_api.reasons import (
    VALUES_UNSUPPORTED as VALUES_UNSUPPORTED,
)

# --- an ATPJob in the queue -----------------------------------------------------------------------------------------

QUEUED: Final = "Queued"
"""It has its turn in one of the next plans."""
ADMITTING: Final = "Admitting"
"""There is room; admitted once the object carries the operator's finalizer."""
ADMITTED: Final = "Admitted"
"""It holds quota, and what it needs of the switches."""
QUOTA_EXCEEDED: Final = "QuotaExceeded"
"""An ATPTenantQuota of its namespace has no room: jobs, or aggregators on a switch."""
AGGREGATORS_EXHAUSTED: Final = "AggregatorsExhausted"
"""A switch has no range of aggregators of that size."""
JOB_IDS_EXHAUSTED: Final = "JobIDsExhausted"
"""A switch has no job ID for this namespace."""
NO_COMMON_RANGE: Final = "NoCommonRange"
"""Each switch has room, but no range of indexes is free on all of them."""
UNKNOWN_SWITCH: Final = "UnknownSwitch"
"""`spec.switches` names an ATPSwitch that does not exist."""
WAITING_FOR_SWITCH: Final = "WaitingForSwitch"
"""A switch that the job may use does not answer yet; it is waited for, for a while."""
INVALID_SPEC: Final = "InvalidSpec"
"""It can never run as it is written."""
RESUMED: Final = "Resumed"
"""`spec.suspend` is false again: it waits in the queue."""
SUSPENDED: Final = "Suspended"
"""`spec.suspend` is true: pods are deleted, switches and quota given back."""

# --- an admitted ATPJob ---------------------------------------------------------------------------------------------

WAITING_FOR_OLD_PODS: Final = "WaitingForOldPods"
"""The epoch begins when the pods of the one before have ended."""
WAITING_FOR_PODS: Final = "WaitingForPods"
"""Not all pods have an address and a running sidecar (gang)."""
POD_CREATE_FAILED: Final = "PodCreateFailed"
"""The API server, or the template, does not let a pod be made."""
PODS_NOT_READY: Final = "PodsNotReady"
"""Not all pods came in time: the epoch is given up."""
ALL_PODS_READY: Final = "AllPodsReady"
"""All pods have an address and a running sidecar."""
PLACED: Final = "Placed"
"""Where each pod sits in the aggregation tree is decided, for this epoch."""
GATE_OPEN: Final = "GateOpen"
"""Every pod has its assignment: training begins."""
FINISHED: Final = "Finished"
"""The job has ended; the condition says nothing any more."""

# --- whether the network sums its gradients ---------------------------------------------------------------------------

PROGRAMMED: Final = "Programmed"
"""Every switch of the tree holds this epoch."""
AGGREGATING: Final = "Aggregating"
"""Gradients are summed on the switches."""
HOST_ONLY_REQUESTED: Final = "HostOnlyRequested"
"""`spec.mode` is HostOnly: the parameter server sums everything."""
HOST_ONLY: Final = "HostOnly"
"""Event: it asked for switches and runs without."""
NO_USABLE_SWITCH: Final = "NoUsableSwitch"
"""No switch that the job may use can take a job."""
NO_SWITCH_ON_PATH: Final = "NoSwitchOnPath"
"""No usable switch is above the nodes of its workers."""
NO_LEVEL1_SWITCH: Final = "NoLevel1Switch"
"""The workers are in several racks, and no one switch is above all parameter servers."""
SWITCH_DELETED: Final = "SwitchDeleted"
"""The ATPSwitch is gone."""
SWITCH_UNKNOWN: Final = "SwitchUnknown"
"""The switch's agent was not asked yet, as after a start of the operator: nothing is concluded."""

# --- how an epoch, or a job, ends -------------------------------------------------------------------------------------

ALL_WORKERS_SUCCEEDED: Final = "AllWorkersSucceeded"
"""All workers exited with 0."""
WORKER_FAILED: Final = "WorkerFailed"
"""A worker's pod failed, or ended before training began."""
PARAMETER_SERVER_FAILED: Final = "ParameterServerFailed"
"""A parameter server's pod failed, or ended before the workers."""
POD_LOST: Final = "PodLost"
"""A pod of the epoch was deleted, evicted or replaced."""
BACKOFF_LIMIT_EXCEEDED: Final = "BackoffLimitExceeded"
"""`spec.backoffLimit` restarts are used up."""
DEADLINE_EXCEEDED: Final = "DeadlineExceeded"
"""`spec.activeDeadlineSeconds` is over."""

# --- an ATPJob that is left alone (condition Stalled) -----------------------------------------------------------------

STATUS_REJECTED: Final = "StatusRejected"
"""The status was not written by the operator: the job gave everything back and begins again."""
WRITE_FAILED: Final = "WriteFailed"
"""The API server does not take what the operator writes to this object."""
PLAN_FAILED: Final = "PlanFailed"
"""The operator cannot plan this job; it keeps what it holds."""

# --- an ATPSwitch -----------------------------------------------------------------------------------------------------

AGENT_ANSWERS: Final = "AgentAnswers"
"""The agent answers."""
PRIMARY: Final = "Primary"
"""The agent is the primary P4Runtime controller of the switch."""
MATCHES: Final = "Matches"
"""The switch runs the P4 program of the agent."""
IN_SYNC: Final = "InSync"
"""The switch holds exactly what it should."""
READY: Final = "Ready"
"""Jobs may use it."""

# --- a Pod ------------------------------------------------------------------------------------------------------------

PACKETS_DROPPED: Final = "ATPPacketsDropped"
"""Event: the guard of a switch drops packets of this pod to the ATP port."""
