# SPDX-License-Identifier: Apache-2.0
"""A session with one switch agent: what it says becomes an AgentView; the desired state is pushed until it holds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio

from atp_api.switchagent.v1alpha1 import switchagent_pb2 as pb
from atp_api.switchagent.v1alpha1 import switchagent_pb2_grpc as rpc

from .model import AgentView, Capacity, JobReport

log = logging.getLogger(__name__)

CALL_SECONDS = 15.0
TELEMETRY_SECONDS = 5.0


class AgentSession:
    """Runs until cancelled; `view` is replaced as news come, `changed()` is called when something of note did."""

    def __init__(
        self,
        name: str,
        address: str,
        server_name: str,
        tls_dir: str,
        writer: str,
        changed: Callable[[], None],
        dropped: Callable[[str, Sequence[pb.PortDrops]], None] = lambda switch, drops: None,
    ) -> None:
        """`dropped` gets the switch's name and what its guard has dropped, with every telemetry."""
        self.name = name
        self.address = address
        self.server_name = server_name
        self._tls_dir = tls_dir
        self._writer = writer
        self._changed = changed
        self._dropped = dropped
        self.view = AgentView(since=time.time())
        self._wanted: pb.DesiredState | None = None
        self._wanted_key = b""
        self._pushed_key: bytes | None = None
        # Grows over restarts of the operator and changes of the leader without being stored anywhere.
        self._generation = int(time.time() * 1000)
        self._accepted = 0
        self._push = asyncio.Event()
        self._settled = asyncio.Event()

    def want(self, jobs: Sequence[pb.Job], guards: Sequence[pb.Guard]) -> None:
        """The jobs that the switch must hold and the hosts that it must guard, sorted; pushed if they changed."""
        wanted = pb.DesiredState(switch_name=self.name, writer=self._writer, jobs=jobs, guards=guards)
        key = wanted.SerializeToString(deterministic=True)
        if self._wanted is None or key != self._wanted_key:
            self._wanted, self._wanted_key = wanted, key
            self._settled.clear()
            self._push.set()

    async def settled(self) -> None:
        """Return once the agent has accepted what is wanted."""
        await self._settled.wait()

    async def run(self) -> None:
        """Connect, listen and push for ever; back-off after failures."""
        delay = 0.5
        while True:
            started = time.monotonic()
            try:
                async with self._channel() as channel:
                    await self._session(rpc.SwitchAgentStub(channel))
            except grpc.aio.AioRpcError as error:
                self._lost(f"{error.code().name}: {error.details() or 'no details'}")
            except (OSError, ValueError) as error:
                self._lost(str(error))
            if time.monotonic() - started > 30:
                delay = 0.5
            await asyncio.sleep(delay)
            delay = min(3.0, delay * 2)  # a switch that is back is not left waiting

    def _channel(self) -> grpc.aio.Channel:
        options: list[tuple[str, str | int]] = [
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_timeout_ms", 5_000),
            ("grpc.max_receive_message_length", 64 << 20),
            ("grpc.enable_http_proxy", 0),
        ]
        if not self._tls_dir:
            return grpc.aio.insecure_channel(self.address, options=options)
        if self.server_name:
            options.append(("grpc.ssl_target_name_override", self.server_name))
        folder = Path(self._tls_dir)  # read anew each time: certificates are renewed in place
        credentials = grpc.ssl_channel_credentials(
            root_certificates=(folder / "ca.crt").read_bytes(),
            private_key=(folder / "tls.key").read_bytes(),
            certificate_chain=(folder / "tls.crt").read_bytes(),
        )
        return grpc.aio.secure_channel(self.address, credentials, options=options)

    def _lost(self, error: str) -> None:
        if self.view.reachable or not self.view.known or self.view.error != error:
            if self.view.reachable or not self.view.known:
                log.warning("switch %s: agent %s is away: %s", self.name, self.address, error)
            since = time.time() if self.view.reachable or not self.view.known else self.view.since
            self.view = replace(
                self.view,
                known=True,
                reachable=False,
                since=since,
                error=error,
                connected=False,
                in_sync=False,
            )
            self._changed()

    async def _session(self, stub: rpc.SwitchAgentAsyncStub) -> None:
        capacity = await self._capacity(stub)
        observed = await stub.GetObservedState(pb.GetObservedStateRequest(), timeout=CALL_SECONDS)
        # A restarted agent knows nothing: what was pushed to the one before does not count.
        self._pushed_key, self._accepted = None, 0
        self.view = replace(
            self.view,
            known=True,
            reachable=True,
            since=time.time(),
            error="",
            refused="",
            capacity=capacity,
        )
        log.info(
            "switch %s: agent %s answers (%s)",
            self.name,
            self.address,
            f"{capacity.target}, {capacity.aggregators} aggregators"
            if capacity
            else "its switch has not told its capacity yet",
        )
        self._observe(observed, force=True)
        self._push.set()
        pusher = asyncio.create_task(self._keep_pushing(stub))
        try:
            call = stub.StreamTelemetry(pb.TelemetryRequest(period_seconds=TELEMETRY_SECONDS))
            listener = asyncio.ensure_future(self._listen(stub, call))
            done, _ = await asyncio.wait({pusher, listener}, return_when=asyncio.FIRST_COMPLETED)
            listener.cancel()
            for task in done:
                task.result()
        finally:
            pusher.cancel()
        self._lost("the telemetry stream ended")

    async def _capacity(self, stub: rpc.SwitchAgentAsyncStub) -> Capacity | None:
        """What the switch can hold; None while the agent has no switch to ask."""
        told = await stub.GetCapabilities(pb.GetCapabilitiesRequest(), timeout=CALL_SECONDS)
        if not told.aggregators:
            return None
        return Capacity(
            aggregators=told.aggregators,
            values=tuple(told.values),
            multicast_groups=told.multicast_groups,
            job_ids=told.job_ids,
            fan_in_max=told.fan_in_max,
            target=told.target,
            pipeline=told.pipeline,
            version=told.version,
            sticky_saturation=told.sticky_saturation,
        )

    async def _listen(
        self, stub: rpc.SwitchAgentAsyncStub, call: grpc.aio.UnaryStreamCall[pb.TelemetryRequest, pb.Telemetry]
    ) -> None:
        stream = call.__aiter__()
        while True:
            try:
                telemetry = await asyncio.wait_for(stream.__anext__(), 6 * TELEMETRY_SECONDS)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise OSError(f"no telemetry for {6 * TELEMETRY_SECONDS:.0f} s") from error
            told, view = telemetry.observed, self.view
            back = (told.connected and not view.connected) or (told.in_sync and not view.in_sync)
            if told.connected and (back or view.capacity is None):
                # An agent that started before its switch, or a switch that came back, perhaps as another one or with
                # another program, which says what the switch can hold.
                self.view = replace(self.view, capacity=await self._capacity(stub))
                self._changed()
            counters = {entry.uid: dict(entry.counters) for entry in telemetry.jobs if entry.uid}
            self.view = replace(self.view, counters=counters, aggregators_in_use=telemetry.aggregators_in_use)
            self._dropped(self.name, telemetry.drops)
            self._observe(telemetry.observed)

    def _observe(self, observed: pb.ObservedState, *, force: bool = False) -> None:
        names = {
            pb.JobStatus.PROGRAMMED: "PROGRAMMED",
            pb.JobStatus.PENDING: "PENDING",
            pb.JobStatus.FAILED: "FAILED",
        }
        view = replace(
            self.view,
            connected=observed.connected,
            in_sync=observed.in_sync,
            generation=observed.generation,
            reason=observed.reason,
            message=observed.message,
            advice=observed.advice,
            jobs={
                job.uid: JobReport(
                    job.job_id, job.epoch, names.get(job.state, "PENDING"), job.reason, job.message, job.advice
                )
                for job in observed.jobs
            },
        )
        if self._pushed_key is not None and observed.generation < self._accepted:
            self._pushed_key = None  # the agent forgot: say it again
            self._push.set()
        news = force or (view.connected, view.in_sync, view.generation, view.reason, view.jobs) != (
            self.view.connected,
            self.view.in_sync,
            self.view.generation,
            self.view.reason,
            self.view.jobs,
        )
        self.view = view
        if news:
            self._changed()

    async def _keep_pushing(self, stub: rpc.SwitchAgentAsyncStub) -> None:
        while True:
            await self._push.wait()
            self._push.clear()
            if self._wanted is None or self._wanted_key == self._pushed_key:
                continue
            state, key = pb.DesiredState(), self._wanted_key
            state.CopyFrom(self._wanted)
            self._generation = max(self._generation + 1, int(time.time() * 1000))
            state.generation = self._generation
            try:
                observed = await stub.ApplyDesiredState(state, timeout=CALL_SECONDS)
            except grpc.aio.AioRpcError as error:
                if error.code() not in (
                    grpc.StatusCode.INVALID_ARGUMENT,
                    grpc.StatusCode.FAILED_PRECONDITION,
                ):
                    raise
                text = f"{error.code().name}: {error.details() or 'no details'}"
                log.error("switch %s: the agent refused generation %d: %s", self.name, self._generation, text)
                refused_before = self.view.refused
                self.view = replace(self.view, refused=text)
                if refused_before != text:
                    self._changed()
                if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                    self._pushed_key = key  # saying the same again would not help
                else:
                    await asyncio.sleep(1.0)
                    self._push.set()
                continue
            log.info("switch %s: generation %d with %d jobs accepted", self.name, self._generation, len(state.jobs))
            self._pushed_key, self._accepted = key, self._generation
            if key == self._wanted_key:
                self._settled.set()
            if self.view.refused:
                self.view = replace(self.view, refused="")
            self._observe(observed, force=True)
