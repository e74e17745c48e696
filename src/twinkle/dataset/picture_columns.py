"""Which columns encoded rows have where only some of them hold pictures: each batch is written with all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute

from twinkle.data_format.media import IMAGE_TYPES
from twinkle.dataset.steps import Encode, OverColumns, Step

IMAGES, MESSAGES = "images", "messages"
PIXELS = "pixel_values"


def picture_columns(rows: Any, step: Step) -> datasets.Features | None:
    """The columns that a data set of Hugging Face's has once it is encoded; None if no row keeps a picture.

    Fields that are conversations themselves (``positive``, ``negative``) have pictures of their own, or none.
    """
    if not isinstance(step, Encode):
        return None
    nested = [name for name, feature in rows.features.items() if isinstance(feature, Mapping) and MESSAGES in feature]
    if not nested:
        return _columns(rows, step)
    encoded = {name: _first_encoded(rows, step, name) for name in nested}
    found = {name: columns[name][0] for name, columns in encoded.items() if columns is not None}
    if not found:
        return None
    one = next(columns for columns in encoded.values() if columns is not None)
    made: dict[str, Any] = {}
    for name, values in one.items():
        if name not in nested:
            made[name] = rows.features.get(name) or _feature_of(values[0])
        else:
            inner = {key: _feature_of(value) for key, value in found.get(name, values[0]).items()}
            made[name] = {**inner, **{key: each for key, each in rows.features[name].items() if key in inner}}
    return datasets.Features(made)


def _columns(rows: Any, step: Encode) -> datasets.Features | None:
    for number in _with_pictures(rows):
        columns = OverColumns(step)(rows[number : number + 1])
        if PIXELS in columns:
            made = {name: values for name, values in columns.items() if name not in rows.features}
            kept = {name: feature for name, feature in rows.features.items() if name in columns}
            return datasets.Features({**kept, **datasets.Dataset.from_dict(made).features})
    return None


def _first_encoded(rows: Any, step: Encode, name: str) -> dict[str, list[Any]] | None:
    """The first row whose field of this name keeps a picture, encoded."""
    for number in _with_pictures(rows, name):
        columns = OverColumns(step)(rows[number : number + 1])
        if columns.get(name) and PIXELS in columns[name][0]:
            return columns
    return None


def _feature_of(value: Any) -> Any:
    return datasets.Dataset.from_dict({"value": [value]}).features["value"]


def _with_pictures(rows: Any, within: str | None = None) -> Iterator[int]:
    """The numbers of the rows that hold pictures, in order, or in one of their fields; no picture is decoded for it."""
    features = rows.features if within is None else rows.features[within]
    if IMAGES in features and _is_list(features[IMAGES]):
        column = rows.with_format("arrow")[IMAGES if within is None else within]
        lists = column if within is None else pa.compute.struct_field(column, IMAGES)
        lengths = pa.compute.list_value_length(lists).to_pylist()
        yield from (number for number, length in enumerate(lengths) if length)
    if MESSAGES in features and any(mark in str(features[MESSAGES]) for mark in ("'type'", f"'{IMAGES}'")):
        for number, row in enumerate(rows.select_columns([MESSAGES if within is None else within])):
            messages = (row if within is None else row[within] or {}).get(MESSAGES)
            if any(message.get(IMAGES) or _holds_picture(message.get("content")) for message in messages or ()):
                yield number


def _holds_picture(content: Any) -> bool:
    return isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") in IMAGE_TYPES for part in content
    )


def _is_list(feature: Any) -> bool:
    return isinstance(feature, (list, datasets.List, datasets.LargeList))
