"""Conversations written out, and which of their characters train."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twinkle.data_format.media import with_pictures
from twinkle.data_format.messages import read_messages, read_tools, with_reasoning, with_system
from twinkle.template.rendering import Renderer, Span
from twinkle.template.spans import TurnFinder, TurnMarks, key_rounds
from twinkle.template.starts import TurnStarts
from twinkle.template.tokenizing import Written

Trajectory = Mapping[str, Any]

UNUSED_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "none", "description": "", "parameters": {"type": "object", "properties": {}}},
}


class ConversationWriter:
    """Writes conversations with one renderer, and learns from the first ones how it writes a turn.

    Args:
        renderer: What writes them.
        special_tokens: Of the tokenizer, as texts; asked for once.
    """

    def __init__(self, renderer: Renderer, special_tokens: Callable[[], Mapping[str, int]]) -> None:
        self._renderer = renderer
        self._special_tokens = special_tokens
        self._marks_of: dict[bool, TurnMarks] = {}
        self._starts: TurnStarts | None = None

    def turns(
        self, trajectory: Trajectory, add_generation_prompt: bool, *, default_system: str | None
    ) -> tuple[list[dict[str, Any]], list[Any]]:
        """The messages as the chat template is given them, and the pictures that belong into them."""
        messages, pictures = with_pictures(read_messages(trajectory), trajectory)
        if add_generation_prompt and _is_empty_answer(messages[-1]):
            messages = messages[:-1]
        messages = with_system(messages, default_system)
        return with_reasoning(messages, is_read=self._renderer.reads_reasoning), pictures

    def written(self, trajectory: Trajectory, add_generation_prompt: bool, *, default_system: str | None) -> Written:
        """A trajectory as text, however long, and what of it trains.

        Raises:
            RowError: It is no conversation, or the template refuses it.
        """
        turns, pictures = self.turns(trajectory, add_generation_prompt, default_system=default_system)
        tools = read_tools(trajectory)
        text = self._renderer.render(turns, tools, add_generation_prompt=add_generation_prompt)
        spans: list[Span] = []
        if not add_generation_prompt:
            text, spans = self._training_spans(trajectory, turns, tools, text)
        return Written(text, spans, pictures)

    def _training_spans(
        self, trajectory: Trajectory, turns: list[dict[str, Any]], tools: list[dict[str, Any]] | None, text: str
    ) -> tuple[str, list[Span]]:
        """Which characters train, and the text with the last turn's end, which some templates do not write."""
        rounds = key_rounds(trajectory, turns)
        marked = self._renderer.generated_spans(turns, tools)
        if marked is not None and rounds is None:
            return text, marked

        def write(some: Sequence[Any], add_generation_prompt: bool) -> str:
            return self._renderer.render(some, tools, add_generation_prompt=add_generation_prompt)

        marks = self._turn_marks(bool(tools))
        found = TurnFinder(write, marks, None if tools else self._starts_after(marks)).spans(turns, text)
        chosen = [span for number, span in found.items() if rounds is None or number in rounds]
        if marked is None and chosen and chosen[-1][1] == len(text) and turns[-1]["role"] == "assistant":
            end = marks.unwritten_end(write, turns, text)
            return text + end, [*chosen[:-1], (chosen[-1][0], len(text + end))]
        if marked is None:
            return text, chosen
        return text, [span for span in marked if any(start < span[1] and span[0] < end for start, end in chosen)]

    def _starts_after(self, marks: TurnMarks) -> TurnStarts:
        if self._starts is None:
            self._starts = TurnStarts(marks.header)
        return self._starts

    def _turn_marks(self, has_tools: bool) -> TurnMarks:
        """By what turns are told apart; a tokenizer may have another chat template for conversations with tools."""
        if has_tools not in self._marks_of:
            tools = [UNUSED_TOOL] if has_tools else None

            def write(some: Sequence[Any], add_generation_prompt: bool) -> str:
                return self._renderer.render(some, tools, add_generation_prompt=add_generation_prompt)

            self._marks_of[has_tools] = TurnMarks.found(write, self._special_tokens())
        return self._marks_of[has_tools]


def _is_empty_answer(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and not message["content"] and not message.get("tool_calls")
