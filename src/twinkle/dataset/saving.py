"""Rows written to a file, at once or while a script takes them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np
import pyarrow
import pyarrow.parquet

from twinkle.core.errors import InvalidInput

Format = Literal["jsonl", "json", "csv", "parquet"]


def format_of(path: str, given: str | None) -> Format:
    """The format that a script names, or that the file's name does.

    Raises:
        InvalidInput: It is none that can be written.
    """
    name = given or Path(path).suffix.removeprefix(".")
    for known in get_args(Format):
        if name == known:
            found: Format = known
            return found
    raise InvalidInput("format", f"{name!r} cannot be written; use one of {', '.join(get_args(Format))}")


class RowWriter:
    """Writes rows of one shape to a file; the file is whole once it is closed.

    Args:
        path: Where; folders are made.
        kind: How.
        batch_size: Rows that are written together.
        rank: Ranks other than the first write beside the file: ``rows.rank1.jsonl``.
    """

    def __init__(self, path: str, kind: Format, *, batch_size: int = 1000, rank: int = 0) -> None:
        given = Path(path)
        self.path = given if rank == 0 else given.with_name(f"{given.stem}.rank{rank}{given.suffix}")
        self.kind = kind
        self._batch_size = batch_size
        self._waiting: list[dict[str, Any]] = []
        self._parquet: pyarrow.parquet.ParquetWriter | None = None
        self._num_written = 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("[\n" if kind == "json" else "", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        """Add a row."""
        self._waiting.append({name: _plain(value) for name, value in row.items()})
        if len(self._waiting) >= self._batch_size:
            self._flush()

    def close(self) -> None:
        """Write what waits, and end the file."""
        self._flush()
        if self._parquet is not None:
            self._parquet.close()
        if self.kind == "json":
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n]\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _flush(self) -> None:
        rows, self._waiting = self._waiting, []
        if not rows:
            return
        if self.kind == "parquet":
            table = pyarrow.Table.from_pylist(rows, schema=None if self._parquet is None else self._parquet.schema)
            if self._parquet is None:
                self._parquet = pyarrow.parquet.ParquetWriter(self.path, table.schema)
            self._parquet.write_table(table)
        elif self.kind == "csv":
            self._append_csv(rows)
        else:
            separator = "\n" if self.kind == "jsonl" else ",\n"
            text = separator.join(json.dumps(row, ensure_ascii=False, default=_unwritable) for row in rows)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text + "\n" if self.kind == "jsonl" else (separator if self._num_written else "") + text)
        self._num_written += len(rows)

    def _append_csv(self, rows: list[dict[str, Any]]) -> None:
        with self.path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            if not self._num_written:
                writer.writeheader()
            for row in rows:
                # A cell holds text: what has parts is written as JSON.
                writer.writerow({name: _cell(value) for name, value in row.items()})


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False, default=_unwritable) if isinstance(value, list | dict) else value


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value


def _unwritable(value: object) -> Any:
    raise InvalidInput("output_path", f"cannot hold {type(value).__name__} as text; save as parquet, or map it away")
