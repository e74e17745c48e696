"""What a client of the Twinkle dialect says of the rows of a data set: a ``DatasetMeta`` as JSON, read and checked.

It names rows of a hub, of a file of the tenant's, or brings them; never a path of the server's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from twinkle.core.errors import InvalidInput
from twinkle.core.processors import FILE_PREFIX, MAX_ROWS

FIELD = "dataset_meta"
_KEYS = frozenset({"dataset_id", "subset_name", "split", "data_slice", "data", "_TWINKLE_TYPE_"})
_SLICES = frozenset({"_slice_type_", "start", "stop", "step", "values"})
_SCHEMES = ("ms://", "hf://")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[A-Za-z0-9][\w./-]{0,95})?", re.ASCII)
_NAME = re.compile(r"[\w][\w.+=-]{0,95}", re.ASCII)


@dataclass(frozen=True)
class RowsOf:
    """Which rows: of ``dataset_id``, or ``data``; ``data_slice`` are numbers of rows, or all."""

    dataset_id: str = ""
    subset_name: str = "default"
    split: str = "train"
    data_slice: range | tuple[int, ...] | None = None
    data: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]] | None = None

    @property
    def file_id(self) -> str | None:
        """The tenant's file that holds them."""
        return self.dataset_id if self.dataset_id.startswith(FILE_PREFIX) else None

    @property
    def path(self) -> str | None:
        """A path of this machine, which the operator may have opened."""
        meant = _without_schemes(self.dataset_id)
        return meant if meant.startswith(("/", ".", "~")) else None


def read_dataset_meta(value: object) -> RowsOf:
    """Read what a client sent: an object, a JSON text with one, or an id alone.

    Raises:
        InvalidInput: It is none of these, or names what is no data set.
    """
    if isinstance(value, str):
        value = _parsed(value)
    if not isinstance(value, Mapping):
        raise InvalidInput(FIELD, "must be a DatasetMeta, as an object or as JSON text")
    unknown = sorted(set(value) - _KEYS)
    if unknown:
        raise InvalidInput(FIELD, f"has the unknown key {str(unknown[0])[:100]!r}")
    rows = RowsOf(
        dataset_id=_text(value, "dataset_id", "") or "",
        subset_name=_name(value, "subset_name", "default"),
        split=_name(value, "split", "train"),
        data_slice=_slice(value.get("data_slice")),
        data=_data(value.get("data")),
    )
    _check_origin(rows)
    return rows


def _parsed(text: str) -> object:
    if not text.lstrip().startswith("{"):
        return {"dataset_id": text}
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(FIELD, "is no JSON") from error


def _check_origin(rows: RowsOf) -> None:
    if rows.data is not None:
        if rows.dataset_id:
            raise InvalidInput(FIELD, "names a data set and brings rows; one of both")
        return
    if not rows.dataset_id:
        raise InvalidInput(FIELD, "has neither dataset_id nor data")
    if rows.file_id is None and rows.path is None and not is_hub_id(rows.dataset_id):
        raise InvalidInput(
            FIELD,
            "dataset_id must be ms://org/name, hf://org/name, org/name, or the id of a file that you uploaded"
            f" ({FILE_PREFIX}...)",
        )


def is_hub_id(text: str) -> bool:
    """Whether a text names a repository of a hub and cannot be taken for a path."""
    meant = _without_schemes(text)
    return _REPOSITORY.fullmatch(meant) is not None and ".." not in PurePosixPath(meant).parts


def _without_schemes(text: str) -> str:
    while text.startswith(_SCHEMES):
        text = text[len(_SCHEMES[0]) :]
    return text


def _text(value: Mapping[str, Any], key: str, default: str) -> str:
    found = value.get(key)
    if found is None:
        return default
    if not isinstance(found, str) or len(found) > 1000 or "\x00" in found:
        raise InvalidInput(FIELD, f"{key} must be a text of at most 1000 characters, none of them NUL")
    return found


def _name(value: Mapping[str, Any], key: str, default: str) -> str:
    name = _text(value, key, default) or default
    if _NAME.fullmatch(name) is None:
        raise InvalidInput(FIELD, f"{key} must be a name of letters, digits and ._+=-")
    return name


def _slice(value: object) -> range | tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, list):
        return _numbers(value)
    if not isinstance(value, Mapping) or set(value) - _SLICES:
        raise InvalidInput(FIELD, "data_slice must be a range or a list of row numbers")
    if value.get("_slice_type_") == "list":
        return _numbers(value.get("values"))
    bounds = [value.get("start", 0), value.get("stop"), value.get("step", 1)]
    if not all(_is_int(bound) for bound in bounds) or bounds[2] == 0:
        raise InvalidInput(FIELD, "data_slice must have whole numbers as start, stop and step")
    start, stop, step = (int(str(bound)) for bound in bounds)
    found = range(start, stop, step)
    if any(abs(bound) > 2**62 for bound in (start, stop, step)) or len(found) > MAX_ROWS:
        raise InvalidInput(FIELD, f"data_slice takes more than {MAX_ROWS} rows")
    if len(found) and min(found[0], found[-1]) < 0:
        raise InvalidInput(FIELD, "data_slice takes rows before the first")
    return found


def _numbers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(_is_int(number) and 0 <= number < 2**62 for number in value):
        raise InvalidInput(FIELD, "data_slice must be a list of row numbers")
    if len(value) > MAX_ROWS:
        raise InvalidInput(FIELD, f"data_slice takes more than {MAX_ROWS} rows")
    return tuple(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _data(value: object) -> Any:
    if value is None:
        return None
    if isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value):
        if len(value) > MAX_ROWS:
            raise InvalidInput(FIELD, f"data has more than {MAX_ROWS} rows")
        return value
    if isinstance(value, Mapping) and value and all(isinstance(column, list) for column in value.values()):
        return value
    raise InvalidInput(FIELD, "data must be a list of rows, or an object of columns, and not empty")
