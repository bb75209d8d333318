# SPDX-License-Identifier: Apache-2.0
"""How outcomes become counts, and which tests count as failing on atp alone."""

from __future__ import annotations

from pathlib import Path

from pytorch.results import Outcome, Results, read_exceptions


def results() -> Results:
    made = Results("2.15.0+cu132")
    for test, gloo, atp in (
        ("A.both", "passed", "passed"),
        ("A.lost", "passed", "failed"),
        ("A.left_out", "passed", "skipped"),
        ("A.never", "failed", "failed"),
        ("A.gpu", "skipped", "skipped"),
        ("A.gained", "failed", "passed"),
    ):
        made.add("suite", test, "gloo", Outcome(gloo))
        made.add("suite", test, "atp", Outcome(atp))
    return made


def test_counts_and_what_fails_only_on_atp() -> None:
    assert results().summary() == {
        "suite": {
            "gloo": {"passed": 3, "failed": 2, "skipped": 1},
            "atp": {"passed": 2, "failed": 2, "skipped": 2},
            "only_atp_failures": ["A.left_out", "A.lost"],
        }
    }


def test_a_failure_needs_a_reason_and_an_exception_must_not_pass() -> None:
    bad = results().unexplained({"suite.A.lost": "a reason", "suite.A.both": "an old reason"})
    assert bad == ["suite: A.left_out: passes on gloo, not on atp", "suite: A.both: is an exception, but passes"]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    made = results()
    made.notes.append("a note")
    made.write(tmp_path)
    assert Results.read(tmp_path) == made


def test_the_tables_name_reasons() -> None:
    text = results().markdown({"suite.A.lost": "because"})
    assert "| suite | 3 | 2 | 1 | 2 | 2 | 2 | 2 | 0 |" in text
    assert "- `suite.A.lost`: because" in text
    assert "- `suite.A.left_out`: no reason given" in text
    assert "Fail on both here: `suite.A.never`." in text


def test_an_exception_can_end_with_a_version(tmp_path: Path) -> None:
    path = tmp_path / "exceptions.toml"
    path.write_text('[exceptions]\n"s.always" = "never"\n"s.once" = { before = "2.10", reason = "old" }\n')
    assert read_exceptions(path, "2.9.1+cu130") == {"s.always": "never", "s.once": "old"}
    assert read_exceptions(path, "2.10.0") == {"s.always": "never"}


def test_the_list_of_exceptions_can_be_read() -> None:
    for version in ("1.13.0a0", "2.4.1", "2.15.0+cu132"):
        exceptions = read_exceptions(Path(__file__).with_name("exceptions.toml"), version)
        assert exceptions
        assert all(reason for reason in exceptions.values())
