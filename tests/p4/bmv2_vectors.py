# SPDX-License-Identifier: Apache-2.0
"""Which conformance vectors bmv2 runs, and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bmv2_switch import PACE, Bmv2Switch
from conformance.recording import Recording, of_every_job, path_of, read, without_bytes
from conformance.switches import Switch
from conformance.test_vectors import START_MS, Run, prepare, values_of
from p4runtime_tables import P4RuntimeTables

VALUES = 62
FINE_PACE = 50
"""For vectors with steps a millisecond from T: 25 ms then."""
FINE_MS = 20


def reason_to_skip(setup: dict[str, Any], vector: dict[str, Any]) -> str | None:
    """Why bmv2 cannot run a vector, or None."""
    if any(job["values"] != 62 for job in setup["jobs"].values()):
        return "the P4 programs have the profile of 62 values only"
    if "rates" in setup:
        return "a phantom queue stands in for a queue that cannot be seen; bmv2 sees its own"
    if any("sweep" in step.get("do", {}) for step in vector["steps"]):
        return "there is no sweep on a P4 switch: whoever meets a stale aggregator frees it"
    return None


def pace_of(vector: dict[str, Any]) -> int:
    """How much slower than it says a vector runs."""
    times = [START_MS, *(step["at_ms"] for step in vector["steps"] if "at_ms" in step)]
    near = any(abs(b - a - 100) <= FINE_MS for a in times for b in times)
    return FINE_PACE if near else PACE


class Lazily(Run):
    """A vector without who holds an aggregator after its job was deleted or changed: a P4 switch frees it when somebody
    meets it, and what somebody meets is checked."""

    changed = False

    def check_state(self, step: dict[str, Any]) -> None:
        self.changed |= bool({"delete_job", "set_job"} & set(step.get("do", {})))
        left_out = ("aggregators", "occupancy") if self.changed else ()
        super().check_state({k: v for k, v in step.items() if k not in left_out})


class OnBmv2(Lazily):
    """The same without the time of an aggregator's last packet, which is the test's only where it sets the clock."""

    def check_state(self, step: dict[str, Any]) -> None:
        wanted = step.get("aggregators", {})
        super().check_state({**step, "aggregators": {i: a if a == "free" else as_shown(a) for i, a in wanted.items()}})


def as_shown(aggregator: dict[str, Any]) -> dict[str, Any]:
    """An aggregator as bmv2's Thrift shows it: 64 bits that do not fit int64 read as the largest one."""
    values = values_of(aggregator, VALUES)
    pairs = [
        (2**31 - 1, -1) if first < 0 else (first, second) for first, second in zip(*[iter(values)] * 2, strict=True)
    ]
    shown = {k: v for k, v in aggregator.items() if k not in ("at_ms", "fill")}
    return {**shown, "values": [value for pair in pairs for value in pair]}


def run_on_bmv2(setup: dict[str, Any], vector: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a vector, checking all it says; what bmv2 answered, by step."""
    switch = Bmv2Switch(pace_of(vector))
    try:
        prepare(switch, setup)
        switch.set_clock(START_MS * 1_000_000)
        recording = Recording(switch)
        for _ in OnBmv2(recording, setup, vector).steps():  # type: ignore[arg-type]
            recording.end_of_step(without_bytes(switch.controller.counters()))
        return recording.steps
    except AssertionError as error:
        raise AssertionError(f"{error}\n{switch.bmv2.output()}") from error
    finally:
        switch.close()


def compared_with_bmv2(
    open_switch: Callable[[], Switch], name: str, setup: dict[str, Any], vector: dict[str, Any]
) -> None:
    """Run a vector on another switch, checking all it says, and that its answers are those that bmv2 gave."""
    switch = open_switch()
    try:
        switch.set_clock(START_MS * 1_000_000)
        prepare(switch, setup)
        recording = Recording(switch)
        for _ in Run(recording, setup, vector).steps():  # type: ignore[arg-type]
            if isinstance(switch, P4RuntimeTables):
                recording.end_of_step(without_bytes(switch.controller.counters()))
            else:
                recording.end_of_step(of_every_job(switch.counters))
        if reason_to_skip(setup, vector) is None:
            assert recording.steps == read(path_of("bmv2", name))["steps"], "bmv2 answered otherwise"
    finally:
        switch.close()
