"""Rollouts of several turns: token by token what was sampled, with tools between the turns."""

import json

import numpy as np
import peft
import pytest
import torch

from twinkle.advantage import GRPOAdvantage
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.core.errors import InvalidInput
from twinkle.data_format import SamplingParams
from twinkle.model import MultiLoraTransformersModel
from twinkle.sampler import TorchSampler
from twinkle.template import Template
from twinkle_agentic.envs import EnvPool, EnvTool
from twinkle_agentic.rollout import MultiTurnRollout, extend_with_bridge
from twinkle_agentic.tools import ToolManager
from twinkle_client.rollout import ClientMultiTurnRollout

from .conftest import VowelEnv

PARAMS = SamplingParams(max_tokens=6, logprobs=1, seed=5)
PROMPT = {"messages": [{"role": "user", "content": "Say something."}], "user_data": [("ground_truth", "4")]}


@pytest.fixture(scope="module")
def sampler(model_id):
    return TorchSampler(model_id, slots=32)


def tools_of(env):
    return ToolManager(EnvTool.from_env(env))


class Scripted:
    """A sampler that says what it is told to, one text a turn for each row."""

    def __init__(self, template, *turns, ends=True):
        self._template, self._turns, self._ends, self.rows = template, list(turns), ends, []

    def sample(self, inputs, sampling_params, **call):
        self.rows.append([dict(row) for row in inputs])
        texts = self._turns.pop(0)
        end = [self._template.tokenizer.eos_token_id] if self._ends else []
        tokens = [self._template.tokenizer.encode(text, add_special_tokens=False) + end for text in texts]
        return [{"sequences": [self._sequence(ids)]} for ids in tokens]

    def _sequence(self, ids):
        reason = "stop" if self._ends else "length"
        return {"tokens": ids, "stop_reason": reason, "logprobs": [[(token, -0.5)] for token in ids]}


def test_a_row_holds_the_very_tokens_that_were_sampled_turn_after_turn(sampler, template):
    sampler.set_template(template)
    rollout = MultiTurnRollout(sampler, template, tools_of(VowelEnv()), PARAMS, max_turns=2)
    (row,) = rollout([PROMPT])

    trained = [token for token in row["labels"] if token != -100]
    assert trained == [pair[0][0] for pair in row["logprobs"]]
    assert len(row["labels"]) == len(row["input_ids"]) == row["length"] == len(row["position_ids"])
    for place, token in enumerate(row["labels"]):
        assert token in (-100, (row["input_ids"] + [-100])[place + 1])
    assert row["turns"] <= 3 and row["user_data"] == PROMPT["user_data"]


def test_a_whole_conversation_reads_as_the_template_writes_it(model_id, template):
    scripted = Scripted(template, ["first"], ["second"])
    tools = tools_of(VowelEnv())

    class Once(type(template)):
        def parse_tool_call(self, text):
            return super().parse_tool_call(text) if text == "first" else []

    once = Once(model_id)
    (row,) = MultiTurnRollout(scripted, once, tools, max_turns=4)([PROMPT])

    said = [message["role"] for message in row["messages"]]
    assert said == ["user", "assistant", "tool", "assistant"] and row["turns"] == 2 and not row["truncated"]
    plain = [{name: value for name, value in message.items() if name != "tool_calls"} for message in row["messages"]]
    whole = once.format_trajectory({"messages": plain})
    assert once.decode(row["input_ids"]) == whole.rstrip("\n")
    assert once.decode([token for token in row["labels"] if token >= 0]) == "first<|im_end|>second<|im_end|>"
    assert row["messages"][2] == {"role": "tool", "content": "1 vowels", "tool_call_id": "call_0", "name": "say"}


def test_conversations_end_each_in_its_own_turn_and_those_under_way_are_sampled_together(model_id, template):
    class Asking(type(template)):
        def parse_tool_call(self, text):
            return super().parse_tool_call(text) if "more" in text else []

    scripted = Scripted(template, ["more", "no", "more"], ["more", "no"], ["no"])
    rows = MultiTurnRollout(scripted, Asking(model_id), tools_of(VowelEnv(9)), max_turns=5)([PROMPT] * 3)

    assert [row["turns"] for row in rows] == [3, 1, 2]
    assert [len(asked) for asked in scripted.rows] == [3, 2, 1]


def test_a_conversation_that_must_end_says_that_it_was_cut(model_id, template):
    tools = tools_of(VowelEnv(9))
    (row,) = MultiTurnRollout(Scripted(template, ["a"], ["b"]), template, tools, max_turns=2)([PROMPT])
    assert row["truncated"] and row["turns"] == 2 and row["messages"][-1]["role"] == "assistant"
    (row,) = MultiTurnRollout(Scripted(template, ["a"], ends=False), template, tools)([PROMPT])
    assert row["truncated"] and row["stop_reason"] == "length" and row["turns"] == 1
    (row,) = MultiTurnRollout(Scripted(template, ["a"]), template, tools, max_trajectory_tokens=30)([PROMPT])
    assert row["truncated"] and len(row["input_ids"]) <= 30
    short = type(template)(model_id, max_length=30)
    (row,) = MultiTurnRollout(Scripted(template, ["a"]), short, tools)([PROMPT])
    assert row["truncated"] and len(row["input_ids"]) <= 30


def test_a_bridge_keeps_what_there_is_and_trains_nothing(template):
    ids = template.encode(PROMPT, add_generation_prompt=True)["input_ids"].tolist()
    end = template.tokenizer.eos_token_id
    row = {"input_ids": [*ids, 300, 301, end], "labels": [-100] * len(ids) + [301, end, -100]}
    row["messages"] = [*PROMPT["messages"], {"role": "assistant", "content": "x"}]
    longer = extend_with_bridge(row, [{"role": "user", "content": "and?"}], template)

    assert longer["input_ids"][: len(ids) + 3] == row["input_ids"]
    assert longer["labels"] == row["labels"] + [-100] * (longer["length"] - len(row["labels"]))
    added = template.decode(longer["input_ids"][len(ids) + 3 :])
    assert added == "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"


def test_what_cannot_be_rolled_out_is_refused_by_its_name(sampler, template, model_id):
    rollout = MultiTurnRollout(sampler, template)
    for field, call in {
        "trajectories": lambda: rollout(PROMPT),
        "num_samples": lambda: rollout([PROMPT], sampling_params={"num_samples": 2}),
        "tool_manager": lambda: rollout([PROMPT], tool_manager=[ToolManager(), ToolManager()]),
        "max_turns": lambda: MultiTurnRollout(sampler, template, max_turns=0),
        "template": lambda: MultiTurnRollout(sampler, Template(model_id, truncation_strategy="split")),
    }.items():
        with pytest.raises(InvalidInput) as refused:
            call()
        assert refused.value.field == field


def test_the_clients_rollout_passes_on_what_its_sampler_is_told(template):
    seen = {}

    class Service(Scripted):
        def sample(self, inputs, sampling_params, **call):
            seen.update(call, params=sampling_params)
            return {"sequences": super().sample(inputs, sampling_params)[0]["sequences"]}

    service = Service(template, ["a"])
    (row,) = ClientMultiTurnRollout(service, template, max_turns=1)([PROMPT], adapter_uri="twinkle://x")
    assert seen["adapter_uri"] == "twinkle://x" and seen["params"].logprobs == 1 and row["turns"] == 1


def test_a_loop_of_rollout_advantage_loss_and_sync_learns_what_its_environment_rewards(model_id, template):
    torch.manual_seed(0)
    model = MultiLoraTransformersModel(model_id=model_id)
    model.add_adapter_to_model("default", peft.LoraConfig(r=8, lora_alpha=32, target_modules="all-linear"))
    model.set_loss("GRPOLoss")
    model.set_optimizer("AdamW", lr=0.02)
    sampler = TorchSampler(model_id, slots=32)
    sampler.set_template(template)
    manager = CheckpointEngineManager(model=model, sampler=sampler)
    pool = EnvPool(32, env_cls=VowelEnv)
    # It has never learned to end a turn, so a quarter of its tokens ends one.
    params = SamplingParams(max_tokens=60, logprobs=1, stop=list(range(7, 107)))
    rollout = MultiTurnRollout(sampler, template, sampling_params=params, max_turns=2)

    def mean_length():
        prompts = [{"messages": [{"role": "user", "content": VowelEnv().reset().observation}]}] * 512
        return sum(len(sequence.tokens) for sequence in sampler.sample(prompts, params).sequences) / len(prompts)

    before = mean_length()
    for _ in range(14):
        manager.sync_weights(merge_and_sync=False)
        envs = pool.get_adapters()
        tools = [EnvTool.from_env(env) for env in envs]
        prompts = [{"messages": [{"role": "user", "content": env.reset().observation}]} for env in envs]
        rows = rollout(prompts, tool_manager=[ToolManager(each) for each in tools])
        assert all(each[0].last_result is not None for each in tools)
        rewards = envs[0].evaluate(rows)
        logps = np.asarray(model.forward_only(inputs=rows)["logps"])
        for row, computed in zip(rows, logps, strict=True):
            labels = np.array(row["labels"])
            drawn = [pair[0][1] for pair in row["logprobs"]]
            assert computed[: len(labels)][labels != -100].tolist() == pytest.approx(drawn, abs=1e-4)
        advantages = GRPOAdvantage()(rewards, num_generations=32).tolist()
        old = [[pair[0][1] for pair in row["logprobs"]] for row in rows]
        model.forward_backward(inputs=rows, advantages=advantages, old_logps=old)
        model.clip_grad_and_step()
    assert max(row["turns"] for row in rows) > 1
    manager.sync_weights(merge_and_sync=False)
    assert mean_length() < 0.9 * before
    pool.close()


def test_conversations_are_written_down_as_the_callbacks_say_and_none_of_them_ends_a_rollout(template, tmp_path):
    def wanted(row):
        if row["user_data"][0][1] == "c":
            raise KeyError("c")
        return row["user_data"][0][1] != "b"

    rollout = MultiTurnRollout(
        Scripted(template, ["one"] * 4),
        template,
        max_turns=1,
        trace_dir=tmp_path / "traces",
        trace_callback=wanted,
        success_callback=lambda row: row["user_data"][0][1] == "a/x",
    )
    prompts = [{**PROMPT, "user_data": [("id", name), ("ground_truth", "4")]} for name in ("a/x", "b", "c", "d")]

    rows = rollout(prompts, global_step=12)

    assert len(rows) == 4
    failed, good = sorted((tmp_path / "traces").iterdir())
    assert good.name.startswith("step000012-ok-a_x-") and failed.name.startswith("step000012-fail-d-")
    record = json.loads(good.read_text())
    assert record["trajectory"]["messages"] == rows[0]["messages"] and "input_ids" not in record["trajectory"]
    assert (record["ground_truth"], record["success"], record["turns"]) == ("4", True, rows[0]["turns"])
    assert (record["stop_reason"], record["truncated"]) == (rows[0]["stop_reason"], rows[0]["truncated"])
    with pytest.raises(InvalidInput, match="trace_dir: is missing"):
        MultiTurnRollout(None, template, success_callback=lambda row: True)
    with pytest.raises(InvalidInput, match="trace_dir: cannot be made"):
        MultiTurnRollout(None, template, trace_dir=good)
