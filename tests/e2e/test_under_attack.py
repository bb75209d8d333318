# SPDX-License-Identifier: Apache-2.0
"""Every attack that needs the cluster: nobody but the attacker notices."""

from __future__ import annotations

import pytest
from attack import control_plane, hostile_pod
from e2e.support import Installation

ATTACKS = {**hostile_pod.ATTACKS, **control_plane.ATTACKS}
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_is_noticed_by_nobody_else(installation: Installation, name: str) -> None:
    outcome = ATTACKS[name](installation)
    assert outcome.name == name and outcome.packets > 0
    assert outcome.held, outcome.detail
    print(outcome.detail)
