"""Where turns begin in a written conversation, as conversations of the same template have shown before.

To find out, a conversation is written a second time, with marks in it (:mod:`twinkle.template.spans`), which costs as
much as the first. Plain conversations of one template look alike: what it wrote between the header of a turn and its
words in one, it writes in the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.template.rendering import MARK, Turn

SHORTEST_HEADER = 4
LONGEST_GAP = 64
MOST_GAPS = 4
PLAIN = {"role", "content"}
THINKING = "think>"
"""In thinking templates look for their own ends."""


class TurnStarts:
    """What was written between headers and words.

    Nothing is guessed: every header in the text must be the template's and be followed by the words of the next turn of
    the assistant, as was seen before; else nothing is known of the conversation.

    Args:
        header: What stands before every turn of the assistant.
    """

    def __init__(self, header: str) -> None:
        self._header = header
        self._gaps: list[str] = []

    def known(self, turns: Sequence[Turn], text: str) -> dict[int, int] | None:
        """By number of each assistant's turn where its words begin; None where it has to be found out."""
        if not self._gaps or not self._is_plain(turns, text):
            return None
        starts: dict[int, int] = {}
        behind = 0
        for number, words in _answers(turns):
            header = text.find(self._header, behind)
            if header < 0:
                return None
            at = header + len(self._header)
            fitting = [gap for gap in self._gaps if text.startswith(gap, at) and text.startswith(words, at + len(gap))]
            if len(fitting) != 1:
                return None
            starts[number] = at + len(fitting[0])
            behind = starts[number] + len(words)
        return starts if text.find(self._header, behind) < 0 else None

    def learn(self, turns: Sequence[Turn], text: str, starts: Mapping[int, int]) -> None:
        """Remember what stands before the words of turns that begin where marks have shown it."""
        if len(self._gaps) >= MOST_GAPS or not self._is_plain(turns, text):
            return
        for at in starts.values():
            header = text.rfind(self._header, 0, at)
            gap = text[header + len(self._header) : at]
            if header >= 0 and len(gap) <= LONGEST_GAP and gap not in self._gaps:
                self._gaps.append(gap)

    def _is_plain(self, turns: Sequence[Turn], text: str) -> bool:
        """Whether headers and words cannot be taken for one another."""
        if len(self._header) < SHORTEST_HEADER or MARK in text:
            return False
        for turn in turns:
            words: Any = turn.get("content")
            if turn.keys() != PLAIN or not isinstance(words, str) or self._header in words:
                return False
            if turn["role"] == "assistant" and (not words.strip() or THINKING in words):
                return False
        return True


def _answers(turns: Sequence[Turn]) -> list[tuple[int, str]]:
    return [(number, turn["content"].strip()) for number, turn in enumerate(turns) if turn["role"] == "assistant"]
