# SPDX-License-Identifier: Apache-2.0
"""Starts, recognises and stops the cluster's own background processes.

A process is ours only if its pid file names the same pid, start time and boot: a pid that the kernel
gave to somebody else is never signalled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .errors import ClusterError, tail
from .paths import Paths

_ROTATE_BYTES = 32 << 20


@dataclass(frozen=True)
class Spec:
    """A background process: its command line, and the files whose change calls for a restart."""

    name: str
    argv: tuple[str, ...]
    config_files: tuple[Path, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def fingerprint(self) -> str:
        """Changes when the command line, the environment or a configuration file changes."""
        digest = hashlib.sha256(json.dumps([self.argv, sorted(self.env.items())]).encode())
        for path in self.config_files:
            digest.update(path.read_bytes() if path.exists() else b"absent")
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Record:
    """The content of a pid file. start is in clock ticks since boot (proc(5), field 22)."""

    pid: int
    start: int
    boot: str
    fingerprint: str


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot; None if it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the name in parentheses and may itself contain spaces and parentheses.
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def read_record(paths: Paths, name: str) -> Record | None:
    """The pid file of `name`, or None when there is none or it is damaged."""
    try:
        return Record(**json.loads((paths.pids / f"{name}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def is_alive(record: Record | None) -> bool:
    return record is not None and record.boot == boot_id() and start_time(record.pid) == record.start


def log_path(paths: Paths, name: str) -> Path:
    return paths.logs / f"{name}.log"


def forget_dead(paths: Paths) -> None:
    """Removes the pid files of processes that are gone (a crash, a reboot), so they count as not started."""
    for file in paths.pids.glob("*.json"):
        if not is_alive(read_record(paths, file.stem)):
            file.unlink()


def ensure(paths: Paths, spec: Spec) -> bool:
    """Starts the process unless it runs with the same fingerprint; True if it was (re)started."""
    record = read_record(paths, spec.name)
    if record is not None and is_alive(record):
        if record.fingerprint == spec.fingerprint():
            return False
        stop(paths, [spec.name])
    _start(paths, spec)
    return True


def _start(paths: Paths, spec: Spec) -> None:
    for folder in (paths.logs, paths.pids):
        folder.mkdir(parents=True, exist_ok=True)
    log = log_path(paths, spec.name)
    if log.exists() and log.stat().st_size > _ROTATE_BYTES:
        log.replace(log.with_suffix(".log.1"))
    with log.open("ab") as output:
        output.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} start: {' '.join(spec.argv)}\n".encode())
        output.flush()
        child = subprocess.Popen(
            spec.argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=paths.state,
            env={**os.environ, **spec.env},
            start_new_session=True,
        )
    started = start_time(child.pid)
    if started is None:
        raise failure(paths, spec.name, "ended at once")
    record = Record(child.pid, started, boot_id(), spec.fingerprint())
    partial = paths.pids / f".{spec.name}.partial"
    partial.write_text(json.dumps(record.__dict__))
    partial.rename(paths.pids / f"{spec.name}.json")


def failure(paths: Paths, name: str, what: str) -> ClusterError:
    """An error that shows the end of the process's log and where the rest is."""
    log = log_path(paths, name)
    return ClusterError(f"{name} {what}\nlast lines of {log}:\n{tail(log)}")


def check_alive(paths: Paths, names: Iterable[str]) -> None:
    """Raises the failure of the first process that is not running any more."""
    for name in names:
        record = read_record(paths, name)
        if record is not None:
            _reap(record.pid)
        if not is_alive(record):
            raise failure(paths, name, "is not running")


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def stop(paths: Paths, names: Sequence[str], patience: float = 10.0) -> None:
    """Ends the named processes (SIGTERM, after `patience` seconds SIGKILL) and removes their pid files."""
    waiting: dict[str, Record] = {}
    for name in names:
        record = read_record(paths, name)
        if record is not None and is_alive(record):
            os.kill(record.pid, signal.SIGTERM)
            waiting[name] = record
    deadline = time.monotonic() + patience
    killed = False
    while waiting:
        for name, record in list(waiting.items()):
            _reap(record.pid)
            if not is_alive(record):
                del waiting[name]
        if waiting and not killed and time.monotonic() > deadline:
            for record in waiting.values():
                os.kill(record.pid, signal.SIGKILL)
            killed = True
        if waiting:
            time.sleep(0.02)
    for name in names:
        (paths.pids / f"{name}.json").unlink(missing_ok=True)
