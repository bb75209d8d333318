# SPDX-License-Identifier: Apache-2.0
"""What outlives a switch: tables and programs go on without a process, and the next one takes them over."""

from __future__ import annotations

import ctypes
import errno
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conformance.switches import PORTS, Packet, Switch, TcSwitch, VethSwitch, XdpSwitch, frame_of, run
from softswitch.pins import bpf_file_system
from softswitch.test_switch import STALE_NS, gradient, guard, job_of_two

pytestmark = pytest.mark.root


@pytest.fixture
def pins() -> Iterator[Path]:
    with bpf_file_system() as root:
        yield root / "bpf" / "atp"


def pinned(kind: type[VethSwitch], pins: Path) -> VethSwitch:
    class Pinned(kind):  # type: ignore[misc, valid-type]
        def open(self) -> None:
            self.options.pin_dir = str(pins).encode()
            super().open()

    switch: VethSwitch = Pinned(8, 62, STALE_NS)
    switch.set_clock(10**9)
    job_of_two(switch)
    guard(switch)
    return switch


@pytest.fixture(params=[TcSwitch, XdpSwitch], ids=["tc", "xdp"])
def switch(request: pytest.FixtureRequest, pins: Path) -> Iterator[VethSwitch]:
    made = pinned(request.param, pins)
    yield made
    made.close()


def sums(switch: Switch, *gradients: Packet) -> list[list[tuple[int, ...]]]:
    return [
        [p.values[:1] for p in switch.send(each, "ps", len(gradients) - 1 == n)] for n, each in enumerate(gradients)
    ]


def left(switch: Switch) -> set[int]:
    found = (ctypes.c_uint32 * 16)()
    return set(found[: switch.check(switch.library.atp_switch_left_attached(switch.handle, found, 16), "left")])


def test_sums_go_on_without_a_process_and_with_the_next(switch: VethSwitch) -> None:
    assert switch.send(gradient("w0", 1), "ps", 0) == []
    Switch.close(switch)
    assert sums(switch, gradient("w1", 2, fill=4)) == [[(5,)]]
    assert switch.send(gradient("w0", 1, sequence=2, index=1), "ps", 0) == []
    switch.open()
    assert left(switch) == {switch.port_number(port) for port in PORTS}
    for port in PORTS:
        switch.attach_port(port)
    assert left(switch) == set()
    assert sums(switch, gradient("w1", 2, sequence=2, index=1, fill=6)) == [[(7,)]]
    assert switch.counters(1)["completed"] == 2


def test_the_guard_goes_on_without_a_process_and_with_the_next(switch: VethSwitch) -> None:
    raw = gradient("w2", 1)
    frame = frame_of(raw.payload(), "w2", "ps")
    assert switch.exchange("w2", frame, 0) == []
    Switch.close(switch)
    assert switch.exchange("w2", frame, 0) == []
    switch.open()
    assert switch.exchange("w2", frame, 0) == []
    for port in PORTS:
        switch.attach_port(port)
    assert switch.exchange("w2", frame, 0) == []
    assert switch.drops() == {"w2": {"source": 4}}


def test_tables_that_were_taken_over_can_be_changed(switch: VethSwitch) -> None:
    Switch.close(switch)
    switch.open()
    with pytest.raises(OSError, match="File exists"):
        switch.set_host(2, "w0", "w0", "worker", 1, 1)
    job_of_two(switch)  # again: nothing changes
    guard(switch)
    switch.delete_job(1)
    for host in ("w0", "w1", "ps"):
        switch.delete_host(1, host)
    frame = frame_of(gradient("w2", 1).payload(), "w2", "ps")
    assert switch.exchange("w2", frame, 1) == [("ps", frame)]


def test_nobody_looks_after_the_tables(pins: Path) -> None:
    """After a time everything is ordinary traffic, until somebody comes."""

    class Timed(TcSwitch):
        def opener(self) -> object:
            return self.library.atp_switch_open_bpf

    switch = pinned(Timed, pins)
    try:
        switch.check(switch.library.atp_switch_keep(switch.handle, 1), "keep")
        frame = frame_of(gradient("w2", 1).payload(), "w2", "ps")
        assert switch.exchange("w2", frame, 0) == []
        Switch.close(switch)
        time.sleep(1.2)
        assert switch.exchange("w2", frame, 1) == [("ps", frame)]
        switch.open()
        switch.check(switch.library.atp_switch_keep(switch.handle, 60), "keep")
        assert switch.exchange("w2", frame, 0) == []
    finally:
        switch.close()


def test_one_at_a_time(switch: VethSwitch) -> None:
    second = ctypes.c_void_p()
    assert switch.opener()(ctypes.byref(switch.options), ctypes.byref(second)) == -errno.EBUSY


def test_no_bpf_file_system(tmp_path: Path) -> None:
    with pytest.raises(OSError) as told:
        pinned(TcSwitch, tmp_path / "atp")
    assert told.value.errno == errno.EMEDIUMTYPE


def test_interfaces_that_went_away_and_those_that_are_not_wanted(switch: VethSwitch, pins: Path) -> None:
    gone, unwanted = switch.port_number("w3"), switch.port_number("w2")
    Switch.close(switch)
    switch.sockets.pop("w3").close()
    run("ip", "link", "delete", "h-w3")
    switch.open()
    assert gone not in left(switch)
    assert not list((pins / "links").glob(f"{gone}_*"))
    detach = switch.library.atp_switch_detach_xdp if switch.xdp else switch.library.atp_switch_detach_tc
    switch.check(detach(switch.handle, unwanted), "detach")
    frame = frame_of(gradient("w2", 1).payload(), "w2", "w0")
    assert not list((pins / "links").glob(f"{unwanted}_*"))
    assert switch.exchange("w2", frame, 0) == []  # w0's own port guards it still


def test_tables_of_another_size_are_forgotten(switch: VethSwitch, pins: Path) -> None:
    switch.options.aggregators, before = 16, switch.library.atp_switch_token(switch.handle)
    Switch.close(switch)
    switch.open()
    assert switch.library.atp_switch_token(switch.handle) != before
    frame = frame_of(gradient("w2", 1).payload(), "w2", "ps")
    assert switch.exchange("w2", frame, 0) == []  # the old programs go on with the old tables
    for port in PORTS:
        switch.attach_port(port)
    assert switch.exchange("w2", frame, 1) == [("ps", frame)]
    assert [path.name for path in pins.glob("maps_*")] == ["maps_1_62_16"]
    switch.aggregators = 16
    job_of_two(switch)
    assert switch.send(gradient("w0", 1), "ps", 0) == []


def test_reset(switch: VethSwitch) -> None:
    assert switch.send(gradient("w0", 1), "ps", 0) == []
    assert switch.occupancy(0) == 1
    switch.check(switch.library.atp_switch_reset(switch.handle), "reset")
    assert switch.occupancy(0) == 0
    frame = frame_of(gradient("w2", 1).payload(), "w2", "ps")
    assert switch.exchange("w2", frame, 1) == [("ps", frame)]
    job_of_two(switch)
    guard(switch)
    assert switch.send(gradient("w0", 1), "ps", 0) == []
    assert sums(switch, gradient("w1", 2)) == [[(2,)]]
