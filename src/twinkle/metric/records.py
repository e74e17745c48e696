"""What a training writes beside its checkpoints: a line for each optimizer step and each report of metrics."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from twinkle.core.errors import InvalidInput

METRICS_FILE = "metrics.jsonl"
MAX_LINES = 20_000
STEP, TRAIN, EVAL = "step", "train", "eval"


@dataclass(frozen=True)
class Record:
    """One line: a step (``loss`` a token or a batch, ``learning_rate``, ``grad_norm``), or the metrics of a phase."""

    kind: str
    step: int
    time: float
    values: Mapping[str, float | str]

    def to_line(self) -> str:
        """The record as one flat JSON object; what is no finite number is null there."""
        when = datetime.fromtimestamp(self.time, UTC).isoformat()
        values = {name: _finite(value) for name, value in self.values.items()}
        return json.dumps({"kind": self.kind, "step": self.step, "time": when, **values})

    @classmethod
    def from_line(cls, line: str) -> Record:
        """The record that ``to_line`` wrote."""
        values = json.loads(line)
        kind, step, when = values.pop("kind"), values.pop("step"), values.pop("time")
        known = {name: math.nan if value is None else value for name, value in values.items()}
        return cls(str(kind), int(step), datetime.fromisoformat(when).timestamp(), known)


class Records:
    """The lines of one adapter's training, at most ``limit`` of them.

    When there are more, the older half of the steps is thinned: of two neighbours one line with their means is left.
    Reports of metrics stay as long as there are steps to thin.
    """

    def __init__(self, *, clock: Callable[[], float] = time.time, limit: int = MAX_LINES) -> None:
        self.lines: list[Record] = []
        self._clock = clock
        self._limit = limit

    def add(self, kind: str, step: int, values: Mapping[str, Any]) -> Record:
        """Add a line; values that are texts of numbers become numbers."""
        record = Record(kind, step, self._clock(), {name: _number(value) for name, value in values.items()})
        self.lines.append(record)
        if len(self.lines) > self._limit:
            self._thin()
        return record

    def series(self, kind: str, name: str) -> list[tuple[int, float]]:
        """Step and value of the lines of a kind that have a finite value of that name."""
        return [
            (line.step, value)
            for line in self.lines
            if line.kind == kind and isinstance(value := line.values.get(name), float) and math.isfinite(value)
        ]

    def to_file(self) -> bytes:
        """The lines as JSON, one each."""
        return "".join(f"{line.to_line()}\n" for line in self.lines).encode()

    def go_on_from(self, content: bytes) -> None:
        """Begin with the lines that ``to_file`` wrote.

        Raises:
            InvalidInput: They are damaged.
        """
        try:
            self.lines = [Record.from_line(line) for line in content.decode().splitlines()]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidInput(METRICS_FILE, f"is no file of records: {error}") from error

    def _thin(self) -> None:
        steps = [index for index, line in enumerate(self.lines) if line.kind == STEP]
        if len(steps) < 4:
            del self.lines[: len(self.lines) - self._limit]
            return
        older = steps[: len(steps) // 2]
        dropped: set[int] = set()
        for first, second in zip(older[0::2], older[1::2], strict=False):
            self.lines[second] = _merged(self.lines[first], self.lines[second])
            dropped.add(first)
        self.lines = [line for index, line in enumerate(self.lines) if index not in dropped]


def _merged(first: Record, second: Record) -> Record:
    values: dict[str, float | str] = {}
    for name, value in second.values.items():
        other = first.values.get(name, value)
        both = isinstance(value, float) and isinstance(other, float)
        values[name] = (value + other) / 2 if both else value  # type: ignore[operator]
    return Record(second.kind, second.step, second.time, values)


def _number(value: Any) -> float | str:
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def _finite(value: float | str) -> float | str | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value
