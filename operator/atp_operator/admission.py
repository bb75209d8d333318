# SPDX-License-Identifier: Apache-2.0
"""What is said to an admission review. Pure: an answer rests on the review alone, never on what the cluster holds.

Whoever reaches the port can send a review, and an API server shows no certificate unless it is configured to. So an
answer tells nothing that its asker did not send, and a forged review gets nothing that a real one would not.
"""

from __future__ import annotations

import base64
import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import GROUP, VERSION
from .injection import InjectionError, SidecarConfig, inject
from .intake import job_problems
from .model import SCALE_AUTO, Job, Object, read_scale
from .pods import TEMPLATE_FIELDS, manifest, wanted_objects
from .sizes import DEPTH_MAX, too_deep, too_large
from .validation import NAMES_OF_OTHERS, validate_job_update, validate_quota, validate_switch

# URL paths of the webhooks: /<id>.
INJECT, CHECK_JOB, CHECK_SWITCH, CHECK_QUOTA = (
    "inject-sidecar",
    "validate-atpjob",
    "validate-atpswitch",
    "validate-atptenantquota",
)
RESOURCES: Mapping[str, tuple[str, str, str]] = {
    INJECT: ("", "v1", "pods"),
    CHECK_JOB: (GROUP, VERSION, "atpjobs"),
    CHECK_SWITCH: (GROUP, VERSION, "atpswitches"),
    CHECK_QUOTA: (GROUP, VERSION, "atptenantquotas"),
}
"""Group, version and plural of what a webhook is asked about."""


@dataclass(frozen=True)
class Answer:
    """What the API server is told of an object."""

    refused: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    patch: tuple[Object, ...] = ()  # JSON patch
    # Pods to be tried, by the field of the object that they are made from: what is wrong with them is refused, too.
    trial: Mapping[str, Object] = field(default_factory=dict)


class BadReview(ValueError):
    """The body is no AdmissionReview that can be answered."""


def _objects(request: Mapping[str, Any]) -> tuple[Object, Object | None]:
    new, old = request.get("object"), request.get("oldObject")
    if not isinstance(new, dict) or not isinstance(new.get("metadata", {}), dict):
        raise BadReview("request.object is not there")
    return new, old if isinstance(old, dict) else None


def inject_sidecar(request: Mapping[str, Any], sidecar: SidecarConfig) -> Answer:
    """A pod of a job gets its sidecar, or is told what keeps it from that."""
    pod, _ = _objects(request)
    try:
        injected = inject(pod, sidecar)
    except InjectionError as error:
        return Answer(refused=(str(error),))
    operations = [
        {"op": "add", "path": f"/{part}/{_pointer(key)}", "value": value}
        for part in ("metadata", "spec")
        for key, value in injected[part].items()
        if (pod.get(part) or {}).get(key) != value
    ]
    return Answer(patch=tuple(operations))


def _pointer(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def check_job(request: Mapping[str, Any], sidecar: SidecarConfig) -> Answer:
    """All that keeps an ATPJob from running, or from being changed like this."""
    job, old = _objects(request)
    meta = job.get("metadata") or {}
    if meta.get("deletionTimestamp"):
        return Answer()  # only finalizers change now
    large = too_large(job, old)
    if large:
        return Answer(refused=tuple(large))
    if old is not None and old.get("spec") == job.get("spec"):
        return Answer()
    errors = job_problems(job, sidecar)
    if not errors and old is not None:
        errors = validate_job_update(old, job)
    if errors:
        return Answer(refused=tuple(errors))
    return Answer(warnings=tuple(_warnings(job)), trial=trial_pods(job, sidecar))


def check_switch(request: Mapping[str, Any], sidecar: SidecarConfig) -> Answer:
    """All that is wrong with an ATPSwitch."""
    return Answer(refused=tuple(validate_switch(_objects(request)[0])))


def check_quota(request: Mapping[str, Any], sidecar: SidecarConfig) -> Answer:
    """All that is wrong with an ATPTenantQuota."""
    return Answer(refused=tuple(validate_quota(_objects(request)[0])))


CHECKS: Mapping[str, Callable[[Mapping[str, Any], SidecarConfig], Answer]] = {
    INJECT: inject_sidecar,
    CHECK_JOB: check_job,
    CHECK_SWITCH: check_switch,
    CHECK_QUOTA: check_quota,
}


def decide(name: str, request: Mapping[str, Any], sidecar: SidecarConfig) -> Answer:
    """The answer of the check `name` to anything that JSON can say."""
    try:
        return CHECKS[name](request, sidecar)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        return not_readable(error)


def not_readable(error: Exception) -> Answer:
    """What is said of an object that is unlike all that its schema lets in."""
    return Answer(refused=(f"the object is not what its schema says: {error!r}"[:1024],))


def _warnings(job: Mapping[str, Any]) -> list[str]:
    scale = read_scale((job.get("spec") or {}).get("scale", SCALE_AUTO))
    if scale != SCALE_AUTO and scale > 2**30:
        return ["spec.scale above 2^30: gradients of magnitude 2 and more take the slow raw path"]
    return []


# --- pods that are tried ---------------------------------------------------------------------------------------------

NAMED_ELSEWHERE: Mapping[str, type] = {
    **dict.fromkeys(NAMES_OF_OTHERS, str),
    "serviceAccount": str,
    "priority": int,
    "overhead": dict,
}
"""Fields of a pod that name other objects, or follow from them, with their type: no answer says whether those exist."""


def trial_pods(job: Mapping[str, Any], sidecar: SidecarConfig) -> dict[str, Object]:
    """One pod of each role, as the operator tries them in its own namespace: no other would be told anything of."""
    read = Job.from_object({**job, "metadata": {"name": "trial", **(job.get("metadata") or {})}, "status": {}})
    result = {}
    for wanted in wanted_objects(read):
        if wanted.kind != "Pod" or wanted.index:
            continue
        pod = manifest(wanted, read, job.get("spec") or {}, 1, sidecar)
        meta, spec = pod["metadata"], copy.deepcopy(pod["spec"])
        # Without our labels no webhook of ours is asked again.
        labels = {k: v for k, v in meta["labels"].items() if not k.startswith(f"{GROUP}/")}
        for name, kind in NAMED_ELSEWHERE.items():
            if isinstance(spec.get(name), kind):  # of another type it is a mistake, and told
                del spec[name]
        spec["automountServiceAccountToken"] = False
        result[TEMPLATE_FIELDS[wanted.role]] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"generateName": "atp-dry-run-", "labels": labels, "annotations": meta["annotations"]},
            "spec": spec,
        }
    return result


def tells_of_the_pod(code: int, message: str) -> bool:
    """True when a refused trial is the fault of the pod itself, and not of a policy or of what it names."""
    return code in (400, 422) and not message.startswith("admission webhook ") and " is forbidden: " not in message


# --- the envelope ----------------------------------------------------------------------------------------------------

_UID = re.compile(rb'"uid"\s*:\s*"([0-9A-Za-z-]{1,64})"')


def read_review(body: bytes) -> Mapping[str, Any]:
    """The request of an AdmissionReview. Raises BadReview."""
    try:
        review = json.loads(body)
        request = review["request"]
        if isinstance(request["uid"], str):
            return dict(request)
    except (KeyError, TypeError, ValueError, RecursionError):
        pass
    raise BadReview("the body is no AdmissionReview of admission.k8s.io/v1")


def uid_of(body: bytes) -> str:
    """The UID of a review that cannot be read as a whole; empty when it is not at its beginning."""
    found = _UID.search(body[:4096])
    return found[1].decode() if found else ""


def refusal_text(answer: Answer) -> str:
    """Why the object is refused, for people."""
    return "; ".join(answer.refused)[:8192]


def warning_texts(answer: Answer) -> list[str]:
    """The warnings, as short as an API server passes them on."""
    return [text[:256] for text in answer.warnings]


def review_answer(uid: str, answer: Answer) -> Object:
    """The AdmissionReview that is sent back where kopf makes none."""
    response: Object = {"uid": uid, "allowed": not answer.refused}
    if answer.refused:
        response["status"] = {"code": 422, "message": refusal_text(answer)}
    if answer.warnings:
        response["warnings"] = warning_texts(answer)
    if answer.patch and not answer.refused:
        text = json.dumps(list(answer.patch)).encode()
        response.update({"patchType": "JSONPatch", "patch": base64.b64encode(text).decode()})
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


# --- through kopf ----------------------------------------------------------------------------------------------------

KOPF_BYTES = 64 << 10
"""Reviews from this size on are answered without kopf, which takes twice as long, in the loop that answers all."""


def for_kopf(size: int, request: Mapping[str, Any]) -> bool:
    """True for what kopf reads with little work.

    It compares the object with the old one by recursion, at each level all below it, with a path for each: 65 MB and
    4.6 s for 4,000 levels of one key.
    """
    objects = [request.get("object"), request.get("oldObject")]
    return (
        size < KOPF_BYTES
        and isinstance(objects[0], dict)
        and all(
            part is None or (isinstance(part, dict) and isinstance(part.get("metadata", {}), dict)) for part in objects
        )
        and not too_deep(objects, DEPTH_MAX)
    )


def kopf_review(name: str, request: Mapping[str, Any]) -> Object:
    """The review as kopf wants it. The URL says what it is about, and no answer rests on who asks.

    It is always told of a CREATE, of an object that may never be: kopf keeps a note for each UID of an update, and
    anybody who reaches the port can send UIDs. Our checks look at the old object, not at the operation.
    """
    group, version, plural = RESOURCES[name]
    old = request.get("oldObject")
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": request["uid"],
            "operation": "CREATE",
            "resource": {"group": group, "version": version, "resource": plural},
            "userInfo": {},
            "object": request["object"],
            "oldObject": old,
        },
    }


def apply_patch(operations: Sequence[Object], body: Object) -> None:
    """Carry out the operations of an `Answer` on the object: each adds one key of `metadata` or `spec`."""
    for operation in operations:
        part, key = operation["path"].removeprefix("/").split("/", 1)
        body.setdefault(part, {})[key.replace("~1", "/").replace("~0", "~")] = operation["value"]
