"""One choice of a stream: what of it may be sent already, and what is left once its result is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinkle.core.errors import TransientError
from twinkle.server.answering.token_feeds import ScoredToken
from twinkle.server.model_texts import TextModel, TokenOffsets
from twinkle.server.openai.answers import Choice, Scores
from twinkle.server.openai.growing_text import GrowingText
from twinkle.wire.sample_result import EMPTY_LOGPROB


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a stream's client asked for besides the text."""

    scores: bool
    token_ids: bool


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a stream adds to one choice. All parts of a choice, joined, are the choice."""

    index: int
    text: str
    token_ids: list[int]
    """None unless asked for. All that were drawn, also those that end a text and are no part of it."""
    scores: Scores | None
    """Of the tokens that begin within the text so far."""
    is_first: bool
    finish_reason: str | None


class GrowingChoice:
    """Remembers what was sent, and holds the result to it."""

    def __init__(self, index: int, text_model: TextModel | None, stops: Sequence[str], wanted: Wanted) -> None:
        self._index = index
        self._text_model = text_model
        self._wanted = wanted
        self._text = None if text_model is None else GrowingText(text_model, stops)
        self._offsets = None if text_model is None or not wanted.scores else TokenOffsets(text_model)
        self._heard = Scores(tokens=[], logprobs=[], topk=[], offsets=[])
        self._num_parts = 0
        self._sent_text = ""
        self._num_ids_sent = 0
        self._num_scores_sent = 0

    def grow(self, heard: Sequence[ScoredToken]) -> Part | None:
        """Take in more tokens; what can be sent of them now. Blocks for as long as decoding takes."""
        self._take(heard)
        text = self._sent_text if self._text is None else self._text.settled
        # A contradiction to what was sent is left for the end.
        new_text = text[len(self._sent_text) :] if text.startswith(self._sent_text) else ""
        num_ids, num_scores = self._num_ids_sent, self._num_scores_sent
        if self._wanted.token_ids:
            num_ids = len(self._heard.tokens)
        if self._wanted.scores:
            num_scores = self._num_within(text)
        if not new_text and num_ids == self._num_ids_sent and num_scores == self._num_scores_sent:
            return None
        return self._part(new_text, self._heard, num_ids=num_ids, num_scores=num_scores)

    def finish(self, choice: Choice) -> Part:
        """All that is left.

        Raises:
            TransientError: The result is not what was sent: the sample was drawn anew, and otherwise.
        """
        scores = choice.scores(self._text_model) if self._wanted.scores else self._heard
        num_sent = max(self._num_ids_sent, self._num_scores_sent)
        if not choice.text.startswith(self._sent_text) or choice.tokens[:num_sent] != self._heard.tokens[:num_sent]:
            raise TransientError(
                "the sample had to be drawn again and differs from what was sent of it; discard that and send the"
                " request again"
            )
        return self._part(
            choice.text[len(self._sent_text) :],
            scores,
            num_ids=len(choice.tokens),
            num_scores=choice.num_scored,
            all_ids=choice.tokens,
            finish_reason=choice.finish_reason,
        )

    def _take(self, heard: Sequence[ScoredToken]) -> None:
        tokens = [token for token, _, _ in heard]
        self._heard.tokens.extend(tokens)
        if self._text is not None:
            self._text.extend(tokens)
        if self._wanted.scores:
            self._heard.logprobs.extend(logprob for _, logprob, _ in heard)
            self._heard.topk.extend([cell for cell in row if cell[1] > EMPTY_LOGPROB] for _, _, row in heard)
            if self._offsets is None:
                self._heard.offsets.extend(0 for _ in tokens)
            else:
                self._offsets.extend(tokens)
                self._heard.offsets[:] = self._offsets.known

    def _num_within(self, text: str) -> int:
        """How many tokens begin within a text; all of them where there is none."""
        num = self._num_scores_sent
        while num < len(self._heard.tokens) and (self._text is None or self._heard.offsets[num] < len(text)):
            num += 1
        return num

    def _part(
        self,
        new_text: str,
        scores: Scores,
        *,
        num_ids: int,
        num_scores: int,
        all_ids: Sequence[int] | None = None,
        finish_reason: str | None = None,
    ) -> Part:
        ids = self._heard.tokens if all_ids is None else all_ids
        part = Part(
            index=self._index,
            text=new_text,
            token_ids=list(ids[self._num_ids_sent : num_ids]) if self._wanted.token_ids else [],
            scores=scores.part(self._num_scores_sent, num_scores) if self._wanted.scores else None,
            is_first=self._num_parts == 0,
            finish_reason=finish_reason,
        )
        self._num_parts += 1
        self._sent_text += new_text
        self._num_ids_sent, self._num_scores_sent = num_ids, num_scores
        return part
