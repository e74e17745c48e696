"""Rollouts and answers of a model behind an address: a real client against a server that answers as it is told."""

import json
import threading

import pytest

from harness.scripted_server import Reply, ScriptedServer
from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.data_format import SamplingParams
from twinkle.sampler import TorchSampler
from twinkle.template import Template
from twinkle_agentic.protocol import OpenAI
from twinkle_agentic.rollout import APIMultiTurnRollout
from twinkle_agentic.sampler import RouterSampler
from twinkle_agentic.sampler.router import mean_entropy, mean_logprob
from twinkle_agentic.tools import Tool, ToolManager

PROMPT = {"messages": [{"role": "user", "content": "How warm is it?"}], "id": 7}
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}


class Weather(Tool):
    def __call__(self, tool_name, arguments):
        return f"{len(arguments['city'])} degrees"

    def tool_info(self):
        return {"type": "function", "function": {"name": "weather", "description": "", "parameters": {}}}


def completion(content=None, calls=None, finish="stop", number=1):
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    choices = [{"index": index, "message": message, "finish_reason": finish} for index in range(number)]
    return Reply(200, {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": choices})


def api_of(server, **settings):
    return OpenAI("m", api_key="k", base_url=f"{server.url}/v1", client_kwargs={"max_retries": 0, **settings})


def asked(seen):
    return json.loads(seen.content)


def test_a_conversation_goes_on_with_what_its_tools_say_until_no_tool_is_called():
    def reply(seen):
        is_told = asked(seen)["messages"][-1]["role"] == "tool"
        return completion("Warm.") if is_told else completion(calls=[CALL], finish="tool_calls")

    with ScriptedServer(reply) as server:
        rollout = APIMultiTurnRollout(api_of(server), ToolManager([Weather()]), {"max_tokens": 9, "seed": 1})
        (row,) = rollout([PROMPT])

    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert row["messages"][2] == {"role": "tool", "content": "4 degrees", "tool_call_id": "call_1_0", "name": "weather"}
    assert (row["turns"], row["stop_reason"], row["truncated"], row["id"]) == (2, "stop", False, 7)
    first, second = (asked(seen) for seen in server.seen)
    assert first["tools"] == [Weather().tool_info()] and (first["max_tokens"], first["seed"], first["n"]) == (9, 1, 1)
    assert second["messages"][1]["tool_calls"][0]["id"] == "call_1_0"
    assert server.seen[0].headers["authorization"] == "Bearer k"
    assert PROMPT == {"messages": [{"role": "user", "content": "How warm is it?"}], "id": 7}


def test_each_conversation_ends_for_its_own_reason_and_says_it():
    both = threading.Barrier(4)

    def reply(seen):
        name = asked(seen)["messages"][0]["content"]
        if len(asked(seen)["messages"]) == 1:
            both.wait(30)
        if name == "fails":
            return Reply(500, {"error": {"message": "out of order"}})
        return completion("x", calls=[CALL] if name in ("asks", "cut") else None, finish=name.replace("cut", "length"))

    rows = [{"messages": [{"role": "user", "content": name}]} for name in ("fails", "asks", "cut", "stop")]
    with ScriptedServer(reply) as server:
        ended = APIMultiTurnRollout(api_of(server), ToolManager([Weather()]), max_turns=2)(rows)

    assert [row["stop_reason"] for row in ended] == ["api_error", "max_turns", "length", "stop"]
    assert [row["truncated"] for row in ended] == [True, True, True, False]
    assert [row["turns"] for row in ended] == [0, 2, 1, 1]
    assert "out of order" in ended[0]["error"] and "error" not in ended[3]


def test_what_openai_does_not_know_goes_as_other_servers_name_it_and_several_samples_come_as_a_list():
    with ScriptedServer(lambda seen: completion("x", number=2)) as server:
        api = api_of(server)
        params = SamplingParams(num_samples=2, top_k=5, repetition_penalty=1.1, stop=[3], logprobs=2)
        answers = api(PROMPT, params, extra_body={"top_k": 6}, temperature=0.5)
        api({"messages": [{"role": "assistant", "content": "a", "reasoning_content": "hm"}]}, SamplingParams())
    assert [answer["content"] for answer in answers] == ["x", "x"]
    body = asked(server.seen[0])
    assert (body["top_k"], body["repetition_penalty"], body["stop_token_ids"]) == (6, 1.1, [3])
    assert (body["logprobs"], body["top_logprobs"], body["temperature"]) == (True, 2, 0.5)
    assert asked(server.seen[1])["messages"] == [{"role": "assistant", "content": "a"}]
    assert not {"top_k", "repetition_penalty", "stop_token_ids"} & asked(server.seen[1]).keys()


def test_wrong_settings_are_refused_by_their_name(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="api_key"):
        OpenAI("m")
    api = OpenAI("m", api_key="k")
    for field, call in {
        "max_turns": lambda: APIMultiTurnRollout(api, max_turns=0),
        "concurrency": lambda: APIMultiTurnRollout(api, concurrency=0),
        "num_samples": lambda: APIMultiTurnRollout(api, sampling_params={"num_samples": 2}),
        "trajectories": lambda: APIMultiTurnRollout(api)(PROMPT),
        "method": lambda: RouterSampler(None, "http://x", method="luck"),
        "top_k_logprobs": lambda: RouterSampler(None, "http://x", top_k_logprobs=1),
        "fallback_endpoint": lambda: RouterSampler(None),
    }.items():
        with pytest.raises(InvalidInput) as refused:
            call()
        assert refused.value.field == field


@pytest.fixture(scope="module")
def sampler(model_id):
    sampler = TorchSampler(model_id)
    sampler.set_template(Template, model_id=model_id)
    return sampler


def test_answers_that_are_not_sure_come_from_the_stronger_model(sampler):
    params = {"max_tokens": 4, "seed": 3, "num_samples": 2}
    with ScriptedServer(lambda seen: completion("Surely.")) as server:
        (asked_for,) = RouterSampler(sampler, f"{server.url}/v1", threshold=0.0).sample([PROMPT], params)
        (own,) = RouterSampler(sampler, server.url, threshold=99.0).sample([PROMPT], params)
        (by_logp,) = RouterSampler(sampler, server.url, method="logp", threshold=0.0).sample(PROMPT, params)
    plain = sampler.sample([PROMPT], params)[0]
    for sequence in (*asked_for.sequences, *by_logp.sequences):
        assert (sequence.decoded, sequence.tokens, sequence.logprobs) == ("Surely.", [], None)
        assert sequence.new_input_feature["messages"][-1] == {"role": "assistant", "content": "Surely."}
    assert [sequence.tokens for sequence in own.sequences] == [sequence.tokens for sequence in plain.sequences]
    assert len(server.seen) == 4


def test_without_an_answer_from_elsewhere_the_uncertain_one_stays(sampler):
    row = sampler.template.encode(PROMPT, add_generation_prompt=True)
    with ScriptedServer(lambda seen: Reply(400, {"error": {"message": "no"}})) as server:
        router = RouterSampler(sampler, api=api_of(server), threshold=0.0)
        (response,) = router.sample([PROMPT], {"max_tokens": 4, "seed": 3})
        assert response.sequences[0].tokens and len(server.seen) == 1
        router.sample([row], {"max_tokens": 4})
        assert len(server.seen) == 1


def test_how_sure_a_model_is_can_be_worked_out_by_hand():
    assert mean_entropy([[(1, -1.0), (2, -1.0)], [(1, 0.0), (2, -99.0)]]) == pytest.approx(0.6931472 / 2)
    assert mean_logprob([[(1, -1.0), (2, -3.0)], [(1, -1.0), (2, -3.0)]], [2, 9]) == -3.0
