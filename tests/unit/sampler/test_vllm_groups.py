"""vLLM on a group of devices, kept in step with a training on another."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch

from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.core.errors import InvalidInput, StaleWeights
from twinkle.hub.tiny import make_tiny_model
from twinkle.infra import DeviceGroup, runtime
from twinkle.model import TransformersModel
from twinkle.sampler import vLLMSampler

pytest.importorskip("vllm")
ray = pytest.importorskip("ray")

TEXTS = ["how are you today my friend, the weather is fine and all is well in the world of words"] * 4
PROMPT = [9, 10, 11, 12]
SCORE = {"max_tokens": 2, "temperature": 0.0, "stop": [], "prompt_logprobs": 0}
ROW = {"input_ids": PROMPT, "labels": [10, 11, 12, 13]}
TOLERANCE = 1e-3
"""Both compute in float32, with other kernels and in another order."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    folder = make_tiny_model(tmp_path_factory.mktemp("vllm") / "tiny", texts=TEXTS, hidden_size=64, layers=2)
    ray.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        object_store_memory=100 * 1024**2,
        logging_level=logging.WARNING,
    )
    try:
        runtime.initialize(mode="ray", groups=[DeviceGroup("model", 1, "GPU"), DeviceGroup("sampler", [1], "GPU")])
        sampler = vLLMSampler(str(folder), {"max_lora_rank": 8, "max_model_len": 128}, remote_group="sampler")
        model = TransformersModel(str(folder), remote_group="model")
        model.add_adapter_to_model("default", peft.LoraConfig(r=4, target_modules="all-linear"))
        model.set_optimizer("AdamW", lr=0.03)
        yield SimpleNamespace(model=model, sampler=sampler)
        runtime.forget()
    finally:
        ray.shutdown()


def logps(model: Any) -> list[float]:
    """What the trained model gives the prompt's tokens."""
    output = model.forward_only(inputs=[{"input_ids": PROMPT, "labels": [*PROMPT[1:], -100]}])()
    return torch.as_tensor(output["logps"])[0, : len(PROMPT) - 1].tolist()


def test_vllm_says_what_the_trained_model_says_after_every_sync(world: SimpleNamespace) -> None:
    manager = CheckpointEngineManager(model=world.model, sampler=world.sampler)
    told = []
    for _ in range(2):
        world.model.forward_backward(inputs=[ROW])
        world.model.clip_grad_and_step()
        version = manager.sync_weights(merge_and_sync=False)
        world.sampler.reset_prefix_cache()
        (response,) = world.sampler.sample([PROMPT], SCORE)
        assert response.weights_version == version
        assert response.prompt_logprobs[1:] == pytest.approx(logps(world.model), abs=TOLERANCE)
        told.append(response.prompt_logprobs[1:])

    assert told[0] != pytest.approx(told[1], abs=1e-2)


def test_vllm_sleeps_wakes_up_and_refuses_weights_that_it_cannot_take(world: SimpleNamespace) -> None:
    manager = CheckpointEngineManager(model=world.model, sampler=world.sampler)
    manager.sync_weights(merge_and_sync=False)
    world.sampler.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        world.sampler.sample([PROMPT], SCORE)
    # Weights that come in its sleep are those that it wakes up with.
    version = manager.sync_weights(merge_and_sync=False)
    world.sampler.wake_up()
    before = world.sampler.sample([PROMPT], SCORE)
    assert before[0].weights_version == version

    with pytest.raises(InvalidInput, match="while it serves adapters"):
        manager.sync_weights(merge_and_sync=True)
    with pytest.raises(StaleWeights):
        world.sampler.sample([PROMPT], SCORE)
    manager.sync_weights(merge_and_sync=False)

    assert world.sampler.sample([PROMPT], SCORE)[0].sequences[0].tokens == before[0].sequences[0].tokens
