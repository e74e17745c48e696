"""Data sets of preferences: a chosen and a rejected answer."""

from __future__ import annotations

from twinkle.data_format.columns import Row
from twinkle.preprocessor.base import HELPFUL, Preprocessor, conversation, text_of


class EmojiDPOProcessor(Preprocessor):
    """A prompt with two answers, to the trajectories ``positive`` and ``negative``."""

    def __init__(
        self,
        system: str | None = None,
        chosen_key: str = "answer_zh",
        rejected_key: str = "answer_en",
        prompt_key: str = "prompt",
    ) -> None:
        self.system = HELPFUL if system is None else system
        self.chosen_key = chosen_key
        self.rejected_key = rejected_key
        self.prompt_key = prompt_key

    def preprocess(self, row: Row) -> Row:
        """See :class:`Preprocessor`."""
        prompt = text_of(row, self.prompt_key)
        answers = {"positive": text_of(row, self.chosen_key), "negative": text_of(row, self.rejected_key)}
        return {
            name: {"messages": conversation(prompt, system=self.system, assistant=answer)}
            for name, answer in answers.items()
        }
