# SPDX-License-Identifier: Apache-2.0
"""In-network aggregation (ATP) for PyTorch.

    import atp_client
    dist.init_process_group("atp")                            # instead of "gloo"

or, keeping the process group that the script has:

    model.register_comm_hook(None, atp_client.allreduce_hook)

The collectives go through the ATP sidecar of the pod; see docs/training.md.
"""

from atp_client._version import __version__
from atp_client.backend import ProcessGroupATP, register
from atp_client.compiling import leave_alone
from atp_client.connection import close, connect, stats
from atp_client.errors import (
    AtpError,
    EpochError,
    GateTimeoutError,
    MismatchError,
    NoSidecarError,
    OperationTimeoutError,
    PeerError,
    SidecarLostError,
    UsageError,
)
from atp_client.hook import allreduce_hook

register()
leave_alone(__name__)

__all__ = [
    "AtpError",
    "EpochError",
    "GateTimeoutError",
    "MismatchError",
    "NoSidecarError",
    "OperationTimeoutError",
    "PeerError",
    "ProcessGroupATP",
    "SidecarLostError",
    "UsageError",
    "__version__",
    "allreduce_hook",
    "close",
    "connect",
    "register",
    "stats",
]
