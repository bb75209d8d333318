# SPDX-License-Identifier: Apache-2.0
"""The real cluster with the chart installed, once for all tests; the same code as `make demo`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from demo.kube import Kube
from e2e.support import Installation, install


@pytest.fixture(scope="session")
def installation() -> Installation:
    if os.geteuid() != 0 and not os.environ.get("ATP_KUBECONTEXT"):
        pytest.skip("the local cluster needs root: run `sudo make test`")
    return install()


@pytest.fixture
def kube(installation: Installation) -> Kube:
    return installation.kube


@pytest.fixture
def namespace(installation: Installation, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the test's own, removed with everything in it."""
    name = "e2e-" + request.node.name.split("[")[0].removeprefix("test_").replace("_", "-")[:40].strip("-")
    kube = installation.kube
    kube.ctl("delete", "namespace", name, "--ignore-not-found", "--wait", timeout=120)
    kube.ctl("create", "namespace", name)
    yield name
    kube.ctl("delete", "atpjobs", "--all", "-n", name, "--wait", timeout=120)
    kube.ctl("delete", "namespace", name, "--wait=false")
