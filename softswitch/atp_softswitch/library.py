# SPDX-License-Identifier: Apache-2.0
"""ctypes binding of libatp_switch.so (softswitch/include/atp_control.h)."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from .dataplane import (
    DROP_PORTS_MAX,
    ENV_LIBRARY,
    ENV_OBJECT_DIR,
    REGIONS_MAX,
    AggregatorState,
    Host,
    JobConfig,
    PortDrops,
    Replica,
)
from .errors import DataplaneError

_COUNTERS_MAX = 64
_DROPS = 5
_INTERFACES_MAX = 4096


class _Region(ctypes.Structure):
    _fields_ = (("start", c_uint32), ("size", c_uint32))


class _JobConfig(ctypes.Structure):
    _fields_ = (
        ("values", c_uint32),
        ("full0", c_uint32),
        ("full1", c_uint32),
        ("group", c_uint32),
        ("region_count", c_uint32),
        ("region", _Region * REGIONS_MAX),
    )


class _AdmissionKey(ctypes.Structure):
    _fields_ = (
        ("port", c_uint32),
        ("bitmap", c_uint32),
        ("job_id", c_uint8),
        ("edge", c_uint8),
        ("zero", c_uint16),
    )


class _TransitKey(ctypes.Structure):
    _fields_ = (("port", c_uint32), ("bitmap1", c_uint32), ("job_id", c_uint8), ("zero", c_uint8 * 3))


class _Replica(ctypes.Structure):
    _fields_ = (("port", c_uint32), ("dst_ip", c_uint32), ("dst_mac", c_uint8 * 6), ("dst_port", c_uint16))


class _Host(ctypes.Structure):
    _fields_ = (
        ("port", c_uint32),
        ("mark", c_uint32),
        ("bitmap0", c_uint32),
        ("bitmap1", c_uint32),
        ("job_id", c_uint8),
        ("role", c_uint8),
        ("edge", c_uint8),
        ("zero", c_uint8),
    )


class _PortDrops(ctypes.Structure):
    _fields_ = (("port", c_uint32), ("last_source", c_uint32), ("dropped", c_uint64 * _DROPS))


class _AggregatorState(ctypes.Structure):
    _fields_ = (
        ("key", c_uint32),
        ("level", c_uint32),
        ("bitmap", c_uint32),
        ("complete", c_uint32),
        ("ecn", c_uint32),
        ("timestamp_ns", c_uint64),
    )


class _Options(ctypes.Structure):
    _fields_ = (
        ("aggregators", c_uint32),
        ("values", c_uint32),
        ("stale_ns", c_uint64),
        ("object_dir", c_char_p),
        ("pin_dir", c_char_p),
    )


_HANDLE = c_void_p
_SIGNATURES: dict[str, list[Any]] = {
    "atp_switch_open_bpf": [POINTER(_Options), POINTER(_HANDLE)],
    "atp_switch_open_native": [POINTER(_Options), POINTER(_HANDLE)],
    "atp_switch_reset": [_HANDLE],
    "atp_switch_keep": [_HANDLE, c_uint32],
    "atp_switch_left_attached": [_HANDLE, POINTER(c_uint32), c_uint32],
    "atp_switch_set_job": [_HANDLE, c_uint8, POINTER(_JobConfig)],
    "atp_switch_delete_job": [_HANDLE, c_uint8],
    "atp_switch_set_admission": [_HANDLE, POINTER(_AdmissionKey)],
    "atp_switch_delete_admission": [_HANDLE, POINTER(_AdmissionKey)],
    "atp_switch_set_transit": [_HANDLE, POINTER(_TransitKey), c_uint32],
    "atp_switch_delete_transit": [_HANDLE, POINTER(_TransitKey)],
    "atp_switch_set_ps_port": [_HANDLE, c_uint8, c_uint32],
    "atp_switch_delete_ps_port": [_HANDLE, c_uint8, c_uint32],
    "atp_switch_set_host": [_HANDLE, c_uint32, POINTER(_Host)],
    "atp_switch_delete_host": [_HANDLE, c_uint32],
    "atp_switch_set_sources": [_HANDLE, c_uint32, POINTER(c_uint32), c_uint32],
    "atp_switch_delete_sources": [_HANDLE, c_uint32],
    "atp_switch_read_drops": [_HANDLE, POINTER(_PortDrops), c_uint32],
    "atp_switch_set_group": [_HANDLE, c_uint32, POINTER(_Replica), c_uint32],
    "atp_switch_read_counters": [_HANDLE, c_uint8, POINTER(c_uint64)],
    "atp_switch_read_aggregator": [_HANDLE, c_uint32, POINTER(_AggregatorState), c_void_p],
    "atp_switch_sweep": [_HANDLE],
    "atp_switch_occupancy": [_HANDLE, c_uint8],
    "atp_switch_attach_tc": [_HANDLE, c_uint32],
    "atp_switch_detach_tc": [_HANDLE, c_uint32],
    "atp_switch_attach_xdp": [_HANDLE, c_uint32],
    "atp_switch_detach_xdp": [_HANDLE, c_uint32],
    "atp_switch_set_port_rate": [_HANDLE, c_uint32, c_uint64, c_uint32],
    "atp_relay_start": [_HANDLE, c_uint32, c_uint16],
    "atp_relay_stop": [_HANDLE],
}


def _advice(number: int, values: int, object_dir: Path | None, pin_dir: Path | None) -> str:
    """What to do when the BPF data path cannot be opened."""
    if number == errno.EBUSY and pin_dir:
        return f"; another switch has {pin_dir} open: one of them at a time"
    if number == errno.EMEDIUMTYPE:
        return f"; {pin_dir} is in no BPF file system: mount one (mount -t bpf bpf /sys/fs/bpf)"
    if number in (errno.EPERM, errno.EACCES):
        return "; BPF needs the capabilities BPF, NET_ADMIN and PERFMON"
    if number == errno.ENOENT:
        return f"; the BPF object for {values} values is not in {object_dir}: name its folder with --object-dir"
    return ""


def _build_directory() -> Path:
    return Path(__file__).resolve().parents[1] / "build"


def find_library(option: str | None = None) -> Path:
    """Where libatp_switch.so is: the option, $ATP_SWITCH_LIBRARY, the source tree's build, the system's libraries.

    Raises FileNotFoundError with the places that were tried.
    """
    named = option or os.environ.get(ENV_LIBRARY)
    places = [Path(named)] if named else [
        _build_directory() / "libatp_switch.so",
        Path("/usr/local/lib/libatp_switch.so"),
        Path("/usr/lib/libatp_switch.so"),
    ]  # fmt: skip
    for place in places:
        if place.is_file():
            return place
    tried = ", ".join(map(str, places))
    raise FileNotFoundError(
        f"libatp_switch.so is not at {tried}; build it (make -C softswitch) or name it with --library"
    )


def find_object_dir(option: str | None, library: Path) -> Path:
    """Where the compiled BPF objects are: the option, $ATP_SWITCH_OBJECT_DIR, atp/ beside the library, its folder."""
    named = option or os.environ.get(ENV_OBJECT_DIR)
    if named:
        return Path(named)
    beside = library.parent / "atp"
    return beside if beside.is_dir() else library.parent


def _names(table: Any) -> list[str]:
    """A list of the library, which ends with a null pointer."""
    found = (table[index] for index in range(_COUNTERS_MAX))
    return [name.decode("ascii") for name in itertools.takewhile(bool, found)]


class SwitchLibrary:
    """One open switch of libatp_switch.so, and its lock: the library takes calls from one thread at a time.

    Shapes and units as in atp_control.h. Every method raises DataplaneError with the errno of the library.
    """

    def __init__(
        self,
        library: Path,
        *,
        bpf: bool,
        aggregators: int,
        values: int,
        object_dir: Path | None = None,
        stale_ns: int = 0,
        pin_dir: Path | None = None,
    ) -> None:
        """`pin_dir`: a folder of a BPF file system where tables and attachments outlive this process."""
        self._lib = ctypes.CDLL(str(library), use_errno=True)
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._lib, name)
            function.argtypes = arguments
            function.restype = c_int
        self._lib.atp_switch_close.argtypes = [_HANDLE]
        self._lib.atp_switch_close.restype = None
        self._lib.atp_switch_token.argtypes = [_HANDLE]
        self._lib.atp_switch_token.restype = c_uint64
        self._lib.atp_counter_names.restype = POINTER(c_char_p)
        self._lib.atp_drop_names.restype = POINTER(c_char_p)
        self._counter_names = _names(self._lib.atp_counter_names())
        self._drop_names = _names(self._lib.atp_drop_names())
        assert len(self._drop_names) == _DROPS, "the library is of another version"
        self._addresses: dict[int, int] = {}
        self._lock = threading.Lock()
        self._aggregators = aggregators
        self._values = values
        self._target = "software-bpf" if bpf else "software-relay"
        self._handle = _HANDLE()
        folders = [os.fsencode(folder) if folder else None for folder in (object_dir, pin_dir)]
        options = _Options(aggregators, values, stale_ns, *folders)
        opener = "atp_switch_open_bpf" if bpf else "atp_switch_open_native"
        status = getattr(self._lib, opener)(byref(options), byref(self._handle))
        if status < 0:
            raise DataplaneError(opener, -status, os.strerror(-status) + _advice(-status, values, object_dir, pin_dir))

    @property
    def target(self) -> str:
        return self._target

    @property
    def aggregators(self) -> int:
        return self._aggregators

    @property
    def values(self) -> int:
        return self._values

    @property
    def counter_names(self) -> Sequence[str]:
        """Names of the counters, in the library's order."""
        return self._counter_names

    @property
    def token(self) -> int:
        """A number of the tables, the same for all that take them over; 0: they go with this switch."""
        return int(self._lib.atp_switch_token(self._handle))

    def reset(self) -> None:
        """Empty all tables and free all aggregators."""
        self._call("atp_switch_reset")

    def keep(self, seconds: int) -> None:
        """When this was not called for so long, all is ordinary traffic to the data path until it is."""
        self._call("atp_switch_keep", seconds)

    def left_attached(self) -> frozenset[int]:
        """Interfaces that an earlier switch left attached and that were not attached or detached since."""
        found = (c_uint32 * _INTERFACES_MAX)()
        return frozenset(found[: self._call("atp_switch_left_attached", found, _INTERFACES_MAX)])

    def close(self) -> None:
        """Free the switch; without pin_dir, detach from every interface. Safe to call twice."""
        with self._lock:
            if self._handle:
                self._lib.atp_switch_close(self._handle)
                self._handle = _HANDLE()

    def _call(self, name: str, *arguments: Any) -> int:
        with self._lock:
            if not self._handle:
                raise DataplaneError(name, 9, "the switch is closed")
            status: int = getattr(self._lib, name)(self._handle, *arguments)
        if status < 0:
            raise DataplaneError(name, -status, os.strerror(-status))
        return status

    def set_job(self, job_id: int, config: JobConfig) -> None:
        raw = _JobConfig(config.values, config.full0, config.full1, config.group, len(config.regions))
        for index, region in enumerate(config.regions):
            raw.region[index] = _Region(region.start, region.size)
        self._call("atp_switch_set_job", job_id, byref(raw))

    def delete_job(self, job_id: int) -> None:
        self._call("atp_switch_delete_job", job_id)

    def set_admission(self, job_id: int, port: int, edge: int, bitmap: int) -> None:
        self._call("atp_switch_set_admission", byref(_AdmissionKey(port, bitmap, job_id, edge, 0)))

    def delete_admission(self, job_id: int, port: int, edge: int, bitmap: int) -> None:
        self._call("atp_switch_delete_admission", byref(_AdmissionKey(port, bitmap, job_id, edge, 0)))

    def set_transit(self, job_id: int, port: int, bitmap1: int, mask0: int) -> None:
        self._call("atp_switch_set_transit", byref(_TransitKey(port, bitmap1, job_id)), mask0)

    def delete_transit(self, job_id: int, port: int, bitmap1: int) -> None:
        self._call("atp_switch_delete_transit", byref(_TransitKey(port, bitmap1, job_id)))

    def set_ps_port(self, job_id: int, port: int) -> None:
        self._call("atp_switch_set_ps_port", job_id, port)

    def delete_ps_port(self, job_id: int, port: int) -> None:
        self._call("atp_switch_delete_ps_port", job_id, port)

    def set_host(self, job_id: int, address: int, host: Host) -> None:
        """One host of a job by its address. DataplaneError EEXIST: the address is another job's."""
        raw = _Host(host.port, host.mark, host.bitmap0, host.bitmap1, job_id, host.role, host.edge, 0)
        self._call("atp_switch_set_host", address, byref(raw))

    def delete_host(self, address: int) -> None:
        self._call("atp_switch_delete_host", address)

    def set_sources(self, ifindex: int, addresses: Sequence[int]) -> None:
        """The pod behind a port has these addresses, and no packet to the ATP port leaves it with another."""
        self._call("atp_switch_set_sources", ifindex, (c_uint32 * max(1, len(addresses)))(*addresses), len(addresses))
        self._addresses[ifindex] = addresses[0] if addresses else 0

    def delete_sources(self, ifindex: int) -> None:
        self._addresses.pop(ifindex, None)
        self._call("atp_switch_delete_sources", ifindex)

    def read_drops(self) -> Sequence[PortDrops]:
        """Ports at which something was dropped since the switch was opened."""
        raw = (_PortDrops * DROP_PORTS_MAX)()
        count = self._call("atp_switch_read_drops", raw, DROP_PORTS_MAX)
        return [
            PortDrops(
                item.port,
                self._addresses.get(item.port, 0),
                item.last_source,
                dict(zip(self._drop_names, item.dropped, strict=True)),
            )
            for item in raw[:count]
        ]

    def set_group(self, group: int, replicas: Sequence[Replica]) -> None:
        raw = (_Replica * max(1, len(replicas)))()
        for index, replica in enumerate(replicas):
            mac = (c_uint8 * 6)(*replica.dst_mac.to_bytes(6, "big"))
            raw[index] = _Replica(replica.port, replica.dst_ip, mac, replica.dst_port)
        self._call("atp_switch_set_group", group, raw, len(replicas))

    def read_counters(self, job_id: int) -> Mapping[str, int]:
        raw = (c_uint64 * len(self._counter_names))()
        self._call("atp_switch_read_counters", job_id, raw)
        return dict(zip(self._counter_names, raw, strict=True))

    def read_aggregator(self, index: int) -> AggregatorState:
        raw = _AggregatorState()
        self._call("atp_switch_read_aggregator", index, byref(raw), None)
        return AggregatorState(
            job_id=raw.key >> 24,
            sequence=raw.key & 0xFFFFFF,
            level=raw.level,
            bitmap=raw.bitmap,
            complete=bool(raw.complete),
            ecn=bool(raw.ecn),
            timestamp_ns=raw.timestamp_ns,
        )

    def occupancy(self, job_id: int) -> int:
        return self._call("atp_switch_occupancy", job_id)

    def sweep(self) -> int:
        return self._call("atp_switch_sweep")

    def attach_tc(self, ifindex: int) -> None:
        """Take packets that arrive on an interface, in its tc ingress hook."""
        self._call("atp_switch_attach_tc", ifindex)

    def detach_tc(self, ifindex: int) -> None:
        self._call("atp_switch_detach_tc", ifindex)

    def attach_xdp(self, ifindex: int) -> None:
        """Take packets that arrive on a NIC, in XDP."""
        self._call("atp_switch_attach_xdp", ifindex)

    def detach_xdp(self, ifindex: int) -> None:
        self._call("atp_switch_detach_xdp", ifindex)

    def set_port_rate(self, port: int, bits_per_second: int, threshold_bytes: int) -> None:
        """Phantom queue of a port: mark ECN beyond `threshold_bytes` at this rate; rate 0 turns it off."""
        self._call("atp_switch_set_port_rate", port, bits_per_second, threshold_bytes)

    def start_relay(self, address: int, port: int) -> None:
        """Run the UDP relay on address:port (IPv4 in host order) in a thread of the library."""
        self._call("atp_relay_start", address, port)

    def stop_relay(self) -> None:
        self._call("atp_relay_stop")
