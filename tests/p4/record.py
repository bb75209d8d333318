# SPDX-License-Identifier: Apache-2.0
"""Write bmv2's answers to every conformance vector that it can run (``make -C p4 record``); needs bmv2 and root.

``python tests/p4/record.py [WORD...]``: only vectors whose name contains all the words.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "hack")]

from bmv2.process import reason_not_to_run, version  # noqa: E402
from bmv2_vectors import reason_to_skip, run_on_bmv2  # noqa: E402
from conformance.recording import RECORDED, path_of, write  # noqa: E402
from conformance.test_vectors import OF_P4  # noqa: E402
from two_levels import SCENARIOS, Bmv2Pair, answers_of, path_of_scenario  # noqa: E402


def main(words: list[str]) -> int:
    missing = reason_not_to_run()
    if missing is not None:
        print(missing, file=sys.stderr)
        return 1
    failed = 0
    written: set[Path] = set()
    for name, setup, vector in OF_P4:
        if not all(word in name for word in words):
            continue
        reason = reason_to_skip(setup, vector)
        if reason is not None:
            print(f"left out: {name}: {reason}")
            continue
        try:
            answered = run_on_bmv2(setup, vector)
        except AssertionError as error:
            print(f"FAILED: {name}: {error}", file=sys.stderr)
            failed += 1
            continue
        path = path_of("bmv2", name)
        write(path, name, version(), answered)
        written.add(path)
        print(f"recorded: {name}", flush=True)
    for scenario in SCENARIOS:
        if all(word in f"two-levels: {scenario.name}" for word in words):
            path = path_of_scenario(scenario)
            write(path, f"two-levels: {scenario.name}", version(), answers_of(scenario, Bmv2Pair))
            written.add(path)
            print(f"recorded: two-levels: {scenario.name}", flush=True)
    if not words and not failed:
        for path in set((RECORDED / "bmv2").rglob("*.yaml")) - written:
            path.unlink()
            print(f"removed: {path.name}, which is of no vector any more")
    print(f"{len(written)} recorded, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
