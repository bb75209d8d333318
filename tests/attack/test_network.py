# SPDX-License-Identifier: Apache-2.0
"""Attacks by packets: none gets anywhere, the attacker is named; without what stops them they do get somewhere."""

from __future__ import annotations

import pytest
from attack.network import ATTACKS

pytestmark = pytest.mark.root

# What happens without what stops them is partly up to chance: these go wrong every time.
SURE = ("raw_result", "stolen_sum", "uplink_own_address", "strangers_traffic", "starved_tenfold")


@pytest.mark.parametrize("name", ATTACKS)
def test_held_off(name: str) -> None:
    outcome = ATTACKS[name](True)
    assert outcome.packets > 0
    assert outcome.wrong_sums == 0
    assert outcome.held, outcome.detail


@pytest.mark.parametrize("name", SURE)
def test_without_what_stops_it_it_works(name: str) -> None:
    outcome = ATTACKS[name](False)
    assert not outcome.held, outcome.detail
