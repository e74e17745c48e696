"""A conversation as the text that a model reads, by the chat template that comes with its tokenizer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from twinkle.core.errors import InvalidInput
from twinkle.data_format.row_error import RowError

Turn = Mapping[str, Any]
Span = tuple[int, int]

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
        self.reads_reasoning = "reasoning_content" in self._source
        self._marks_generation = _GENERATION.search(self._source) is not None

    def render(self, turns: Sequence[Turn], tools: Sequence[Turn] | None, *, add_generation_prompt: bool) -> str:
        """See :class:`Renderer`."""
        return self._run(turns, tools, add_generation_prompt=add_generation_prompt)[0]

    def generated_spans(self, turns: Sequence[Turn], tools: Sequence[Turn] | None) -> list[Span] | None:
        """See :class:`Renderer`; what ``{% generation %}`` encloses."""
        if not self._marks_generation:
            return None
        return self._run(turns, tools, add_generation_prompt=False)[1]

    def reads(self, name: str) -> bool:
        """Whether the template mentions a variable."""
        return re.search(rf"\b{re.escape(name)}\b", self._source) is not None

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
