# SPDX-License-Identifier: Apache-2.0
"""Times and policies of the planner."""

from __future__ import annotations

from dataclasses import dataclass


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
