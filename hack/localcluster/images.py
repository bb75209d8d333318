# SPDX-License-Identifier: Apache-2.0
"""Container images without Docker or a registry: built with buildah, named by their content, imported.

    reference = images.ensure("operator", Path("operator/Containerfile"), Path("operator"))
    images.load(reference)

A Containerfile starts with `ARG BASE` and `FROM ${BASE}` (Debian with Python) or `ARG TORCH` and
`FROM ${TORCH}`; nothing in it names a registry or a mirror.  The host's package sources, proxies and
certificates are lent to the build and are not part of the image.
"""

from __future__ import annotations

import configparser
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from . import aptsources, elevate, hostnet, runtime
from .errors import ClusterError
from .paths import HACK, Paths, current

PREFIX = "localhost/atp"
RELEASE = "bookworm"
BASE_PACKAGES = ("python3-minimal", "python3", "python3-pip", "python3-venv", "ca-certificates")
_HOST_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_BASE_RECIPE = "1"  # raise when the way the base is made changes

# Build arguments that name another image of ours; a Containerfile that declares one gets it built first.
PARENTS = {"BASE": "base", "TORCH": "torch"}


def ensure(
    name: str,
    containerfile: Path | None = None,
    context_dir: Path | None = None,
    build_args: Mapping[str, str] | None = None,
    *,
    include: Sequence[str] | None = None,
    paths: Paths | None = None,
) -> str:
    """Builds the image unless one with the same inputs exists; returns its reference.

    name: the image becomes localhost/atp/<name>:<hash of all inputs>.
    containerfile: default hack/images/<name>.Containerfile.
    context_dir: what COPY sees; files that git ignores are left out. None: an empty folder.
    include: paths below context_dir (files or folders) to take instead of everything.
    Raises ClusterError with the end of the build's output when it fails.
    """
    paths = paths or current()
    if elevate.needed():
        return elevate.run(cli_args(name, containerfile, context_dir, build_args, include), paths).strip()
    if not re.fullmatch(r"[a-z0-9]+(?:[._-][a-z0-9]+)*", name):
        raise ClusterError(f"image name {name!r}: use lower-case letters, digits, and single . _ - between them")
    if name == "base" and containerfile is None:
        return _ensure_base(paths)
    containerfile = containerfile or HACK / "images" / f"{name}.Containerfile"
    if not containerfile.is_file():
        raise ClusterError(f"{containerfile} does not exist; name the Containerfile with --file")
    text = containerfile.read_text()
    arguments = {arg: ensure(parent, paths=paths) for arg, parent in PARENTS.items() if _declares(text, arg)}
    arguments.update(build_args or {})
    files = context_files(context_dir, include) if context_dir else []
    key = input_key(text, arguments, context_dir, files)
    reference = f"{PREFIX}/{name}:{key}"
    if not exists(reference, paths=paths):
        with _build_lock(paths, name):
            if not exists(reference, paths=paths):
                _build(paths, reference, text, arguments, context_dir, files)
    return reference


def cli_args(
    name: str,
    containerfile: Path | None,
    context_dir: Path | None,
    build_args: Mapping[str, str] | None,
    include: Sequence[str] | None,
) -> list[str]:
    """The command line that does the same as `ensure` with these arguments."""
    args = ["image", "build", name]
    args += ["--file", str(containerfile.absolute())] if containerfile else []
    args += ["--context", str(context_dir.absolute())] if context_dir else []
    for key, value in sorted((build_args or {}).items()):
        args += ["--build-arg", f"{key}={value}"]
    for item in include or ():
        args += ["--include", item]
    return args


def _declares(containerfile: str, arg: str) -> bool:
    return re.search(rf"^\s*ARG\s+{arg}\s*(=.*)?$", containerfile, re.MULTILINE) is not None


def context_files(context: Path, include: Sequence[str] | None = None) -> list[Path]:
    """The files of a build context, relative to it and sorted; git's ignore rules apply inside a checkout."""
    if not context.is_dir():
        raise ClusterError(f"the build context {context} is not a folder")
    listing = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=context,
        capture_output=True,
    )
    if listing.returncode == 0:
        names = {Path(os.fsdecode(n)) for n in listing.stdout.split(b"\0") if n}
        found = {n for n in names if (context / n).is_symlink() or (context / n).is_file()}
    else:
        found = {p.relative_to(context) for p in context.rglob("*") if p.is_symlink() or p.is_file()}
    if include is None:
        return sorted(found)
    chosen: set[Path] = set()
    for item in include:
        wanted = Path(item)
        # A file named outright counts even when git ignores it: a built wheel, for instance.
        below = {f for f in found if f == wanted or wanted in f.parents}
        if not below and (context / wanted).is_file():
            below = {wanted}
        if not below and (context / wanted).is_dir():
            below = {p.relative_to(context) for p in (context / wanted).rglob("*") if p.is_file()}
        if not below:
            raise ClusterError(f"the build context {context} has no {item}")
        chosen |= below
    return sorted(chosen)


def input_key(containerfile: str, arguments: Mapping[str, str], context: Path | None, files: Iterable[Path]) -> str:
    """12 hex digits over all that decides an image: text, arguments, each file's path, mode and content."""
    digest = hashlib.sha256(containerfile.encode())
    for key, value in sorted(arguments.items()):
        digest.update(f"\0arg {key}={value}".encode())
    for file in files:
        path = (context or Path()) / file
        if path.is_symlink():
            digest.update(f"\0link {file} {path.readlink()}".encode())
        else:
            executable = bool(path.stat().st_mode & 0o100)
            digest.update(f"\0file {file} {executable} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()[:12]


def buildah_argv(paths: Paths, *args: str) -> list[str]:
    """A buildah command line with our own storage, apart from the host's."""
    storage = (
        "--root",
        f"{paths.images}/storage",
        "--runroot",
        f"{paths.images}/run",
        "--storage-driver",
        "overlay",
    )
    return ["buildah", *storage, *args]


def _buildah(paths: Paths, *args: str) -> str:
    try:
        result = subprocess.run(buildah_argv(paths, *args), capture_output=True, text=True)
    except FileNotFoundError:
        raise ClusterError("buildah is not installed; run `hack/atp-cluster prereqs --install`") from None
    if result.returncode != 0:
        last = "\n".join((result.stdout + result.stderr).splitlines()[-25:])
        raise ClusterError(f"buildah {args[0]} failed:\n{last}")
    return result.stdout


@contextlib.contextmanager
def _build_lock(paths: Paths, name: str) -> Iterator[None]:
    # Two callers that want one image build it once; different images build side by side.
    locks = paths.images / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def exists(reference: str, *, paths: Paths | None = None) -> bool:
    """True if the image is in the build storage."""
    argv = buildah_argv(paths or current(), "inspect", "--type", "image", reference)
    return subprocess.run(argv, capture_output=True).returncode == 0


def build_argv(reference: str, arguments: Mapping[str, str], mounts: Iterable[tuple[Path, str]]) -> list[str]:
    """The arguments of the `buildah bud` call, without storage options; run it in the staged context."""
    args = [
        "bud",
        "--isolation",
        "chroot",
        "--network",
        "host",
        "--pull-never",
        "--format",
        "oci",
        "--layers=false",
    ]
    for key, value in sorted(arguments.items()):
        args += ["--build-arg", f"{key}={value}"]
    for source, target in mounts:
        args += ["--volume", f"{source}:{target}:ro"]
    return [*args, "--tag", reference, "--file", "Containerfile", "context"]


def _build(
    paths: Paths,
    reference: str,
    text: str,
    arguments: Mapping[str, str],
    context: Path | None,
    files: list[Path],
) -> None:
    print(f"building image {reference}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=paths.images) as folder:
        stage = Path(folder)
        (stage / "Containerfile").write_text(text)
        (stage / "context").mkdir()
        for file in files:
            target = stage / "context" / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2((context or Path()) / file, target, follow_symlinks=False)
        args = build_argv(reference, arguments, _lend_host_settings(stage))
        argv = ["nice", "-n", "10", *buildah_argv(paths, *args)]
        log = paths.images / "logs" / f"{reference.removeprefix(PREFIX + '/').replace(':', '-')}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("w") as output:
            result = subprocess.run(argv, cwd=stage, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    if result.returncode != 0:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise ClusterError(f"building {reference} failed; last lines of {log}:\n{last}")


def _lend_host_settings(stage: Path) -> list[tuple[Path, str]]:
    """Files mounted during the build only: certificates, package sources, pip's settings, apt's proxy."""
    mounts: list[tuple[Path, str]] = []
    if _HOST_CERTIFICATES.exists():
        mounts.append((_HOST_CERTIFICATES, str(_HOST_CERTIFICATES)))
    lists = stage / "sources"
    lists.mkdir()
    (lists / "host.sources").write_text(aptsources.render(aptsources.host_sources(RELEASE)))
    mounts.append((lists, "/etc/apt/sources.list.d"))
    (stage / "apt.conf").write_text(aptsources.host_proxy_conf())
    mounts.append((stage / "apt.conf", "/etc/apt/apt.conf.d/90host"))
    (stage / "pip.conf").write_text(pip_conf(os.environ, _host_pip_conf()))
    mounts.append((stage / "pip.conf", "/etc/pip.conf"))
    return mounts


def _host_pip_conf() -> dict[str, str]:
    merged = configparser.ConfigParser(interpolation=None)
    merged.read(["/etc/pip.conf", Path.home() / ".config/pip/pip.conf", Path.home() / ".pip/pip.conf"])
    return dict(merged["global"]) if merged.has_section("global") else {}


def pip_conf(env: Mapping[str, str], host: Mapping[str, str]) -> str:
    """pip's settings for a build: the host's file, then PIP_* variables, without the host's paths."""
    options = dict(host)
    for key, value in env.items():
        if key.startswith("PIP_") and key != "PIP_CONFIG_FILE":
            options[key.removeprefix("PIP_").lower().replace("_", "-")] = value
    options = {key: value for key, value in options.items() if not value.startswith(("/", "~", "."))}
    options["cert"] = str(_HOST_CERTIFICATES)
    options["no-cache-dir"] = "true"
    options["break-system-packages"] = "true"  # the image's Python is its only one
    return "[global]\n" + "".join(f"{key} = {value}\n" for key, value in sorted(options.items()))


def _ensure_base(paths: Paths) -> str:
    """localhost/atp/base: Debian's minimal system with Python, made with debootstrap."""
    script = (HACK / "images" / "base.sh").read_text()
    key = hashlib.sha256(f"{_BASE_RECIPE} {RELEASE} {BASE_PACKAGES} {script}".encode()).hexdigest()[:12]
    reference = f"{PREFIX}/base:{key}"
    if not exists(reference, paths=paths):
        with _build_lock(paths, "base"):
            if not exists(reference, paths=paths):
                _build_base(paths, reference, script)
    return reference


def _build_base(paths: Paths, reference: str, script: str) -> None:
    print(f"building image {reference} with debootstrap, takes about two minutes", file=sys.stderr, flush=True)
    mirror = aptsources.mirror(aptsources.host_sources(RELEASE), RELEASE)
    container = _buildah(paths, "from", "scratch").strip()
    try:
        root = Path(_buildah(paths, "mount", container).strip())
        log = paths.images / "logs" / "base.log"
        log.parent.mkdir(exist_ok=True)
        argv = [
            *("nice", "-n", "10", "debootstrap", "--variant=minbase", f"--include={','.join(BASE_PACKAGES)}"),
            *(RELEASE, str(root), mirror),
        ]
        with log.open("w") as output:
            environment = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
            result = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        if result.returncode != 0:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise ClusterError(f"debootstrap from {mirror} failed; last lines of {log}:\n{last}")
        trim = subprocess.run(["sh", "-eu", "-s", str(root)], input=script, capture_output=True, text=True)
        if trim.returncode != 0:
            raise ClusterError(f"hack/images/base.sh failed:\n{trim.stderr}")
        _buildah(paths, "umount", container)
        settings = ("--env", "LANG=C.UTF-8", "--env", "PYTHONUNBUFFERED=1", "--cmd", "python3")
        _buildah(paths, "config", *settings, container)
        _buildah(paths, "commit", "--format", "oci", container, reference)
    finally:
        _buildah(paths, "rm", container)


def load(reference: str, *, paths: Paths | None = None) -> None:
    """Imports a built image into the running cluster's containerd; nothing to do if it is there."""
    paths = paths or current()
    if os.environ.get("ATP_KUBECONTEXT"):
        raise ClusterError(
            "ATP_KUBECONTEXT is set: its cluster's nodes are not managed here; "
            "write the image with `hack/atp-cluster image save NAME FILE` and import it there"
        )
    if elevate.needed():
        elevate.run(["image", "load", reference], paths)
        return
    if not runtime.answers(paths):
        raise ClusterError("the cluster is not running; start it with `hack/atp-cluster up`")
    if runtime.image_exists(paths, reference):
        return
    print(f"loading image {reference}", file=sys.stderr, flush=True)
    _stream(_push_argv(paths, reference, "/dev/stdout"), runtime.import_argv(paths, "-"))


def tag(reference: str, name: str, *, paths: Paths | None = None) -> None:
    """Gives a loaded image a second name in the cluster, one that a manifest can keep while the contents change."""
    paths = paths or current()
    if elevate.needed():
        elevate.run(["ctr", "images", "tag", "--force", reference, name], paths)
    else:
        runtime.ctr(paths, "images", "tag", "--force", reference, name)


def save(reference: str, archive: Path, *, paths: Paths | None = None) -> None:
    """Writes a built image to a docker archive, for `ctr images import`, `docker load` or `kind load`."""
    archive = archive.absolute()
    if elevate.needed():
        elevate.run(["image", "save", reference, str(archive)], paths or current())
        return
    if not archive.parent.is_dir():
        raise ClusterError(f"the folder {archive.parent} does not exist")
    partial = archive.with_name(f".{archive.name}.partial")
    partial.unlink(missing_ok=True)
    argv = _push_argv(paths or current(), reference, str(partial))
    result = subprocess.run(argv, capture_output=True, text=True)
    if result.returncode != 0:
        partial.unlink(missing_ok=True)
        raise ClusterError(f"writing {archive} failed: {result.stderr.strip()}")
    partial.rename(archive)


def _push_argv(paths: Paths, reference: str, target: str) -> list[str]:
    push = ("push", "--quiet", "--format", "v2s2")
    return buildah_argv(paths, *push, reference, f"docker-archive:{target}:{reference}")


def _stream(writer: list[str], reader: list[str]) -> None:
    """Runs `writer | reader`: a large image is then not written to the disk once more in between."""
    with tempfile.TemporaryFile("w+") as complaints:
        source = subprocess.Popen(writer, stdout=subprocess.PIPE, stderr=complaints)
        sink = subprocess.Popen(reader, stdin=source.stdout, stdout=subprocess.DEVNULL, stderr=complaints)
        assert source.stdout is not None
        source.stdout.close()  # so that the writer hears it when the reader dies
        codes = (sink.wait(), source.wait())
        if codes != (0, 0):
            complaints.seek(0)
            raise ClusterError(f"loading the image failed: {complaints.read().strip()}")


def push(reference: str, registry: str, *, paths: Paths | None = None) -> str:
    """Pushes a built image to <registry>/<name>:<key> and returns that name, for clusters that are not ours.

    Credentials are buildah's own (`buildah login`, or the file named by REGISTRY_AUTH_FILE).
    """
    if elevate.needed():
        return elevate.run(["image", "push", reference, registry], paths or current()).strip()
    target = f"{registry.rstrip('/')}/{reference.removeprefix(PREFIX + '/')}"
    print(f"pushing {target}", file=sys.stderr, flush=True)
    _buildah(paths or current(), "push", reference, f"docker://{target}")
    return target


def listing(paths: Paths) -> str:
    """The images in the build storage, newest first."""
    template = "{{.Name}}:{{.Tag}}  {{.Size}}  {{.CreatedAt}}"
    return _buildah(paths, "images", "--noheading", "--format", template).strip()


def purge(paths: Paths) -> None:
    """Removes the whole build storage; it belongs to root, unlike the rest of the cache."""
    if elevate.needed():
        elevate.run(["image", "purge"], paths)
        return
    hostnet.unmount_below(paths.images)
    if paths.images.exists():
        shutil.rmtree(paths.images)


def prune(paths: Paths) -> None:
    """Removes all images but the newest of each name from the build storage."""
    seen: set[str] = set()
    for line in _buildah(paths, "images", "--noheading", "--format", "{{.Name}} {{.Tag}}").splitlines():
        name, tag = line.split()
        if name in seen:
            _buildah(paths, "rmi", f"{name}:{tag}")
        seen.add(name)
