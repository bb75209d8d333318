# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, by name. Every text says what happened and what to do."""

from __future__ import annotations


class AtpError(RuntimeError):
    """Base of all errors of this package."""


class NoSidecarError(AtpError):
    """There is no ATP sidecar to talk to."""


class GateTimeoutError(AtpError):
    """The sidecar runs, but the operator has not let the job start within ATP_CONNECT_TIMEOUT."""


class UsageError(AtpError, ValueError):
    """The call cannot be: a tensor, an operation or a process group that ATP does not do."""


class MismatchError(AtpError):
    """The ranks called different collectives: number of elements, type or operation differ."""


class PeerError(AtpError):
    """Another worker or the parameter server is gone or stalled."""


class EpochError(AtpError):
    """The job was restarted or ended by the operator; this process belongs to an epoch that is over."""


class SidecarLostError(AtpError):
    """The sidecar died, stopped or broke the protocol while it was in use."""


class OperationTimeoutError(AtpError):
    """A collective took longer than the timeout of its process group."""


_ADVICE = {
    "Mismatch": (
        MismatchError,
        "every rank must call the same collectives in the same order, with the same number of elements and dtype",
    ),
    "Stalled": (
        PeerError,
        "a worker or the parameter server does not answer: kubectl get pods -l atp.dev/job=<job>, then its logs",
    ),
    "PeerGone": (PeerError, "see why it left: kubectl get pods -l atp.dev/job=<job>, then its logs"),
    "Aborted": (PeerError, "see the logs of the rank that gave up"),
    "Timeout": (OperationTimeoutError, "see what the slow rank does, or raise the timeout of the process group"),
    "Cancelled": (PeerError, "the operation was cancelled; see the log of container atp-sidecar"),
    "Memory": (SidecarLostError, "raise the sizeLimit of the volume atp-shm, or the pod's memory limit"),
    "Epoch": (EpochError, "restart this process; it joins the new epoch"),
    "Shutdown": (SidecarLostError, "the pod is being deleted"),
}


def from_code(code: str, message: str) -> AtpError:
    """The error for a code and message of the sidecar."""
    kind, advice = _ADVICE.get(code, (SidecarLostError, "see the log of container atp-sidecar in this pod"))
    text = f"ATP {code}: {message}"
    return kind(text if advice in message else f"{text} ({advice})")


def again(error: AtpError, before: str = "", after: str = "") -> AtpError:
    """The same error once more, to be raised by another thread or call: a traceback belongs to one raise."""
    return type(error)(f"{before}{error}{after}")
