# SPDX-License-Identifier: Apache-2.0
"""``python -m bmv2``: train examples/digits with a switch in the middle."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .run import Options, main


def parse() -> Options:
    """The command line."""
    default = Options()
    parser = argparse.ArgumentParser(prog="python -m bmv2", description=__doc__)
    parser.add_argument("--switch", choices=("bmv2", "software"), default=default.switch)
    parser.add_argument("--workers", type=int, default=default.workers)
    parser.add_argument("--epochs", type=int, default=default.epochs)
    parser.add_argument("--batch", type=int, default=default.batch, help="images of one rank in one step")
    parser.add_argument("--mode", choices=("Shared", "Reserved"), default=default.mode)
    parser.add_argument("--lr", type=float, default=default.lr)
    parser.add_argument(
        "--aggregators", type=int, default=default.aggregators, help="that the job asks for; 0: few enough for bmv2"
    )
    parser.add_argument("--no-check-sum", action="store_true", help="do not compare every sum with the exact one")
    parser.add_argument("--result", type=Path, default=default.result, help="JSON file of the result")
    given = parser.parse_args()
    if not 1 <= given.workers <= 32:
        parser.error("--workers must be 1..32: they are one rack")
    return Options(
        switch=given.switch,
        workers=given.workers,
        epochs=given.epochs,
        batch=given.batch,
        lr=given.lr,
        mode=given.mode,
        aggregators=given.aggregators,
        check_sum=not given.no_check_sum,
        result=given.result,
    )


sys.exit(main(parse()))
