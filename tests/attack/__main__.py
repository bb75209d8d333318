# SPDX-License-Identifier: Apache-2.0
"""Carries out every attack; build/attack/result.json, and exit status 1 when one succeeds.

Usage: python -m attack [--only network|control_plane] [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from . import network
from .outcome import Outcome

RESULT = Path(__file__).resolve().parents[2] / "build" / "attack" / "result.json"


def attacks(only: str | None) -> Iterator[tuple[str, Callable[[], Outcome]]]:
    """Name and call of each, in order. Those on the control plane need the local cluster."""
    if only != "control_plane":
        for name, attack in network.ATTACKS.items():
            yield name, lambda attack=attack: attack(True)  # type: ignore[misc]
    if only != "network":
        from . import control_plane

        with control_plane.cluster() as cluster:
            for name, strike in control_plane.ATTACKS.items():
                yield name, lambda strike=strike: strike(cluster)  # type: ignore[misc]


def main() -> int:
    parser = argparse.ArgumentParser(prog="attack", description=__doc__)
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument("--only", choices=("network", "control_plane"))
    options = parser.parse_args()
    rows = []
    for name, attack in attacks(options.only):
        if options.names and name not in options.names:
            continue
        try:
            outcome = attack()
        except Exception:
            traceback.print_exc()
            outcome = Outcome(name, 0, 0, "", False, "could not be carried out to the end")
        print(f"{'held' if outcome.held else 'SUCCEEDED':9}  {outcome.name}: {outcome.detail}", flush=True)
        rows.append(
            {
                "name": outcome.name,
                "packets": outcome.packets,
                "wrong_sums": outcome.wrong_sums,
                "named_attacker": outcome.named_attacker,
                "held": outcome.held,
            }
        )
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({"attacks": rows}, indent=2) + "\n", encoding="utf-8")
    failed = [row["name"] for row in rows if not row["held"]]
    print(f"{len(rows) - len(failed)} of {len(rows)} attacks held off; {RESULT}")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
