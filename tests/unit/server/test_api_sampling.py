"""Sampling sessions and samples over plain HTTP."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import httpx
import pytest

from harness.calls import retrieve
from harness.polling import wait_for
from twinkle.wire.sample_result import decode_sample_response
from twinkle.wire.sampling import parse_sample

if TYPE_CHECKING:
    from conftest import Api


@pytest.fixture
def sampler_id(http: httpx.Client, session_id: str) -> str:
    """A sampling session on the base model."""
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "tiny/one"}
    return str(http.post("/create_sampling_session", json=body).json()["sampling_session_id"])


def _sample(sampler_id: str, seq_id: int, **changes: object) -> dict[str, object]:
    body: dict[str, object] = {
        "sampling_session_id": sampler_id,
        "seq_id": seq_id,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 5},
    }
    return body | changes


def test_samples_come_back_in_protobuf_with_an_id_for_each(http: httpx.Client, sampler_id: str) -> None:
    ticket = http.post("/asample", json=_sample(sampler_id, 3)).json()

    result = retrieve(http, ticket["request_id"])

    request_id = f"{sampler_id}:req:3"
    assert ticket == {"request_id": request_id, "sample_sequence_ids": [f"{request_id}:0", f"{request_id}:1"]}
    assert result.headers["content-type"] == "application/x-protobuf"
    assert [len(sequence.tokens) for sequence in decode_sample_response(result.content).sequences] == [5, 5]


def test_a_drawn_seed_is_definite_and_a_resend_matches(api: Api, http: httpx.Client, sampler_id: str) -> None:
    first, again = (http.post("/asample", json=_sample(sampler_id, 0)).json() for _ in range(2))
    other = http.post("/asample", json=_sample(sampler_id, 0, num_samples=1))
    retrieve(http, first["request_id"])

    (claim,) = api.worker.executed_of(sampler_id)
    kept = parse_sample(api.worker.payload(claim))

    assert first == again
    assert (other.status_code, other.json()["code"]) == (400, "conflict")
    assert kept.sampling_params.seed is not None
    assert claim.num_tokens == 3 + 2 * 5


def test_a_given_seed_and_an_empty_stop_are_kept(api: Api, http: httpx.Client, sampler_id: str) -> None:
    params = {"max_tokens": 1, "seed": 3, "stop": []}
    ticket = http.post("/asample", json=_sample(sampler_id, 0, sampling_params=params)).json()
    retrieve(http, ticket["request_id"])

    kept = json.loads(api.worker.payload(api.worker.executed_of(sampler_id)[0]))["sampling_params"]

    assert (kept["seed"], kept["stop"]) == (3, [])


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"sampling_params": {"temperature": -1}}, 400, "sampling_params.temperature"),
        ({"prompt": {"chunks": []}}, 400, "prompt: has no tokens"),
        ({"sampling_session_id": None, "seq_id": None, "base_model": "tiny/one"}, 400, "sampling_session_id"),
        ({"sampling_session_id": "nobody:sample:0"}, 404, "nobody:sample:0"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [7] * 100_000}]}}, 413, "200000 bytes"),
    ],
)
def test_a_bad_sample_is_refused_by_name(
    http: httpx.Client, sampler_id: str, change: dict[str, object], status: int, words: str
) -> None:
    refused = http.post("/asample", json=_sample(sampler_id, 0) | change)

    assert refused.status_code == status
    assert words in refused.json()["detail"]


def test_an_adapters_lane_takes_no_samples_and_a_samplers_no_training(
    http: httpx.Client, model_id: str, sampler_id: str
) -> None:
    sample = http.post("/asample", json=_sample(model_id, 1))
    step = http.post("/optim_step", json={"model_id": sampler_id, "seq_id": 1, "adam_params": {}})

    assert (sample.status_code, step.status_code) == (404, 404)


def test_too_many_open_samples_are_put_off_not_lost(api: Api, http: httpx.Client, sampler_id: str) -> None:
    limit = api.settings.max_outstanding_samples
    with api.worker.paused():
        answers = [http.post("/asample", json=_sample(sampler_id, seq)) for seq in range(limit + 1)]

    assert [answer.status_code for answer in answers] == [200] * limit + [429]
    assert answers[-1].headers["retry-after"] == "1"
    for answer in answers[:-1]:
        retrieve(http, answer.json()["request_id"])
    late = _until_accepted(http, _sample(sampler_id, limit))
    assert retrieve(http, late["request_id"]).status_code == 200


def _until_accepted(http: httpx.Client, body: dict[str, object]) -> dict[str, str]:
    def accepted() -> dict[str, str]:
        answer = http.post("/asample", json=body)
        return dict(answer.json()) if answer.status_code == 200 else {}

    return wait_for(accepted, what="the quota opens again")


def test_a_sampling_session_is_made_once(http: httpx.Client, session_id: str, sampler_id: str) -> None:
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "tiny/one"}

    again = http.post("/create_sampling_session", json=body)
    unknown = http.post("/create_sampling_session", json=body | {"base_model": "no/such"})
    missing = http.post("/create_sampling_session", json=body | {"model_path": "tinker://x:train:0/weights/a"})

    assert again.json()["sampling_session_id"] == sampler_id
    assert (unknown.status_code, missing.status_code) == (400, 404)
    assert http.get(f"/samplers/{sampler_id}").json() == {"sampler_id": sampler_id, "base_model": "tiny/one"}
