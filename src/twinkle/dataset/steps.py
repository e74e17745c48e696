"""What is done to rows, by a preprocessor, a filter or a template: over columns, or row by row as rows are taken."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from datasets.formatting.formatting import LazyBatch

from twinkle.core.errors import InvalidInput
from twinkle.core.keywords import known_keywords
from twinkle.data_format.columns import columns_of, rows_of
from twinkle.data_format.media import with_alike_messages
from twinkle.dataset.source import ORIGIN, UNKNOWN_ORIGIN
from twinkle.dataset.token_columns import token_table
from twinkle.infra.progress import Progress
from twinkle.plugin import Plugin
from twinkle.plugin.loading import is_plugin_id
from twinkle.preprocessor import PREPROCESSORS, DataFilter, Preprocessor
from twinkle.template import Template

Row = dict[str, Any]
Columns = Mapping[str, list[Any]]


OPTIONS = ("batch_size", "num_proc", "keep_in_memory", "writer_batch_size", "desc")
"""What ``map``, ``encode``, ``filter`` and ``check`` pass on to Hugging Face's."""

_BY_INIT_ARGS = "what it says can be said by an object, or a class with init_args"
NOT_OFFERED = {
    "with_indices": _BY_INIT_ARGS,
    "with_rank": _BY_INIT_ARGS,
    "fn_kwargs": _BY_INIT_ARGS,
    "input_columns": "a preprocessor gets all columns, a filter the row",
    "drop_last_batch": "every row is mapped",
}
"""Options of Hugging Face's that would change the rows."""


class Misused(InvalidInput):
    """A preprocessor returned what is no columns: its own mistake, not that of a row."""


class Step(Protocol):
    """One thing done to rows, without the column of their origin."""

    @property
    def doing(self) -> str:
        """For messages."""
        ...

    def rows(self, row: Row) -> list[Row]:
        """What becomes of one row: none, one or several."""
        ...


def resolve(
    field: str, value: Any, init_args: Mapping[str, Any] | None, kind: type[Preprocessor] | type[DataFilter]
) -> Callable[..., Any]:
    """The preprocessor or filter that a script names: an object, a class, a name of ``twinkle.preprocessor``, or the
    id of a plugin that the operator trusts.

    Raises:
        InvalidInput: The name is unknown, the settings do not fit, or it is nothing that can be called.
    """
    if isinstance(value, str) and is_plugin_id(value):
        value = Plugin.load_plugin(value, kind)
    elif isinstance(value, str):
        if value not in PREPROCESSORS:
            near = difflib.get_close_matches(value, PREPROCESSORS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(sorted(PREPROCESSORS))}"
            raise InvalidInput(field, f"{value!r} is not known; {hint}")
        value = PREPROCESSORS[value]
    if inspect.isclass(value):
        try:
            value = value(**(init_args or {}))
        except TypeError as error:
            raise InvalidInput("init_args", f"do not fit {field}: {error}") from error
    elif init_args:
        raise InvalidInput("init_args", f"{next(iter(init_args))} comes too late: {field} is an object already")
    if not callable(value):
        raise InvalidInput(field, f"is {value!r}; pass an object, a class or a name")
    made: Callable[..., Any] = value
    return made


def known_options(call: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that mean something here; the log names the others, before a single row is mapped.

    Raises:
        InvalidInput: One would change what a preprocessor is called with, and so the rows.
    """
    for name in NOT_OFFERED:
        if options.get(name):
            raise InvalidInput(name, f"is not offered by {call}: {NOT_OFFERED[name]}")
    return known_keywords(call, {name: value for name, value in options.items() if name not in NOT_OFFERED}, OPTIONS)


def name_of(function: object) -> str:
    """How messages call a preprocessor."""
    return getattr(function, "__name__", type(function).__name__)


@dataclass
class Preprocess:
    """Columns through a preprocessor; columns that it does not return are kept, but for ``removed``."""

    function: Callable[..., Any]
    removed: tuple[str, ...] = ()

    @property
    def doing(self) -> str:
        """For messages."""
        return f"mapped by {name_of(self.function)}"

    def columns(self, columns: Columns) -> dict[str, list[Any]]:
        """The columns of several rows."""
        made = self.function({name: list(values) for name, values in columns.items()})
        if isinstance(made, Sequence) and all(isinstance(row, Mapping) for row in made):
            made = columns_of(made)
        if not isinstance(made, Mapping):
            raise Misused(name_of(self.function), f"returned {type(made).__name__}; return a dict of columns")
        new = {name: list(values) for name, values in made.items()}
        kept = {name: values for name, values in columns.items() if name not in self.removed and name not in new}
        sizes = {name: len(values) for name, values in new.items()}
        if len(set(sizes.values())) > 1:
            raise Misused(name_of(self.function), f"returned columns of different lengths: {sizes}")
        given, got = _length(columns), _length(new) if new else _length(columns)
        if kept and got != given:
            raise Misused(
                name_of(self.function),
                f"made {got} rows of {given}, but the column {next(iter(kept))} still has {given}; return all columns"
                " or pass remove_columns",
            )
        return {**kept, **new}

    def rows(self, row: Row) -> list[Row]:
        """See :class:`Step`."""
        return rows_of(self.columns({name: [value] for name, value in row.items()}))


@dataclass
class Keep:
    """Only the rows of which a filter says yes."""

    function: Callable[[Row], bool]

    @property
    def doing(self) -> str:
        """For messages."""
        return f"filtered by {name_of(self.function)}"

    def rows(self, row: Row) -> list[Row]:
        """See :class:`Step`."""
        return [row] if self.function(dict(row)) else []


@dataclass
class Encode:
    """Conversations to tokens; rows without tokens are left out. Fields of a conversation stay beside its tokens."""

    template: Template
    add_generation_prompt: bool = False
    doing: str = "encoded"

    def rows(self, row: Row) -> list[Row]:
        """See :class:`Step`."""
        return self.rows_of_each([row])[0]

    def rows_of_each(self, rows: Sequence[Row]) -> list[list[Row]]:
        """What becomes of each of several rows, which are cut into tokens together."""
        if type(self.template).batch_encode is Template.batch_encode:
            encoded = self.template.encode_each(rows, add_generation_prompt=self.add_generation_prompt)
        else:
            encoded = [self.template.batch_encode([row], self.add_generation_prompt) for row in rows]
        return [[dict(made) for made in some if "input_ids" not in made or len(made["input_ids"])] for some in encoded]

    @property
    def keeps_fields(self) -> bool:
        """Whether a row's own fields come out as they came in; a template of one's own may change them in place."""
        kind = type(self.template)
        return (
            kind.encode is Template.encode
            and kind.batch_encode is Template.batch_encode
            and kind.encode_each is Template.encode_each
        )


class Encodable:
    """Says of a row whether a template encodes it."""

    def __init__(self, template: Template) -> None:
        self._template = template

    def __call__(self, row: Row) -> bool:
        return bool(self._template.check(row))


def is_check(step: Step) -> bool:
    """Whether a step leaves out what cannot be encoded."""
    return isinstance(step, Keep) and isinstance(step.function, Encodable)


def _with_alike_positions(rows: list[Row], is_deep: bool) -> list[Row]:
    """The rows with positions of one depth, as a column wants it, where pictures count along several axes."""
    depths = [np.ndim(row["position_ids"]) if "position_ids" in row else 0 for row in rows]
    if 2 not in depths and not is_deep:
        return rows
    return [
        {**row, "position_ids": [row["position_ids"]]} if depth == 1 else row
        for row, depth in zip(rows, depths, strict=True)
    ]


class OverColumns:
    """A step as Hugging Face's ``map`` calls it: with columns, the origin of each row among them.

    Args:
        step: What is done to the rows.
        progress: Told of them.
        features: The columns that the step makes of any rows, where it may make fewer of some.
    """

    def __init__(self, step: Step, progress: Progress | None = None, features: Mapping[str, Any] | None = None) -> None:
        self._step = step
        self._progress = progress
        self._columns = tuple(features or ())
        self._is_deep = _is_deep(features)
        self._deep_within = tuple(name for name, feature in (features or {}).items() if _is_deep(feature))

    def __call__(self, columns: Mapping[str, list[Any]]) -> dict[str, list[Any]] | pa.Table:
        given = {name: values for name, values in columns.items() if name != ORIGIN}
        origins = list(columns[ORIGIN])
        result: dict[str, list[Any]] | pa.Table
        if isinstance(self._step, Preprocess):
            made = with_alike_messages(self._step.columns(given))
            same = _length(made) == len(origins)
            result = {**made, ORIGIN: origins if same else [UNKNOWN_ORIGIN] * _length(made)}
        else:
            before = rows_of(given)
            table = None
            if isinstance(self._step, Encode):
                after = self._step.rows_of_each(before)
                if self._step.keeps_fields and isinstance(columns, LazyBatch) and not self._columns:
                    table = token_table(columns.pa_table, before, after)
            else:
                after = [self._step.rows(row) for row in before]
            result = self._columns_of(after, origins) if table is None else table
        if self._progress is not None:
            self._progress.advance(len(origins))
        return {ORIGIN: []} if isinstance(result, dict) and not result else result

    def _columns_of(self, made: Sequence[Sequence[Row]], origins: Sequence[int]) -> dict[str, list[Any]]:
        rows = [{**row, ORIGIN: origin} for some, origin in zip(made, origins, strict=True) for row in some]
        for name in self._deep_within:
            inner = _with_alike_positions([row[name] for row in rows], True)
            rows = [{**row, name: values} for row, values in zip(rows, inner, strict=True)]
        return columns_of(_with_alike_positions(rows, self._is_deep), self._columns)

    def __getstate__(self) -> dict[str, Any]:
        # A bar cannot go to another process, and is no part of what the rows depend on.
        return {**self.__dict__, "_progress": None}


def run_steps(row: Row, steps: Sequence[Step]) -> Iterator[Row]:
    """What becomes of one row under several steps, one after the other; its origin stays with all that it becomes."""
    origin = row.get(ORIGIN, UNKNOWN_ORIGIN)
    rows = [{name: value for name, value in row.items() if name != ORIGIN}]
    for step in steps:
        rows = [made for each in rows for made in step.rows(each)]
    for made in rows:
        yield {**made, ORIGIN: origin}


def _is_deep(features: object) -> bool:
    """Whether rows of these columns have positions along several axes."""
    return isinstance(features, Mapping) and _depth(features.get("position_ids")) == 2


def _depth(feature: Any) -> int:
    """How many lists lie in one another in a column of Hugging Face's."""
    return 1 + _depth(feature.feature) if hasattr(feature, "feature") else 0


def _length(columns: Columns) -> int:
    return len(next(iter(columns.values()))) if columns else 0
