# SPDX-License-Identifier: Apache-2.0
"""Real processes for these tests: the software switch as a relay on loopback, and the agent."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from switch_agent.bmv2 import Bmv2, reason_not_to_run
from switch_agent.process import Process
from switch_agent.switches import Software, Switch

REPOSITORY = Path(__file__).resolve().parents[2]
LIBRARY = REPOSITORY / "softswitch" / "build" / "libatp_switch.so"


@pytest.fixture
def processes() -> Iterator[Callable[..., Process]]:
    """Start processes by module name and arguments; what still runs at the end is stopped."""
    started: list[Process] = []

    def run(module: str, *arguments: str, prefix: tuple[str, ...] = ()) -> Process:
        process = Process.run(module, *arguments, prefix=prefix)
        started.append(process)
        return process

    yield run
    for process in reversed(started):
        if process.child.poll() is None:
            process.stop()


@pytest.fixture
def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def library() -> Path:
    """The built library."""
    if not LIBRARY.exists():
        pytest.skip("softswitch/build/libatp_switch.so is not built: make -C softswitch")
    return LIBRARY


@pytest.fixture
def relay(processes: Callable[..., Process], library: Path) -> Callable[..., Process]:
    """Start the software switch as a relay at an address of 127/8."""

    def run(address: str, *, p4runtime: int = 0, device_id: int = 1, **options: object) -> Process:
        extra = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        return processes(
            "atp_softswitch",
            *("serve", "--mode", "relay", "--relay-address", address, "--health-listen", "127.0.0.1:0"),
            *("--listen", f"127.0.0.1:{p4runtime}", "--device-id", str(device_id), "--library", str(library)),
            *extra,
        )

    return run


@pytest.fixture
def agent(processes: Callable[..., Process]) -> Callable[..., Process]:
    """Start the agent without TLS on loopback, for the relay's ports."""

    def run(p4runtime: int | str, *extra: str, name: str = "sw") -> Process:
        target = f"127.0.0.1:{p4runtime}" if isinstance(p4runtime, int) else p4runtime
        return processes(
            "atp_switch_agent",
            *("serve", "--switch-name", name, "--listen", "127.0.0.1:0", "--health-listen", "127.0.0.1:0"),
            *("--p4runtime", target, "--insecure-loopback", "--ports", "relay"),
            *extra,
        )

    return run


@pytest.fixture
def until() -> Callable[..., Any]:
    """Poll until a call returns something true, and return that."""

    def wait(call: Callable[[], Any], seconds: float = 15.0) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            value = call()
            if value or time.monotonic() > deadline:
                assert value, f"not within {seconds} s"
                return value
            time.sleep(0.05)

    return wait


@pytest.fixture(params=["software", pytest.param("bmv2", marks=pytest.mark.root)])
def switch(
    request: pytest.FixtureRequest, relay: Callable[..., Process], free_port: int, tmp_path: Path
) -> Iterator[Switch]:
    """Each kind of switch that can run here, not started yet."""
    if request.param == "software":
        yield Software(relay, free_port)
        return
    reason = reason_not_to_run()
    if reason is not None:
        pytest.skip(reason)
    with Bmv2(tmp_path) as bmv2:
        yield bmv2
