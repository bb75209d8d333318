# SPDX-License-Identifier: Apache-2.0
"""kopf's side: watches feed the controller, webhooks ask the pure functions. Nothing is decided here."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kopf

from . import GROUP, LABEL_JOB, VERSION
from .controller import SOFTSWITCH_LABEL, Controller
from .injection import InjectionError, SidecarConfig, inject
from .model import SCALE_AUTO, Object, read_scale
from .settings import Settings
from .validation import validate_job, validate_job_update, validate_quota, validate_switch

log = logging.getLogger(__name__)

# URL paths of the webhooks: /<id>.
INJECT, CHECK_JOB, CHECK_SWITCH, CHECK_QUOTA = (
    "inject-sidecar",
    "validate-atpjob",
    "validate-atpswitch",
    "validate-atptenantquota",
)


def configure(kopf_settings: kopf.OperatorSettings, settings: Settings) -> None:
    """kopf as this product wants it: no peering, a static webhook configuration, names of our own."""
    # Not FINALIZER: kopf takes its own away from objects that no handler of it needs to block.
    kopf_settings.persistence.finalizer = f"{GROUP}/kopf"
    kopf_settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    kopf_settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    kopf_settings.posting.enabled = False
    kopf_settings.peering.standalone = True
    kopf_settings.admission.managed = None
    if settings.webhook_tls_dir:
        folder = Path(settings.webhook_tls_dir)
        kopf_settings.admission.server = kopf.WebhookServer(
            addr=settings.webhook_address,
            port=settings.webhook_port,
            certfile=folder / "tls.crt",
            pkeyfile=folder / "tls.key",
        )


def register(registry: kopf.OperatorRegistry, settings: Settings, controller: Controller) -> None:
    """All handlers, on a registry of their own."""

    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings, controller.settings)

    kopf.on.startup(registry=registry)(start)

    def login(**arguments: Any) -> Any:
        # In a pod by its service account, elsewhere by KUBECONFIG; kopf asks again when a token has expired.
        return kopf.login_with_service_account(**arguments) or kopf.login_via_client(**arguments)

    kopf.on.login(registry=registry, id="login")(login)

    def feed(kind: str) -> Callable[..., Any]:
        async def handler(event: Any, **_: Any) -> None:
            controller.seen(kind, event["type"], copy.deepcopy(dict(event["object"])))

        handler.__name__ = f"see_{kind}"
        return handler

    kopf.on.event(GROUP, VERSION, "atpjobs", registry=registry)(feed("jobs"))
    kopf.on.event(GROUP, VERSION, "atpswitches", registry=registry)(feed("switches"))
    kopf.on.event(GROUP, VERSION, "atptenantquotas", registry=registry)(feed("quotas"))
    kopf.on.event("", "v1", "namespaces", registry=registry)(feed("namespaces"))
    kopf.on.event("", "v1", "nodes", registry=registry)(feed("nodes"))
    kopf.on.event("", "v1", "pods", registry=registry, labels={LABEL_JOB: kopf.PRESENT}, id="see_job_pods")(
        feed("pods")
    )
    kopf.on.event(
        "",
        "v1",
        "pods",
        registry=registry,
        labels={SOFTSWITCH_LABEL[0]: SOFTSWITCH_LABEL[1]},
        id="see_switch_pods",
    )(feed("pods"))
    if settings.webhook_tls_dir:
        _register_webhooks(registry, settings.sidecar, controller)


def _register_webhooks(registry: kopf.OperatorRegistry, sidecar: SidecarConfig, controller: Controller) -> None:
    async def inject_sidecar(body: kopf.Body, patch: kopf.Patch, **_: Any) -> None:
        old: Object = copy.deepcopy(dict(body))
        try:
            injected = inject(old, sidecar)
        except InjectionError as error:
            raise kopf.AdmissionError(str(error), code=422) from error
        for part in ("metadata", "spec"):
            for key, value in injected[part].items():
                if old[part].get(key) != value:
                    patch.setdefault(part, {})[key] = value

    def reject(errors: list[str]) -> None:
        if errors:
            raise kopf.AdmissionError("; ".join(errors), code=422)

    async def check_job(body: kopf.Body, old: Any, operation: str, warnings: list[str], **_: Any) -> None:
        new: Object = dict(body)
        if (new.get("metadata") or {}).get("deletionTimestamp"):
            return  # only finalizers change now
        reject(validate_job(new))
        if operation == "UPDATE" and old is not None:
            reject(validate_job_update(dict(old), new))
        _warn(new, warnings)
        if operation == "CREATE" or (old is not None and dict(old).get("spec") != new.get("spec")):
            refused, doubts = await controller.try_pods(new)
            warnings += doubts
            reject(refused)

    async def check_switch(body: kopf.Body, **_: Any) -> None:
        reject(validate_switch(dict(body)))

    async def check_quota(body: kopf.Body, **_: Any) -> None:
        reject(validate_quota(dict(body)))

    kopf.on.mutate(
        "",
        "v1",
        "pods",
        registry=registry,
        id=INJECT,
        operations=["CREATE"],
        labels={LABEL_JOB: kopf.PRESENT},
    )(inject_sidecar)
    writes: Any = ["CREATE", "UPDATE"]
    kopf.on.validate(GROUP, VERSION, "atpjobs", registry=registry, id=CHECK_JOB, operations=writes)(check_job)
    kopf.on.validate(GROUP, VERSION, "atpswitches", registry=registry, id=CHECK_SWITCH, operations=writes)(check_switch)
    kopf.on.validate(GROUP, VERSION, "atptenantquotas", registry=registry, id=CHECK_QUOTA, operations=writes)(
        check_quota
    )


def _warn(job: Object, warnings: list[str]) -> None:
    scale = read_scale((job.get("spec") or {}).get("scale", SCALE_AUTO))
    if scale != SCALE_AUTO and scale > 2**30:
        warnings.append("spec.scale above 2^30: gradients of magnitude 2 and more take the slow raw path")
