"""Conversations before they are tokens."""

from __future__ import annotations

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
