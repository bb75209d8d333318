# SPDX-License-Identifier: Apache-2.0
"""The bounded exhaustive model of the protocol (`atp.pml`, docs/model.md), run through SPIN.

Three kinds of cases: configurations of the protocol, in which no schedule may break a property; known mistakes
put back by a `BUG_` switch, in which the verifier must find a schedule that does (this shows that the properties
can fail); and sentences of the protocol's text that were found wrong (`DOC_` switches), which must fail too.

`make -C tests/model deep` runs the larger configurations as well.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

MODEL = Path(__file__).with_name("atp.pml")
DEEP = os.environ.get("ATP_MODEL_DEEP") == "1"
MEMORY_MIB = 4000
VERIFIER_SECONDS = 3600 if DEEP else 240

needs_spin = pytest.mark.skipif(
    shutil.which("spin") is None or shutil.which("gcc") is None,
    reason="the protocol model needs SPIN and gcc: apt-get install spin gcc",
)


@dataclass(frozen=True)
class Result:
    """What one run of the verifier said."""

    violation: str
    """The first violated property, empty if there is none."""
    complete: bool
    """Were all reachable states visited?"""
    states: int
    transitions: int
    megabytes: float
    seconds: float
    output: str


def verify(folder: Path, defines: str, *, fast: bool = False, compress: bool = False, cycles: bool = False) -> Result:
    """Generate, compile and run the verifier of one configuration.

    `fast` trades compile time for speed, `compress` speed for memory. `cycles` looks for infinite runs instead: the
    model has no progress labels, so any cycle is reported.
    """
    options = ["-DMEMLIM=" + str(MEMORY_MIB), "-DVECTORSZ=2048", "-DNOREDUCE", "-DNOFAIR", "-w"]
    options += ["-O2"] if fast else ["-O0"]
    options += ["-DCOLLAPSE"] if compress else []
    options += ["-DNP"] if cycles else ["-DSAFETY"]
    shutil.copy(MODEL, folder)
    for command in (["spin", *defines.split(), "-a", MODEL.name], ["gcc", *options, "-o", "pan", "pan.c"]):
        made = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if made.returncode != 0:
            pytest.fail(f"{' '.join(command)}: {made.stdout}{made.stderr}")
    run = ["./pan", "-m100000", "-w24" if compress else "-w20", *(["-l"] if cycles else [])]
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=VERIFIER_SECONDS, check=False)
    out = done.stdout + done.stderr

    def number(pattern: str) -> float:
        found = re.search(pattern, out)
        return float(found.group(1)) if found else 0.0

    errors = re.search(r"errors: (\d+)", out)
    if errors is None:
        pytest.fail(f"the verifier of {defines} did not finish:\n{out}")
    violated = re.search(r"^pan:\d+: (.*)$", out, re.MULTILINE)
    incomplete = ("Search not completed", "max search depth too small", "out of memory", "VECTORSZ")
    return Result(
        violation=violated.group(1) if violated else "",
        complete=errors.group(1) == "0" and not any(text in out for text in incomplete),
        states=int(number(r"(\d+) states, stored")),
        transitions=int(number(r"(\d+) transitions")),
        megabytes=number(r"([\d.]+)\s+total actual memory usage"),
        seconds=number(r"elapsed time ([\d.]+) seconds"),
        output=out,
    )


def show(capsys: pytest.CaptureFixture[str], defines: str, result: Result) -> None:
    """One line on the terminal, whether or not pytest captures output."""
    verdict = result.violation or "holds"
    with capsys.disabled():
        print(
            f"\n  {defines}: {verdict}; {result.states} states, {result.transitions} transitions,"
            f" {result.megabytes:.0f} MB, {result.seconds:.1f} s",
            end="",
            flush=True,
        )


def trace(folder: Path) -> str:
    """The counterexample in words, one event a line."""
    replay = subprocess.run(["./pan", "-r", "atp.pml.trail"], cwd=folder, capture_output=True, text=True, check=False)
    events = (
        "send",
        "deliver",
        "lose",
        "dup",
        "mark",
        "time-out",
        "switch",
        "aggregator",
        "another",
        "the other",
    )
    return "\n".join(line for line in replay.stdout.splitlines() if line.startswith(events))


def test_model_tools_are_installed_or_named() -> None:
    """Without SPIN the rest of this file is skipped; that must not look like a pass."""
    if shutil.which("spin") is None or shutil.which("gcc") is None:
        pytest.skip("the protocol model needs SPIN and gcc: apt-get install spin gcc")
    version = subprocess.run(["spin", "-V"], capture_output=True, text=True, check=False).stdout
    assert version.startswith("Spin Version 6"), f"SPIN 6 is needed (apt-get install spin), found: {version}"


# Nothing goes wrong: no time-out ever fires, and the ACKs alone release every aggregator.
FAULT_FREE = [
    "-DTOPO=1 -DTOTAL=3 -DSPREAD -DNO_FAULTS -DK=0",
    "-DTOPO=2 -DTOTAL=3 -DSPREAD -DNO_FAULTS -DK=0",
    "-DTOPO=3 -DTOTAL=3 -DSPREAD -DNO_FAULTS -DK=0",
    "-DTOPO=4 -DTOTAL=2 -DSPREAD -DNO_FAULTS -DK=0",
    "-DTOPO=5 -DTOTAL=3 -DSPREAD -DNO_FAULTS -DK=0",
    "-DTOPO=7 -DTOTAL=3 -DSPREAD -DNO_FAULTS -DK=0",
    # another job holds every aggregator for good: the PS sums all, still without a time-out
    "-DTOPO=1 -DTOTAL=2 -DNIDX=1 -DFOREIGN_HOLDS_ALL -DK=0",
    "-DTOPO=3 -DTOTAL=2 -DNIDX=1 -DFOREIGN_HOLDS_ALL -DK=0",
    # the loss of an aggregated packet or of an ACK costs one time-out, of any one worker
    "-DTOPO=1 -DTOTAL=1 -DW=1 -DLOSS=1 -DLOSS_AFTER_FIRST_HOP -DK=1",
]

QUICK = [
    # one level
    "-DTOPO=1 -DTOTAL=3 -DLOSS=1 -DDUP=1",
    "-DTOPO=1 -DTOTAL=3 -DLOSS=1 -DEARLY=1 -DNIDX=1",
    "-DTOPO=1 -DTOTAL=2 -DLOSS=1 -DDUP=1 -DEARLY=1",
    "-DTOPO=1 -DTOTAL=5 -DDUP=1 -DAGE=1",
    "-DTOPO=1 -DTOTAL=2 -DLOSS=1 -DFOREIGN=2 -DAGE=1",
    "-DTOPO=1 -DTOTAL=2 -DLOSS=1 -DRESET=1",
    "-DTOPO=1 -DTOTAL=2 -DMARK=1 -DLOSS=1 -DEARLY=1",
    "-DTOPO=6 -DTOTAL=1 -DLOSS=1 -DDUP=1 -DEARLY=1",
    # two levels
    "-DTOPO=2 -DTOTAL=2 -DLOSS=1 -DDUP=1",
    "-DTOPO=2 -DTOTAL=3 -DLOSS=1 -DFOREIGN=1 -DNIDX=1",
    "-DTOPO=2 -DTOTAL=2 -DLOSS=1 -DRESET=1",
    "-DTOPO=3 -DTOTAL=2 -DLOSS=1 -DFOREIGN=1",
    "-DTOPO=3 -DTOTAL=2 -DLOSS=2",
    "-DTOPO=3 -DTOTAL=1 -DLOSS=1 -DDUP=1 -DEARLY=1",
    "-DTOPO=3 -DTOTAL=2 -DRESET=1",
    "-DTOPO=3 -DTOTAL=2 -DMARK=1 -DLOSS=1",
    "-DTOPO=4 -DTOTAL=1 -DLOSS=1 -DDUP=1",
    "-DTOPO=4 -DTOTAL=1 -DLOSS=1 -DEARLY=1",
    "-DTOPO=4 -DTOTAL=1 -DLOSS=1 -DRESET=1",
    "-DTOPO=5 -DTOTAL=3 -DLOSS=1 -DDUP=1",
    "-DTOPO=5 -DTOTAL=2 -DLOSS=1 -DRESET=2",
    "-DTOPO=7 -DTOTAL=1 -DLOSS=1 -DDUP=1 -DEARLY=1",
    # the overflow correction
    "-DTOPO=1 -DTOTAL=2 -DRAWSEQ=0 -DLOSS=1 -DDUP=1",
    "-DTOPO=1 -DTOTAL=2 -DRAWSEQ=0 -DLOSS=1 -DRESET=1",
    "-DTOPO=1 -DTOTAL=2 -DRAWSEQ=0 -DRAW_UNASKED=1 -DLOSS=1",
    "-DTOPO=3 -DTOTAL=2 -DRAWSEQ=0 -DLOSS=1",
]

# Whatever is sent again is repeated, never resent. Repeats at any moment cost no time-out, and they mend a loss alone.
REPEATS = [
    "-DTOPO=1 -DTOTAL=2 -DEARLY=2 -DREPEATS_ONLY -DK=0 -DSPREAD",
    "-DTOPO=2 -DTOTAL=2 -DEARLY=1 -DREPEATS_ONLY -DK=0 -DSPREAD",
    "-DTOPO=3 -DTOTAL=1 -DEARLY=1 -DREPEATS_ONLY -DK=0 -DSPREAD",
    "-DTOPO=4 -DTOTAL=1 -DEARLY=1 -DREPEATS_ONLY -DK=0",
    "-DTOPO=6 -DTOTAL=1 -DEARLY=2 -DREPEATS_ONLY -DK=0",
    "-DTOPO=1 -DTOTAL=2 -DLOSS=1 -DREPEATS_ONLY",
    "-DTOPO=1 -DTOTAL=2 -DLOSS=1 -DFOREIGN=1 -DREPEATS_ONLY",
    "-DTOPO=2 -DTOTAL=2 -DLOSS=1 -DREPEATS_ONLY",
    "-DTOPO=3 -DTOTAL=2 -DLOSS=1 -DREPEATS_ONLY -DSPREAD",
    "-DTOPO=4 -DTOTAL=1 -DLOSS=1 -DREPEATS_ONLY",
]

LARGE = [
    "-DTOPO=1 -DTOTAL=3 -DLOSS=1 -DDUP=1 -DEARLY=1 -DNIDX=1",
    "-DTOPO=1 -DTOTAL=2 -DLOSS=2 -DDUP=1 -DEARLY=1",
    "-DTOPO=1 -DTOTAL=5 -DLOSS=1 -DDUP=1",
    "-DTOPO=1 -DTOTAL=2 -DLOSS=1 -DFOREIGN=1 -DRESET=1 -DAGE=1",
    "-DTOPO=1 -DTOTAL=2 -DRAWSEQ=0 -DLOSS=1 -DDUP=1 -DRESET=1",
    "-DTOPO=2 -DTOTAL=3 -DLOSS=1 -DDUP=1",
    "-DTOPO=3 -DTOTAL=2 -DLOSS=1 -DDUP=1",
    "-DTOPO=3 -DTOTAL=2 -DEARLY=1 -DAGE=1",
    "-DTOPO=3 -DTOTAL=1 -DLOSS=1 -DDUP=1 -DAGE=1 -DRESET=1",
    "-DTOPO=3 -DTOTAL=2 -DRAWSEQ=0 -DRAW_UNASKED=2 -DLOSS=1",
    "-DTOPO=4 -DTOTAL=2 -DLOSS=1",
    "-DTOPO=4 -DTOTAL=1 -DLOSS=1 -DDUP=1 -DEARLY=1",
    "-DTOPO=5 -DTOTAL=2 -DLOSS=1 -DDUP=1 -DEARLY=1",
]

TWICE = r"v>>4"
FOREIGN = r"v&256"
SHORT = r"v&511"
STUCK = r"fires<="

# The mistake, the configuration that meets it, and which property it must break (part of SPIN's message).
MISTAKES = [
    ("BUG_COLLISION_NOT_ADDED", "-DTOPO=1 -DTOTAL=2 -DNIDX=1 -DFOREIGN_HOLDS_ALL -DK=0", STUCK),
    ("BUG_PS_CLEARS_ECN", "-DTOPO=1 -DTOTAL=2 -DMARK=1", r"p>>19"),
    ("BUG_EDGE_FLIPS_TWICE", "-DTOPO=3 -DTOTAL=2", STUCK),
    ("BUG_FLAT_BITMAP", "-DTOPO=3 -DTOTAL=2", STUCK),
    ("BUG_DROP_ANY_OVERLAP", "-DTOPO=1 -DTOTAL=2 -DEARLY=1", STUCK),
    ("BUG_ADD_ANY_OVERLAP", "-DTOPO=1 -DTOTAL=2 -DEARLY=1", TWICE),
    ("BUG_FANIN1_IS_N", "-DTOPO=3 -DTOTAL=1 -DW=1 -DSPREAD -DK=0", STUCK),
    ("BUG_SEQUENCES_RESTART", "-DTOPO=1 -DTOTAL=5 -DDUP=1", FOREIGN),
    ("BUG_CLEAR_ON_COMPLETE", "-DTOPO=1 -DTOTAL=1 -DW=1 -DLOSS=1 -DLOSS_AFTER_FIRST_HOP -DK=1", STUCK),
    ("BUG_NO_ANSWERED_CACHE", "-DTOPO=1 -DTOTAL=2 -DLOSS=1", STUCK),
    ("BUG_LEVEL_NOT_IN_KEY", "-DTOPO=5 -DTOTAL=2", TWICE),
    ("BUG_NO_QUARANTINE", "-DTOPO=1 -DTOTAL=2", FOREIGN),
    # not in the notes' code, but the rules that the design adds must matter as well
    ("BUG_STALE_SAME_KEY_JOINS", "-DTOPO=1 -DTOTAL=5 -DDUP=1", FOREIGN),
    ("BUG_NO_STALE", "-DTOPO=1 -DTOTAL=2 -DDUP=1", r"g==0"),
    ("BUG_RESEND_IS_PLAIN", "-DTOPO=1 -DTOTAL=2 -DLOSS=1", STUCK),
    ("BUG_L1_COMBINES_PARTIAL", "-DTOPO=3 -DTOTAL=2 -DRESET=1", SHORT),
    ("BUG_FOREIGN_KEY_JOINS", "-DTOPO=1 -DTOTAL=2 -DFOREIGN=1", FOREIGN),
    ("BUG_REPEAT_ALLOCATES", "-DTOPO=1 -DTOTAL=2 -DLOSS=1 -DREPEATS_ONLY", STUCK),
]

# Sentences of the protocol's first text that the model refutes (docs/model.md tells the schedules).
REFUTED = [
    ("DOC_ANSWER_IS_REPLICATED", "-DTOPO=3 -DTOTAL=2 -DRESET=1", STUCK),
    ("DOC_ANSWER_IS_REPLICATED", "-DTOPO=4 -DTOTAL=1 -DRESET=1", STUCK),
    ("DOC_CORRECTION_TO_GROUP", "-DTOPO=1 -DTOTAL=2 -DRAWSEQ=0 -DRESET=1", STUCK),
]

# Infinite runs: none, so that the bounded liveness above is liveness. Configurations whose events can idle are
# left out.
ENDLESS = [
    "-DTOPO=1 -DTOTAL=2 -DLOSS=1 -DEARLY=1",
    "-DTOPO=3 -DTOTAL=1 -DLOSS=1 -DEARLY=1",
]


def holds(
    folder: Path, capsys: pytest.CaptureFixture[str], defines: str, *, fast: bool = False, compress: bool = False
) -> None:
    result = verify(folder, defines, fast=fast, compress=compress)
    show(capsys, defines, result)
    if result.violation:
        pytest.fail(f"{defines} breaks {result.violation}\n{trace(folder)}")
    assert result.complete, f"{defines} was not searched completely:\n{result.output}"


@needs_spin
@pytest.mark.parametrize("defines", FAULT_FREE)
def test_undisturbed_job_needs_no_timer(tmp_path: Path, capsys: pytest.CaptureFixture[str], defines: str) -> None:
    holds(tmp_path, capsys, defines)


@needs_spin
@pytest.mark.parametrize("defines", QUICK + REPEATS)
def test_no_schedule_breaks_the_protocol(tmp_path: Path, capsys: pytest.CaptureFixture[str], defines: str) -> None:
    holds(tmp_path, capsys, defines, fast=True)


@needs_spin
@pytest.mark.skipif(not DEEP, reason="larger configurations, minutes each: make -C tests/model deep")
@pytest.mark.timeout(VERIFIER_SECONDS + 60)
@pytest.mark.parametrize("defines", LARGE)
def test_no_schedule_breaks_the_protocol_deep(tmp_path: Path, capsys: pytest.CaptureFixture[str], defines: str) -> None:
    holds(tmp_path, capsys, defines, fast=True, compress=True)


@needs_spin
@pytest.mark.parametrize("defines", ENDLESS)
def test_no_run_is_infinite(tmp_path: Path, capsys: pytest.CaptureFixture[str], defines: str) -> None:
    result = verify(tmp_path, defines, cycles=True)
    show(capsys, defines + " (cycles)", result)
    assert not result.violation, f"{defines} can run for ever: {result.violation}"
    assert result.complete, f"{defines} was not searched completely:\n{result.output}"


@needs_spin
@pytest.mark.parametrize(("switch", "defines", "broken"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_known_mistake_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], switch: str, defines: str, broken: str
) -> None:
    must_break(tmp_path, capsys, switch, defines, broken)


@needs_spin
@pytest.mark.parametrize(("switch", "defines", "broken"), REFUTED)
def test_refuted_sentence_is_refuted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], switch: str, defines: str, broken: str
) -> None:
    must_break(tmp_path, capsys, switch, defines, broken)


def must_break(folder: Path, capsys: pytest.CaptureFixture[str], switch: str, defines: str, broken: str) -> None:
    """The switch breaks the property; the same configuration without it is sound."""
    mutant = folder / "mutant"
    sound = folder / "sound"
    mutant.mkdir()
    sound.mkdir()
    result = verify(mutant, f"{defines} -D{switch}")
    show(capsys, f"{defines} -D{switch}", result)
    assert re.search(broken, result.violation), (
        f"{switch} must break {broken}, and gave {result.violation or 'no violation'}\n{trace(mutant)}"
    )
    reference = verify(sound, defines)
    assert not reference.violation, f"{defines} fails without {switch} too: {reference.violation}\n{trace(sound)}"
    assert reference.complete
