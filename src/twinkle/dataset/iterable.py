"""Rows that are read, mapped and encoded while they are taken, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from twinkle.dataset.base import DatasetBase
from twinkle.dataset.member import Member
from twinkle.dataset.open import READ_ERRORS, unreadable_lines
from twinkle.dataset.problems import MOST_IN_A_MESSAGE, StreamBroken, WrongRows
from twinkle.dataset.source import ORIGIN
from twinkle.dataset.steps import Keep, Row, Step


class IterableDataset(DatasetBase):
    """A stream of rows: no number of them is known, and none can be taken by number.

    A row that cannot be mapped or encoded raises :class:`WrongRows` when its turn comes; whoever asks the same iterator
    again gets the next row, as a ``DataLoader`` does. Where a file cannot be read further it raises
    :class:`StreamBroken`, which a ``DataLoader`` lets through.

    For the arguments see :class:`~twinkle.dataset.base.DatasetBase`.
    """

    _streams = True
    _interleaves = False

    def mix_dataset(self, interleave: bool = True) -> None:
        """Make one of all members: a row of each in turn until the first ends, or one member after the other."""
        self._interleaves = interleave
        self.is_mixed = True

    @property
    def dataset(self) -> Any:
        """The rows as they are before anything is done to them, as a data set of Hugging Face's."""
        return self.only.rows.remove_columns(ORIGIN)

    def __iter__(self) -> Iterator[Row]:
        return _Recorded(self, self.stream())

    def unrecorded(self) -> Iterator[Row]:
        """See :class:`~twinkle.dataset.base.DatasetBase`."""
        return self.stream()

    def stream(self) -> Iterator[Row]:
        """The rows from the first on."""
        members = self.members if self.is_mixed else [self.only]
        streams = [_MemberStream(self, member) for member in members]
        return _InTurn(streams) if self._interleaves else _OneByOne(streams)

    def _do(self, step: Step, member: Member, *, load_from_cache_file: bool, **options: Any) -> None:
        member.steps.append(step)

    def _keep(self, step: Keep, member: Member, **options: Any) -> None:
        member.steps.append(step)


# Iterators with a __next__ of their own, since a generator that has raised is over.


class _MemberStream(Iterator[Row]):
    def __init__(self, dataset: IterableDataset, member: Member) -> None:
        self._dataset = dataset
        self._steps = member.steps
        self._rows = iter(member.rows)
        self._waiting: list[Row] = []
        self._broken: StreamBroken | None = None

    def __next__(self) -> Row:
        while not self._waiting:
            made, problem = self._dataset.tried(self._read(), self._steps)
            if problem is not None:
                raise WrongRows([problem], count=1, doing="taken")
            self._waiting = made
        row = self._waiting.pop(0)
        return {name: value for name, value in row.items() if name != ORIGIN}

    def _read(self) -> Row:
        if self._broken is not None:
            raise self._broken
        try:
            row: Row = next(self._rows)
        except READ_ERRORS as error:
            self._broken = self._told(error)
            raise self._broken from error
        return row

    def _told(self, error: Exception) -> StreamBroken:
        """What cannot be read, by its lines where it has some."""
        wrong = [problem for source in self._dataset.sources for problem in unreadable_lines(source.files)]
        if not wrong:
            return StreamBroken("data", f"cannot be read further: {error.__cause__ or error}")
        lines = "\n  ".join(str(problem) for problem in wrong[:MOST_IN_A_MESSAGE])
        return StreamBroken(
            "data", f"cannot be read further; mend these lines, or leave them out with skip_unreadable=True\n  {lines}"
        )


class _InTurn(Iterator[Row]):
    def __init__(self, streams: list[_MemberStream]) -> None:
        self._streams = streams
        self._turn = 0

    def __next__(self) -> Row:
        row = next(self._streams[self._turn])
        self._turn = (self._turn + 1) % len(self._streams)
        return row


class _OneByOne(Iterator[Row]):
    def __init__(self, streams: list[_MemberStream]) -> None:
        self._streams = streams

    def __next__(self) -> Row:
        while self._streams:
            try:
                return next(self._streams[0])
            except StopIteration:
                self._streams = self._streams[1:]
        raise StopIteration


class _Recorded(Iterator[Row]):
    def __init__(self, dataset: IterableDataset, rows: Iterator[Row]) -> None:
        self._dataset = dataset
        self._rows = rows

    def __next__(self) -> Row:
        row = next(self._rows)
        self._dataset.record([row])
        return row
