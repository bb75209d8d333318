# SPDX-License-Identifier: Apache-2.0
"""What ran and how it ended: for programs (JSON) and for docs (Markdown)."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

BACKENDS = ("gloo", "atp")
OUTCOMES = ("passed", "failed", "skipped")


@dataclass
class Outcome:
    """How a test ended on a backend.

    Args:
        outcome: "passed", "failed" or "skipped".
        text: the error, or why it was skipped.
        seconds: it took.
        groups: process groups that atp made in it.
        tries: more than one if it failed at first.
    """

    outcome: str
    text: str = ""
    seconds: float = 0.0
    groups: int = 0
    tries: int = 1


@dataclass
class Results:
    """Outcomes by suite, test and backend.

    Args:
        torch: the version.
        suites: suite -> test -> backend -> outcome.
        notes: about suites that did not run.
    """

    torch: str = ""
    suites: dict[str, dict[str, dict[str, Outcome]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, suite: str, test: str, backend: str, outcome: Outcome) -> None:
        """Notes one outcome."""
        self.suites.setdefault(suite, {}).setdefault(test, {})[backend] = outcome

    def count(self, suite: str, backend: str, outcome: str) -> int:
        """Tests of a suite that ended in this way on this backend."""
        tests = self.suites[suite].values()
        return sum(backend in each and each[backend].outcome == outcome for each in tests)

    def only_atp(self, suite: str) -> list[str]:
        """Tests that pass on gloo and do not pass on atp; a test that atp skips does not pass."""
        return sorted(
            test
            for test, each in self.suites[suite].items()
            if each.get("gloo", Outcome("")).outcome == "passed"
            and each.get("atp", Outcome("passed")).outcome != "passed"
        )

    def summary(self) -> dict[str, Any]:
        """For each suite its counts by backend, and the tests that fail only on atp."""
        return {
            suite: {
                **{
                    backend: {outcome: self.count(suite, backend, outcome) for outcome in OUTCOMES}
                    for backend in BACKENDS
                },
                "only_atp_failures": self.only_atp(suite),
            }
            for suite in self.suites
        }

    def write(self, directory: Path) -> None:
        """Writes result.json (counts) and tests.json (every test)."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "result.json").write_text(json.dumps(self.summary(), indent=2) + "\n")
        (directory / "tests.json").write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, directory: Path) -> Results:
        """What `write` has written."""
        document = json.loads((directory / "tests.json").read_text())
        results = cls(document["torch"], notes=document["notes"])
        for suite, tests in document["suites"].items():
            for test, backends in tests.items():
                for backend, outcome in backends.items():
                    results.add(suite, test, backend, Outcome(**outcome))
        return results

    def unexplained(self, exceptions: dict[str, str]) -> list[str]:
        """Tests that fail only on atp without a reason in the list of exceptions, and exceptions that pass."""
        bad = []
        for suite in self.suites:
            only = self.only_atp(suite)
            bad += [
                f"{suite}: {test}: passes on gloo, not on atp" for test in only if f"{suite}.{test}" not in exceptions
            ]
            bad += [
                f"{suite}: {test}: is an exception, but passes"
                for test, each in self.suites[suite].items()
                if f"{suite}.{test}" in exceptions and each.get("atp", Outcome("")).outcome == "passed"
            ]
        return bad

    def markdown(self, exceptions: dict[str, str]) -> str:
        """The tables of docs/torch-tests.md."""
        lines = [
            f"Measured with torch {self.torch.split('+')[0]}.",
            "",
            "| suite | gloo passed | failed | skipped | atp passed | failed | skipped | pass on gloo only "
            "| made an atp group |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for suite in self.suites:
            counts = [str(self.count(suite, backend, outcome)) for backend in BACKENDS for outcome in OUTCOMES]
            passed = [each["atp"] for each in self.suites[suite].values() if "atp" in each]
            proven = sum(outcome.outcome == "passed" and outcome.groups > 0 for outcome in passed)
            lines.append(f"| {suite} | {' | '.join(counts)} | {len(self.only_atp(suite))} | {proven} |")
        lines += ["", *self._list("Pass on gloo and not on atp", "only_atp", exceptions)]
        both = [
            f"`{suite}.{test}`"
            for suite, tests in self.suites.items()
            for test, each in tests.items()
            if all(each.get(backend, Outcome("")).outcome == "failed" for backend in BACKENDS)
        ]
        lines += ["", f"Fail on both here: {', '.join(sorted(both)) or 'none'}."]
        again = [
            f"`{suite}.{test}` ({backend})"
            for suite, tests in self.suites.items()
            for test, each in tests.items()
            for backend, outcome in each.items()
            if outcome.tries > 1 and outcome.outcome == "passed"
        ]
        lines += ["", f"Passed only when run again: {', '.join(sorted(again)) or 'none'}."]
        lines += ["", *[f"- {note}" for note in self.notes]] if self.notes else []
        return "\n".join(lines) + "\n"

    def _list(self, title: str, method: str, exceptions: dict[str, str]) -> list[str]:
        named = [f"{suite}.{test}" for suite in self.suites for test in getattr(self, method)(suite)]
        if not named:
            return [f"{title}: none."]
        return [f"{title}:", "", *[f"- `{test}`: {exceptions.get(test, 'no reason given')}" for test in named]]


def replace_section(path: Path, name: str, text: str) -> None:
    """Puts a text between the comments `<!-- name -->` and `<!-- end of name -->` of a Markdown file."""
    before, begin, rest = path.read_text().partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->\n")
    if not begin or not end:
        raise ValueError(f"{path} has no section {name}")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def read_exceptions(path: Path, torch: str) -> dict[str, str]:
    """The tests that cannot hold for atp with this version of torch: "suite.class.test" -> the reason.

    A reason alone is one for every version, {before = "2.15", reason = ".."} one for those before.
    """
    version = _numbers(torch)
    exceptions = {}
    for test, entry in tomllib.loads(path.read_text())["exceptions"].items():
        if isinstance(entry, str):
            exceptions[test] = entry
        elif version < _numbers(entry["before"]):
            exceptions[test] = entry["reason"]
    return exceptions


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])
