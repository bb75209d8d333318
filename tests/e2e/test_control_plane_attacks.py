# SPDX-License-Identifier: Apache-2.0
"""Every attack of tests/attack/control_plane.py on the cluster: nobody but the attacker notices."""

from __future__ import annotations

import pytest
from attack.control_plane import ATTACKS
from e2e.support import Installation

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_is_noticed_by_nobody_else(installation: Installation, name: str) -> None:
    outcome = ATTACKS[name](installation)
    assert outcome.name == name and outcome.packets > 0
    assert outcome.held, outcome.detail
    print(outcome.detail)
