"""A value outside its range: the answer names field, limit and what was sent, in the form the SDK shows best."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from harness.calls import retrieve
from harness.fake_worker import BASE_MODEL
from harness.hostile import Json

LONG = "a" * 5000
MANY = ["a"] * 5000

# Route, body beside the address, words of the reason.
NUMBERED: list[tuple[str, dict[str, Json], list[str]]] = [
    ("save_weights", {"path": "a", "ttl_seconds": 0}, ["ttl_seconds", "greater than or equal to 1", "not 0"]),
    ("save_weights", {"path": "a", "ttl_seconds": 10**40}, ["ttl_seconds", "more than 30 digits"]),
    ("save_weights", {"path": "a", "ttl_seconds": "9"}, ["ttl_seconds", "valid integer", "not a text"]),
    ("save_weights", {"path": LONG}, ["path", "at most 4096 characters", "not 5000"]),
    ("save_weights", {"path": "a b"}, ["path", "only letters, digits"]),
    ("save_weights", {"path": "a", "user_metadata": dict.fromkeys(map(str, range(300)), "")}, ["256 entries", "300"]),
    ("save_weights", {"path": "a", "user_metadata": {"a": "b" * 70_000}}, ["65536 characters", "70001"]),
    ("save_weights_for_sampler", {"sampling_session_seq_id": -1}, ["sampling_session_seq_id", "equal to 0", "not -1"]),
    ("save_weights_for_sampler", {"path": "a", "kind": "b"}, ["kind", "'snapshot' or 'inflight'", "not 'b'"]),
    ("save_weights_external", {"path": "a", "age_encryption_recipients": MANY}, ["age_encryption", "100", "5000"]),
    ("load_weights", {"path": "tinker://a"}, ["path", "three segments"]),
    ("optim_step", {"adam_params": {"beta1": "x"}}, ["adam_params.beta1", "valid number", "not a text"]),
    ("optim_step", {"adam_params": None}, ["needs either adam_params or optimizer_params"]),
]
REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("create_model", {"model_seq_id": -1}, ["model_seq_id", "greater than or equal to 0", "not -1"]),
    ("create_model", {"lora_config": {"rank": -1}}, ["lora_config.rank", "equal to 0", "not -1"]),
    ("create_model", {"lora_config": {"rank": 0}}, ["lora_config", "of rank 0", "the whole model"]),
    ("create_model", {"lora_config": {"rank": 10**6}}, ["lora_config.rank", "at most", "not 1000000"]),
    ("create_model", {"lora_config": {"seed": 2**63}}, ["lora_config.seed", str(2**63 - 1), str(2**63)]),
    ("create_model", {"optimizer_config": {"type": "sgd"}}, ["optimizer_config.type", "'sgd'", "'adamw'"]),
    ("create_model", {"optimizer_config": {"version": -1}}, ["optimizer_config.version", "equal to 0", "not -1"]),
    ("create_session", {"tags": MANY}, ["tags", "at most 1024", "5000"]),
    ("create_session", {"display_name": LONG}, ["display_name", "at most 4096 characters", "not 5000"]),
    ("create_session", {"project_id": 5}, ["project_id", "valid string", "not a whole number"]),
    ("session_heartbeat", {"session_id": ""}, ["session_id", "at least 1 character", "not 0"]),
    ("sessions/search", {"limit": 201}, ["limit", "equal to 200", "not 201"]),
    ("sessions/search", {"project_ids": MANY}, ["project_ids", "at most 1000", "5000"]),
    ("sessions/search", {"statuses": [{"type": "gone"}]}, ["statuses[0].type", "'active'", "not 'gone'"]),
    ("asample", {"num_samples": 0}, ["num_samples", "equal to 1", "not 0"]),
    ("asample", {"num_samples": 2000}, ["num_samples", "equal to 1024", "not 2000"]),
    ("asample", {"topk_sample_logprobs": 2000}, ["topk_sample_logprobs", "equal to 1024", "not 2000"]),
    ("asample", {"sampling_params": {"temperature": -1.0}}, ["sampling_params.temperature", "equal to 0", "not -1.0"]),
    ("asample", {"sampling_params": {"top_p": 0.0}}, ["sampling_params.top_p", "greater than 0", "not 0.0"]),
    ("asample", {"sampling_params": {"top_k": 0}}, ["sampling_params.top_k", "-1 (off) or at least 1"]),
    ("asample", {"sampling_params": {"max_tokens": 0}}, ["sampling_params.max_tokens", "equal to 1", "not 0"]),
    ("asample", {"sampling_params": {"stop": MANY}}, ["sampling_params.stop", "at most 1024"]),
    ("asample", {"prompt": {"chunks": [{"tokens": [1, -1]}]}}, ["prompt.chunks[0].tokens[1]", "equal to 0", "not -1"]),
    ("asample", {"prompt": {"chunks": [{"tokens": []}]}}, ["prompt", "has no tokens"]),
    ("asample", {"prompt": {"chunks": [{}] * 10_001}}, ["prompt.chunks", "at most 10000"]),
    ("asample", {"prompt_logprobs": True, "prompt_logprobs_last_n": 9}, ["prompt_logprobs_last_n", "1 and 2"]),
    (
        "asample",
        {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1] * 9}},
        ["target_prompt_logprobs.shape", "at most 8", "9"],
    ),
    ("retrieve_futures", {"timeout": -1}, ["timeout", "equal to 0", "not -1"]),
    (
        "retrieve_futures",
        {"target": {"sampling_session_id": "s", "cloned_sampler_id": 2**39}},
        ["target.cloned_sampler_id", "equal to 2147483647"],
    ),
    ("copy_weights", {"ttl_seconds": 0}, ["ttl_seconds", "equal to 1", "not 0"]),
]
QUERIES = [
    ("sessions?limit=1001", ["limit", "equal to 1000", "not '1001'"]),
    ("checkpoints?offset=-1", ["offset", "equal to 0", "not '-1'"]),
    ("training_runs?limit=many", ["limit", "valid integer"]),
    ("audit?event_type=x", ["event_type", "'checkpoints'", "not 'x'"]),
    ("audit?day=2026-13-01", ["day", "month"]),
]


@pytest.fixture
def valid(session_id: str, http: httpx.Client) -> dict[str, dict[str, Any]]:
    """What a refused body is a valid one beside."""
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    sampler = http.post("/create_sampling_session", json=body).json()["sampling_session_id"]
    return {
        "create_model": {"session_id": session_id, "model_seq_id": 0, "base_model": BASE_MODEL},
        "asample": {"sampling_session_id": sampler, "seq_id": 1, "prompt": {"chunks": [{"tokens": [1, 2, 3]}]}},
        "retrieve_futures": {"target": {"sampling_session_id": sampler}},
        "copy_weights": {"source_path": "tinker://a/weights/b", "destination_project_id": "p"},
    }


def test_a_numbered_operation_fails_in_its_turn(http: httpx.Client, model_id: str) -> None:
    for number, (route, body, words) in enumerate(NUMBERED, start=1):
        ticket = http.post(f"/{route}", json={"model_id": model_id, "seq_id": number, **body})
        failed = retrieve(http, ticket.json()["request_id"]).json()

        assert failed["category"] == "user", (route, body)
        assert all(word in failed["error"] for word in words), (words, failed)


@pytest.mark.parametrize(("route", "body", "words"), REFUSED)
def test_anything_else_is_refused_at_once(
    http: httpx.Client, valid: dict[str, dict[str, Any]], route: str, body: dict[str, Any], words: list[str]
) -> None:
    response = http.post(f"/{route}", json=valid.get(route, {}) | body)

    assert response.status_code == 400
    assert response.json()["code"] == "invalid_input"
    assert all(word in response.json()["detail"] for word in words), response.text


@pytest.mark.parametrize(("query", "words"), QUERIES)
def test_a_query_is_refused_as_such(http: httpx.Client, query: str, words: list[str]) -> None:
    response = http.get(f"/{query}")

    assert response.status_code == 422
    assert all(word in response.json()["detail"] for word in words), response.text


def test_a_day_at_the_end_of_time_is_a_day(http: httpx.Client) -> None:
    """Its end used to be beyond what a date can be."""
    for day in ("0001-01-01", "9999-12-31"):
        assert http.get("/audit", params={"day": day}).json() == {"entries": []}


@pytest.mark.parametrize("route", ["create_session", "copy_weights"])
def test_an_idempotency_key_is_not_cut_off(http: httpx.Client, valid: dict[str, dict[str, Any]], route: str) -> None:
    response = http.post(f"/{route}", json=valid.get(route, {}), headers={"X-Idempotency-Key": "k" * 257})

    assert response.status_code == 400
    assert "257 characters, at most 256" in response.json()["detail"]


@pytest.mark.parametrize("route", ["create_session", "asample", "get_info"])
def test_a_body_over_the_limit_is_413_and_says_the_limit(http: httpx.Client, route: str) -> None:
    response = http.post(f"/{route}", content=b'{"a":"' + b"b" * 300_000 + b'"}')

    assert response.status_code == 413
    assert "more than 200000 bytes; send smaller chunks" in response.json()["detail"]
