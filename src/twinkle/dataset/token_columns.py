"""Columns of encoded rows as Arrow holds them, made at once where rows have tokens and nothing else new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

Row = Mapping[str, Any]

NARROW: Mapping[str, type[np.integer[Any]]] = {"input_ids": np.int32, "attention_mask": np.int8}
"""Columns that Hugging Face's writer keeps in fewer bytes, by their names."""


def token_table(table: pa.Table, before: Sequence[Row], after: Sequence[Sequence[Row]]) -> pa.Table | None:
    """The table with columns of what was added to its rows.

    What stays is not read and written again, and what is new is copied once: half of the time that Hugging Face's way
    through Python's objects takes.

    Args:
        table: The rows as Arrow holds them, with columns that ``before`` need not have.
        before: The same rows.
        after: What became of each.

    Returns:
        None where a row became none or several, where something of it was replaced, or where what is new are no numbers
        or sequences of such: then the usual way has to be taken.
    """
    if not all(len(some) == 1 for some in after):
        return None
    rows = [row for (row,) in after]
    kept = before[0].keys() if before else ()
    added = [name for name in rows[0] if name not in kept] if rows else []
    if any(len(row) != len(kept) + len(added) for row in rows):
        return None
    if any(row.get(name) is not value for row, old in zip(rows, before, strict=True) for name, value in old.items()):
        return None
    for name in added:
        column = _column([row.get(name) for row in rows], NARROW.get(name, np.int64))
        if column is None:
            return None
        table = table.append_column(name, column)
    return table


def _column(values: Sequence[Any], dtype: type[np.integer[Any]]) -> pa.Array | None:
    if all(type(value) is int for value in values):
        return pa.array(values, pa.int64())
    if not all(isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype == np.int64 for value in values):
        return None
    offsets = np.cumsum([0, *map(len, values)])
    if offsets[-1] > np.iinfo(np.int32).max:
        return None
    tokens = np.concatenate(values).astype(dtype, copy=False)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(tokens))
