"""The call of scripts: rows in, responses out, over every backend's step interface."""

import dataclasses
from importlib.util import find_spec

import pytest

from twinkle.checkpoint_engine.peft import export_adapter
from twinkle.core.errors import Conflict, InvalidInput, UserError
from twinkle.data_format.sampling import SamplingParams
from twinkle.module.lora import LoraConfig
from twinkle.sampler import SampleRequest, SteppedTorchSampler, SteppedVLLMSampler, SteppingSampler

from .conftest import VOCAB_SIZE, run_to_end

ROW = [7, 8, 9, 10]
GREEDY = {"max_tokens": 6, "temperature": 0.0, "stop": []}


class Numbers:
    """A tokenizer whose texts are its tokens."""

    def decode(self, tokens, skip_special_tokens=False):
        return " ".join(map(str, tokens))


decode = Numbers().decode


@pytest.fixture(scope="module", params=["torch", "vllm"])
def stepped(request, sampled_model, model_folder):
    if request.param == "torch":
        yield SteppedTorchSampler(sampled_model, slots=8, decode_text=decode)
        return
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here; tests/acceptance/test_vllm.py runs this where it is")
    vllm_sampler = SteppedVLLMSampler(str(model_folder), slots=8, max_rank=8, decode_text=decode)
    yield vllm_sampler
    vllm_sampler.shutdown()


@pytest.fixture
def sampler(stepped):
    return SteppingSampler(stepped, tokenizer=Numbers())


def tokens_of(responses):
    return [[sequence.tokens for sequence in response.sequences] for response in responses]


def test_a_response_for_each_row_in_order_with_as_many_sequences_as_asked(sampler):
    responses = sampler.sample([ROW, {"input_ids": [3, 4]}, ROW], {**GREEDY, "num_samples": 2})

    assert [response.prompt_token_ids for response in responses] == [ROW, [3, 4], ROW]
    assert all(len(response.sequences) == 2 for response in responses)
    assert tokens_of(responses)[0] == tokens_of(responses)[2]
    assert responses[0].sequences[0].stop_reason == "length"
    assert responses[0].sequences[0].decoded == decode(responses[0].sequences[0].tokens)


def test_it_gives_what_the_step_interface_gives(sampled_model, sampler, adapters):
    request = SampleRequest(key="r", adapter=adapters[1], prompt=tuple(ROW), seed=5, num_samples=3, max_tokens=9)
    steps = SteppedTorchSampler(sampled_model, slots=8)
    steps.add(request)
    result = run_to_end(steps)["r"]

    sampler.add_adapter_to_sampler("mine", adapters[1])
    (response,) = sampler.sample([ROW], SamplingParams(max_tokens=9, seed=5, num_samples=3, logprobs=1), "mine")

    for sequence, wanted in zip(response.sequences, result.sequences, strict=True):
        assert sequence.tokens == [token for ((token, _),) in sequence.logprobs] == wanted.tokens.tolist()
        assert [logprob for ((_, logprob),) in sequence.logprobs] == pytest.approx(wanted.logprobs.tolist(), abs=1e-4)


def test_equal_rows_get_equal_samples_only_with_a_seed(sampler):
    params = SamplingParams(max_tokens=20, stop=[])

    first, second = tokens_of(sampler.sample([ROW, ROW], dataclasses.replace(params, seed=1)))
    third, fourth = tokens_of(sampler.sample([ROW, ROW], params))

    assert first == second
    assert third != fourth


def test_the_row_comes_back_extended_with_shifted_labels_and_all_it_had(sampler):
    row = {"input_ids": ROW, "messages": [{"role": "user", "content": "hi"}], "user_data": [("solution", "4")]}
    (response,) = sampler.sample([row], GREEDY)
    (sequence,) = response.sequences
    feature = sequence.new_input_feature

    assert feature["input_ids"] == ROW + sequence.tokens
    assert feature["labels"] == [-100] * (len(ROW) - 1) + sequence.tokens + [-100]
    assert feature["length"] == len(feature["position_ids"]) == len(feature["attention_mask"]) == len(ROW) + 6
    assert feature["user_data"] == row["user_data"]
    assert feature["messages"] == [*row["messages"], {"role": "assistant", "content": sequence.decoded}]


def test_scores_of_the_prompt_and_of_likely_tokens_come_as_pairs(sampler):
    (response,) = sampler.sample([ROW], {**GREEDY, "logprobs": 3, "prompt_logprobs": 2})

    assert response.prompt_logprobs[0] is None and all(value < 0 for value in response.prompt_logprobs[1:])
    assert [len(pairs) for pairs in response.topk_prompt_logprobs[1:]] == [2] * (len(ROW) - 1)
    for token, pairs in zip(response.sequences[0].tokens, response.sequences[0].logprobs, strict=True):
        assert len(pairs) == 3 and pairs[0][0] == token  # greedy: the likeliest is the chosen one


def test_the_stop_token_or_string_is_part_of_the_output(sampler):
    params = {"max_tokens": 12, "seed": 3, "temperature": 1.5}
    (free,) = sampler.sample([ROW], {**params, "stop": []})
    tokens = free.sequences[0].tokens
    assert len(set(tokens)) > 6

    for stop in (tokens[5], decode(tokens[3:6])):
        ends = [
            length
            for length in range(1, 13)
            if tokens[length - 1] == stop or (isinstance(stop, str) and stop in decode(tokens[:length]))
        ]
        (stopped,) = sampler.sample([ROW], {**params, "stop": [stop]})
        assert stopped.sequences[0].tokens == tokens[: ends[0]]
        assert stopped.sequences[0].stop_reason == "stop"


def test_an_adapter_is_read_from_its_directory_at_every_call(sampled_model, sampler, adapters, tmp_path):
    answers = []
    for adapter in (adapters[0], adapters[2], adapters[0]):
        for name, content in export_adapter(adapter, "tiny").items():
            (tmp_path / name).write_bytes(content)
        sampler.add_adapter_to_sampler("same", adapter)
        by_path = sampler.sample([ROW], {**GREEDY, "logprobs": 1}, adapter_path=str(tmp_path))
        by_name = sampler.sample([ROW], {**GREEDY, "logprobs": 1}, "same")
        assert by_path == by_name
        answers.append(by_path[0].sequences[0].logprobs)
    assert answers[0] == answers[2] != answers[1]


def test_the_base_model_is_sampled_only_when_asked_for(sampler, adapters):
    sampler.add_adapter_to_sampler("mine", adapters[2])
    base = sampler.sample([ROW], {**GREEDY, "logprobs": 1})
    assert sampler.sample([ROW], {**GREEDY, "logprobs": 1}, "mine", use_base_model=True) == base
    assert sampler.sample([ROW], {**GREEDY, "logprobs": 1}, "mine") != base


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"adapter_name": "unknown"}, "adapter_name"),
        ({"adapter_path": "/nowhere"}, "adapter_path"),
        ({"sampling_params": {"max_tokens": 1, "max_new_tokens": 2}}, "max_new_tokens"),
        ({"sampling_params": {"top_p": 0.0}}, "top_p"),
        ({"sampling_params": {"repetition_penalty": 0.0}}, "repetition_penalty"),
        ({"inputs": [{"messages": []}]}, "inputs"),
        ({"inputs": [{"input_ids": [[1, 2]]}]}, "input_ids"),
        ({"inputs": [[VOCAB_SIZE]]}, "prompt"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_name_and_leaves_nothing_behind(sampler, arguments, field):
    with pytest.raises(InvalidInput) as refused:
        sampler.sample(**{"inputs": [ROW], **arguments})
    assert refused.value.field == field
    assert not sampler.stepped.has_work


def test_one_broken_row_ends_the_call_and_leaves_nothing_behind(sampled_model, sampler):
    broken = sampled_model.create_adapter(LoraConfig(rank=2), trainable=False)
    broken.params.fill_(float("nan"))
    broken.publish()
    sampler.add_adapter_to_sampler("broken", broken)
    with pytest.raises(UserError, match="NaN"):
        sampler.sample([ROW, ROW], GREEDY, "broken")
    assert not sampler.stepped.has_work


def test_requests_end_once_each_and_those_cancelled_never(stepped, adapters):
    for index in range(12):
        stepped.add(
            SampleRequest(key=str(index), adapter=[None, *adapters][index % 4], prompt=(7, 8, 9), seed=1, max_tokens=8)
        )
    with pytest.raises(Conflict):
        stepped.add(SampleRequest(key="3", adapter=None, prompt=(7,), seed=0))
    assert stepped.num_requests == 12
    ended = {outcome.key: outcome for outcome in stepped.step()}
    gone = [str(index) for index in range(0, 12, 3) if str(index) not in ended]
    for key in [*gone, "never added"]:
        stepped.cancel(key)
    ended.update(run_to_end(stepped))
    assert set(ended) == {str(index) for index in range(12)} - set(gone)
    assert not stepped.has_work and stepped.num_requests == 0


def test_requests_of_others_are_not_stepped(stepped, sampler):
    stepped.add(SampleRequest(key="theirs", adapter=None, prompt=(1, 2), seed=0))
    with pytest.raises(RuntimeError, match="under way"):
        sampler.sample([ROW])
    stepped.cancel("theirs")
    assert not sampler.stepped.has_work


def test_a_trajectory_is_encoded_by_the_template(sampler):
    class Template:
        def encode(self, trajectory, *, add_generation_prompt):
            assert add_generation_prompt
            return {**trajectory, "input_ids": ROW}

    sampler.set_template(Template())
    (response,) = sampler.sample([{"messages": [{"role": "user", "content": "hi"}]}], GREEDY)
    assert response.prompt_token_ids == ROW
