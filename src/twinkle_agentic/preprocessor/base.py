"""What a quality filter is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.data_format.columns import Columns
from twinkle.preprocessor import Preprocessor
from twinkle.reward.base import text_of

Row = Mapping[str, Any]


class QualityFilter(Preprocessor):
    """Drops rows of trajectories; for a data set's ``map``. ``dropped`` counts them by reason.

    A filter brings ``reason``; one that only mends texts brings ``mend``.
    """

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()

    def __call__(self, columns: Mapping[str, Sequence[Any]]) -> Columns:
        """The columns without the rows that are dropped; none of a column's name is lost with the last row."""
        kept = self.apply(self.map_col_to_row(columns))
        return self.map_row_to_col(kept, columns)

    def apply(self, rows: Sequence[Row]) -> list[Row]:
        """The rows that stay, mended."""
        kept = []
        for row in rows:
            mended = self.mend(row)
            reason = self.reason(mended)
            if reason is None:
                kept.append(mended)
            else:
                self.dropped[reason] += 1
        return kept

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


def with_texts(row: Row, change: Any) -> dict[str, Any]:
    """The row with every message's text changed; parts that are no text stay."""
    return {**row, "messages": [_changed(message, change) for message in messages_of(row)]}


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
