"""A row's messages in the one form that chat templates are given."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.data_format.row_error import RowError

ROLES = ("system", "developer", "user", "assistant", "tool")
THINK_START, THINK_END = "<think>", "</think>"
# transformers gives templates the reasoning under both names.
_REASONING = re.compile(r"\breasoning_content\b|\.thinking\b|['\"]thinking['\"]")


def read_messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Copies of the messages of a row, checked; keys that hold nothing are gone, as Arrow fills in what is missing.

    Raises:
        RowError: Names the message and what is wrong with it.
    """
    messages = row.get("messages")
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        found = "is missing" if messages is None else f"is a {type(messages).__name__}"
        raise RowError("messages", f"{found}; send a list of messages, each with role and content")
    if not messages:
        raise RowError("messages", "is empty; send at least one message")
    return [_read_message(number, message) for number, message in enumerate(messages)]


def read_tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools of a row, a list or the JSON text of one; None if there are none."""
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = _json("tools", tools) if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, (Mapping, str)) for tool in tools):
        raise RowError("tools", "must be a list of tools, or the JSON text of one")
    return [_json(f"tools[{i}]", tool) if isinstance(tool, str) else _filled(tool) for i, tool in enumerate(tools)]


def with_system(messages: Sequence[dict[str, Any]], default_system: str | None) -> list[dict[str, Any]]:
    """The messages, opened by the default system message if they have none."""
    if default_system is None or messages[0]["role"] == "system":
        return list(messages)
    return [{"role": "system", "content": default_system}, *messages]


def with_reasoning(messages: Sequence[dict[str, Any]], *, is_read: bool) -> list[dict[str, Any]]:
    """The messages with reasoning where the chat template looks for it.

    That is in ``reasoning_content`` if the template reads it, else at the head of the content.
    """
    return [_placed_reasoning(message, is_read) if message["role"] == "assistant" else message for message in messages]


def names_reasoning(template: str) -> bool:
    """Whether a chat template reads the reasoning of a message by itself."""
    return _REASONING.search(template) is not None


def split_reasoning(text: str) -> tuple[str | None, str]:
    """The thinking at the head of an answer, if there is any, and the answer after it."""
    thinking, end, answer = text.partition(THINK_END)
    before, start, inner = thinking.partition(THINK_START)
    if not end or (start and before.strip()):
        return None, text
    return (inner if start else before).strip("\n"), answer.lstrip("\n")


def _placed_reasoning(message: dict[str, Any], is_read: bool) -> dict[str, Any]:
    content, reasoning = message.get("content"), message.get("reasoning_content")
    if not isinstance(content, str):
        return message
    if is_read and not reasoning:
        found, answer = split_reasoning(content)
        return message if found is None else {**message, "reasoning_content": found, "content": answer}
    if not is_read and reasoning:
        plain = {name: value for name, value in message.items() if name != "reasoning_content"}
        return {**plain, "content": f"{THINK_START}\n{reasoning}\n{THINK_END}\n\n{content}"}
    return message


def _read_message(number: int, message: object) -> dict[str, Any]:
    field = f"messages[{number}]"
    if not isinstance(message, Mapping):
        raise RowError(field, f"is a {type(message).__name__}; send role and content", message_number=number)
    known = {str(name): value for name, value in message.items() if value is not None}
    role = known.get("role")
    if role not in ROLES:
        raise RowError(f"{field}.role", f"is {role!r}; send one of {', '.join(ROLES)}", message_number=number)
    calls = known.get("tool_calls")
    if calls is not None:
        if isinstance(calls, (str, Mapping)) or not isinstance(calls, Sequence):
            kind = type(calls).__name__
            raise RowError(f"{field}.tool_calls", f"is a {kind}; send a list of calls", message_number=number)
        known["tool_calls"] = [_read_call(f"{field}.tool_calls[{i}]", number, call) for i, call in enumerate(calls)]
    known["content"] = _read_content(f"{field}.content", number, known.get("content"), has_calls=bool(calls))
    return known


def _read_content(field: str, number: int, content: object, *, has_calls: bool) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if content is None:
        if has_calls:
            return ""
        raise RowError(field, "is missing; send text, or an empty one", message_number=number)
    if not isinstance(content, Sequence):
        kind = type(content).__name__
        raise RowError(field, f"is a {kind}; send text or a list of parts", message_number=number)
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
            continue
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise RowError(f"{field}[{i}]", "must be text, or a part with a type", message_number=number)
        known = _filled(part)
        if known["type"] == "text" and not isinstance(known.get("text"), str):
            raise RowError(f"{field}[{i}].text", "is missing; send the text of the part", message_number=number)
        parts.append(known)
    return parts


def _read_call(field: str, number: int, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowError(field, "names no function; send {'function': {'name', 'arguments'}}", message_number=number)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # Templates write objects as they wish; text they would write as a string within a string.
        arguments = _json(f"{field}.function.arguments", arguments or "{}", message_number=number)
    elif isinstance(arguments, Mapping):
        arguments = _filled(arguments)
    elif arguments is None:
        arguments = {}
    else:
        raise RowError(f"{field}.function.arguments", "must be an object or its JSON text", message_number=number)
    return {**_filled(call), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _filled(value: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name): inner for name, inner in value.items() if inner is not None}


def _json(field: str, text: str, *, message_number: int | None = None) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RowError(field, f"is no JSON: {error}", message_number=message_number) from error
