"""Start-up check of the sampler on the real model: no request feels another, and tokens score as they do in training.

Nothing is padded in a pass of the sampler: rows of prompts and single tokens of continuations lie side by side, of any
lengths. What could mix them up is a cache, a layer that keeps a state elsewhere, or a row that is taken for another.

Shapes: N tokens of a prompt and its continuation, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from twinkle.core.errors import ConfigError
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.probe import is_off
from twinkle.module.lora import LoraAdapter, LoraConfig, Segment
from twinkle.module.packed_attention import CausalSpans
from twinkle.sampler.request import SampleRequest, SampleResult
from twinkle.sampler.torch_sampler import SteppedTorchSampler

PROMPT_LENGTHS = (70, 3, 20)
"""One longer than a chunk, one shorter than any layer looks back."""
CHUNK_TOKENS = 64
"""Prompts are cut this finely meanwhile, so that few tokens tell whether chunks go together."""
NUM_TOKENS = 3
NUM_SLOTS = 16
RANK = 4
COMPANIES = ((1,), (0, 2))
"""Which requests are others; those that stay must not notice."""


@dataclass(frozen=True, eq=False)
class _Ask:
    """A request, and who it is for."""

    prompt: tuple[int, ...]
    adapter: LoraAdapter | None
    num_samples: int


class SamplerProbe:
    """Requests of several tenants, sampled alone, together, beside others and beside a tenant whose weights are NaN."""

    def __init__(self, model: FusedLoraModel) -> None:
        self._model = model
        self._exact = model.determinism != "none"
        rng = np.random.default_rng(0)
        adapters = (_noisy(model, 0.02, seed=1), None, _noisy(model, 0.02, seed=2))
        # The first is continued twice: a prompt's cache is copied, and both go on from it.
        asks = [
            _Ask(self._draw(rng, length), adapter, num_samples)
            for length, adapter, num_samples in zip(PROMPT_LENGTHS, adapters, (2, 1, 1), strict=True)
        ]
        self._asks = asks
        self._others = [replace(ask, prompt=self._draw(rng, len(ask.prompt))) for ask in asks]

    def _draw(self, rng: np.random.Generator, length: int) -> tuple[int, ...]:
        info = self._model.info
        tokens = rng.integers(0, info.vocab_size, max(1, min(length, info.max_context_length - NUM_TOKENS)))
        rules = self._model.picture_rules
        kept_out = () if rules is None else rules.all_tokens
        return tuple(np.where(np.isin(tokens, kept_out), 0, tokens).tolist())

    def check(self) -> None:
        """Sample, and compare.

        Raises:
            ConfigError: A request gets something else in company than alone, or than its tokens score in training.
        """
        numbers = range(len(self._asks))
        alone = {number: self._run({number: self._asks[number]})[number] for number in numbers}
        for number, result in alone.items():
            self._compare_with_training(number, result, "alone")
        for changed in COMPANIES:
            asks = {number: (self._others if number in changed else self._asks)[number] for number in numbers}
            staying = [number for number in numbers if number not in changed]
            self._compare(self._run(asks), alone, staying, "beside others")
        beside_sick = self._run(dict(enumerate(self._asks)), with_sick=True)
        self._compare(beside_sick, alone, numbers, "beside one whose weights are NaN")

    def _compare(
        self,
        results: Mapping[int, SampleResult],
        alone: Mapping[int, SampleResult],
        numbers: Sequence[int],
        company: str,
    ) -> None:
        for number in numbers:
            if self._exact:
                for found, expected in zip(_values(results[number]), _values(alone[number]), strict=True):
                    if off := is_off(found, expected, 0):
                        self._refuse(number, company, f"{off} against the same alone")
            else:
                self._compare_with_training(number, results[number], company)

    def _compare_with_training(self, number: int, result: SampleResult, company: str) -> None:
        ask = self._asks[number]
        assert result.prompt_logprobs is not None
        for sequence in result.sequences:
            scores = self._score(ask, sequence.tokens.tolist())
            # Apart: what goes wrong with a few tokens drawn would be little among those of a prompt.
            for found, expected in (
                (result.prompt_logprobs[1:], scores[: len(ask.prompt) - 1]),
                (sequence.logprobs, scores[len(ask.prompt) - 1 :]),
            ):
                if off := is_off(torch.from_numpy(found), expected, self._model.tolerance):
                    self._refuse(number, company, f"{off} against those of training")

    def _score(self, ask: _Ask, tokens: Sequence[int]) -> torch.Tensor:
        """The logprob of each token but the first, in one pass as training makes it."""
        token_ids = torch.tensor([*ask.prompt, *tokens], device=self._model.device)
        num_tokens = len(token_ids)
        segments = [Segment(ask.adapter, 0, num_tokens)]
        positions = torch.arange(num_tokens, device=self._model.device)
        hidden_NH = self._model.run_packed(token_ids, positions, segments, CausalSpans([(0, num_tokens)]))
        logprobs_NV = torch.log_softmax(self._model.logits(hidden_NH, segments), dim=-1)
        return logprobs_NV[:-1].gather(1, token_ids[1:, None])[:, 0].cpu()

    def _run(self, asks: Mapping[int, _Ask], *, with_sick: bool = False) -> dict[int, SampleResult]:
        """Sample to the end. With a sick one, another joins at every step, whose weights are NaN from the next one on.

        So there is one among the prompts, or among the continuations, of every step but the first.
        """
        sampler = SteppedTorchSampler(
            self._model,
            slots=NUM_SLOTS,
            chunk_tokens=CHUNK_TOKENS,
            prefill_tokens_per_step=CHUNK_TOKENS,
            kept_bytes=0,
        )
        for number, ask in asks.items():
            sampler.add(_request(str(number), ask))
        results: dict[int, SampleResult] = {}
        falling_sick: list[LoraAdapter] = []
        while len(results) < len(asks):
            if with_sick:
                for adapter in falling_sick[-1:]:
                    adapter.params.fill_(torch.nan)
                    adapter.publish()
                falling_sick.append(_noisy(self._model, 0.02, seed=3))
                sampler.add(_request(f"sick {len(falling_sick)}", _Ask(asks[1].prompt, falling_sick[-1], 1)))
            for outcome in sampler.step():
                if isinstance(outcome, SampleResult):
                    results[int(outcome.key)] = outcome
                    continue
                key, error = outcome
                if key.isdecimal():
                    self._refuse(int(key), "in company", f"refused: {error}")
        return results

    def _refuse(self, number: int, company: str, what: str) -> None:
        raise ConfigError(
            f"{self._model.info.architecture} cannot be sampled from: the logprobs of request {number + 1} of "
            f"{len(self._asks)} {company} in a pass are {what}. What one tenant sends could show in another's results, "
            "so this architecture is not supported"
        )


def _noisy(model: FusedLoraModel, noise: float, *, seed: int) -> LoraAdapter:
    adapter = model.create_adapter(LoraConfig(rank=RANK, seed=seed), trainable=False)
    values = torch.randn(adapter.params.shape, generator=torch.Generator().manual_seed(seed))
    adapter.params.add_(values.to(adapter.params.device), alpha=noise)
    adapter.publish()
    return adapter


def _request(key: str, ask: _Ask) -> SampleRequest:
    return SampleRequest(
        key=key,
        adapter=ask.adapter,
        prompt=ask.prompt,
        seed=0,
        num_samples=ask.num_samples,
        max_tokens=NUM_TOKENS,
        stop_token_ids=frozenset(),
        prompt_logprobs=True,
    )


def _values(result: SampleResult) -> list[torch.Tensor]:
    assert result.prompt_logprobs is not None
    values = [torch.from_numpy(result.prompt_logprobs[1:])]
    for sequence in result.sequences:
        values += [torch.from_numpy(sequence.logprobs), torch.from_numpy(sequence.tokens)]
    return values
