# SPDX-License-Identifier: Apache-2.0
"""Attacks on the operator through a real API server: each by a user who may write ATPJobs in one namespace, or by
whoever reaches the webhook's port. The victim is another namespace's job, which must not notice."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from operator_lab import Cluster, Lab, Object, Operator

JOBS = "/apis/atp.dev/v1alpha1/namespaces/{}/atpjobs"
MEMORY_MIB = 200.0
"""What the operator may take at its highest, in the tests with large objects; its limit in the chart is 512 MiB."""
QUICK_SECONDS = 10.0
"""How long a victim's job may wait for its pods while an attack goes on; without one it is about 1 s."""
FLOOD_SECONDS = 15.0
"""The same in a flood of requests (1,800 jobs: 3 to 9 s), with which API server and operator share two cores."""
START_SECONDS = 20.0
"""How long a restarted operator may take until it acts: imports, the lease of the one before, the first look."""


def memory_mib(operator: Operator) -> float:
    """The most that the process ever had resident."""
    assert operator.process is not None
    text = Path(f"/proc/{operator.process.pid}/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmHWM"))) / 1024


@pytest.fixture
def mallory(lab: Lab) -> Iterator[str]:
    """A namespace in which the user mallory may do everything with ATPJobs and pods, their status too."""
    name = f"mallory-{time.monotonic_ns() % 10**9}"
    lab.cluster.kubectl("create", "namespace", name)
    rules = [
        {"apiGroups": ["atp.dev"], "resources": ["atpjobs", "atpjobs/status"], "verbs": ["*"]},
        {"apiGroups": [""], "resources": ["pods", "pods/status"], "verbs": ["*"]},
    ]
    meta = {"name": "mallory", "namespace": name}
    api = "rbac.authorization.k8s.io"
    lab.cluster.apply({"apiVersion": f"{api}/v1", "kind": "Role", "metadata": meta, "rules": rules})
    binding = {
        "apiVersion": f"{api}/v1",
        "kind": "RoleBinding",
        "metadata": meta,
        "roleRef": {"apiGroup": api, "kind": "Role", "name": "mallory"},
        "subjects": [{"kind": "User", "name": "mallory", "apiGroup": api}],
    }
    lab.cluster.apply(binding)
    yield name
    # All at once, by hand: there is no controller manager that would empty the namespace.
    with contextlib.suppress(urllib.error.HTTPError):
        lab.cluster.request("DELETE", JOBS.format(name))
    lab.cluster.kubectl("delete", "pod", "--all", "-n", name, "--force", "--grace-period=0", check=False)

    def gone() -> bool:
        lab.cluster.kubectl("delete", "pod", "--all", "-n", name, "--force", "--grace-period=0", check=False)
        return not lab.cluster.request("GET", JOBS.format(name) + "?limit=1")["items"]

    lab.wait_for(gone, "the attacker's jobs deleted", 120)


def create(lab: Lab, namespace: str, name: str, user: str = "mallory", **changes: Any) -> Object:
    """Create a job as the attacker; `changes`: of metadata, template or the rest of the spec."""
    job = lab.job(name, workers=1)
    job["metadata"] = {"name": name, **changes.pop("metadata", {})}
    job["spec"]["workers"]["template"].update(changes.pop("template", {}))
    job["spec"].update(changes)
    return lab.cluster.request("POST", JOBS.format(namespace), job, user)


def refusal(lab: Lab, namespace: str, name: str, **changes: Any) -> str:
    """Why a job was refused; AssertionError when it was not."""
    try:
        create(lab, namespace, name, **changes)
    except urllib.error.HTTPError as error:
        return str(json.loads(error.read())["message"])
    raise AssertionError(f"{name} was taken")


def victim_starts(lab: Lab, name: str, **spec: Any) -> float:
    """Seconds until a new job of the victim has its pods."""
    begin = time.monotonic()
    lab.apply_job(name, workers=1, **spec)
    lab.wait_for(lambda: len(lab.cluster.pods(name)) == 2, f"pods of {name}", 60)
    return time.monotonic() - begin


@contextlib.contextmanager
def no_webhooks(cluster: Cluster) -> Iterator[None]:
    """As before this version, or while the webhook is not installed."""
    cluster.kubectl("delete", "validatingwebhookconfiguration", "atp-operator")
    try:
        time.sleep(1.0)  # until the API server goes by it
        yield
    finally:
        cluster.install_webhooks()


# --- 10: large objects -----------------------------------------------------------------------------------------------


def test_large_jobs_are_refused_at_apply(lab: Lab, mallory: str) -> None:
    assert "spec has 550" in refusal(lab, mallory, "template", template={"x": "y" * 550_000})
    assert "at most 100000" in refusal(lab, mallory, "most", template={"x": "y" * 1_400_000})
    server = {"parameterServers": {"replicas": 1, "template": {"x": "y" * 380_000}}}
    assert "spec has 380" in refusal(lab, mallory, "server", **server)
    assert "metadata has 200" in refusal(lab, mallory, "notes", metadata={"annotations": {"a": "b" * 200_000}})
    labels = {f"label-{i}": "v" * 60 for i in range(5_000)}
    assert "metadata has " in refusal(lab, mallory, "labels", metadata={"labels": labels})
    finalizers = [f"example.org/{'f' * 50}-{i}" for i in range(5_000)]
    assert "metadata has " in refusal(lab, mallory, "finalizers", metadata={"finalizers": finalizers})
    owners = [{"apiVersion": "v1", "kind": "Pod", "name": "n" * 200, "uid": str(i)} for i in range(2_000)]
    assert "metadata has " in refusal(lab, mallory, "owners", metadata={"ownerReferences": owners})
    job = lab.job("deep", workers=1)
    job["metadata"] = {"name": "deep"}
    job["spec"]["workers"]["template"]["x"] = "DEEP"
    deep = json.dumps(job).replace('"DEEP"', '{"a":' * 3_000 + "1" + "}" * 3_000)
    with pytest.raises(urllib.error.HTTPError) as nested:
        lab.cluster.request("POST", JOBS.format(mallory), deep.encode(), "mallory")
    assert "nested deeper than 64" in json.loads(nested.value.read())["message"]
    create(lab, mallory, "grows")
    url = JOBS.format(mallory) + "/grows"
    merge = "application/merge-patch+json"
    more = {"workers": {"template": {"x": "y" * 200_000}}}
    for change in ({"metadata": {"annotations": {"a": "b" * 200_000}}}, {"spec": more}):
        with pytest.raises(urllib.error.HTTPError) as refused:
            lab.cluster.request("PATCH", url, change, "mallory", merge)
        assert "at most" in json.loads(refused.value.read())["message"]
    # Each field manager leaves a record of what it applied.
    body = lab.job("managed", workers=1)
    body["metadata"] = {"name": "managed"}
    body["spec"]["workers"]["template"]["x"] = {f"field-{i:04}": "v" for i in range(1_500)}
    said = ""
    for manager in range(40):
        try:
            applied = JOBS.format(mallory) + f"/managed?fieldManager=m{manager}&force=true"
            lab.cluster.request("PATCH", applied, body, "mallory", "application/apply-patch+yaml")
        except urllib.error.HTTPError as error:
            said = json.loads(error.read())["message"]
            break
    assert "managedFields" in said and "fewer field managers" in said
    assert victim_starts(lab, "beside-large") < QUICK_SECONDS


def test_large_jobs_that_are_there_cost_neither_memory_nor_another_job(lab: Lab, mallory: str) -> None:
    """81 suspended jobs of 380 KB, one of 1.2 MB that wants to run, and one with nothing but annotations."""
    lab.agent("sw-large", ["node-a"])
    with no_webhooks(lab.cluster), concurrent.futures.ThreadPoolExecutor(4) as pool:
        made = [
            pool.submit(create, lab, mallory, f"large-{i}", template={"x": "y" * 380_000}, suspend=True)
            for i in range(81)
        ]
        made.append(pool.submit(create, lab, mallory, "largest", template={"x": "y" * 1_200_000}))
        notes = {f"a{i}": "b" * 50_000 for i in range(5)}
        made.append(pool.submit(create, lab, mallory, "notes", metadata={"annotations": notes}))
        for future in made:
            future.result()
    assert victim_starts(lab, "beside-many") < QUICK_SECONDS
    status = lab.wait_for(lambda: (s := lab.cluster.status("largest", mallory)).get("reason") and s, "its reason")
    assert status["reason"] == "InvalidSpec" and "at most 100000" in status["message"]
    assert lab.operator is not None
    seen = memory_mib(lab.operator)
    assert seen < MEMORY_MIB
    lab.operator.stop()
    lab.operator.start()
    assert victim_starts(lab, "after-restart") < QUICK_SECONDS + START_SECONDS
    assert memory_mib(lab.operator) < MEMORY_MIB
    # They can be changed and deleted.
    url = JOBS.format(mallory) + "/largest"
    lab.cluster.request("PATCH", url, {"metadata": {"labels": {"a": "b"}}}, "mallory", "application/merge-patch+json")
    lab.cluster.request("DELETE", url, None, "mallory")
    lab.wait_for(lambda: not lab.cluster.get("atpjob", "largest", mallory), "deleted")


def test_an_object_that_takes_no_write_is_left_alone(lab: Lab, mallory: str) -> None:
    """A webhook of somebody else that refuses what the operator writes to one namespace, as any policy may."""
    lab.agent("sw-refuse", ["node-a"])
    policy: Object = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": "no-finalizers"},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": mallory}},
                "resourceRules": [
                    {
                        "apiGroups": ["atp.dev"],
                        "apiVersions": ["v1alpha1"],
                        "operations": ["UPDATE"],
                        "resources": ["atpjobs"],
                    }
                ],
            },
            "validations": [{"expression": "!has(object.metadata.finalizers)", "message": "no finalizers here"}],
        },
    }
    lab.cluster.apply(policy)
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": "no-finalizers"},
        "spec": {"policyName": "no-finalizers", "validationActions": ["Deny"]},
    }
    lab.cluster.apply(binding)
    time.sleep(2.0)
    try:
        for i in range(20):
            create(lab, mallory, f"refused-{i}")
        assert victim_starts(lab, "beside-refused") < QUICK_SECONDS

        def told() -> Object | None:
            conditions = lab.cluster.status("refused-0", mallory).get("conditions") or ()
            return next((c for c in conditions if c["type"] == "Stalled"), None)

        condition = lab.wait_for(told, "the condition")
        assert condition is not None and condition["reason"] == "WriteFailed"
        assert "no finalizers here" in condition["message"]
        assert victim_starts(lab, "beside-refused-too") < QUICK_SECONDS
        switch = lab.cluster.get("atpswitch", "sw-refuse")["status"]
        assert not [entry for entry in switch["jobs"] if entry["name"].startswith(mallory)]
    finally:
        lab.cluster.kubectl("delete", "validatingadmissionpolicybinding,validatingadmissionpolicy", "no-finalizers")


def test_an_object_that_changes_all_the_time_delays_nobody(lab: Lab, mallory: str) -> None:
    """Every write of the operator meets a newer object; the object itself gets on, too."""
    lab.agent("sw-churn", ["node-a"])
    names = [f"churn-{i}" for i in range(4)]
    for name in names:
        create(lab, mallory, name, suspend=True)
    stop = threading.Event()

    def churn(name: str) -> int:
        count = 0
        while not stop.is_set():
            change: Object = {"metadata": {"annotations": {"count": str(count)}}, "spec": {"suspend": False}}
            lab.cluster.request(
                "PATCH", f"{JOBS.format(mallory)}/{name}", change, "mallory", "application/merge-patch+json"
            )
            count += 1
        return count

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        churns = [pool.submit(churn, name) for name in names]
        try:
            for i in range(3):
                assert victim_starts(lab, f"beside-churn-{i}") < FLOOD_SECONDS
            for name in names:
                lab.wait_for(
                    lambda name=name: lab.cluster.status(name, mallory).get("admittedTime"), f"{name} admitted"
                )
        finally:
            stop.set()
        assert min(future.result() for future in churns) > 5


# --- 11: forged statuses and pods ------------------------------------------------------------------------------------


def forge(lab: Lab, namespace: str, name: str, **status: Any) -> None:
    url = JOBS.format(namespace) + f"/{name}/status"
    lab.cluster.request("PATCH", url, {"status": status}, "mallory", "application/merge-patch+json")


def test_forged_statuses_stop_their_own_job_alone(lab: Lab, mallory: str) -> None:
    agent = lab.agent("sw-forge", ["node-a"])
    lab.apply_job("victim", workers=1)
    lab.cluster.run_pods("victim", 2)
    status = lab.phase("victim", "Running")
    (before,) = [job.SerializeToString(deterministic=True) for job in agent.jobs()]
    times = {"admittedTime": "2026-01-01T00:00:00Z"}
    stolen = {key: status[key] for key in ("jobId", "switches", "regions", "placement", "epoch", "valuesPerPacket")}
    forgeries: dict[str, Object] = {
        "unreadable": {"phase": "Running", "jobId": 2**30, "epoch": 2**60, **times},
        "stolen": {"phase": "Running", "mode": "Shared", **stolen, **times},
        "stolen-id": {"phase": "Admitted", "jobId": status["jobId"], "switches": ["sw-forge"], "epoch": 1, **times},
        "overflow": {"phase": "Running", "epoch": 2**63 - 1, "jobId": 2**31 - 1, "switches": ["sw-forge"], **times},
        "huge": {"message": "x" * 900_000},
    }
    for name in forgeries:
        create(lab, mallory, name, suspend=True)
    for unreadable in ({"workers": 7}, {"workers": [{"rank": "x"}]}, {}):
        with pytest.raises(urllib.error.HTTPError) as refused:
            forge(lab, mallory, "unreadable", phase="Running", placement=unreadable)
        assert refused.value.code == 422, "the schema refuses most of what cannot be read"
    for _ in range(3):
        for name, forged in forgeries.items():
            forge(lab, mallory, name, **forged)
        time.sleep(0.3)
    for name in forgeries:

        def rejected(name: str = name) -> bool:
            events = json.loads(lab.cluster.kubectl("get", "events", "-n", mallory, "-o", "json").stdout)["items"]
            return any(e["reason"] == "StatusRejected" and e["involvedObject"]["name"] == name for e in events)

        lab.wait_for(rejected, f"{name} rejected")
        lab.wait_for(lambda name=name: lab.cluster.status(name, mallory).get("phase") == "Suspended", f"{name} again")
    assert victim_starts(lab, "beside-forged") < QUICK_SECONDS
    after = lab.cluster.status("victim")
    assert (after["phase"], after["mode"], after["jobId"], after["epoch"]) == (
        "Running",
        "Shared",
        status["jobId"],
        status["epoch"],
    )
    for state in agent.history:
        for job in state.jobs:
            assert not job.name.startswith(mallory)
            assert job.name != "default/victim" or job.SerializeToString(deterministic=True) == before


def test_pods_of_another_namespace_are_nobodys(lab: Lab, mallory: str) -> None:
    """A pod that says it is the victim's: its UID, its labels, its name, an address of its own."""
    agent = lab.agent("sw-pods", ["node-a"])
    lab.apply_job("target", workers=1)
    uid = lab.cluster.get("atpjob", "target")["metadata"]["uid"]
    lab.wait_for(lambda: len(lab.cluster.pods("target")) == 2, "pods")
    pod = lab.cluster.get("pod", "target-worker-0")
    body: Object = {
        "metadata": {
            "name": "target-worker-0",
            "labels": pod["metadata"]["labels"],
            "ownerReferences": pod["metadata"]["ownerReferences"],
        },
        "spec": {"containers": [{"name": "x", "image": "x"}], "nodeName": "node-a"},
    }
    assert body["metadata"]["ownerReferences"][0]["uid"] == uid
    body |= {"apiVersion": "v1", "kind": "Pod"}
    lab.cluster.request("POST", f"/api/v1/namespaces/{mallory}/pods", body, "mallory")
    state = {
        "phase": "Running",
        "podIP": "10.66.6.6",
        "podIPs": [{"ip": "10.66.6.6"}],
        "initContainerStatuses": [Cluster._container("atp-sidecar", True)],
        "containerStatuses": [Cluster._container("x", True)],
    }
    forged = lab.cluster.get("pod", "target-worker-0", mallory)
    lab.cluster.patch_status(forged, state)
    lab.cluster.run_pods("target", 2)
    lab.phase("target", "Running")
    assert "10.66.6.6" not in str(agent.history)
    lab.cluster.patch_status(forged, {"phase": "Failed"})
    time.sleep(2.0)
    assert lab.cluster.status("target")["phase"] == "Running" and lab.cluster.status("target")["epoch"] == 1


# --- 12: forged reviews ----------------------------------------------------------------------------------------------


def review(lab: Lab, hook: str, body: bytes, source: str = "127.0.0.1") -> tuple[int, Object]:
    """What the webhook's port answers to anybody."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection(
        "127.0.0.1", lab.cluster.webhook_port, timeout=30, context=context, source_address=(source, 0)
    )
    try:
        connection.request("POST", f"/{hook}", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    with contextlib.suppress(ValueError):
        return answer.status, json.loads(text)
    return answer.status, {}


def forged_review(lab: Lab, namespace: str, **spec: Any) -> bytes:
    job = lab.job("probe", workers=1)
    job["metadata"].update(namespace=namespace, uid="u")
    job["spec"]["workers"]["template"]["spec"].update(spec)
    admin = {"username": "admin", "groups": ["system:masters"]}
    request = {"uid": "r-1", "operation": "CREATE", "namespace": namespace, "userInfo": admin, "object": job}
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()


def test_a_forged_review_is_told_nothing_of_the_cluster(lab: Lab, mallory: str) -> None:
    limits = {"pod-security.kubernetes.io/enforce": "restricted"}
    lab.cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "guarded", "labels": limits}})
    api = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass"}
    lab.cluster.apply({**api, "metadata": {"name": "there"}, "value": 7})
    limit = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none", "namespace": "guarded"}}
    lab.cluster.apply({**limit, "spec": {"hard": {"pods": "0"}}})
    try:
        answers = {
            json.dumps(review(lab, "validate-atpjob", forged_review(lab, namespace, **spec)), sort_keys=True)
            for namespace in ("default", "guarded", "kube-system", "not-there", "atp-system", mallory)
            for spec in (
                {},
                {"priorityClassName": "there"},
                {"priorityClassName": "not-there"},
                {"serviceAccountName": "default"},
                {"serviceAccountName": "not-there"},
                {"runtimeClassName": "not-there"},
            )
        }
        assert len(answers) == 1, answers
        assert json.loads(answers.pop())[1]["response"] == {"allowed": True, "uid": "r-1"}
        # What is wrong with the pod itself is still told.
        wrong = forged_review(lab, "not-there", containers=[{"name": "X", "image": "y"}])
        code, said = review(lab, "validate-atpjob", wrong)
        assert code == 200 and "spec.containers[0].name" in said["response"]["status"]["message"]
    finally:
        lab.cluster.kubectl("delete", "namespace", "guarded", "--wait=false")
        lab.cluster.kubectl("delete", "priorityclass", "there")


def test_what_is_no_review_costs_a_refusal(lab: Lab) -> None:
    deep = b'{"request":{"uid":"d-1","object":' + b"[" * 200_000 + b"]" * 200_000 + b"}}"
    assert review(lab, "validate-atpjob", deep)[1]["response"]["allowed"] is False
    for body in (b"", b"{}", b'{"request":{"uid":"u"}}', b"\xff" * 1000, b"[" * 200_000):
        code, said = review(lab, "validate-atpjob", body)
        assert code == 400 or said["response"]["allowed"] is False
    assert review(lab, "validate-atpjob", b"x" * (9 << 20))[0] in (400, 413)
    assert review(lab, "nothing", b"{}")[0] == 404
    assert lab.cluster.apply(lab.job("still-checked")).returncode == 0
    lab._jobs.append("still-checked")


def test_a_flood_of_reviews_does_not_delay_those_of_the_api_server(lab: Lab) -> None:
    """From another address, as a pod has one: large bodies, reviews with dry runs, connections that say nothing."""
    assert lab.operator is not None
    end = time.monotonic() + 12
    valid, junk = forged_review(lab, "default"), b'{"request":{"uid":"u","object":' + b'{"a":1},' * 700_000

    def flood(body: bytes) -> int:
        count = 0
        while time.monotonic() < end:
            with contextlib.suppress(OSError, http.client.HTTPException):
                review(lab, "validate-atpjob", body, "127.0.0.2")
                count += 1
        return count

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        floods = [pool.submit(flood, valid if i % 4 else junk) for i in range(16)]
        times = []
        while time.monotonic() < end - 2:
            begin = time.monotonic()
            name = f"flooded-{len(times)}"
            lab.apply_job(name, workers=1, suspend=True)
            times.append(time.monotonic() - begin)
            with urllib.request.urlopen(f"http://127.0.0.1:{lab.operator.metrics_port}/healthz", timeout=5) as healthy:
                assert healthy.status == 200
        assert sum(f.result() for f in floods) > 50
    assert len(times) >= 3 and max(times) < 5.0, times
    assert memory_mib(lab.operator) < 300


# --- 13: many objects ------------------------------------------------------------------------------------------------


@pytest.mark.quiet
def test_many_jobs_of_one_tenant_delay_nobody(lab: Lab, mallory: str) -> None:
    """1,800 jobs, created as fast as the API server takes them; half of them want to run."""
    assert lab.operator is not None
    agent = lab.agent("sw-many", ["node-a"])
    alone = victim_starts(lab, "alone")
    slowest, starts = 0.0, []

    def make(i: int) -> None:
        create(lab, mallory, f"flood-{i}", suspend=i % 2 == 0)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        flood = [pool.submit(make, i) for i in range(1_800)]
        while not all(f.done() for f in flood) or len(starts) < 3:
            begin = time.monotonic()
            with urllib.request.urlopen(f"http://127.0.0.1:{lab.operator.metrics_port}/healthz", timeout=5) as healthy:
                assert healthy.status == 200
            slowest = max(slowest, time.monotonic() - begin)
            starts.append(victim_starts(lab, f"victim-{len(starts)}"))
            lab.delete_job(f"victim-{len(starts) - 1}")
        for f in flood:
            f.result()
    print(f"alone {alone:.1f} s, in the flood {[f'{s:.1f}' for s in starts]}, slowest probe {slowest:.2f} s")
    assert max(starts) < FLOOD_SECONDS and slowest < 3.0
    assert memory_mib(lab.operator) < MEMORY_MIB
    assert [job.name for job in agent.jobs() if job.name.startswith("default/")] == []
