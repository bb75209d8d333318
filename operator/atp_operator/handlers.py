# SPDX-License-Identifier: Apache-2.0
"""kopf's side: its watches feed the controller, its webhooks ask `admission`. Nothing is decided here.

Why ATPJobs, pods and nodes are not watched by kopf: docs/architecture.md, "kopf, and what it does not do here".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import kopf

from . import GROUP, VERSION
from .admission import CHECKS, INJECT, RESOURCES, apply_patch, decide, refusal_text, warning_texts
from .controller import Controller
from .injection import SidecarConfig
from .kube import ATP, CALL_FAILED, PAGE_OBJECTS, Kube
from .settings import Settings
from .webhook import ANSWERS, WebhookServer

log = logging.getLogger(__name__)

DEFINITIONS = ("atpjobs", "atpswitches", "atptenantquotas")
LOOK_SECONDS = 2.0
"""Pause between looks for the definitions, which are applied before or after the operator."""
BACKOFFS = (0.5, 1.0, 2.0, 4.0, 8.0, *[15.0] * 10_000)
"""Pauses after a call of kopf's own that failed, in seconds: an API server that is away for long ends no operator."""


def configure(kopf_settings: kopf.OperatorSettings, server: WebhookServer | None) -> None:
    """kopf as this product wants it: no peering, a static webhook configuration, names of our own."""
    # Not FINALIZER: kopf takes its own away from objects that no handler of it needs to block.
    kopf_settings.persistence.finalizer = f"{GROUP}/kopf"
    kopf_settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    kopf_settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    kopf_settings.posting.enabled = False
    kopf_settings.peering.standalone = True
    # The kinds are there when kopf looks around (see `start`), and the definitions of others are none of our business.
    kopf_settings.scanning.disabled = True
    kopf_settings.watching.chunk_size = PAGE_OBJECTS
    kopf_settings.networking.error_backoffs = BACKOFFS
    kopf_settings.admission.managed = None
    kopf_settings.admission.server = server


def register(
    registry: kopf.OperatorRegistry,
    settings: Settings,
    kube: Kube,
    controller: Controller,
    server: WebhookServer | None,
) -> None:
    """All handlers, on a registry of their own; without a `server` none for admission."""

    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings, server)
        await _definitions(kube)

    def login(**arguments: Any) -> Any:
        # In a pod by its service account, elsewhere by KUBECONFIG; kopf asks again when a token has expired.
        return kopf.login_with_service_account(**arguments) or kopf.login_via_client(**arguments)

    kopf.on.startup(registry=registry, id="start")(start)
    kopf.on.login(registry=registry, id="login")(login)

    def feed(kind: str) -> Callable[..., Any]:
        async def handler(event: Any, **_: Any) -> None:
            controller.caches.seen(kind, event["type"], event["object"])

        return handler

    kopf.on.event(GROUP, VERSION, "atpswitches", registry=registry, id="see-switches")(feed("switches"))
    kopf.on.event(GROUP, VERSION, "atptenantquotas", registry=registry, id="see-quotas")(feed("quotas"))
    kopf.on.event("", "v1", "namespaces", registry=registry, id="see-namespaces")(feed("namespaces"))
    if server is not None:
        for name in CHECKS:
            on: Any = kopf.on.mutate if name == INJECT else kopf.on.validate
            operations = ["CREATE"] if name == INJECT else ["CREATE", "UPDATE"]
            on(*RESOURCES[name], registry=registry, id=name, operations=operations)(_check(name, settings.sidecar))


def _check(name: str, sidecar: SidecarConfig) -> Callable[..., Any]:
    async def handler(body: kopf.Body, old: Any, patch: kopf.Patch, warnings: list[str], **_: Any) -> None:
        answer = decide(name, {"object": dict(body), "oldObject": None if old is None else dict(old)}, sidecar)
        answers = ANSWERS.get()
        if answers is not None:
            answers.append(answer)
        warnings += warning_texts(answer)
        if answer.refused:
            raise kopf.AdmissionError(refusal_text(answer), code=422)
        if answer.patch:
            patch.fns.append(partial(apply_patch, answer.patch))

    return handler


async def _definitions(kube: Kube) -> None:
    """Until the API server serves our kinds: kopf looks for them once."""
    told = False
    while True:
        try:
            served = {kind.get("name") for kind in (await kube.get(f"/{ATP}")).get("resources") or ()}
            missing = [name for name in DEFINITIONS if name not in served]
            if not missing:
                return
            why = f"{', '.join(missing)} of {GROUP}/{VERSION} are not defined"
        except (*CALL_FAILED, ValueError) as error:
            why = str(error) or type(error).__name__
        log.log(logging.DEBUG if told else logging.WARNING, "waiting for the definitions in crds/: %s", why)
        told = True
        await asyncio.sleep(LOOK_SECONDS)
