# SPDX-License-Identifier: Apache-2.0
"""Image keys, build contexts, and the host settings lent to builds."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest
from localcluster import aptsources, archive, cli, elevate, images
from localcluster.errors import ClusterError
from localcluster.paths import HACK, Paths

PATHS = Paths(cache=Path("/cache"), state=Path("/state"))


@pytest.fixture
def context(tmp_path: Path) -> Path:
    folder = tmp_path / "context"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("a")
    (folder / "sub/b.txt").write_text("b")
    return folder


def key(context: Path, text: str = "FROM x", **arguments: str) -> str:
    return images.input_key(text, arguments, context, images.context_files(context))


def test_key_follows_every_input_and_nothing_else(context: Path) -> None:
    before = key(context)
    os.utime(context / "a.txt", (0, 0))
    assert key(context) == before
    assert key(context, "FROM y") != before
    assert key(context, ARG="1") != before
    (context / "a.txt").chmod(0o755)
    assert key(context) != before
    (context / "a.txt").chmod(0o644)
    (context / "a.txt").write_text("changed")
    assert key(context) != before
    (context / "a.txt").write_text("a")
    assert key(context) == before
    (context / "c.txt").write_text("")
    assert key(context) != before


def test_context_leaves_out_what_git_ignores_unless_it_is_named(context: Path) -> None:
    subprocess.run(["git", "init", "-q", str(context)], check=True)
    (context / ".gitignore").write_text("dist/\n")
    (context / "dist").mkdir()
    (context / "dist/wheel.whl").write_text("w")
    names = {str(f) for f in images.context_files(context)}
    assert names == {".gitignore", "a.txt", "sub/b.txt"}
    assert images.context_files(context, ["dist", "sub"]) == [Path("dist/wheel.whl"), Path("sub/b.txt")]
    with pytest.raises(ClusterError, match="has no absent"):
        images.context_files(context, ["absent"])


def test_parents_are_recognised_by_their_build_argument() -> None:
    text = (HACK / "images/torch.Containerfile").read_text()
    assert images._declares(text, "BASE")
    assert not images._declares(text, "TORCH")
    assert not images._declares("ARG BASEMENT\n# ARG BASE\n", "BASE")


def test_bad_image_names_are_refused() -> None:
    with pytest.raises(ClusterError, match="lower-case"):
        images.ensure("Bad Name", paths=PATHS)


def test_build_never_pulls_and_mounts_read_only() -> None:
    argv = images.build_argv("ref", {"B": "2", "A": "1"}, [(Path("/host"), "/guest")])
    assert "--pull-never" in argv
    assert argv[argv.index("--volume") + 1] == "/host:/guest:ro"
    assert argv.index("A=1") < argv.index("B=2")


def test_pip_settings_of_the_host_without_its_paths() -> None:
    env = {
        "PIP_INDEX_URL": "https://index.example.org/simple",
        "PIP_FIND_LINKS": "/opt/wheels",
        "PIP_CERT": "/x.pem",
    }
    text = images.pip_conf(env, {"timeout": "60", "index-url": "https://old.example.org"})
    lines = text.splitlines()
    assert lines[0] == "[global]"
    assert "index-url = https://index.example.org/simple" in lines
    assert "timeout = 60" in lines
    assert "cert = /etc/ssl/certs/ca-certificates.crt" in lines
    assert "/opt/wheels" not in text


DEB822 = """\
# a comment
Types: deb deb-src
URIs: http://mirror.example.org/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: https://tools.example.com/apt
Suites: bookworm
Components: main

Types: deb
Enabled: no
URIs: http://off.example.org/debian
Suites: bookworm
Components: main
"""


def test_apt_sources_of_both_formats() -> None:
    found = aptsources.parse_deb822(DEB822)
    assert [s.uri for s in found] == ["http://mirror.example.org/debian", "https://tools.example.com/apt"]
    found += aptsources.parse_one_line(
        "deb [arch=amd64 signed-by=/k.gpg] http://sec.example.org/debian-security bookworm-security main\n"
        "deb-src http://mirror.example.org/debian bookworm main\n"
        "# deb http://no.example.org/debian bookworm main\n"
    )
    kept = aptsources.for_release(found, "bookworm")
    assert [(s.uri, s.suites) for s in kept] == [
        ("http://mirror.example.org/debian", ("bookworm", "bookworm-updates")),
        ("http://sec.example.org/debian-security", ("bookworm-security",)),
    ]
    assert aptsources.mirror(kept, "bookworm") == "http://mirror.example.org/debian"
    assert aptsources.parse_deb822(aptsources.render(kept)) == kept


def test_a_host_without_debian_sources_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATP_DEBIAN_MIRROR", raising=False)
    with pytest.raises(ClusterError, match="ATP_DEBIAN_MIRROR"):
        aptsources.host_sources("bookworm", etc=tmp_path)
    monkeypatch.setenv("ATP_DEBIAN_MIRROR", "http://m.example.org/debian")
    assert aptsources.host_sources("bookworm", etc=tmp_path)[0].uri == "http://m.example.org/debian"


def test_no_committed_file_names_a_mirror() -> None:
    for file in [*HACK.glob("images/*"), *HACK.glob("localcluster/*.py")]:
        assert not re.search(r"https?://[\w.-]*(debian|pypi|ubuntu)", file.read_text()), file


def test_single_binary_image_is_consistent_and_reproducible(tmp_path: Path) -> None:
    binary = tmp_path / "tool"
    binary.write_bytes(b"\x7fELF" + bytes(14) + (62).to_bytes(2, "little") + b"rest")
    targets = [tmp_path / "1.tar", tmp_path / "2.tar"]
    for target in targets:
        archive.write_single_binary_image(binary, "localhost/atp/tool:k", "65535:65535", target)
    assert targets[0].read_bytes() == targets[1].read_bytes()
    with tarfile.open(targets[0]) as tar:
        members = {m.name: tar.extractfile(m).read() for m in tar.getmembers()}  # type: ignore[union-attr]
    (manifest,) = json.loads(members["manifest.json"])
    assert manifest["RepoTags"] == ["localhost/atp/tool:k"]
    config = json.loads(members[manifest["Config"]])
    layer = members[manifest["Layers"][0]]
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    assert config["architecture"] == "amd64"
    assert config["config"]["Entrypoint"] == ["/tool"]


def test_sudo_gets_the_settings_it_would_drop() -> None:
    argv = elevate.argv(["up"], PATHS, {"HTTPS_PROXY": "http://p", "PIP_INDEX_URL": "i", "SECRET": "s"})
    assert argv[:2] == ["sudo", "env"]
    assert "ATP_CACHE=/cache" in argv
    assert "HTTPS_PROXY=http://p" in argv
    assert any(word.startswith("PATH=") and "/usr/sbin" in word for word in argv)
    assert "PIP_INDEX_URL=i" in argv
    assert not any("SECRET" in word for word in argv)
    assert argv[-2:] == [str(HACK / "atp-cluster"), "up"]


def test_the_command_line_for_sudo_says_what_ensure_was_told(tmp_path: Path) -> None:
    args = images.cli_args("x", tmp_path / "C", tmp_path, {"K": "v=1"}, ["wheels"])
    parsed = cli.parser().parse_args(args)
    assert (parsed.name, parsed.file, parsed.context) == ("x", tmp_path / "C", tmp_path)
    assert (parsed.build_arg, parsed.include) == (["K=v=1"], ["wheels"])
