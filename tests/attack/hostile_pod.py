# SPDX-License-Identifier: Apache-2.0
"""A pod of another tenant against a training job, on the cluster: with what Kubernetes and the runtime give any pod."""

from __future__ import annotations

import json
from collections.abc import Callable

from attack.control_plane import ATTACKER, VICTIM, Object, outcome, restarts, stage, until
from attack.outcome import Outcome
from demo.follow import Training
from e2e.support import Installation, digits_job, watch

SCRIPT = """
import json, os, random, socket, struct, time, urllib.error, urllib.request
told = json.loads(os.environ["TARGETS"])
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
plain = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
plain.setsockopt(socket.IPPROTO_UDP, 103, 264)

def packet(flags, b0, fill, sequence):
    head = struct.pack(">4I", told["jobId"] << 24 | sequence, b0, 1, 2 << 27 | 1 << 22 | flags)
    return head + struct.pack(">f", fill) * 62

def send(source, to, payload):
    udp = struct.pack(">HHHH", 10800, 10800, 8 + len(payload), 0) + payload
    ends = socket.inet_aton(source) + socket.inet_aton(to)
    head = struct.pack(">BBHHHBBH8s", 0x45, 0, 20 + len(udp), 1, 0, 64, 17, 0, ends)
    raw.sendto(head + udp, (to, 0))

ps, workers = told["servers"][0], told["workers"]
own = socket.gethostbyname(socket.gethostname())
RAW, ACK, EDGE, INDEX3 = 1 << 16, 1 << 17, 1 << 21, 3
for host in (ps, *workers):
    try:
        print("status", urllib.request.urlopen("http://" + host + ":9095/status", timeout=5).read()[:80], flush=True)
    except urllib.error.HTTPError as error:
        print("status", error.code, flush=True)
end = time.monotonic() + 60
sent = 0
while time.monotonic() < end:
    for _ in range(500):
        s = random.randrange(1 << 16)
        send(workers[0], ps, packet(RAW, 1, 1e10, s))
        send(own, ps, packet(RAW, 1, 1e10, s))
        send(workers[1], ps, packet(EDGE | s % 1024, 3, 1e10, s))
        send(own, ps, packet(EDGE | s % 1024, 3, 1e10, s))
        send(ps, workers[0], packet(RAW | ACK, 0, 1e10, s))
        send(ps, workers[1], packet(ACK | EDGE, 0, 1e10, s))
        send(workers[0], ps, packet(RAW | INDEX3, 1, 1e10, s))
        plain.sendto(packet(0, 1, 1e10, s) * 8, (ps, 10800))
        sent += 15
    print(sent, flush=True)
"""


def hostile_pod(installation: Installation) -> Outcome:
    """Raw packets, sums, ACKs, notices, control packets and superframes, under every address, while a job trains."""
    before = restarts(installation.kube)
    with stage(installation) as scene:
        kube = installation.kube
        kube.ctl("apply", "-n", VICTIM, "-f", "-", stdin=digits_job(scene.image, "target"))
        logs: Callable[[], str] = lambda: kube.logs("target-worker-0", VICTIM, "trainer")  # noqa: E731
        until(lambda: scene.status(VICTIM, "target").get("phase") == "Running", 120)
        status = scene.status(VICTIM, "target")
        placement = status.get("placement") or {"workers": [], "parameterServers": []}
        told = {
            "jobId": status.get("jobId"),
            "workers": [worker["address"] for worker in placement["workers"]],
            "servers": [server["address"] for server in placement["parameterServers"]],
        }
        pod: Object = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "hostile"},
            "spec": {
                "restartPolicy": "Never",
                "containers": [
                    {
                        "name": "x",
                        "image": scene.image,
                        "imagePullPolicy": "Never",
                        "command": ["python3", "-c", SCRIPT],
                        "env": [{"name": "TARGETS", "value": json.dumps(told)}],
                        "securityContext": {"runAsUser": 0},
                    }
                ],
            },
        }
        scene.create(pod)
        begun = until(lambda: kube.logs("hostile", ATTACKER, "x").strip(), 60)
        scene.check(begun, "the hostile pod sends")
        early = not Training.read(logs()).result
        scene.check(early, "it began while the job was training")
        seen = watch(kube, "target", VICTIM)
        said = kube.logs("hostile", ATTACKER, "x").splitlines()
        sent = [int(line) for line in said if line.isdigit()]
        scene.requests = sent[-1] if sent else 0
        told_by = [line for line in said if line.startswith("status")]
        scene.check(told_by == ["status 403"] * len(told_by) != [], f"asked for their status, sidecars said {told_by}")
        result = seen.training.result or {}
        scene.check(seen.phase == "Succeeded" and seen.status.get("epoch") == 1, f"the job {seen.phase}, epoch 1")
        scene.check(result.get("accuracy", 0) >= 0.9, f"its accuracy is {result.get('accuracy')}")
        error = result.get("error_over_bound", 9)
        scene.check(0 < error <= 1, f"its largest error is {error} of the bound")
        share = seen.metrics.aggregated_share()
        scene.check(share > 0.9, f"{share:.1%} of its packets were summed in the switch")
        named = until(lambda: scene.event("ATPPacketsDropped"), 20)
        scene.check(named, f"the event names {scene.named}")
        return outcome("a hostile pod", scene, before)


ATTACKS: dict[str, Callable[[Installation], Outcome]] = {"a hostile pod": hostile_pod}
"""By name as in docs/security.md."""
