"""The next token of each of many sequences, each by its own rule and its own randomness.

Both backends draw here, so that equal logits and an equal seed give equal tokens whichever computed them.

Shape suffixes: N rows, V vocabulary, K top tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from twinkle.sampler.choice import ChoiceRule, choose, finite_rows, scaled_logprobs, top_logprobs
from twinkle.sampler.counter_rng import uniform


@dataclass(frozen=True, slots=True)
class Draw:
    """What decides one token, besides its logits."""

    rule: ChoiceRule
    seed: int
    sample: int
    position: int
    """How many tokens the sample has already."""
    topk: int = 0


class DrawnToken(NamedTuple):
    """A token and what is known about it."""

    token: int
    logprob: float
    """Of the temperature-scaled distribution, before top-k and top-p."""
    topk_ids: list[int] | None = None
    topk_logprobs: list[float] | None = None


def draw_tokens(logits_NV: torch.Tensor, draws: Sequence[Draw]) -> list[DrawnToken | None]:
    """Returns a token for each row; none for a row whose logits are not finite."""
    logprobs_NV = scaled_logprobs(logits_NV, [draw.rule for draw in draws])
    finite = finite_rows(logprobs_NV)
    if all(finite):
        return list(_draw_finite(logprobs_NV, draws))
    rows = [row for row, good in enumerate(finite) if good]
    drawn = iter(_draw_finite(logprobs_NV[rows], [draws[row] for row in rows]) if rows else ())
    return [next(drawn) if good else None for good in finite]


def _draw_finite(logprobs_NV: torch.Tensor, draws: Sequence[Draw]) -> list[DrawnToken]:
    uniforms = [uniform(draw.seed, draw.sample, draw.position) for draw in draws]
    tokens_N = choose(logprobs_NV, [draw.rule for draw in draws], uniforms)
    chosen_N = logprobs_NV.gather(-1, tokens_N[:, None])[:, 0]
    drawn = []
    for row, (token, logprob) in enumerate(zip(tokens_N.tolist(), chosen_N.tolist(), strict=True)):
        topk = draws[row].topk
        if topk:
            ids_1K, values_1K = top_logprobs(logprobs_NV[row : row + 1], topk)
            drawn.append(DrawnToken(token, logprob, ids_1K[0].tolist(), values_1K[0].tolist()))
        else:
            drawn.append(DrawnToken(token, logprob))
    return drawn
