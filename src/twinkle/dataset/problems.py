"""Rows that are wrong: which, where they stand, and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from twinkle.core.errors import InvalidInput
from twinkle.data_format.row_error import RowError

MOST_PROBLEMS = 100
"""How many wrong rows are told by name; all are counted."""
MOST_IN_A_MESSAGE = 10


@dataclass(frozen=True)
class Place:
    """Where a row stands: ``line`` counts from 1 and is known for text files; ``row`` counts from 0."""

    file: str
    row: int | None
    line: int | None = None

    def __str__(self) -> str:
        if self.line is not None:
            return f"{self.file}:{self.line}"
        return self.file if self.row is None else f"{self.file}[{self.row}]"


@dataclass(frozen=True)
class Problem:
    """A row that is wrong. ``column`` is empty where the row as a whole is."""

    place: Place
    column: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.column}: {self.reason}" if self.column else f"{self.place}: {self.reason}"

    @property
    def kind(self) -> str:
        """What it has in common with others: the column and the reason without their numbers."""
        return re.sub(r"\d+", "N", f"{self.column}: {self.reason}" if self.column else self.reason)


class WrongRows(InvalidInput, ValueError):
    """Rows that cannot be read, mapped or encoded, told all at once before anything is trained on.

    ``problems`` holds the first hundred; ``count`` is how many were found, and ``is_whole`` whether all rows were
    looked at.
    """

    def __init__(self, problems: Sequence[Problem], *, count: int, doing: str, is_whole: bool = True) -> None:
        self.problems = tuple(problems[:MOST_PROBLEMS])
        self.count = count
        self.doing = doing
        self.is_whole = is_whole
        rows = f"{count} row{'s' if count != 1 else ''}" if is_whole else f"at least {count} rows"
        lines = [str(problem) for problem in self.problems[:MOST_IN_A_MESSAGE]]
        if count > len(lines):
            lines.append("all of them: `twinkle data check` on the command line, or dataset.report()")
        super().__init__("data", f"{rows} cannot be {doing}\n  " + "\n  ".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuilt, (self.problems, self.count, self.doing, self.is_whole)


def _rebuilt(problems: Sequence[Problem], count: int, doing: str, is_whole: bool) -> WrongRows:
    return WrongRows(problems, count=count, doing=doing, is_whole=is_whole)


class StreamBroken(InvalidInput, ValueError):
    """The rest of a stream cannot be read: nothing comes behind it, so it is no row that could be skipped."""


def problem_of(place: Place, error: Exception) -> Problem:
    """What an exception says about the row at ``place``: our own errors name the field."""
    if isinstance(error, RowError):
        return Problem(place, error.field, error.reason)
    if isinstance(error, InvalidInput):
        return Problem(place, error.field, error.message.removeprefix(f"{error.field}: "))
    if isinstance(error, KeyError):
        return Problem(place, str(error.args[0]) if error.args else "", "is missing")
    return Problem(place, "", f"{type(error).__name__}: {error}")


def counts_of(problems: Sequence[Problem]) -> Counter[str]:
    """How often each kind of problem came, the commonest first."""
    return Counter(problem.kind for problem in problems)
