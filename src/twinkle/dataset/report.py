"""What a person wants to know of rows before a device is busy with them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from twinkle.core.errors import InvalidInput
from twinkle.dataset.preview import Piece, pieces_of
from twinkle.dataset.problems import MOST_PROBLEMS, Place, Problem, problem_of
from twinkle.dataset.source import ORIGIN
from twinkle.dataset.steps import Encode, Row, Step, is_check, run_steps
from twinkle.infra.progress import track
from twinkle.template import Template

NUM_BINS = 10
NUM_PREVIEWED = 2


@dataclass(frozen=True)
class Bin:
    """Rows whose number of tokens is from ``first`` to ``last``."""

    first: int
    last: int
    count: int


@dataclass(frozen=True)
class Preview:
    """A row as the model reads it, in pieces that train or do not."""

    place: Place
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Cut:
    """What truncation does."""

    strategy: str
    max_length: int | None
    rows: int
    """Rows that are too long."""
    tokens: int
    """Tokens of theirs that are lost; with ``split`` none are."""
    training_tokens: int
    """Those among the lost tokens that would have trained."""


@dataclass
class Report:
    """What is wrong with rows, and what the others hold. ``str()`` of it is for people, ``to_dict()`` for programs."""

    rows: int = 0
    """Rows looked at, wrong ones among them."""
    num_wrong: int = 0
    problems: list[Problem] = field(default_factory=list)
    """The first hundred."""
    counts: Counter[str] = field(default_factory=Counter)
    """How often each kind of problem came."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each row that became tokens, of each conversation in it by itself, before truncation."""
    training_tokens: int = 0
    untrained: int = 0
    """Rows of which no token trains."""
    cut: Cut | None = None
    previews: list[Preview] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens of all rows that became tokens, before truncation."""
        return sum(self.lengths)

    def histogram(self) -> list[Bin]:
        """How many rows are how long, in bins of equal width."""
        if not self.lengths:
            return []
        width = max(1, -(-max(self.lengths) // NUM_BINS))
        counts = np.bincount((np.array(self.lengths) - 1) // width, minlength=1)
        return [Bin(index * width + 1, (index + 1) * width, int(count)) for index, count in enumerate(counts)]

    def percentile(self, percent: float) -> int:
        """So many in a hundred rows are no longer than this."""
        return int(np.percentile(self.lengths, percent, method="higher")) if self.lengths else 0

    def add_problem(self, problem: Problem) -> None:
        """Count a row that is wrong."""
        self.num_wrong += 1
        self.counts[problem.kind] += 1
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(problem)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "rows": self.rows,
            "wrong": self.num_wrong,
            "problems": [
                {
                    "file": problem.place.file,
                    "line": problem.place.line,
                    "row": problem.place.row,
                    "column": problem.column,
                    "reason": problem.reason,
                }
                for problem in self.problems
            ],
            "counts": dict(self.counts.most_common()),
            "tokens": {
                "all": self.tokens,
                "training": self.training_tokens,
                "longest": max(self.lengths, default=0),
                "median": self.percentile(50),
                "p95": self.percentile(95),
                "rows_without_training": self.untrained,
                "histogram": [{"from": part.first, "to": part.last, "rows": part.count} for part in self.histogram()],
            },
            "truncation": None if self.cut is None else vars(self.cut),
            "preview": [
                {
                    "file": preview.place.file,
                    "line": preview.place.line,
                    "row": preview.place.row,
                    "pieces": [vars(piece) for piece in preview.pieces],
                }
                for preview in self.previews
            ],
        }

    def __str__(self) -> str:
        return "\n".join([*self._told_problems(), *self._told_lengths(), *self._told_previews()])

    def _told_problems(self) -> list[str]:
        if not self.num_wrong:
            return [f"{_rows(self.rows)}, none wrong"]
        lines = [f"{_rows(self.rows)}, {self.num_wrong} wrong"]
        lines += [f"  {count:>7}  {kind}" for kind, count in self.counts.most_common(MOST_PROBLEMS)]
        lines.append("wrong rows" if self.num_wrong <= MOST_PROBLEMS else f"the first {MOST_PROBLEMS} wrong rows")
        return lines + [f"  {problem}" for problem in self.problems]

    def _told_lengths(self) -> list[str]:
        if not self.lengths:
            return []
        lines = [
            f"tokens: {self.tokens} in all, {self.training_tokens} train; a row has {self.percentile(50)} (median),"
            f" {self.percentile(95)} (95 %), {max(self.lengths)} (longest)"
        ]
        most = max(part.count for part in self.histogram())
        for part in self.histogram():
            bar = "#" * -(-part.count * 40 // most)
            lines.append(f"  {part.first:>7} to {part.last:>7}  {part.count:>7}  {bar}".rstrip())
        if self.untrained:
            lines.append(f"{_rows(self.untrained)} {'has' if self.untrained == 1 else 'have'} no token that trains")
        if self.cut is not None and self.cut.max_length is not None:
            lines.append(_told_cut(self.cut))
        return lines

    def _told_previews(self) -> list[str]:
        if not self.previews:
            return []
        lines = ["which tokens train: those in [[ ]]"]
        for preview in self.previews:
            text = "".join(f"[[{piece.text}]]" if piece.trains else piece.text for piece in preview.pieces)
            lines += [str(preview.place), *(f"  {line}" for line in text.split("\n"))]
        return lines


def _told_cut(cut: Cut) -> str:
    if not cut.rows:
        return f"no row is longer than max_length {cut.max_length}"
    does = {
        "raise": "refused by encode()",
        "delete": f"deleted, {cut.tokens} tokens in all, {cut.training_tokens} of which train",
        "split": "cut into several rows",
    }.get(cut.strategy, f"{cut.tokens} tokens are cut off ({cut.strategy}), {cut.training_tokens} of which train")
    return f"{_rows(cut.rows)} {'is' if cut.rows == 1 else 'are'} longer than max_length {cut.max_length}: {does}"


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


class Reported(Protocol):
    """Rows to look at, with what is still to be done to them."""

    def undone(self) -> Iterator[tuple[Row, Sequence[Step]]]:
        """All rows, with their origin, and their steps."""
        ...

    def num_undone(self) -> int | None:
        """How many rows ``undone`` has; None for a stream."""
        ...

    def place(self, origin: int) -> Place:
        """Where the row of an origin comes from."""
        ...


def report_of(
    dataset: Reported, template: Template | None, unreadable: Sequence[Problem], *, limit: int | None = None
) -> Report:
    """Look at the rows of a data set; see :meth:`Dataset.report`."""
    report = Report()
    for problem in unreadable:
        report.rows += 1
        report.add_problem(problem)
    measure = None if template is None else _Measure(report, template)
    with track("report", total=dataset.num_undone() if limit is None else limit) as progress:
        for seen, (row, steps) in enumerate(dataset.undone()):
            if seen == limit:
                break
            report.rows += 1
            progress.advance()
            place = dataset.place(row.get(ORIGIN, -1))
            try:
                _look_at(row, steps, place, report, measure)
            except Exception as error:  # noqa: BLE001 - whatever a preprocessor of the user's raises is said of its row
                report.add_problem(problem_of(place, error))
    if measure is not None:
        report.cut = measure.cut()
    return report


def _look_at(row: Row, steps: Sequence[Step], place: Place, report: Report, measure: _Measure | None) -> None:
    before = [step for step in steps if not isinstance(step, Encode) and not is_check(step)]
    for made in run_steps(row, before):
        del made[ORIGIN]
        encoded = list(_token_rows(made))
        if encoded:
            _add_lengths(report, encoded)
            if measure is not None:
                measure.show(place, encoded)
        elif measure is None:
            raise InvalidInput("template", "is not set; call set_template before report()")
        else:
            measure.add(made, place)


class _Measure:
    """Tries a template on rows that are not encoded yet."""

    def __init__(self, report: Report, template: Template) -> None:
        self._report = report
        self._template = template
        self._whole = copy.copy(template)
        self._whole.max_length = None
        self._num_long = self._lost = self._lost_training = 0

    def add(self, row: Row, place: Place) -> None:
        """Measure a row, and see what truncation makes of it."""
        whole = [part for encoded in self._whole.batch_encode([row]) for part in _token_rows(encoded)]
        limit = self._template.max_length
        if limit is not None and any(len(part["input_ids"]) > limit for part in whole):
            self._num_long += 1
            if self._template.truncation_strategy == "raise":
                longest = max(len(part["input_ids"]) for part in whole)
                self._report.add_problem(
                    Problem(place, "", f"is {longest} tokens long, max_length is {limit}; see truncation_strategy")
                )
            else:
                kept = [part for encoded in self._template.batch_encode([row]) for part in _token_rows(encoded)]
                self._lost += _num_tokens(whole) - _num_tokens(kept)
                self._lost_training += _num_training(whole) - _num_training(kept)
        _add_lengths(self._report, whole)
        self.show(place, whole)

    def show(self, place: Place, encoded: Iterable[Mapping[str, Any]]) -> None:
        """Keep the first rows for the preview."""
        for part in encoded:
            if len(self._report.previews) < NUM_PREVIEWED:
                self._report.previews.append(Preview(place, tuple(pieces_of(part, self._template))))

    def cut(self) -> Cut:
        """What truncation did."""
        strategy, limit = self._template.truncation_strategy, self._template.max_length
        return Cut(strategy, limit, self._num_long, self._lost, self._lost_training)


def _token_rows(row: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """The encoded rows in a row: itself, or the conversations that lie in it."""
    if row.get("input_ids") is not None:
        return [row]
    return [part for part in row.values() if isinstance(part, Mapping) and part.get("input_ids") is not None]


def _num_tokens(parts: Iterable[Mapping[str, Any]]) -> int:
    return sum(len(part["input_ids"]) for part in parts)


def _num_training(parts: Iterable[Mapping[str, Any]]) -> int:
    return sum(int((np.asarray(part["labels"]) >= 0).sum()) for part in parts if part.get("labels") is not None)


def _add_lengths(report: Report, encoded: Sequence[Mapping[str, Any]]) -> None:
    trained = _num_training(encoded)
    report.lengths += [len(part["input_ids"]) for part in encoded]
    report.training_tokens += trained
    report.untrained += trained == 0
