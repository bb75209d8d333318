# SPDX-License-Identifier: Apache-2.0
"""The gate: watches the assignment file and runs one transport for each epoch."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from atp_sidecar.assignment import Assignment, AssignmentError, Role, parse_assignment, read_assignment
from atp_sidecar.clients import Clients
from atp_sidecar.logs import EventLog
from atp_sidecar.metrics import SidecarMetrics
from atp_sidecar.transport import Factory, MemberTransport, Transport

POLL_SECONDS = 0.2
# The file may vanish for a moment while the kubelet swaps it; a gate that is open closes only after this.
VANISH_SECONDS = 2.0
RETRY_SECONDS = 1.0

WAITING = (
    "the operator has not assigned this pod a place in the job yet (annotation atp.dev/assignment is empty); "
    "it does "
    "so once every pod of the job runs and the switches are programmed: kubectl describe atpjob"
)


class Gate:
    """Opens when the pod has a valid assignment, changes the transport when the epoch does.

    Args:
        path: the assignment file.
        role: worker or parameterServer.
        pod_ip: the pod's address, to check the assignment against; None: not checked.
        factory: starts a transport.
        log: where events go.
        on_stats: called with the clients and the session that asks for metrics.
    """

    def __init__(
        self,
        path: Path,
        role: Role,
        pod_ip: str | None,
        factory: Factory,
        log: EventLog,
        on_stats: Callable[[Clients, int], None],
    ) -> None:
        self.role = role
        self.metrics = SidecarMetrics()
        self.assignment: Assignment | None = None
        self.clients: Clients | None = None
        self.reason = WAITING
        self._transport: Transport | None = None
        self._closed: Transport | None = None
        self._path = path
        self._pod_ip = pod_ip
        self._factory = factory
        self._log = log
        self._on_stats = on_stats
        self._seen: str | None = None
        self._vanished_at: float | None = None
        self._retry_at: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether a transport runs."""
        return self._transport is not None

    async def run(self) -> None:
        """Watches the file until cancelled."""
        while True:
            self.step(asyncio.get_running_loop().time())
            await asyncio.sleep(POLL_SECONDS)

    def step(self, now: float) -> None:
        """Looks at the file once and acts on what changed. `now` is monotonic, in seconds."""
        try:
            text = read_assignment(self._path)
        except AssignmentError as error:
            self._refuse(str(error))
            return
        if text is None:
            if self._vanished_at is None:
                self._vanished_at = now
            if self.is_open and now - self._vanished_at >= VANISH_SECONDS:
                self._log.warning("gate-closed", reason="assignment removed")
                self.close(
                    "Epoch",
                    "the operator has taken this pod's assignment away; the job has ended or is suspended",
                )
            if not self.is_open:
                self._seen, self.reason = None, WAITING
            return
        self._vanished_at = None
        if text == self._seen and (self._retry_at is None or now < self._retry_at):
            return
        self._retry_at = None
        self._seen = text
        try:
            assignment = parse_assignment(text, self.role, self._pod_ip)
        except AssignmentError as error:
            self._refuse(str(error))
            return
        self._apply(assignment, now)

    def _refuse(self, reason: str) -> None:
        if reason != self.reason or self.is_open:
            self._log.error("assignment-refused", reason=reason, gate="open" if self.is_open else "closed")
        if not self.is_open:
            self.reason = reason

    def _apply(self, assignment: Assignment, now: float) -> None:
        current = self.assignment
        if current is not None and current.uid == assignment.uid and current.job == assignment.job:
            if assignment.epoch < current.epoch:
                self._refuse(f"the assignment has epoch {assignment.epoch}, which is older than {current.epoch}")
                return
            if assignment.epoch == current.epoch and self.is_open:
                self._revise(current, assignment)
                return
        if self.is_open and current is not None:
            self._log.warning("epoch-changed", old=current.epoch, new=assignment.epoch)
            self.close(
                "Epoch",
                f"the job went from epoch {current.epoch} to {assignment.epoch}; this run is over, "
                "start the trainer again",
            )
        self._open(assignment, now)

    def _revise(self, current: Assignment, assignment: Assignment) -> None:
        if not current.same_transport(assignment):
            self._refuse(
                f"the assignment changed within epoch {current.epoch} in more than mode and revision; "
                "that needs a new epoch"
            )
            return
        if assignment.mode != current.mode:
            # The transport needs no telling: without a switch the parameter server sums by itself.
            self._log.warning("mode-changed", old=current.mode, new=assignment.mode, revision=assignment.revision)
        self.assignment = assignment
        if self.clients is not None:
            self.clients.revise(assignment)

    def _open(self, assignment: Assignment, now: float) -> None:
        try:
            transport = self._factory(assignment)
        except (OSError, ValueError) as error:
            reason = f"the transport cannot start: {error}"
            if reason != self.reason:
                self._log.error("transport-failed", reason=reason)
            self.reason, self._retry_at = reason, now + RETRY_SECONDS
            return
        self.assignment, self._transport, self.reason = assignment, transport, ""
        self._log.bind(job=assignment.job, role=assignment.role, rank=assignment.rank, epoch=assignment.epoch)
        if assignment.role == "worker":
            self.clients = Clients(assignment, cast(MemberTransport, transport), self._log, self._on_stats)
        self._log.info(
            "gate-opened",
            mode=assignment.mode,
            jobId=assignment.job_id,
            workers=assignment.world_size,
            address=assignment.own_address,
            port=assignment.port,
        )

    def close(self, code: str, message: str) -> None:
        """Stops the transport; operations in flight fail, clients are told."""
        transport = self._transport
        if transport is None:
            return
        self._transport = None
        transport.close(code, message)
        try:
            self.metrics.retire(transport.metrics())
        except (OSError, ValueError) as error:
            self._log.warning("metrics-lost", error=str(error))
        if self.clients is not None:
            self.clients.close()
            self.clients = None
        self.reason = WAITING
        self._closed = transport

    def join(self) -> None:
        """After `close`: waits, for a second at most, until the clients have read why. Blocks."""
        if self._closed is not None:
            self._closed.join()
            self._closed = None

    def snapshot(self) -> dict[str, Any]:
        """The transport's metrics with earlier epochs added; only counters while the gate is closed."""
        return self.metrics.total(self._transport.metrics() if self._transport is not None else {})

    def expose(self) -> str:
        """Prometheus metrics as text."""
        return self.metrics.expose(
            self.assignment,
            self.role,
            self._transport.metrics() if self._transport is not None else {},
            self.is_open,
        )

    def is_of_the_job(self, address: str) -> bool:
        """Whether an address is this pod's own, or one of its job's as the assignment says."""
        if address in ("::1", self._pod_ip) or address.startswith("127."):
            return True
        assignment = self.assignment
        if assignment is None:
            return False
        workers = (worker.address for worker in assignment.workers)
        return address in {*workers, *(server.address for server in assignment.parameter_servers)}

    def status(self) -> dict[str, Any]:
        """The state of this sidecar, for this pod and its job's."""
        assignment = self.assignment
        snapshot = self.snapshot()
        return {
            "role": self.role,
            "gateOpen": self.is_open,
            "reason": self.reason or None,
            "assignment": assignment.model_dump(by_alias=True, mode="json") if assignment else None,
            "sessions": snapshot.get("sessions", 0),
            "operationsInFlight": snapshot.get("operations_outstanding", 0),
            "metrics": snapshot,
        }
