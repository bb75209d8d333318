# SPDX-License-Identifier: Apache-2.0
"""The suites: what torch's wheel has, what a checkout of its source has, and our own.

Runs in the interpreter with torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pytorch import adapt


class Suite:
    """Test cases of one module.

    Args:
        module: whose TestCase classes are the suite; `only`, if it has that, is a pattern of the tests' names.
    """

    def __init__(self, module: Any) -> None:
        self._only: str = getattr(module, "only", "")
        self._classes: dict[str, type[unittest.TestCase]] = {
            name: each
            for name, each in vars(module).items()
            if isinstance(each, type) and issubclass(each, unittest.TestCase) and _on_a_backend(each)
        }

    def tests(self) -> Iterator[tuple[str, str | None]]:
        """Name of each test, and why it is skipped without being run, if it is."""
        for name, each in self._classes.items():
            for method in unittest.defaultTestLoader.getTestCaseNames(each):
                if not re.search(self._only, method):
                    continue
                function = getattr(each, method)
                skip = getattr(function, "__unittest_skip__", False) or getattr(each, "__unittest_skip__", False)
                why = getattr(function, "__unittest_skip_why__", "") or getattr(each, "__unittest_skip_why__", "")
                wanted = _accelerators(function)
                if wanted and not torch.cuda.is_available():
                    skip, why = True, f"Need at least {wanted} accelerator devices"
                yield f"{name}.{method}", (why or "skipped") if skip else None

    def make(self, name: str) -> unittest.TestCase:
        """The test of this name."""
        each, method = name.split(".")
        return self._classes[each](method)


def _accelerators(function: Any) -> int:
    """How many GPUs a test wants: newer torch notes it, so that no rank has to be started to find out."""
    wanted = 0
    while function is not None:
        outside = getattr(function, "__closure__", None) or ()
        names = dict(zip(getattr(getattr(function, "__code__", None), "co_freevars", ()), outside, strict=False))
        if "allow_cpu" not in names or not names["allow_cpu"].cell_contents:
            wanted = max(wanted, vars(function).get("_min_gpus_required", 0) if "x" in names else 0)
        function = getattr(function, "__wrapped__", None)
    return wanted


def _on_a_backend(case: type[unittest.TestCase]) -> bool:
    """Threads that play ranks have a backend of their own: they would pass twice without either of ours."""
    return all(each.__name__ not in ("MultiThreadedTestCase", "DTensorOpTestBase") for each in case.__mro__)


def distributed(backend: str, size: int = 4) -> Any:
    """torch.testing._internal.distributed.distributed_test, the suite that all of torch's backends have to pass."""
    # What torch's own run_test.py sets, but for the world size, which is 3 there: 4 lets more of the tests run.
    os.environ["WORLD_SIZE"] = str(size)
    os.environ["INIT_METHOD"] = "file://"  # decides what is skipped; the path is each test's
    os.environ["BACKEND"] = backend
    path = "torch.testing._internal.distributed.distributed_test"
    module: Any
    if backend == "gloo":
        module = importlib.import_module(path)
    else:
        with adapt.backend_constant(backend):
            module = importlib.import_module(path)
        adapt.claim_profiling(module, backend)

    class TestDistBackendWithSpawn(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            module.INIT_METHOD = os.environ["INIT_METHOD"]
            self._spawn_processes()

    holder = type(sys)("distributed")
    holder.TestDistBackendWithSpawn = TestDistBackendWithSpawn  # type: ignore[attr-defined]
    return holder


def distributed_of_eight(backend: str) -> Any:
    """The tests about groups of some of the ranks once more: most of them want eight ranks."""
    holder = distributed(backend, 8)
    holder.only = "group|barrier_timeout"
    return holder


def under_dist_autograd(backend: str) -> Any:
    """DDP between RPCs, from torch's wheel."""
    if backend != "gloo":
        adapt.rename_gloo(backend)
    module = importlib.import_module("torch.testing._internal.distributed.ddp_under_dist_autograd_test")
    fixture = importlib.import_module(
        "torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture"
    ).TensorPipeRpcAgentTestFixture
    common = importlib.import_module("torch.testing._internal.common_distributed")
    holder = type(sys)("under_dist_autograd")

    def setup(self: Any) -> None:
        super(type(self), self).setUp()
        self._spawn_processes()

    for name in ("DdpUnderDistAutogradTest", "DdpComparisonTest"):
        bases = (getattr(module, name), fixture, common.MultiProcessTestCase)
        members = {"setUp": setup}
        setattr(holder, name, type(name, bases, members))
    return holder


def own(backend: str) -> Any:
    """Our own tests, for what torch's wheel has no test of."""
    os.environ["BACKEND"] = backend
    return importlib.import_module("pytorch.own")


WHEEL = {
    "distributed_test": distributed,
    "distributed_test_of_8": distributed_of_eight,
    "ddp_under_dist_autograd_test": under_dist_autograd,
    "own": own,
}


def source(path: Path, backend: str) -> Any:
    """One test file of a checkout of torch's source of the same version; nothing of it is in this repository."""
    os.environ["BACKEND"] = backend
    if backend != "gloo":
        adapt.rename_gloo(backend)
        adapt.gloo_class(backend)
    root = next(parent for parent in path.parents if parent.name == "test")
    sys.path[:0] = [str(path.parent), str(root)]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def load(name: str, backend: str) -> Suite:
    """A suite by its name, or by the path of a test file."""
    return Suite(WHEEL[name](backend) if name in WHEEL else source(Path(name), backend))
