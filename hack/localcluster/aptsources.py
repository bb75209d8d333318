# SPDX-License-Identifier: Apache-2.0
"""The host's own Debian package sources, lent to image builds, so that no file of ours names a mirror."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import ClusterError

_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


@dataclass(frozen=True)
class Source:
    """One place to get binary packages from."""

    uri: str
    suites: tuple[str, ...]
    components: tuple[str, ...]


def parse_one_line(text: str) -> list[Source]:
    """The classic format of sources.list(5): `deb [options] uri suite component...`."""
    sources = []
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if not words or words[0] != "deb":
            continue
        rest = words[1:]
        if rest and rest[0].startswith("["):
            end = next(i for i, word in enumerate(rest) if word.endswith("]"))
            rest = rest[end + 1 :]
        if len(rest) >= 2:
            sources.append(Source(rest[0], (rest[1],), tuple(rest[2:])))
    return sources


def parse_deb822(text: str) -> list[Source]:
    """The paragraph format of *.sources files; a paragraph may list several URIs and suites."""
    sources = []
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for paragraph in "\n".join(lines).split("\n\n"):
        fields: dict[str, str] = {}
        key = ""
        for line in paragraph.splitlines():
            if line[:1].isspace():
                fields[key] = f"{fields.get(key, '')} {line.strip()}"
            elif ":" in line:
                key, _, value = line.partition(":")
                key = key.strip().lower()
                fields[key] = value.strip()
        if "deb" in fields.get("types", "").split() and fields.get("enabled", "yes").lower() != "no":
            suites, components = (
                tuple(fields.get("suites", "").split()),
                tuple(fields.get("components", "").split()),
            )
            sources += [Source(uri, suites, components) for uri in fields.get("uris", "").split()]
    return sources


def for_release(sources: Sequence[Source], release: str) -> list[Source]:
    """Keeps Debian's own suites of one release (also -updates and -security); third parties drop out."""
    wanted = {release, f"{release}-updates", f"{release}-security"}
    kept = []
    for source in sources:
        suites = tuple(s for s in source.suites if s in wanted)
        debian = source.uri.rstrip("/").rsplit("/", 1)[-1] in ("debian", "debian-security") or "/debian" in source.uri
        if suites and debian and "main" in source.components:
            kept.append(Source(source.uri, suites, ("main",)))
    return kept


def host_sources(release: str, etc: Path = Path("/etc/apt")) -> list[Source]:
    """The host's sources of `release`; ATP_DEBIAN_MIRROR (a URI) replaces them.

    Raises ClusterError when the host has none, as on another distribution.
    """
    if os.environ.get("ATP_DEBIAN_MIRROR"):
        return [Source(os.environ["ATP_DEBIAN_MIRROR"], (release,), ("main",))]
    found: list[Source] = []
    lists = [etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))]
    for file in lists:
        if file.is_file() and file.suffix == ".sources":
            found += parse_deb822(file.read_text())
        elif file.is_file() and file.suffix == ".list":
            found += parse_one_line(file.read_text())
    kept = for_release(found, release)
    if not kept:
        raise ClusterError(
            f"apt on this machine has no sources of Debian {release}; set ATP_DEBIAN_MIRROR to the URI of a mirror"
        )
    return kept


def mirror(sources: Sequence[Source], release: str) -> str:
    """The URI that debootstrap uses: the first source that has the release itself."""
    for source in sources:
        if release in source.suites:
            return source.uri
    raise ClusterError(f"apt's sources lack the suite {release} itself; set ATP_DEBIAN_MIRROR to the URI of a mirror")


def render(sources: Sequence[Source]) -> str:
    """A *.sources file for inside an image build."""
    return "\n".join(
        f"Types: deb\nURIs: {s.uri}\nSuites: {' '.join(s.suites)}\nComponents: {' '.join(s.components)}\n"
        f"Signed-By: {_KEYRING}\n"
        for s in sources
    )


def host_proxy_conf() -> str:
    """apt.conf lines for the proxies that the host's apt is configured to use; empty if none."""
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True).stdout
    lines = [
        line for line in dump.splitlines() if line.lower().startswith(("acquire::http::proxy", "acquire::https::proxy"))
    ]
    return "".join(f"{line}\n" for line in lines if len(shlex.split(line.rstrip(";"))) == 2)
