# SPDX-License-Identifier: Apache-2.0
"""Carries out every attack; build/attack/result.json, and exit status 1 when one succeeds.

Usage: python -m attack [--only network|cluster] [NAME ...]
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from . import network
from .outcome import Outcome

RESULT = Path(__file__).resolve().parents[2] / "build" / "attack" / "result.json"


def attacks(only: str | None) -> Iterator[tuple[str, Callable[[], Outcome]]]:
    """Name and call of each, in order; the cluster is made when the first that needs it comes."""
    if only != "cluster":
        for name, attack in network.ATTACKS.items():
            yield name, lambda attack=attack: attack(True)  # type: ignore[misc]
    if only != "network":
        from e2e.support import install

        from . import control_plane, hostile_pod

        installed = functools.cache(install)
        for name, strike in {**hostile_pod.ATTACKS, **control_plane.ATTACKS}.items():
            yield name, lambda strike=strike: strike(installed())  # type: ignore[misc]


def main() -> int:
    parser = argparse.ArgumentParser(prog="attack", description=__doc__)
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument("--only", choices=("network", "cluster"))
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
