"""Which characters of a written conversation are the assistant's own, where its template does not say.

A turn begins to be the model's where the generation prompt ends, and ends with what ends a turn. Templates write the
same turn differently at the end of a conversation and in its middle (thinking of earlier rounds is left out), so
nothing is taken from texts of shorter conversations that is not found again in the whole: a mark put into a turn shows
where this turn lies in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle.data_format.conversation import user_data_get
from twinkle.data_format.messages import THINK_END
from twinkle.data_format.row_error import RowError
from twinkle.template.rendering import MARK, Span, Turn
from twinkle.template.starts import TurnStarts

Write = Callable[[Sequence[Turn], bool], str]
"""Conversation and whether to add a generation prompt, to text."""

KEY_ROUNDS = "key_rounds"
SHORTEST_CLUE = 4
"""Characters of a prompt's end by which the place is found where the model goes on."""
_PROBE: Turn = {"role": "user", "content": "?"}


@dataclass(frozen=True)
class TurnMarks:
    """What a chat template writes around an assistant's turn."""

    prompt: str
    """The generation prompt."""
    header: str
    """As much of it as stands before every turn."""
    lead: str
    """Without a generation prompt the model writes everything after a question itself: what comes before its words."""
    turn_end: str
    """What ends a turn after which others follow, as far as the model writes it."""
    last_end: str
    """What ends the last one."""
    special: re.Pattern[str]
    """Texts that are tokens of their own."""

    @classmethod
    def found(cls, write: Write, special_tokens: Collection[str]) -> TurnMarks:
        """Those of a template.

        Args:
            write: Writes a conversation.
            special_tokens: Texts that are tokens of their own, one of which ends a turn.
        """
        answer: Turn = {"role": "assistant", "content": MARK}
        base = write([_PROBE], False)
        prompt = _added(base, write([_PROBE], True))
        head, _, end = write([_PROBE, answer], False).rpartition(MARK)
        middle_head, _, middle_end = write([_PROBE, answer, _PROBE], False).rpartition(MARK)
        before = _common(_added(base, head), _added(base, middle_head))
        last_end = end.rstrip()
        longest_first = sorted(special_tokens, key=len, reverse=True)
        specials = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        special = specials.search(middle_end)
        is_like_the_last = last_end and middle_end.startswith(last_end)
        return cls(
            prompt=prompt,
            header=_common(prompt, before),
            lead="" if prompt else before,
            turn_end=middle_end[: special.end()] if special and not is_like_the_last else _common(last_end, middle_end),
            last_end=last_end,
            special=specials,
        )

    def unwritten_end(self, write: Write, turns: Sequence[Turn], text: str) -> str:
        """What the model says to end the last turn where the template leaves it to the next one to write it.

        GLM has no end of turn: it stops by beginning the next one, ``<|user|>`` or ``<|observation|>``. Empty where a
        turn's end is written, or is no token of its own.

        Args:
            write: Writes a conversation.
            turns: The conversation, which ends with the assistant.
            text: What ``write`` makes of it.
        """
        if self.last_end:
            return ""
        calls = turns[-1].get("tool_calls")
        answer = {"role": "tool", "content": "?", "name": "?", "tool_call_id": "?"} if calls else _PROBE
        longer = write([*turns, answer], False)
        # Thinking may be left out of all but the last turn: then only what ends any other is known.
        rest = longer[len(text) :] if longer.startswith(text) else "" if calls else self.turn_end
        spaces = rest[: len(rest) - len(rest.lstrip())]
        found = self.special.match(rest, len(spaces))
        return spaces + found.group() if found else ""


class TurnFinder:
    """Finds assistants' turns in texts that ``write`` makes.

    Args:
        write: Writes a conversation.
        marks: What the template writes around a turn.
        starts: What earlier conversations of the template have shown; without it each is written a second time.
    """

    def __init__(self, write: Write, marks: TurnMarks, starts: TurnStarts | None = None) -> None:
        self._write = write
        self._marks = marks
        self._starts = TurnStarts("") if starts is None else starts

    def spans(self, turns: Sequence[Turn], text: str) -> dict[int, Span]:
        """By number, where the assistant's turns lie in the text of the whole conversation.

        Raises:
            RowError: The template writes nothing of a turn, or writes it in another way where others follow.
        """
        spans: dict[int, Span] = {}
        floor = 0
        for number, at in self._marked_starts(turns, text).items():
            first = min(self._marked_places(turns, number, text), default=at) if _is_composed(turns[number]) else at
            start = self._generation_start(turns[:number], text, floor, first)
            floor = self._end(turns, number, text, at)
            spans[number] = (start, floor)
        return spans

    def _marked_starts(self, turns: Sequence[Turn], text: str) -> dict[int, int]:
        """For each assistant's turn a place within it that is found with any text after it."""
        if (known := self._starts.known(turns, text)) is not None:
            return known
        numbers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
        marked = self._write([next(_marked(turn)) if turn["role"] == "assistant" else turn for turn in turns], False)
        if marked.count(MARK) == len(numbers) and marked.replace(MARK, "") == text:
            places = [at for at, character in enumerate(marked) if character == MARK]
            starts = {number: at - before for before, (number, at) in enumerate(zip(numbers, places, strict=True))}
            self._starts.learn(turns, text, starts)
            return starts
        return {number: self._marked_start(turns, number, text) for number in numbers}

    def _marked_start(self, turns: Sequence[Turn], number: int, text: str) -> int:
        for place in self._marked_places(turns, number, text):
            return place
        raise RowError(
            f"messages[{number}]",
            "is left out by the model's chat template, so nothing of it can train; leave it out or fill it",
            message_number=number,
        )

    def _marked_places(self, turns: Sequence[Turn], number: int, text: str) -> Iterator[int]:
        """Where the parts of a turn are found in the text, those that the template leaves out excepted."""
        for turn in _marked(turns[number]):
            marked = self._write([*turns[:number], turn, *turns[number + 1 :]], False)
            if MARK in marked:
                yield len(_common(marked, text))

    def _generation_start(self, before: Sequence[Turn], text: str, floor: int, at: int) -> int:
        """Where the model's own begins before ``at``: after as much of the generation prompt as stands there."""
        for length in range(len(self._marks.prompt), max(1, len(self._marks.header)) - 1, -1):
            found = text.rfind(self._marks.prompt[:length], floor, at)
            if found >= 0 and self._marks.header:
                return found + length
        if self._marks.lead and text.endswith(self._marks.lead, floor, at):
            return at - len(self._marks.lead)
        # Some write all that a model says between two questions as one turn: then it goes on after a tool's answer.
        prompt = self._write(before, True) if before else ""
        for length in range(min(len(prompt), at - floor), SHORTEST_CLUE - 1, -1):
            found = text.rfind(prompt[-length:], floor, at)
            if found >= 0:
                return found + length
        return at

    def _end(self, turns: Sequence[Turn], number: int, text: str, at: int) -> int:
        turn, is_last = turns[number], number == len(turns) - 1
        end = self._marks.last_end if is_last else self._marks.turn_end
        if isinstance(turn.get("content"), str) and not turn.get("tool_calls"):
            rest = turn["content"].strip() + end
            if end and text.startswith(rest, at):
                return at + len(rest)
        if is_last:
            return len(text.rstrip()) if self._marks.last_end else len(text)
        shorter = self._write(turns[: number + 1], False)
        # From the last part on, of which no other is written behind, what follows a turn aside.
        for place, begin in zip(
            [*self._marked_places(turns, number, text)][::-1],
            [*self._marked_places(turns[: number + 1], number, shorter)][::-1],
            strict=False,
        ):
            rest, there = shorter[begin:].strip(), place + _num_spaces(text[place:])
            body = rest.removesuffix(self._marks.last_end)
            if text.startswith(rest, there):
                return there + len(rest)
            if text.startswith(body, there):
                after = there + len(body)
                return after + len(self._marks.turn_end) if text.startswith(self._marks.turn_end, after) else after
        raise RowError(
            f"messages[{number}]",
            "is written in another way once more messages follow, so it cannot be told what of it trains; use a chat"
            " template with {% generation %}",
            message_number=number,
        )


def key_rounds(trajectory: Turn, turns: Sequence[Turn]) -> set[int] | None:
    """The numbers of the turns that train, if the row says so; turns may be one more than the row's messages.

    Raises:
        RowError: A number is none of an assistant's message.
    """
    user_data = trajectory.get("user_data")
    if user_data is not None and (isinstance(user_data, str) or not isinstance(user_data, Sequence | Mapping)):
        kind = type(user_data).__name__
        raise RowError("user_data", f"is a {kind}; send a list of (key, value) pairs, or of objects")
    rounds = user_data_get(user_data, KEY_ROUNDS)
    if rounds is None:
        return None
    shift = len(turns) - len(trajectory["messages"])
    if not isinstance(rounds, Sequence) or not all(isinstance(number, int) for number in rounds):
        raise RowError(f"user_data.{KEY_ROUNDS}", f"is {rounds!r}; send a list of message numbers")
    for number in rounds:
        if not 0 <= number < len(turns) - shift or turns[number + shift]["role"] != "assistant":
            raise RowError(f"user_data.{KEY_ROUNDS}", f"names message {number}, which is none of an assistant's")
    return {number + shift for number in rounds}


def _num_spaces(text: str) -> int:
    return len(text) - len(text.lstrip())


def _common(one: str, other: str) -> str:
    """What both begin with."""
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def _added(before: str, after: str) -> str:
    return after[len(_common(before, after)) :]


def _is_composed(turn: Turn) -> bool:
    """Whether a turn has more than content, which templates may write as several messages."""
    return bool(turn.get("reasoning_content") or turn.get("tool_calls"))


def _marked(turn: Turn) -> Iterator[Turn]:
    """The turn with a mark in its content; then, for templates that leave this out, elsewhere."""
    content = turn.get("content") or ""
    if isinstance(content, str):
        yield {**turn, "content": _mark(content)}
        thinking, end, answer = content.partition(THINK_END)
        if end:
            yield {**turn, "content": thinking + end + _mark(answer)}
    else:
        texts = [index for index, part in enumerate(content) if part.get("type") == "text"]
        first = texts[0] if texts else len(content)
        part = {"type": "text", "text": _mark(content[first]["text"] if texts else "")}
        yield {**turn, "content": [*content[:first], part, *content[first + 1 :]]}
    if turn.get("reasoning_content"):
        yield {**turn, "reasoning_content": _mark(turn["reasoning_content"])}
    calls: list[Any] = list(turn.get("tool_calls") or [])
    if calls:
        function = {**calls[0]["function"], "name": MARK + calls[0]["function"]["name"]}
        yield {**turn, "tool_calls": [{**calls[0], "function": function}, *calls[1:]]}


def _mark(text: str) -> str:
    """The text with a mark before its first character; templates may take away the spaces before that."""
    rest = text.lstrip()
    return text[: len(text) - len(rest)] + MARK + rest
