# SPDX-License-Identifier: Apache-2.0
"""One ATPTenantQuota."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .types import Object


@dataclass(frozen=True)
class Quota:
    """What the namespaces that it selects may hold together."""

    name: str
    selector: Mapping[str, Any]
    max_jobs: int | None
    aggregators: int | None
    raw: Object = field(default_factory=dict, compare=False, repr=False)

    def selects(self, labels: Mapping[str, str]) -> bool:
        """True when a namespace with these labels is this tenant's (LabelSelector semantics)."""
        for key, value in (self.selector.get("matchLabels") or {}).items():
            if labels.get(key) != value:
                return False
        for rule in self.selector.get("matchExpressions") or ():
            key, values = rule["key"], rule.get("values") or ()
            present = key in labels
            match rule["operator"]:
                case "In":
                    ok = present and labels[key] in values
                case "NotIn":
                    ok = not present or labels[key] not in values
                case "Exists":
                    ok = present
                case _:
                    ok = not present
            if not ok:
                return False
        return True

    @staticmethod
    def from_object(raw: Object) -> Quota:
        spec = raw.get("spec") or {}
        return Quota(
            name=raw["metadata"]["name"],
            selector=spec.get("namespaceSelector") or {},
            max_jobs=spec.get("maxJobs"),
            aggregators=(spec.get("nominalQuota") or {}).get("aggregators"),
            raw=raw,
        )
