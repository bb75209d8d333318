# SPDX-License-Identifier: Apache-2.0
"""The cluster's objects as the planner sees them: frozen values read from API objects, and the job status it writes."""

from .event import Event
from .job import Job
from .limits import Limits
from .placement import Placement, Region, Seat, Server
from .pod import Pod
from .quota import Quota
from .scale import SCALE_AUTO, Scale, read_scale, stored_fraction
from .spec import JobSpec
from .status import ACTIVE_PHASES, HOST_ONLY_JOB_ID, JOB_ID_LAST, TERMINAL_PHASES, JobStatus
from .switch import AgentView, Capacity, Holder, JobReport, Switch, of_pipeline
from .types import Object, parse_time, rfc3339

__all__ = [
    "ACTIVE_PHASES",
    "HOST_ONLY_JOB_ID",
    "JOB_ID_LAST",
    "SCALE_AUTO",
    "TERMINAL_PHASES",
    "AgentView",
    "Capacity",
    "Event",
    "Holder",
    "Job",
    "JobReport",
    "JobSpec",
    "JobStatus",
    "Limits",
    "Object",
    "Placement",
    "Pod",
    "Quota",
    "Region",
    "Scale",
    "Seat",
    "Server",
    "Switch",
    "of_pipeline",
    "parse_time",
    "read_scale",
    "rfc3339",
    "stored_fraction",
]
