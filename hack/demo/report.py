# SPDX-License-Identifier: Apache-2.0
"""The table that ends the demo, and build/demo/result.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Result:
    """What one demo measured. The names are a stable interface."""

    accuracy: float
    """Test accuracy over ATP, 0 to 1."""
    gloo_accuracy: float
    """Test accuracy of the same training over gloo, 0 to 1."""
    error_over_bound: float
    """Largest error of a summed element divided by n/(2s) plus one float32 ulp; at most 1."""
    aggregated_share: float
    """Share of gradient packets that the switch aggregated, 0 to 1."""
    mode: str
    collisions: int
    retransmits: int
    ecn_marks: int
    seconds: float
    """Wall time of the whole command."""

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    def table(self) -> str:
        rows = [
            ("test accuracy", f"{100 * self.accuracy:.2f} %", f"{100 * self.gloo_accuracy:.2f} %"),
            ("gradient packets summed in the switch", f"{100 * self.aggregated_share:.1f} %", "-"),
            ("largest error / bound", f"{self.error_over_bound:.3f}", "-"),
            ("mode", self.mode, "gloo"),
            ("collisions", str(self.collisions), "-"),
            ("retransmits", str(self.retransmits), "-"),
            ("ECN marks", str(self.ecn_marks), "-"),
        ]
        width = max(len(row[0]) for row in rows)
        lines = [f"  {'':{width}}  {'ATP':>12}  {'gloo':>12}"]
        lines += [f"  {name:{width}}  {atp:>12}  {gloo:>12}" for name, atp, gloo in rows]
        return "\n".join(lines)
