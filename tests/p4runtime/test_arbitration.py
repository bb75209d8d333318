# SPDX-License-Identifier: Apache-2.0
"""Client arbitration, as the P4Runtime specification tells it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from atp_softswitch.arbitration import Arbiter, Notice
from atp_softswitch.errors import Code, P4RuntimeError

OK, NONE, BACKUP = Code.OK, Code.NOT_FOUND, Code.ALREADY_EXISTS


def test_the_highest_election_id_is_primary_and_all_hear_it() -> None:
    arbiter = Arbiter(1)
    assert arbiter.update(1, 1, "", 10) == [Notice(1, "", 10, OK)]
    assert arbiter.update(2, 1, "", 5) == [Notice(2, "", 10, BACKUP)]
    assert arbiter.update(3, 1, "", 20) == [
        Notice(1, "", 20, BACKUP),
        Notice(2, "", 20, BACKUP),
        Notice(3, "", 20, OK),
    ]
    arbiter.check(1, "", 20)
    for other in (10, 5, None, 0):
        with pytest.raises(P4RuntimeError) as caught:
            arbiter.check(1, "", other)
        assert caught.value.code == Code.PERMISSION_DENIED


def test_no_backup_is_raised_when_the_primary_leaves() -> None:
    arbiter = Arbiter(1)
    arbiter.update(1, 1, "", 10)
    arbiter.update(2, 1, "", 5)
    assert arbiter.leave(1) == [Notice(2, "", 10, NONE)]
    with pytest.raises(P4RuntimeError):
        arbiter.check(1, "", 5)
    assert arbiter.update(2, 1, "", 9) == [Notice(2, "", 10, NONE)], "lower than the highest ever seen"
    assert arbiter.update(2, 1, "", 10) == [Notice(2, "", 10, OK)], "equal is enough"


def test_a_primary_can_step_down() -> None:
    arbiter = Arbiter(1)
    arbiter.update(1, 1, "", 10)
    arbiter.update(2, 1, "", 5)
    assert arbiter.update(1, 1, "", 3) == [Notice(1, "", 10, NONE), Notice(2, "", 10, NONE)]


def test_the_primary_may_repeat_itself() -> None:
    arbiter = Arbiter(1)
    arbiter.update(1, 1, "", 10)
    arbiter.update(2, 1, "", 5)
    assert arbiter.update(1, 1, "", 10) == [Notice(1, "", 10, OK)], "nobody else is told of no change"


def test_without_an_election_id_one_is_never_primary() -> None:
    arbiter = Arbiter(1)
    assert arbiter.update(1, 1, "", None) == [Notice(1, "", None, NONE)]


def test_roles_are_independent() -> None:
    arbiter = Arbiter(1)
    arbiter.update(1, 1, "", 10)
    assert arbiter.update(2, 1, "metrics", 1) == [Notice(2, "metrics", 1, OK)]
    arbiter.check(1, "metrics", 1)
    with pytest.raises(P4RuntimeError):
        arbiter.check(1, "metrics", 10)


@pytest.mark.parametrize(
    ("session", "device", "role", "election", "code"),
    [
        (2, 7, "", 11, Code.NOT_FOUND),
        (2, 1, "", 10, Code.INVALID_ARGUMENT),
        (1, 1, "other", 11, Code.FAILED_PRECONDITION),
    ],
)
def test_refusals(session: int, device: int, role: str, election: int, code: Code) -> None:
    arbiter = Arbiter(1)
    arbiter.update(1, 1, "", 10)
    with pytest.raises(P4RuntimeError) as caught:
        arbiter.update(session, device, role, election)
    assert caught.value.code == code
    arbiter.check(1, "", 10)  # nothing has changed


class Arbitration(RuleBasedStateMachine):
    """Sessions come, bid and go in any order; each believes the last notice it got."""

    def __init__(self) -> None:
        super().__init__()
        self.arbiter = Arbiter(1)
        self.bids: dict[int, int | None] = {}
        self.told: dict[int, Code] = {}
        self.highest: int | None = None

    def hear(self, notices: list[Notice]) -> None:
        for notice in notices:
            self.told[notice.session] = notice.code
            assert notice.election_id == self.highest

    @rule(session=st.integers(1, 4), bid=st.one_of(st.none(), st.integers(1, 6)))
    def bid(self, session: int, bid: int | None) -> None:
        taken = {other: value for other, value in self.bids.items() if other != session}
        if bid is not None and bid in taken.values():
            with pytest.raises(P4RuntimeError):
                self.arbiter.update(session, 1, "", bid)
            return
        self.bids[session] = bid
        if bid is not None:
            self.highest = max(bid, self.highest or 0)
        self.hear(self.arbiter.update(session, 1, "", bid))

    @rule(session=st.integers(1, 4))
    def leave(self, session: int) -> None:
        self.bids.pop(session, None)
        self.told.pop(session, None)
        self.hear(self.arbiter.leave(session))

    @invariant()
    def at_most_one_primary_and_all_know_it(self) -> None:
        primaries = [session for session, code in self.told.items() if code == OK]
        assert len(primaries) <= 1
        assert set(self.told) == set(self.bids)
        rest = BACKUP if primaries else NONE
        assert all(code == rest for session, code in self.told.items() if session not in primaries)
        if primaries:
            assert self.bids[primaries[0]] == self.highest
            self.arbiter.check(1, "", self.highest)


TestArbitration = Arbitration.TestCase
TestArbitration.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
