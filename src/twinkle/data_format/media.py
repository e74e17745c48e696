"""Where the pictures of a row belong in its messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from twinkle.data_format.row_error import RowError

IMAGE_MARK = "<image>"
IMAGE_PART = {"type": "image"}
IMAGE_TYPES = ("image", "image_url", "input_image")
SOURCES = ("image", "image_url", "url", "path", "base64")
NOT_TAKEN = {"videos": ("video", "video_url"), "audios": ("audio", "audio_url", "input_audio")}
NOT_TAKEN_REASON = "are not taken, only images are; leave them out, or send pictures of a film as images"

Message = dict[str, Any]


OF_PICTURES = ("pixel_values", "image_grid_thw", "image_position_ids")
"""What encoded rows hold of their pictures, one after the other."""


def pictures_between(media: Mapping[str, Any], first: int, last: int) -> dict[str, Any]:
    """The fields of an encoded row that are of its pictures, of some of them; nothing for none.

    Args:
        media: Of the row: patches of all pictures in a row with a grid for each (Qwen), or pictures filled up to the
            same size (Gemma).
        first: The first picture wanted.
        last: Behind the last.
    """
    if first >= last:
        return {}
    kept = {name: media[name][first:last] for name in OF_PICTURES if media.get(name) is not None}
    if "image_grid_thw" in kept and "image_position_ids" not in kept:
        ends = np.cumsum([0, *np.asarray(media["image_grid_thw"]).prod(axis=1)])
        kept["pixel_values"] = media["pixel_values"][int(ends[first]) : int(ends[last])]
    return kept


def num_pictures(media: Mapping[str, Any]) -> int:
    """How many pictures the fields of an encoded row are of."""
    by_picture = (media.get(name) for name in ("image_grid_thw", "image_position_ids", "pixel_values"))
    return next((len(values) for values in by_picture if values is not None), 0)


def with_alike_messages(columns: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """The columns with ``images`` in every message if one has some: no picture lasts as JSON, which else they become.

    Args:
        columns: Of conversations; messages stand in ``messages``, and all else stays as it is.
    """
    rows = columns.get("messages") or []
    if not any("images" in message for row in rows for message in row or () if isinstance(message, Mapping)):
        return dict(columns)
    alike = [[{**message, "images": list(message.get("images") or ())} for message in row or ()] for row in rows]
    return {**columns, "messages": alike}


def with_pictures(messages: Sequence[Message], row: Mapping[str, Any]) -> tuple[list[Message], list[Any]]:
    """The messages with a part for every picture, and the pictures in the order of these parts.

    A part may bring its picture; else it, and every ``<image>`` in a text, gets the message's own ``images`` first,
    then the row's. What is left stands before the first user's text. A row without pictures stays as it is.

    Raises:
        RowError: There are more places than pictures, or films or sounds.
    """
    _refuse_others(messages, row)
    _check_lists(messages, row)
    if not (row.get("images") or any(message.get("images") for message in messages) or _has_parts(messages)):
        return list(messages), []
    shared = iter(row.get("images") or ())
    placed = [_placed(number, message, shared) for number, message in enumerate(messages)]
    left = list(shared)
    if left:
        first = next((number for number, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            raise RowError("images", f"hold {len(left)} pictures without a place, and there is no user's message")
        message, pictures = placed[first]
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        placed[first] = ({**message, "content": [*(IMAGE_PART for _ in left), *parts]}, [*left, *pictures])
    return [message for message, _ in placed], [picture for _, pictures in placed for picture in pictures]


def _check_lists(messages: Sequence[Message], row: Mapping[str, Any]) -> None:
    for number, holder in [(None, row), *enumerate(messages)]:
        images = holder.get("images")
        if images is not None and (isinstance(images, str | bytes | Mapping) or not isinstance(images, Iterable)):
            field = "images" if number is None else f"messages[{number}].images"
            raise RowError(field, f"is a {type(images).__name__}; send a list of pictures", message_number=number)


def _refuse_others(messages: Sequence[Message], row: Mapping[str, Any]) -> None:
    for name, types in NOT_TAKEN.items():
        if row.get(name):
            raise RowError(name, NOT_TAKEN_REASON)
        for number, message in enumerate(messages):
            if message.get(name):
                raise RowError(f"messages[{number}].{name}", NOT_TAKEN_REASON, message_number=number)
            parts = message["content"] if isinstance(message["content"], list) else []
            for place, part in enumerate(parts):
                if part["type"] in types:
                    reason = f"is of type {part['type']!r}; {name} {NOT_TAKEN_REASON}"
                    raise RowError(f"messages[{number}].content[{place}]", reason, message_number=number)


def _has_parts(messages: Sequence[Message]) -> bool:
    return any(
        part["type"] in IMAGE_TYPES
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
    )


def _placed(number: int, message: Message, shared: Iterator[Any]) -> tuple[Message, list[Any]]:
    own = list(message.get("images") or ())
    plain = {name: value for name, value in message.items() if name != "images"}
    content = message["content"]
    pictures: list[Any] = []
    parts: list[dict[str, Any]] = []

    def take() -> Any:
        picture = own.pop(0) if own else next(shared, None)
        if picture is None:
            raise RowError(
                "images", f"are fewer than the places that messages hold for them; message {number} has none for one"
            )
        return picture

    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        if part["type"] in IMAGE_TYPES:
            brought = _source(part)
            pictures.append(take() if brought is None else brought)
            parts.append(IMAGE_PART)
            continue
        for index, text in enumerate(part["text"].split(IMAGE_MARK)):
            if index:
                pictures.append(take())
                parts.append(IMAGE_PART)
            if text:
                parts.append({"type": "text", "text": text})
    if not pictures and not own:
        return plain, []
    return {**plain, "content": [*(IMAGE_PART for _ in own), *parts]}, [*own, *pictures]


def _source(part: Mapping[str, Any]) -> Any:
    value = next((part[name] for name in SOURCES if part.get(name) is not None), None)
    return value.get("url") if isinstance(value, Mapping) and set(value) <= {"url", "detail"} else value
