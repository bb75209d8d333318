# SPDX-License-Identifier: Apache-2.0
"""Entry of ``python -m demo run`` and ``python -m demo clean`` (``hack/`` on the path)."""

from __future__ import annotations

import argparse
import sys

from localcluster.errors import ClusterError

from . import clean
from .kube import CommandFailed


def main() -> int:
    parser = argparse.ArgumentParser(prog="demo", description="Train a real model through in-network aggregation.")
    parser.add_argument("action", choices=["run", "clean"])
    action: str = parser.parse_args().action
    try:
        if action == "clean":
            clean.everything()
        else:
            from . import run  # needs what `make setup` installs; `clean` must not

            run.demo()
    except (ClusterError, CommandFailed) as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "\ndemo: interrupted; `make demo` goes on from here, `make clean-demo` removes everything", file=sys.stderr
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
