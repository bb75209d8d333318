# SPDX-License-Identifier: Apache-2.0
"""The gRPC service SwitchAgent over a reconciler."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection
from typing import Any

import grpc

from atp_api.switchagent.v1alpha1 import switchagent_pb2 as api
from atp_api.switchagent.v1alpha1 import switchagent_pb2_grpc as api_grpc

from .planner import InvalidState
from .reconciler import Reconciler, StaleGeneration

Context = grpc.aio.ServicerContext[Any, Any]

_PERIOD_DEFAULT = 5.0
_PERIOD_MIN = 0.1

log = logging.getLogger("atp_switch_agent.service")


class SwitchAgentService(api_grpc.SwitchAgentServicer):
    """See switchagent.proto. `clients`: names (SAN or CN) that may call; empty: every certificate of the CA."""

    def __init__(self, reconciler: Reconciler, clients: Collection[str] = ()) -> None:
        self._reconciler = reconciler
        self._clients = frozenset(clients)

    async def _authorize(self, context: Context) -> None:
        if not self._clients:
            return
        peer = context.auth_context()
        names = {
            name.decode(errors="replace")
            for kind in ("x509_subject_alternative_name", "x509_common_name")
            for name in peer.get(kind, ())
        }
        if not names & self._clients:
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                f"this certificate ({sorted(names)}) may not call the agent",
            )

    async def GetCapabilities(self, request: api.GetCapabilitiesRequest, context: Context) -> api.Capabilities:
        await self._authorize(context)
        return self._reconciler.capabilities()

    async def ApplyDesiredState(self, request: api.DesiredState, context: Context) -> api.ObservedState:
        await self._authorize(context)
        try:
            return await self._reconciler.apply(request)
        except InvalidState as error:
            log.warning("desired state refused", extra={"reason": str(error)})
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except StaleGeneration as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        raise AssertionError("abort returned")

    async def GetObservedState(self, request: api.GetObservedStateRequest, context: Context) -> api.ObservedState:
        await self._authorize(context)
        return self._reconciler.observed()

    async def StreamTelemetry(self, request: api.TelemetryRequest, context: Context) -> AsyncIterator[api.Telemetry]:
        await self._authorize(context)
        period = max(_PERIOD_MIN, request.period_seconds) if request.period_seconds > 0 else _PERIOD_DEFAULT
        async for told in self._reconciler.stream(period):
            yield told


async def start(
    service: SwitchAgentService, listen: str, credentials: grpc.ServerCredentials | None
) -> tuple[grpc.aio.Server, int]:
    """Serve on host:port; without credentials only where the caller has checked that it is loopback.

    Raises OSError if the address cannot be bound.
    """
    server = grpc.aio.server(
        options=(
            ("grpc.max_receive_message_length", 64 << 20),
            ("grpc.so_reuseport", 0),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
            ("grpc.keepalive_permit_without_calls", 1),
        )
    )
    api_grpc.add_SwitchAgentServicer_to_server(service, server)
    try:
        port = server.add_secure_port(listen, credentials) if credentials else server.add_insecure_port(listen)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {listen}: {error}") from error
    await server.start()
    return server, port
