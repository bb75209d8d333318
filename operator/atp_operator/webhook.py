# SPDX-License-Identifier: Apache-2.0
"""The HTTPS end point of the webhooks. It decides nothing (`admission` does); it bounds what a caller can cost.

A caller is an address: whoever floods the port waits behind himself. Large bodies are read one at a time.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from .admission import CHECKS, Answer, BadReview, read_review, review_answer, tells_of_the_pod, uid_of
from .kube import ApiError, Kube, TooLarge, path
from .model import Object
from .settings import Settings
from .sizes import REVIEW_BYTES_MAX

log = logging.getLogger(__name__)

CALLER_AT_ONCE = 8
"""Reviews of one caller that are read and decided at the same time."""
CALLERS = 1024
"""Callers that are told apart; one not seen for longest is forgotten."""
LARGE_BYTES = 512 << 10
"""Bodies from this size on are read one at a time, whoever sends them."""
BODY_SECONDS = 10.0
"""So long may a body take; an API server waits no longer for the answer."""
TRIALS_AT_ONCE = 4
"""Dry runs at the same time, and for one namespace half as many."""
TRIALS_WAITING = (8, 64)
"""Dry runs that wait or run, for one namespace and for one caller; what comes beside them is answered without."""
TRIAL_SECONDS = 4.0
"""After so long an answer goes out without what a dry run would have said."""


class Gates:
    """A semaphore a key, for the keys seen last."""

    def __init__(self, width: int, most: int = CALLERS) -> None:
        self._width, self._most = width, most
        self._gates: OrderedDict[str, asyncio.Semaphore] = OrderedDict()

    def of(self, key: str) -> asyncio.Semaphore:
        """The semaphore of this key; one that somebody holds is never forgotten."""
        gate = self._gates.setdefault(key, asyncio.Semaphore(self._width))
        self._gates.move_to_end(key)
        if len(self._gates) > self._most:
            for old, candidate in list(self._gates.items())[:16]:
                if candidate is not gate and not candidate.locked():
                    del self._gates[old]
        return gate


class Webhooks:
    """Reads reviews, asks `admission`, tries pods, answers."""

    def __init__(self, settings: Settings, kube: Kube) -> None:
        self._settings, self._kube = settings, kube
        self._callers = Gates(CALLER_AT_ONCE)
        self._namespaces = Gates(max(1, TRIALS_AT_ONCE // 2))
        self._waiting = Counter[tuple[str, str]]()
        self._large = asyncio.Semaphore(1)
        self._trials = asyncio.Semaphore(TRIALS_AT_ONCE)

    async def _answer(self, name: str, http: web.Request) -> web.Response:
        caller = http.remote or ""
        async with self._callers.of(caller):
            length = http.content_length
            if length is None or length > REVIEW_BYTES_MAX:
                # What is unread would be read to its end before the next request of the connection.
                text = f"the body must say its length, at most {REVIEW_BYTES_MAX} bytes"
                response = web.Response(status=413, text=text)
                response.force_close()
                return response
            try:
                if length < LARGE_BYTES:
                    uid, namespace, answer = await self._decide(name, http)
                else:
                    async with self._large:
                        uid, namespace, answer = await self._decide(name, http)
            except (TimeoutError, ConnectionError):
                return web.Response(status=408, text="the body did not come")
            except BadReview as error:
                return web.Response(status=400, text=str(error))
        # Not in the caller's turn: an API server asks for all tenants, and one's dry runs are not to delay another.
        if answer.trial and not answer.refused:
            answer = replace(answer, refused=tuple(await self._try(caller, namespace, answer.trial)))
        return web.json_response(review_answer(uid, answer))

    async def _decide(self, name: str, http: web.Request) -> tuple[str, str, Answer]:
        """(UID, namespace, answer) of a review. Raises BadReview, TimeoutError."""
        async with asyncio.timeout(BODY_SECONDS):
            body = await http.read()
        try:
            request = await self._apart(len(body), read_review, body)
        except BadReview as error:
            uid = uid_of(body)
            if not uid:
                raise
            return uid, "", Answer(refused=(f"the object cannot be read: {error}",))
        uid, namespace = str(request["uid"]), str(request.get("namespace") or "")
        try:
            return uid, namespace, await self._apart(len(body), CHECKS[name], request, self._settings.sidecar)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            return uid, namespace, Answer(refused=(f"the object is not what its schema says: {error!r}"[:1024],))

    @staticmethod
    async def _apart(size: int, work: Callable[..., Any], *args: Any) -> Any:
        """Small work at once, large work in a thread, so that others are answered meanwhile."""
        return work(*args) if size < LARGE_BYTES // 8 else await asyncio.to_thread(work, *args)

    async def _try(self, caller: str, namespace: str, pods: Mapping[str, Object]) -> list[str]:
        """What the API server says of pods that are not made; nothing, when it does not say it soon."""
        refused: list[str] = []
        keys = (("namespace", namespace), ("caller", caller))
        if any(self._waiting[key] >= most for key, most in zip(keys, TRIALS_WAITING, strict=True)):
            log.info("the dry run of a job in namespace %s was left out: too many wait", namespace)
            return []
        self._waiting.update(keys)
        try:
            async with asyncio.timeout(TRIAL_SECONDS), self._namespaces.of(namespace), self._trials:
                for where, pod in pods.items():
                    try:
                        await self._kube.request(
                            "POST",
                            path("api/v1", "pods", self._settings.namespace),
                            pod,
                            query={"dryRun": "All", "fieldValidation": "Strict"},
                        )
                    except ApiError as error:
                        if tells_of_the_pod(error.code, error.message):
                            refused.append(f"{where}: {error.message}")
        except (TimeoutError, OSError, TooLarge, aiohttp.ClientError) as error:
            log.info("the dry run of a job in namespace %s was left out: %s", namespace, error or "it took too long")
        finally:
            self._waiting.subtract(keys)
            self._waiting += Counter()  # without those that are at 0
        return refused

    def _handler(self, name: str) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(http: web.Request) -> web.Response:
            return await self._answer(name, http)

        return handle

    async def serve(self) -> web.AppRunner:
        """Listen with the certificate of the settings."""
        folder = Path(self._settings.webhook_tls_dir)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        app = web.Application(client_max_size=REVIEW_BYTES_MAX)
        for name in CHECKS:
            app.router.add_post(f"/{name}", self._handler(name))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0, keepalive_timeout=75.0)
        await runner.setup()
        await web.TCPSite(
            runner, self._settings.webhook_address, self._settings.webhook_port, ssl_context=context, backlog=256
        ).start()
        return runner
