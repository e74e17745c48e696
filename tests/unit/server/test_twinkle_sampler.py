"""The sampler of the Twinkle dialect: rows and conversations in, rows ready to be trained on out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer

from harness.byte_tokenizer import write_tokenizer
from harness.calls import retrieve
from harness.fake_worker import BASE_MODEL, CAPABILITIES, FakeWorker
from twinkle.core.operation import Failure, FailureCategory, OperationKind
from twinkle.data_format.continuation import Texts, continued_row
from twinkle.data_format.deepseek import DeepseekWriter
from twinkle.data_format.messages import read_messages
from twinkle.server.twinkle.prompts import PromptTemplate
from twinkle.storage.sampling.templates import SamplerTemplates, TemplatePlace
from twinkle.wire.patches import WirePatches
from twinkle.wire.sample_result import WireSequence
from twinkle.wire.sampling import SampleRequest, parse_sample

if TYPE_CHECKING:
    from conftest import Api, ServeApi

SAMPLER = f"/sampler/{BASE_MODEL}/twinkle"
MODEL = f"/model/{BASE_MODEL}/twinkle"
ROW = {"input_ids": [5, 6, 7], "user_data": [["ground_truth", "4"]]}
USER = [{"role": "user", "content": "hi"}]


@dataclass
class Stage:
    """A served app whose mesh has a tokenizer, and a client in a session of its own."""

    api: Api
    worker: FakeWorker
    tokenizer: Tokenizer
    http: httpx.Client
    session: str = field(init=False)

    def __post_init__(self) -> None:
        self.session = self.http.post("/twinkle/create_session", json={"metadata": None}).json()["session_id"]
        self.http.headers["X-Twinkle-Session-Id"] = self.session

    def call(self, method: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return self.http.post(f"{SAMPLER}/{method}", json=body, headers=headers)

    def sample(self, *inputs: Any, headers: dict[str, str] | None = None, **more: Any) -> list[dict[str, Any]]:
        """The samples of some inputs."""
        answer = self.call("sample", headers, inputs=list(inputs), **more)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["samples"])

    def last(self) -> SampleRequest:
        return parse_sample(self.worker.payload(self.worker.executed[-1]))

    def prompt(self) -> str:
        return str(self.tokenizer.decode(self.last().read_prompt()[0], skip_special_tokens=False))

    def add_adapter(self, name: str = "a") -> str:
        config = json.dumps({"r": 4, "target_modules": "all-linear"})
        added = self.http.post(f"{MODEL}/add_adapter_to_model", json={"adapter_name": name, "config": config})
        assert added.status_code == 200, added.text
        return str(added.json()["training_run_id"])

    def step(self, name: str = "a") -> None:
        assert self.http.post(f"{MODEL}/zero_grad", json={"adapter_name": name}).status_code == 200

    def kinds_of(self, run: str) -> list[OperationKind]:
        return [claim.kind for claim in self.worker.executed_of(run)]


@pytest.fixture(scope="module")
def served(
    serve_api: ServeApi, make_database_url: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Api, FakeWorker, Path]]:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    with serve_api(make_database_url("sqlite"), max_outstanding_samples=100) as api:
        worker = FakeWorker(api.settings, capabilities=CAPABILITIES.model_copy(update={"tokenizer_path": str(folder)}))
        worker.start()
        yield api, worker, folder
        worker.stop()


@pytest.fixture
def stage(served: tuple[Api, FakeWorker, Path]) -> Iterator[Stage]:
    api, worker, folder = served
    with api.http(api.new_key()) as http:
        yield Stage(api, worker, Tokenizer.from_file(str(folder / "tokenizer.json")), http)


def test_a_row_is_continued_and_comes_back_ready_to_be_trained_on(stage: Stage) -> None:
    params = {
        "max_tokens": 3,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "repetition_penalty": 1.3,
        "seed": 3,
        "num_samples": 2,
    }
    (one,) = stage.sample(ROW, sampling_params=params, num_samples=1)
    sent = stage.last()

    assert len(one["sequences"]) == 2
    sequence = one["sequences"][0]
    assert (sequence["stop_reason"], sequence["tokens"], sequence["decoded"]) == ("length", [0, 1, 2], '!"#')
    assert sequence["logprobs"] == [[[0, -1.0]], [[1, -1.0]], [[2, -1.0]]]
    assert sequence["new_input_feature"] == {
        "input_ids": [5, 6, 7, 0, 1, 2],
        "labels": [-100, -100, 0, 1, 2, -100],
        "attention_mask": [1] * 6,
        "position_ids": list(range(6)),
        "length": 6,
        "user_data": [["ground_truth", "4"]],
    }
    assert one["prompt_logprobs"] is None and one["topk_prompt_logprobs"] is None
    drawn = sent.sampling_params
    assert (drawn.temperature, drawn.top_k, drawn.top_p, drawn.seed, drawn.stop) == (0.5, 7, 0.9, 3, None)
    assert drawn.repetition_penalty == 1.3


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        {"input_ids": [5], "completion_mask": [0], "messages": USER},
        {"input_ids": [5, 6], "position_ids": [3, 4], "mm_token_type_ids": [0, 0]},
        {"input_ids": [5, 6], "position_ids": [[0, 1], [0, 0], [0, 5]], "labels": [6, -100]},
    ],
)
def test_the_row_that_comes_back_is_the_one_that_a_script_s_own_sampler_gives(
    stage: Stage, row: dict[str, Any]
) -> None:
    (one,) = stage.sample(row, sampling_params={"max_tokens": 2})
    read = Texts(
        decode=lambda tokens: stage.tokenizer.decode(list(tokens), skip_special_tokens=False),
        read=lambda tokens: stage.tokenizer.decode(list(tokens), skip_special_tokens=True),
        parse_tool_calls=lambda _: [],
    )
    arrays = {name: np.array(value) if name == "input_ids" else value for name, value in row.items()}

    assert one["sequences"][0]["new_input_feature"] == json.loads(json.dumps(continued_row(arrays, [0, 1], texts=read)))


def test_a_conversation_goes_through_the_models_template_and_gets_the_assistants_turn(stage: Stage) -> None:
    trajectory = {"messages": USER, "user_data": [["solution", "x"]]}
    (one,) = stage.sample(trajectory, sampling_params={"max_tokens": 2})
    prompt = "<s>user:hi<e><s>assistant:"
    tokens = stage.tokenizer.encode(prompt, add_special_tokens=False).ids

    feature = one["sequences"][0]["new_input_feature"]
    assert stage.prompt() == prompt
    assert feature["input_ids"] == [*tokens, 0, 1]
    assert feature["messages"] == [*USER, {"role": "assistant", "content": '!"'}]
    assert feature["user_data"] == [["solution", "x"]]


def test_calls_of_tools_in_what_was_sampled_are_read(stage: Stage) -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    tokens = np.array(stage.tokenizer.encode(text).ids, dtype=np.int32)
    stage.worker.sequences = [WireSequence(tokens, np.full(len(tokens), -0.5, dtype=np.float32), "stop")]
    try:
        (one,) = stage.sample({"messages": USER}, sampling_params={"max_tokens": 100})
    finally:
        stage.worker.sequences = None

    (call,) = one["sequences"][0]["new_input_feature"]["messages"][-1]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert one["sequences"][0]["stop_reason"] == "stop"


def test_templates_are_kept_with_the_session_and_not_in_a_process(
    stage: Stage, served: tuple[Api, FakeWorker, Path]
) -> None:
    settings = {"default_system": "be brief", "max_length": 100, "enable_thinking": False, "color": "red"}
    answer = stage.call("set_template", template_cls="Qwen3_5Template", model_id=f"ms://{BASE_MODEL}", **settings)
    stage.sample({"messages": USER}, sampling_params={"max_tokens": 1})

    assert answer.json() == {"status": "ok"}
    assert stage.prompt() == "<s>system:be brief<e><s>user:hi<e><s>assistant:"
    place = TemplatePlace(session=stage.session, base_model=BASE_MODEL, adapter_name="")
    kept = SamplerTemplates(served[0].stores.database).find(place)
    assert kept is not None
    expected = PromptTemplate(
        default_system="be brief", max_length=100, enable_thinking=False, variables={"color": "red"}
    )
    assert PromptTemplate.of(kept) == expected


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"template_cls": "os.system"}, "is not offered by the server's sampler"),
        ({"template_cls": "DeepseekV4Template", "reasoning_effort": "low"}, "reasoning_effort"),
        ({"template_cls": "DeepseekV4Template", "color": "red"}, "is no setting of DeepseekV4Template"),
        ({"template_cls": "Template", "model_id": "other/model"}, "take its own template"),
        ({"template_cls": "Template", "max_length": 0}, "max_length"),
        ({"template_cls": "Template", "truncation_strategy": "split"}, "truncation_strategy"),
        ({"template_cls": "Template", "default_system": 3}, "default_system"),
    ],
)
def test_a_template_that_cannot_be_is_refused(stage: Stage, body: dict[str, Any], words: str) -> None:
    refused = stage.call("set_template", **body)

    assert refused.status_code == 400
    assert words in refused.json()["detail"]


def test_a_conversation_is_written_in_deepseeks_own_protocol_where_its_template_is_set(stage: Stage) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    said = {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
    row = {"messages": [*USER, said, {"role": "tool", "content": "3"}], "tools": [tool]}
    stage.call("set_template", template_cls="DeepseekV4Template", reasoning_effort="max", default_system="be brief")
    (one,) = stage.sample(row, sampling_params={"max_tokens": 1})
    pictured = {"messages": [{"role": "user", "content": [{"type": "image", "image": "data:,"}]}]}
    refused = stage.call("sample", inputs=[pictured])
    stage.call("set_template", template_cls="Template")
    stage.sample({"messages": USER}, sampling_params={"max_tokens": 1})

    ours = DeepseekWriter(is_thinking=True, reasoning_effort="max")
    turns = read_messages({"messages": [{"role": "system", "content": "be brief"}, *row["messages"]]})
    text = ours.render(turns, [tool], add_generation_prompt=True)
    assert one["prompt_token_ids"] == stage.tokenizer.encode(text, add_special_tokens=False).ids
    assert refused.status_code == 400 and "takes text alone" in refused.json()["detail"]
    assert stage.prompt() == "<s>user:hi<e><s>assistant:"


def test_a_long_conversation_is_cut_or_refused_as_the_template_says(stage: Stage) -> None:
    long = {"messages": [{"role": "user", "content": "a" * 50}]}
    stage.call("set_template", template_cls="Template", max_length=10)
    refused = stage.call("sample", inputs=[long])
    stage.call("set_template", template_cls="Template", max_length=10, truncation_strategy="left")
    (one,) = stage.sample(long, sampling_params={"max_tokens": 1})

    assert refused.status_code == 400 and "inputs[0].messages" in refused.json()["detail"]
    assert len(one["prompt_token_ids"]) == 10
    assert stage.prompt().endswith("assistant:")


def test_the_number_of_samples_beside_the_params_counts_where_they_do_not_say_it(stage: Stage) -> None:
    (beside,) = stage.sample(ROW, sampling_params={"max_tokens": 1}, num_samples=3)
    (within,) = stage.sample(ROW, sampling_params={"max_tokens": 1, "num_samples": 2}, num_samples=3)
    (neither,) = stage.sample(ROW, sampling_params=None)

    assert [len(one["sequences"]) for one in (beside, within, neither)] == [3, 2, 1]


def test_more_than_one_logprob_is_of_the_likeliest_and_a_prompt_can_be_scored_alone(stage: Stage) -> None:
    (likeliest,) = stage.sample(ROW, sampling_params={"max_tokens": 1, "logprobs": 2})
    (scored,) = stage.sample(ROW, sampling_params={"max_tokens": 0})

    assert likeliest["sequences"][0]["logprobs"] == [[[0, -2.0], [1, -2.0]]]
    assert scored["prompt_logprobs"] == [None, -1.5, -1.5]
    (sequence,) = scored["sequences"]
    assert (sequence["tokens"], sequence["logprobs"], sequence["stop_reason"]) == ([], [], "length")
    assert sequence["new_input_feature"]["input_ids"] == ROW["input_ids"]


PICTURED = {
    "input_ids": [5, 300, 300, 6],
    "pixel_values": [[float(i), 0.5] for i in range(8)],
    "image_grid_thw": [[1, 4, 2]],
    "mm_token_type_ids": [0, 1, 1, 0],
}


def test_a_row_whose_pictures_are_patches_is_sampled_with_them(stage: Stage) -> None:
    (one,) = stage.sample(PICTURED, sampling_params={"max_tokens": 1})
    tokens, (picture,) = stage.last().read_prompt(CAPABILITIES.pictures)

    assert isinstance(picture, WirePatches)
    assert (tokens, picture.start, picture.num_tokens, picture.grid_thw) == ([5, 300, 300, 6], 1, 2, (1, 4, 2))
    assert picture.pixel_values.tolist() == PICTURED["pixel_values"]
    assert one["sequences"][0]["new_input_feature"]["mm_token_type_ids"] == [0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"image_grid_thw": None}, "inputs[0].image_grid_thw: is missing"),
        ({"pixel_values": None}, "inputs[0].pixel_values: is missing"),
        ({"pixel_values": [[1.0]]}, "inputs[0].pixel_values: has shape"),
        ({"pixel_values": [["a"]]}, "inputs[0].pixel_values: or image_grid_thw is no array"),
        ({"image_grid_thw": [[1, 3, 2]]}, "multiples of 2"),
        ({"image_grid_thw": [[1, 64, 64]]}, "at most 4096"),
        ({"input_ids": [5, 300, 6]}, "inputs[0].input_ids: holds 1 tokens 300"),
        ({"mm_token_type_ids": [0, 1, 0, 0]}, "inputs[0].mm_token_type_ids"),
    ],
)
def test_patches_that_are_not_of_their_row_are_refused_by_name(
    stage: Stage, changed: dict[str, Any], words: str
) -> None:
    refused = stage.call("sample", inputs=[{**PICTURED, **changed}])

    assert refused.status_code == 400
    assert words in refused.json()["detail"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"inputs": [ROW], "sampling_params": {"repetition_penalty": 0}}, "repetition_penalty"),
        ({"inputs": [ROW], "sampling_params": {"temprature": 1}}, "did you mean temperature"),
        ({"inputs": [ROW], "sampling_params": {"temperature": "hot"}}, "temperature: is hot; send a number"),
        ({"inputs": [ROW], "sampling_params": {"stop": [1, "a"]}}, "stop"),
        ({"inputs": []}, "inputs"),
        ({"inputs": [{}]}, "inputs[0].input_ids: is missing"),
        ({"inputs": [ROW, {"input_ids": [1000]}]}, "inputs[1].input_ids"),
        ({"inputs": [{"input_ids": [0] * 3000}]}, "inputs[0].input_ids"),
        ({"inputs": [{"input_ids": [[1], 2]}]}, "inputs[0].input_ids"),
        ({"inputs": [{"input_ids": [1], "position_ids": [[1], 2]}]}, "inputs[0].position_ids"),
        ({"inputs": [{"input_ids": [1, 2], "member_lengths": [1, 1]}]}, "inputs[0].member_lengths: are of 2"),
        ({"inputs": [{"input_ids": [1, 2], "position_ids": [0, 0]}]}, "inputs[0].position_ids: begin again"),
        ({"inputs": [{"input_ids": [1], "x": 2**70}]}, "inputs[0].row"),
        ({"inputs": [{"messages": [{"role": "user", "content": [{"type": "smell"}]}], "images": ["a"]}]}, "messages"),
        ({"inputs": [{"messages": [{"role": "king", "content": ""}]}]}, "inputs[0].messages[0].role"),
        ({"inputs": [ROW], "adapter_uri": "/etc/passwd"}, "adapter_uri: folders of the server's disk"),
        ({"inputs": [ROW], "adapter_uri": "mine/weights"}, "adapter_uri: must begin with tinker://"),
        ({"inputs": [ROW], "adapter_uri": "./outputs/x"}, "adapter_uri"),
    ],
)
def test_what_cannot_be_sampled_is_refused_by_its_name(stage: Stage, body: dict[str, Any], words: str) -> None:
    refused = stage.call("sample", **body)

    assert refused.status_code == 400
    assert words in refused.json()["detail"]


def test_a_model_that_is_not_served_is_not_found(stage: Stage) -> None:
    answers = [
        stage.http.post("/sampler/no/such/twinkle/create", json={}),
        stage.http.post("/sampler/no/such/twinkle/sample", json={"inputs": [ROW]}),
        stage.http.get("/sampler/no/such/healthz"),
    ]

    assert {answer.status_code for answer in answers} == {404}
    assert all(BASE_MODEL in answer.json()["detail"] for answer in answers)
    assert stage.http.get(f"/sampler/ms://{BASE_MODEL}/healthz").json() == {"status": "ok"}
    assert stage.call("create").json() == {"status": "ok"}


def test_a_patch_is_refused_and_an_adapter_s_config_taken_in_either_form(stage: Stage) -> None:
    patch = stage.call("apply_patch", patch_cls="NoopPatch", adapter_name=None)
    added = [stage.call("add_adapter_to_sampler", adapter_name="a", config=config) for config in ('{"r": 4}', {"r": 4})]

    assert patch.status_code == 400 and "NoopPatch" in patch.json()["detail"]
    assert [one.json() for one in added] == [{"status": "ok", "adapter_name": f"{stage.session}-a"}] * 2


def test_an_adapter_is_sampled_with_the_weights_that_it_has_when_the_call_comes(stage: Stage) -> None:
    run = stage.add_adapter()
    stage.step()
    stage.sample(ROW, adapter_name="a", sampling_params={"max_tokens": 1})
    stage.sample(ROW, adapter_name=f"{stage.session}-a", sampling_params={"max_tokens": 1})
    lanes = {claim.lane for claim in stage.worker.executed[-2:]}
    stage.step()
    stage.sample(ROW, adapter_name=run, sampling_params={"max_tokens": 1})
    last = stage.worker.executed[-1].lane

    assert len(lanes) == 1 and last not in lanes
    save = OperationKind.SAVE_WEIGHTS_FOR_SAMPLER
    assert stage.kinds_of(run) == [OperationKind.CREATE_MODEL, OperationKind.CALL, save, OperationKind.CALL, save]
    found = stage.api.stores.sampling_sessions.find(last)
    assert found.weights is not None and (found.weights.adapter, found.weights.seq) == (run, 4)


def test_an_adapter_that_nobody_asked_for_in_days_is_sampled_all_the_same(stage: Stage) -> None:
    run = stage.add_adapter()
    stage.sample(ROW, adapter_name="a", sampling_params={"max_tokens": 1})
    stage.api.stores.upkeep.expire_results(older_than_s=-1.0)

    stage.sample(ROW, adapter_name="a", sampling_params={"max_tokens": 1})

    assert stage.kinds_of(run).count(OperationKind.SAVE_WEIGHTS_FOR_SAMPLER) == 2


def test_a_save_of_the_weights_that_failed_is_not_what_every_later_call_is_told(stage: Stage) -> None:
    stage.add_adapter()
    failure = Failure(message="the store was away", category=FailureCategory.SERVER, code="storage")
    stage.worker.failing = lambda claim: failure if claim.kind is OperationKind.SAVE_WEIGHTS_FOR_SAMPLER else None
    body = {"inputs": [ROW], "adapter_name": "a", "sampling_params": {"max_tokens": 1}}
    try:
        told = stage.call("sample", **body)
    finally:
        stage.worker.failing = None

    assert (told.status_code, told.json()["detail"]) == (500, "the store was away")
    stage.sample(ROW, adapter_name="a", sampling_params={"max_tokens": 1})


def test_calls_that_come_together_share_one_save_of_the_weights(stage: Stage) -> None:
    run = stage.add_adapter()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: stage.sample(ROW, adapter_name="a", sampling_params={"max_tokens": 1}), range(8)))

    assert stage.kinds_of(run).count(OperationKind.SAVE_WEIGHTS_FOR_SAMPLER) == 1


@pytest.mark.parametrize("adapter_name", ["", "a"])
def test_a_call_that_is_sent_again_under_its_key_gets_the_same_samples(stage: Stage, adapter_name: str) -> None:
    run = stage.add_adapter()
    body = {"adapter_name": adapter_name, "sampling_params": {"max_tokens": 1}}
    headers = {"x-idempotency-key": "once"}
    first = stage.sample(ROW, {"input_ids": [1]}, headers=headers, **body)
    num_executed = len(stage.worker.executed)
    again = stage.sample(ROW, {"input_ids": [1]}, headers=headers, **body)

    assert again == first
    assert len(stage.worker.executed) == num_executed
    assert len(stage.kinds_of(run)) <= 2


def test_samples_can_be_asked_for_later_and_are_what_the_call_would_have_answered(stage: Stage) -> None:
    body = {"inputs": [{"messages": USER, "user_data": [["id", 7]]}, [5, 6]], "sampling_params": {"max_tokens": 2}}
    with stage.worker.paused():
        accepted = stage.call("sample", {"Prefer": "respond-async"}, **body)
        place = f"/twinkle/futures/{accepted.json()['request_id']}"
        pending = stage.http.get(place)
        short = stage.call("sample", {"Prefer": "respond-async, wait=1"}, **body)
    with stage.api.http(stage.api.new_key()) as stranger:
        foreign = stranger.get(place)
    later = stage.http.get(place, params={"wait_s": 30})

    assert (accepted.status_code, pending.status_code, short.status_code) == (202, 202, 202)
    assert later.status_code == 200
    assert later.json() == stage.call("sample", **body).json()
    assert stage.call("sample", {"Prefer": "respond-async, wait=30"}, **body).json() == later.json()
    assert foreign.status_code == 404


def test_a_ticket_for_samples_of_an_adapter_is_not_waited_for_beyond_the_wait(stage: Stage) -> None:
    run = stage.add_adapter()
    stage.step()
    body = {"inputs": [ROW], "adapter_name": "a", "sampling_params": {"max_tokens": 1}}
    headers = {"Prefer": "respond-async, wait=1", "x-idempotency-key": "later"}
    with stage.worker.paused():
        told = stage.call("sample", headers, **body)
    later = stage.call("sample", {**headers, "Prefer": "respond-async, wait=30"}, **body)

    assert told.status_code == 503 and f"the weights of {run} are not there yet" in told.json()["detail"]
    assert later.status_code == 200 and len(later.json()["samples"]) == 1
    assert stage.kinds_of(run).count(OperationKind.SAVE_WEIGHTS_FOR_SAMPLER) == 1


def test_prompts_that_are_only_scored_can_be_asked_for_later_too(stage: Stage) -> None:
    body = {"inputs": [ROW], "sampling_params": {"max_tokens": 0}}
    accepted = stage.call("sample", {"Prefer": "respond-async"}, **body).json()

    later = stage.http.get(f"/twinkle/futures/{accepted['request_id']}", params={"wait_s": 30})
    assert later.json() == stage.call("sample", **body).json()


def test_a_sample_of_another_dialect_is_no_call_of_this_one(stage: Stage) -> None:
    stage.sample(ROW)
    claim = stage.worker.executed[-1]

    assert stage.http.get(f"/twinkle/futures/{claim.request_id}").status_code == 404


def test_an_adapter_that_was_never_trained_here_is_not_found(stage: Stage) -> None:
    unknown = stage.call("sample", inputs=[ROW], adapter_name="b")

    assert unknown.status_code == 404
    assert "add_adapter_to_model" in unknown.json()["detail"]


def test_checkpoints_of_either_scheme_are_sampled_from_and_nobody_elses(stage: Stage) -> None:
    run = stage.add_adapter()
    saved = stage.http.post(f"{MODEL}/save", json={"adapter_name": "a", "name": "one"}).json()["twinkle_path"]
    for path in (saved, saved.replace("twinkle://", "tinker://")):
        stage.sample(ROW, adapter_uri=path, adapter_name="a", sampling_params={"max_tokens": 1})
        found = stage.api.stores.sampling_sessions.find(stage.worker.executed[-1].lane)
        assert found.checkpoint == saved.replace("twinkle://", "tinker://")
    with stage.api.http(stage.api.new_key()) as stranger:
        foreign = stranger.post(f"{SAMPLER}/sample", json={"inputs": [ROW], "adapter_uri": saved})
        unknown = stranger.post(f"{SAMPLER}/sample", json={"inputs": [ROW], "adapter_uri": f"{saved}x"})
        named = stranger.post(
            f"{SAMPLER}/sample", json={"inputs": [ROW], "adapter_name": run}, headers={"x-request-id": "r"}
        )

    assert (foreign.status_code, unknown.status_code, named.status_code) == (404, 404, 404)
    assert foreign.text.replace(saved, "P") == unknown.text.replace(f"{saved}x", "P") or "x'" in unknown.text


def test_a_run_of_the_other_dialect_is_sampled_as_it_was_saved_last(stage: Stage) -> None:
    http = stage.http
    body = {"session_id": stage.session, "model_seq_id": 7, "base_model": BASE_MODEL, "lora_config": {"rank": 8}}
    ticket = http.post("/create_model", json=body).json()
    retrieve(http, ticket["request_id"])
    run = ticket["model_id"]
    refused = stage.call("sample", inputs=[ROW], adapter_name=run)
    save = {"model_id": run, "path": "one", "seq_id": 1}
    retrieve(http, http.post("/save_weights_for_sampler", json=save).json()["request_id"])
    stage.sample(ROW, adapter_name=run, sampling_params={"max_tokens": 1})

    assert refused.status_code == 404 and "save_weights_for_sampler" in refused.json()["detail"]
    assert stage.api.stores.sampling_sessions.find(stage.worker.executed[-1].lane).checkpoint is not None


def test_a_run_in_the_place_of_a_path_is_its_newest_checkpoint_and_the_answer_says_which(stage: Stage) -> None:
    run = stage.add_adapter()
    first = stage.http.post(f"{MODEL}/save", json={"adapter_name": "a", "name": "one"}).json()["twinkle_path"]
    body = {"inputs": [ROW], "adapter_uri": run, "sampling_params": {"max_tokens": 1}}
    before = stage.call("sample", {"x-idempotency-key": "k"}, **body).json()
    second = stage.http.post(f"{MODEL}/save", json={"adapter_name": "a", "name": "two"}).json()["twinkle_path"]

    assert before["checkpoint"] == first.replace("tinker://", "twinkle://")
    assert stage.call("sample", **body).json()["checkpoint"] == second.replace("tinker://", "twinkle://")
    assert stage.call("sample", {"x-idempotency-key": "k"}, **body).json() == before
    assert stage.call("sample", inputs=[ROW]).json()["checkpoint"] is None


def test_without_a_session_the_base_model_is_sampled_all_the_same(stage: Stage) -> None:
    del stage.http.headers["X-Twinkle-Session-Id"]
    refused = stage.call("sample", inputs=[ROW], adapter_name="a")

    assert len(stage.sample([5, 6], sampling_params={"max_tokens": 1})) == 1
    assert refused.status_code == 400 and "X-Twinkle-Session-Id" in refused.json()["detail"]


def test_a_stream_is_lines_of_json_that_join_to_the_text(stage: Stage) -> None:
    with stage.http.stream(
        "POST", f"{SAMPLER}/sample_stream", json={"inputs": {"messages": USER}, "sampling_params": {"max_tokens": 40}}
    ) as answer:
        lines = [json.loads(line) for line in answer.iter_lines()]

    assert answer.headers["content-type"] == "application/x-ndjson"
    (whole,) = stage.sample({"messages": USER}, sampling_params={"max_tokens": 40})
    assert "".join(line["delta"] for line in lines) == whole["sequences"][0]["decoded"]
    assert [line["finish_reason"] for line in lines][-1] == "length"
    assert all(line["finish_reason"] is None for line in lines[:-1])


def test_a_stream_has_one_sample_of_one_input(stage: Stage) -> None:
    several = stage.call("sample_stream", inputs=[ROW, ROW])
    twice = stage.call("sample_stream", inputs=[ROW], num_samples=2)

    assert (several.status_code, twice.status_code) == (400, 400)


def test_a_failed_sample_is_told_in_words(stage: Stage) -> None:
    refused = stage.call("sample", inputs=[ROW], sampling_params={"num_samples": 5000})

    assert refused.status_code == 400
    assert "num_samples" in refused.json()["detail"]


def test_a_conversation_of_upstreams_gateway_names_its_checkpoint_beside_the_base_model(stage: Stage) -> None:
    stage.add_adapter()
    saved = stage.http.post(f"{MODEL}/save", json={"adapter_name": "a", "name": "one"}).json()["twinkle_path"]
    body = {"model": BASE_MODEL, "messages": USER, "max_tokens": 1}
    answer = stage.http.post("/chat/completions", json={**body, "adapter_uri": saved})
    drawn_from = stage.api.stores.sampling_sessions.find(stage.worker.executed[-1].lane).checkpoint
    refused = [
        stage.http.post("/chat/completions", json={**body, "adapter_uri": "/etc/passwd"}),
        stage.http.post("/chat/completions", json={**body, "model": "other", "adapter_uri": saved}),
    ]

    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"] == "!"
    assert drawn_from == saved.replace("twinkle://", "tinker://")
    assert [one.status_code for one in refused] == [400, 400]
