"""Models whose layers carry a state or have keys of their own, over two ranks: what one computes, in any company."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from harness.families import FAMILIES, VOCAB_SIZE, stir
from twinkle.core.adapter import AdapterConfig
from twinkle.core.settings import Settings
from twinkle.wire.bodies.training import AdamParams
from twinkle.wire.sample_result import decode_sample_response
from twinkle.wire.sampling import parse_sample
from twinkle.wire.training import ForwardBackwardBody, WireDatum
from twinkle.workers.engine import Pass
from twinkle.workers.engines.transformers_engine import TransformersEngine
from twinkle.workers.process import build_engine
from twinkle.workers.ranks.engine import RankedEngine

LENGTHS = ((130, 3, 64), (9, 70))
"""Longer than a chunk of the recurrence, and as short as a convolution."""
TOLERANCE = 2e-4
CONFIG = AdapterConfig(base_model="tiny", rank=4, seed=1)
SAMPLE = (
    b'{"num_samples": 2, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7, 8]}]},'
    b' "sampling_params": {"max_tokens": 6, "seed": 1, "stop": []}, "seq_id": 0, "sampling_session_id": "s"}'
)


def settings_of(folder: Path, **more: object) -> Settings:
    return Settings(model=str(folder), model_name="tiny", threads=1, tokens_per_pass=150, **more)


@pytest.fixture(
    scope="module",
    params=["qwen3_5", *(pytest.param(family, marks=pytest.mark.soak) for family in ("nemotron-h", "deepseek-v4"))],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[request.param]())
    stir(model)
    path = tmp_path_factory.mktemp("hybrid")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def one(folder: Path) -> TransformersEngine:
    return TransformersEngine.from_settings(settings_of(folder))


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[RankedEngine]:
    engine = build_engine(settings_of(folder, ranks=2, shard="fsdp", rank_timeout_s=300.0))
    assert isinstance(engine, RankedEngine)
    yield engine
    engine.close()


def body(number: int, step: int) -> ForwardBackwardBody:
    rng = np.random.default_rng([number, step])
    data = [
        WireDatum(
            rng.integers(0, VOCAB_SIZE, length),
            {"target_tokens": rng.integers(0, VOCAB_SIZE, length), "weights": np.ones(length, np.float32)},
        )
        for length in LENGTHS[number]
    ]
    return ForwardBackwardBody("adapter", 0, False, "cross_entropy", {}, tuple(data))


def train(engine, adapters, *, fused: bool) -> list[list[np.ndarray]]:
    """Two steps of each adapter; the logprobs of each pass."""
    found: list[list[np.ndarray]] = []
    for step in range(2):
        passes = [Pass(state=adapter, body=body(number, step)) for number, adapter in enumerate(adapters)]
        answers = engine.run_passes(passes) if fused else [engine.run_passes([each])[0] for each in passes]
        for adapter, answer in zip(adapters, answers, strict=True):
            assert not isinstance(answer, Exception), answer
            found.append(answer.logprobs)
            engine.optim_step(adapter, AdamParams(learning_rate=1e-3))
    return found


def drawn(engine, state) -> list[list[int]]:
    engine.add_sample("r", state, parse_sample(SAMPLE), cache_group="tenant:t")
    ended = []
    while engine.num_samples_under_way:
        ended += engine.step_samples()
    (output,) = ended
    return [sequence.tokens.tolist() for sequence in decode_sample_response(output.result).sequences]


def test_two_ranks_train_and_sample_as_one_does_whatever_the_company(
    one: TransformersEngine, two: RankedEngine
) -> None:
    together, apart, expected = ([engine.create(CONFIG) for _ in LENGTHS] for engine in (two, two, one))

    fused, alone = train(two, together, fused=True), train(two, apart, fused=False)

    for ours, again, theirs in zip(fused, alone, train(one, expected, fused=True), strict=True):
        for logprobs, same, close in zip(ours, again, theirs, strict=True):
            assert np.array_equal(logprobs, same)
            np.testing.assert_allclose(logprobs, close, atol=TOLERANCE)
    # A snapshot compares the ranks' copies, or ends the process.
    assert [two.snapshot(state) for state in together] == [two.snapshot(state) for state in apart]
    assert drawn(two, None) == drawn(one, None)
