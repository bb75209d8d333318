# SPDX-License-Identifier: Apache-2.0
"""ATP transport endpoints: a worker and a parameter server, each one thread and one UDP socket.

The protocol is described in docs/protocol.md; the classes are documented in ``_native.pyi``.
"""

from ._native import ParameterServer, Worker

__all__ = ["ParameterServer", "Worker"]
