"""Rows as they come out of a tenant's file or a hub's data set, one at a time, each with its place."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import PurePath
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.core.hub_settings import HubSettings
from twinkle.hub import HubOperation
from twinkle.hub.reference import parse_reference
from twinkle.jobs.data import DataProblem
from twinkle.storage.blobs import BlobStore
from twinkle.storage.files.reading import READ_BYTES, StoredBytes, stretches_of
from twinkle.storage.files.records import FilePiece
from twinkle.wire.jsonl import MAX_LINE_BYTES, LineProblem, lines_of, read_object

_PARQUET_ROWS = 1024
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_JSON_LINES = (".jsonl", ".ndjson", ".json", "")
KINDS = ".jsonl, .csv, .tsv or .parquet"


@dataclass(frozen=True)
class RawRow:
    """A row with its place; ``problem`` says why there is none."""

    number: int
    line: int | None
    fields: Mapping[str, Any]
    problem: DataProblem | None = None


def rows_of_file(blobs: BlobStore, pieces: Sequence[FilePiece], name: str) -> Iterator[RawRow]:
    """The rows of a file, whose name says what it is.

    Raises:
        InvalidInput: It is of no kind that is known, or cannot be read as what it says it is.
        StorageUnavailable: The object store did not answer.
    """
    suffix = PurePath(name).suffix.lower()
    if suffix in _JSON_LINES:
        return _json_rows(stretches_of(blobs, pieces))
    file = io.BufferedReader(StoredBytes(blobs, pieces), READ_BYTES)
    if suffix in _SEPARATORS:
        return _separated_rows(file, _SEPARATORS[suffix])
    if suffix == ".parquet":
        return _parquet_rows(file)
    raise InvalidInput("file", f"{name} is of no known kind; send {KINDS}")


def rows_of_dataset(dataset: str, subset: str, split: str) -> Iterator[RawRow]:
    """The rows of a hub's data set, streamed. Files and folders of this machine are nobody's data here.

    Raises:
        InvalidInput: It is no hub's.
        ConfigError: There is no such data set, subset or split.
    """
    if parse_reference(dataset, HubSettings.read(), field="dataset").place is not None:
        raise InvalidInput("dataset", f"{dataset} is no id of a hub; send ms://org/name, hf://org/name or org/name")
    rows = HubOperation.load_dataset(dataset, subset, split, streaming=True)
    return (RawRow(number, None, dict(row)) for number, row in enumerate(rows))


def _json_rows(stretches: Iterator[bytes]) -> Iterator[RawRow]:
    for number, line in enumerate(lines_of(stretches)):
        value = read_object(line)
        if isinstance(value, LineProblem):
            problem = DataProblem(line=line.number, row=number, column="", reason=value.message, character=value.column)
            yield RawRow(number, line.number, {}, problem)
        else:
            yield RawRow(number, line.number, value)


def _separated_rows(file: io.BufferedReader[StoredBytes], delimiter: str) -> Iterator[RawRow]:
    """Of a CSV file, whose first record names the columns."""
    text = io.TextIOWrapper(file, "utf-8-sig", errors="strict", newline="")
    reader = csv.reader(_bounded(text), delimiter=delimiter, strict=True)
    columns: list[str] = []
    number, begins = 0, 1
    while True:
        try:
            record = next(reader, None)
        except (csv.Error, UnicodeDecodeError, ValueError) as error:
            # Where the next record begins nobody can tell after that.
            line = reader.line_num + 1 if isinstance(error, UnicodeDecodeError) else max(reader.line_num, 1)
            problem = DataProblem(line=line, row=number, column="", reason=f"cannot be read as CSV: {error}")
            yield RawRow(number, line, {}, problem)
            return
        if record is None:
            return
        if record and not columns:
            columns = record
        elif record:
            if len(record) == len(columns):
                yield RawRow(number, begins, dict(zip(columns, record, strict=True)))
            else:
                reason = f"has {len(record)} values, the first line names {len(columns)} columns"
                yield RawRow(number, begins, {}, DataProblem(line=begins, row=number, column="", reason=reason))
            number += 1
        begins = reader.line_num + 1


def _bounded(text: io.TextIOWrapper) -> Iterator[str]:
    while line := text.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES:
            raise ValueError(f"a line is longer than {MAX_LINE_BYTES} characters")
        yield line


def _parquet_rows(file: io.BufferedReader[StoredBytes]) -> Iterator[RawRow]:
    try:
        # It comes with the extra of scripts alone.
        parquet: Any = import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise InvalidInput("file", "is Parquet, and this server lacks pyarrow to read it; send JSONL") from error
    number = 0
    try:
        batches = parquet.ParquetFile(file).iter_batches(batch_size=_PARQUET_ROWS)
        for batch in batches:
            for fields in batch.to_pylist():
                yield RawRow(number, None, fields)
                number += 1
    # ArrowInvalid is a ValueError; what else Arrow raises of damaged files is an OSError.
    except (ValueError, OSError) as error:
        raise InvalidInput("file", f"cannot be read as Parquet: {str(error).splitlines()[0]}") from error


def limited(rows: Iterator[RawRow], max_rows: int | None) -> Iterator[RawRow]:
    """The first of them."""
    return rows if max_rows is None else islice(rows, max_rows)
