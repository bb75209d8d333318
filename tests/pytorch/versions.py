# SPDX-License-Identifier: Apache-2.0
"""The quick suites on every version of torch that is supported: `make test-torch-versions`.

    python -m pytorch.versions [VERSION ..] [--keep]

An environment that this installs (about 5 GB) goes away after its run, but for the newest three, or with --keep.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torchenv

from pytorch.results import read_exceptions, replace_section

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "build" / "torch"
EXCEPTIONS = Path(__file__).with_name("exceptions.toml")
STAY = 3


def environment(version: str) -> Path:
    """Where torchenv puts a version."""
    return torchenv.cache() / f"venv-torch-{version}"


def run(version: str, arguments: list[str]) -> dict[str, Any]:
    """Installs a version and runs the quick suites on it: the counts by suite, or what went wrong."""
    output = OUTPUT / "versions" / version
    if "--merge" not in arguments:
        shutil.rmtree(output, ignore_errors=True)
    # The installer's cache would keep every wheel that it has seen.
    with tempfile.TemporaryDirectory(prefix="uv-", dir=torchenv.cache()) as cache:
        before = os.environ.get("UV_CACHE_DIR")
        os.environ["UV_CACHE_DIR"] = cache
        try:
            python = torchenv.interpreter(version)
        except torchenv.TorchError as error:
            return {"error": str(error)}
        finally:
            if before is None:
                del os.environ["UV_CACHE_DIR"]
            else:
                os.environ["UV_CACHE_DIR"] = before
    command = [sys.executable, "-m", "pytorch", "--quick", "--python", str(python), "--output", str(output)]
    done = subprocess.run([*command, *arguments], stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    result = output / "result.json"
    return dict(json.loads(result.read_text())) if result.exists() else {"error": f"it ended with {done.returncode}"}


def unexplained(version: str, suites: dict[str, Any]) -> list[str]:
    """What passes on gloo only, and no exception says why."""
    exceptions = read_exceptions(EXCEPTIONS, version)
    named = [f"{name}.{test}" for name, suite in suites.items() for test in suite["only_atp_failures"]]
    return [test for test in named if test not in exceptions]


def markdown(results: dict[str, Any]) -> str:
    """The table for docs/torch-tests.md."""
    lines = [
        "| torch | gloo passed | failed | skipped | atp passed | failed | skipped | gloo only: reason | none given |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for version, suites in results.items():
        if "error" in suites:
            lines.append(f"| {version} | {suites['error']} |")
            continue
        counts = [
            str(sum(suite[backend][outcome] for suite in suites.values()))
            for backend in ("gloo", "atp")
            for outcome in ("passed", "failed", "skipped")
        ]
        bad = unexplained(version, suites)
        explained = sum(len(suite["only_atp_failures"]) for suite in suites.values()) - len(bad)
        without = ", ".join(f"`{each}`" for each in bad) or "none"
        lines.append(f"| {version} | {' | '.join(counts)} | {explained} | {without} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="pytorch.versions", description=__doc__)
    parser.add_argument("versions", nargs="*", help="only these")
    parser.add_argument("--docs", action="store_true", help="writes the table to docs/torch-tests.md")
    parser.add_argument("--keep", action="store_true", help="no environment is removed")
    arguments, rest = parser.parse_known_args()
    everything = [torchenv.DEBIAN, *(each.version for each in torchenv.MATRIX)]
    path = OUTPUT / "versions.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    bad = False
    for version in arguments.versions or everything:
        before = environment(version).exists()
        known[version] = run(version, rest)
        bad = bad or "error" in known[version] or bool(unexplained(version, known[version]))
        known = {each: known[each] for each in everything if each in known}
        path.write_text(json.dumps(known, indent=2) + "\n")
        stays = before or version in everything[-STAY:] or version in torchenv.NAMED.values()
        if not stays and not arguments.keep:
            shutil.rmtree(environment(version), ignore_errors=True)
    print(markdown(known))
    if arguments.docs:
        replace_section(ROOT / "docs" / "torch-tests.md", "versions", markdown(known))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
