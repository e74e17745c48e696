"""Rows out of files, hubs and memory, each knowing where it came from.

A column of our own (``ORIGIN``) travels with the rows through maps, filters and mixtures, and is shown to nobody: it is
what a wrong row is named by.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet

from twinkle.core.errors import InvalidInput
from twinkle.dataset.lines import COMPRESSIONS, data_suffix, lines_of_rows
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.problems import Place
from twinkle.infra.progress import track

ORIGIN = "_twinkle_origin"
"""Number of the source times ``PER_SOURCE`` plus the row's number there; negative where it is not known."""
PER_SOURCE = 1 << 44
UNKNOWN_ORIGIN = -1

NOT_A_READERS = ("path", "data_dir", "data_files", "split", "streaming", "num_proc", "revision", "trust_remote_code")
"""Arguments of Hugging Face's ``load_dataset`` that the caller of ``load_files`` says otherwise."""
BUILDERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    # What recorded sessions of other programs look like is no business of ours: a line is a row.
    ".jsonl": ("json", {"parse_agent_traces": False}),
    ".ndjson": ("json", {"parse_agent_traces": False}),
    ".json": ("json", {"parse_agent_traces": False}),
    ".txt": ("text", {}),
    # "NA" and "null" are words that people write.
    ".csv": ("csv", {"keep_default_na": False, "na_filter": False}),
    ".tsv": ("csv", {"keep_default_na": False, "na_filter": False, "sep": "\t"}),
    ".parquet": ("parquet", {}),
    ".arrow": ("arrow", {}),
}


class Source:
    """Where the rows of one member come from, and how each is called."""

    def __init__(self, name: str, files: Sequence[Path] = (), lines: Sequence[np.ndarray | None] | None = None) -> None:
        self.name = name
        self.files = tuple(files)
        self._known_lines = lines

    def place(self, row: int) -> Place:
        """Where a row stands."""
        if not self.files:
            return Place(self.name, row)
        for path, lines in zip(self.files, self._lines, strict=True):
            if lines is None:
                return Place(str(path), row if len(self.files) == 1 else None)
            if row < len(lines):
                known = bool(len(lines)) and int(lines[row]) > 0
                return Place(str(path), row, int(lines[row]) if known else None)
            row -= len(lines)
        return Place(self.name, row)

    @cached_property
    def _lines(self) -> Sequence[np.ndarray | None]:
        return [_lines_of(path) for path in self.files] if self._known_lines is None else self._known_lines


def _lines_of(path: Path) -> np.ndarray | None:
    if data_suffix(path) == ".parquet":
        return np.zeros(pyarrow.parquet.read_metadata(path).num_rows, dtype=np.int64)
    lines = lines_of_rows(path)
    return None if lines is None else np.fromiter(lines, dtype=np.int64)


def data_files(path: Path) -> list[Path]:
    """A file, or the files of a folder that are of the kind of its first.

    Raises:
        InvalidInput: It is of no kind that is known, or a script, which is never run.
    """
    if path.is_file():
        files = [path]
    else:
        visible = (file for file in sorted(path.rglob("*")) if file.is_file())
        found = [file for file in visible if not any(p.startswith(".") for p in file.relative_to(path).parts)]
        known = [file for file in found if data_suffix(file) in BUILDERS]
        files = [file for file in known if data_suffix(file) == data_suffix(known[0])]
    if not files or data_suffix(files[0]) not in BUILDERS:
        kinds = ", ".join(BUILDERS)
        if data_suffix(path) == ".py":
            raise InvalidInput("dataset_id", f"{path} is a script; data sets' scripts are never run, pass their files")
        raise InvalidInput("dataset_id", f"{path} holds no rows; known are {kinds}, or compressed {COMPRESSIONS}")
    return files


def load_files(files: Sequence[Path], *, streaming: bool, num_proc: int | None, **options: Any) -> Any:
    """The rows of files of one kind, in the order of the files."""
    builder, defaults = BUILDERS[data_suffix(files[0])]
    with track("read", unit="files"), one_bar((num_proc or 1) > 1):
        return datasets.load_dataset(
            builder,
            data_files=[str(file) for file in files],
            split="train",
            streaming=streaming,
            num_proc=None if streaming else num_proc,
            **{**defaults, **options},
        )


def options_of_reader(file: Path) -> tuple[str, ...]:
    """What ``load_files`` takes of a file of this kind beside its own arguments."""
    builder = datasets.load_dataset_builder(BUILDERS[data_suffix(file)][0], data_files=[str(file)])
    of_kind = (field.name for field in dataclasses.fields(builder.config) if field.name != "data_files")
    of_all = (name for name in inspect.signature(datasets.load_dataset).parameters if name not in NOT_A_READERS)
    return tuple(dict.fromkeys((*of_kind, *of_all)))


def rows_in_memory(data: Any, *, streaming: bool) -> Any:
    """A data set of what a script passed as ``data``."""
    if isinstance(data, datasets.Dataset | datasets.IterableDataset):
        # Rows are plain values here, whatever they are to others.
        data = data.with_format(None)
        if streaming and isinstance(data, datasets.Dataset):
            return data.to_iterable_dataset()
        if not streaming and isinstance(data, datasets.IterableDataset):
            raise InvalidInput("data", "is a stream; use IterableDataset")
        return data
    if callable(data):
        if streaming:
            return datasets.IterableDataset.from_generator(data)
        data = data()
    if isinstance(data, Mapping):
        lengths = {str(name): len(values) for name, values in data.items()}
        if len(set(lengths.values())) > 1:
            raise InvalidInput("data", f"has columns of different lengths: {lengths}")
        made = datasets.Dataset.from_dict(dict(data), on_mixed_types="use_json")
    else:
        made = datasets.Dataset.from_list(_rows("data", data), on_mixed_types="use_json")
    return made.to_iterable_dataset() if streaming else made


def _rows(field: str, data: Any) -> list[dict[str, Any]]:
    try:
        rows = list(data)
    except TypeError as error:
        raise InvalidInput(field, f"is {type(data).__name__}; pass a list of rows, a dict of columns...") from error
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise InvalidInput(f"{field}[{number}]", f"is {type(row).__name__}; a row is a mapping of columns")
    if not rows:
        raise InvalidInput(field, "has no rows")
    columns = {name: None for row in rows for name in row}
    return [{name: row.get(name) for name in columns} for row in rows]


def with_origin(rows: Any, number: int) -> Any:
    """The rows with the column that says which row of source ``number`` each is."""
    if isinstance(rows, datasets.IterableDataset):
        features = None
        if rows.features is not None:
            features = datasets.Features({**rows.features, ORIGIN: datasets.Value("int64")})
        return rows.map(_Numbered(number * PER_SOURCE), with_indices=True, batched=True, features=features)
    origins = np.arange(len(rows), dtype=np.int64) + number * PER_SOURCE
    return rows.add_column(ORIGIN, origins)


class _Numbered:
    def __init__(self, first: int) -> None:
        self._first = first

    def __call__(self, columns: Mapping[str, list[Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
        return {**columns, ORIGIN: [self._first + index for index in indices]}


def sliced(rows: Any, meta: DatasetMeta) -> Any:
    """The rows that ``data_slice`` names; an index past the end begins anew."""
    if meta.data_slice is None:
        return rows
    if isinstance(rows, datasets.IterableDataset):
        return _sliced_stream(rows, meta.data_slice)
    if not len(rows):
        raise InvalidInput("data_slice", "takes rows of a data set that has none")
    return rows.select([index % len(rows) for index in meta.data_slice])


def _sliced_stream(rows: Any, wanted: Any) -> Any:
    if not isinstance(wanted, range) or wanted.step != 1 or wanted.start < 0:
        raise InvalidInput("data_slice", "of a stream must be a range(start, stop); other rows need Dataset")
    # Past its end a stream begins anew, as an index does.
    return rows.repeat(None).skip(wanted.start).take(len(wanted))


@contextmanager
def one_bar(several: bool = False) -> Iterator[None]:
    """Leave bars to ours; where other processes do the work, only Hugging Face's knows how far they are."""
    if several or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()
