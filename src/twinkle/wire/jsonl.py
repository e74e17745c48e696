"""Lines of JSON looked at one by one, whatever the size of the file: what is wrong is told by line and column.

No line is ever in memory with the others. What a line must hold beside being an object is for whoever looks to say.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

MOST_PROBLEMS = 100
"""How many wrong lines are told; all are counted."""
MAX_LINE_BYTES = 16 * 2**20
"""Of one line; a longer one is wrong, and is not read to its end at once."""
BATCH_MAX_LINES = 50_000
BATCH_MAX_BYTES = 200 * 2**20
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Line:
    """A line that is not blank: its number from 1, where it begins in the file, its bytes without the end."""

    number: int
    start: int
    data: bytes
    is_too_long: bool = False


@dataclass(frozen=True, kw_only=True)
class LineProblem:
    """What is wrong with a line. ``column`` counts characters from 1; ``param`` is the field at fault, if one is."""

    line: int | None
    column: int | None
    code: str
    message: str
    param: str | None = None

    def __str__(self) -> str:
        places = [f"line {self.line}"] if self.line is not None else []
        places += [f"column {self.column}"] if self.column is not None else []
        places += [self.param] if self.param else []
        return ": ".join([*([", ".join(places)] if places else []), self.message])


class LineSplitter:
    """Cuts pieces of bytes into lines as they come."""

    def __init__(self, *, keep_blank: bool = False) -> None:
        """Begin; blank lines are left out unless they are to be kept."""
        self._number = 0
        self._start = 0
        self._keep_blank = keep_blank
        self._held: list[bytes] = []
        self._num_held = 0
        self._num_dropped = 0

    def feed(self, piece: bytes) -> Iterator[Line]:
        """The lines that a piece completes."""
        at = 0
        while (end := piece.find(b"\n", at)) >= 0:
            self._hold(piece[at:end])
            line = self._take(1)
            if line is not None:
                yield line
            at = end + 1
        self._hold(piece[at:])

    def end(self) -> Iterator[Line]:
        """The last line, if nothing ended it."""
        if self._num_held:
            line = self._take(0)
            if line is not None:
                yield line

    def _hold(self, part: bytes) -> None:
        kept = part[: max(MAX_LINE_BYTES + 1 - self._num_held, 0)]
        if kept:
            self._held.append(kept)
        self._num_held += len(kept)
        self._num_dropped += len(part) - len(kept)

    def _take(self, num_ends: int) -> Line | None:
        data = b"".join(self._held)
        start, size = self._start, len(data) + self._num_dropped
        self._number += 1
        self._start += size + num_ends
        self._held, self._num_held, self._num_dropped = [], 0, 0
        if self._number == 1 and data.startswith(_BOM):
            data = data[len(_BOM) :]
        data = data.removesuffix(b"\r")
        if not self._keep_blank and not data.strip():
            return None
        return Line(self._number, start, data, is_too_long=size > MAX_LINE_BYTES)


def lines_of(pieces: Iterable[bytes]) -> Iterator[Line]:
    """The lines of a file that comes in pieces."""
    splitter = LineSplitter()
    for piece in pieces:
        yield from splitter.feed(piece)
    yield from splitter.end()


def read_object(line: Line) -> dict[str, Any] | LineProblem:
    """The object that a line is, or what is wrong with it."""
    if line.is_too_long:
        return LineProblem(
            line=line.number, column=None, code="line_too_long", message=f"is longer than {MAX_LINE_BYTES} bytes"
        )
    try:
        value = orjson.loads(line.data)
    except orjson.JSONDecodeError as error:
        return _unreadable(line, error)
    if isinstance(value, dict):
        return value
    return LineProblem(
        line=line.number, column=1, code="invalid_line", message=f"is {_kind(value)}; each line must be an object"
    )


def _unreadable(line: Line, error: orjson.JSONDecodeError) -> LineProblem:
    """In characters of the line, also where another reader has to be asked for the place."""
    try:
        text = line.data.decode()
    except UnicodeDecodeError as fault:
        column = len(line.data[: fault.start].decode(errors="replace")) + 1
        return LineProblem(
            line=line.number, column=column, code="invalid_utf8", message="holds bytes that are no UTF-8"
        )
    message, column = error.msg, error.pos + 1
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as other:
        message, column = other.msg, other.pos + 1
    except (ValueError, RecursionError) as other:
        message = str(other)
    return LineProblem(line=line.number, column=column, code="invalid_json", message=f"is no JSON: {message}")


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a number of JSON")


def _kind(value: object) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}
    return names.get(type(value), "null")


@dataclass
class LineCheck:
    """What came of looking at every line."""

    num_lines: int = 0
    num_wrong: int = 0
    problems: list[LineProblem] = field(default_factory=list)
    """The first hundred."""

    def add(self, problem: LineProblem) -> None:
        """Count what is wrong."""
        self.num_wrong += 1
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(problem)


class ObjectCheck:
    """Counts lines and finds those that are no objects, while the pieces go by."""

    def __init__(self) -> None:
        self.found = LineCheck()
        self._splitter = LineSplitter()

    def feed(self, piece: bytes) -> None:
        """Look at what comes next."""
        for line in self._splitter.feed(piece):
            self._look_at(line)

    def finish(self) -> LineCheck:
        """What came of it."""
        for line in self._splitter.end():
            self._look_at(line)
        return self.found

    def _look_at(self, line: Line) -> None:
        self.found.num_lines += 1
        value = read_object(line)
        if isinstance(value, LineProblem):
            self.found.add(value)


@dataclass(frozen=True)
class BatchLine:
    """A request of a batch's file."""

    number: int
    start: int
    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class BatchCheck:
    """Looks at the lines of a batch's file one after the other: what OpenAI wants of each, and no more."""

    def __init__(self, endpoint: str, *, max_lines: int = BATCH_MAX_LINES) -> None:
        """Take what all lines must have in common.

        Args:
            endpoint: Where every request goes.
            max_lines: How many there may be.
        """
        self.found = LineCheck()
        self._endpoint = endpoint
        self._max_lines = max_lines
        self._line_of_id: dict[str, int] = {}

    def look_at(self, line: Line) -> BatchLine | None:
        """The request of a line; None if something is wrong with it, which is noted."""
        self.found.num_lines += 1
        if self.found.num_lines == self._max_lines + 1:
            self._note(line, "too_many_lines", f"is more than the {self._max_lines} lines that a batch may have", None)
        value = read_object(line)
        if isinstance(value, LineProblem):
            self.found.add(value)
            return None
        problem = self._problem(value)
        if problem is not None:
            self._note(line, *problem)
            return None
        custom_id = value["custom_id"]
        first = self._line_of_id.setdefault(custom_id, line.number)
        if first != line.number:
            self._note(line, "duplicate_custom_id", f"is that of line {first} already: {custom_id!r}", "custom_id")
            return None
        return BatchLine(line.number, line.start, custom_id, value["method"], value["url"], value["body"])

    def finish(self) -> LineCheck:
        """What came of it."""
        if not self.found.num_lines:
            self.found.add(LineProblem(line=None, column=None, code="empty_file", message="the file has no lines"))
        return self.found

    def _problem(self, value: dict[str, Any]) -> tuple[str, str, str] | None:
        custom_id, url = value.get("custom_id"), value.get("url")
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= 512:
            return ("invalid_custom_id", "must be a text of 1 to 512 characters", "custom_id")
        if value.get("method") != "POST":
            return ("invalid_method", "must be POST", "method")
        if url != self._endpoint:
            return ("invalid_url", f"must be {self._endpoint}, the batch's endpoint, not {str(url)[:60]!r}", "url")
        if not isinstance(value.get("body"), dict):
            return ("missing_required_parameter", "must be an object", "body")
        return None

    def _note(self, line: Line, code: str, message: str, param: str | None) -> None:
        column = None if param is None else _column_of(line.data, param)
        self.found.add(LineProblem(line=line.number, column=column, code=code, message=message, param=param))


def _column_of(data: bytes, field_name: str) -> int:
    """Where a field's name stands in a line, in characters; 1 if it is missing or written with escapes."""
    at = data.find(b'"' + field_name.encode() + b'"')
    return 1 if at < 0 else len(data[:at].decode(errors="replace")) + 1
