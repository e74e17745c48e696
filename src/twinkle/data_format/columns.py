"""Batches as rows and as columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.data_format.row_error import RowError

Row = dict[str, Any]
Columns = dict[str, list[Any]]


def rows_of(batch: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows of a batch in either form.

    Raises:
        InvalidInput: The columns differ in length, or a row is no object.
    """
    if not isinstance(batch, Mapping):
        for number, row in enumerate(batch):
            if not isinstance(row, Mapping):
                raise RowError("row", f"is a {type(row).__name__}; send an object with columns", row=number)
        return [dict(row) for row in batch]
    lengths = {name: len(values) for name, values in batch.items()}
    if len(set(lengths.values())) > 1:
        raise InvalidInput("columns", f"differ in length: {lengths}")
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def columns_of(rows: Sequence[Mapping[str, Any]], names: Iterable[str] = ()) -> Columns:
    """The columns of some rows, and those of ``names`` that no row has; what a row lacks is None."""
    known = dict.fromkeys([*names, *(name for row in rows for name in row)])
    return {name: [row.get(name) for row in rows] for name in known}
