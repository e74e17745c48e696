"""The loss of a training as a picture, drawn without any library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from twinkle.metric.records import EVAL, STEP, Records

PICTURE_FILE = "loss.svg"
WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 44
NUM_TICKS = 5
MAX_POINTS = 1500
SMOOTHED_POINTS = 25
"""A curve of more points is drawn faint, and its running mean over a twentieth of it in full."""

Points = Sequence[tuple[int, float]]


def draw_loss(records: Records, title: str) -> bytes | None:
    """An SVG of the loss by optimizer step, and of the evaluations' loss; None where there is nothing to draw."""
    steps = _thinned(records.series(STEP, "loss"))
    evaluations = records.series(EVAL, "loss")
    if not steps and not evaluations:
        return None
    canvas = _Canvas([*steps, *evaluations])
    parts = [canvas.axes(), f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}: loss by optimizer step</text>']
    is_smoothed = len(steps) > SMOOTHED_POINTS
    parts.append(canvas.line(steps, "#1f6fb2", width=1, opacity=0.3 if is_smoothed else 1))
    if is_smoothed:
        parts.append(canvas.line(_running_mean(steps, len(steps) // 20 + 1), "#1f6fb2", width=2, opacity=1))
    parts += [canvas.dot(point, "#c2410c") for point in evaluations]
    parts.append(canvas.line(evaluations, "#c2410c", width=1, opacity=0.6))
    parts.append(_legend([("training", "#1f6fb2")] + [("evaluation", "#c2410c")] * bool(evaluations)))
    body = "\n".join(part for part in parts if part)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    ).encode()


class _Canvas:
    """Where a step and a loss lie in the picture."""

    def __init__(self, points: Points) -> None:
        steps, losses = [step for step, _ in points], [loss for _, loss in points]
        self._first, self._last = min(steps), max(max(steps), min(steps) + 1)
        margin = (max(losses) - min(losses)) * 0.05 or abs(losses[0]) * 0.05 or 0.5
        self._low, self._high = min(losses) - margin, max(losses) + margin

    def _place(self, point: tuple[float, float]) -> tuple[float, float]:
        step, loss = point
        x = LEFT + (step - self._first) / (self._last - self._first) * (WIDTH - LEFT - RIGHT)
        y = TOP + (self._high - loss) / (self._high - self._low) * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)

    def axes(self) -> str:
        parts: list[str] = []
        for value in _ticks(self._low, self._high):
            _, y = self._place((self._first, value))
            parts.append(f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="#e5e7eb"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{value:g}</text>')
        for value in _ticks(self._first, self._last):
            if value != int(value):
                continue
            x, _ = self._place((value, self._low))
            parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{int(value)}</text>')
        base = HEIGHT - BOTTOM
        parts.append(f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}" stroke="#6b7280"/>')
        parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">step</text>')
        return "\n".join(parts)

    def line(self, points: Points, colour: str, *, width: int, opacity: float) -> str:
        if len(points) == 1:
            return self.dot(points[0], colour)
        places = " ".join(f"{x},{y}" for x, y in map(self._place, points))
        return (
            f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width}" opacity="{opacity}"/>'
            if points
            else ""
        )

    def dot(self, point: tuple[int, float], colour: str) -> str:
        x, y = self._place(point)
        return f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>'


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    return "\n".join(
        f'<text x="{WIDTH - RIGHT - 90 * index}" y="22" text-anchor="end" fill="{colour}">{name}</text>'
        for index, (name, colour) in enumerate(reversed(entries))
    )


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between two values."""
    rough = (high - low) / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / size)
    return [round(number * size, 12) for number in range(first, math.floor(high / size) + 1)]


def _thinned(points: Points) -> list[tuple[int, float]]:
    """At most so many points, each the mean of a stretch, at the stretch's last step."""
    size = -(-len(points) // MAX_POINTS)
    if size <= 1:
        return list(points)
    stretches = [points[start : start + size] for start in range(0, len(points), size)]
    return [(part[-1][0], sum(loss for _, loss in part) / len(part)) for part in stretches]


def _running_mean(points: Points, size: int) -> list[tuple[int, float]]:
    means: list[tuple[int, float]] = []
    total = 0.0
    for index, (step, loss) in enumerate(points):
        total += loss
        if index >= size:
            total -= points[index - size][1]
        means.append((step, total / min(index + 1, size)))
    return means
