"""Which characters of a written conversation are the assistant's own, where its template does not say.

A turn begins to be the model's where the generation prompt ends, and ends with what ends a turn. Templates write the
same turn differently at the end of a conversation and in its middle (thinking of earlier rounds is left out), so
nothing is taken from texts of shorter conversations that is not found again in the whole: a mark put into a turn shows
where this turn lies in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from twinkle.data_format.row_error import RowError
from twinkle.template.rendering import Span, Turn

Write = Callable[[Sequence[Turn], bool], str]
"""Conversation and whether to add a generation prompt, to text."""

MARK = "\ue000"
"""A character for private use: no text holds it."""
_PROBE: Turn = {"role": "user", "content": "?"}


class TurnFinder:
    """Finds assistants' turns in texts that ``write`` makes."""

    def __init__(self, write: Write) -> None:
        self._write = write
        answer: Turn = {"role": "assistant", "content": MARK}
        base = write([_PROBE], False)
        self._prompt = _added(base, write([_PROBE], True))
        head, _, end = write([_PROBE, answer], False).rpartition(MARK)
        self._turn_end = end.rstrip()
        middle = write([_PROBE, answer, _PROBE], False).rpartition(MARK)[0]
        before = _common(_added(base, head), _added(base, middle))
        self._header = _common(self._prompt, before)
        # Without a generation prompt the model writes everything after a question itself.
        self._lead = "" if self._prompt else before

    def spans(self, turns: Sequence[Turn], text: str) -> dict[int, Span]:
        """By number, where the assistant's turns lie in the text of the whole conversation.

        Raises:
            RowError: The template writes nothing of a turn.
        """
        starts = self._marked_starts(turns, text)
        spans: dict[int, Span] = {}
        floor = 0
        for number, at in starts.items():
            start = self._generation_start(text, floor, at)
            floor = self._end(turns, number, text, at)
            spans[number] = (start, floor)
        return spans

    def _marked_starts(self, turns: Sequence[Turn], text: str) -> dict[int, int]:
        """For each assistant's turn a place within it that is found with any text after it."""
        numbers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
        marked = self._write([next(_marked(turn)) if turn["role"] == "assistant" else turn for turn in turns], False)
        if marked.count(MARK) == len(numbers) and marked.replace(MARK, "") == text:
            places = [at for at, character in enumerate(marked) if character == MARK]
            return {number: at - before for before, (number, at) in enumerate(zip(numbers, places, strict=True))}
        return {number: self._marked_start(turns, number, text) for number in numbers}

    def _marked_start(self, turns: Sequence[Turn], number: int, text: str) -> int:
        for turn in _marked(turns[number]):
            marked = self._write([*turns[:number], turn, *turns[number + 1 :]], False)
            if MARK in marked:
                return len(_common(marked, text))
        raise RowError(
            f"messages[{number}]",
            "is left out by the model's chat template, so nothing of it can train; leave it out or fill it",
            message_number=number,
        )

    def _generation_start(self, text: str, floor: int, at: int) -> int:
        """Where the model's own begins before ``at``: after as much of the generation prompt as stands there."""
        for length in range(len(self._prompt), max(1, len(self._header)) - 1, -1):
            found = text.rfind(self._prompt[:length], floor, at)
            if found >= 0 and self._header:
                return found + length
        return at - len(self._lead) if text.endswith(self._lead, floor, at) else at

    def _end(self, turns: Sequence[Turn], number: int, text: str, at: int) -> int:
        turn = turns[number]
        content = turn.get("content")
        if self._turn_end and isinstance(content, str) and not turn.get("tool_calls"):
            rest = content.strip() + self._turn_end
            if text.startswith(rest, at):
                return at + len(rest)
        shorter = text if number == len(turns) - 1 else self._write(turns[: number + 1], False)
        begin = self._marked_start(turns[: number + 1], number, shorter)
        rest = shorter[begin:].rstrip()
        common = _common(rest, text[at:])
        if len(rest) - len(common) > len(self._turn_end):
            raise RowError(
                f"messages[{number}]",
                "is written in another way once more messages follow, so it cannot be told what of it trains; use a"
                " chat template with {% generation %}",
                message_number=number,
            )
        return at + len(common)


def _common(one: str, other: str) -> str:
    """What both begin with."""
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def _added(before: str, after: str) -> str:
    return after[len(_common(before, after)) :]


def _marked(turn: Turn) -> Iterator[Turn]:
    """The turn with a mark in its content; then, for templates that leave this out, elsewhere."""
    content = turn.get("content") or ""
    if isinstance(content, str):
        text = content.lstrip()
        yield {**turn, "content": content[: len(content) - len(text)] + MARK + text}
    else:
        texts = [index for index, part in enumerate(content) if part.get("type") == "text"]
        first = texts[0] if texts else len(content)
        part = {"type": "text", "text": MARK + (content[first]["text"].lstrip() if texts else "")}
        yield {**turn, "content": [*content[:first], part, *content[first + 1 :]]}
    if turn.get("reasoning_content"):
        yield {**turn, "reasoning_content": MARK + turn["reasoning_content"].lstrip()}
    calls: list[Any] = list(turn.get("tool_calls") or [])
    if calls:
        function = {**calls[0]["function"], "name": MARK + calls[0]["function"]["name"]}
        yield {**turn, "tool_calls": [{**calls[0], "function": function}, *calls[1:]]}
