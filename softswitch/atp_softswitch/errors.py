# SPDX-License-Identifier: Apache-2.0
"""Errors of the P4Runtime service, as gRPC canonical codes (P4Runtime 1.4, section "Error Reporting Messages")."""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """google.rpc.Code, the part that a P4Runtime server uses."""

    OK = 0
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13


class Detail(IntEnum):
    """p4.v1.Error.code in the error space `atp`: what the canonical code leaves open."""

    NONE = 0
    NO_SUCH_PORT = 1


class P4RuntimeError(Exception):
    """A request, or one update of a batch, that the server refuses.

    Attributes: `code` is the canonical code, `message` says what is wrong and what to do, `detail` is for programs.
    """

    def __init__(self, code: Code, message: str, detail: Detail = Detail.NONE) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.detail = detail


class DataplaneError(Exception):
    """The switch library refused a call. `errno` is positive."""

    def __init__(self, call: str, errno: int, message: str) -> None:
        super().__init__(f"{call}: {message} (errno {errno})")
        self.errno = errno
