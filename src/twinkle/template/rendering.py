"""A conversation as the text that a model reads, by the chat template that comes with its tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from twinkle.core.errors import InvalidInput
from twinkle.data_format.messages import names_reasoning
from twinkle.data_format.row_error import RowError

Turn = Mapping[str, Any]
Span = tuple[int, int]

MARK = "\ue000"
"""A character for private use: no text holds it, and where it is found shows what a template does with a text."""

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
    """Jinja templates are a stranger's code: transformers renders them in a sandbox, from plain data alone.

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
        try:
            # It is declared to return a text.
            rendered: Any = render_jinja_template(
                conversations=[[dict(turn) for turn in turns]],
                tools=[dict(tool) for tool in tools] if tools else None,
                chat_template=source,
                return_assistant_tokens_mask=self._marks_generation,
                add_generation_prompt=add_generation_prompt,
                **{**self._tokenizer.special_tokens_map, **self._variables},
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise RowError("messages", f"the model's chat template refuses them: {error}") from error
        (text,), spans = rendered
        return text, [(start, end) for start, end in spans[0]] if spans else []


def _with_argument_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
