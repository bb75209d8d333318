# SPDX-License-Identifier: Apache-2.0
"""How large an ATPJob may be, and what the operator reads at most. All in bytes of compact JSON in UTF-8.

The API server itself takes 1.5 MB for an object, and a schema cannot limit the size of a pod template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

SPEC_BYTES_MAX = 100_000
"""`spec` with both pod templates: every pod of the job has them."""
METADATA_BYTES_MAX = 32_000
"""`metadata` without what the API server and kubectl keep there (see below)."""
RECORDS_BYTES_MAX = 400_000
"""`metadata.managedFields` and kubectl's last-applied-configuration together."""
DEPTH_MAX = 64
"""Objects and lists within each other in `spec`; a pod template needs about 15."""
JSON_DEPTH = 10_000
"""So deep does the API server read JSON."""
STATUS_BYTES_MAX = 600_000
"""A status beyond this is not read; that of a job with 1,024 workers has less than half."""
OBJECT_BYTES_MAX = 4 << 20
"""One object as the API server sends it: above all that etcd takes."""
PAGE_BYTES_MAX = 8 << 20
"""One page of a list; a larger one is asked for again with fewer objects."""
REVIEW_BYTES_MAX = 8 << 20
"""An AdmissionReview: an update carries the object twice, and the API server takes requests of 3 MiB."""

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def json_bytes(value: object) -> int:
    """Size of the value as compact JSON."""
    return len(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass"))


def too_deep(value: object, most: int = DEPTH_MAX) -> bool:
    """True when objects and lists are nested deeper than `most`."""
    level = [value]
    for _ in range(most):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return any(isinstance(item, dict | list) for item in level)


def _parts(job: Mapping[str, Any]) -> dict[str, int]:
    meta = dict(job.get("metadata") or {})
    records = [meta.pop("managedFields", None)]
    annotations = meta.get("annotations")
    if isinstance(annotations, dict) and LAST_APPLIED in annotations:
        records.append(annotations[LAST_APPLIED])
        meta["annotations"] = {k: v for k, v in annotations.items() if k != LAST_APPLIED}
    return {"spec": json_bytes(job.get("spec") or {}), "metadata": json_bytes(meta), "records": json_bytes(records)}


LIMITS: Mapping[str, tuple[int, str]] = {
    "spec": (
        SPEC_BYTES_MAX,
        "spec has {size} bytes, at most {limit}: move what is large into a ConfigMap, a volume or the image",
    ),
    "metadata": (
        METADATA_BYTES_MAX,
        "metadata has {size} bytes, at most {limit}: fewer or shorter annotations, labels, finalizers and owners",
    ),
    "records": (
        RECORDS_BYTES_MAX,
        "metadata.managedFields and the annotation last-applied-configuration have {size} bytes together, at most "
        "{limit}: change the object with fewer field managers (kubectl --field-manager)",
    ),
}
"""By part: its limit, and what to say of an object beyond it."""


def too_large(job: Mapping[str, Any], old: Mapping[str, Any] | None = None) -> list[str]:
    """Which parts of an ATPJob are too large, with what to do; empty when none is.

    `old`: the object before an update. What was too large already may stay, or shrink, so that it can be changed.
    """
    if too_deep(job.get("spec")):
        return [f"spec is nested deeper than {DEPTH_MAX} levels: no pod template is"]
    before = _parts(old) if old is not None else {}
    return [
        LIMITS[part][1].format(size=size, limit=LIMITS[part][0])
        for part, size in _parts(job).items()
        if size > LIMITS[part][0] and size > before.get(part, 0)
    ]
