# SPDX-License-Identifier: Apache-2.0
"""torch.compile runs what is in this package as it is: tracing it would fail, and there is nothing to fuse."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch


def _codes(thing: Any) -> Iterator[types.CodeType]:
    """Code of a function, of all that is defined in it, or of a class."""
    if isinstance(thing, types.CodeType):
        yield thing
        for constant in thing.co_consts:
            if isinstance(constant, types.CodeType):
                yield from _codes(constant)
    elif isinstance(thing, types.FunctionType):
        yield from _codes(thing.__code__)
    elif isinstance(thing, (staticmethod, classmethod)):
        yield from _codes(thing.__func__)
    elif isinstance(thing, property):
        yield from _codes(thing.fget)
    elif isinstance(thing, type):
        for member in vars(thing).values():
            if not isinstance(member, type):
                yield from _codes(member)


def _skipper() -> Callable[[types.CodeType], Any] | None:
    """What tells the interpreter's hook of torch.compile to leave code alone. Importing the compiler takes seconds."""
    hook: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(hook, "set_code_exec_strategy"):
        action = hook._FrameAction
        strategy = hook._FrameExecStrategy(action.SKIP, action.DEFAULT)
        return lambda code: hook.set_code_exec_strategy(code, strategy)
    return getattr(hook, "skip_code", None)


def leave_alone(package: str) -> None:
    """Marks all functions of a package's loaded modules."""
    skip = _skipper()
    if skip is None:  # torch 1
        return
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            for thing in vars(module).values():
                if getattr(thing, "__module__", None) == name:
                    for code in _codes(thing):
                        skip(code)
