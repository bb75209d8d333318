# SPDX-License-Identifier: Apache-2.0
"""Attacks by packets. Each is carried out against a training job in a Site; `guarded` False shows what it does then."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from atp_api.wire import STALE_NS, UDP_PORT
from atp_operator.desired import assignments

from .outcome import Outcome
from .sender import datagram, packet, raw_socket, superframe
from .site import Running, Site, Training, inside

SECONDS = 1.5
"""How long an attacker goes on."""
HUGE = 1e10
EDGE, ACK, RAW = "edge_switch_identifier", "is_ack", "raw_float"
ONE_NODE = ("w0", "w1", "ps", "mallory", "other")


def sequences(running: Running, ahead: int = 600) -> Iterator[int]:
    """Sequences that are open or will be in a moment; whoever reads the victim's traffic or guesses knows them."""
    sent = running.workers[0].metrics()["packets_sent"]
    for number in range(max(0, sent - 100), sent + ahead):
        yield number & 0xFFFFFF


def assault(site: Site, name: str, attacker: str, running: Running, send: Callable[[int], int]) -> Outcome:
    """Train while the attacker sends for each sequence in turn. `send` returns how many packets that were."""
    packets = 0

    def attack() -> None:
        nonlocal packets
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            for sequence in sequences(running):
                packets += send(sequence)

    with site.training(running) as found:
        time.sleep(0.3)
        thread = threading.Thread(target=attack)
        thread.start()
        thread.join()
        during = found.rounds
        time.sleep(0.5)
    return judge(site, name, attacker, packets, found, went_on=found.rounds > during)


def judge(site: Site, name: str, attacker: str, packets: int, found: Training, went_on: bool) -> Outcome:
    culprits = site.culprits()
    named = ", ".join(sorted(culprits))
    held = found.wrong == 0 and not found.errors and went_on and set(culprits) == {attacker}
    detail = f"{found.rounds} sums, errors {found.errors[:1]}, dropped by sender {culprits}"
    return Outcome(name, packets, found.wrong, named, held, detail)


@contextlib.contextmanager
def one_node(guarded: bool, *switch_options: str, pinned: bool = False) -> Iterator[tuple[Site, Running]]:
    """A job of two workers on one node, beside pods that are none of its."""
    with Site(ONE_NODE, switch_options=switch_options, pinned=pinned) as site:
        job = site.plan("victim", ["w0", "w1"], "ps")
        site.apply([job], guarded)
        yield site, site.start(job)


def from_pod(
    site: Site, attacker: str, to: str, make: Callable[[int], list[tuple[str, bytes]]]
) -> Callable[[int], int]:
    """A raw socket in the attacker's pod; `make` gives the (source address, payload) of each packet for a sequence."""
    s = inside(site.pods[attacker].namespace, raw_socket)
    target = site.pods[to].address

    def send(sequence: int) -> int:
        made = make(sequence)
        for source, payload in made:
            s.sendto(datagram(source, target, payload), (target, 0))
        return len(made)

    return send


def raw_gradient(guarded: bool = True, own_address: bool = False) -> Outcome:
    """A stranger's raw values under a worker's address: the PS takes them for that worker's."""
    with one_node(guarded) as (site, running):
        source = site.pods["mallory" if own_address else "w0"].address

        def make(sequence: int) -> list[tuple[str, bytes]]:
            return [(source, packet(62, HUGE, job_id=1, sequence=sequence, bitmap0=1, bitmap1=1, **{RAW: 1}))]

        name = "raw gradient, own address" if own_address else "raw gradient, a worker's address"
        return assault(site, name, "mallory", running, from_pod(site, "mallory", "ps", make))


def raw_result(guarded: bool = True) -> Outcome:
    """A stranger's raw result and notice under the PS's address, to a worker."""
    with one_node(guarded) as (site, running):
        source = site.pods["ps"].address

        def make(sequence: int) -> list[tuple[str, bytes]]:
            common = {"job_id": 1, "sequence": sequence, ACK: 1, RAW: 1}
            return [(source, packet(62, HUGE, **common)), (source, packet(62, 1, aggregator_index=2, **common))]

        return assault(site, "raw result", "mallory", running, from_pod(site, "mallory", "w0", make))


def forged_ack(guarded: bool = True) -> Outcome:
    """A stranger's ACK under the PS's address, straight to a worker."""
    with one_node(guarded) as (site, running):
        source = site.pods["ps"].address

        def make(sequence: int) -> list[tuple[str, bytes]]:
            return [(source, packet(62, 123456789, job_id=1, sequence=sequence, **{ACK: 1, EDGE: 1}))]

        return assault(site, "forged ACK", "mallory", running, from_pod(site, "mallory", "w0", make))


def control_packets(guarded: bool = True) -> Outcome:
    """Control packets with another incarnation, under a worker's address: they would end the epoch."""
    with one_node(guarded) as (site, running):
        source = site.pods["w0"].address

        def make(sequence: int) -> list[tuple[str, bytes]]:
            head = packet(0, 0, job_id=1, bitmap0=1, bitmap1=1, aggregator_index=3, **{RAW: 1})
            body = bytes([7, 7, 7, sequence & 0xFF or 1]) + bytes(8) + (1).to_bytes(4, "big") + b"\0\1\1\1"
            return [(source, head + body)]

        return assault(site, "control packets", "mallory", running, from_pod(site, "mallory", "ps", make))


def wrappings(guarded: bool = True) -> Outcome:
    """Gradients with a worker's bit in IP options, first fragments, and with a UDP length that lies."""
    with one_node(guarded) as (site, running):
        s = inside(site.pods["mallory"].namespace, raw_socket)
        source, target = site.pods["w0"].address, site.pods["ps"].address

        def send(sequence: int) -> int:
            data = packet(62, 10**8, job_id=1, sequence=sequence, bitmap0=3, bitmap1=1, **{EDGE: 1})
            for frame in (
                datagram(source, target, data, options=b"\x01\x01\x01\x00"),
                datagram(source, target, data, udp_length=8 + len(data) - 4),
                datagram(source, target, data[:248], fragment=0x2000, udp_length=8 + len(data)),
                datagram(source, target, data),
            ):
                s.sendto(frame, (target, 0))
            return 4

        return assault(site, "odd wrappings", "mallory", running, send)


def superframes(guarded: bool = True) -> Outcome:
    """A worker of the job sends the bits of the other one, and sums of both, with UDP segmentation."""
    with one_node(guarded) as (site, running):
        s = site.pods["w0"].socket()
        target = site.pods["ps"].address

        def send(sequence: int) -> int:
            common = {"job_id": 1, "bitmap1": 1, "fan_in_degree0": 2, "fan_in_degree1": 1}
            numbers = [(sequence + n) & 0xFFFFFF for n in range(8)]
            for fields in ({"bitmap0": 2}, {"bitmap0": 3, EDGE: 1}):
                superframe(s, target, [packet(62, 10**8, sequence=n, **fields, **common) for n in numbers])
            return 16

        return assault(site, "superframes", "w0", running, send)


def stolen_sum(guarded: bool = True) -> Outcome:
    """A worker resends and duplicates to a pod outside: the switch would put the sum into what leaves for there."""
    with one_node(guarded) as (site, running):
        thief = site.pods["mallory"]

        s = thief.socket(UDP_PORT, 0.2)
        sender = inside(site.pods["w1"].namespace, raw_socket)
        source = site.pods["w1"].address

        def send(sequence: int) -> int:
            common = {"job_id": 1, "sequence": sequence, "bitmap0": 2, "bitmap1": 1, "fan_in_degree0": 2}
            for index in (sequence % 512, (sequence * 7) % 512):
                data = packet(62, 0, aggregator_index=index, resend=1, fan_in_degree1=1, **common)
                sender.sendto(datagram(source, thief.address, data), (thief.address, 0))
            return 2

        result = assault(site, "stolen sum", "w1", running, send)
        stolen = drain(s)
        detail = f"{len(stolen)} packets reached the thief; {result.detail}"
        return replace(result, held=result.held and not stolen, detail=detail)


def drain(s: socket.socket) -> list[bytes]:
    got = []
    try:
        while True:
            got.append(s.recv(65536))
    except TimeoutError:
        return got


def uplink(guarded: bool = True, own_address: bool = True, ack: bool = False) -> Outcome:
    """From a node that knows nothing of the job: a complete sum of another node's rack, or an ACK.

    All other nodes' packets come in over the one uplink of the PS's node, so that port and bit say nothing.
    """
    with Site(("w0", "w1", "ps"), ("w2", "w3"), ("mallory",)) as site:
        job = site.plan("victim", ["w0", "w1", "w2", "w3"], "ps")
        site.apply([job], guarded)
        running = site.start(job)
        source = site.pods["mallory" if own_address else "w2"].address
        rack = next(seat.rack for seat in job.status.placement.seats if seat.node == "n1")  # type: ignore[union-attr]

        def make(sequence: int) -> list[tuple[str, bytes]]:
            index = sequence % 512
            if ack:
                return [(source, packet(62, 10**9, job_id=1, sequence=sequence, aggregator_index=index, **{ACK: 1}))]
            common = {"fan_in_degree0": 2, "fan_in_degree1": 3, "bitmap0": 3, "bitmap1": 1 << rack, EDGE: 1}
            return [(source, packet(62, 10**9, job_id=1, sequence=sequence, aggregator_index=index, **common))]

        what = "an ACK" if ack else "a rack's sum"
        name = f"{what} from another node, {'own' if own_address else 'a worker' + chr(39) + 's'} address"
        return assault(site, name, "mallory", running, from_pod(site, "mallory", "w0" if ack else "ps", make))


def host_only(guarded: bool = True) -> Outcome:
    """The same against a job without aggregators, by a stranger and between two jobs."""
    with Site((*ONE_NODE, "x0", "xps")) as site:
        victim = site.plan("victim", ["w0", "w1"], "ps", aggregate=False)
        beside = site.plan("beside", ["x0"], "xps", aggregate=False)
        site.apply([victim, beside], guarded)
        running = site.start(victim)
        site.start(beside)
        source = site.pods["w0"].address

        def make(sequence: int) -> list[tuple[str, bytes]]:
            data = packet(62, 10**8, job_id=255, sequence=sequence, bitmap0=1, bitmap1=1)
            raw = packet(62, HUGE, job_id=255, sequence=sequence, bitmap0=1, bitmap1=1, **{RAW: 1})
            return [(source, data), (source, raw), (site.pods["x0"].address, data)]

        return assault(site, "a job without aggregators", "x0", running, from_pod(site, "x0", "ps", make))


def switch_away(guarded: bool = True) -> Outcome:
    """A stranger's raw values while the switch's process is gone, as at an upgrade, and when it is back."""
    with one_node(guarded, pinned=True) as (site, running):
        source = site.pods["w0"].address

        def make(sequence: int) -> list[tuple[str, bytes]]:
            common = {"job_id": 1, "sequence": sequence, "bitmap0": 1, "bitmap1": 1, "aggregator_index": 0}
            return [(source, packet(62, HUGE, **{RAW: 1}, **common))]

        def summed() -> int:
            return int(running.servers[0].metrics()["aggregated_packets"])

        site.kill_switch(0)
        before = summed()
        result = assault(site, "the switch away", "mallory", running, from_pod(site, "mallory", "ps", make))
        aggregated = summed() - before
        again = site.restart_switch(0)
        kept = any(line["message"] == "tables taken over" for line in again.lines)
        with site.training(running) as found:
            time.sleep(1.0)
        culprits = site.culprits()
        held = not (result.wrong_sums or found.wrong or found.errors) and aggregated > 0 and kept
        detail = f"{aggregated} packets aggregated without the process; {result.detail}; then {culprits}"
        named = ", ".join(sorted(culprits))
        return replace(result, held=held and named == "mallory", named_attacker=named, detail=detail)


def queue_filled(guarded: bool = True) -> Outcome:
    """Raw packets of a stranger fill the queue that marks ECN for the job."""
    with one_node(guarded, "--port-rate", str(10**9), "--port-threshold", "1000000") as (site, running):
        source, payload = site.pods["mallory"].address, packet(62, 1.0, job_id=1, bitmap0=1, bitmap1=1, **{RAW: 1})

        def make(sequence: int) -> list[tuple[str, bytes]]:
            return [(source, payload)] * 20

        result = assault(site, "a filled queue", "mallory", running, from_pod(site, "mallory", "ps", make))
        marks = sum(worker.metrics()["ecn_marks"] for worker in running.workers)
        return replace(result, held=result.held and not marks, detail=f"{marks} ECN marks; {result.detail}")


STALE_SECONDS = STALE_NS / 1e9
SHARED, FLOOR = 256, 128
"""Aggregators that two jobs share in `starved`, and the floor of one of them."""


def starved(floor: bool = True, rate: int = 2) -> Outcome:
    """A worker of another job takes all shared aggregators and never completes a sum: all its packets are in order.

    It sends `rate` packets for each of them in the time after which an idle one is free. `floor` False: the victim has
    none.
    """
    with Site((*ONE_NODE, "x0", "x1", "xps")) as site:
        promising = site.plan("victim", ["w0", "w1"], "ps", shared=SHARED, floor=FLOOR)
        victim = promising if floor else site.plan("victim", ["w0", "w1"], "ps", shared=SHARED)
        greedy = site.plan("greedy", ["x0", "x1"], "xps", job_id=2, shared=SHARED)
        site.apply([victim, greedy])
        running = site.start(victim)
        slots: int = json.loads(next(iter(assignments(promising).values())))["indexTableSize"]
        promised = FLOOR / slots
        s, target = site.pods["x0"].socket(), (site.pods["xps"].address, UDP_PORT)
        packets, stop = 0, threading.Event()

        def attack() -> None:
            nonlocal packets
            common = {"job_id": 2, "bitmap0": 1, "bitmap1": 1, "fan_in_degree0": 2, "fan_in_degree1": 1}
            begin = time.monotonic()
            while not stop.is_set():
                due = int((time.monotonic() - begin) / STALE_SECONDS * SHARED * rate)
                for number in range(packets, due):
                    s.sendto(packet(62, 1, sequence=number, aggregator_index=number % SHARED, **common), target)
                packets = max(packets, due)
                time.sleep(0.001)

        thread = threading.Thread(target=attack)
        thread.start()
        time.sleep(3 * STALE_SECONDS)
        before = running.servers[0].metrics()
        with site.training(running) as found:
            time.sleep(SECONDS)
            holders = site.in_use()
        stop.set()
        thread.join()
        now = running.servers[0].metrics()
        switches, server = (now[key] - before[key] for key in ("aggregated_packets", "host_summed_packets"))
        share = switches / max(1, switches + server)
        greediest = max(holders, key=lambda uid: holders[uid], default="")
        held = not found.wrong and not found.errors and found.rounds > 0 and share >= 0.9 * promised
        detail = f"{found.rounds} sums, {share:.3f} added by the switch, {promised:.3f} promised, aggregators {holders}"
        return Outcome("a starved job", packets, found.wrong, f"ATPJob {greediest}" if greediest else "", held, detail)


def strangers_traffic(guarded: bool = True) -> Outcome:
    """By the switch, not by a pod: other people's datagrams to that port must all arrive, whatever they say."""
    with one_node(guarded) as (site, running):
        receiver = site.pods["other"]

        s = receiver.socket(UDP_PORT, 0.5)
        sender = site.pods["mallory"].socket()
        payloads = [
            bytes([first]) + bytes(length) for first in (0, 1, 2, 255) for length in (0, 1, 14, 15, 16, 263, 1200)
        ]
        payloads += [packet(62, 5, job_id=1, sequence=n, bitmap0=1, bitmap1=1) for n in range(20)]
        with site.training(running) as found:
            for payload in (b"", *payloads):
                sender.sendto(payload, (receiver.address, UDP_PORT))
            time.sleep(0.5)
        lost = len(payloads) + 1 - len(drain(s))
        held = not lost and not found.wrong and not found.errors and site.culprits() == {}
        return Outcome("other people's datagrams", len(payloads) + 1, found.wrong, "", held, f"{lost} lost")


ATTACKS: dict[str, Callable[[bool], Outcome]] = {
    "raw_gradient": raw_gradient,
    "raw_gradient_own_address": lambda guarded=True: raw_gradient(guarded, own_address=True),
    "raw_result": raw_result,
    "forged_ack": forged_ack,
    "control_packets": control_packets,
    "wrappings": wrappings,
    "superframes": superframes,
    "stolen_sum": stolen_sum,
    "uplink_own_address": uplink,
    "uplink_workers_address": lambda guarded=True: uplink(guarded, own_address=False),
    "uplink_ack": lambda guarded=True: uplink(guarded, ack=True),
    "host_only": host_only,
    "switch_away": switch_away,
    "queue_filled": queue_filled,
    "strangers_traffic": strangers_traffic,
    "starved": starved,
    "starved_tenfold": lambda floor=True: starved(floor, rate=20),
}
