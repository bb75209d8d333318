# SPDX-License-Identifier: Apache-2.0
"""ATP transport endpoints, each one thread and one UDP socket: a worker without groups (for tests and figures), a
member (a worker with groups, which serves trainers) and a parameter server.

The protocol is described in docs/protocol.md; the classes are documented in ``_native.pyi``.
"""

from ._native import Member, ParameterServer, Worker

__all__ = ["Member", "ParameterServer", "Worker"]
