# SPDX-License-Identifier: Apache-2.0
"""All missing prerequisites are named at once, each with what fixes it."""

from __future__ import annotations

import pytest
from localcluster import prereqs


def everything_missing() -> list[prereqs.Missing]:
    return prereqs.find_missing(exists=lambda _: False, version_of=lambda _: None)


def test_a_bare_machine_hears_everything_at_once() -> None:
    missing = everything_missing()
    names = {m.name for m in missing}
    assert {
        "containerd",
        "runc",
        "buildah",
        "debootstrap",
        "nftables",
        "clang-14",
        "Go",
        "Rust",
        "Python",
    } <= names
    assert len(missing) == len(prereqs.APT) + len(prereqs.TOOLCHAINS)
    text = prereqs.report(missing, root=False)
    for package in prereqs.APT:
        assert f"fix: apt-get install {package.name}" in text
    command = text.splitlines()[-1]
    assert command.startswith("  sudo apt-get install -y")
    assert all(f" {package.name}" in command for package in prereqs.APT)
    assert " Go" not in command


def test_a_complete_machine_hears_so() -> None:
    missing = prereqs.find_missing(exists=lambda _: True, version_of=lambda _: (99, 0))
    assert missing == []
    assert prereqs.report(missing, root=True) == "all prerequisites are installed"


def test_an_old_toolchain_is_told_with_both_versions() -> None:
    missing = prereqs.find_missing(exists=lambda _: True, version_of=lambda t: (1, 19, 8) if t.name == "Go" else (99,))
    assert [m.name for m in missing] == ["Go"]
    assert "1.19.8" in missing[0].problem
    assert "1.26" in missing[0].problem


def test_one_absent_file_of_a_package_is_enough() -> None:
    missing = prereqs.find_missing(exists=lambda p: p != "/usr/lib/cni/bridge", version_of=lambda _: (99,))
    assert [m.apt for m in missing] == ["containernetworking-plugins"]
    assert "/usr/lib/cni/bridge" in missing[0].problem


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("go version go1.26.8 linux/amd64", (1, 26, 8)),
        ("cargo 1.88.0 (873a06493 2025-05-10)", (1, 88, 0)),
        ("Python 3.11.2", (3, 11, 2)),
        ("nothing here", None),
    ],
)
def test_versions_are_read_from_what_tools_print(text: str, version: tuple[int, ...] | None) -> None:
    assert prereqs.parse_version(text) == version


def test_probes_look_at_this_machine() -> None:
    assert prereqs.probe_exists("sh")
    assert prereqs.probe_exists("/etc/passwd")
    assert prereqs.probe_exists("python:json")
    assert not prereqs.probe_exists("no-such-command")
    assert not prereqs.probe_exists("/no/such/file")
    assert not prereqs.probe_exists("python:no_such_module")


def test_apt_runs_through_sudo_for_users_only() -> None:
    assert prereqs.apt_command(["runc"], root=True)[0] == "apt-get"
    assert prereqs.apt_command(["runc"], root=False)[:2] == ["sudo", "apt-get"]
