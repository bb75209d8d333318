# SPDX-License-Identifier: Apache-2.0
"""What is asked of kopf and what is not, without a cluster: its dispatch of reviews, its server, its settings."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import functools
import http.client
import json
import shutil
import ssl
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonpatch
import kopf
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from kopf._cogs.structs import ephemera, references
from kopf._core.engines import admission as engine
from kopf._core.engines import indexing
from kopf._core.reactor import inventory
from operator_lab import free_port, make_certificates
from operator_simulation import SIDECAR, job_object
from test_isolation import FIELDS, VALUES, st

from atp_operator import admission, handlers
from atp_operator.admission import CHECK_JOB, CHECK_QUOTA, CHECK_SWITCH, CHECKS, INJECT, decide, for_kopf, review_answer
from atp_operator.settings import Settings
from atp_operator.sizes import REVIEW_BYTES_MAX
from atp_operator.webhook import CALLER_AT_ONCE, NOTE_SECONDS, Notes, WebhookServer

Object = dict[str, Any]


class Dispatch:
    """kopf's own dispatch of reviews to our handlers, as it gives it to its webhook server."""

    def __init__(self) -> None:
        self.registry = kopf.OperatorRegistry()
        nothing: Any = None
        server: Any = object()
        handlers.register(self.registry, Settings(SIDECAR), nothing, nothing, server)
        insights = references.Insights()
        for group, version, plural in admission.RESOURCES.values():
            insights.webhook_resources.add(
                references.Resource(group=group, version=version, plural=plural, kind="X", verbs=frozenset(["list"]))
            )
        self.memories = inventory.ResourceMemories()
        self.fn: Any = functools.partial(
            engine.serve_admission_request,
            settings=kopf.OperatorSettings(),
            memories=self.memories,
            memobase=ephemera.AnyMemo(ephemera.Memo()),
            registry=self.registry,
            insights=insights,
            indices=indexing.OperatorIndexers().indices,
        )

    def ask(self, name: str, request: Object) -> Object:
        async def call() -> Object:
            answer: Object = await self.fn(admission.kopf_review(name, request), webhook=name)
            return answer

        return asyncio.run(call())


def pod() -> Object:
    labels = {"atp.dev/job": "j", "atp.dev/role": "worker", "atp.dev/rank": "0"}
    return {
        "metadata": {"labels": labels, "annotations": {"a/b~c": "d"}},
        "spec": {
            "containers": [{"name": "t", "env": [{"name": "a", "value": "b"}]}, {"name": "u"}],
            "volumes": [{"name": "v", "emptyDir": None}],
            "initContainers": [{"name": "first"}],
        },
    }


def test_kopf_watches_what_no_tenant_can_make_and_holds_no_task_for_an_object() -> None:
    registry = Dispatch().registry
    watched = {(s.group, s.version, s.any_name or s.plural) for s in registry._watching.get_all_selectors()}
    assert watched == {
        ("atp.dev", "v1alpha1", "atpswitches"),
        ("atp.dev", "v1alpha1", "atptenantquotas"),
        ("", "v1", "namespaces"),
    }
    assert not registry._spawning.get_all_handlers() and not registry._changing.get_all_handlers()
    assert not registry._indexing.get_all_handlers()
    asked = {h.id: h.reason.value for h in registry._webhooks.get_all_handlers()}
    assert asked == {
        INJECT: "mutating",
        CHECK_JOB: "validating",
        CHECK_SWITCH: "validating",
        CHECK_QUOTA: "validating",
    }
    nothing: Any = None
    without = kopf.OperatorRegistry()
    handlers.register(without, Settings(SIDECAR), nothing, nothing, None)
    assert not without._webhooks.get_all_handlers()


def test_kopf_writes_nothing_to_the_cluster() -> None:
    settings = kopf.OperatorSettings()
    server: Any = object()
    handlers.configure(settings, server)
    assert settings.peering.standalone and not settings.posting.enabled and settings.admission.managed is None
    assert settings.scanning.disabled, "it needs no right to read definitions"
    assert settings.persistence.finalizer == "atp.dev/kopf"
    assert settings.admission.server is server
    assert sum(settings.networking.error_backoffs) > 24 * 3600, "an API server that is away ends no operator"  # type: ignore[arg-type]


@hypothesis_settings(max_examples=150, deadline=None)
@given(worker=st.dictionaries(FIELDS, VALUES), old=st.none() | st.dictionaries(FIELDS, VALUES), scale=st.booleans())
def test_an_answer_is_the_same_through_kopf_and_beside_it(worker: Object, old: Object | None, scale: bool) -> None:
    dispatch = Dispatch()
    raw = job_object("j", 0, "u")
    raw["spec"]["workers"]["template"] = worker
    if scale:  # one that runs, with a warning
        raw["spec"].update(scale=2**31)
        raw["spec"]["workers"]["template"] = {"spec": {"containers": [{"name": "t", "image": "i"}]}}
    request: Object = {"uid": "r", "object": raw}
    if old is not None:
        before = copy.deepcopy(raw)
        before["spec"]["workers"]["template"] = old
        before["status"] = {"admittedTime": "2026-01-01T00:00:00Z", "phase": "Running"}
        request["oldObject"] = before
    assert for_kopf(1000, request)
    assert dispatch.ask(CHECK_JOB, request) == review_answer("r", decide(CHECK_JOB, request, SIDECAR))
    said = dispatch.ask(CHECK_JOB, request)["response"]
    assert not scale or old is not None or (said["allowed"] and "scale above 2^30" in said["warnings"][0])
    assert dispatch.memories._items == {}


@pytest.mark.parametrize("name", [CHECK_SWITCH, CHECK_QUOTA])
@pytest.mark.parametrize("spec", [{}, {"agent": {"address": "h:1"}, "nodes": ["a"]}, {"maxJobs": 1}, {"agent": 7}, 7])
def test_switches_and_quotas_are_checked_through_kopf(name: str, spec: Any) -> None:
    request: Object = {"uid": "r", "object": {"metadata": {"name": "x"}, "spec": spec}}
    assert Dispatch().ask(name, request) == review_answer("r", decide(name, request, SIDECAR))


def test_a_pod_gets_the_same_sidecar_through_kopf_and_beside_it() -> None:
    request: Object = {"uid": "r", "object": pod()}

    def patched(review: Object) -> Object:
        operations = json.loads(base64.b64decode(review["response"]["patch"]))
        result: Object = jsonpatch.apply_patch(pod(), operations)
        return result

    through = patched(Dispatch().ask(INJECT, request))
    beside = patched(review_answer("r", decide(INJECT, request, SIDECAR)))
    assert through == beside and through["spec"]["initContainers"][0]["name"] == "atp-sidecar"
    assert through["metadata"]["annotations"]["a/b~c"] == "d"
    assert request["object"] == pod(), "what was asked is not changed"


def test_nothing_is_kept_of_reviews() -> None:
    """Anybody may send them, for any number of objects."""
    dispatch = Dispatch()
    for i in range(20):
        raw = job_object("j", 0, f"u{i}")
        dispatch.ask(CHECK_JOB, {"uid": "r", "object": raw, "oldObject": copy.deepcopy(raw)})
    assert dispatch.memories._items == {}


def nested(levels: int) -> Object:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    raw = job_object("j", 0, "u")
    raw["spec"]["workers"]["template"]["x"] = value
    return raw


def test_what_would_cost_kopf_much_does_not_reach_it() -> None:
    small = job_object("j", 0, "u")
    assert for_kopf(10_000, {"object": small}) and for_kopf(10_000, {"object": small, "oldObject": nested(30)})
    assert not for_kopf(64 << 10, {"object": small})
    for odd in (
        {},
        {"object": 7},
        {"object": []},
        {"object": {"metadata": []}},
        {"object": small, "oldObject": [1]},
        {"object": small, "oldObject": {"metadata": "x"}},
        {"object": nested(5_000)},
        {"object": small, "oldObject": nested(5_000)},
    ):
        assert not for_kopf(1_000, odd)


# --- the server ------------------------------------------------------------------------------------------------------


class Door:
    """The webhook server with a `fn` of a test in the place of kopf's."""

    def __init__(self, tls: Path, fn: Callable[..., Any]) -> None:
        self.port = free_port()
        settings = Settings(SIDECAR, webhook_tls_dir=str(tls), webhook_port=self.port, webhook_address="127.0.0.1")
        nothing: Any = None
        self.server = WebhookServer(settings, nothing)
        self._fn: Any = fn

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """As kopf does it: in a task that it cancels at the end."""
        told: asyncio.Queue[Any] = asyncio.Queue()

        async def serve() -> None:
            async for configuration in self.server(self._fn):
                await told.put(configuration)

        task = asyncio.create_task(serve())
        try:
            assert await asyncio.wait_for(told.get(), 10) == {"url": f"https://127.0.0.1:{self.port}"}
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def post(self, hook: str, body: bytes) -> tuple[int, Object]:
        def call() -> tuple[int, Object]:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=20, context=context)
            try:
                connection.request("POST", f"/{hook}", body)
                answer = connection.getresponse()
                text = answer.read()
            finally:
                connection.close()
            return answer.status, json.loads(text) if text.startswith(b"{") else {}

        return await asyncio.to_thread(call)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: it makes the test certificates")
    folder: Path = tmp_path_factory.mktemp("door")
    make_certificates(folder)
    return folder


def body_of(request: Object) -> bytes:
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()


def test_the_server_listens_while_kopf_wants_it_and_passes_its_answer_on(tls: Path) -> None:
    dispatch, seen = Dispatch(), []

    async def fn(review: Object, **more: Any) -> Any:
        seen.append((review["request"]["uid"], more["webhook"], more["headers"]["Content-Length"], more["sslpeer"]))
        return await dispatch.fn(review, **more)

    async def scenario() -> None:
        door = Door(tls, fn)
        door.server.bind()
        early = asyncio.create_task(door.post(CHECK_QUOTA, body_of({"uid": "q-0", "object": {"metadata": {}}})))
        await asyncio.sleep(0.3)
        assert not door.server.listening and not early.done(), "what comes before kopf is ready waits"
        async with door.open():
            assert door.server.listening
            assert (await early)[1]["response"]["uid"] == "q-0"
            seen.clear()
            quota = {"metadata": {"name": "q"}, "spec": {"maxJobs": 1}}
            code, said = await door.post(CHECK_QUOTA, body_of({"uid": "q-1", "object": quota}))
            assert (code, said["response"]) == (200, {"uid": "q-1", "allowed": True})
            # The URL says what is checked, whatever the review says of itself.
            lies = {"uid": "q-2", "object": {"metadata": {}, "spec": {}}, "operation": "DELETE", "resource": 7}
            code, said = await door.post(CHECK_QUOTA, body_of(lies))
            assert code == 200 and "spec limits nothing" in said["response"]["status"]["message"]
            assert said["response"]["status"]["code"] == 422
            assert [(uid, hook) for uid, hook, *_ in seen] == [("q-1", CHECK_QUOTA), ("q-2", CHECK_QUOTA)]
            assert all(int(length) > 0 for _, _, length, _ in seen)
            # Beside kopf: what is large or deep.
            large = {**quota, "x": "y" * (1 << 20)}
            code, said = await door.post(CHECK_QUOTA, body_of({"uid": "q-3", "object": large}))
            assert (code, said["response"]) == (200, {"uid": "q-3", "allowed": True})
            code, said = await door.post(CHECK_JOB, body_of({"uid": "j-1", "object": nested(400)}))
            assert code == 200 and "nested deeper than 64" in said["response"]["status"]["message"]
            code, _ = await door.post(CHECK_JOB, b"x" * (REVIEW_BYTES_MAX + 1))
            assert code == 413
            assert len(seen) == 2
        assert not door.server.listening

    asyncio.run(scenario())


def test_what_kopf_cannot_answer_is_refused(tls: Path) -> None:
    async def fails(review: Object, **_: Any) -> Any:
        raise engine.UnknownResourceError("the kinds are not known yet")

    async def passes_by(review: Object, **_: Any) -> Any:
        return {"response": {"uid": review["request"]["uid"], "allowed": True}}

    async def scenario() -> None:
        for fn, says in ((fails, "the kinds are not known yet"), (passes_by, "nothing checks this")):
            door = Door(tls, fn)
            async with door.open():
                for name in CHECKS:
                    code, said = await door.post(name, body_of({"uid": "r", "object": {"metadata": {}}}))
                    assert code == 200 and said["response"]["allowed"] is False and said["response"]["uid"] == "r"
                    assert says in said["response"]["status"]["message"]

    asyncio.run(scenario())


def test_the_log_names_who_is_refused_and_who_waits(tls: Path, caplog: pytest.LogCaptureFixture) -> None:
    dispatch = Dispatch()
    caplog.set_level("INFO", logger="atp_operator.webhook")

    async def slow(review: Object, **more: Any) -> Any:
        await asyncio.sleep(0.05)
        return await dispatch.fn(review, **more)

    async def scenario() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2 * CALLER_AT_ONCE))
        door = Door(tls, slow)
        async with door.open():
            bad = {"uid": "q", "namespace": "team-a", "userInfo": {"username": "mallory"}, "object": {"metadata": {}}}
            await asyncio.gather(*(door.post(CHECK_QUOTA, body_of(bad)) for _ in range(2 * CALLER_AT_ONCE)))
            await door.post(CHECK_QUOTA, body_of({**bad, "userInfo": "nobody"}))

    asyncio.run(scenario())
    said = [record.getMessage() for record in caplog.records]
    refused = [text for text in said if "refused user 'mallory' in namespace 'team-a', review from 127.0.0.1" in text]
    assert len(refused) == 1, "a flood does not fill the log"
    assert sum(text.startswith("reviews from 127.0.0.1 wait") for text in said) == 1
    assert any("refused user ''" in text for text in said)


def test_notes_are_bounded_and_come_again() -> None:
    notes = Notes(most=2)
    assert notes.is_due("x", "a", 0.0) and not notes.is_due("x", "a", NOTE_SECONDS - 1)
    assert notes.is_due("y", "a", 1.0) and notes.is_due("x", "a", NOTE_SECONDS + 1)
    assert notes.is_due("x", "b", 11.0) and notes.is_due("x", "c", 11.0)
    assert notes.is_due("y", "a", 2.0), "the one not seen for longest is forgotten"
