# SPDX-License-Identifier: Apache-2.0
"""A thin client of the API server: JSON in, JSON out, errors with their status code."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio import client as aio_client
from kubernetes.aio import config as aio_config

from .model import Object
from .sizes import OBJECT_BYTES_MAX, PAGE_BYTES_MAX


class ApiError(Exception):
    """The API server refused; `code` is the HTTP status, `reason` the machine-readable word."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code = code
        self.reason = reason
        self.message = message


class TooLarge(Exception):
    """An answer has more bytes than are read at once."""


CALL_FAILED = (ApiError, TooLarge, OSError, TimeoutError, aiohttp.ClientError)
"""What a call may raise."""


PAGE_OBJECTS = 256
"""Objects that are asked for in one page of a list, as long as they are small."""
WATCH_SECONDS = 240
"""After so long the API server ends a watch, and the next begins where it ended."""
METADATA_ONLY = "application/json;as=PartialObjectMetadata{list};g=meta.k8s.io;v=v1"
"""Accept header for objects whose spec and status nobody needs; `list` is List for collections."""

ATP = "apis/atp.dev/v1alpha1"
LEASES = "apis/coordination.k8s.io/v1"


def path(root: str, plural: str, namespace: str | None = None, name: str | None = None, sub: str | None = None) -> str:
    """URL path of a collection or an object: `root` is like api/v1 or apis/GROUP/VERSION."""
    parts = [root]
    if namespace:
        parts += ["namespaces", quote(namespace, safe="")]
    parts.append(plural)
    if name:
        parts.append(quote(name, safe=""))
    if sub:
        parts.append(sub)
    return "/" + "/".join(parts)


class Kube:
    """The client; made inside a running event loop by `connect`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @staticmethod
    async def connect() -> Kube:
        """In a pod by its service account, elsewhere by KUBECONFIG."""
        if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
            in_cluster: Any = aio_config.load_incluster_config  # reads a renewed token by itself
            in_cluster()
        else:
            load: Any = aio_config.load_config
            await load()
        make: Any = aio_client.ApiClient
        return Kube(make())

    async def close(self) -> None:
        """Close connections."""
        await self._client.close()

    async def _send(
        self,
        method: str,
        url: str,
        body: Object | list[Object] | None,
        content: str,
        query: dict[str, str] | None,
        timeout: float | aiohttp.ClientTimeout,
        accept: str,
    ) -> aiohttp.ClientResponse:
        if query:
            url = f"{url}?{urlencode(query)}"
        headers = {"Accept": accept, "Content-Type": content}
        prepared = await self._client.param_serialize(
            method, url, header_params=headers, body=body, query_params=[], auth_settings=["BearerToken"]
        )
        verb, full, headers, data, _ = prepared
        wrapped = await self._client.rest_client.request(
            verb, full, headers=headers, body=data, _request_timeout=timeout
        )
        response: aiohttp.ClientResponse = wrapped.response
        return response

    async def request(
        self,
        method: str,
        url: str,
        body: Object | list[Object] | None = None,
        *,
        content: str = "application/json",
        query: dict[str, str] | None = None,
        timeout: float = 30.0,
        accept: str = "application/json",
        most: int = OBJECT_BYTES_MAX,
    ) -> Object:
        """One call.

        Raises:
            ApiError: the answer is not 2xx.
            TooLarge: it has more than `most` bytes; the rest is not read.
        """
        response = await self._send(method, url, body, content, query, timeout, accept)
        raw = bytearray()
        async for chunk in response.content.iter_any():
            raw += chunk
            if len(raw) > most:
                response.close()
                raise TooLarge(f"{method} {url}: more than {most} bytes")
        try:
            answer: Object = json.loads(raw) if raw else {}
        except ValueError:
            answer = {"message": raw.decode(errors="replace")[:300]}
        if not 200 <= response.status <= 299:
            raise ApiError(response.status, answer.get("reason", ""), answer.get("message", ""))
        return answer

    async def pages(
        self, url: str, query: dict[str, str] | None = None, accept: str = "application/json"
    ) -> AsyncIterator[tuple[list[Object], int]]:
        """A collection, page by page: (objects, resource version of the list).

        However large the objects are, no more than PAGE_BYTES_MAX are read at once, or one object.
        """
        limit, token = PAGE_OBJECTS, ""
        while True:
            more = {"limit": str(limit), **(query or {}), **({"continue": token} if token else {})}
            most = PAGE_BYTES_MAX if limit > 1 else OBJECT_BYTES_MAX
            try:
                answer = await self.request("GET", url, query=more, accept=accept, most=most)
            except TooLarge:
                if limit == 1:
                    raise
                limit = max(1, limit // 4)
                continue
            meta = answer.get("metadata") or {}
            yield answer.get("items") or [], int(meta.get("resourceVersion") or 0)
            token = meta.get("continue") or ""
            if not token:
                return

    async def watch(
        self, url: str, version: str, query: dict[str, str] | None = None, accept: str = "application/json"
    ) -> AsyncIterator[tuple[str, Object]]:
        """(type, object) of what happens after `version`, bookmarks too, until the API server ends the watch.

        Raises:
            ApiError: the API server refused, or its history does not go back to `version` (410).
            TooLarge: one event has more than OBJECT_BYTES_MAX bytes.
        """
        asked = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
            **(query or {}),
        }
        patience = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=WATCH_SECONDS + 30)
        response = await self._send("GET", url, None, "application/json", asked, patience, accept)
        try:
            if response.status != 200:
                raise ApiError(response.status, "", (await response.text())[:300])
            line = bytearray()
            async for chunk in response.content.iter_any():
                first, *rest = chunk.split(b"\n")
                line += first
                for part in rest:
                    yield _event(line)
                    line = bytearray(part)
                if len(line) > OBJECT_BYTES_MAX:
                    raise TooLarge(f"an event of {url} has more than {OBJECT_BYTES_MAX} bytes")
        finally:
            response.close()

    async def get(self, url: str) -> Object:
        """One object."""
        return await self.request("GET", url)

    async def patch(self, url: str, operations: list[Object]) -> Object:
        """PATCH with a JSON patch; a `test` in it that does not hold is an ApiError 422."""
        return await self.request("PATCH", url, operations, content="application/json-patch+json")

    async def create(self, url: str, body: Object) -> Object:
        """POST."""
        return await self.request("POST", url, body)

    async def replace(self, url: str, body: Object) -> Object:
        """PUT; the body's resourceVersion makes it fail with 409 when the object has changed."""
        return await self.request("PUT", url, body)

    async def merge(self, url: str, body: Object) -> Object:
        """PATCH with a JSON merge patch."""
        return await self.request("PATCH", url, body, content="application/merge-patch+json")

    async def delete(self, url: str, *, uid: str | None = None, grace: int | None = None) -> None:
        """DELETE; only the object with that UID; not there is fine."""
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid:
            body["preconditions"] = {"uid": uid}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        try:
            await self.request("DELETE", url, body)
        except ApiError as error:
            if error.code not in (404, 409):
                raise


def _event(line: bytes | bytearray) -> tuple[str, Object]:
    event = json.loads(line)
    kind, obj = str(event["type"]), event["object"]
    if kind == "ERROR":
        raise ApiError(int(obj.get("code") or 500), obj.get("reason") or "", obj.get("message") or "")
    return kind, obj
