# SPDX-License-Identifier: Apache-2.0
"""Imports torch once and forks a process for each scenario: importing takes seconds, forking does not.

Reads JSON lines {"function", "arguments", "environment", "output", "result"} and answers with {"pid"}. The child writes
what it prints to `output` and, when it ends by itself, {"ok", "value" | "error", "type"} to `result`.
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import traceback
from pathlib import Path

import scenarios
import scenarios_groups
import scenarios_works

# What newer DDP imports at its first use, which takes longer than most tests.
with contextlib.suppress(ImportError):
    import torch._dynamo  # noqa: F401

MODULES = (scenarios, scenarios_groups, scenarios_works)


def child(command: dict) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    descriptor = os.open(command["output"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name in ("ATP_SOCKET", "ATP_CONNECT_TIMEOUT", "ATP_SIDECAR_TIMEOUT", "ATP_SHM_BYTES"):
        os.environ.pop(name, None)
    os.environ.update(command["environment"])
    faulthandler.dump_traceback_later(120)  # whoever hangs says where
    try:
        module = next(each for each in MODULES if command["function"] in vars(each))
        outcome = {"ok": True, "value": getattr(module, command["function"])(**command["arguments"])}
    except BaseException as error:
        traceback.print_exc()
        outcome = {"ok": False, "type": type(error).__name__, "error": str(error)}
    sys.stdout.flush()
    sys.stderr.flush()
    temporary = Path(command["result"] + ".new")
    temporary.write_text(json.dumps(outcome))
    temporary.replace(command["result"])


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children: no zombies
    print(json.dumps({"torch": scenarios.torch.__version__}), flush=True)
    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if pid == 0:
            child(json.loads(line))
            # The usual end of an interpreter, with atexit and all: that is part of what is tested.
            sys.exit(0)
        print(json.dumps({"pid": pid}), flush=True)


main()
