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

from twinkle.infra.sending import Arriving, send
from twinkle.sampler.choice import ChoiceRule, are_finite, choose, scaled_logprobs, top_logprobs

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True, eq=False)
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
    unread: torch.Tensor | None = None
    """Its last token [1], where the host has not read it yet; it counts as seen, and in ``position``."""


class DrawnToken(NamedTuple):
    """A token and what is known about it."""

    token: int
    logprob: float
    """Of the temperature-scaled distribution, penalties in it, before top-k and top-p."""
    topk_ids: list[int] | None = None
    topk_logprobs: list[float] | None = None


class DrawnRows:
    """Tokens that the device has drawn, or is about to draw, on their way to the host.

    ``tokens_N`` are there, to be gone on from: of a row whose logits are not finite some token of the vocabulary.
    """

    def __init__(self, tokens_N: torch.Tensor, logprobs_NV: torch.Tensor, topk: Sequence[int]) -> None:
        self.tokens_N = tokens_N
        self._topk = topk
        chosen_N = logprobs_NV.gather(-1, tokens_N[:, None])[:, 0]
        parts = [tokens_N, chosen_N, are_finite(logprobs_NV)]
        for row, k in enumerate(topk):
            if k:
                parts += [values_1K[0] for values_1K in top_logprobs(logprobs_NV[row : row + 1], k)]
        # Together, exactly: ids are small integers.
        self._arriving = Arriving(torch.cat([part.double() for part in parts]))

    def read(self) -> list[DrawnToken | None]:
        """A token for each row; none for a row whose logits are not finite. Waits for the device, once."""
        num_rows = len(self._topk)
        values = self._arriving.read()
        tokens, logprobs, finite = values[: 3 * num_rows].reshape(3, num_rows).tolist()
        drawn: list[DrawnToken | None] = []
        end = 3 * num_rows
        for row, k in enumerate(self._topk):
            ids, likeliest = values[end : end + k], values[end + k : end + 2 * k]
            end += 2 * k
            if not finite[row]:
                drawn.append(None)
            elif k:
                drawn.append(DrawnToken(int(tokens[row]), logprobs[row], list(map(int, ids)), likeliest.tolist()))
            else:
                drawn.append(DrawnToken(int(tokens[row]), logprobs[row]))
        return drawn


def start_draws(logits_NV: torch.Tensor, draws: Sequence[Draw]) -> DrawnRows:
    """Lets the device draw a token for each row; the host goes on meanwhile."""
    rules = [draw.rule for draw in draws]
    logprobs_NV = scaled_logprobs(_penalised(logits_NV, draws), rules)
    uniforms = [uniform(draw.seed, draw.sample, draw.position) for draw in draws]
    return DrawnRows(choose(logprobs_NV, rules, uniforms), logprobs_NV, [draw.topk for draw in draws])


def draw_tokens(logits_NV: torch.Tensor, draws: Sequence[Draw]) -> list[DrawnToken | None]:
    """Returns a token for each row; none for a row whose logits are not finite."""
    return start_draws(logits_NV, draws).read()


def _penalised(logits_NV: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """The logits with repetitions made less likely, as in CTRL (Keskar et al., 2019, section 4.1)."""
    rows = [row for row, draw in enumerate(draws) if draw.repetition_penalty != 1 and draw.seen]
    if not rows:
        return logits_NV
    penalised_NV = logits_NV.clone()
    for row in rows:
        seen_S = send(sorted(set(draws[row].seen)), torch.int64, logits_NV.device)
        unread = draws[row].unread
        if unread is not None:
            # It may be among the others: then its cell is written twice, with the same value.
            seen_S = torch.cat((seen_S, unread))
        known_S = logits_NV[row].index_select(0, seen_S)
        penalty = draws[row].repetition_penalty
        penalised_NV[row].index_copy_(0, seen_S, torch.where(known_S > 0, known_S / penalty, known_S * penalty))
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
