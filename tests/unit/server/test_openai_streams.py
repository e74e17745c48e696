"""Streams of the OpenAI-compatible routes, through the official client: what comes early, and that it is the answer."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import openai
import pytest
import redis
from tokenizers import Tokenizer

from harness.byte_tokenizer import write_tokenizer
from harness.fake_worker import BASE_MODEL, CAPABILITIES, FakeWorker
from harness.polling import wait_until
from twinkle.core.operation import Claim, OperationState
from twinkle.scheduler.token_stream import ListenedSample, TokenPiece, token_channel
from twinkle.wire.sample_result import TopkLogprobs, WireSequence

if TYPE_CHECKING:
    from conftest import Api, ServeApi

TEXT = "né € and 🙂, then STO, then some more of it. STOP"
SHOWN = TEXT.removesuffix("STOP")
USER = [{"role": "user", "content": "hi"}]
PATIENCE_S = 20.0

Script = Callable[[Claim], Iterable[str]]
"""The messages that listeners get before the sample is done, each some lines."""


@dataclass
class Sampler:
    """Says what a test wants said of a sample under way, then holds its result back until it is told to go on."""

    redis_url: str
    script: Script
    may_end: threading.Event = field(default_factory=threading.Event)
    claims: list[Claim] = field(default_factory=list)

    def __call__(self, claim: Claim, request: ListenedSample) -> None:
        assert request.listener is not None
        self.claims.append(claim)
        with redis.Redis.from_url(self.redis_url) as broker:
            for message in self.script(claim):
                assert broker.publish(token_channel(request.listener.id), message) == 1
        assert self.may_end.wait(PATIENCE_S)


@dataclass
class Stage:
    """The app, its worker, and the tokenizer both know."""

    api: Api
    worker: FakeWorker
    tokenizer: Tokenizer
    client: openai.OpenAI

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def sequence(self, text: str, stop_reason: str = "stop", topk: int = 0) -> WireSequence:
        """A sample with a logprob of its own for each token."""
        tokens = np.array(self.tokens(text), dtype=np.int32)
        logprobs = -np.arange(len(tokens), dtype=np.float32) / 7
        alternatives = None
        if topk:
            ids = np.tile(np.arange(topk, dtype=np.int32), (len(tokens), 1))
            alternatives = TopkLogprobs(ids, np.repeat(logprobs[:, None], topk, axis=1) - 1)
        return WireSequence(tokens, logprobs, stop_reason, alternatives)  # type: ignore[arg-type]

    def piece(self, claim: Claim, start: int, end: int, *, of: str = TEXT, sample: int = 0, **more: Any) -> str:
        """Some tokens of a text as a worker reports them."""
        tokens = self.tokens(of)[start:end]
        made = TokenPiece(request_id=claim.request_id, sample=sample, start=start, tokens=tokens, **more)
        return made.model_dump_json(exclude_none=True)

    @contextmanager
    def sampling(self, script: Script, *sequences: WireSequence) -> Iterator[Sampler]:
        """Samples come out as given; before that, what the script says is said."""
        sampler = Sampler(self.api.settings.redis_url.get_secret_value(), script)
        self.worker.sequences, self.worker.rehearse = list(sequences), sampler
        try:
            yield sampler
        finally:
            sampler.may_end.set()
            self.worker.sequences = self.worker.rehearse = None


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def served(
    serve_api: ServeApi, make_database_url: Callable[[str], str], tokenizer_folder: Path
) -> Iterator[tuple[Api, FakeWorker, Tokenizer]]:
    tokenizer = write_tokenizer(tokenizer_folder)
    with serve_api(make_database_url("sqlite"), max_outstanding_samples=100) as api:
        capabilities = CAPABILITIES.model_copy(update={"tokenizer_path": str(tokenizer_folder)})
        worker = FakeWorker(api.settings, capabilities=capabilities)
        worker.start()
        yield api, worker, tokenizer
        worker.stop()


@pytest.fixture
def stage(served: tuple[Api, FakeWorker, Tokenizer]) -> Iterator[Stage]:
    api, worker, tokenizer = served
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key=api.new_key(), max_retries=0, timeout=30) as client:
        yield Stage(api, worker, tokenizer, client)


def chat(stage: Stage, **options: Any) -> Any:
    return stage.client.chat.completions.create(
        model=BASE_MODEL, messages=USER, max_tokens=200, stop=["STOP"], **options
    )


def complete(stage: Stage, **options: Any) -> Any:
    values = {"prompt": "x", "max_tokens": 200, "stop": ["STOP"]} | options
    return stage.client.completions.create(model=BASE_MODEL, **values)


def text_of(chunk: Any) -> str:
    choice = chunk.choices[0]
    return (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""


@pytest.mark.parametrize("create", [chat, complete])
def test_text_arrives_while_its_operation_is_still_running(stage: Stage, create: Callable[..., Any]) -> None:
    with stage.sampling(lambda claim: [stage.piece(claim, 0, 6)], stage.sequence(TEXT)) as sampler:
        stream = create(stage, stream=True)
        early = next(text for chunk in stream if (text := text_of(chunk)))
        state = stage.worker.journal.statuses([sampler.claims[0].request_id])[sampler.claims[0].request_id]
        sampler.may_end.set()
        late = "".join(map(text_of, stream))

    assert state.status.state is OperationState.RUNNING
    assert early == "né "  # the fifth and sixth byte are two of three of a character
    assert early + late == SHOWN


def _nothing(stage: Stage, claim: Claim) -> list[str]:
    return []


def _one_by_one(stage: Stage, claim: Claim) -> list[str]:
    return [stage.piece(claim, i, i + 1) for i in range(len(stage.tokens(TEXT)))]


def _several_in_a_message(stage: Stage, claim: Claim) -> list[str]:
    return ["\n".join(_one_by_one(stage, claim))]


def _some_lost(stage: Stage, claim: Claim) -> list[str]:
    return [piece for i, piece in enumerate(_one_by_one(stage, claim)) if i != 11]


def _doubled_and_out_of_order(stage: Stage, claim: Claim) -> list[str]:
    pieces = _one_by_one(stage, claim)
    return [pieces[1], pieces[0], pieces[0], *pieces[3:6], *reversed(pieces), *pieces, stage.piece(claim, 0, 30)]


def _drawn_anew(stage: Stage, claim: Claim) -> list[str]:
    return [stage.piece(claim, 0, 20), stage.piece(claim, 0, 5), stage.piece(claim, 5, 40)]


def _contradiction(stage: Stage, claim: Claim) -> list[str]:
    return [stage.piece(claim, 0, 9), stage.piece(claim, 5, 30, of=TEXT[::-1]), *_one_by_one(stage, claim)]


def _rubbish(stage: Stage, claim: Claim) -> list[str]:
    piece = json.loads(stage.piece(claim, 0, 3, of="evil"))
    changes: list[dict[str, object]] = [
        {"tokens": None},
        {"tokens": [-1]},
        {"tokens": ["1"]},
        {"tokens": [2**31]},
        {"tokens": [[1]]},
        {"logprobs": [0.0]},
        {"sample": 1},
        {"sample": -1},
        {"sample": 10**30},
        {"start": 1},
        {"start": -1},
        {"start": 0.5},
        {"request_id": claim.request_id + "0"},
        {"request_id": ""},
        {"command": "stop"},
    ]
    bad = [json.dumps(piece | change) for change in changes]
    nonsense = ["", "\n\n\n", "{", "[]", "null", "0" * 100_000, "[" * 5000, '{"request_id": "\\ud800"}', "\x00", "é"]
    return [*bad, *nonsense, "\n".join([*bad, stage.piece(claim, 0, 9)]), *bad]


def _more_than_was_asked_for(stage: Stage, claim: Claim) -> list[str]:
    return [stage.piece(claim, 0, 5000, of=TEXT.replace("STOP", "STO") + "x" * 3000)]


@pytest.mark.parametrize(
    "script",
    [
        _nothing,
        _one_by_one,
        _several_in_a_message,
        _some_lost,
        _doubled_and_out_of_order,
        _drawn_anew,
        _contradiction,
        _rubbish,
    ],
)
@pytest.mark.parametrize("create", [chat, complete])
def test_the_stream_joins_to_the_answer_whatever_becomes_of_the_messages(
    stage: Stage, create: Callable[..., Any], script: Callable[[Stage, Claim], list[str]]
) -> None:
    with stage.sampling(lambda claim: script(stage, claim), stage.sequence(TEXT)) as sampler:
        sampler.may_end.set()
        text = "".join(map(text_of, create(stage, stream=True)))

    assert text == SHOWN


@pytest.mark.parametrize(
    "script", [_more_than_was_asked_for, lambda stage, claim: [stage.piece(claim, 0, 9, of="q" * 9)]]
)
def test_a_stream_that_said_what_the_result_does_not_ends_with_an_error(
    stage: Stage, script: Callable[[Stage, Claim], list[str]]
) -> None:
    with stage.sampling(lambda claim: script(stage, claim), stage.sequence("né € and so")) as sampler:
        stream = complete(stage, stream=True)
        said = text_of(next(stream))
        sampler.may_end.set()
        with pytest.raises(openai.APIError, match="differs from what was sent") as refused:
            said += "".join(map(text_of, stream))

    assert refused.value.code == "transient"
    assert not said.endswith("so")


def test_choices_of_several_prompts_and_samples_grow_side_by_side(stage: Stage) -> None:
    texts = ["one né", "two €", "three 🙂"]

    def script(claim: Claim) -> list[str]:
        pieces = [[stage.piece(claim, i, i + 1, of=text, sample=s) for i in range(4)] for s, text in enumerate(texts)]
        return list(itertools.chain(*zip(*pieces, strict=True)))

    with stage.sampling(script, *(stage.sequence(text, "length") for text in texts)) as sampler:
        stream = complete(stage, stream=True, n=3, prompt=["x", "y"])
        chunks = [next(stream)]
        sampler.may_end.set()
        chunks += stream

    joined = {
        index: "".join(text_of(chunk) for chunk in chunks if chunk.choices[0].index == index) for index in range(6)
    }
    assert joined == dict(enumerate(texts * 2))
    assert [chunk.choices[0].finish_reason for chunk in chunks].count("length") == 6
    assert len(chunks) > 6


def joined_scores(kind: str, scores: Sequence[Any]) -> dict[str, list[Any]]:
    fields = ["content"] if kind == "chat" else ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    return {name: list(itertools.chain(*(getattr(score, name) for score in scores if score))) for name in fields}


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_scores_and_token_ids_come_with_their_text_and_join_to_those_of_the_answer(stage: Stage, kind: str) -> None:
    sequence = stage.sequence(TEXT, topk=2)
    assert sequence.topk is not None
    scores = [
        list(zip(*row, strict=True))
        for row in zip(sequence.topk.token_ids.tolist(), sequence.topk.logprobs.tolist(), strict=True)
    ]
    create, asked = (chat, {"logprobs": True, "top_logprobs": 2}) if kind == "chat" else (complete, {"logprobs": 2})
    options = {**asked, "extra_body": {"return_token_ids": True}}

    def script(claim: Claim) -> list[str]:
        # All but the last token: the stop text is nearly there, and neither it nor its scores may be shown.
        lists, end = sequence.logprobs.tolist(), len(sequence.tokens) - 1
        cuts = list(itertools.pairwise([*range(0, end, 5), end]))
        return ["\n".join(stage.piece(claim, a, b, logprobs=lists[a:b], topk=scores[a:b]) for a, b in cuts)]

    with stage.sampling(script, sequence) as sampler:
        stream = create(stage, stream=True, **options)
        chunks = [next(chunk for chunk in stream if text_of(chunk))]
        sampler.may_end.set()
        chunks += stream
        whole = create(stage, **options)

    choices = [chunk.choices[0] for chunk in chunks]
    wanted = joined_scores(kind, [whole.choices[0].logprobs])
    assert joined_scores(kind, [choice.logprobs for choice in choices]) == wanted
    assert choices[0].logprobs is not None
    ids = list(itertools.chain(*(choice.to_dict().get("token_ids", []) for choice in choices)))
    assert ids == whole.choices[0].to_dict()["token_ids"] == stage.tokens(TEXT)


def test_without_a_tokenizer_token_ids_are_streamed(api: Api, key: str) -> None:
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key=key, max_retries=0, timeout=30) as client:
        chunks = list(client.completions.create(model=BASE_MODEL, prompt=[1, 2], max_tokens=5, stream=True))

    assert list(itertools.chain(*(chunk.choices[0].to_dict().get("token_ids", []) for chunk in chunks))) == [*range(5)]


def test_a_client_that_hangs_up_in_the_middle_ends_its_sample_unless_it_can_ask_again(stage: Stage) -> None:
    journal = stage.worker.journal
    for headers, state in (({}, OperationState.FAILED), ({"Idempotency-Key": "again"}, OperationState.RUNNING)):
        with stage.sampling(lambda claim: [stage.piece(claim, 0, 9)], stage.sequence(TEXT)) as sampler:
            stream = complete(stage, stream=True, extra_headers=headers)
            assert text_of(next(stream))
            stream.close()
            feeds = stage.api.state().queue.token_feeds
            wait_until(lambda feeds=feeds: feeds.num_listeners == 0, what="nobody listens any more")
            request_id = sampler.claims[0].request_id
            assert journal.statuses([request_id])[request_id].status.state is state


def test_a_repeat_gets_the_same_operation_streamed_or_not(stage: Stage) -> None:
    headers = {"Idempotency-Key": "once"}
    with stage.sampling(lambda claim: [stage.piece(claim, 0, 9)], stage.sequence(TEXT)) as sampler:
        sampler.may_end.set()
        first = complete(stage, extra_headers=headers)
        streams = [list(complete(stage, stream=True, extra_headers=headers)) for _ in range(2)]

    assert [{chunk.id for chunk in chunks} for chunks in streams] == [{first.id}] * 2
    assert ["".join(map(text_of, chunks)) for chunks in streams] == [first.choices[0].text] * 2


def test_a_repeat_while_the_first_is_under_way_hears_as_much(stage: Stage) -> None:
    """Whoever comes late hears the beginning when it is said again."""
    headers = {"Idempotency-Key": "twice"}
    is_there = threading.Event()

    def script(claim: Claim) -> Iterator[str]:
        yield stage.piece(claim, 0, 9)
        assert is_there.wait(PATIENCE_S)
        yield stage.piece(claim, 9, 12)
        yield stage.piece(claim, 0, 14)

    with stage.sampling(script, stage.sequence(TEXT)) as sampler:
        first = complete(stage, stream=True, extra_headers=headers)
        assert text_of(next(first)) == "né € a"
        seconds: list[str] = []

        def repeat() -> None:
            seconds.extend(map(text_of, complete(stage, stream=True, extra_headers=headers)))

        second = threading.Thread(target=repeat)
        second.start()
        feeds = stage.api.state().queue.token_feeds
        wait_until(lambda: feeds.num_listeners == 2, what="both listen")
        is_there.set()
        wait_until(lambda: seconds, what="the second has heard something")
        sampler.may_end.set()
        second.join(PATIENCE_S)

    assert len(sampler.claims) == 1
    assert "".join(seconds) == SHOWN


def test_an_error_before_the_first_text_is_a_refusal_and_one_after_it_an_event(stage: Stage) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(stage, stream=True, prompt="x" * 3000)
    assert refused.value.param == "prompt"

    with stage.sampling(lambda claim: [stage.piece(claim, 0, 9)], stage.sequence(TEXT)) as sampler:
        stream = complete(stage, stream=True)
        assert text_of(next(stream))
        claim = sampler.claims[0]
        stage.api.state().artifacts.sampling_sessions.cancel(claim.request_id, claim.tenant)
        with pytest.raises(openai.APIError, match="cancelled by its client") as ended:
            list(stream)
    assert ended.value.type == "invalid_request_error"


def test_the_framing_is_that_of_server_sent_events(stage: Stage) -> None:
    body = {"model": BASE_MODEL, "prompt": "x", "max_tokens": 9, "stream": True}
    with stage.sampling(lambda claim: [stage.piece(claim, 0, 9)], stage.sequence(TEXT, "length")) as sampler:
        sampler.may_end.set()
        headers = {"Authorization": f"Bearer {stage.client.api_key}"}
        answer = httpx.post(f"{stage.api.url}/v1/completions", json=body, headers=headers, timeout=30)

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in answer.headers
    events = answer.text.split("\n\n")
    assert all(event.startswith("data: ") for event in events[:-1])
    assert events[-2:] == ["data: [DONE]", ""]


def test_each_api_process_hears_of_its_own_streams(stage: Stage, serve_api: ServeApi) -> None:
    database_url = stage.api.settings.database_url
    with serve_api(database_url, home=stage.api.settings.home) as other:
        client = stage.client.with_options(base_url=f"{other.url}/v1")
        second = Stage(other, stage.worker, stage.tokenizer, client)
        with stage.sampling(lambda claim: [stage.piece(claim, 0, 9)], stage.sequence(TEXT)) as sampler:
            streams = [complete(second, stream=True)]
            assert text_of(next(streams[0])) == "né € a"
            sampler.may_end.set()
            assert "".join(map(text_of, streams[0])) == SHOWN.removeprefix("né € a")


def test_nobody_else_can_make_a_sample_be_listened_to(stage: Stage) -> None:
    """The Tinker routes take no listener: what they do not know is not kept."""
    listened = []
    stage.worker.rehearse = lambda claim, request: listened.append(claim)
    try:
        complete(stage)
        with stage.api.http(stage.client.api_key) as http:
            session = http.post("/create_session", json={"type": "create_session"}).json()["session_id"]
            opened = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
            sampler = http.post("/create_sampling_session", json=opened).json()["sampling_session_id"]
            body = {
                "sampling_session_id": sampler,
                "seq_id": 0,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
                "sampling_params": {"max_tokens": 1},
                "listener": {"id": "0" * 32, "scores": True},
            }
            request_id = http.post("/asample", json=body).json()["request_id"]
            wait_until(
                lambda: any(claim.request_id == request_id for claim in stage.worker.executed), what="the sample"
            )
    finally:
        stage.worker.rehearse = None

    assert listened == []
