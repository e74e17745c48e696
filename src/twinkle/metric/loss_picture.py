"""The loss of a training as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from twinkle.metric.canvas import Canvas, Place, SvgCanvas
from twinkle.metric.records import EVAL, STEP, Records

SVG_FILE, PNG_FILE = "loss.svg", "loss.png"
TRAINING, EVALUATION = "#1f6fb2", "#c2410c"
WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 44
NUM_TICKS = 5
MAX_POINTS = 1500
SMOOTHED_POINTS = 25
"""A curve of more points is drawn faint, and its running mean over a twentieth of it in full."""

Points = Sequence[tuple[int, float]]


def draw_loss(records: Records, title: str) -> dict[str, bytes]:
    """Pictures, by their files' names, of the loss by optimizer step and of the evaluations' loss; none for nothing."""
    steps = _thinned(records.series(STEP, "loss"))
    evaluations = records.series(EVAL, "loss")
    if not steps and not evaluations:
        return {}
    pages = {name: make(WIDTH, HEIGHT) for name, make in _canvases().items()}
    for page in pages.values():
        _draw(page, steps, evaluations, title)
    return {name: page.content() for name, page in pages.items()}


def _canvases() -> Mapping[str, type[Canvas]]:
    """An SVG, and a PNG where Pillow is installed, which training alone does not need."""
    try:
        from twinkle.metric.png_canvas import PngCanvas  # noqa: PLC0415
    except ModuleNotFoundError:
        return {SVG_FILE: SvgCanvas}
    return {SVG_FILE: SvgCanvas, PNG_FILE: PngCanvas}


def _draw(page: Canvas, steps: Points, evaluations: Points, title: str) -> None:
    frame = _Frame([*steps, *evaluations])
    _draw_axes(page, frame)
    page.text((LEFT, 22), f"{title}: loss by optimizer step", size=15)
    is_smoothed = len(steps) > SMOOTHED_POINTS
    _draw_curve(page, frame, steps, TRAINING, opacity=0.3 if is_smoothed else 1)
    if is_smoothed:
        _draw_curve(page, frame, _running_mean(steps, len(steps) // 20 + 1), TRAINING, width=2)
    for point in evaluations:
        page.dot(frame.place(point), EVALUATION)
    _draw_curve(page, frame, evaluations, EVALUATION, opacity=0.6)
    names = [("training", TRAINING)] + [("evaluation", EVALUATION)] * bool(evaluations)
    for index, (name, colour) in enumerate(reversed(names)):
        page.text((WIDTH - RIGHT - 90 * index, 22), name, anchor="end", colour=colour)


class _Frame:
    """Where a step and a loss lie on the page."""

    def __init__(self, points: Points) -> None:
        steps, losses = [step for step, _ in points], [loss for _, loss in points]
        self.first, self.last = min(steps), max(max(steps), min(steps) + 1)
        margin = (max(losses) - min(losses)) * 0.05 or abs(losses[0]) * 0.05 or 0.5
        self.low, self.high = min(losses) - margin, max(losses) + margin

    def place(self, point: tuple[float, float]) -> Place:
        step, loss = point
        x = LEFT + (step - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)
        y = TOP + (self.high - loss) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)


def _draw_axes(page: Canvas, frame: _Frame) -> None:
    base = HEIGHT - BOTTOM
    for value in _ticks(frame.low, frame.high):
        _, y = frame.place((frame.first, value))
        page.line([(LEFT, y), (WIDTH - RIGHT, y)], "#e5e7eb")
        page.text((LEFT - 8, y + 4), f"{value:g}", anchor="end")
    for value in _ticks(frame.first, frame.last):
        if value == int(value):
            page.text((frame.place((value, frame.low))[0], base + 18), str(int(value)), anchor="middle")
    page.line([(LEFT, base), (WIDTH - RIGHT, base)], "#6b7280")
    page.text((WIDTH - RIGHT, HEIGHT - 8), "step", anchor="end")


def _draw_curve(
    page: Canvas, frame: _Frame, points: Points, colour: str, *, width: int = 1, opacity: float = 1
) -> None:
    places = [frame.place(point) for point in points]
    if len(places) == 1:
        page.dot(places[0], colour)
    elif places:
        page.line(places, colour, width=width, opacity=opacity)


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
