# SPDX-License-Identifier: Apache-2.0
"""Attacks of a tenant on the control plane, carried out on a cluster with the chart installed.

The attacker is the user mallory, bound to Kubernetes' own role `edit` in one namespace (where an attack needs more, it
says so), or a pod in that namespace. The victim is a job in another namespace. Each function cleans up after itself and
takes less than two minutes. What the limits are and why is in docs/security.md.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from attack.outcome import Outcome
from demo import run
from demo.kube import CommandFailed, Kube
from e2e.support import Installation, digits_job

Object = dict[str, Any]
ATTACKER, VICTIM, USER = "attack-mallory", "attack-victim", "mallory"
QUICK_SECONDS = 12.0
"""A victim's job that has its pods after so long was not delayed; on an idle cluster it takes about 2 s."""
FLOOD_JOBS = 900
"""Jobs that a flood creates, every third of which wants to run."""
FLOOD_PARTS = 4
"""So many clients create them at the same time."""
NOWHERE = {"attack.example/nowhere": "true"}
"""A node selector that no node has: a flood's pods are made and wait."""


@dataclass
class Stage:
    """The two namespaces while an attack goes on, and what was seen."""

    kube: Kube
    image: str
    requests: int = 0
    seen: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    named: str = ""

    def check(self, good: bool, text: str) -> None:
        """Note a fact; one that is not good breaks the product's promise."""
        (self.seen if good else self.broken).append(text)

    def attack(self, *args: str, stdin: str | None = None, timeout: float = 60) -> str:
        """kubectl as the attacker: what it printed, or the refusal's text."""
        self.requests += 1
        try:
            return self.kube.ctl("--as", USER, *args, stdin=stdin, timeout=timeout)
        except CommandFailed as error:
            who = re.search(r'User "([^"]+)" cannot', str(error))
            if who is not None:
                self.named = f"user {who[1]}"
            return f"REFUSED {error}"

    def create(self, *objects: Object, timeout: float = 60) -> str:
        """Create objects as the attacker in his namespace."""
        self.requests += len(objects) - 1
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
            file.write(text)
        try:
            return self.attack("create", "-n", ATTACKER, "-f", file.name, timeout=timeout)
        finally:
            os.unlink(file.name)  # noqa: PTH108

    def victim_seconds(self, name: str) -> float:
        """Seconds until a new job of the victim has its pods; infinite after a minute."""
        begin = time.monotonic()
        job = json.loads(digits_job(self.image, name, command=["sleep", "600"], aggregators={"request": 64}))
        job["spec"]["workers"]["replicas"] = 1
        self.kube.ctl("apply", "-n", VICTIM, "-f", "-", stdin=json.dumps(job))
        while time.monotonic() < begin + 60:
            if len(self.kube.list("pods", VICTIM, f"atp.dev/job={name}")) == 2:
                seconds = time.monotonic() - begin
                self.kube.ctl("delete", "atpjob", name, "-n", VICTIM, "--wait=false")
                return seconds
            time.sleep(0.2)
        return float("inf")

    def victim_is_served(self, name: str) -> None:
        """Note whether a new job of the victim is served as if there were no attack."""
        seconds = self.victim_seconds(name)
        self.check(seconds < QUICK_SECONDS, f"the victim's new job had its pods after {seconds:.1f} s")

    def status(self, namespace: str, name: str) -> Object:
        """The status of a job; empty when there is none."""
        return (self.kube.get("atpjob", name, namespace) or {}).get("status") or {}

    def event(self, reason: str) -> bool:
        """True when the attacker's own objects have an event with this reason; notes whom it names."""
        items = json.loads(self.kube.ctl("get", "events", "-n", ATTACKER, "-o", "json"))["items"]
        for item in items:
            if item["reason"] == reason:
                self.named = f"{item['involvedObject']['kind']} {ATTACKER}/{item['involvedObject']['name']}"
                return True
        return False

    def waiting(self, reasons: Collection[str]) -> bool:
        """True when jobs of the attacker wait for what he used up himself; notes the first that the operator names."""
        items = json.loads(self.kube.ctl("get", "atpjobs", "-n", ATTACKER, "-o", "json"))["items"]
        for item in items:
            for condition in (item.get("status") or {}).get("conditions") or ():
                if condition["type"] == "Admitted" and condition["reason"] in reasons:
                    self.named = f"ATPJob {ATTACKER}/{item['metadata']['name']} ({condition['reason']})"
                    return True
        return False

    def logged(self, pattern: str) -> bool:
        """True when the operator's log has this; its first group is whom it names."""
        for pod in self.kube.list("pods", run.SYSTEM, "app.kubernetes.io/component=operator"):
            found = re.search(pattern, self.kube.logs(pod["metadata"]["name"], run.SYSTEM, "operator"))
            if found is not None:
                self.named = found[1]
                return True
        return False


def restarts(kube: Kube) -> int:
    """How often the operator's containers were restarted."""
    pods = kube.list("pods", run.SYSTEM, "app.kubernetes.io/component=operator")
    return sum(c.get("restartCount", 0) for pod in pods for c in pod["status"].get("containerStatuses") or ())


REFUSED_USER = rf"refused (user '{re.escape(USER)}')"
"""What the operator's log says of a refused object's author."""


def until(check: Callable[[], Any], seconds: float) -> bool:
    """True as soon as the check is true, False after so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if check():
            return True
        time.sleep(0.3)
    return False


def template(**changes: Any) -> Object:
    """A pod template of a job that no node takes."""
    spec = {"nodeSelector": NOWHERE, "containers": [{"name": "trainer", "image": "none", "command": ["true"]}]}
    return {"spec": spec, **changes}


def job(name: str, *, metadata: Mapping[str, Any] | None = None, pod: Object | None = None, **spec: Any) -> Object:
    """A job of the attacker's, whose pods no node takes."""
    return {
        "apiVersion": "atp.dev/v1alpha1",
        "kind": "ATPJob",
        "metadata": {"name": name, **(metadata or {})},
        "spec": {
            "workers": {"replicas": 1, "template": pod or template()},
            "parameterServers": {"replicas": 1, "template": {"spec": {"nodeSelector": NOWHERE}}},
            "aggregators": {"request": 64},
            **spec,
        },
    }


@contextlib.contextmanager
def stage(installation: Installation, *, status: bool = False) -> Iterator[Stage]:
    """Both namespaces, and mallory's rights in one; `status`: also to write atpjobs/status, as with `*`."""
    kube = installation.kube
    for name in (ATTACKER, VICTIM):
        kube.ctl("delete", "namespace", name, "--ignore-not-found", "--wait", timeout=110)
        kube.ctl("create", "namespace", name)
    kube.ctl("create", "rolebinding", "mallory", "-n", ATTACKER, "--clusterrole=edit", f"--user={USER}")
    if status:
        role = ["--verb=*", "--resource=atpjobs.atp.dev", "--resource=atpjobs.atp.dev/status"]
        kube.ctl("create", "role", "star", "-n", ATTACKER, *role)
        kube.ctl("create", "rolebinding", "star", "-n", ATTACKER, "--role=star", f"--user={USER}")
    try:
        yield Stage(kube, installation.images.digits)
    finally:
        for name in (ATTACKER, VICTIM):
            with contextlib.suppress(CommandFailed):
                kube.ctl("delete", "atpjobs", "--all", "-n", name, "--wait=false", timeout=60)
            kube.ctl("delete", "namespace", name, "--wait=false")


def outcome(name: str, scene: Stage, before: int) -> Outcome:
    """What became of the attack; a restart of the operator is a broken promise, too."""
    after = restarts(scene.kube)
    scene.check(after == before, f"the operator was restarted {after - before} times")
    detail = "; ".join([*(f"BROKEN: {text}" for text in scene.broken), *scene.seen])
    return Outcome(name, scene.requests, 0, scene.named, not scene.broken, detail)


# --- 10: large objects -----------------------------------------------------------------------------------------------


def large_jobs(installation: Installation) -> Outcome:
    """One job of 550 KB, and every other way to make one large."""
    before = restarts(installation.kube)
    with stage(installation) as scene:
        cases: dict[str, Object] = {
            "template": job("template", pod=template(x="y" * 550_000)),
            "parameter-server": job(
                "parameter-server", parameterServers={"replicas": 1, "template": template(x="y" * 380_000)}
            ),
            "annotations": job("annotations", metadata={"annotations": {"a": "b" * 200_000}}),
            "labels": job("labels", metadata={"labels": {f"label-{i}": "v" * 60 for i in range(4_000)}}),
            "finalizers": job(
                "finalizers", metadata={"finalizers": [f"example.org/{'f' * 50}-{i}" for i in range(4_000)]}
            ),
        }
        for name, body in cases.items():
            said = scene.create(body)
            scene.check("REFUSED" in said and "at most" in said, f"{name}: {said.strip()[-160:]}")
        scene.create(job("grows"))
        change = json.dumps({"metadata": {"annotations": {"a": "b" * 100_000}}})
        said = scene.attack("patch", "atpjob", "grows", "-n", ATTACKER, "--type=merge", "-p", change)
        scene.check("REFUSED" in said and "at most" in said, f"grown by an update: {said.strip()[-120:]}")
        scene.victim_is_served("beside-large")
        scene.check(scene.logged(REFUSED_USER), f"the product names {scene.named or 'nobody'}")
        return outcome("large ATPJobs", scene, before)


def many_large_jobs(installation: Installation) -> Outcome:
    """81 suspended jobs of 380 KB, then as many of just the size that is allowed; then the operator starts again."""
    before = restarts(installation.kube)
    with stage(installation) as scene:
        refused = 0
        for _ in range(3):
            batch = [job(f"large-{i}", pod=template(x="y" * 380_000), suspend=True) for i in range(27)]
            refused += scene.create(*batch).count("at most")
        scene.check(refused == 81, f"{refused} of 81 jobs of 380 KB were refused")
        scene.check(scene.logged(REFUSED_USER), f"the product names {scene.named or 'nobody'}")
        allowed = [job(f"allowed-{i}", pod=template(x="y" * 98_000), suspend=True) for i in range(81)]
        made = scene.create(*allowed, timeout=90)
        scene.check(made.count("created") == 81, f"{made.count('created')} of 81 jobs of 98 KB were taken")
        scene.victim_is_served("beside-many")
        scene.kube.ctl("delete", "pod", "-n", run.SYSTEM, "-l", "app.kubernetes.io/component=operator", "--wait")
        scene.kube.ctl("rollout", "status", "deployment/atp-operator", "-n", run.SYSTEM, "--timeout=60s", timeout=70)
        before = 0  # of the new pod
        scene.victim_is_served("after-restart")
        return outcome("many large ATPJobs", scene, before)


# --- 11: what a tenant may write -------------------------------------------------------------------------------------


def forged_statuses(installation: Installation) -> Outcome:
    """With the right to write atpjobs/status in his own namespace: what cannot be read, and what is another's."""
    before = restarts(installation.kube)
    with stage(installation, status=True) as scene:
        body = json.loads(digits_job(scene.image, "target", command=["sleep", "600"], aggregators={"request": 64}))
        body["spec"]["workers"]["replicas"] = 1
        scene.kube.ctl("apply", "-n", VICTIM, "-f", "-", stdin=json.dumps(body))
        running = until(lambda: scene.status(VICTIM, "target").get("phase") == "Running", 60)
        scene.check(running, "the victim's job runs")
        was = scene.status(VICTIM, "target")
        names = ("jobId", "switches", "regions", "placement", "epoch", "valuesPerPacket")
        stolen = {key: was[key] for key in names if key in was}
        admitted = {"phase": "Running", "mode": "Shared", "admittedTime": "2026-01-01T00:00:00Z"}
        forgeries: dict[str, Object] = {
            "unreadable": {**admitted, "epoch": 2**60, "jobId": 2**30},
            "placement": {**admitted, "placement": {"workers": 7}},
            "stolen": {**admitted, **stolen},
            "stolen-id": {**admitted, "jobId": was.get("jobId"), "switches": was.get("switches"), "epoch": 1},
            "all": {**admitted, **stolen, "regions": [{"start": 0, "size": 65536}]},
        }
        scene.create(*(job(name, suspend=True) for name in forgeries))
        for _ in range(3):
            for name, forged in forgeries.items():
                change = json.dumps({"status": forged})
                where = ("atpjob", name, "-n", ATTACKER, "--subresource=status", "--type=merge")
                scene.attack("patch", *where, "-p", change)
        scene.check(until(lambda: scene.event("StatusRejected"), 15), f"the product names {scene.named or 'nobody'}")
        scene.victim_is_served("beside-forged")
        now = scene.status(VICTIM, "target")
        same = all(now.get(key) == was.get(key) for key in (*names, "phase", "mode", "revision"))
        scene.check(same, f"the victim's job is {now.get('phase')} {now.get('mode')}, epoch {now.get('epoch')}")
        switches = json.loads(scene.kube.ctl("get", "atpswitches", "-o", "json"))["items"]
        held = [entry["name"] for item in switches for entry in (item.get("status") or {}).get("jobs") or ()]
        scene.check(not [name for name in held if name.startswith(ATTACKER)], f"the switches are held by {held}")
        return outcome("forged ATPJob statuses", scene, before)


def roles(installation: Installation) -> Outcome:
    """What Kubernetes' own roles give after `helm install`: jobs, but not their status, nor anything cluster-wide."""
    before = restarts(installation.kube)
    kube = installation.kube
    with stage(installation) as scene:
        for binding, role in (("viewer", "view"), ("admin", "admin")):
            kube.ctl("create", "rolebinding", binding, "-n", ATTACKER, f"--clusterrole={role}", f"--user={binding}")
        wanted = {
            (USER, "create", "atpjobs.atp.dev"): True,
            (USER, "delete", "atpjobs.atp.dev"): True,
            ("admin", "create", "atpjobs.atp.dev"): True,
            ("viewer", "list", "atpjobs.atp.dev"): True,
            ("viewer", "create", "atpjobs.atp.dev"): False,
            (USER, "patch", "atpjobs.atp.dev/status"): False,
            ("admin", "update", "atpjobs.atp.dev/status"): False,
            ("admin", "update", "atpswitches.atp.dev"): False,
            (USER, "get", "atpswitches.atp.dev"): False,
            ("admin", "create", "atptenantquotas.atp.dev"): False,
        }
        for (user, verb, resource), may in wanted.items():
            resource, _, sub = resource.partition("/")
            arguments = ["auth", "can-i", verb, resource, "-n", ATTACKER, "--as", user]
            scene.requests += 1

            def answer(arguments: list[str] = arguments, sub: str = sub) -> bool:
                try:
                    return kube.ctl(*arguments, *([f"--subresource={sub}"] if sub else [])).strip() == "yes"
                except CommandFailed:
                    return False

            # A role just bound is aggregated at once; a "no" that is meant stays one.
            said = until(answer, 5) if may else answer()
            scene.check(
                said == may, f"{user} {'may' if said else 'may not'} {verb} {resource}{'/' if sub else ''}{sub}"
            )
        scene.create(job("own", suspend=True))
        for arguments in (
            ("patch", "atpjob", "own", "-n", ATTACKER, "--subresource=status", "--type=merge", "-p", '{"status":{}}'),
            ("delete", "atpjobs", "--all", "-n", VICTIM),
            ("get", "atpswitches"),
        ):
            said = scene.attack(*arguments)
            scene.check("REFUSED" in said and "cannot" in said, f"{' '.join(arguments[:2])}: {said.strip()[-160:]}")
        return outcome("rights of the roles view, edit and admin", scene, before)


def foreign_pods(installation: Installation) -> Outcome:
    """Pods in the attacker's namespace that say they belong to the victim's job, or to the software switch."""
    before = restarts(installation.kube)
    with stage(installation) as scene:
        body = json.loads(digits_job(scene.image, "target", command=["sleep", "600"], aggregators={"request": 64}))
        body["spec"]["workers"]["replicas"] = 1
        scene.kube.ctl("apply", "-n", VICTIM, "-f", "-", stdin=json.dumps(body))
        until(lambda: len(scene.kube.list("pods", VICTIM, "atp.dev/job=target")) == 2, 30)
        (worker,) = scene.kube.list("pods", VICTIM, "atp.dev/job=target,atp.dev/role=worker")
        switches = json.loads(scene.kube.ctl("get", "atpswitches", "-o", "json"))["items"]
        spec = {"containers": [{"name": "x", "image": "none", "command": ["true"]}]}
        pods: list[Object] = [
            {
                "metadata": {
                    "name": "target-worker-0",
                    "labels": worker["metadata"]["labels"],
                    "ownerReferences": worker["metadata"]["ownerReferences"],
                },
                "spec": spec,
            },
            {
                "metadata": {"name": "switch", "labels": {"app.kubernetes.io/component": "softswitch"}},
                "spec": {**spec, "nodeName": "not-a-node"},
            },
        ]
        scene.create(*({"apiVersion": "v1", "kind": "Pod", **pod} for pod in pods))
        running = until(lambda: scene.status(VICTIM, "target").get("phase") == "Running", 60)
        status = scene.status(VICTIM, "target")
        scene.check(running and status.get("epoch") == 1, f"the victim's job is {status.get('phase')}")
        seats = (status.get("placement") or {}).get("workers") or [{}]
        scene.check(seats[0].get("podUid") == worker["metadata"]["uid"], "its worker is its own pod")
        names = {
            item["metadata"]["name"] for item in json.loads(scene.kube.ctl("get", "atpswitches", "-o", "json"))["items"]
        }
        scene.check(names == {item["metadata"]["name"] for item in switches}, f"the switches are {sorted(names)}")
        return outcome("pods that say they are another's", scene, before)


# --- 12: the webhook -------------------------------------------------------------------------------------------------

PROBE = """
import http.client, json, ssl, sys, threading, time
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
def ask(hook, body):
    connection = http.client.HTTPSConnection(HOST, 443, timeout=15, context=context)
    connection.request("POST", "/" + hook, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text
def review(namespace, **spec):
    pod = {"containers": [{"name": "t", "image": "i"}], **spec}
    job = {"apiVersion": "atp.dev/v1alpha1", "kind": "ATPJob",
           "metadata": {"name": "probe", "namespace": namespace, "uid": "u"},
           "spec": {"workers": {"replicas": 1, "template": {"spec": pod}}}}
    admin = {"username": "kubernetes-admin", "groups": ["system:masters"]}
    request = {"uid": "r-1", "operation": "CREATE", "namespace": namespace, "userInfo": admin, "object": job}
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request})
"""
ASK = """
answers = {ask("validate-atpjob", review(namespace, **spec))
           for namespace in ("default", "kube-system", "atp-system", "attack-victim", "not-there")
           for spec in ({}, {"priorityClassName": "system-node-critical"}, {"priorityClassName": "not-there"},
                        {"serviceAccountName": "default"}, {"serviceAccountName": "not-there"})}
print(json.dumps(sorted(answers)))
"""
FLOOD = """
end, count = time.monotonic() + 25, [0]
bodies = [review("default"), '{"request":{"uid":"u","object":' + '{"a":1},' * 500000]
def flood(body):
    while time.monotonic() < end:
        try:
            ask("validate-atpjob", body)
        except Exception:
            pass
        count[0] += 1
threads = [threading.Thread(target=flood, args=(bodies[i % 4 == 0],)) for i in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
print(count[0])
"""


def _pod(scene: Stage, name: str, program: str) -> None:
    """Run a program in a pod of the attacker's."""
    service = scene.kube.get("service", "atp-operator", run.SYSTEM) or {}
    host = f"HOST = {service['spec']['clusterIP']!r}\n"
    container = {"name": "x", "image": scene.image, "command": ["python3", "-c", host + PROBE + program]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}}
    scene.create({**pod, "spec": {"restartPolicy": "Never", "containers": [container]}})


def _printed(scene: Stage, name: str, seconds: float) -> str:
    """What the program printed in the end."""

    def ended() -> bool:
        pod = scene.kube.get("pod", name, ATTACKER) or {}
        return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")

    until(ended, seconds)
    return scene.kube.logs(name, ATTACKER, "x").strip()


def forged_reviews(installation: Installation) -> Outcome:
    """From a pod: reviews in the name of an admin, about namespaces and objects that are there, and that are not."""
    before = restarts(installation.kube)
    with stage(installation) as scene:
        _pod(scene, "asks", ASK)
        text = _printed(scene, "asks", 60)
        scene.requests += 25
        try:
            answers = json.loads(text)
        except ValueError:
            answers = []
        scene.check(
            len(answers) == 1, f"25 questions about the cluster got {len(answers)} different answers: {text[:300]}"
        )
        return outcome("forged admission reviews", scene, before)


def flooded_webhook(installation: Installation) -> Outcome:
    """From a pod: large and costly reviews without end, while the victim creates jobs."""
    before = restarts(installation.kube)
    with stage(installation) as scene:
        _pod(scene, "floods", FLOOD)
        until(lambda: (scene.kube.get("pod", "floods", ATTACKER) or {}).get("status", {}).get("phase") == "Running", 30)
        for i in range(4):
            scene.victim_is_served(f"flooded-{i}")
        text = _printed(scene, "floods", 60)
        scene.requests += int(text) if text.isdigit() else 0
        scene.check(text.isdigit() and int(text) > 20, f"the flood had {text[:200]} answers")
        # The operator sees addresses: the pod's, unless the cluster's Service hides it behind the node's, as here.
        address = ((scene.kube.get("pod", "floods", ATTACKER) or {}).get("status") or {}).get("podIP", "?")
        if scene.logged(rf"(?:review|reviews) from ({re.escape(address)})\b"):
            scene.named = f"pod {ATTACKER}/floods ({address})"
        return outcome("a flood of admission reviews", scene, before)


# --- 13: many objects ------------------------------------------------------------------------------------------------


def many_jobs(installation: Installation) -> Outcome:
    """A flood of jobs, every third of which wants to run, while the victim creates his."""
    before = restarts(installation.kube)
    with stage(installation) as scene:
        alone = scene.victim_seconds("alone")
        flood = [job(f"flood-{i}", suspend=bool(i % 3), backoffLimit=0) for i in range(FLOOD_JOBS)]
        slow: list[float] = []
        parts = [flood[i::FLOOD_PARTS] for i in range(FLOOD_PARTS)]
        with concurrent.futures.ThreadPoolExecutor(FLOOD_PARTS) as pool:
            made = [pool.submit(scene.create, *part, timeout=90) for part in parts]
            while not all(future.done() for future in made) or len(slow) < 2:
                slow.append(scene.victim_seconds(f"victim-{len(slow)}"))
        count = sum(future.result().count("created") for future in made)
        scene.check(count == FLOOD_JOBS, f"{count} of {FLOOD_JOBS} jobs were taken")
        # Where the switches have room for all of them, nobody is named.
        until(lambda: scene.waiting(("JobIDsExhausted", "AggregatorsExhausted")), 10)
        text = ", ".join(f"{s:.1f}" for s in slow)
        scene.check(max(slow) < QUICK_SECONDS, f"the victim's jobs had their pods after {text} s; alone {alone:.1f} s")
        return outcome("many ATPJobs", scene, before)


ATTACKS: dict[str, Callable[[Installation], Outcome]] = {
    "large ATPJobs": large_jobs,
    "many large ATPJobs": many_large_jobs,
    "forged ATPJob statuses": forged_statuses,
    "rights of the roles view, edit and admin": roles,
    "pods that say they are another's": foreign_pods,
    "forged admission reviews": forged_reviews,
    "a flood of admission reviews": flooded_webhook,
    "many ATPJobs": many_jobs,
}
"""By name as in docs/security.md."""
