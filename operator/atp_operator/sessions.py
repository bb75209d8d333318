# SPDX-License-Identifier: Apache-2.0
"""One session with the agent of every ATPSwitch: begun, moved and ended as the objects say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from atp_api.switchagent.v1alpha1 import switchagent_pb2 as pb

from .agent import AgentSession
from .claims import doubt, vouched
from .desired import desired_guards, desired_jobs
from .model import AgentView, Job, Object, Pod, Switch
from .settings import Settings

LAST_WORDS_SECONDS = 10.0
"""So long is the agent of a deleted ATPSwitch told that its switch holds nothing."""


class AgentSessions:
    """The sessions by switch name; `changed()` is called when an agent said something of note."""

    def __init__(
        self,
        settings: Settings,
        changed: Callable[[], None],
        dropped: Callable[[str, Sequence[pb.PortDrops]], None],
    ) -> None:
        """`dropped` gets a switch's name and what its guard has dropped, with every telemetry."""
        self._settings, self._changed, self._dropped = settings, changed, dropped
        self._sessions: dict[str, tuple[AgentSession, asyncio.Task[None]]] = {}
        self._draining: set[asyncio.Task[None]] = set()

    def view(self, name: str) -> AgentView:
        """What the agent of a switch last said; nothing, when it has no session."""
        entry = self._sessions.get(name)
        return entry[0].view if entry else AgentView()

    def follow(self, switches: Iterable[Object]) -> None:
        """Have a session for each of these ATPSwitches, at the address that it has now, and no other."""
        wanted = {}
        for raw in switches:
            agent = (raw.get("spec") or {}).get("agent") or {}
            if not raw["metadata"].get("deletionTimestamp"):
                wanted[raw["metadata"]["name"]] = (agent.get("address", ""), agent.get("serverName", ""))
        for name in list(self._sessions):
            session, task = self._sessions[name]
            if wanted.get(name) != (session.address, session.server_name) or task.done():
                del self._sessions[name]
                if name in wanted or task.done():
                    task.cancel()
                else:
                    self._drain(session, task)
        for name, (address, server_name) in wanted.items():
            if name not in self._sessions:
                session = AgentSession(
                    name,
                    address,
                    server_name,
                    self._settings.agent_tls_dir,
                    self._settings.identity,
                    self._changed,
                    self._dropped,
                )
                task = asyncio.create_task(session.run(), name=f"agent-{name}")
                self._sessions[name] = (session, task)

    def _drain(self, session: AgentSession, task: asyncio.Task[None]) -> None:
        """An ATPSwitch was deleted: its switch is told, if it listens, to hold nothing."""

        async def last_words() -> None:
            session.want([], [])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(session.settled(), LAST_WORDS_SECONDS)
            task.cancel()

        drain = asyncio.create_task(last_words())
        self._draining.add(drain)
        drain.add_done_callback(self._draining.discard)

    def program(self, switches: Mapping[str, Switch], jobs: Iterable[Job], pods: Mapping[str, Sequence[Pod]]) -> None:
        """Tell each agent what its switch must hold. `jobs` are as written, `pods` by job key.

        A job whose status is not the operator's own is not programmed.
        """
        believed = [job for job in jobs if not doubt(job, switches, pods.get(job.key, ()))]
        vouched_for = [job for job in believed if vouched(job, switches, pods.get(job.key, ()))]
        for name, (session, _) in self._sessions.items():
            if name in switches:
                session.want(desired_jobs(switches[name], believed), desired_guards(switches[name], vouched_for))

    def stop(self) -> None:
        """End all, without a word: another replica goes on."""
        for _, task in self._sessions.values():
            task.cancel()
        self._sessions.clear()
