# SPDX-License-Identifier: Apache-2.0
"""The chart brings the definitions of crds/, from a checkout and packaged, and grants the operator what it needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts/atp"
NAMES = {"atpjobs.atp.dev", "atpswitches.atp.dev", "atptenantquotas.atp.dev"}


@pytest.fixture(scope="module")
def helm() -> str:
    cached = sorted((Path.home() / ".cache/atp/bin").glob("*/helm"), key=lambda p: p.stat().st_mtime)
    named = Path(os.environ.get("ATP_KUBE_BIN", "/nowhere")) / "helm"
    found = str(named) if named.exists() else str(cached[-1]) if cached else shutil.which("helm")
    if found is None:
        pytest.skip("no helm in ~/.cache/atp/bin (`make demo` builds it), in ATP_KUBE_BIN or on the PATH")
    return found


def run(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def rendered(helm: str) -> tuple[list[dict[str, Any]], str]:
    """(objects, what helm said beside) of the chart as it is in the checkout."""
    done = run(helm, "template", "atp", str(CHART), "-n", "atp-system", "--include-crds", "--kube-version", "1.36.0")
    return [o for o in yaml.safe_load_all(done.stdout) if o], done.stderr


def test_the_copy_of_the_definitions_is_not_stale(tmp_path: Path) -> None:
    run(str(ROOT / "charts/sync-crds"), "--check")
    shutil.copytree(ROOT / "charts", tmp_path / "charts")
    shutil.copytree(ROOT / "crds", tmp_path / "crds")
    with (tmp_path / "crds/atpjob.yaml").open("a") as file:
        file.write("# changed\n")
    script = str(tmp_path / "charts/sync-crds")
    stale = subprocess.run([script, "--check"], capture_output=True, text=True)
    assert stale.returncode == 1 and "run charts/sync-crds" in stale.stderr
    run(script)
    run(script, "--check")


def test_nothing_in_the_chart_is_a_link() -> None:
    assert [path for path in CHART.rglob("*") if path.is_symlink()] == []


def test_a_checkout_and_a_package_bring_the_same_definitions(helm: str, rendered: Any, tmp_path: Path) -> None:
    objects, said = rendered
    assert said == ""
    assert {o["metadata"]["name"] for o in objects if o["kind"] == "CustomResourceDefinition"} == NAMES
    done = run(helm, "package", str(CHART), "-d", str(tmp_path))
    assert done.stderr == ""
    (package,) = tmp_path.glob("*.tgz")
    with tarfile.open(package) as archive:
        packed = {
            Path(member.name).name: archive.extractfile(member).read()  # type: ignore[union-attr]
            for member in archive.getmembers()
            if "/crds/" in member.name
        }
    assert packed == {path.name: path.read_bytes() for path in (ROOT / "crds").glob("*.yaml")}


def test_the_chart_grants_what_the_integration_tests_run_with(rendered: Any) -> None:
    def rules(objects: list[dict[str, Any]], kind: str, name: str) -> list[dict[str, Any]]:
        (found,) = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]
        result: list[dict[str, Any]] = found["rules"]
        return result

    tested = list(yaml.safe_load_all(Path(__file__).with_name("rbac.yaml").read_text()))
    objects, _ = rendered
    assert rules(objects, "ClusterRole", "atp-operator-atp-system") == rules(tested, "ClusterRole", "atp-operator")
    assert rules(objects, "Role", "atp-operator-leader") == rules(tested, "Role", "atp-operator-lease")


def test_kubernetes_own_roles_get_jobs_and_nothing_that_is_not_a_tenants(rendered: Any) -> None:
    objects, _ = rendered
    given: dict[str, list[dict[str, Any]]] = {}
    for role in (o for o in objects if o["kind"] == "ClusterRole"):
        for label in role["metadata"].get("labels", {}):
            if label.startswith("rbac.authorization.k8s.io/aggregate-to-"):
                given.setdefault(label.rpartition("-")[2], []).extend(role["rules"])
    assert set(given) == {"view", "edit", "admin"}
    for role, role_rules in given.items():
        assert {(g, r) for rule in role_rules for g in rule["apiGroups"] for r in rule["resources"]} == {
            ("atp.dev", "atpjobs")
        }, "no status, nothing cluster-wide"
        verbs = {verb for rule in role_rules for verb in rule["verbs"]}
        assert "*" not in verbs and ("create" in verbs) == (role != "view")


def test_the_operators_own_writes_do_not_depend_on_its_webhook(rendered: Any) -> None:
    objects, _ = rendered
    (hooks,) = [o["webhooks"] for o in objects if o["kind"] == "ValidatingWebhookConfiguration"]
    (jobs,) = [hook for hook in hooks if hook["name"] == "validate-atpjob.atp.dev"]
    (condition,) = jobs["matchConditions"]
    account = next(o["metadata"]["name"] for o in objects if o["kind"] == "ServiceAccount" and "test" not in str(o))
    assert f'"system:serviceaccount:atp-system:{account}"' in condition["expression"]
    assert all(hook["failurePolicy"] == "Fail" for hook in hooks)
