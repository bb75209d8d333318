# SPDX-License-Identifier: Apache-2.0
"""What torch's tests need to run on atp: names of backends, the sidecar of each rank, processes that fork.

Runs in the interpreter with torch. The tests themselves are untouched; everything here happens around them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import multiprocessing

# {"4": ["/…/worker-0/run/atp.sock", ..]}: the sidecars of one job for each world size.
SOCKETS = "ATP_TEST_SOCKETS"
# A file that gets one byte for each process group that atp has made: proof that a test did not run on something else.
MARK = "ATP_TEST_MARK"


class GlooLike(str):
    """The name of a backend that a test takes for gloo where it asks what the backend can do.

    distributed_test.py asks `BACKEND == "gloo"` and `BACKEND in {"nccl", "gloo"}` to skip what a backend does not have.
    atp claims to have what gloo has, so both questions get gloo's answer; as a string it is still "atp".
    """

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")


@contextmanager
def backend_constant(name: str) -> Iterator[None]:
    """While distributed_test.py is imported, os.environ["BACKEND"] is a GlooLike: its decorators read it then."""
    environ = type(os.environ)
    original = environ.__getitem__

    def getitem(self: Any, key: str) -> str:
        return GlooLike(name) if key == "BACKEND" else original(self, key)

    os.environ["BACKEND"] = name
    with mock.patch.object(environ, "__getitem__", getitem):
        yield


def claim_features(name: str) -> None:
    """Adds the backend to common_distributed's lists of what a backend can do, wherever gloo is in them."""
    from torch.testing._internal.common_distributed import DistTestCases

    for table in (DistTestCases.backend_feature, DistTestCases.skip_collective):
        for backends in table.values():
            if "gloo" in backends:
                backends.add(name)
    # require_backend_is_available() knows no other way to say that a backend is there.
    DistTestCases.backend_feature["plugin"].add(name)


def claim_profiling(module: Any, name: str) -> None:
    """Adds the backend to distributed_test.py's lists of backends whose profiler events are checked.

    An event that is wanted from this backend may be gloo's: atp leaves to gloo what it does not sum, and then it is
    gloo that shows in a profile.
    """
    for each in dir(module):
        if each.endswith("PROFILING_SUPPORTED_BACKENDS"):
            getattr(module, each).append(name)
    original = module.get_profiling_event

    def events(wanted: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(wanted, *args, **kwargs)
        if not found and wanted.startswith(f"{name}:"):
            found = original(wanted.replace(name, "gloo", 1), *args, **kwargs)
            for event in found:
                event.name = event.name.replace("gloo", name, 1)
        return found

    module.get_profiling_event = events


def gloo_class(name: str) -> None:
    """Whoever makes a ProcessGroupGloo itself gets a process group of the backend `name`."""
    original = dist.ProcessGroupGloo
    creator = dist.Backend._plugins[name.upper()]

    class Kind(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __getattr__(cls, attribute: str) -> Any:
            return getattr(original, attribute)

        def __call__(cls, store: Any, rank: int, size: int, options: Any = None, **keywords: Any) -> Any:
            timeout = keywords.get("timeout", getattr(options, "_timeout", options)) or timedelta(seconds=60)
            if not isinstance(timeout, timedelta):
                timeout = timedelta(seconds=timeout)
            if creator.extended_api:
                wanted: Any = SimpleNamespace(store=store, group_rank=rank, group_size=size, timeout=timeout)
                made = creator.creator_fn(wanted, None)
            else:
                made = creator.creator_fn(store, rank, size, timeout)
            # A ProcessGroupGloo is a bare backend, below the dispatcher of a process group, with errors of its own.
            made._rest = made._gloo
            return made

    replaced = Kind("ProcessGroupGloo", (), {})
    for module in (dist, dist.distributed_c10d):
        module.ProcessGroupGloo = replaced


def rename_gloo(name: str) -> None:
    """Whoever asks for gloo, by name or by default, gets the backend `name`: for tests that say "gloo"."""
    original = dist.Backend.__new__

    def new(cls: type, value: str) -> str:
        backend = original(cls, value)
        return name if backend == "gloo" else backend

    dist.Backend.__new__ = new
    table = getattr(dist.Backend, "default_device_backend_map", {})
    for device, backend in table.items():
        if backend == "gloo":
            table[device] = name


def use_sidecars() -> None:
    """Gives each process the sidecar of its rank, when its default process group is made."""
    import atp_client

    plugin = dist.Backend._plugins["ATP"]
    original = plugin.creator_fn

    def create(*args: Any, **kwargs: Any) -> Any:
        if plugin.extended_api:
            rank, size = args[0].group_rank, args[0].group_size
        else:
            rank, size = args[1], args[2]
        if not dist.is_initialized():
            use_sidecar(rank, size)
        made = original(*args, **kwargs)
        with Path(os.environ[MARK]).open("ab") as mark:
            mark.write(b".")
        return made

    dist.Backend._plugins["ATP"] = plugin._replace(creator_fn=create)
    assert atp_client.__version__


def use_sidecar(rank: int, size: int) -> None:
    """Points this process to the sidecar of a rank in the job of this size."""
    sockets: dict[str, list[str]] = json.loads(os.environ[SOCKETS])
    if str(size) not in sockets:
        raise RuntimeError(f"the harness has no job of {size} workers")
    socket = sockets[str(size)][rank]
    if os.environ.get("ATP_SOCKET", socket) != socket:
        import atp_client

        atp_client.close()
    os.environ["ATP_SOCKET"] = socket


def fork_ranks() -> None:
    """MultiProcessTestCase forks its ranks instead of spawning them: an import of torch takes seconds."""
    from torch.testing._internal import common_distributed

    context = multiprocessing.get_context("fork")

    class Rank(context.Process):  # type: ignore[name-defined, misc]
        def run(self) -> None:
            try:
                super().run()
            finally:
                leave()

    def start(self: Any) -> None:
        # A child of a child would inherit this; torch's own processes may not be forked from a rank.
        self._start_processes(Rank)

    common_distributed.MultiProcessTestCase._spawn_processes = start
    # A test that hangs on one backend must not stop the rest.
    limit = int(os.environ.get("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "100"))
    common_distributed.TIMEOUT_DEFAULT = limit
    for name in common_distributed.TIMEOUT_OVERRIDE:
        common_distributed.TIMEOUT_OVERRIDE[name] = limit


def leave() -> None:
    """What the end of an interpreter does and the end of a forked process does not: says goodbye to the sidecar."""
    if "ATP_SOCKET" in os.environ:
        import atp_client

        atp_client.close()


Adapt = Callable[[str], None]


def prepare(backend: str) -> None:
    """Everything that is the same for all suites."""
    # No torch.set_num_threads here: a thread pool made before the fork breaks autograd's threads after it.
    fork_ranks()
    if backend != "gloo":
        claim_features(backend)
        use_sidecars()
