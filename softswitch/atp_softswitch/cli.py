# SPDX-License-Identifier: Apache-2.0
"""Command line of the software switch. Light, as `health` runs often: only `serve` imports what serves."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import shutil
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from atp_api.service import log as logs

from . import __version__
from .dataplane import ENV_LIBRARY, ENV_OBJECT_DIR, PROFILES
from .errors import DataplaneError

ATP_PORT = 10800

log = logging.getLogger("atp_softswitch")


def _endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not host:port")
    return host, int(port)


def _ipv4(text: str) -> int:
    try:
        return int(ipaddress.IPv4Address(text))
    except ipaddress.AddressValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not an IPv4 address") from error


def build_parser() -> argparse.ArgumentParser:
    """The argument parser; every option is in docs and in --help."""
    parser = argparse.ArgumentParser(prog="atp-softswitch", description="ATP software switch with P4Runtime.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="run the switch until SIGTERM")
    serve.add_argument("--listen", default="127.0.0.1:9559", help="P4Runtime host:port; keep it on loopback")
    serve.add_argument(
        "--health-listen", type=_endpoint, default=("127.0.0.1", 9561), help="health and metrics host:port"
    )
    serve.add_argument("--device-id", type=int, default=1, help="P4Runtime device ID")
    serve.add_argument(
        "--mode",
        choices=("tc", "xdp", "relay"),
        default="tc",
        help="tc: BPF between pods; xdp: BPF at NICs; relay: UDP relay, needs no privilege",
    )
    serve.add_argument(
        "--attach",
        nargs="+",
        metavar="veth|none|IFNAME",
        help="tc interfaces (default: veth in mode tc, none in mode xdp)",
    )
    serve.add_argument("--xdp", nargs="+", default=[], metavar="IFNAME", help="NICs that get the XDP program")
    serve.add_argument("--relay-address", type=_ipv4, help="IPv4 address of the relay")
    serve.add_argument("--relay-port", type=int, default=ATP_PORT, help="UDP port of the relay")
    serve.add_argument("--aggregators", type=int, default=8192, help="number of aggregators, 1..65536")
    serve.add_argument(
        "--values", type=int, choices=PROFILES, default=350, help="largest profile: 32-bit values per packet"
    )
    serve.add_argument("--stale-ms", type=int, default=0, help="T in ms: idle aggregators are free (0: default)")
    serve.add_argument("--sweep-seconds", type=float, default=5.0, help="free stale aggregators this often")
    serve.add_argument("--port-rate", type=int, default=0, help="phantom queue rate of each port, bit/s; 0: off")
    serve.add_argument("--port-threshold", type=int, default=65536, help="phantom queue threshold, bytes")
    serve.add_argument("--p4info", type=Path, help="contract that a pushed p4info must match (default: its own)")
    serve.add_argument("--library", help=f"libatp_switch.so (or ${ENV_LIBRARY})")
    serve.add_argument("--object-dir", help=f"folder of the compiled BPF objects (or ${ENV_OBJECT_DIR})")
    serve.add_argument(
        "--pin-dir",
        type=Path,
        help="folder in a BPF file system: tables and programs outlive this process, and the next one takes them over",
    )
    serve.add_argument("--state-dir", type=Path, help="folder for what belongs to --pin-dir; best on a tmpfs")
    serve.add_argument(
        "--keep-seconds",
        type=int,
        default=600,
        help="with --pin-dir: so long after this process everything is ordinary traffic to the programs that it left",
    )
    serve.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    clean = commands.add_parser("clean", help="take off what a switch with --pin-dir left")
    clean.add_argument("--pin-dir", type=Path, required=True)
    clean.add_argument("--state-dir", type=Path, required=True)
    health = commands.add_parser("health", help="exit 0 if a switch on this host is alive (for exec probes)")
    health.add_argument("--address", type=_endpoint, default=("127.0.0.1", 9561), help="its --health-listen")
    return parser


def _health(options: argparse.Namespace) -> int:
    host, port = options.address
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/healthz", timeout=5) as answer:
            print(answer.read().decode().strip())
            return 0
    except OSError as error:
        print(f"not healthy: {error}", file=sys.stderr)
        return 1


def _clean(options: argparse.Namespace) -> int:
    """What is attached goes with the last name that it has in the BPF file system."""
    for folder in (options.pin_dir, options.state_dir):
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            continue
        except OSError as error:
            print(f"cannot remove {folder}: {error}", file=sys.stderr)
            return 1
        print(f"removed {folder}")
    return 0


def _check(options: argparse.Namespace) -> str | None:
    if options.mode == "relay" and options.relay_address is None:
        return "--mode relay needs --relay-address"
    if options.mode == "relay" and (options.attach or options.xdp):
        return "--attach and --xdp belong to the BPF modes; a relay has a UDP socket"
    if options.mode == "xdp" and not options.xdp:
        return "--mode xdp needs --xdp IFNAME"
    if (options.pin_dir is None) != (options.state_dir is None):
        return "--pin-dir and --state-dir belong together"
    if options.pin_dir is not None and options.mode == "relay":
        return "--pin-dir belongs to the BPF modes"
    if options.keep_seconds < 1:
        return "--keep-seconds must be at least 1"
    if not 1 <= options.aggregators <= 65536:
        return "--aggregators must be 1..65536"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.command == "health":
        return _health(options)
    if options.command == "clean":
        return _clean(options)
    wrong = _check(options)
    if wrong:
        parser.error(wrong)
    logs.configure(options.log_level)
    from .serve import serve

    try:
        return asyncio.run(serve(options))
    except (OSError, DataplaneError) as error:
        log.error("cannot run: %s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
