"""Conversations before they are tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict


class FunctionCall(TypedDict, total=False):
    """The function a tool call names, and its arguments as JSON text or as the object itself."""

    name: str
    arguments: str | dict[str, Any]


class ToolCall(TypedDict, total=False):
    """A call that an assistant made."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(TypedDict, total=False):
    """One turn; ``content`` is text, or a list of ``{"type": "text", "text": ...}`` and of other media."""

    role: Literal["system", "user", "assistant", "tool"]
    type: str
    content: str | list[dict[str, Any]]
    tool_calls: list[ToolCall]
    tool_call_id: str
    reasoning_content: str


class FunctionSpec(TypedDict, total=False):
    """A function on offer; ``parameters`` is its JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]


class Tool(TypedDict, total=False):
    """A tool on offer."""

    type: Literal["function"]
    function: FunctionSpec


class Trajectory(TypedDict, total=False):
    """A conversation and what a reward needs to know about it."""

    messages: list[Message]
    tools: list[Tool]
    user_data: list[Any]
    images: list[Any]
    videos: list[Any]
    audios: list[Any]
    prompt: str


_PACKED = " "
"""Leads the JSON text of a packed value, which means nothing to JSON: '72' in a data set is text, ' 72' is a number."""


def pack_value(value: object) -> str:
    """A value as JSON text, for ``user_data``: the columns of a data set hold values of one type alone."""
    return _PACKED + json.dumps(value, ensure_ascii=False)


def user_data_get(items: Iterable[Any] | Mapping[str, Any] | None, key: str, default: Any = None) -> Any:
    """The first value of a key in ``user_data``: a list of (key, value) pairs or of objects, or one object.

    What :func:`pack_value` made, and the JSON text of an object, a list or a text, comes back as it was.
    """
    for item in [items] if isinstance(items, Mapping) else items or ():
        if isinstance(item, Mapping):
            if item.get(key) is not None:
                return _unpacked(item[key])
        elif isinstance(item, Sequence) and len(item) == 2 and item[0] == key:
            return _unpacked(item[1])
    return default


def _unpacked(value: Any) -> Any:
    if not isinstance(value, str) or value[:1] not in (_PACKED, "{", "[", '"'):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
