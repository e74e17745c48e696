"""Samples nobody wants any more: ended by their client, and by nobody else."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import httpx
import pytest
import tinker
from tinker import types

from harness.calls import optim_step, retrieve
from harness.polling import wait_until

if TYPE_CHECKING:
    from conftest import Api

PROMPT = types.ModelInput.from_ints([1, 2, 3])


@pytest.fixture
def sampler_id(http: httpx.Client, session_id: str) -> str:
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "tiny/one"}
    return str(http.post("/create_sampling_session", json=body).json()["sampling_session_id"])


def _sample(http: httpx.Client, sampler_id: str, seq: int) -> str:
    body = {
        "sampling_session_id": sampler_id,
        "seq_id": seq,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 2},
    }
    return str(http.post("/asample", json=body).json()["request_id"])


def test_a_queued_sample_ends_with_a_failure_of_its_own_kind(api: Api, http: httpx.Client, sampler_id: str) -> None:
    with api.worker.paused():
        request_id = _sample(http, sampler_id, 0)
        answers = [http.post("/cancel_future", json={"request_id": request_id}) for _ in range(2)]
        result = retrieve(http, request_id)

    assert [answer.status_code for answer in answers] == [204, 204]
    assert (result.status_code, result.json()) == (200, {"error": "cancelled by its client", "category": "user"})
    kept = retrieve(http, _sample(http, sampler_id, 1))
    assert kept.headers["content-type"] == "application/x-protobuf"
    assert [claim.seq for claim in api.worker.executed_of(sampler_id)] == [1]


def test_a_sample_that_has_ended_keeps_its_result(http: httpx.Client, sampler_id: str) -> None:
    request_id = _sample(http, sampler_id, 0)
    before = retrieve(http, request_id)

    assert http.post("/cancel_future", json={"request_id": request_id}).status_code == 204
    assert retrieve(http, request_id).content == before.content


def test_training_is_not_cancelled(http: httpx.Client, model_id: str) -> None:
    request_id = http.post("/optim_step", json=optim_step(model_id, 1)).json()["request_id"]

    refused = http.post("/cancel_future", json={"request_id": request_id})

    assert refused.status_code == 400
    assert "cannot be cancelled once it is accepted" in refused.json()["detail"]


def test_nobody_cancels_somebody_elses(api: Api, http: httpx.Client, sampler_id: str) -> None:
    with api.worker.paused():
        request_id = _sample(http, sampler_id, 0)
        with api.http(api.new_key()) as stranger:
            refused = stranger.post("/cancel_future", json={"request_id": request_id})
            unknown = stranger.post("/cancel_future", json={"request_id": "nobody:sample:0:req:0"})

    assert (refused.status_code, unknown.status_code) == (404, 404)
    assert retrieve(http, request_id).headers["content-type"] == "application/x-protobuf"


def test_the_sdk_gives_up_its_samples(api: Api, key: str) -> None:
    with api.sdk(key) as service:
        with api.worker.paused():
            sampling = service.create_sampling_client(base_model="tiny/one")
            futures = [sampling.sample(PROMPT, 1, types.SamplingParams(max_tokens=2)) for _ in range(3)]
            found = api.stores.tenants.key(key)
            assert found is not None
            # Not earlier: a client that has no answer to its request yet has nothing to cancel.
            wait_until(lambda: api.state().queue.futures.num_waiting >= 3, what="the SDK polls for three samples")

            for future in futures[:2]:
                assert future.future().cancel()

            num_open = partial(api.worker.journal.num_open_samples, found.tenant)
            wait_until(lambda: num_open() == 1, what="two samples are cancelled")
        assert futures[2].result().sequences[0].tokens == [0, 1]


def test_a_future_collected_later_tells_that_it_was_cancelled(api: Api, key: str) -> None:
    with api.sdk(key) as service, api.worker.paused():
        sampling = service.create_sampling_client(base_model="tiny/one")
        future = sampling.sample(PROMPT, 1, types.SamplingParams(max_tokens=2))
        found = api.stores.tenants.key(key)
        assert found is not None
        wait_until(lambda: api.worker.journal.num_open_samples(found.tenant) == 1, what="the sample is queued")
        with api.http(key) as http:
            session_id = http.get("/sessions").json()["sessions"][0]
            http.post("/cancel_future", json={"request_id": f"{session_id}:sample:0:req:0"})

        with pytest.raises(tinker.RequestFailedError, match="cancelled by its client"):
            future.result()
