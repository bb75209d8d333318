# SPDX-License-Identifier: Apache-2.0
"""The conformance vectors on the software switch with the tables that bmv2 gets, written over P4Runtime.

Packets are real ones on veth pairs in a namespace of the test, and what bmv2 could run must be answered as bmv2 did.
"""

from __future__ import annotations

from typing import Any

import pytest
from bmv2_vectors import compared_with_bmv2
from conformance.switches import Switch
from conformance.test_vectors import OF_P4, STALE_NS
from softswitch_p4runtime import P4RuntimeTcSwitch


@pytest.mark.root
@pytest.mark.parametrize(("name", "setup", "vector"), [pytest.param(n, s, v, id=n) for n, s, v in OF_P4])
def test_vector(name: str, setup: dict[str, Any], vector: dict[str, Any]) -> None:
    def open_switch() -> Switch:
        return P4RuntimeTcSwitch(setup["aggregators"], setup["values"], STALE_NS)

    compared_with_bmv2(open_switch, name, setup, vector)
