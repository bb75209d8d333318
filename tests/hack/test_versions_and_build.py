# SPDX-License-Identifier: Apache-2.0
"""Pins, cache keys and build command lines."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from localcluster import binaries, versions
from localcluster.paths import HACK, Paths

GO = HACK / "go"


def test_minimum_versions_are_those_of_the_modules() -> None:
    needed = re.search(r'^rust-version = "([\d.]+)"', (HACK.parent / "native/Cargo.toml").read_text(), re.MULTILINE)
    assert needed is not None
    assert tuple(int(part) for part in needed.group(1).split(".")) == versions.MIN_RUST
    for file in GO.glob("*/go.mod"):
        go = re.search(r"^go (\d+)\.(\d+)", file.read_text(), re.MULTILINE)
        assert go is not None
        assert (int(go.group(1)), int(go.group(2))) <= versions.MIN_GO, file


def test_every_binary_has_a_committed_module() -> None:
    for binary in versions.BINARIES:
        assert (GO / binary.module / "go.mod").is_file(), binary.name
        if binary.module != "pause":  # it has no dependencies, so nothing to sum up
            assert (GO / binary.module / "go.sum").is_file(), binary.name


def test_go_mod_files_pin_the_versions_we_announce() -> None:
    pins = {
        "kubernetes": f"k8s.io/kubernetes {versions.KUBERNETES}",
        "etcd": f"go.etcd.io/etcd/server/v3 {versions.ETCD}",
        "helm": f"helm.sh/helm/v3 {versions.HELM}",
        "coredns": f"github.com/coredns/coredns {versions.COREDNS}",
    }
    for module, pin in pins.items():
        assert pin in (GO / module / "go.mod").read_text()


def test_every_staging_module_is_replaced_by_the_matching_release() -> None:
    text = (GO / "kubernetes" / "go.mod").read_text()
    release = "v0" + versions.KUBERNETES.removeprefix("v1")
    replaced = dict(re.findall(r"^\t(\S+) => \S+ (\S+)$", text, re.MULTILINE))
    assert len(replaced) > 30
    assert set(replaced.values()) == {release}
    # k8s.io/kubernetes itself asks for v0.0.0 of them, a version that does not exist.
    asked = re.findall(r"^\t(k8s\.io/\S+) (v\S+)", text, re.MULTILINE)
    staged = {name for name, version in asked if version in ("v0.0.0", release)}
    assert {"k8s.io/api", "k8s.io/client-go"} <= staged <= set(replaced)


def test_tool_lines_cover_what_is_built() -> None:
    for binary in versions.BINARIES:
        if binary.package != ".":
            assert binary.package in (GO / binary.module / "go.mod").read_text()


def test_cache_key_follows_every_input(tmp_path: Path) -> None:
    modules = tmp_path / "go"
    shutil.copytree(GO, modules)
    before = versions.cache_key(versions.BINARIES, modules, "x86_64")
    assert before == versions.cache_key(tuple(reversed(versions.BINARIES)), modules, "x86_64")
    assert before != versions.cache_key(versions.BINARIES, modules, "aarch64")
    assert before != versions.cache_key(versions.BINARIES[1:], modules, "x86_64")
    (modules / "helm" / "go.sum").write_text("changed")
    assert before != versions.cache_key(versions.BINARIES, modules, "x86_64")
    shutil.copy(GO / "helm" / "go.sum", modules / "helm" / "go.sum")
    assert before == versions.cache_key(versions.BINARIES, modules, "x86_64")
    (modules / "coredns" / "main.go").write_text("package main")
    assert before != versions.cache_key(versions.BINARIES, modules, "x86_64")


def test_kubernetes_binaries_know_their_version() -> None:
    apiserver = next(b for b in versions.BINARIES if b.name == "kube-apiserver")
    argv = binaries.go_build_argv(apiserver, Path("/out"))
    flags = argv[argv.index("-ldflags") + 1]
    assert f"-X k8s.io/component-base/version.gitVersion={versions.KUBERNETES}" in flags
    assert "-X k8s.io/component-base/version.gitMinor=36" in flags
    assert argv[-1] == "k8s.io/kubernetes/cmd/kube-apiserver"
    assert "-mod=readonly" in argv


def test_build_environment_overrides_what_would_change_the_result() -> None:
    env = binaries.go_build_env({"GOFLAGS": "-buildvcs=true -mod=mod -v", "CGO_ENABLED": "1", "HOME": "/h"})
    assert env["CGO_ENABLED"] == "0"
    assert env["GOFLAGS"] == "-v -buildvcs=false"
    assert env["GOWORK"] == "off"
    assert env["HOME"] == "/h"


def test_missing_names_only_what_is_not_there(tmp_path: Path) -> None:
    paths = Paths(cache=tmp_path / "cache", state=tmp_path / "state")
    folder = versions.bin_dir(paths)
    folder.mkdir(parents=True)
    assert [b.name for b in binaries.missing(paths)] == [b.name for b in versions.BINARIES]
    for binary in versions.BINARIES[1:]:
        (folder / binary.name).touch()
    assert [b.name for b in binaries.missing(paths)] == [versions.BINARIES[0].name]


def test_paths_follow_the_environment() -> None:
    home = Path("/home/u")
    assert Paths.from_env({}, home) == Paths(home / ".cache/atp", Path("/var/lib/atp-cluster"))
    assert Paths.from_env({"XDG_CACHE_HOME": "/x"}, home).cache == Path("/x/atp")
    both = Paths.from_env({"XDG_CACHE_HOME": "/x", "ATP_CACHE": "/c", "ATP_CLUSTER_STATE": "/s"}, home)
    assert both == Paths(Path("/c"), Path("/s"))
