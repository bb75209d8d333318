# SPDX-License-Identifier: Apache-2.0
"""A thin client of the API server: JSON in, JSON out, errors with their status code."""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.parse import quote, urlencode

from kubernetes.aio import client as aio_client
from kubernetes.aio import config as aio_config

from .model import Object


class ApiError(Exception):
    """The API server refused; `code` is the HTTP status, `reason` the machine-readable word."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code = code
        self.reason = reason
        self.message = message


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

    async def request(
        self,
        method: str,
        url: str,
        body: Object | None = None,
        *,
        content: str = "application/json",
        query: dict[str, str] | None = None,
        timeout: float = 30.0,
    ) -> Object:
        """One call; raises ApiError for every answer that is not 2xx."""
        if query:
            url = f"{url}?{urlencode(query)}"
        headers = {"Accept": "application/json", "Content-Type": content}
        prepared = await self._client.param_serialize(
            method, url, header_params=headers, body=body, query_params=[], auth_settings=["BearerToken"]
        )
        verb, full, headers, data, _ = prepared
        response = await self._client.rest_client.request(
            verb, full, headers=headers, body=data, _request_timeout=timeout
        )
        raw = await response.read()
        try:
            answer: Object = json.loads(raw) if raw else {}
        except ValueError:
            answer = {"message": raw.decode(errors="replace")[:300]}
        if not 200 <= response.status <= 299:
            raise ApiError(response.status, answer.get("reason", ""), answer.get("message", ""))
        return answer

    async def list(self, url: str, query: dict[str, str] | None = None) -> tuple[list[Object], int]:
        """All objects of a collection, and its resource version."""
        items: list[Object] = []
        more: dict[str, str] = {"limit": "500", **(query or {})}
        while True:
            answer = await self.request("GET", url, query=more)
            items += answer.get("items") or []
            meta = answer.get("metadata") or {}
            if not meta.get("continue"):
                return items, int(meta.get("resourceVersion") or 0)
            more["continue"] = meta["continue"]

    async def get(self, url: str) -> Object:
        """One object."""
        return await self.request("GET", url)

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
