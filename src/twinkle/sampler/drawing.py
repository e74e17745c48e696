"""The next token of each of many sequences, each by its own rule and its own randomness.

Both backends draw here, so that equal logits and an equal seed give equal tokens whichever computed them.

Randomness is addressed by (seed, stream, position) instead of drawn from a generator: a token's depends on nothing but
its own coordinates, not on the batch it was computed in, nor on how often the request was restarted. There is no state
to save, so a replayed request draws the same numbers.

Shape suffixes: N rows, V vocabulary, K top tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from twinkle.sampler.choice import ChoiceRule, choose, finite_rows, scaled_logprobs, top_logprobs

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Draw:
    """What decides one token, besides its logits."""

    rule: ChoiceRule
    seed: int
    sample: int
    position: int
    """How many tokens the sample has already."""
    topk: int = 0
    repetition_penalty: float = 1.0
    """1: off. Above: tokens of ``seen`` become less likely; below: more."""
    seen: Sequence[int] = ()
    """Of the prompt and the sample, where there is a penalty."""


class DrawnToken(NamedTuple):
    """A token and what is known about it."""

    token: int
    logprob: float
    """Of the temperature-scaled distribution, penalties in it, before top-k and top-p."""
    topk_ids: list[int] | None = None
    topk_logprobs: list[float] | None = None


def draw_tokens(logits_NV: torch.Tensor, draws: Sequence[Draw]) -> list[DrawnToken | None]:
    """Returns a token for each row; none for a row whose logits are not finite."""
    logprobs_NV = scaled_logprobs(_penalised(logits_NV, draws), [draw.rule for draw in draws])
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


def _penalised(logits_NV: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """The logits with repetitions made less likely, as in CTRL (Keskar et al., 2019, section 4.1)."""
    rows = [row for row, draw in enumerate(draws) if draw.repetition_penalty != 1 and draw.seen]
    if not rows:
        return logits_NV
    penalised_NV = logits_NV.clone()
    for row in rows:
        seen_S = torch.tensor(sorted(set(draws[row].seen)), device=logits_NV.device)
        known_S = logits_NV[row, seen_S]
        penalty = draws[row].repetition_penalty
        penalised_NV[row, seen_S] = torch.where(known_S > 0, known_S / penalty, known_S * penalty)
    return penalised_NV


def uniform(seed: int, stream: int, position: int) -> float:
    """Returns a float64 in [0, 1): the three coordinates, hashed in turn by splitmix64 (Steele et al., OOPSLA 2014)."""
    state = _splitmix64(seed & _MASK)
    state = _splitmix64(state ^ (stream & _MASK))
    state = _splitmix64(state ^ (position & _MASK))
    return (state >> 11) / float(1 << 53)


def _splitmix64(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
