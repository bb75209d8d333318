# SPDX-License-Identifier: Apache-2.0
"""The switches' packet counters in a job's status."""

from __future__ import annotations

from ..model import parse_time, rfc3339
from .plan import JobPlan, World

COUNTERS = {
    "aggregatedPackets": ("aggregated",),
    "completedAggregations": ("completed",),
    "collisions": ("collisions",),
}


def count_packets(plan: JobPlan, world: World, *, final: bool) -> None:
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
