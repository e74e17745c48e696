"""Batches of a stream, from any of its rows on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.dataloader.fetch import Skipped, SkippedRow, reason_of
from twinkle.dataset.base import DatasetBase
from twinkle.dataset.problems import StreamBroken, WrongRows


class StreamReader:
    """Reads rows of a stream, over and over; a row that raises or is None is skipped, and the next one taken."""

    def __init__(self, stream: Iterable[Any], max_retries: int, skipped: Skipped) -> None:
        self._stream = stream
        self._max_retries = max_retries
        self._skipped = skipped
        self._in_whole_passes = 0

    def take_whole_passes(self) -> int:
        """How many of the rows left out were of passes before; told once."""
        told, self._in_whole_passes = self._in_whole_passes, 0
        return told

    def rows(self, skip: int) -> Iterator[Any]:
        """The rows of one pass, after ``skip`` of this and perhaps of passes before."""
        rows, read = self._start(), 0
        while skip:
            try:
                self._next(rows)
            except StopIteration:
                if not read:
                    raise InvalidInput("dataset", "has no rows to skip") from None
                self._in_whole_passes += read
                rows, read = self._start(), 0
                continue
            skip, read = skip - 1, read + 1
        while True:
            try:
                yield self._next(rows)
            except StopIteration:
                return

    def _start(self) -> Iterator[Any]:
        return self._stream.unrecorded() if isinstance(self._stream, DatasetBase) else iter(self._stream)

    def _next(self, rows: Iterator[Any]) -> Any:
        for _ in range(self._max_retries + 1):
            try:
                row = next(rows)
            except (StopIteration, StreamBroken):
                raise
            except Exception as error:  # noqa: BLE001 - whatever a data set of the user's raises is said of its row
                name = str(error.problems[0].place) if isinstance(error, WrongRows) else "a row"
                self._skipped.add(SkippedRow(name, reason_of(error)))
                continue
            if row is not None:
                return row
            self._skipped.add(SkippedRow("a row", "is None"))
        raise InvalidInput("dataset", f"{self._max_retries + 1} rows of the stream in a row cannot be used")
