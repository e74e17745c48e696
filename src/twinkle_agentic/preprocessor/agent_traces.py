"""Conversations in which tools are called: told from others, and their calls brought into one form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from twinkle.data_format.tool_calls import parse_tool_calls, without_tool_calls
from twinkle.reward.base import text_of
from twinkle_agentic.preprocessor.base import QualityFilter, Row, calls_of, messages_of

RESPONSE = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)
OBSERVATION = re.compile(r"\s*Observation\s*:\s*(.*)", re.DOTALL)
RESULT = re.compile(r"\s*\[\w+[^\]\n]*\]\s*Result:\s*(.*)", re.DOTALL)


class AgentTraceFilter(QualityFilter):
    """Notes in ``is_agent`` whether tools are called in a conversation, in whichever known way; drops nothing."""

    adds = ("is_agent",)

    def mend(self, row: Row) -> Row:
        """See :class:`QualityFilter`."""
        return {**row, "is_agent": any(map(_is_of_tools, messages_of(row)))}


class ToolCallNormalizer(QualityFilter):
    """Brings calls that stand in an assistant's text into ``tool_calls``, and what they returned into tools' messages.

    Calls are read as a template reads them (Hermes, Qwen, DeepSeek, Cline, VCP, ReAct, Gemma); ``arguments`` become
    JSON text, ids are unique within the conversation, and the text keeps what is not a call. A user's message right
    after is the tools' if it is all ``<tool_response>`` blocks, or begins with ``Observation:`` or ``[tool] Result:``.
    Calls that came as JSON text become a list. Other rows stay as they are.
    """

    def mend(self, row: Row) -> Row:
        """See :class:`QualityFilter`."""
        made: list[dict[str, Any]] = []
        number, waiting = 0, list[str]()
        for message in messages_of(row):
            role = message.get("role")
            if role == "user" and waiting and (results := _results(text_of(message.get("content")))):
                names = [*waiting[: len(results)], *[""] * (len(results) - len(waiting))]
                made += [
                    {"role": "tool", "content": result, **({"tool_call_id": name} if name else {})}
                    for name, result in zip(names, results, strict=True)
                ]
                waiting = waiting[len(results) :]
                continue
            normal = _with_calls(message, number) if role == "assistant" else dict(message)
            calls = calls_of(normal)
            number += len(calls)
            if role != "tool":
                waiting = [str(call.get("id") or "") for call in calls]
            made.append(normal)
        return {**row, "messages": made}


def _is_of_tools(message: Mapping[str, Any]) -> bool:
    if message.get("role") == "tool" or calls_of(message):
        return True
    return message.get("role") == "assistant" and bool(parse_tool_calls(text_of(message.get("content"))))


def _with_calls(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The message with its calls as a list; those of its text get ids from ``number`` on."""
    content = message.get("content")
    if given := calls_of(message):
        return {**message, "tool_calls": [_normal(call, number + i) for i, call in enumerate(given)]}
    found = parse_tool_calls(content) if isinstance(content, str) else []
    if not found:
        return dict(message)
    calls = [{**call, "id": f"call_{number + i}"} for i, call in enumerate(found)]
    return {**message, "content": without_tool_calls(str(content)), "tool_calls": calls}


def _normal(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if not isinstance(function.get("arguments", ""), str):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {
        **call,
        "id": call.get("id") or f"call_{number}",
        "type": call.get("type") or "function",
        "function": function,
    }


def _results(text: str) -> list[str]:
    """What tools returned, if a text is nothing else."""
    # Both ends first: then every beginning has an end, and none is looked for in vain.
    if text.lstrip().startswith("<tool_response>") and text.rstrip().endswith("</tool_response>"):
        return [] if RESPONSE.sub("", text).strip() else RESPONSE.findall(text)
    found = OBSERVATION.match(text) or RESULT.match(text)
    return [found.group(1).strip()] if found else []
