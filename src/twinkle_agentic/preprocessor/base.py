"""What a quality filter is."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, overload

from twinkle.data_format.columns import Columns
from twinkle.preprocessor import Preprocessor
from twinkle.reward.base import text_of

Row = Mapping[str, Any]
KEY_ROUNDS = "key_rounds"
"""In ``user_data`` the numbers of the messages that train."""
THINKING, THOUGHT = (re.compile(rf"<{end}think(?:ing)?>", re.IGNORECASE) for end in ("", "/"))


class QualityFilter(Preprocessor):
    """Drops rows of trajectories; for a data set's ``map``. ``dropped`` counts them by reason.

    A filter brings ``reason``; one that only mends texts brings ``mend``. It takes columns, as ``map`` sends them, or a
    list of rows.
    """

    adds: tuple[str, ...] = ()
    """Columns that it notes something in; they are there even where no row of a batch stays."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        self._left: list[Row] = []

    @overload
    def __call__(self, columns: Mapping[str, Sequence[Any]]) -> Columns: ...

    @overload
    def __call__(self, columns: Sequence[Row]) -> tuple[list[Row], list[Row]]: ...

    def __call__(self, columns: Mapping[str, Sequence[Any]] | Sequence[Row]) -> Columns | tuple[list[Row], list[Row]]:
        """Of columns those of the rows that stay; none of a column's name is lost with the last row.

        Of a list of rows two lists: those that stay, and those that are dropped, with ``dropped_by`` and
        ``dropped_for``.
        """
        if not isinstance(columns, Mapping):
            return self.apply(columns), self.take_left()
        kept = self.apply(self.map_col_to_row(columns))
        self.take_left()
        return self.map_row_to_col(kept, dict.fromkeys([*columns, *self.adds]))

    def apply(self, rows: Sequence[Row]) -> list[Row]:
        """The rows that stay, mended."""
        kept = []
        self.take_left()
        for row in rows:
            mended = self.mend(row)
            reason = self.reason(mended)
            if reason is None:
                kept.append(mended)
            else:
                self.leave(mended, reason)
        return kept

    def leave(self, row: Row, reason: str) -> None:
        """Count a row as dropped."""
        self.dropped[reason] += 1
        self._left.append({**row, "dropped_by": type(self).__name__, "dropped_for": reason})

    def take_left(self) -> list[Row]:
        """The rows that were dropped since this was last asked, each with the filter's name and the reason."""
        left, self._left = self._left, []
        return left

    def mend(self, row: Row) -> Row:
        """The row with what can be put right."""
        return row

    def reason(self, row: Row) -> str | None:
        """Why the row is dropped; none if it stays."""
        return None


def messages_of(row: Row) -> list[Mapping[str, Any]]:
    """The messages of a row."""
    return list(row.get("messages") or [])


def said_by(row: Row, role: str) -> list[str]:
    """The texts of one role's messages."""
    return [text_of(message.get("content")) for message in messages_of(row) if message.get("role") == role]


def calls_of(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The calls of tools that a message makes in its field for them, which may be JSON text."""
    calls = message.get("tool_calls")
    if isinstance(calls, str):
        try:
            calls = json.loads(calls or "[]")
        except ValueError:
            return []
    return [call for call in calls if isinstance(call, Mapping)] if isinstance(calls, Sequence) else []


def without_thinking(text: str) -> tuple[str, list[str]]:
    """A text without what stands in ``<think>``, and that; what is never closed stays. Takes time by the length."""
    kept, thoughts, at = [], [], 0
    while (begin := THINKING.search(text, at)) and (end := THOUGHT.search(text, begin.end())):
        kept.append(text[at : begin.start()])
        thoughts.append(text[begin.end() : end.start()])
        at = end.end()
    return "".join([*kept, text[at:]]), thoughts


def with_texts(row: Row, change: Any, role: str | None = None) -> dict[str, Any]:
    """The row with every message's text changed, or those of one role; parts that are no text stay."""
    changed = [
        _changed(message, change) if role is None or message.get("role") == role else dict(message)
        for message in messages_of(row)
    ]
    return {**row, "messages": changed}


def with_key_rounds(row: Row, numbers: Sequence[int]) -> list[Any]:
    """The row's ``user_data`` with the numbers of the messages that train, in place of those it had."""
    data = row.get("user_data") or []
    pairs = list(data.items()) if isinstance(data, Mapping) else list(data)
    others = [item for item in pairs if not (isinstance(item, (list, tuple)) and item and item[0] == KEY_ROUNDS)]
    return [*others, (KEY_ROUNDS, list(numbers))]


def _changed(message: Mapping[str, Any], change: Any) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": change(content)}
    if isinstance(content, list):
        parts = [
            {**part, "text": change(part["text"])} if isinstance(part, Mapping) and "text" in part else part
            for part in content
        ]
        return {**message, "content": parts}
    return dict(message)
