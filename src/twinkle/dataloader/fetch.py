"""Rows by number, with others in place of those that cannot be used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.utils.data

from twinkle.core.errors import InvalidInput
from twinkle.core.process.events import event_log
from twinkle.dataloader.order import RowOrder
from twinkle.dataset.base import DatasetBase
from twinkle.dataset.dataset import Dataset
from twinkle.dataset.problems import WrongRows

MOST_SKIPPED = 100
"""How many skipped rows are told by name; all are counted."""

log = event_log()


@dataclass(frozen=True)
class SkippedRow:
    """A row that raised or was None. ``name`` is file and line where they are known, else the row's number."""

    name: str
    reason: str


@dataclass
class Skipped:
    """Rows in whose place others were taken: how often (``count``, ``reasons``), and the first hundred by name, each
    once: a row comes again in the next pass, or as the one that is tried in place of another.
    """

    count: int = 0
    rows: list[SkippedRow] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, row: SkippedRow) -> None:
        """Count a row, and say so."""
        self.count += 1
        self.reasons[row.reason] += 1
        if len(self.rows) < MOST_SKIPPED and row not in self.rows:
            self.rows.append(row)
            log.warning("dataloader.row_skipped", row=row.name, reason=row.reason, next="another row takes its place")


@dataclass(frozen=True)
class Fetched:
    """What came of the numbers of one batch."""

    batch: Any
    rows: list[Any]
    skipped: list[SkippedRow]


class RowFetcher(torch.utils.data.Dataset[tuple[Any, list[SkippedRow]]]):
    """A data set by number that never raises for a row: it takes others instead, and tells which it skipped."""

    def __init__(self, rows: Any, order: RowOrder, pass_number: int, max_retries: int) -> None:
        self._rows = rows
        self._order = order
        self._pass_number = pass_number
        self._max_retries = max_retries

    def __getitem__(self, index: int) -> tuple[Any, list[SkippedRow]]:
        skipped: list[SkippedRow] = []
        for number in [index, *self._order.replacements(self._pass_number, index, self._max_retries).tolist()]:
            row, reason = taken(self._rows, number)
            if row is not None:
                return row, skipped
            skipped.append(SkippedRow(name_of(self._rows, number), reason))
        names = ", ".join(f"{row.name}: {row.reason}" for row in skipped[:3])
        raise InvalidInput(
            "dataset", f"none of {len(skipped)} rows tried in one place can be used; the first were {names}"
        )


class Collator:
    """What the processes of a loader make of the rows of a batch."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None) -> None:
        self._collate = collate

    def __call__(self, fetched: Sequence[tuple[Any, list[SkippedRow]]]) -> Fetched:
        rows = [row for row, _ in fetched]
        batch = rows if self._collate is None else self._collate(rows)
        return Fetched(batch, rows, [row for _, skipped in fetched for row in skipped])


def taken(rows: Any, number: int) -> tuple[Any, str]:
    """A row, or None and why."""
    try:
        row = rows.row(number) if isinstance(rows, Dataset) else rows[number]
    except Exception as error:  # noqa: BLE001 - whatever a data set of the user's raises is said of its row
        return None, reason_of(error)
    return row, "is None" if row is None else ""


def reason_of(error: Exception) -> str:
    """Why a row cannot be used, in a line."""
    if isinstance(error, WrongRows):
        problem = error.problems[0]
        return f"{problem.column}: {problem.reason}" if problem.column else problem.reason
    return f"{type(error).__name__}: {error}"


def name_of(rows: Any, number: int) -> str:
    """How a row is called."""
    return str(rows.place_of(number)) if isinstance(rows, Dataset) else f"row {number}"


def handed_out(rows: Any, batch: Sequence[Any]) -> None:
    """Tell a data set of ours which rows the script got."""
    if isinstance(rows, DatasetBase):
        rows.record(batch)
