"""What makes trajectories of a data set's rows, and what sorts rows out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.data_format.columns import Columns, Row, columns_of, rows_of
from twinkle.data_format.row_error import RowError

HELPFUL = "You are a helpful assistant."


class Preprocessor:
    """Makes columns of columns, for a data set's ``map``. A class of one's own overrides ``__call__`` or, for rows that
    depend on nothing else, :meth:`preprocess`.
    """

    def __call__(self, columns: Mapping[str, Sequence[Any]]) -> Columns:
        """The new columns of a batch.

        Raises:
            RowError: Names the row, the column and the reason.
        """
        made: list[Row] = []
        for number, row in enumerate(self.map_col_to_row(columns)):
            try:
                made.append(self.preprocess(row))
            except RowError as error:
                raise error.at_row(number) from error
        return self.map_row_to_col(made)

    def preprocess(self, row: Row) -> Row:
        """The new fields of one row."""
        raise InvalidInput("preprocess_func", f"{type(self).__name__} overrides neither __call__ nor preprocess")

    @staticmethod
    def map_col_to_row(columns: Mapping[str, Sequence[Any]]) -> list[Row]:
        """The rows of some columns."""
        return rows_of(columns)

    @staticmethod
    def map_row_to_col(rows: Sequence[Mapping[str, Any]], keys: Iterable[str] | None = None) -> Columns:
        """The columns of some rows; those of ``keys`` alone if given. What a row lacks is None."""
        if keys is None:
            return columns_of(rows)
        return {key: [row.get(key) for row in rows] for key in keys}


class DataFilter(ABC):
    """Decides of each row whether it stays, for a data set's ``filter``."""

    @abstractmethod
    def __call__(self, row: Mapping[str, Any]) -> bool:
        """Whether the row stays."""


Filter = DataFilter


def text_of(row: Mapping[str, Any], column: str) -> str:
    """The text in a column; ``RowError`` if there is none."""
    value = row.get(column)
    if column not in row:
        raise RowError(column, f"is missing; the row has {', '.join(map(str, row)) or 'nothing'}")
    if not isinstance(value, str):
        raise RowError(column, f"is {'empty' if value is None else type(value).__name__}, must be text")
    return value


def conversation(user: str, *, system: str | None = None, assistant: str | None = None) -> list[dict[str, Any]]:
    """The messages of one question, and perhaps its answer."""
    messages = [("system", system), ("user", user), ("assistant", assistant)]
    return [{"role": role, "content": content} for role, content in messages if content is not None]
