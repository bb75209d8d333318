# SPDX-License-Identifier: Apache-2.0
"""What an ATPJob asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .scale import SCALE_AUTO, Scale, read_scale


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
