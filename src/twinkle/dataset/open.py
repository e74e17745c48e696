"""A member of a data set: its rows opened, and what in its files cannot be read told line by line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.exceptions import DatasetGenerationError

from twinkle.core.errors import InvalidInput
from twinkle.core.hub_settings import HubSettings
from twinkle.core.keywords import known_keywords
from twinkle.dataset.lines import data_suffix, is_json_array, json_rows
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.problems import Place, Problem, WrongRows
from twinkle.dataset.source import (
    Source,
    data_files,
    load_files,
    options_of_reader,
    rows_in_memory,
    sliced,
    with_origin,
)
from twinkle.hub import HubOperation
from twinkle.hub.reference import parse_reference

JSON_LINES = (".jsonl", ".ndjson", ".json")

READ_ERRORS = (DatasetGenerationError, ValueError, OSError)
"""What reading of files ends with."""


@dataclass
class Opened:
    """The rows of one member, with the column of their origin; ``problems`` are lines that were left out."""

    rows: Any
    source: Source
    problems: list[Problem] = field(default_factory=list)


def _known(options: Mapping[str, Any], path: Path | None) -> dict[str, Any]:
    """Those of the options that the reader of the files takes; other rows are not read by one that takes any."""
    if not options:
        return {}
    is_saved = path is not None and (path / "state.json").is_file()
    taken = () if path is None or is_saved else options_of_reader(data_files(path)[0])
    return known_keywords("Dataset", options, ("streaming", "num_proc", "revision", "skip_unreadable", *taken))


def open_member(
    meta: DatasetMeta,
    number: int,
    new_file: Callable[[str], Path],
    *,
    streaming: bool = False,
    num_proc: int | None = None,
    revision: str | None = None,
    skip_unreadable: bool = False,
    **options: Any,
) -> Opened:
    """Open the rows that ``meta`` describes, as member ``number``.

    Args:
        meta: Which rows.
        number: The member's place among the members.
        new_file: Makes a path for a file that has to be written, of its suffix.
        streaming: Read them while they are taken.
        num_proc: Processes that read files.
        revision: Of a hub's data set.
        skip_unreadable: Leave out lines that are no rows, and tell them, in place of raising.
        options: Passed on to the reader of files.

    Raises:
        WrongRows: Lines of a file cannot be read, and are not to be left out.
        InvalidInput: There is nothing that can be read at all.
    """
    problems: list[Problem] = []
    path = None if meta.data is not None else _local(meta, revision)
    options = _known(options, path)
    if meta.data is not None:
        rows, source = rows_in_memory(meta.data, streaming=streaming), Source("data")
    elif path is None:
        rows = HubOperation.load_dataset(
            meta.dataset_id, meta.subset_name, meta.split, streaming=streaming, num_proc=num_proc, revision=revision
        )
        source = Source(f"{meta.dataset_id}/{meta.split}")
    elif (path / "dataset_info.json").is_file() and (path / "state.json").is_file():
        rows, source = datasets.load_from_disk(str(path)), Source(str(path))
        rows = rows.to_iterable_dataset() if streaming else rows
    else:
        files = data_files(path)
        try:
            rows, source = (
                load_files(files, streaming=streaming, num_proc=num_proc, **options),
                Source(str(path), files),
            )
            if streaming:
                next(iter(rows), None)
        except READ_ERRORS as error:
            wrong = unreadable_lines(files)
            if not wrong:
                raise InvalidInput("dataset_id", f"{path} cannot be read: {error.__cause__ or error}") from error
            if not skip_unreadable:
                raise WrongRows(wrong, count=len(wrong), doing="read") from error
            problems = wrong
        else:
            # Later lines of a stream are read while rows are taken, when it is too late to leave one out.
            problems = unreadable_lines(files) if streaming and skip_unreadable else []
        if problems:
            rows, source = _without(problems, files, new_file, streaming=streaming)
    return Opened(sliced(with_origin(rows, number), meta), source, problems)


def _local(meta: DatasetMeta, revision: str | None) -> Path | None:
    """The file or folder of rows that an id stands for on this machine. None: a repository, or the copy of one."""
    reference = parse_reference(meta.dataset_id, HubSettings.read(), revision=revision, field="dataset_id")
    place = reference.place
    if place is None or (place.is_dir() and _is_repository(place, meta)):
        return None
    return place


def _is_repository(folder: Path, meta: DatasetMeta) -> bool:
    """Whether a folder has parts that the meta chooses from, by its card or as folders."""
    card = folder / "README.md"
    has_card = card.is_file() and card.read_text(encoding="utf-8", errors="replace").startswith("---")
    return has_card or (meta.subset_name != "default" and (folder / meta.subset_name).is_dir())


def _without(
    wrong: Sequence[Problem], files: Sequence[Path], new_file: Callable[[str], Path], *, streaming: bool
) -> Any:
    """The rows of JSONL files but for some lines, and where each of them truly stands."""
    copies: list[Path] = []
    lines_by_copy: list[np.ndarray | None] = []
    read: list[Path] = []
    left_out = {(problem.place.file, problem.place.line) for problem in wrong}
    for path in files:
        kept = [(number, line) for number, line in json_rows(path) if (str(path), number) not in left_out]
        if kept:
            copy = new_file(".jsonl")
            copy.write_text("".join(line.rstrip("\n") + "\n" for _, line in kept), encoding="utf-8")
            copies.append(copy)
            read.append(path)
            lines_by_copy.append(np.array([number for number, _ in kept], dtype=np.int64))
    if not copies:
        raise WrongRows(wrong, count=len(wrong), doing="read")
    return load_files(copies, streaming=streaming, num_proc=None), Source(str(files[0]), read, lines_by_copy)


def unreadable_lines(files: Sequence[Path]) -> list[Problem]:
    """The lines of JSONL files that are no objects; if there are none, those whose values change their kind."""
    if any(data_suffix(path) not in JSON_LINES or is_json_array(path) for path in files):
        return []
    numbered = [(Place(str(path), None, number), line) for path in files for number, line in json_rows(path)]
    wrong = [problem for place, line in numbered if (problem := _not_a_row(place, line)) is not None]
    if wrong:
        return wrong
    kinds: dict[str, tuple[str, Place]] = {}
    return [problem for place, line in numbered for problem in _changed_kinds(json.loads(line), kinds, place)]


def _not_a_row(place: Place, line: str) -> Problem | None:
    if "\ufffd" in line:
        return Problem(place, "", "holds bytes that are no UTF-8")
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return Problem(place, "", f"is no JSON: {error.msg} at character {error.colno}")
    return None if isinstance(row, dict) else Problem(place, "", f"is {_kind(row)}; a row is an object with columns")


def _changed_kinds(row: dict[str, Any], kinds: dict[str, tuple[str, Place]], place: Place) -> Iterator[Problem]:
    for column, value in row.items():
        if value is None:
            continue
        kind = _kind(value)
        before, where = kinds.setdefault(column, (kind, place))
        if kind != before:
            yield Problem(place, column, f"is {kind}, but {before} in {where}")


def _kind(value: object) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), "null")
