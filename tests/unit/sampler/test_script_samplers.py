"""Samplers as scripts make and call them: by a model's id, in both generations of calls and results."""

import json
from importlib.util import find_spec

import numpy as np
import peft
import pytest
import torch
import transformers
from structlog.testing import capture_logs

from harness.models import make_text_model
from twinkle.core.errors import InvalidInput
from twinkle.data_format import SampleResponses, SamplingParams
from twinkle.sampler import Sampler, TorchSampler, vLLMSampler
from twinkle.sampler.scripts import local

MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}]
PARAMS = {"max_tokens": 6, "seed": 3, "stop": []}


class ChatTemplate:
    """What a sampler needs of a template."""

    def __init__(self, model_id, **settings):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model_id)
        self.settings = settings

    def encode(self, trajectory, add_generation_prompt=False):
        ids = self.tokenizer.apply_chat_template(
            trajectory["messages"], add_generation_prompt=add_generation_prompt, return_dict=False
        )
        return {**trajectory, "input_ids": np.array(ids), "length": len(ids)}

    def parse_tool_call(self, text):
        return []


@pytest.fixture(scope="module")
def model_id(tmp_path_factory):
    return str(make_text_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def sampler(model_id):
    made = TorchSampler(f"ms://{model_id}", slots=8)
    made.set_template(ChatTemplate, model_id=model_id)
    return made


def save_adapter(model_id, folder, seed=0, scale=0.3, **settings):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_id)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", **settings))
    torch.manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=scale)
    wrapped.save_pretrained(folder)
    return wrapped


def greedy_by_transformers(model, ids, count):
    given = torch.tensor([ids])
    for _ in range(count):
        with torch.no_grad():
            given = torch.cat([given, model(given).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return given[0, len(ids) :].tolist()


def test_a_conversation_goes_in_and_a_row_ready_to_be_trained_on_comes_out(sampler):
    trajectory = {"messages": MESSAGES, "user_data": [("ground_truth", "4")]}
    responses = sampler.sample([trajectory, trajectory], SamplingParams(**PARAMS, logprobs=1, num_samples=2))

    assert [len(response.sequences) for response in responses] == [2, 2]
    feature = responses[0].sequences[0].new_input_feature
    tokens = responses[0].sequences[0].tokens
    num_prompt = len(feature["input_ids"]) - len(tokens)
    assert feature["labels"] == [-100] * (num_prompt - 1) + tokens + [-100]
    assert feature["user_data"] == [("ground_truth", "4")]
    assert feature["messages"][:-1] == MESSAGES and feature["messages"][-1]["role"] == "assistant"
    assert feature["messages"][-1]["content"] == sampler.decode_response(tokens)
    assert json.loads(json.dumps(feature))["input_ids"] == feature["input_ids"]


def test_results_answer_to_attributes_and_to_keys_by_prompt_and_in_a_row(sampler):
    responses = sampler.sample([[5, 6], [7]], {**PARAMS, "num_samples": 2})

    assert isinstance(responses, SampleResponses)
    flat = [sequence for response in responses for sequence in response.sequences]
    assert responses.sequences == responses.get("sequences", []) == responses["sequences"] == flat
    first = flat[0]
    assert first["tokens"] == first.get("tokens", []) == first.tokens
    assert first.get("nothing", 3) == 3 and "tokens" in first and "nothing" not in first
    assert responses[0]["prompt_token_ids"] == [5, 6]
    with pytest.raises(KeyError):
        responses["tokens"]


def test_a_call_in_the_old_form_returns_logprobs_unasked_as_numbers(sampler):
    old = sampler.sample([[5, 6]], PARAMS, num_samples=3)
    asked = sampler.sample([[5, 6]], {**PARAMS, "logprobs": 1, "num_samples": 3})
    pairs = sampler.sample([[5, 6]], {**PARAMS, "logprobs": 1}, num_samples=3)

    assert len(old.sequences) == 3
    assert sampler.sample([[5, 6]], PARAMS).sequences[0].logprobs is None
    for plain, wanted, both in zip(old.sequences, asked.sequences, pairs.sequences, strict=True):
        assert plain.logprobs == [pair[0][1] for pair in wanted.logprobs]
        assert both.logprobs == wanted.logprobs and [pair[0][0] for pair in wanted.logprobs] == wanted.tokens


def test_without_new_tokens_a_prompt_is_only_scored(sampler, model_id):
    (response,) = sampler.sample([[5, 6, 7]], {"max_tokens": 0, "prompt_logprobs": 1})
    model = transformers.AutoModelForCausalLM.from_pretrained(model_id)
    with torch.no_grad():
        wanted = model(torch.tensor([[5, 6, 7]])).logits[0].log_softmax(-1)

    assert response.sequences[0].tokens == []
    assert response.prompt_logprobs[1:] == pytest.approx([float(wanted[0, 6]), float(wanted[1, 7])], abs=1e-4)


@pytest.mark.parametrize("inputs", [None, "hello", 5])
def test_what_are_no_rows_is_refused_by_name(sampler, inputs):
    with pytest.raises(InvalidInput, match=f"^inputs: is {inputs!r}; send a list of rows"):
        sampler.sample(inputs, SamplingParams(max_tokens=1))


def test_text_streams_as_it_grows_and_says_at_last_why_it_ended(sampler):
    params = {"max_tokens": 12, "seed": 4, "stop": []}
    pieces = list(sampler.sample_stream({"messages": MESSAGES}, params))
    (whole,) = sampler.sample([{"messages": MESSAGES}], params)

    assert len(pieces) > 2
    assert "".join(text for text, _ in pieces) == sampler.decode_response(whole.sequences[0].tokens)
    assert [reason for _, reason in pieces] == [None] * (len(pieces) - 1) + ["length"]


def test_a_stream_given_up_leaves_nothing_behind(sampler):
    stream = sampler.sample_stream([5, 6], {"max_tokens": 50, "stop": []})
    next(stream)
    stream.close()
    assert not sampler.stepped.has_work
    with pytest.raises(InvalidInput, match="a stream has one"):
        sampler.sample_stream([[5], [6]])


def test_an_adapter_trained_by_peft_is_sampled_as_peft_computes_it(sampler, model_id, tmp_path):
    wrapped = save_adapter(model_id, tmp_path)
    wanted = greedy_by_transformers(wrapped.eval(), [5, 6, 7], 8)
    greedy = {"max_tokens": 8, "temperature": 0.0, "stop": []}

    sampler.add_adapter_to_sampler("mine", str(tmp_path))

    assert sampler.sample([[5, 6, 7]], greedy, adapter_path=tmp_path)[0].sequences[0].tokens == wanted
    assert sampler.sample([[5, 6, 7]], greedy, "mine")[0].sequences[0].tokens == wanted
    assert sampler.sample([[5, 6, 7]], greedy, "mine", use_base_model=True)[0].sequences[0].tokens != wanted


def test_a_missing_or_damaged_adapter_is_an_error_never_the_base_model(sampler, model_id, tmp_path):
    save_adapter(model_id, tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[:100], whole[:-10], b""):
        weights.write_bytes(damaged)
        with pytest.raises(InvalidInput):
            sampler.sample([[5]], PARAMS, adapter_path=tmp_path)
    weights.unlink()
    with pytest.raises(InvalidInput, match="adapter_path"):
        sampler.sample([[5]], PARAMS, adapter_path=tmp_path)
    with pytest.raises(InvalidInput, match="not added"):
        sampler.sample([[5]], PARAMS, "nobody")
    sampler.add_adapter_to_sampler("later", peft.LoraConfig(r=4))
    with pytest.raises(InvalidInput, match="without weights"):
        sampler.sample([[5]], PARAMS, "later")


def test_a_script_with_a_seed_repeats_itself_and_equal_prompts_differ(sampler):
    answers = []
    for _ in range(2):
        torch.manual_seed(11)
        answers.append([s.tokens for s in sampler.sample([[5, 6]] * 3, {"max_tokens": 12, "stop": []}).sequences])
    assert answers[0] == answers[1]
    assert len({tuple(tokens) for tokens in answers[0]}) == 3


def test_a_sleeping_sampler_refuses_until_all_of_it_is_awake(sampler):
    sampler.sleep()
    with pytest.raises(RuntimeError, match="asleep"):
        sampler.sample([[5]], PARAMS)
    sampler.wake_up(["weights"])
    with pytest.raises(RuntimeError, match="kv_cache"):
        sampler.sample([[5]], PARAMS)
    sampler.wake_up()
    assert sampler.sample([[5]], PARAMS).sequences
    for reset in (sampler.reset_prefix_cache, sampler.reset_mm_cache, sampler.reset_encoder_cache):
        reset()


def test_other_weights_of_the_same_model_take_the_place_of_its_own(model_id, tmp_path):
    made = TorchSampler(model_id)
    other = transformers.AutoModelForCausalLM.from_pretrained(model_id)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.1)
    other.save_pretrained(tmp_path)
    greedy = {"max_tokens": 8, "temperature": 0.0, "stop": []}
    before = made.sample([[5, 6, 7]], greedy).sequences[0].tokens
    wanted = greedy_by_transformers(other.eval(), [5, 6, 7], 8)

    made.load_full_weights_from_path(tmp_path)

    assert made.sample([[5, 6, 7]], greedy).sequences[0].tokens == wanted != before
    assert set(made.get_state_keys()) == {name for name, _ in other.named_parameters()}
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InvalidInput, match="no model"):
        made.load_full_weights_from_path(tmp_path)
    made.shutdown()
    with pytest.raises(RuntimeError, match="shut down; make another"):
        made.sample([[5]], PARAMS)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_its_sampler_gives_our_own_answers_and_says_so_once(sampler, model_id, monkeypatch):
    said = []
    local._say_once.cache_clear()
    monkeypatch.setattr(local.log, "info", lambda event, **facts: said.append(facts["reason"]), raising=False)
    engine_args = {"gpu_memory_utilization": 0.8, "max_model_len": 40, "enable_lora": True, "max_lora_rank": 32}
    made = [
        vLLMSampler(model_id=model_id, engine_args=engine_args, device_mesh=None, remote_group="sampler")
        for _ in range(2)
    ]
    made[0].set_template(ChatTemplate, model_id=model_id)

    trajectory = {"messages": MESSAGES}
    assert made[0].sample([trajectory], PARAMS) == sampler.sample([trajectory], PARAMS)
    assert len(said) == 1 and "twinkle-queue[vllm]" in said[0]
    with pytest.raises(InvalidInput, match="context holds 40"):
        made[0].sample([[5] * 41], PARAMS)


def test_keywords_that_samplers_do_not_know_are_named_and_change_nothing(model_id, monkeypatch):
    monkeypatch.setattr(local, "find_spec", lambda name: None)
    with capture_logs() as logs:
        made = TorchSampler(model_id, slot=8), vLLMSampler(model_id, engine_arg={"max_model_len": 40}, seed=3)
    said = [(line["call"], line["keyword"], line["next"]) for line in logs if line["event"] == "keyword.without_effect"]

    assert said == [
        ("TorchSampler", "slot", "did you mean slots?"),
        ("vLLMSampler", "engine_arg", "did you mean engine_args?"),
        ("vLLMSampler", "seed", "leave it out"),
    ]
    one, other = (sampler.sample([[5, 6]], PARAMS).sequences[0].tokens for sampler in made)
    assert one == other


def test_a_template_is_set_as_object_class_or_name_and_a_wrong_one_is_refused(sampler, model_id):
    given = ChatTemplate(model_id)
    sampler.set_template(given)
    assert sampler.template is given
    sampler.set_template(ChatTemplate, model_id=model_id, max_length=5)
    assert sampler.template.settings == {"max_length": 5}
    with pytest.raises(InvalidInput, match="did you mean Template"):
        sampler.set_template("Tempalte", model_id=model_id)
    with pytest.raises(InvalidInput, match="template_cls"):
        sampler.set_template(object())


def test_a_sampler_of_ones_own_needs_only_sample():
    class Parrot(Sampler):
        def sample(self, inputs, sampling_params=None, adapter_name="", adapter_path=None, **kwargs):
            return [self.encode_trajectory(row) for row in inputs]

    class Template:
        def encode(self, trajectory, add_generation_prompt=False):
            return {"input_ids": [1, 2, 3] if add_generation_prompt else [1]}

    parrot = Parrot()
    with pytest.raises(InvalidInput, match="set_template"):
        parrot.sample([{}])
    parrot.set_template(Template())
    assert parrot.sample([{}]) == [{"input_ids": [1, 2, 3]}]
    for call in (lambda: parrot.add_adapter_to_sampler("a", None), lambda: parrot.apply_patch(print)):
        with pytest.raises(NotImplementedError):
            call()


def test_a_patch_is_applied_to_the_model_that_samples(model_id):
    made = TorchSampler(model_id)
    seen = []
    made.apply_patch(seen.append)
    assert isinstance(seen[0], torch.nn.Module)
    with pytest.raises(InvalidInput, match="patch_cls"):
        made.apply_patch(3)


def test_repetitions_are_made_less_likely_as_transformers_does(sampler, model_id):
    prompt = sampler.template.encode({"messages": MESSAGES}, add_generation_prompt=True)["input_ids"]
    params = {"max_tokens": 24, "temperature": 0.0, "stop": [], "logprobs": 1}
    plain, penalised = (
        sampler.sample([{"input_ids": prompt}], {**params, "repetition_penalty": penalty})[0].sequences[0]
        for penalty in (1.0, 1.8)
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(model_id)
    given = torch.tensor(prompt)[None]
    expected = model.generate(
        given, do_sample=False, max_new_tokens=24, min_new_tokens=24, repetition_penalty=1.8, eos_token_id=None
    )
    assert penalised.tokens == expected[0, len(prompt) :].tolist() != plain.tokens
    # Logprobs are those of the distribution that is drawn from.
    logits = model(expected[:, :-1]).logits[0, len(prompt) - 1 :]
    first = logits[0].clone()
    seen = torch.tensor(sorted(set(prompt.tolist())))
    first[seen] = torch.where(first[seen] > 0, first[seen] / 1.8, first[seen] * 1.8)
    token, logprob = penalised.logprobs[0][0]
    assert logprob == pytest.approx(torch.log_softmax(first, -1)[token].item(), abs=1e-4)
