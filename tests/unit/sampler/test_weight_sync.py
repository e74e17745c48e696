"""A sampler in step with a training: it says at once what the trained model says."""

import copy
import json
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
import transformers

from harness.hub_models import save_hub_model
from harness.models import make_text_model
from twinkle.checkpoint_engine import CheckpointEngine, CheckpointEngineManager, MemoryCheckpointEngine
from twinkle.core.errors import InvalidInput, Overloaded, StaleWeights
from twinkle.model import MultiLoraTransformersModel, TransformersModel
from twinkle.sampler import TorchSampler

TESTS = Path(__file__).resolve().parents[2]
PROMPT = [5, 6, 7, 8]
GREEDY = {"max_tokens": 8, "temperature": 0.0, "stop": [], "prompt_logprobs": 0}
ROW = {"input_ids": [5, 6, 7, 8], "labels": [6, 7, 8, 9]}


@pytest.fixture(scope="module")
def model_id(tmp_path_factory):
    return str(make_text_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def experts_id(tmp_path_factory):
    return str(make_text_model(tmp_path_factory.mktemp("models") / "experts", "qwen3_moe"))


@pytest.fixture
def sampler(model_id):
    return TorchSampler(model_id, slots=4)


def train(model, steps=3, lr=0.03):
    model.set_optimizer("AdamW", lr=lr)
    for _ in range(steps):
        model.forward_backward(inputs=[ROW])
        model.clip_grad_and_step()


def scores(sampler, **call):
    (response,) = sampler.sample([PROMPT], GREEDY, **call)
    return response.prompt_logprobs[1:]


def logps(model):
    """What the trained model gives the prompt's tokens."""
    output = model.forward_only(inputs=[{"input_ids": PROMPT, "labels": [*PROMPT[1:], -100]}])
    return torch.as_tensor(output["logps"])[0, : len(PROMPT) - 1].tolist()


def test_a_whole_model_that_trains_is_sampled_as_it_is_now(model_id, sampler):
    model = TransformersModel(model_id)
    manager = CheckpointEngineManager(model=model, sampler=sampler)
    before = scores(sampler)
    for _ in range(2):
        train(model)
        manager.sync_weights()
        assert scores(sampler) == pytest.approx(logps(model), abs=1e-4)
    assert scores(sampler) != pytest.approx(before, abs=1e-2)


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("make", [TransformersModel, MultiLoraTransformersModel])
def test_an_adapter_that_trains_is_sampled_as_it_is_now_merged_or_not(model_id, sampler, make, merge):
    model = make(model_id=model_id)
    model.add_adapter_to_model("default", peft.LoraConfig(r=4, target_modules="all-linear"))
    manager = CheckpointEngineManager(model=model, sampler=sampler)
    manager.sync_weights(merge_and_sync=merge)
    base = scores(sampler)
    train(model)
    manager.sync_weights(merge_and_sync=merge)

    assert scores(sampler) == pytest.approx(logps(model), abs=1e-4)
    assert scores(sampler) != pytest.approx(base, abs=1e-2)
    if not merge:
        assert scores(sampler, use_base_model=True) == pytest.approx(base, abs=1e-5)
        manager.sync_weights(merge_and_sync=True)
        assert scores(sampler, use_base_model=True) == pytest.approx(logps(model), abs=1e-4)
        manager.sync_weights(merge_and_sync=False)
        assert scores(sampler) == pytest.approx(logps(model), abs=1e-4)
        assert scores(sampler, use_base_model=True) == pytest.approx(base, abs=1e-5)


def test_merging_leaves_the_training_as_it_was(model_id, sampler):
    model = TransformersModel(model_id)
    model.add_adapter_to_model("default", peft.LoraConfig(r=4, target_modules="all-linear"))
    train(model)
    before = copy.deepcopy(model.model.state_dict())
    CheckpointEngineManager(model=model, sampler=sampler).sync_weights(merge_and_sync=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.model.state_dict().items())


@pytest.mark.parametrize("make", [TransformersModel, MultiLoraTransformersModel])
def test_experts_are_merged_and_taken_over_too(experts_id, make):
    model = make(model_id=experts_id)
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    if make is MultiLoraTransformersModel:
        config = peft.LoraConfig(r=4, target_modules="all-linear")
    model.add_adapter_to_model("default", config)
    train(model)
    sampler = TorchSampler(experts_id, slots=4)
    for merge in (True, False):
        CheckpointEngineManager(model=model, sampler=sampler).sync_weights(merge_and_sync=merge)
        assert scores(sampler) == pytest.approx(logps(model), abs=1e-3)


@pytest.mark.parametrize("saved", [None, ["lm_head"]])
def test_what_the_sampler_takes_over_is_what_peft_merges(model_id, sampler, tmp_path, saved):
    model = TransformersModel(model_id)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], modules_to_save=saved)
    model.add_adapter_to_model("default", config)
    train(model)
    CheckpointEngineManager(model=model, sampler=sampler).sync_weights()
    path = model.save("last", output_dir=tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(model_id)
    merged = peft.PeftModel.from_pretrained(plain, path).merge_and_unload()
    wanted = dict(merged.named_parameters())
    for name, tensor in sampler._model.base_weights().items():
        torch.testing.assert_close(tensor, wanted[name])


class Courier(CheckpointEngine):
    """A script's own engine, whose transfers are coroutines as in other libraries."""

    def __init__(self):
        self.calls = []
        self.sent = []

    def prepare(self):
        self.calls.append("prepare")
        return {}

    @classmethod
    def build_topology(cls, trainer_world_size, rollout_world_size, metadata):
        assert (trainer_world_size, rollout_world_size) == (1, 0)
        return {"name": ["sync"]}, {"name": []}

    def init_process_group(self, *, name):
        self.calls.append(name)

    async def send_weights(self, weights):
        self.sent = list(weights)

    async def receive_weights(self):
        for item in self.sent:
            yield item

    def finalize(self):
        self.calls.append("finalize")


@pytest.mark.parametrize("make", [Courier, MemoryCheckpointEngine])
def test_an_engine_of_ones_own_carries_the_weights(model_id, sampler, make):
    model = TransformersModel(model_id)
    train(model)
    engine = make()
    CheckpointEngineManager(model, sampler, engine=engine).sync_weights()
    assert scores(sampler) == pytest.approx(logps(model), abs=1e-4)
    if make is Courier:
        assert engine.calls == ["prepare", "sync", "finalize"]


def test_a_model_of_another_shape_is_refused_by_the_name_of_its_weight(experts_id, sampler):
    with pytest.raises(InvalidInput, match="weights"):
        CheckpointEngineManager(TransformersModel(experts_id), sampler).sync_weights()


def test_ranks_that_sample_get_the_weights_of_those_that_train_also_where_they_lie_in_parts(model_id):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    paths = os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "harness.sync_training", model_id, rank, port],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
        )
        for rank in "01"
    ]
    trained, sampled = (
        [json.loads(line) for line in rank.communicate(timeout=120)[0].splitlines() if line.startswith(b"[")]
        for rank in ranks
    )
    assert len(trained) == len(sampled) == 3
    for wanted, told in zip(trained, sampled, strict=True):
        assert told == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("make", [TransformersModel, MultiLoraTransformersModel])
def test_a_class_for_pictures_too_samples_with_what_its_text_model_learned(tmp_path, make):
    model_id = str(save_hub_model(tmp_path / "model", "qwen3_5"))
    model = make(model_id=model_id)
    sampler = TorchSampler(model_id, slots=4)
    model.add_adapter_to_model("default", peft.LoraConfig(r=4, target_modules="all-linear"))
    train(model)
    for merge in (True, False):
        CheckpointEngineManager(model=model, sampler=sampler).sync_weights(merge_and_sync=merge)
        assert scores(sampler) == pytest.approx(logps(model), abs=1e-3)


def test_an_answer_says_which_weights_it_came_from(model_id, sampler):
    model = TransformersModel(model_id)
    first, second = (CheckpointEngineManager(model=model, sampler=sampler) for _ in range(2))

    assert sampler.sample([PROMPT], GREEDY)[0].weights_version == 0
    assert first.sync_weights() == first.version == 1
    # Whoever syncs: a number means one state of this sampler's weights.
    assert second.sync_weights() == 2
    assert [answer.weights_version for answer in sampler.sample([PROMPT, PROMPT], GREEDY)] == [2, 2]


def test_a_sampler_whose_sync_broke_off_answers_again_after_the_next_one(model_id, experts_id, sampler):
    model = TransformersModel(model_id)
    with pytest.raises(InvalidInput, match="weights"):
        CheckpointEngineManager(TransformersModel(experts_id), sampler).sync_weights()

    for ask in (sampler.sample, sampler.sample_stream):
        with pytest.raises(StaleWeights, match="call sync_weights again"):
            ask([PROMPT], GREEDY)

    assert CheckpointEngineManager(model, sampler).sync_weights() == 2
    assert sampler.sample([PROMPT], GREEDY)[0].weights_version == 2


@pytest.mark.parametrize("merge", [True, False])
def test_a_sampler_that_got_weights_in_its_sleep_wakes_up_with_these_and_with_none_before(model_id, sampler, merge):
    model = TransformersModel(model_id)
    model.add_adapter_to_model("default", peft.LoraConfig(r=4, target_modules="all-linear"))
    manager = CheckpointEngineManager(model, sampler)
    manager.sync_weights(merge_and_sync=merge)
    before = scores(sampler)

    sampler.sleep()
    train(model)
    version = manager.sync_weights(merge_and_sync=merge)
    for tags in (["weights"], ["kv_cache"]):
        with pytest.raises(RuntimeError, match="asleep"):
            sampler.sample([PROMPT], GREEDY)
        sampler.wake_up(tags=tags)

    (answer,) = sampler.sample([PROMPT], GREEDY)
    assert answer.weights_version == version
    assert answer.prompt_logprobs[1:] == pytest.approx(logps(model), abs=1e-4)
    assert answer.prompt_logprobs[1:] != pytest.approx(before, abs=1e-2)


def test_a_sampler_whose_weights_did_not_arrive_in_its_sleep_wakes_up_and_answers_nothing(
    model_id, experts_id, sampler
):
    sampler.sleep()
    with pytest.raises(InvalidInput, match="weights"):
        CheckpointEngineManager(TransformersModel(experts_id), sampler).sync_weights()
    sampler.wake_up()

    with pytest.raises(StaleWeights, match="version 1, which did not arrive whole"):
        sampler.sample([PROMPT], GREEDY)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_stream_does_not_go_on_with_weights_that_a_sync_has_replaced(model_id, sampler, has_begun):
    model = TransformersModel(model_id)
    model.add_adapter_to_model("default", peft.LoraConfig(r=4, target_modules="all-linear"))
    manager = CheckpointEngineManager(model, sampler)
    manager.sync_weights(merge_and_sync=False)
    stream = sampler.sample_stream([PROMPT], {**GREEDY, "max_tokens": 40, "prompt_logprobs": None})
    if has_begun:
        next(stream)
    manager.sync_weights(merge_and_sync=False)

    with pytest.raises(StaleWeights, match="version 1, and the sampler has 2 now; ask again"):
        next(stream)
    assert sampler.sample([PROMPT], GREEDY)[0].weights_version == 2


def test_errors_cross_processes_as_they_are():
    for error in (InvalidInput("adapter_name", "is missing"), Overloaded("full", retry_after_s=7), StaleWeights("old")):
        there = pickle.loads(pickle.dumps(error))
        assert (type(there), str(there), vars(there)) == (type(error), str(error), vars(error))
