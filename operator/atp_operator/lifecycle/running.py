# SPDX-License-Identifier: Apache-2.0
"""The pods of a running job: their troubles, and the assignment in their annotations."""

from __future__ import annotations

from collections.abc import Mapping

from .. import ANNOTATION_ASSIGNMENT, ANNOTATION_REFRESH, conditions, desired, reasons
from ..model import Job, Pod
from .plan import ENDED, JobPlan, World
from .switches import trains


def watch_pods(plan: JobPlan, current: Mapping[str, Pod], world: World) -> None:
    """Say what keeps a container of a running job from starting, an image that cannot be pulled for instance."""
    troubles = sorted((p.name, *p.trouble) for p in current.values() if p.trouble and p.phase not in ENDED)
    if troubles:
        name, reason, text = troubles[0]
        message = f"pod {name}: {text}"
        plan.condition(conditions.PODS_READY, False, reason, message, world.now)
        plan.now_is("Running", reason, message)
    elif (before := plan.status.condition(conditions.PODS_READY)) and before["status"] == "False":
        plan.condition(
            conditions.PODS_READY, True, reasons.ALL_PODS_READY, "no container waits to start any more", world.now
        )
        trains(plan)


def tell_pods(plan: JobPlan, current: Mapping[str, Pod], world: World) -> None:
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
