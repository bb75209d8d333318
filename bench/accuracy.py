# SPDX-License-Identifier: Apache-2.0
"""What scale Auto keeps: sums and trainings over gloo, over atp with a fixed scale, and over atp with Auto.

    bench/accuracy.py                  # all three in one run to build/accuracy/result.json, about ten minutes
    bench/accuracy.py --parts sums     # only sums of N(0, sigma)
    bench/accuracy.py --emulate        # the same sums by arithmetic alone, without torch or sidecars
    bench/accuracy.py --plot           # docs/images/scale.svg from the last result

Ranks are processes of torch 2 (bench/accuracy_rank.py) on this machine, each with a sidecar of its own, mode HostOnly.
Prints a JSON line a figure, and at the end the tables of docs/scale.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for folder in ("tests/sidecar", "hack"):
    sys.path.insert(0, str(ROOT / folder))

RESULT = ROOT / "build" / "accuracy" / "result.json"
PLOT = ROOT / "docs" / "images" / "scale.svg"
FIXED = 1e8
SETTINGS: dict[str, float | str | None] = {"gloo": None, "fixed": FIXED, "auto": "Auto"}
NAMES = {"gloo": "gloo", "fixed": "atp, scale 1e8", "auto": "atp, scale Auto"}
RANKS = {"sums": 4, "digits": 4, "transformer": 2}
Row = dict[str, Any]


def auto_scale(largest: float, ranks: int) -> float:
    """The scale that ranks agree on: with 2^e above `largest`, the largest power of two s with ranks * 2^e * s <= 2^31.

    Args:
        largest: the largest finite magnitude at any rank, a float32 above the subnormal ones.
        ranks: at most 128 (above, one bit less: see fixed.rs).
    """
    return 2.0 ** (31 - (ranks - 1).bit_length() - math.frexp(largest)[1])


def emulate(ranks: int, elements: int = 1 << 18) -> list[Row]:
    """Sums of N(0, sigma) in float32 (gloo), and in integers with both scales."""
    import numpy as np

    rows = []
    generator = np.random.default_rng(1)
    for exponent in range(-3, -10, -1):
        sigma = 10.0**exponent
        parts = [(generator.standard_normal(elements) * sigma).astype(np.float32) for _ in range(ranks)]
        exact = np.stack(parts).astype(np.float64).sum(0)
        largest = max(float(np.abs(part).max()) for part in parts)
        sums: dict[str, Any] = {"gloo": np.stack(parts).sum(0)}
        for setting, scale in (("fixed", FIXED), ("auto", auto_scale(largest, ranks))):
            total = np.rint(np.stack(parts).astype(np.float64) * scale).sum(0)
            assert float(np.abs(total).max()) < 2**31
            sums[setting] = (total / scale).astype(np.float32)
        for setting, got in sums.items():
            error = np.linalg.norm(got.astype(np.float64) - exact) / np.linalg.norm(exact)
            to_zero = float(((got == 0) & (exact != 0)).mean())
            rows.append(
                {"setting": setting, "part": "sums", "sigma": sigma, "relative_error": float(error), "to_zero": to_zero}
            )
    return rows


def start(python: str, backend: str, part: str, sockets: list[Path | None]) -> list[Row]:
    """Runs one part in a process a rank and returns the lines of rank 0.

    Raises:
        RuntimeError: a rank has failed; the text is what it printed last.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        **os.environ,
        "WORLD_SIZE": str(len(sockets)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "client"),
    }
    command = [python, str(ROOT / "bench" / "accuracy_rank.py"), backend, part]
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank, path in enumerate(sockets):
            environment = {**common, "RANK": str(rank), **({} if path is None else {"ATP_SOCKET": str(path)})}
            log = (Path(folder) / str(rank)).open("wb")
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        try:
            for rank, process in enumerate(processes):
                if process.wait():
                    text = (Path(folder) / str(rank)).read_text()
                    raise RuntimeError(
                        f"{backend}, {part}: rank {rank} ended with {process.returncode}:\n{text[-3000:]}"
                    )
        finally:
            for process in processes:
                process.kill()
                process.wait()
        lines = (Path(folder) / "0").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def measure(settings: Iterable[str], parts: Iterable[str]) -> list[Row]:
    """Runs each part in each setting; prints a line for each figure."""
    from atp_harness import Job
    from torchenv import interpreter

    python = str(interpreter("newest"))
    rows = []
    for part in parts:
        ranks = RANKS[part]
        for setting in settings:
            if SETTINGS[setting] is None:
                made = start(python, "gloo", part, [None] * ranks)
            else:
                with (
                    tempfile.TemporaryDirectory() as folder,
                    Job(
                        Path(folder), ranks, scale=SETTINGS[setting], stallTimeoutSeconds=60, valuesPerPacket=350
                    ) as job,
                ):
                    made = start(python, "atp", part, [worker.socket for worker in job.workers])
            for row in made:
                rows.append({"setting": setting, "ranks": ranks, **row})
                print(json.dumps(rows[-1]), flush=True)
    return rows


def _short(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.1e}".replace("e-0", "e-") if value < 0.01 else f"{value:.2g}"


def _share(value: float) -> str:
    return "0" if value == 0 else f"{100 * value:.0f} %" if value >= 0.1 else f"{100 * value:.2g} %"


def table(rows: list[Row], part: str, key: str, head: str, cell: str) -> str:
    """A Markdown table: one line for each value of `key`, one column a setting."""
    chosen = [row for row in rows if row["part"] == part]
    settings = [name for name in SETTINGS if any(row["setting"] == name for row in chosen)]
    lines = [f"| {head} | " + " | ".join(NAMES[name] for name in settings) + " |", "|---" * (len(settings) + 1) + "|"]
    for value in dict.fromkeys(row[key] for row in chosen):
        cells = []
        for name in settings:
            found = next((row for row in chosen if row["setting"] == name and row[key] == value), None)
            cells.append("-" if found is None else _cell(found, cell))
        lines.append(f"| {value:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(row: Row, cell: str) -> str:
    errors = f"{_short(row['relative_error'])}, {_share(row['to_zero'])}"
    if cell == "errors":
        return errors
    value = f"{100 * row['accuracy']:.1f} %" if cell == "accuracy" else f"{row['loss']:.3f}"
    return f"{value}; {errors}"


def tables(rows: list[Row]) -> str:
    """All tables of docs/scale.md."""
    kinds = [
        ("sums", "sigma", "sigma", "errors"),
        ("mixed", "small", "small half", "errors"),
        ("digits", "loss_scale", "loss times", "accuracy"),
        ("transformer", "loss_scale", "loss times", "loss"),
    ]
    present = {row["part"] for row in rows}
    return "\n\n".join(f"{kind[0]}\n\n{table(rows, *kind)}" for kind in kinds if kind[0] in present)


def plot(rows: list[Row]) -> None:
    """Draws the sums' errors, the digits' accuracy and the transformer's loss to docs/images/scale.svg."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "atp", "svg.fonttype": "none"})  # the same figures give the same file
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6))
    panels = [
        (axes[0], "sums", "sigma", "relative_error", "sigma of the summed values", "relative error of the sum"),
        (axes[1], "digits", "loss_scale", "accuracy", "loss multiplied by", "digits: test accuracy"),
        (axes[2], "transformer", "loss_scale", "loss", "loss multiplied by", "transformer: test loss, nats"),
    ]
    styles = {"gloo": ("o-", "#777777"), "fixed": ("s--", "#c44e52"), "auto": ("x:", "#1f6f8b")}
    for axis, part, x, y, label, title in panels:
        for setting, (style, color) in styles.items():
            points = [(row[x], row[y]) for row in rows if row["part"] == part and row["setting"] == setting]
            if points:
                axis.plot(*zip(*points, strict=True), style, color=color, label=NAMES[setting])
        axis.set_xscale("log")
        axis.invert_xaxis()
        axis.set_xlabel(label)
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].set_yscale("log")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    PLOT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PLOT, metadata={"Date": None})


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Accuracy of sums and trainings at small magnitudes.")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--parts", nargs="+", choices=list(RANKS), default=list(RANKS))
    parser.add_argument("--emulate", action="store_true", help="sums by arithmetic alone")
    parser.add_argument("--plot", action="store_true", help="draw the last result")
    arguments = parser.parse_args()
    if arguments.plot:
        plot(json.loads(RESULT.read_text())["rows"])
        return
    if arguments.emulate:
        print(tables(emulate(RANKS["sums"])))
        return
    rows = measure(arguments.settings, arguments.parts)
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    print(tables(rows))


if __name__ == "__main__":
    main()
