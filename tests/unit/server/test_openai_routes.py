"""The OpenAI-compatible routes, through the official client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from harness.byte_tokenizer import write_tokenizer
from harness.calls import retrieve
from harness.fake_worker import BASE_MODEL, CAPABILITIES, FakeWorker
from harness.polling import wait_until
from twinkle.wire.sampling import parse_sample

if TYPE_CHECKING:
    from conftest import Api, ServeApi

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def chat_api(
    serve_api: ServeApi, make_database_url: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Api, FakeWorker]]:
    """An app whose mesh has a tokenizer the API can read."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    with serve_api(make_database_url("sqlite"), max_outstanding_samples=100) as served:
        worker = FakeWorker(
            served.settings, capabilities=CAPABILITIES.model_copy(update={"tokenizer_path": str(folder)})
        )
        worker.start()
        yield served, worker
        worker.stop()


@pytest.fixture
def chat_key(chat_api: tuple[Api, FakeWorker]) -> str:
    return chat_api[0].new_key()


def client_of(api: Api, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{api.url}/v1", api_key=key, max_retries=0, timeout=30)


@pytest.fixture
def client(chat_api: tuple[Api, FakeWorker], chat_key: str) -> Iterator[openai.OpenAI]:
    with client_of(chat_api[0], chat_key) as made:
        yield made


def last_sample(chat_api: tuple[Api, FakeWorker]) -> object:
    worker = chat_api[1]
    return parse_sample(worker.payload(worker.executed[-1]))


def save_for_sampler(api: Api, key: str) -> str:
    """A sampler checkpoint of the key's tenant."""
    with api.http(key) as http:
        session_id = http.post("/create_session", json={"type": "create_session"}).json()["session_id"]
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 8}}
        ticket = http.post("/create_model", json=body).json()
        retrieve(http, ticket["request_id"])
        save = {"model_id": ticket["model_id"], "path": "one", "seq_id": 1}
        saved = retrieve(http, http.post("/save_weights_for_sampler", json=save).json()["request_id"])
        return str(saved.json()["path"])


def test_a_text_is_continued_with_counts_and_scores(client: openai.OpenAI) -> None:
    made = client.completions.create(model=BASE_MODEL, prompt="abc", max_tokens=4, logprobs=2, n=2, seed=7)

    assert [choice.text for choice in made.choices] == ['!"#$', '!"#$']
    assert [choice.index for choice in made.choices] == [0, 1]
    assert made.choices[0].finish_reason == "length"
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.total_tokens) == (3, 8, 11)
    scores = made.choices[0].logprobs
    assert scores is not None
    assert (scores.tokens, scores.text_offset) == (["!", '"', "#", "$"], [0, 1, 2, 3])
    assert scores.token_logprobs == [-1.0] * 4
    assert scores.top_logprobs is not None and scores.top_logprobs[2] == {"!": -2.0, '"': -2.0, "#": -1.0}


def test_several_prompts_give_choices_in_their_order(client: openai.OpenAI) -> None:
    made = client.completions.create(model=BASE_MODEL, prompt=[[1, 2], [3]], max_tokens=2, n=2)

    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    assert made.usage is not None and made.usage.prompt_tokens == 3


def test_a_conversation_goes_through_the_models_template(
    chat_api: tuple[Api, FakeWorker], client: openai.OpenAI
) -> None:
    messages = [{"role": "developer", "content": [{"type": "text", "text": "be"}]}, *USER]

    made = client.chat.completions.create(
        model=BASE_MODEL,
        messages=messages,  # type: ignore[arg-type]
        max_completion_tokens=3,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        stop=["xyz"],
        logprobs=True,
        top_logprobs=1,
    )

    choice = made.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", '!"#', "length")
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [scored.token for scored in choice.logprobs.content] == ["!", '"', "#"]
    assert choice.logprobs.content[0].top_logprobs[0].logprob == -2.0
    sample = last_sample(chat_api)
    tokenizer = Tokenizer.from_file(f"{chat_api[1]._capabilities.tokenizer_path}/tokenizer.json")
    prompt = tokenizer.decode(sample.read_prompt()[0], skip_special_tokens=False)
    assert prompt == "<s>system:be<e><s>user:hi<e><s>assistant:"
    params = sample.sampling_params
    assert (params.temperature, params.top_p, params.seed, params.stop) == (0.5, 0.9, 3, ["xyz", "<e>"])


def test_a_stream_joins_to_the_same_text_and_ends_with_the_counts(client: openai.OpenAI) -> None:
    options = {"model": BASE_MODEL, "messages": USER, "max_tokens": 250}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))

    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-2:] == [None, "length"]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_a_streamed_completion_is_framed_as_events_and_ends_with_done(
    chat_api: tuple[Api, FakeWorker], chat_key: str
) -> None:
    body = {"model": BASE_MODEL, "prompt": "x", "max_tokens": 3, "stream": True}

    answer = httpx.post(f"{chat_api[0].url}/v1/completions", json=body, headers={"X-API-Key": chat_key}, timeout=30)

    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert all(event.startswith("data: ") for event in events[:-1])
    assert events[-2:] == ["data: [DONE]", ""]


def test_ones_own_sampler_checkpoints_are_models_and_others_are_not_there(
    chat_api: tuple[Api, FakeWorker], chat_key: str, client: openai.OpenAI
) -> None:
    api = chat_api[0]
    path = save_for_sampler(api, chat_key)
    stranger = client_of(api, api.new_key())

    assert [model.id for model in client.models.list()] == [BASE_MODEL, path]
    assert client.models.retrieve(path).id == path
    assert client.completions.create(model=path, prompt="a", max_tokens=2).model == path
    session = api.state().artifacts.sampling_sessions.find(chat_api[1].executed[-1].lane)
    assert session.checkpoint == path
    assert [model.id for model in stranger.models.list()] == [BASE_MODEL]
    for use in (
        lambda: stranger.models.retrieve(path),
        lambda: stranger.completions.create(model=path, prompt="a"),
        lambda: stranger.chat.completions.create(model=path, messages=USER),
    ):
        with pytest.raises(openai.NotFoundError):
            use()

    run, _, name = path.removeprefix("tinker://").partition("/")
    with api.http(chat_key) as http:
        assert http.post(f"/training_runs/{run}/checkpoints/{name}/publish").is_success
    assert stranger.completions.create(model=path, prompt="a", max_tokens=2).choices[0].text == '!"'


def test_a_training_run_is_a_model_and_the_answer_names_the_checkpoint_that_it_meant(
    chat_api: tuple[Api, FakeWorker], chat_key: str, client: openai.OpenAI
) -> None:
    api = chat_api[0]
    sampler = save_for_sampler(api, chat_key)
    run = sampler.removeprefix("tinker://").partition("/")[0]
    keyed = {"extra_headers": {"Idempotency-Key": "of-a-run"}}

    def ask(**more: object) -> tuple[str, str]:
        made = client.chat.completions.create(model=run, messages=USER, max_tokens=1, **more)
        return made.id, made.model

    before = ask(**keyed)
    with api.http(chat_key) as http:
        body = {"model_id": run, "path": "two", "seq_id": 2}
        training = retrieve(http, http.post("/save_weights", json=body).json()["request_id"]).json()["path"]
    streamed = list(client.completions.create(model=run, prompt="a", max_tokens=1, stream=True))

    assert before[1] == sampler
    assert ask()[1] == training
    assert ask(**keyed) == before
    assert {chunk.model for chunk in streamed} == {training}
    assert client.models.retrieve(run).id == run
    with pytest.raises(openai.NotFoundError):
        client_of(api, api.new_key()).completions.create(model=run, prompt="a")


def test_a_run_without_a_checkpoint_is_no_model_yet(
    chat_api: tuple[Api, FakeWorker], chat_key: str, client: openai.OpenAI
) -> None:
    with chat_api[0].http(chat_key) as http:
        session = http.post("/create_session", json={"type": "create_session"}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 8}}
        run = http.post("/create_model", json=body).json()["model_id"]

    with pytest.raises(openai.NotFoundError, match="has saved no checkpoint"):
        client.completions.create(model=run, prompt="a", max_tokens=1)


def test_requests_of_one_tenant_and_model_share_a_sampling_session(
    chat_api: tuple[Api, FakeWorker], client: openai.OpenAI
) -> None:
    for _ in range(2):
        client.completions.create(model=BASE_MODEL, prompt="a", max_tokens=1)

    first, second = chat_api[1].executed[-2:]
    assert first.lane == second.lane and first.seq != second.seq


def test_samples_of_a_client_that_hung_up_are_cancelled_unless_it_can_ask_again(
    chat_api: tuple[Api, FakeWorker], chat_key: str, client: openai.OpenAI
) -> None:
    api, worker = chat_api
    found = api.state().accounts.tenants.key(chat_key)
    assert found is not None
    hasty = client.with_options(timeout=0.5)
    with worker.paused():
        for headers in ({}, {"Idempotency-Key": "later"}):
            with pytest.raises(openai.APITimeoutError):
                hasty.completions.create(model=BASE_MODEL, prompt="ab", max_tokens=1, extra_headers=headers)
        wait_until(lambda: worker.journal.num_open_samples(found.tenant) == 1, what="the first sample is cancelled")

    headers = {"Idempotency-Key": "later"}
    assert client.completions.create(model=BASE_MODEL, prompt="ab", max_tokens=1, extra_headers=headers).choices


def test_an_idempotency_key_gets_the_same_operation_and_refuses_another_body(client: openai.OpenAI) -> None:
    headers = {"Idempotency-Key": "once"}
    first, again = (
        client.completions.create(model=BASE_MODEL, prompt="a", max_tokens=1, extra_headers=headers) for _ in range(2)
    )

    assert first.id == again.id
    with pytest.raises(openai.BadRequestError, match="already used"):
        client.completions.create(model=BASE_MODEL, prompt="b", max_tokens=1, extra_headers=headers)


def test_samples_in_a_session_of_low_priority_give_way_and_leave_half_of_the_room(
    serve_api: ServeApi, make_database_url: Callable[[str], str]
) -> None:
    with serve_api(make_database_url("sqlite"), max_outstanding_samples=4) as api, ThreadPoolExecutor(4) as threads:
        worker, key = FakeWorker(api.settings), api.new_key()
        worker.start()
        tenant = api.stores.tenants.key(key).tenant  # type: ignore[union-attr]
        with api.http(key) as http:
            metadata = {"twinkle_priority": "-50"}
            session = http.post("/create_session", json={"user_metadata": metadata}).json()["session_id"]
        later = {"extra_headers": {"X-Session-Id": session}}

        def draw(number: int, **options: object) -> None:
            client_of(api, key).completions.create(model=BASE_MODEL, prompt=[number], max_tokens=1, **options)

        with worker.paused():
            waiting = [threads.submit(draw, number, **later) for number in (1, 2)]
            wait_until(lambda: worker.journal.num_open_samples(tenant) == 2, what="both wait")
            with pytest.raises(openai.RateLimitError):
                draw(3, **later)
            waiting += [threads.submit(draw, number) for number in (4, 5)]
            wait_until(lambda: worker.journal.num_open_samples(tenant) == 4, what="all wait")
        for one in waiting:
            one.result(timeout=30)
        order = [parse_sample(worker.payload(claim)).read_prompt()[0][0] for claim in worker.executed]
        assert sorted(order[:2]) == [4, 5] and sorted(order[2:]) == [1, 2]
        with pytest.raises(openai.NotFoundError, match="no session"):
            client_of(api, api.new_key()).completions.create(model=BASE_MODEL, prompt=[1], **later)
        worker.stop()


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "prompt"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client: openai.OpenAI, changes: dict[str, object], param: str) -> None:
    options = {"model": BASE_MODEL, "messages": USER} | changes

    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**options)

    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


def test_errors_have_openais_shape(chat_api: tuple[Api, FakeWorker], client: openai.OpenAI) -> None:
    api = chat_api[0]
    with pytest.raises(openai.AuthenticationError) as refused:
        client_of(api, "tml-unknown").models.list()
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.completions.create(model="gpt", prompt="a")
    missing = httpx.get(f"{api.url}/v1/nowhere")

    assert refused.value.code == "unauthenticated"
    assert missing.status_code == 404 and set(missing.json()["error"]) == {"message", "type", "param", "code"}


def test_without_a_tokenizer_token_ids_work_and_texts_are_refused_clearly(api: Api, key: str) -> None:
    client = client_of(api, key)

    made = client.completions.create(model=BASE_MODEL, prompt=[1, 2, 3], max_tokens=2)

    assert made.choices[0].to_dict()["token_ids"] == [0, 1]
    with pytest.raises(openai.BadRequestError, match="send token ids"):
        client.completions.create(model=BASE_MODEL, prompt="abc")
    with pytest.raises(openai.BadRequestError, match="send token ids"):
        client.chat.completions.create(model=BASE_MODEL, messages=USER)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{",
        b'{"model": "tiny/one"}',
        b'{"model": "tiny/one", "prompt": [], "messages": 1}',
        b'{"model": "tiny/one", "prompt": [[]], "messages": [{}]}',
        b'{"model": "tiny/one", "prompt": [1, ""], "messages": [{"role": "user", "content": [{"type": "image"}]}]}',
        b'{"model": "tiny/one", "prompt": [-1], "messages": [{"role": "user", "content": "a"}], "n": 0}',
        b'{"model": "tiny/one", "prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "tiny/one", "prompt": "a", "messages": [{"role": "user", "content": "a"}], "stop": ["\\ud800"]}',
        b'{"model": "tinker://x", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}',
        b'{"model": "tiny/one\\u0000", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}',
    ],
)
@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_no_body_brings_the_server_to_an_unexpected_error(
    chat_api: tuple[Api, FakeWorker], chat_key: str, route: str, raw: bytes
) -> None:
    headers = {"Authorization": f"Bearer {chat_key}"}

    answer = httpx.post(f"{chat_api[0].url}/v1/{route}", content=raw, headers=headers, timeout=30)

    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
