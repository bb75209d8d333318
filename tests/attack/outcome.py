# SPDX-License-Identifier: Apache-2.0
"""What became of one attack."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """Result of one attack that was carried out against the product.

    Attributes:
        name: short, unique, as in docs/security.md.
        packets: packets, requests or objects that the attacker sent.
        wrong_sums: elements of the victims' results that differ from the right ones.
        named_attacker: how the product names the attacker (port, pod or user), empty: it does not.
        held: nobody but the attacker noticed anything: no wrong sum, no failed or slowed job, nothing told or stolen.
        detail: what was seen, for a person.
    """

    name: str
    packets: int
    wrong_sums: int
    named_attacker: str
    held: bool
    detail: str = ""
