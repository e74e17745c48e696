"""A conversation as the text that a model reads, by the chat template that comes with its tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
from jinja2 import TemplateError

from twinkle.core.errors import InvalidInput
from twinkle.data_format.chat_template import ChatTemplateCode
from twinkle.data_format.messages import names_reasoning
from twinkle.data_format.row_error import RowError

Turn = Mapping[str, Any]
Span = tuple[int, int]

MARK = "\ue000"
"""A character for private use: no text holds it, and where it is found shows what a template does with a text."""

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_SCALARS = (bool, str, int, float)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Renderer(Protocol):
    """What writes conversations."""

    reads_reasoning: bool
    """Whether it knows ``reasoning_content``; if not, reasoning goes into the content."""

    def render(self, turns: Sequence[Turn], tools: Sequence[Turn] | None, *, add_generation_prompt: bool) -> str:
        """The text of a conversation; ``RowError`` if it cannot be written."""
        ...

    def generated_spans(self, turns: Sequence[Turn], tools: Sequence[Turn] | None) -> list[Span] | None:
        """Where in the text lies what the template says is the model's; None if it says nothing."""
        ...


class ChatTemplate:
    """Jinja templates are a stranger's code: they run in a bounded sandbox, and see plain data alone.

    Some want contents as parts, some as one text; some want the arguments of calls as objects, some as JSON text. What
    one wants is found out by trying, and turns are given to it so.

    Args:
        tokenizer: Holds the template.
        variables: What the template may read besides the conversation.
    """

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any]) -> None:
        if not tokenizer.chat_template:
            raise InvalidInput(
                "model_id", "has no chat template; take its instruct model, or use_chat_template=False for plain text"
            )
        self._tokenizer = tokenizer
        self._variables = dict(variables)
        self._source: str = tokenizer.get_chat_template()
        self.reads_reasoning = names_reasoning(self._source)
        self._marks_generation = _GENERATION.search(self._source) is not None

    def render(self, turns: Sequence[Turn], tools: Sequence[Turn] | None, *, add_generation_prompt: bool) -> str:
        """See :class:`Renderer`."""
        return self._run(self._fitted(turns), tools, add_generation_prompt=add_generation_prompt)[0]

    def generated_spans(self, turns: Sequence[Turn], tools: Sequence[Turn] | None) -> list[Span] | None:
        """See :class:`Renderer`; what ``{% generation %}`` encloses."""
        if not self._marks_generation:
            return None
        return self._run(self._fitted(turns), tools, add_generation_prompt=False)[1]

    def reads(self, name: str) -> bool:
        """Whether the template mentions a variable."""
        return re.search(rf"\b{re.escape(name)}\b", self._source) is not None

    @cached_property
    def _takes_text(self) -> bool:
        return MARK in self._tried([{"role": "user", "content": MARK}]) or not self._takes_parts

    @cached_property
    def _takes_parts(self) -> bool:
        written = self._tried([{"role": "user", "content": [{"type": "text", "text": MARK}]}])
        return MARK in written and "'type'" not in written

    @cached_property
    def _takes_argument_objects(self) -> bool:
        call = {"type": "function", "function": {"name": MARK, "arguments": {}}}
        question = {"role": "user", "content": "?"}
        return MARK in self._tried([question, {"role": "assistant", "content": "", "tool_calls": [call]}])

    def _tried(self, turns: Sequence[Turn]) -> str:
        try:
            return self._run(turns, None, add_generation_prompt=False)[0]
        except RowError:
            return ""

    def _fitted(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        fitted: list[dict[str, Any]] = []
        for turn in turns:
            made = dict(turn)
            content = turn.get("content")
            if isinstance(content, str) and not self._takes_text:
                made["content"] = [{"type": "text", "text": content}]
            elif isinstance(content, list) and not self._takes_parts and all(p["type"] == "text" for p in content):
                made["content"] = "".join(part["text"] for part in content)
            if turn.get("tool_calls") and not self._takes_argument_objects:
                made["tool_calls"] = [_with_argument_text(call) for call in turn["tool_calls"]]
            fitted.append(made)
        return fitted

    def _run(
        self, turns: Sequence[Turn], tools: Sequence[Turn] | None, *, add_generation_prompt: bool
    ) -> tuple[str, list[Span]]:
        source = self._tokenizer.get_chat_template(tools=list(tools) if tools else None)
        values = {
            **self._tokenizer.special_tokens_map,
            "messages": [_with_all_reasoning(turn) for turn in turns],
            "tools": [dict(tool) for tool in tools] if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._variables,
        }
        try:
            return _compiled(source).render_with_spans(_plain(values))
        except TemplateError as error:
            raise RowError("messages", f"the model's chat template refuses them: {error}") from error


@lru_cache(maxsize=32)
def _compiled(source: str) -> ChatTemplateCode:
    # What day it is, where the script runs.
    return ChatTemplateCode(source, lambda: datetime.now().astimezone())


def _with_all_reasoning(turn: Turn) -> dict[str, Any]:
    """Templates read reasoning by one of several names, of which rows have any."""
    reasoning = next((turn[name] for name in _REASONING_NAMES if turn.get(name) is not None), None)
    if reasoning is None:
        return dict(turn)
    return {"thinking": reasoning, **turn, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """The same as a template may see it: of pictures, tensors and the like only that they are there."""
    if value is None or type(value) in _SCALARS:
        return value
    if isinstance(value, Mapping):
        # Nearly all are texts by texts, which need no second call.
        return {
            key if type(key) is str else _plain(key): item if type(item) is str else _plain(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return _plain(value.item())
    for kind in _SCALARS:
        if isinstance(value, kind):
            # Of a subclass, which may do more, its plain value.
            return kind(value)
    return f"<{type(value).__name__}>"


def _with_argument_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
