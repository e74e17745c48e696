"""One poll for all samples of a sampling client, by the SDK with the flag on."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
import pytest
import tinker
from tinker import types

from harness.calls import retrieve

if TYPE_CHECKING:
    from conftest import Api, ServeApi

PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=2)
CLONE = 1_000_000_000


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def together(
    request: pytest.FixtureRequest, serve_api: ServeApi, make_database_url: Callable[[str], str]
) -> Iterator[Api]:
    url = make_database_url(request.param)
    with serve_api(url, poll_samples_together=True, max_outstanding_samples=500, long_poll_s=5) as api:
        api.worker.start()
        yield api
        api.worker.stop()


@contextmanager
def _client(api: Api, key: str) -> Iterator[tinker.ServiceClient]:
    """The SDK, closed without waiting for its end.

    Its poller (0.38.0) misses the cancellation that arrives while it acknowledges what it has seen, then idles, and
    ``close()`` waits for it for ever: about one run in sixty on a busy machine, with every sample long answered.
    """
    service = api.sdk(key)
    try:
        yield service
    finally:
        service.close("success")


class Sampler:
    """A sampling session over plain HTTP."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http
        session_id = http.post("/create_session", json={}).json()["session_id"]
        body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "tiny/one"}
        self.id = str(http.post("/create_sampling_session", json=body).json()["sampling_session_id"])

    def sample(self, seq: int, **more: object) -> str:
        body = {
            "sampling_session_id": self.id,
            "seq_id": seq,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "sampling_params": {"max_tokens": 2},
            **more,
        }
        return str(self.http.post("/asample", json=body).json()["request_id"])

    def poll(self, cursor: int, *, client: int = 0, timeout: float | None = 0) -> httpx.Response:
        target = {"type": "sampling_session", "sampling_session_id": self.id, "cloned_sampler_id": client}
        body = {"target": target, "prev_cursor": cursor, "timeout": timeout, "retrieved_request_ids": []}
        return self.http.post("/retrieve_futures", json=body)


@pytest.fixture
def sampler(together: Api) -> Iterator[Sampler]:
    with together.http(together.new_key()) as http:
        yield Sampler(http)


def test_the_sdk_draws_many_samples_through_one_poll(together: Api) -> None:
    with _client(together, together.new_key()) as service:
        sampling = service.create_sampling_client(base_model="tiny/one")
        futures = [sampling.sample(PROMPT, 1, PARAMS) for _ in range(150)]

        tokens = [future.result().sequences[0].tokens for future in futures]

    assert tokens == [[0, 1]] * 150


def test_a_client_of_the_largest_number_is_one_that_has_drawn_nothing(sampler: Sampler) -> None:
    answer = sampler.poll(0, client=2**31 - 1)

    assert (answer.status_code, answer.json()["completions"]) == (200, [])


def test_a_failed_sample_is_told_like_any_other(together: Api) -> None:
    key = together.new_key()
    with _client(together, key) as service, together.http(key) as http, together.worker.paused():
        sampling = service.create_sampling_client(base_model="tiny/one")
        future = sampling.sample(PROMPT, 1, PARAMS)
        request_id = f"{http.get('/sessions').json()['sessions'][0]}:sample:0:req:0"
        while http.post("/cancel_future", json={"request_id": request_id}).status_code == 404:
            pass

        with pytest.raises(tinker.RequestFailedError, match="cancelled by its client"):
            future.result()


def test_clones_get_numbers_of_their_own_and_their_own_samples(together: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    key = together.new_key()
    monkeypatch.setenv("TINKER_API_KEY", key)
    monkeypatch.setenv("TINKER_BASE_URL", together.url)
    with _client(together, key) as service:
        sampling = service.create_sampling_client(base_model="tiny/one")
        clones = [pickle.loads(pickle.dumps(sampling)) for _ in range(2)]

        try:
            drawn = [one.sample(PROMPT, 1, PARAMS).result().sequences[0].tokens for one in (sampling, *clones)]
        finally:
            for clone in clones:
                clone.holder.close()

    assert drawn == [[0, 1]] * 3
    lane = together.worker.executed[-1].lane
    assert sorted(claim.seq for claim in together.worker.executed_of(lane)) == [0, CLONE, 2 * CLONE]


def test_a_poll_tells_what_ended_after_its_cursor_and_nothing_twice(together: Api, sampler: Sampler) -> None:
    first = sampler.sample(0)
    retrieve(sampler.http, first)
    begin = sampler.poll(0).json()
    second = sampler.sample(1)
    retrieve(sampler.http, second)

    later = sampler.poll(begin["cursor"]).json()
    last = sampler.poll(later["cursor"]).json()

    assert [completion["request_id"] for completion in begin["completions"]] == [first]
    assert begin["completions"][0]["state"] == "finished"
    assert begin["completions"][0]["response_payload_uncompressed_size"] > 0
    assert [completion["request_id"] for completion in later["completions"]] == [second]
    assert last == {"completions": [], "cursor": later["cursor"]}
    assert [c["request_id"] for c in sampler.poll(0).json()["completions"]] == [first, second]


def test_a_poll_tells_the_sizes_of_results_large_and_small(together: Api, sampler: Sampler) -> None:
    requests = [sampler.sample(0), sampler.sample(1, num_samples=100, topk_sample_logprobs=10)]
    sizes = {request_id: len(retrieve(sampler.http, request_id).content) for request_id in requests}

    told = {
        completion["request_id"]: completion["response_payload_uncompressed_size"]
        for completion in sampler.poll(0).json()["completions"]
    }

    assert told == sizes
    assert max(sizes.values()) > together.settings.inline_payload_bytes > min(sizes.values())


def test_a_held_poll_ends_with_the_first_completion(together: Api, sampler: Sampler) -> None:
    answers: list[httpx.Response] = []
    poll = threading.Thread(target=lambda: answers.append(sampler.poll(0, timeout=None)))
    with together.worker.paused():
        request_id = sampler.sample(0)
        poll.start()
        assert not sampler.poll(0).json()["completions"]
    poll.join()

    assert answers[0].elapsed.total_seconds() < 4
    assert [completion["request_id"] for completion in answers[0].json()["completions"]] == [request_id]


def test_each_client_of_a_session_hears_of_its_own(together: Api, sampler: Sampler) -> None:
    body = {"sampling_session_id": sampler.id}
    numbers = [sampler.http.post("/join_sampling_session", json=body).json()["client_counter"] for _ in range(2)]
    own, clones = sampler.sample(3), sampler.sample(2 * CLONE)
    retrieve(sampler.http, own)
    retrieve(sampler.http, clones)

    heard = [[c["request_id"] for c in sampler.poll(0, client=client).json()["completions"]] for client in range(3)]

    assert numbers == [1, 2]
    assert heard == [[own], [], [clones]]


def test_a_strangers_session_answers_like_none(together: Api, sampler: Sampler) -> None:
    with together.http(together.new_key()) as stranger:
        sampler.http, own = stranger, sampler.http
        refused = [sampler.poll(0), stranger.post("/join_sampling_session", json={"sampling_session_id": sampler.id})]
        sampler.http = own

    assert [answer.status_code for answer in refused] == [404, 404]
