"""One sample as it grows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from twinkle.sampler.drawing import DrawnToken
from twinkle.sampler.request import SampledSequence, StopReason, TopLogprobs


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

    def finish(self, stop_reason: StopReason, topk: int) -> SampledSequence:
        """Returns what the caller gets."""
        num_tokens = len(self.tokens)
        return SampledSequence(
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
