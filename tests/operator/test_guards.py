# SPDX-License-Identifier: Apache-2.0
"""Which hosts each switch is told to guard."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_pure import PS, located, running, switch

from atp_operator.allocation import Ledger, Refusal
from atp_operator.desired import desired_guards, desired_jobs
from atp_operator.model import HOST_ONLY_JOB_ID, Placement
from atp_operator.topology import host_only, place


def test_every_switch_of_the_tree_knows_all_hosts_with_their_places() -> None:
    switches = {name: switch(name, [f"n{name[1:]}"]) for name in ("s0", "s1", "s9", "s5")}
    workers = located(2, "n0") + located(1, "n1", 2) + located(1, "n9", 3)
    tree = place(workers, PS, switches)
    assert isinstance(tree, Placement)
    job = running(tree)
    for name in ("s0", "s1", "s9"):
        (guard,) = desired_guards(switches[name], [job])
        (wanted,) = desired_jobs(switches[name], [job])
        assert (guard.uid, guard.epoch, guard.job_id) == (wanted.uid, wanted.epoch, wanted.job_id)
        places = [(h.endpoint.address, h.parameter_server, h.rack, h.bit, h.edge) for h in guard.hosts]
        assert places == [
            *((s.address, False, s.rack, s.bit, s.edge) for s in tree.seats),
            (tree.servers[0].address, True, 0, 0, False),
        ]
    assert desired_guards(switches["s5"], [job]) == []


def test_jobs_without_aggregators_are_guarded_where_their_pods_are() -> None:
    switches = {name: switch(name, [f"n{name[1:]}"]) for name in ("s0", "s1", "s9")}
    job = running(host_only(located(40, "n0"), PS))
    job = replace(job, status=replace(job.status, mode="HostOnly", job_id=HOST_ONLY_JOB_ID, switches=(), regions=()))
    assert [len(desired_guards(switches[name], [job])) for name in ("s0", "s1", "s9")] == [1, 0, 1]
    assert [desired_jobs(switches[name], [job]) for name in ("s0", "s1", "s9")] == [[], [], []]
    (guard,) = desired_guards(switches["s0"], [job])
    assert guard.job_id == HOST_ONLY_JOB_ID
    assert (guard.hosts[39].rack, guard.hosts[39].bit) == (1, 7)


@pytest.mark.parametrize("phase", ["Succeeded", "Failed", "Pending", "Suspended"])
def test_only_jobs_with_pods_are_guarded(phase: str) -> None:
    job = running(host_only(located(2, "n0"), PS))
    assert len(desired_guards(switch("s0", ["n0"]), [job])) == 1
    done = replace(job, status=replace(job.status, phase=phase))
    assert desired_guards(switch("s0", ["n0"]), [done]) == []
    assert desired_guards(switch("s0", ["n0"]), [replace(job, deleting=1.0)]) == []


def test_a_job_id_is_one_jobs_wherever_its_packets_pass() -> None:
    """A ToR shadowed by software switches: what leaves a node below it passes it, whoever's tree it is in."""
    switches = {
        "tor": switch("tor", ["n0", "n1"], kind="Tofino", job_ids=3),
        "s0": switch("s0", ["n0"], job_ids=3),
        "s1": switch("s1", ["n1"], job_ids=3),
        "far": switch("far", ["n2"], job_ids=3),
    }
    ledger = Ledger(switches, [], 0.0)

    def give(uid: str, *names: str) -> int | str:
        got = ledger.allocate(names, "Shared", 10, None)
        if isinstance(got, Refusal):
            return got.message
        ledger.take(uid, names, got.job_id, got.regions, False, 10)
        return got.job_id

    assert give("a", "tor") == 1
    assert give("b", "s0") == 2, "the ToR would drop it as the first job's"
    assert give("c", "s1") == 2, "no packet of s0's job passes s1, and the ToR knows neither"
    assert give("d", "far") == 1
    assert give("e", "tor") == 3
    said = give("f", "s0")
    assert said == (
        "needs 1 job ID (and multicast group) on switch s0: 0 free of 3, 1 in use and 0 resting, "
        "2 on other switches above the same nodes"
    )
