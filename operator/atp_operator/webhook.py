# SPDX-License-Identifier: Apache-2.0
"""The webhook server that kopf is given. It decides nothing (`admission` does); it bounds what a caller can cost.

A caller is an address: whoever floods the port waits behind himself. Large bodies are read one at a time. The log names
users who are refused and callers who wait.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import kopf
from aiohttp import web

from .admission import (
    CHECKS,
    KOPF_BYTES,
    Answer,
    BadReview,
    decide,
    for_kopf,
    kopf_review,
    not_readable,
    read_review,
    review_answer,
    tells_of_the_pod,
    uid_of,
)
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

NOTE_SECONDS = 10.0
"""So often at most does the log say the same of the same user or caller."""

ANSWERS: ContextVar[list[Answer] | None] = ContextVar("ANSWERS", default=None)
"""Where kopf's handler leaves its answer: what is to be tried is no part of kopf's response."""


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


class Notes:
    """When something was last said of somebody, for those seen last: a flood is not to fill the log."""

    def __init__(self, most: int = CALLERS) -> None:
        self._most = most
        self._last: OrderedDict[tuple[str, str], float] = OrderedDict()

    def is_due(self, what: str, who: str, now: float) -> bool:
        """Whether to say this of them at the time `now`, in seconds; it counts as said then."""
        key = (what, who)
        if now - self._last.get(key, float("-inf")) < NOTE_SECONDS:
            return False
        self._last[key] = now
        self._last.move_to_end(key)
        if len(self._last) > self._most:
            self._last.popitem(last=False)
        return True


class WebhookServer:
    """Reads reviews, passes them to kopf, tries pods, answers. One of kopf's WebhookServerProtocol."""

    def __init__(self, settings: Settings, kube: Kube) -> None:
        self._settings, self._kube = settings, kube
        self.listening = False
        """True once reviews are answered."""
        self._socket: socket.socket | None = None
        self._callers = Gates(CALLER_AT_ONCE)
        self._namespaces = Gates(max(1, TRIALS_AT_ONCE // 2))
        self._waiting = Counter[tuple[str, str]]()
        self._large = asyncio.Semaphore(1)
        self._notes = Notes()
        self._trials = asyncio.Semaphore(TRIALS_AT_ONCE)

    def bind(self) -> socket.socket:
        """Open the port: reviews that come before kopf is ready wait in the backlog, and are not refused.

        Raises OSError.
        """
        if self._socket is not None:
            return self._socket
        address, port = self._settings.webhook_address, self._settings.webhook_port
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, port), family=family, backlog=256)
        return self._socket

    async def __call__(self, fn: kopf.WebhookFn) -> AsyncIterator[kopf.WebhookClientConfig]:
        """Serve until cancelled; kopf is told the URL, though the chart configures the webhooks."""
        runner = await self._serve(fn)
        try:
            self.listening = True
            yield {"url": f"https://{self._settings.webhook_address}:{self._settings.webhook_port}"}
            await asyncio.Event().wait()
        finally:
            self.listening = False
            await runner.cleanup()

    async def _answer(self, name: str, http: web.Request, fn: kopf.WebhookFn) -> web.Response:
        caller = http.remote or ""
        turn = self._callers.of(caller)
        if turn.locked() and self._notes.is_due("waits", caller, time.monotonic()):
            log.warning("reviews from %s wait: it has %d at once", caller, CALLER_AT_ONCE)
        async with turn:
            length = http.content_length
            if length is None or length > REVIEW_BYTES_MAX:
                # What is unread would be read to its end before the next request of the connection.
                text = f"the body must say its length, at most {REVIEW_BYTES_MAX} bytes"
                response = web.Response(status=413, text=text)
                response.force_close()
                return response
            try:
                if length < LARGE_BYTES:
                    request, answer, review = await self._decide(name, http, fn)
                else:
                    async with self._large:
                        request, answer, review = await self._decide(name, http, fn)
            except (TimeoutError, ConnectionError):
                return web.Response(status=408, text="the body did not come")
            except BadReview as error:
                return web.Response(status=400, text=str(error))
        # Not in the caller's turn: an API server asks for all tenants, and one's dry runs are not to delay another.
        if answer.trial and not answer.refused:
            refused = await self._try(caller, str(request.get("namespace") or ""), answer.trial)
            if refused:
                answer = replace(answer, refused=tuple(refused))
                review = review_answer(request["uid"], answer)
        if answer.refused:
            self._note_refusal(name, caller, request, answer)
        return web.json_response(review)

    def _note_refusal(self, name: str, caller: str, request: Mapping[str, Any], answer: Answer) -> None:
        """Who was refused what; a forged review may say anything, so the caller's address stands beside it."""
        user = request.get("userInfo")
        who = str(user.get("username"))[:200] if isinstance(user, Mapping) else ""
        if self._notes.is_due(name, who, time.monotonic()):
            where = str(request.get("namespace") or "")[:100]
            text = "/%s refused user %r in namespace %r, review from %s: %.200s"
            log.info(text, name, who, where, caller, answer.refused[0])

    async def _decide(
        self, name: str, http: web.Request, fn: kopf.WebhookFn
    ) -> tuple[Mapping[str, Any], Answer, Mapping[str, Any]]:
        """(request, answer, review to send) of a body. Raises BadReview, TimeoutError."""
        async with asyncio.timeout(BODY_SECONDS):
            body = await http.read()
        try:
            request = await self._apart(len(body), read_review, body)
        except BadReview as error:
            uid = uid_of(body)
            if not uid:
                raise
            answer = Answer(refused=(f"the object cannot be read: {error}",))
            return {"uid": uid}, answer, review_answer(uid, answer)
        if for_kopf(len(body), request):
            answer, review = await self._dispatch(name, request, http, fn)
        else:
            answer = await self._apart(len(body), decide, name, request, self._settings.sidecar)
            review = review_answer(request["uid"], answer)
        return request, answer, review

    @staticmethod
    async def _dispatch(
        name: str, request: Mapping[str, Any], http: web.Request, fn: kopf.WebhookFn
    ) -> tuple[Answer, Mapping[str, Any]]:
        """What kopf's handler answered, and kopf's response; without either the object is refused."""
        peer = http.transport.get_extra_info("peercert") if http.transport else None
        answers: list[Answer] = []
        token = ANSWERS.set(answers)
        try:
            review: Mapping[str, Any] = await fn(
                kopf_review(name, request), webhook=name, headers=dict(http.headers), sslpeer=peer
            )
            if answers:
                return answers[0], review
            answer = Answer(refused=(f"nothing checks this at /{name}",))
        except Exception as error:  # of kopf's own, which are many: the API server gets an answer it can pass on
            log.info("a review at /%s: %r", name, error)
            answer = not_readable(error)
        finally:
            ANSWERS.reset(token)
        return answer, review_answer(request["uid"], answer)

    @staticmethod
    async def _apart(size: int, work: Callable[..., Any], *args: Any) -> Any:
        """Small work at once, large work in a thread, so that others are answered meanwhile."""
        return work(*args) if size < KOPF_BYTES else await asyncio.to_thread(work, *args)

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

    def _handler(self, name: str, fn: kopf.WebhookFn) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(http: web.Request) -> web.Response:
            return await self._answer(name, http, fn)

        return handle

    async def _serve(self, fn: kopf.WebhookFn) -> web.AppRunner:
        """Listen with the certificate of the settings."""
        folder = Path(self._settings.webhook_tls_dir)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        app = web.Application(client_max_size=REVIEW_BYTES_MAX)
        for name in CHECKS:
            app.router.add_post(f"/{name}", self._handler(name, fn))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0, keepalive_timeout=75.0)
        await runner.setup()
        await web.SockSite(runner, self.bind(), ssl_context=context, backlog=256).start()
        return runner
