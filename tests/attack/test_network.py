# SPDX-License-Identifier: Apache-2.0
"""Attacks by packets: none gets anywhere, the attacker is named; and without the guard they do get somewhere."""

from __future__ import annotations

import pytest
from attack.network import ATTACKS

pytestmark = pytest.mark.root

# What happens without the guard is partly up to chance: these go wrong every time.
SURE = ("raw_result", "stolen_sum", "uplink_own_address", "strangers_traffic")


@pytest.mark.parametrize("name", ATTACKS)
def test_held_off(name: str) -> None:
    outcome = ATTACKS[name](True)
    assert outcome.packets > 0
    assert outcome.wrong_sums == 0
    assert outcome.held, outcome.detail


@pytest.mark.parametrize("name", SURE)
def test_without_the_guard_it_works(name: str) -> None:
    outcome = ATTACKS[name](False)
    assert not outcome.held, outcome.detail
