"""A worker's engine that samples through vLLM trains and samples as the one that does not."""

import json
from pathlib import Path

import numpy as np
import pytest

from twinkle.core.adapter import AdapterConfig
from twinkle.core.settings import Settings
from twinkle.hub.tiny import make_tiny_model
from twinkle.module.lora import LoraAdapter
from twinkle.wire.bodies.training import AdamParams
from twinkle.wire.sample_result import SampleResult, decode_sample_response
from twinkle.wire.sampling import SampleRequest, parse_sample
from twinkle.wire.training import ForwardBackwardBody, WireDatum
from twinkle.workers.engine import Pass
from twinkle.workers.engines.transformers_engine import TransformersEngine

pytest.importorskip("vllm")

TOLERANCE = 1e-4
"""Both compute in float32, with other kernels and in another order."""
TEXTS = ["how are you today my friend, the weather is fine and all is well in the world of words"] * 4


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TransformersEngine]:
    folder = make_tiny_model(tmp_path_factory.mktemp("mesh") / "tiny", texts=TEXTS, hidden_size=64, layers=2)
    return {
        sampler: TransformersEngine.from_settings(Settings(model=str(folder), sampler=sampler, max_rank=16, threads=1))
        for sampler in ("vllm", "torch")
    }


def trained(engine: TransformersEngine, *, seed: int) -> LoraAdapter:
    """An adapter some steps from its start."""
    config = AdapterConfig(base_model="tiny", rank=8, seed=seed)
    state = engine.create(config)
    tokens = np.arange(9, 60, dtype=np.int64)
    datum = WireDatum(
        tokens=tokens[:-1], inputs={"target_tokens": tokens[1:], "weights": np.ones(50, dtype=np.float32)}
    )
    body = ForwardBackwardBody(
        model_id="m", seq_id=0, forward_only=False, loss_fn="cross_entropy", loss_fn_config={}, data=(datum,)
    )
    for _ in range(4):
        (answer,) = engine.run_passes([Pass(state=state, body=body)])
        assert not isinstance(answer, Exception), answer
        engine.optim_step(state, AdamParams(learning_rate=2e-2))
    return state


def sampled_from_checkpoint(engine: TransformersEngine, state: LoraAdapter, request: SampleRequest) -> SampleResult:
    """What the service does: the checkpoint's files are loaded anew, then sampled."""
    config = AdapterConfig(base_model="tiny", rank=8, seed=0)
    files = engine.export(state, with_optimizer=False)
    loaded = engine.load(config, files, with_optimizer=False, trainable=False)
    engine.add_sample("future", loaded, request, cache_group="tenant:t")
    while engine.num_samples_under_way:
        for output in engine.step_samples():
            assert output.result is not None, output.error
            return decode_sample_response(output.result)
    raise AssertionError("the sample was lost")


def body(**fields: object) -> SampleRequest:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [9, 10, 11, 30]}]}
    params = {"max_tokens": 16, "seed": 5, "temperature": 0.8, "top_p": 0.95, "stop": []}
    return parse_sample(
        json.dumps({"prompt": prompt, "sampling_params": params, "base_model": "tiny", **fields}).encode()
    )


def test_the_mesh_says_which_sampler_it_has(engines: dict[str, TransformersEngine]) -> None:
    assert {name: engine.capabilities.sampler for name, engine in engines.items()} == {"vllm": "vllm", "torch": "torch"}


def test_training_beside_vllm_keeps_its_bits(engines: dict[str, TransformersEngine], tmp_path: Path) -> None:
    states = {name: engine.snapshot(trained(engine, seed=3)) for name, engine in engines.items()}

    assert engines["vllm"].capabilities.determinism == engines["torch"].capabilities.determinism != "none"
    assert states["vllm"] == states["torch"]


def test_a_checkpoint_is_sampled_alike(engines: dict[str, TransformersEngine]) -> None:
    request = body(num_samples=3, prompt_logprobs=True, topk_sample_logprobs=2, topk_prompt_logprobs=2)
    answers = {
        name: sampled_from_checkpoint(engine, trained(engine, seed=4), request) for name, engine in engines.items()
    }
    for mine, theirs in zip(answers["vllm"].sequences, answers["torch"].sequences, strict=True):
        assert mine.tokens.tolist() == theirs.tokens.tolist()
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(
        answers["vllm"].prompt_logprobs, answers["torch"].prompt_logprobs, atol=TOLERANCE, rtol=0
    )


def test_dropped_samples_are_gone(engines: dict[str, TransformersEngine]) -> None:
    engine = engines["vllm"]
    for index in range(4):
        engine.add_sample(str(index), None, body(num_samples=2), cache_group="tenant:t")
    engine.step_samples()
    engine.drop_sample("1")
    engine.drop_samples()
    assert engine.num_samples_under_way == 0
    assert not engine.sampler.has_work
