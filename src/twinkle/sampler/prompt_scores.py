"""What is asked about the prompt itself: its logprobs, top-k, chosen targets, drawn alternatives.

Filled chunk by chunk while the prompt is computed; logits exist for a few rows at a time, never [L, V].

Shape suffixes: L prompt tokens, N rows of a chunk, V vocabulary, K targets, alternatives or top tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from twinkle.infra.sending import fetch, send
from twinkle.sampler.choice import ChoiceRule, are_finite, choose, scaled_logprobs, top_logprobs
from twinkle.sampler.drawing import uniform
from twinkle.sampler.request import SENTINEL_LOGPROB, SENTINEL_TOKEN, SampleRequest, SampleResult, TopLogprobs

# Alternatives draw from streams of their own, far from those of the samples (0, 1, 2, ...).
_ALTERNATIVES_STREAM = 1 << 32
_ELEMENTS_PER_CHUNK = 1 << 22  # 16 MiB of float32 logits

LogitsOfRows = Callable[[slice], torch.Tensor]


class PromptScores:
    """The prompt's share of a SampleResult; computing a row twice writes the same values again."""

    def __init__(self, request: SampleRequest, vocab_size: int, barred: tuple[int, ...] = ()) -> None:
        self._barred = barred
        self._request = request
        self._rows_per_chunk = max(1, min(256, _ELEMENTS_PER_CHUNK // vocab_size))
        length = len(request.prompt)
        self._logprobs_L = np.full(length, np.nan, dtype=np.float32)
        self._topk = _empty_top(length, request.topk_prompt_logprobs)
        self._alternatives = _empty_top(length - 1, request.prompt_alt_tokens_k)
        targets = request.target_prompt_logprobs
        self._targets_LK = np.zeros((length - 1, 0) if targets is None else targets.shape, dtype=np.float32)

    @property
    def first_position(self) -> int:
        """The first prompt position that anything is asked about; the prompt's length if nothing is."""
        request, length = self._request, len(self._request.prompt)
        first = length
        if request.prompt_logprobs or request.topk_prompt_logprobs:
            last_n = length if request.prompt_logprobs_last_n is None else request.prompt_logprobs_last_n
            first = max(1, length - last_n)
        if request.target_prompt_logprobs is not None:
            wanted = np.flatnonzero((request.target_prompt_logprobs >= 0).any(axis=1))
            first = min(first, int(wanted[0]) + 1) if wanted.size else first
        return 1 if request.prompt_alt_tokens_k else min(first, length)

    def score(self, start: int, num_tokens: int, logits_of: LogitsOfRows) -> bool:
        """Scores the positions after each of the prompt tokens ``start`` .. ``start + num_tokens``.

        Args:
            start: Position of the first token of the pass.
            num_tokens: How many there are.
            logits_of: Computes logits [N, V] of a slice of these tokens.

        Returns:
            False if logits were not finite.
        """
        end = min(start + num_tokens, len(self._request.prompt) - 1)
        for row in range(max(start, self.first_position - 1), end, self._rows_per_chunk):
            stop = min(row + self._rows_per_chunk, end)
            if not self._score_rows(row + 1, logits_of(slice(row - start, stop - start))):
                return False
        return True

    def fill(self, result: SampleResult) -> SampleResult:
        """Returns ``result`` with what the request asked about the prompt."""
        request = self._request
        return replace(
            result,
            prompt_logprobs=self._logprobs_L if request.prompt_logprobs else None,
            topk_prompt_logprobs=self._topk if request.topk_prompt_logprobs else None,
            target_prompt_logprobs=self._targets_LK if request.target_prompt_logprobs is not None else None,
            prompt_alt_tokens=self._alternatives if request.prompt_alt_tokens_k else None,
        )

    def _score_rows(self, position: int, logits_NV: torch.Tensor) -> bool:
        request, num_rows, device = self._request, logits_NV.shape[0], logits_NV.device
        positions = slice(position, position + num_rows)
        before = slice(position - 1, position - 1 + num_rows)
        logprobs_NV = scaled_logprobs(logits_NV, [ChoiceRule()] * num_rows)
        # All of it is computed before anything is read: the device is waited for once.
        found: list[tuple[np.ndarray, torch.Tensor]] = []
        if request.prompt_logprobs:
            actual_N1 = send(request.prompt[positions], torch.int64, device)[:, None]
            found.append((self._logprobs_L[positions], logprobs_NV.gather(-1, actual_N1)[:, 0]))
        if request.topk_prompt_logprobs:
            ids_NK, values_NK = top_logprobs(logprobs_NV, request.topk_prompt_logprobs)
            found += [(self._topk.token_ids[positions], ids_NK), (self._topk.logprobs[positions], values_NK)]
        if request.target_prompt_logprobs is not None:
            ids_NK = send(request.target_prompt_logprobs[before], torch.int64, device)
            values_NK = logprobs_NV.gather(-1, ids_NK.clamp(min=0)).masked_fill(ids_NK < 0, 0.0)
            found.append((self._targets_LK[before], values_NK))
        if request.prompt_alt_tokens_k:
            found += self._draw_alternatives(before, logits_NV)
        are_finite_N, *values = fetch([are_finite(logprobs_NV), *(tensor for _, tensor in found)])
        if not are_finite_N.all():
            return False
        for (place, _), value in zip(found, values, strict=True):
            place[...] = value
        self._blank_before_last_n()
        return True

    def _blank_before_last_n(self) -> None:
        """Rows computed for targets or alternatives may lie before the last n; nobody asked for their logprobs."""
        last_n = self._request.prompt_logprobs_last_n
        if last_n is not None:
            unasked = slice(0, max(1, len(self._request.prompt) - last_n))
            self._logprobs_L[unasked] = np.nan
            self._topk.token_ids[unasked] = SENTINEL_TOKEN
            self._topk.logprobs[unasked] = SENTINEL_LOGPROB

    def _draw_alternatives(self, before: slice, logits_NV: torch.Tensor) -> list[tuple[np.ndarray, torch.Tensor]]:
        """What is drawn, and where it goes."""
        request = self._request
        rules = [ChoiceRule(temperature=request.temperature, barred=self._barred)] * logits_NV.shape[0]
        logprobs_NV = scaled_logprobs(logits_NV, rules)
        drawn: list[tuple[np.ndarray, torch.Tensor]] = []
        for k in range(request.prompt_alt_tokens_k):
            stream = _ALTERNATIVES_STREAM + k
            uniforms = [uniform(request.seed, stream, position) for position in range(before.start, before.stop)]
            tokens_N = choose(logprobs_NV, rules, uniforms)
            drawn.append((self._alternatives.token_ids[before, k], tokens_N))
            drawn.append((self._alternatives.logprobs[before, k], logprobs_NV.gather(-1, tokens_N[:, None])[:, 0]))
        return drawn


def _empty_top(length: int, k: int) -> TopLogprobs:
    return TopLogprobs(
        token_ids=np.full((length, k), SENTINEL_TOKEN, dtype=np.int32),
        logprobs=np.full((length, k), SENTINEL_LOGPROB, dtype=np.float32),
    )
