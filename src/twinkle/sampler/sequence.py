"""One sample as it grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from twinkle.sampler.drawing import DrawnToken
from twinkle.sampler.request import DrawnSequence, StopReason, TopLogprobs


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Tokens of one sample in a row, from position ``start`` on, with what is asked about them."""

    sample: int
    start: int
    tokens: list[int]
    logprobs: list[float]
    topk: list[list[tuple[int, float]]] | None
    """The likeliest tokens at each position; none if they were not asked for."""


@dataclass(eq=False, kw_only=True)
class GrowingSequence:
    """The tokens drawn so far, with what is asked about them."""

    sample: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk_ids: list[list[int]] = field(default_factory=list)
    topk_logprobs: list[list[float]] = field(default_factory=list)

    def append(self, drawn: DrawnToken) -> None:
        """Takes in the next token."""
        self.tokens.append(drawn.token)
        self.logprobs.append(drawn.logprob)
        if drawn.topk_ids is not None and drawn.topk_logprobs is not None:
            self.topk_ids.append(drawn.topk_ids)
            self.topk_logprobs.append(drawn.topk_logprobs)

    def beyond(self, num_known: int) -> Stretch:
        """Returns what was drawn after the first ``num_known`` tokens; all of it if there are fewer by now."""
        start = num_known if num_known <= len(self.tokens) else 0
        return Stretch(
            sample=self.sample,
            start=start,
            tokens=self.tokens[start:],
            logprobs=self.logprobs[start:],
            topk=_pairs(self.topk_ids[start:], self.topk_logprobs[start:]) if self.topk_ids else None,
        )

    def finish(self, stop_reason: StopReason, topk: int) -> DrawnSequence:
        """Returns what the caller gets."""
        num_tokens = len(self.tokens)
        return DrawnSequence(
            tokens=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            stop_reason=stop_reason,
            topk=TopLogprobs(
                np.array(self.topk_ids, dtype=np.int32).reshape(num_tokens, topk),
                np.array(self.topk_logprobs, dtype=np.float32).reshape(num_tokens, topk),
            )
            if topk
            else None,
        )


def finished_beyond(sample: int, sequence: DrawnSequence, num_known: int) -> Stretch:
    """Returns what a finished sample has after its first ``num_known`` tokens."""
    topk = sequence.topk
    return Stretch(
        sample=sample,
        start=num_known,
        tokens=sequence.tokens[num_known:].tolist(),
        logprobs=sequence.logprobs[num_known:].tolist(),
        topk=None if topk is None else _pairs(topk.token_ids[num_known:].tolist(), topk.logprobs[num_known:].tolist()),
    )


def _pairs(ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> list[list[tuple[int, float]]]:
    return [list(zip(*row, strict=True)) for row in zip(ids, logprobs, strict=True)]
