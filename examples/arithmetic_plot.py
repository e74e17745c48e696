"""Draws what `arithmetic_rl.py` measured: reward over steps, with a band over the tenants. Needs matplotlib.

python examples/arithmetic_plot.py examples/results/arithmetic_rl.jsonl examples/results/arithmetic_rl.png
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH_INCHES, HEIGHT_INCHES, DOTS_PER_INCH = 8.0, 4.0, 150
TRAINING_COLOUR, HELDOUT_COLOUR, CHANCE_COLOUR = "#1f5fa8", "#c8641b", "#555555"
STEPS_A_POINT = 5


@dataclass(frozen=True)
class Curve:
    """A quantity over steps: its mean over the tenants, and the least and the greatest of them."""

    steps: list[float]
    mean: list[float]
    least: list[float]
    greatest: list[float]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a metrics file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def curve(rows: Iterable[Mapping[str, Any]], name: str, *, num_steps: int = 1) -> Curve:
    """Returns one quantity of the rows that have it; each point is of `num_steps` steps, and stands amid them."""
    values: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.get(name) is not None:
            values[row["step"] // num_steps][row["seed"]].append(row[name])
    points = sorted(values)
    tenants = [[statistics.fmean(of_tenant) for of_tenant in values[point].values()] for point in points]
    return Curve(
        steps=[point * num_steps + (num_steps - 1) / 2 for point in points],
        mean=[statistics.fmean(means) for means in tenants],
        least=[min(means) for means in tenants],
        greatest=[max(means) for means in tenants],
    )


def draw_file(metrics_file: Path, target: Path) -> Path:
    """Writes the plot of a metrics file as `target`, a `.png` or `.svg` file; returns it."""
    settings, *rows = read_rows(metrics_file)
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.add_subplot()
    num_steps = settings["plan"]["steps"]
    # The row after the last step is of one batch alone, where the other points are of several.
    trained = [row for row in rows if row["step"] < num_steps]
    draw_curve(
        axes,
        curve(trained, "reward", num_steps=STEPS_A_POINT),
        f"sums trained on (points: mean of {STEPS_A_POINT} steps)",
        TRAINING_COLOUR,
    )
    draw_curve(axes, curve(rows, "heldout_reward"), "sums never trained on", HELDOUT_COLOUR)
    axes.axhline(
        settings["chance"], color=CHANCE_COLOUR, linestyle=":", linewidth=1.2, label="the answer to any other sum"
    )
    axes.set_xlabel("optimizer steps of reinforcement learning")
    axes.set_ylabel("reward (share of right answers)")
    num_tenants = len(settings["seeds"])
    axes.set_title(f"{num_tenants} tenants trained at once; line: mean, band: least to greatest tenant", fontsize=10)
    axes.set_ylim(0, 1)
    axes.set_xlim(0, num_steps)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(target)
    return target


def draw_curve(axes: Axes, values: Curve, label: str, colour: str) -> None:
    """Draws a line and its band."""
    axes.plot(values.steps, values.mean, color=colour, label=label, linewidth=1.8, marker="o", markersize=3.5)
    axes.fill_between(values.steps, values.least, values.greatest, color=colour, alpha=0.16, linewidth=0)


if __name__ == "__main__":
    draw_file(Path(sys.argv[1]), Path(sys.argv[2]))
