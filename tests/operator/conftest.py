# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the operator's tests; what they are made of is in `operator_lab`."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

import pytest
from operator_lab import Cluster, Lab, Operator, accepts, find_binaries, free_port, wait_for


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    binaries = find_binaries()
    if binaries is None:
        pytest.skip(
            "no kube-apiserver, etcd and kubectl in ~/.cache/atp/bin (`make demo` builds them); or set ATP_KUBE_BIN"
        )
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: it makes the test certificates")
    result = Cluster(binaries, tmp_path_factory.mktemp("cluster"))
    try:
        result.start()
        yield result
    finally:
        result.stop()


@pytest.fixture(scope="session")
def base_operator(cluster: Cluster) -> Iterator[Operator]:
    """One operator for all tests that do not stop theirs, with its webhooks installed."""
    result = Operator(cluster, "operator-0")
    try:
        result.start()
        cluster.install_webhooks()
        wait_for(lambda: result.metric("atp_operator_leader") == 1.0, "leadership", 30)
        wait_for(lambda: accepts(cluster.webhook_port), "the webhook server", 30)
        yield result
    finally:
        with contextlib.suppress(Exception):
            cluster.kubectl("delete", "validatingwebhookconfiguration,mutatingwebhookconfiguration", "--all")
        result.stop()


@pytest.fixture
def lab(cluster: Cluster, base_operator: Operator) -> Iterator[Lab]:
    """The shared operator, clean before and after."""
    result = Lab(cluster, base_operator)
    yield result
    result.close()


@pytest.fixture
def standby(cluster: Cluster, base_operator: Operator) -> Iterator[Operator]:
    """A second replica, without webhooks of its own (they would need the same port on this one host)."""
    result = Operator(cluster, "operator-1", webhooks=False)
    try:
        result.start()
        yield result
    finally:
        result.stop()


@pytest.fixture
def apart(cluster: Cluster, base_operator: Operator) -> Iterator[Operator]:
    """A replica with a webhook server of its own, not started yet; the lease keeps it from acting."""
    port = free_port()
    result = Operator(cluster, "operator-apart", ATP_WEBHOOK_PORT=str(port))
    result.webhook_port = port
    yield result
    result.stop()
