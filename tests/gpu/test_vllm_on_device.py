"""Sampling by vLLM on a GPU, where it is installed; on a CPU ``tests/unit/sampler/test_vllm_sampler.py`` does more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from twinkle.checkpoint_engine.peft import export_adapter
from twinkle.model.fused.training import TrainJob
from twinkle.module.lora import LoraAdapter
from twinkle.sampler import SampleRequest, SteppedVLLMSampler

pytest.importorskip("vllm")
pytestmark = pytest.mark.gpu

LOGPROB_ERROR = 0.15
"""Of one token, both in bfloat16 with other kernels."""
PROMPTS = ((5, 9, 41, 7), tuple(range(10, 60)), (3, 3, 3))
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def trained(load: Callable[[str], Any]) -> tuple[Any, list[LoraAdapter | None]]:
    bench = load("cuda")
    return bench, [bench.adapter(1, size=0.05), None, bench.adapter(2, rank=16, size=0.05)]


@pytest.fixture(scope="module")
def sampler(trained: tuple[Any, list[LoraAdapter | None]]) -> Iterator[SteppedVLLMSampler]:
    bench, _ = trained
    made = SteppedVLLMSampler(
        str(bench.folder), device="cuda", slots=4, max_length=256, max_rank=16, memory_fraction=0.2
    )
    yield made
    made.shutdown()


def drawn(sampler: SteppedVLLMSampler, requests: list[SampleRequest]) -> dict[str, Any]:
    for request in requests:
        sampler.add(request)
    found = {}
    while sampler.has_work:
        for outcome in sampler.step():
            assert not isinstance(outcome, tuple), outcome
            found[outcome.key] = outcome.sequences[0]
    return found


def test_what_vllm_draws_has_the_logprobs_that_training_sees(
    sampler: SteppedVLLMSampler, trained: tuple[Any, list[LoraAdapter | None]]
) -> None:
    bench, adapters = trained
    requests = [
        SampleRequest(
            key=str(index),
            adapter=None if adapter is None else sampler.load_adapter(export_adapter(adapter, str(bench.folder))),
            prompt=prompt,
            seed=index,
            max_tokens=NEW_TOKENS,
            stop_token_ids=frozenset(),
        )
        for index, (adapter, prompt) in enumerate(zip(adapters, PROMPTS, strict=True))
    ]

    found = drawn(sampler, requests)

    for index, (adapter, prompt) in enumerate(zip(adapters, PROMPTS, strict=True)):
        assert len(found[str(index)].tokens) == NEW_TOKENS
        if adapter is None:
            continue
        tokens = np.array([*prompt, *found[str(index)].tokens])
        data = bench.job(adapter, len(tokens) - 1).data[0]
        inputs = {**data.inputs, "target_tokens": tokens[1:]}
        job = TrainJob(adapter, (type(data)(tokens=tokens[:-1], inputs=inputs),), "cross_entropy", backward=False)
        (outcome,) = bench.run([job])
        scored = outcome.logprobs[0][len(prompt) - 1 :]
        assert np.abs(scored - np.array(found[str(index)].logprobs)).mean() < LOGPROB_ERROR
