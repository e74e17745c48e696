"""Which columns encoded rows have where only some of them hold pictures: each batch is written with all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import datasets
import pyarrow.compute

from twinkle.data_format.media import IMAGE_TYPES
from twinkle.dataset.steps import Encode, OverColumns, Step

IMAGES, MESSAGES = "images", "messages"


def picture_columns(rows: Any, step: Step) -> datasets.Features | None:
    """The columns that a data set of Hugging Face's has once it is encoded; None if no row keeps a picture."""
    if not isinstance(step, Encode):
        return None
    for number in _with_pictures(rows):
        columns = OverColumns(step)(rows[number : number + 1])
        if "pixel_values" in columns:
            made = {name: values for name, values in columns.items() if name not in rows.features}
            kept = {name: feature for name, feature in rows.features.items() if name in columns}
            return datasets.Features({**kept, **datasets.Dataset.from_dict(made).features})
    return None


def _with_pictures(rows: Any) -> Iterator[int]:
    """The numbers of the rows that hold pictures, in order; no picture is decoded for it."""
    if IMAGES in rows.column_names and _is_list(rows.features[IMAGES]):
        lengths = pyarrow.compute.list_value_length(rows.with_format("arrow")[IMAGES]).to_pylist()
        yield from (number for number, length in enumerate(lengths) if length)
    if MESSAGES in rows.column_names and "'type'" in str(rows.features[MESSAGES]):
        for number, row in enumerate(rows.select_columns([MESSAGES])):
            if any(_holds_picture(message.get("content")) for message in row[MESSAGES] or ()):
                yield number


def _holds_picture(content: Any) -> bool:
    return isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") in IMAGE_TYPES for part in content
    )


def _is_list(feature: Any) -> bool:
    return isinstance(feature, (list, datasets.List, datasets.LargeList))
