# SPDX-License-Identifier: Apache-2.0
"""Measure every scenario of the simulator and draw the figures.

``python bench/simulator/figures.py [SCENARIO ..] [--runs N] [--out DIR]`` runs the real transport and switch core on
simulated networks, with seeds 1 to N. ``figures.json`` holds all results with their seeds; the SVG files show them.
"""

from __future__ import annotations

import argparse
import html
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCENARIOS = ["loss", "two-level", "sharing", "hash", "congestion", "fairness", "floor"]
COLOURS = ["#1f77b4", "#d95f02", "#7f7f7f"]


def measure(name: str, runs: int) -> dict[str, Any]:
    """Run one scenario.

    Raises:
        SystemExit: the simulator is missing or a property did not hold.
    """
    command = Path(sys.executable).parent / "atp-sim"
    if not command.exists():
        raise SystemExit(f"{command} is missing: see docs/simulator.md for how to build it")
    done = subprocess.run(
        [str(command), "scenario", name, "--runs", str(runs), "--json"], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(done.stderr.strip())
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def bars(title: str, unit: str, groups: list[tuple[str, list[tuple[str, float]]]]) -> str:
    """An SVG of grouped bars: (group, [(label, value), ...]), values from 0 up."""
    width, height, left, top, base = 720, 360, 60, 50, 300
    most = max(value for _, group in groups for _, value in group) or 1.0
    step = (width - left - 20) / sum(len(group) + 1 for _, group in groups)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
        ' font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="24" font-size="15">{html.escape(title)}</text>',
        f'<text x="{left}" y="42" fill="#555">{html.escape(unit)}</text>',
        f'<line x1="{left}" y1="{base}" x2="{width - 20}" y2="{base}" stroke="#333"/>',
    ]
    x = left + step / 2
    for name, group in groups:
        centre = x + step * len(group) / 2
        out.append(f'<text x="{centre:.0f}" y="{base + 38}" text-anchor="middle">{html.escape(name)}</text>')
        for i, (label, value) in enumerate(group):
            tall = (base - top - 20) * value / most
            out.append(
                f'<rect x="{x:.1f}" y="{base - tall:.1f}" width="{step * 0.85:.1f}" height="{tall:.1f}" '
                f'fill="{COLOURS[i % len(COLOURS)]}"/>'
            )
            middle = x + step * 0.42
            out.append(f'<text x="{middle:.0f}" y="{base - tall - 5:.1f}" text-anchor="middle">{value:.3g}</text>')
            out.append(f'<text x="{middle:.0f}" y="{base + 18}" text-anchor="middle">{html.escape(label)}</text>')
            x += step
        x += step
    return "\n".join([*out, "</svg>\n"])


def draw(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """SVG by file name."""
    loss = results["loss"]
    relative = [
        ("ATP", loss["atp_relative_goodput"]),
        ("SwitchML, many tensors", loss["switchml_relative_goodput"]),
        ("SwitchML, one tensor", loss["switchml_one_tensor_relative_goodput"]),
    ]
    levels = results["two-level"]["ps_traffic_reduction_by_racks"]
    sharing, hashed, control = results["sharing"], results["hash"], results["congestion"]
    return {
        "loss.svg": bars(
            "Goodput with loss on every link, relative to none",
            "8 workers, 100 Gbit/s",
            [(f"{p} %", [(name, values[p]) for name, values in relative]) for p in ["0.001", "0.01", "0.1", "1"]],
        ),
        "two-level.svg": bars(
            "Bytes that the PS need not receive, two levels against one",
            "share",
            [("racks", [(racks, levels[racks]) for racks in sorted(levels, key=int)])],
        ),
        "sharing.svg": bars(
            "Three jobs on a third of their aggregators",
            "Gbit/s a job, computation included",
            [("", [("shared", sharing["dynamic_gbit"]), ("reserved", sharing["static_gbit"])])],
        ),
        "hash.svg": bars(
            "Eight jobs, indexes hashed or linear",
            "Gbit/s a job",
            [("", [("hashed", hashed["hash_gbit"]), ("linear", hashed["linear_gbit"])])],
        ),
        "congestion.svg": bars(
            "Half of the aggregators that three jobs hold at their peak, congestion control on and off",
            "Gbit/s at 10 Gbit/s",
            [("", [("plenty", control["plenty"]), ("with", control["with"]), ("without", control["without"])])],
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="only these; the others stay as they were")
    parser.add_argument("--runs", type=int, default=3, help="seeds per scenario (default 3)")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    arguments = parser.parse_args()
    results = json.loads((arguments.out / "figures.json").read_text()) if arguments.scenarios else {}
    for name in arguments.scenarios or SCENARIOS:
        results[name] = measure(name, arguments.runs)
        print(json.dumps(results[name]), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "figures.json").write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    for file, svg in draw(results).items():
        (arguments.out / file).write_text(svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
