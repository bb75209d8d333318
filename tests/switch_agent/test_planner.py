# SPDX-License-Identifier: Apache-2.0
"""Planning is pure: checked by properties over random switches, and by the cases that matter."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atp_api.switchagent.v1alpha1 import switchagent_pb2 as api
from atp_switch_agent.entries import (
    ADMISSION,
    DESTINATION,
    GROUP,
    GUARD,
    GUARDED,
    HOST,
    HOST_PIECES,
    JOB,
    OWN,
    PLACE,
    PS_PORT,
    REGION,
    REPLICA,
    SOURCE,
    TRANSIT,
    Entry,
    Key,
)
from atp_switch_agent.planner import (
    CannotHold,
    Diff,
    EndpointKey,
    InvalidState,
    Limits,
    Op,
    Port,
    Update,
    combine,
    diff,
    plan_guard,
    plan_job,
    validate,
    without_room,
)

LIMITS = Limits(aggregators=4096, values=(62, 350))
State = dict[Key, Entry]
SOFTWARE, P4 = (HOST,), (*HOST_PIECES, GUARDED)
"""Where hosts are: in one table, or in pieces."""
TARGETS = pytest.mark.parametrize("tables", [SOFTWARE, P4], ids=["software", "p4"])


def port_of(key: EndpointKey) -> Port:
    return Port(key.port or int(key.address.rsplit(".", 1)[1]), key.mac or 0x020000000000)


@st.composite
def jobs(draw: st.DrawFn, job_id: int, group: int) -> api.Job:
    """A valid job, with members at both levels, racks, and one to three regions."""
    bits0 = draw(st.lists(st.integers(0, 31), unique=True, max_size=4))
    bits1 = draw(st.lists(st.integers(0, 31), unique=True, max_size=4))
    racks = draw(st.integers(0, len(bits1)))
    ports = st.integers(1, 12)
    message = api.Job(
        job_id=job_id,
        epoch=draw(st.integers(1, 2)),
        uid=draw(st.sampled_from(("a", "b"))),
        name=f"ns/{job_id}",
        values=draw(st.sampled_from((62, 350))),
        multicast_group=group,
    )
    rank = 0
    for level, bits in ((False, bits0), (True, bits1[racks:])):
        for bit in bits:
            endpoint = api.Endpoint(address=f"10.0.{job_id}.{rank + 1}", port=draw(ports))
            message.members.append(api.Member(rank=rank, bit=bit, edge=level, endpoint=endpoint))
            rank += 1
    for bit in bits1[:racks]:
        uplink = api.Endpoint(address=f"10.1.{job_id}.{bit + 1}", port=draw(ports))
        message.racks.append(api.Rack(bit=bit, workers=draw(st.integers(1, 32)), uplink=uplink))
    if not message.members and not message.racks:
        endpoint = api.Endpoint(address=f"10.0.{job_id}.1", port=draw(ports))
        message.members.append(api.Member(rank=0, bit=0, endpoint=endpoint))
    message.parameter_servers.append(api.Endpoint(address="10.9.0.1", port=draw(ports)))
    for slot in draw(st.lists(st.integers(0, 7), unique=True, min_size=1, max_size=3)):
        message.regions.append(api.Region(start=slot * 512, size=draw(st.sampled_from((256, 512)))))
    return message


@st.composite
def guards(draw: st.DrawFn, job_id: int, uid: str, epoch: int, addresses: list[str]) -> api.Guard:
    """One or two hosts of a job; addresses change hands between states."""
    message = api.Guard(job_id=job_id, uid=uid, epoch=epoch)
    for number, address in enumerate(addresses[: draw(st.integers(1, 2))]):
        endpoint = api.Endpoint(address=address, port=draw(st.integers(1, 12)))
        message.hosts.append(
            api.Host(endpoint=endpoint, parameter_server=not number, bit=draw(st.integers(0, 31)), rack=number)
        )
    return message


@st.composite
def desired_states(draw: st.DrawFn) -> api.DesiredState:
    """A random desired state over a few job IDs and groups, so that they are often reused."""
    ids = draw(st.lists(st.integers(1, 4), unique=True, max_size=4))
    groups = draw(st.permutations((0, 1, 2, 3, 4)))
    wanted = api.DesiredState(switch_name="sw", generation=1)
    for job_id, group in zip(ids, groups, strict=False):
        wanted.jobs.append(draw(jobs(job_id, group)))
    owners = [(job.job_id, job.uid, job.epoch) for job in wanted.jobs]
    addresses = draw(st.permutations([f"10.7.0.{n}" for n in range(1, 13)]))
    for number, owner in enumerate([*owners, (255, "c", 1), (255, "d", draw(st.integers(1, 2)))]):
        wanted.guards.append(draw(guards(*owner, addresses[2 * number : 2 * number + 2])))
    validate(wanted, "sw", LIMITS)
    return wanted


def planned(
    desired: api.DesiredState, tables: tuple[str, ...], ports: Callable[[EndpointKey], Port] = port_of
) -> State:
    known = {job.job_id for job in desired.jobs}
    return combine(
        {job.job_id: plan_job(job, ports, LIMITS) for job in desired.jobs},
        {
            guard.uid + str(guard.job_id): plan_guard(guard, ports, tables, known=guard.job_id in known)
            for guard in desired.guards
        },
    )


def apply(held: State, update: Update) -> None:
    """A table's rules: INSERT of the absent, MODIFY and DELETE of the present."""
    key = update.entry.key
    if update.op is Op.INSERT:
        assert key not in held, f"inserted twice: {key}"
    else:
        assert key in held, f"not there: {key}"
    if update.op is Op.DELETE:
        del held[key]
    else:
        held[key] = update.entry


def by_job(held: Mapping[Key, Entry], *tables: str) -> dict[int, set[Entry]]:
    found: dict[int, set[Entry]] = {}
    for entry in held.values():
        if entry.table in tables:
            found.setdefault(entry.number(0), set()).add(entry)
    return found


def check_between(held: State, now: State, wanted: State) -> None:
    """What must hold in every state on the way from one state to the other."""
    known = {entry.number(0): entry for entry in held.values() if entry.table == JOB}
    rights = by_job(held, ADMISSION, TRANSIT, PS_PORT)
    assert set(rights) <= set(known), "rights without a job"
    hosts = by_job(held, HOST)
    addresses = [entry.match[1] for entries in hosts.values() for entry in entries]
    assert len(addresses) == len(set(addresses)), "one address, two jobs"  # in pieces the address is the key
    guard = {entry for entry in held.values() if entry.table in GUARD}
    assert guard <= {*now.values(), *wanted.values()}
    assert set(known) <= {*hosts, *by_job(held, GUARDED)}, "a job without its guard"
    for job_id, job in known.items():
        allowed_rights: set[Entry] = set()
        allowed_regions: set[Entry] = set()
        copies: set[tuple[int, int]] = set()
        for whole in (now, wanted):
            if whole.get(job.key) == job:
                allowed_rights |= by_job(whole, ADMISSION, TRANSIT, PS_PORT).get(job_id, set())
                allowed_regions |= by_job(whole, REGION).get(job_id, set())
                group = whole.get((GROUP, (job.params[3],)))
                if group is not None:
                    copies |= set(zip(group.params[::2], group.params[1::2], strict=True))
        assert rights.get(job_id, set()) <= allowed_rights, "a foreign bit is admitted"
        regions = by_job(held, REGION).get(job_id, set())
        assert regions and regions <= allowed_regions, "an index outside the regions"
        if job.params[3]:
            group = held[(GROUP, (job.params[3],))]
            members = set(zip(group.params[::2], group.params[1::2], strict=True))
            assert members <= copies, "an ACK copy to a stranger"
            for port, instance in members:
                assert (REPLICA, (job.params[3], port, instance)) in held, "a copy without its address"


def walk(now: State, wanted: State, changes: Diff, shuffle: random.Random) -> None:
    held = dict(now)
    for batch in changes.batches:
        updates = list(batch)
        shuffle.shuffle(updates)  # a server may reorder within a batch
        for update in updates:
            apply(held, update)
            check_between(held, now, wanted)
    assert held == wanted


@TARGETS
@settings(max_examples=150, deadline=None)
@given(before=desired_states(), after=desired_states(), shuffle=st.randoms(use_true_random=False))
def test_every_step_from_one_state_to_another_is_safe(
    tables: tuple[str, ...], before: api.DesiredState, after: api.DesiredState, shuffle: random.Random
) -> None:
    now, wanted = planned(before, tables), planned(after, tables)
    changes = diff(now, wanted)
    walk(now, wanted, changes, shuffle)
    assert diff(wanted, wanted).empty


@TARGETS
@settings(max_examples=150, deadline=None)
@given(desired=desired_states(), data=st.data(), shuffle=st.randoms(use_true_random=False))
def test_every_step_is_safe_when_pods_move(
    tables: tuple[str, ...], desired: api.DesiredState, data: st.DataObject, shuffle: random.Random
) -> None:
    """The same jobs with some end points behind other ports, and regions that come and go."""
    moved = data.draw(st.sets(st.integers(0, 12)))
    after = api.DesiredState()
    after.CopyFrom(desired)
    for job in after.jobs:
        if len(job.regions) > 1 and data.draw(st.booleans()):
            del job.regions[0]
    now = planned(desired, tables)
    wanted = planned(after, tables, lambda key: Port(key.port + 20, 1) if key.port in moved else port_of(key))
    changes = diff(now, wanted)
    assert not changes.resets, "the jobs stay"
    walk(now, wanted, changes, shuffle)


@TARGETS
@settings(max_examples=100, deadline=None)
@given(before=desired_states(), after=desired_states(), shuffle=st.randoms(use_true_random=False), data=st.data())
def test_an_interrupted_change_converges(
    tables: tuple[str, ...],
    before: api.DesiredState,
    after: api.DesiredState,
    shuffle: random.Random,
    data: st.DataObject,
) -> None:
    """The agent or the switch may stop anywhere; the next diff starts from what is really held."""
    now, wanted = planned(before, tables), planned(after, tables)
    updates = [update for batch in diff(now, wanted).batches for update in batch]
    held = dict(now)
    for update in updates[: data.draw(st.integers(0, len(updates)))]:
        apply(held, update)
    other = planned(data.draw(desired_states()), tables)
    for batch in diff(held, other).batches:
        pieces = list(batch)
        shuffle.shuffle(pieces)
        for update in pieces:
            apply(held, update)
    assert held == other


@TARGETS
@settings(max_examples=100, deadline=None)
@given(desired=desired_states(), data=st.data())
def test_any_leftovers_are_repaired(tables: tuple[str, ...], desired: api.DesiredState, data: st.DataObject) -> None:
    """Entries deleted or added behind the agent's back."""
    wanted = planned(desired, tables)
    held = dict(wanted)
    for key in data.draw(st.lists(st.sampled_from(sorted(wanted)), unique=True) if wanted else st.just([])):
        del held[key]
    for key, entry in planned(data.draw(desired_states()), tables).items():
        held.setdefault(key, entry)
    for batch in diff(held, wanted).batches:
        for update in batch:
            apply(held, update)
    assert held == wanted


def example() -> api.Job:
    return api.Job(
        job_id=3,
        epoch=1,
        uid="u",
        name="ns/j",
        values=62,
        multicast_group=9,
        regions=[api.Region(start=0, size=1024)],
        members=[
            api.Member(rank=0, bit=0, endpoint=api.Endpoint(address="10.0.0.1", port=1)),
            api.Member(rank=1, bit=1, endpoint=api.Endpoint(address="10.0.0.2", port=2)),
        ],
        parameter_servers=[api.Endpoint(address="10.0.0.9", port=9)],
    )


def test_entries_of_a_rack() -> None:
    entries = set(plan_job(example(), port_of, LIMITS))
    mac = 0x020000000000
    assert entries == {
        Entry(JOB, (3,), (62, 0b11, 0, 9), b"u/1"),
        Entry(REGION, (3, (0, 1023))),
        Entry(ADMISSION, (3, 1, 0, 1)),
        Entry(ADMISSION, (3, 2, 0, 2)),
        Entry(PS_PORT, (3, 9)),
        Entry(GROUP, (9,), (1, 1, 2, 2)),
        Entry(REPLICA, (9, 1, 1), (mac, 0x0A000001, 10800)),
        Entry(REPLICA, (9, 2, 2), (mac, 0x0A000002, 10800)),
    }


def test_entries_of_level_1() -> None:
    """Racks behind uplinks, and a worker under the PS's switch that enters level 1 directly."""
    job = example()
    del job.members[:]
    job.members.append(api.Member(rank=8, bit=5, edge=True, endpoint=api.Endpoint(address="10.0.0.3", port=3)))
    job.racks.append(api.Rack(bit=0, workers=32, uplink=api.Endpoint(address="10.1.0.1", port=40)))
    entries = set(plan_job(job, port_of, LIMITS))
    assert Entry(JOB, (3,), (62, 0, 0b100001, 9), b"u/1") in entries
    assert Entry(ADMISSION, (3, 3, 1, 0b100000)) in entries
    assert Entry(ADMISSION, (3, 40, 1, 1)) in entries
    assert Entry(TRANSIT, (3, 40, 1), (0xFFFFFFFF,)) in entries
    assert Entry(GROUP, (9,), (3, 9, 40, 0x8000)) in entries
    assert not [entry for entry in entries if entry.table == ADMISSION and entry.match[2] == 0]


def test_entries_of_a_guard() -> None:
    """A worker has its place, a PS none; the mark is of the epoch, and nobody else's."""

    def guard(uid: str, epoch: int) -> list[Entry]:
        endpoint = api.Endpoint(address="10.0.0.1", port=4)
        worker = api.Host(endpoint=endpoint, bit=31, rack=2, edge=True)
        server = api.Host(endpoint=api.Endpoint(address="10.0.0.9", port=9), parameter_server=True, bit=3)
        return plan_guard(api.Guard(uid=uid, epoch=epoch, job_id=255, hosts=[worker, server]), port_of)

    first, second = guard("u", 1)
    mark = first.params[1]
    assert first == Entry(HOST, (255, 0x0A000001), (4, mark, 1, 1 << 31, 0b100, 1))
    assert second == Entry(HOST, (255, 0x0A000009), (9, mark, 2, 0, 0, 0))
    assert len({mark, guard("u", 2)[0].params[1], guard("v", 1)[0].params[1], 0}) == 4


def test_entries_of_a_guard_in_pieces() -> None:
    """What a P4 program looks up by address; jobs that share a job ID do not share what says that it is guarded."""
    worker = api.Host(endpoint=api.Endpoint(address="10.0.0.1", port=4), bit=31, rack=2, edge=True)
    server = api.Host(endpoint=api.Endpoint(address="10.0.0.9", port=9), parameter_server=True, bit=3)
    guard = api.Guard(uid="u", epoch=1, job_id=255, hosts=[worker, server])
    entries = plan_guard(guard, port_of, P4, known=False)
    assert set(entries) == {
        Entry(SOURCE, (0x0A000001,), (0, 4, 255)),
        Entry(DESTINATION, (0x0A000001,), (0, 255)),
        Entry(PLACE, (0x0A000001, 0b100)),
        Entry(OWN, (0x0A000001, 1 << 31, 1)),
        Entry(SOURCE, (0x0A000009,), (1, 9, 255)),
        Entry(DESTINATION, (0x0A000009,), (1, 255)),
    }
    assert set(plan_guard(guard, port_of, P4)) == {*entries, Entry(GUARDED, (255,))}


def test_guards_that_do_not_fit_are_named() -> None:
    guard = api.Guard(uid="u", epoch=1, job_id=7, hosts=[api.Host(endpoint=api.Endpoint(address="10.0.0.1", port=4))])
    plans = {uid: plan_guard(guard, port_of) for uid in ("b", "a")}
    assert set(without_room(plans, {HOST: 1}, ())) == {"b"}


def test_one_address_is_of_one_job() -> None:
    host = api.Host(endpoint=api.Endpoint(address="10.0.0.1", port=4))
    desired = api.DesiredState(switch_name="sw", generation=1)
    desired.guards.append(api.Guard(uid="u", name="ns/one", job_id=255, hosts=[host]))
    validate(desired, "sw", LIMITS)
    desired.guards.append(api.Guard(uid="v", name="ns/two", job_id=255, hosts=[host]))
    with pytest.raises(InvalidState, match=r"guard of ns/two: 10\.0\.0\.1 is also a host in the guard of ns/one"):
        validate(desired, "sw", LIMITS)


def test_a_new_epoch_tears_the_job_down_first() -> None:
    now = combine({3: plan_job(example(), port_of, LIMITS)})
    later = example()
    later.epoch = 2
    changes = diff(now, combine({3: plan_job(later, port_of, LIMITS)}))
    assert changes.resets == {3}
    assert sum(len(batch) for batch in changes.removals) == len(now)
    assert {update.op for batch in changes.additions for update in batch} == {Op.INSERT}


def test_a_job_whose_hosts_all_change_is_torn_down_first() -> None:
    """In between it would be known without a guard: an address may be another job's first, so none can be kept."""

    def state(*addresses: str) -> State:
        hosts = [api.Host(endpoint=api.Endpoint(address=address, port=1)) for address in addresses]
        guard = api.Guard(uid="u", epoch=1, job_id=3, hosts=hosts)
        return combine({3: plan_job(example(), port_of, LIMITS)}, {"u": plan_guard(guard, port_of)})

    assert diff(state("10.0.0.1", "10.0.0.2"), state("10.0.0.3", "10.0.0.4")).resets == {3}
    changes = diff(state("10.0.0.1", "10.0.0.2"), state("10.0.0.2", "10.0.0.3"))
    assert not changes.resets and {u.entry.table for batch in changes.batches for u in batch} == {HOST}
    walk(state("10.0.0.1"), state("10.0.0.2"), diff(state("10.0.0.1"), state("10.0.0.2")), random.Random(1))


def test_a_moved_worker_changes_its_own_entries_only() -> None:
    now = combine({3: plan_job(example(), port_of, LIMITS)})
    moved = example()
    moved.members[1].endpoint.port = 7
    changes = diff(now, combine({3: plan_job(moved, port_of, LIMITS)}))
    assert not changes.resets
    touched = {(update.op, update.entry.key) for batch in changes.batches for update in batch}
    assert touched == {
        (Op.DELETE, (ADMISSION, (3, 2, 0, 2))),
        (Op.INSERT, (ADMISSION, (3, 7, 0, 2))),
        (Op.INSERT, (REPLICA, (9, 7, 2))),
        (Op.MODIFY, (GROUP, (9,))),
        (Op.DELETE, (REPLICA, (9, 2, 2))),
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda job: setattr(job, "values", 100), "ValuesUnsupported"),
        (
            lambda job: job.regions.extend(api.Region(start=1024 + n, size=1) for n in range(4)),
            "TooManyRegions",
        ),
    ],
)
def test_what_the_switch_cannot_hold(change: object, reason: str) -> None:
    job = example()
    assert callable(change)
    change(job)
    with pytest.raises(CannotHold) as caught:
        plan_job(job, port_of, LIMITS)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda job: setattr(job, "job_id", 0), "job_id must be 1..255"),
        (lambda job: setattr(job, "uid", ""), "uid is empty"),
        (lambda job: setattr(job.members[1], "bit", 0), "both have bit 0 of bitmap0"),
        (lambda job: setattr(job.members[1], "bit", 32), "bit 32 is above 31"),
        (lambda job: setattr(job.members[1], "rank", 0), "ranks are unique"),
        (lambda job: setattr(job.regions[0], "size", 4097), "outside the switch, which has 4096"),
        (lambda job: setattr(job.regions[0], "size", 0), "is empty"),
        (lambda job: job.regions.append(api.Region(start=1023, size=5)), "overlaps"),
        (lambda job: job.ClearField("regions"), "no region"),
        (lambda job: job.ClearField("members"), "no member and no rack"),
        (lambda job: job.ClearField("parameter_servers"), "no parameter server"),
        (lambda job: setattr(job.members[0].endpoint, "address", "fe80::1"), "is not IPv4"),
        (lambda job: setattr(job.members[0].endpoint, "mac", "zz"), "is not like"),
        (
            lambda job: job.racks.append(api.Rack(bit=0, workers=33, uplink=api.Endpoint(address="10.0.0.1"))),
            "workers must be 1..32",
        ),
    ],
)
def test_what_can_never_hold(change: object, text: str) -> None:
    job = example()
    assert callable(change)
    change(job)
    with pytest.raises(InvalidState, match=text):
        validate(api.DesiredState(switch_name="sw", generation=1, jobs=[job]), "sw", LIMITS)


def test_jobs_share_neither_id_nor_group() -> None:
    first, second = example(), example()
    state = api.DesiredState(switch_name="sw", generation=1, jobs=[first, second])
    with pytest.raises(InvalidState, match="job_id is also that of"):
        validate(state, "sw", LIMITS)
    state.jobs[1].job_id = 4
    with pytest.raises(InvalidState, match="multicast_group is also that of"):
        validate(state, "sw", LIMITS)
    state.jobs[1].multicast_group = 10
    validate(state, "sw", LIMITS)  # regions may be shared: that is ATP's mode
    with pytest.raises(InvalidState, match="this agent serves 'other'"):
        validate(state, "other", LIMITS)
