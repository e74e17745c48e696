"""On which line of a file each of its rows begins."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TextIO

_OPENERS: dict[str, Callable[..., TextIO]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
COMPRESSIONS = (*_OPENERS, ".zst")


def data_suffix(path: Path) -> str:
    """What kind of rows a file holds, by its name: ``.jsonl`` of ``train.jsonl.gz``."""
    suffixes = path.suffixes
    if suffixes and suffixes[-1].lower() in COMPRESSIONS:
        suffixes = suffixes[:-1]
    return suffixes[-1].lower() if suffixes else ""


def open_text(path: Path, *, newline: str | None = None) -> TextIO:
    """A text file, compressed or not; what is no UTF-8 is read as U+FFFD, since another reader complains of it."""
    opener: Callable[..., TextIO] = _OPENERS.get(path.suffix.lower(), open)
    return opener(path, "rt", encoding="utf-8-sig", errors="replace", newline=newline)


def lines_of_rows(path: Path) -> Iterator[int] | None:
    """The line, from 1, on which each row begins; None for a file that has no lines."""
    if path.suffix.lower() == ".zst":
        return None
    readers = {".jsonl": _json, ".json": _json, ".ndjson": _json, ".txt": _text, ".csv": _comma, ".tsv": _tab}
    reader = readers.get(data_suffix(path))
    return None if reader is None else reader(path)


def json_rows(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a JSONL file that are not blank, with their numbers."""
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line


def is_json_array(path: Path) -> bool:
    """Whether a file is one JSON array instead of an object a line."""
    with open_text(path) as file:
        for line in file:
            if line.strip():
                return line.lstrip().startswith("[")
    return False


def _json(path: Path) -> Iterator[int]:
    if is_json_array(path):
        yield from _json_array(path)
        return
    for number, _ in json_rows(path):
        yield number


def _json_array(path: Path) -> Iterator[int]:
    with open_text(path) as file:
        text = file.read()
    decoder = json.JSONDecoder()
    starts, at = [], text.index("[") + 1
    while True:
        while at < len(text) and (text[at].isspace() or text[at] == ","):
            at += 1
        if at >= len(text) or text[at] == "]":
            break
        starts.append(at)
        _, at = decoder.raw_decode(text, at)
    line = 1 + text.count("\n", 0, starts[0]) if starts else 1
    for start, following in pairwise([*starts, len(text)]):
        yield line
        line += text.count("\n", start, following)


def _text(path: Path) -> Iterator[int]:
    with open_text(path) as file:
        for number, _ in enumerate(file, start=1):
            yield number


def _comma(path: Path) -> Iterator[int]:
    return _separated(path, ",")


def _tab(path: Path) -> Iterator[int]:
    return _separated(path, "\t")


def _separated(path: Path, delimiter: str) -> Iterator[int]:
    with open_text(path, newline="") as file:
        reader = csv.reader(file, delimiter=delimiter)
        begins, is_header = 1, True
        for record in reader:
            if record:
                if not is_header:
                    yield begins
                is_header = False
            begins = reader.line_num + 1
