"""A training and a sampler on two groups of devices, and a script that holds neither."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch

from harness.local_ray import RayProcesses
from harness.models import make_text_model
from twinkle.checkpoint_engine import CheckpointEngineManager, ProcessGroupCheckpointEngine
from twinkle.core.errors import InvalidInput, RankLost, StaleWeights
from twinkle.infra import DeviceGroup, DeviceMesh, runtime
from twinkle.model import TransformersModel
from twinkle.sampler import TorchSampler

PROMPT = [5, 6, 7, 8]
GREEDY = {"max_tokens": 3, "temperature": 0.0, "stop": [], "prompt_logprobs": 0}
ROWS = [{"input_ids": [5, 6, 7, 8], "labels": [6, 7, 8, 9]}, {"input_ids": [9, 6, 7], "labels": [6, 7, 4]}]
GROUPS = [DeviceGroup("model", 2, "GPU"), DeviceGroup("sampler", [2, 3], "GPU")]
SMALL_BUCKETS = ProcessGroupCheckpointEngine(bucket_bytes=20_000)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A model whose weights lie in halves on two ranks, and two ranks that sample."""
    model_id = str(make_text_model(tmp_path_factory.mktemp("models") / "tiny"))
    with RayProcesses(num_cpus=4):
        runtime.initialize(mode="ray", groups=GROUPS, seed=7)
        sampler = TorchSampler(model_id, slots=2, remote_group="sampler")
        model = TransformersModel(model_id, device_mesh=DeviceMesh.from_sizes(fsdp_size=2), remote_group="model")
        model.add_adapter_to_model("default", peft.LoraConfig(r=4, target_modules="all-linear"))
        model.set_optimizer("AdamW", lr=0.03)
        yield SimpleNamespace(model_id=model_id, model=model, sampler=sampler)
        runtime.forget()


def train(model: Any, steps: int = 1) -> None:
    for _ in range(steps):
        model.forward_backward(inputs=ROWS)
        model.clip_grad_and_step()


def logps(model: Any) -> list[float]:
    """What the trained model gives the prompt's tokens."""
    row = {"input_ids": PROMPT, "labels": [*PROMPT[1:], -100]}
    output = model.forward_only(inputs=[row, row])()
    return torch.as_tensor(output["logps"])[0, : len(PROMPT) - 1].tolist()


def test_every_sampler_says_what_the_trained_model_says(world):
    manager = CheckpointEngineManager(model=world.model, sampler=world.sampler, engine=SMALL_BUCKETS)
    base = [response.prompt_logprobs[1:] for response in world.sampler.sample([PROMPT] * 3, GREEDY)]
    assert base[0] == pytest.approx(base[2], abs=1e-6)

    for merge in (False, False, True):
        train(world.model)
        version = manager.sync_weights(merge_and_sync=merge)
        world.sampler.reset_prefix_cache()
        wanted = logps(world.model)
        # Three rows for two ranks, and one for both: each row is answered once, by a rank that has these weights.
        for rows in ([PROMPT] * 3, [PROMPT], PROMPT):
            responses = world.sampler.sample(rows, GREEDY)
            assert [response.weights_version for response in responses] == [version] * len(responses)
            for response in responses:
                assert response.prompt_logprobs[1:] == pytest.approx(wanted, abs=1e-4)
        assert wanted != pytest.approx(base[0], abs=1e-2)
        assert len(responses.sequences) == 1


def test_equal_prompts_are_not_answered_alike_by_different_ranks(world):
    responses = world.sampler.sample([PROMPT] * 5, {"max_tokens": 24, "stop": []})

    assert len({tuple(sequence.tokens) for sequence in responses.sequences}) == 5


def test_a_stream_comes_from_one_rank_as_it_is_drawn(world):
    told = list(world.sampler.sample_stream([PROMPT], GREEDY))

    assert told[-1][1] == "length"
    assert all(reason is None for _, reason in told[:-1])


def test_a_sampler_that_sleeps_refuses_and_wakes_up_with_the_weights_it_had(world):
    CheckpointEngineManager(model=world.model, sampler=world.sampler).sync_weights()
    before = world.sampler.sample([PROMPT], GREEDY)
    world.sampler.sleep(level=1)
    with pytest.raises(RuntimeError, match="asleep"):
        world.sampler.sample([PROMPT], GREEDY)
    world.sampler.wake_up(tags=["weights"])
    world.sampler.wake_up(tags=["kv_cache"])

    after = world.sampler.sample([PROMPT], GREEDY)
    assert after[0].sequences[0].tokens == before[0].sequences[0].tokens
    assert after[0].weights_version == before[0].weights_version


def test_samplers_that_got_weights_in_their_sleep_wake_up_with_these_and_with_none_before(world):
    manager = CheckpointEngineManager(model=world.model, sampler=world.sampler)
    manager.sync_weights(merge_and_sync=False)
    rows = [PROMPT] * 3
    before = world.sampler.sample(rows, GREEDY)

    world.sampler.sleep(level=2)
    train(world.model)
    version = manager.sync_weights(merge_and_sync=False)
    with pytest.raises(RuntimeError, match="asleep"):
        world.sampler.sample(rows, GREEDY)
    world.sampler.wake_up()

    wanted = logps(world.model)
    assert wanted != pytest.approx(before[0].prompt_logprobs[1:], abs=1e-2)
    for response in world.sampler.sample(rows, GREEDY):
        assert response.weights_version == version
        assert response.prompt_logprobs[1:] == pytest.approx(wanted, abs=1e-4)


def test_weights_that_do_not_fit_are_refused_by_their_name_and_nothing_is_sampled_with_them(world, tmp_path):
    other = make_text_model(tmp_path / "other", "qwen3_moe")
    stranger = TorchSampler(str(other), slots=2, remote_group="sampler")
    manager = CheckpointEngineManager(model=world.model, sampler=stranger)

    with pytest.raises(InvalidInput, match="weights"):
        manager.sync_weights()
    with pytest.raises(StaleWeights, match="sync_weights again"):
        stranger.sample([PROMPT], GREEDY)
    # The training and the other sampler go on.
    own = CheckpointEngineManager(model=world.model, sampler=world.sampler)
    version = own.sync_weights()
    train(world.model)
    assert own.sync_weights() == version + 1


class Deadly(ProcessGroupCheckpointEngine):
    """Ends the process of a sampler while it takes over."""

    def receive_weights(self):
        for number, item in enumerate(super().receive_weights()):
            if number == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item


@pytest.mark.soak
@pytest.mark.parametrize("shares_memory", [True, False])
def test_a_sampler_that_dies_while_weights_arrive_is_an_error_and_the_training_goes_on(world, shares_memory):
    doomed = TorchSampler(world.model_id, slots=2, remote_group="sampler", instance_id=f"doomed {shares_memory}")
    engine = Deadly(bucket_bytes=20_000, shares_memory=shares_memory)

    with pytest.raises(RankLost, match="receive_checkpoint"):
        CheckpointEngineManager(model=world.model, sampler=doomed, engine=engine).sync_weights()

    train(world.model)
    version = CheckpointEngineManager(model=world.model, sampler=world.sampler).sync_weights()
    assert world.sampler.sample([PROMPT], GREEDY)[0].weights_version == version


def test_a_sampler_in_the_processes_of_the_model_is_refused_with_what_to_do(world):
    beside = TorchSampler(world.model_id, slots=2, remote_group="model")

    with pytest.raises(InvalidInput, match="instance_id"):
        CheckpointEngineManager(model=world.model, sampler=beside)


def test_one_end_on_a_group_and_the_other_here_is_refused(world):
    with pytest.raises(InvalidInput, match="remote_group"):
        CheckpointEngineManager(model=world.model, sampler=TorchSampler(world.model_id))
