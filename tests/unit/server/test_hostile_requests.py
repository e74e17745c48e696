"""Whatever is sent to whichever route: a clear refusal or an answer, soon, and never an error of ours.

The routes are those of the app's own OpenAPI document. What is sent is a valid body with changes that its schema knows
nothing of: broken bytes, halves of surrogate pairs, NUL, depth, huge numbers, frames that open to too much.
"""

from __future__ import annotations

import socket
import time
import urllib.parse
from dataclasses import dataclass

import httpx
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.calls import passes
from harness.fake_worker import BASE_MODEL
from harness.hostile import NUMBERS, TEXTS, Json, hostile_json, mutated
from harness.victim import ANSWER_S, REVOKE, Victim
from twinkle.core.settings import Settings
from twinkle.server.app import create_app
from twinkle.server.errors import JSON

CHAT: Json = {"model": BASE_MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
# Refused whatever else is: a sample would be waited for, and the worker rests.
SAMPLE_ROW: Json = {"input_ids": [1, 5000], "position_ids": [0, 1], "user_data": [["a", 1]], "labels": [2, -100]}
SAMPLE: dict[str, Json] = {
    "inputs": [
        SAMPLE_ROW,
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}], "images": ["data:image/png;base64,AA=="]},
                {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            ],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "images": ["data:image/png;base64,AA=="],
        },
    ],
    "sampling_params": {"max_tokens": 4, "temperature": 0.5, "stop": ["a"], "logprobs": 2, "prompt_logprobs": 1},
    "num_samples": 2,
    "adapter_name": "a",
    "adapter_uri": "$path",
}
BODIES: dict[str, Json] = {
    "/api/v1/optim_step": {"model_id": "$run", "seq_id": 5, "adam_params": {"learning_rate": 1e-4, "beta1": 0.9}},
    "/api/v1/save_weights": {
        "model_id": "$run",
        "seq_id": 6,
        "path": "a",
        "ttl_seconds": 9,
        "user_metadata": {"a": [1]},
    },
    "/api/v1/save_weights_for_sampler": {"model_id": "$run", "seq_id": 7, "sampling_session_seq_id": 3},
    "/api/v1/save_weights_external": {"model_id": "$run", "seq_id": 8, "path": "a", "age_encryption_recipients": ["a"]},
    "/api/v1/load_weights": {"model_id": "$run", "seq_id": 9, "path": "$path", "optimizer": True},
    "/api/v1/unload_model": {"model_id": "$run"},
    "/api/v1/retrieve_future": {"request_id": "$request", "allow_metadata_only": True},
    "/api/v1/retrieve_futures": {
        "target": {"sampling_session_id": "$sampler", "cloned_sampler_id": 1, "type": "sampling_session"},
        "prev_cursor": 1,
        "timeout": 0.01,
        "retrieved_request_ids": ["$request"],
    },
    "/api/v1/cancel_future": {"request_id": "$request"},
    "/api/v1/create_sampling_session": {
        "session_id": "$session",
        "sampling_session_seq_id": 2,
        "base_model": BASE_MODEL,
    },
    "/api/v1/join_sampling_session": {"sampling_session_id": "$sampler"},
    "/api/v1/asample": {
        "sampling_session_id": "$sampler",
        "seq_id": 1,
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 4, "seed": 1, "stop": [3], "temperature": 0.5, "top_k": 4, "top_p": 0.5},
        "topk_sample_logprobs": 1,
        "prompt_logprobs": True,
        "prompt_logprobs_last_n": 1,
        "target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [2, 1]},
    },
    "/api/v1/client/config": {"sdk_version": "0.38.0"},
    "/api/v1/client/dynamic_config": {"sdk_version": "0.38.0"},
    "/api/v1/telemetry": {"events": [{"event": "SESSION_START"}], "session_id": "$session"},
    "/api/v1/create_session": {"tags": ["a"], "user_metadata": {"a": "b"}, "project_id": "p", "display_name": "d"},
    "/api/v1/session_heartbeat": {"session_id": "$session"},
    "/api/v1/sessions/{session_id}/finish": {"reason": {"type": "success"}, "detail": "done"},
    "/api/v1/sessions/{session_id}/project": {"project_id": "p"},
    "/api/v1/create_model": {
        "session_id": "$session",
        "model_seq_id": 1,
        "base_model": BASE_MODEL,
        "lora_config": {"rank": 4, "seed": 1, "train_mlp": True},
        "optimizer_config": {"type": "adamw"},
    },
    "/api/v1/create_custom_loss": {
        "session_id": "$session",
        "custom_loss_seq_id": 1,
        "name": "double",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {
            "format": 1,
            "nodes": [
                {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}},
                {"op": "call_function", "name": "mul", "target": "operator.mul", "args": [{"ref": "logprobs"}, 2.0]},
                {"op": "call_method", "name": "sum_1", "target": "sum", "args": [{"ref": "mul"}], "kwargs": {"dim": 0}},
                {
                    "op": "output",
                    "name": "output",
                    "target": "output",
                    "args": [{"tuple": [{"ref": "sum_1"}, {"dict": {"custom/a:sum": {"ref": "sum_1"}}}]}],
                },
            ],
        },
    },
    "/api/v1/get_info": {"model_id": "$run"},
    "/api/v1/weights_info": {"tinker_path": "$path"},
    "/api/v1/training_runs/{run_id}/checkpoints/{segment}/{name}/ttl": {"ttl_seconds": 1000},
    "/api/v1/copy_weights": {"source_path": "$path", "destination_project_id": "p", "ttl_seconds": 100},
    "/api/v1/sessions/search": {
        "session_id": "$session",
        "display_name": "d",
        "user_metadata": {"a": "b"},
        "project_ids": ["p"],
        "owner": {"type": "own"},
        "statuses": [{"type": "active"}],
        "limit": 5,
        "cursor": {"last_created_at": "2026-01-01T00:00:00Z", "last_session_id": "$session"},
    },
    "/api/native/v1/futures/collect": {"request_ids": ["$request"], "timeout_s": 1},
    "/api/native/v1/runs/{run_id}/rewind": {"step": 1},
    "/api/native/v1/runs/{run_id}/fork": {"operation": 1, "session_id": "$session", "model_seq_id": 4},
    "/api/native/v1/jobs": {"kind": "ops", "spec": {"model": "$model", "data": "file-1"}, "after": [], "priority": 3},
    "/api/native/v1/count_tokens": {"endpoint": "/v1/completions", "requests": [{"model": "$model", "prompt": [1]}]},
    "/api/native/v1/jobs/many": {
        "jobs": [{"kind": "ops", "spec": {"model": "$model", "data": "file-1"}, "name": "a", "metadata": {"a": "b"}}]
    },
    "/api/native/v1/access_tokens": {"path": "$path", "name": "a", "ttl_seconds": 60},
    "/api/native/v1/uploads": {"filename": "a.jsonl", "size_bytes": 10, "sha256": "0" * 64, "expires_after_s": 3600},
    "/v1/uploads": {
        "bytes": 10,
        "filename": "a.jsonl",
        "mime_type": "text/jsonl",
        "purpose": "batch",
        "expires_after": {"anchor": "created_at", "seconds": 3600},
    },
    "/v1/uploads/{upload_id}/complete": {"part_ids": ["part_1"], "md5": "0" * 32},
    "/v1/batches": {
        "input_file_id": "file-1",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
        "metadata": {"a": "b"},
        "output_expires_after": {"anchor": "created_at", "seconds": 3600},
    },
    "/v1/fine_tuning/jobs": {
        "model": BASE_MODEL,
        "training_file": "file-1",
        "validation_file": "file-2",
        "suffix": "mine",
        "seed": 1,
        "metadata": {"a": "b"},
        "method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.1, "n_epochs": "auto", "batch_size": 2}}},
    },
    "/v1/fine_tuning/alpha/graders/validate": {
        "grader": {
            "type": "multi",
            "name": "both",
            "graders": {
                "same": {
                    "type": "string_check",
                    "name": "same",
                    "operation": "eq",
                    "input": "{{sample.output_text}}",
                    "reference": "{{item.answer}}",
                },
            },
            "calculate_output": "0.5 * same",
        },
    },
    "/v1/fine_tuning/alpha/graders/run": {
        "grader": {
            "type": "text_similarity",
            "name": "like",
            "evaluation_metric": "rouge_l",
            "input": "{{sample.output_text}}",
            "reference": "{{item.answer}}",
        },
        "item": {"answer": "four"},
        "model_sample": "four",
    },
    "/v1/chat/completions": CHAT,
    "/api/v1/chat/completions": CHAT,
    "/api/v1/sampler/{base_model}/twinkle/create": {},
    "/api/v1/sampler/{base_model}/twinkle/set_template": {
        "template_cls": "Template",
        "adapter_name": "a",
        "model_id": "$model",
        "max_length": 100,
        "default_system": "be brief",
        "color": "red",
    },
    "/api/v1/sampler/{base_model}/twinkle/add_adapter_to_sampler": {"adapter_name": "a", "config": {"r": 4}},
    "/api/v1/sampler/{base_model}/twinkle/apply_patch": {"patch_cls": "NoopPatch", "adapter_name": "a"},
    "/api/v1/sampler/{base_model}/twinkle/sample": SAMPLE,
    "/api/v1/sampler/{base_model}/twinkle/sample_stream": {**SAMPLE, "inputs": [SAMPLE_ROW]},
    "/api/v1/twinkle/create_session": {"metadata": {"a": "b"}},
    "/api/v1/twinkle/session_heartbeat": {"session_id": "$session"},
    "/api/v1/twinkle/weights_info": {"twinkle_path": "$path"},
    "/api/v1/model/{base_model}/twinkle/create": {"ignored": 1},
    "/api/v1/model/{base_model}/twinkle/add_adapter_to_model": {
        "adapter_name": "b",
        "config": {
            "peft_type": "LORA",
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj"],
            "rank_pattern": {"q": 2},
        },
        "gradient_accumulation_steps": 2,
        "seed": 1,
        "save_dir": "a",
    },
    "/api/v1/model/{base_model}/twinkle/save": {
        "adapter_name": "$adapter",
        "name": "a",
        "save_optimizer": True,
        "is_sampler": False,
        "consumed_train_samples": 3,
        "ttl_s": 60,
    },
    "/api/v1/model/{base_model}/twinkle/load": {"adapter_name": "$adapter", "name": "$path", "load_optimizer": True},
    "/api/v1/model/{base_model}/twinkle/resume_from_checkpoint": {
        "adapter_name": "$adapter",
        "name": "a",
        "resume_only_model": True,
    },
    "/api/v1/model/{base_model}/twinkle/upload_to_hub": {
        "checkpoint_dir": {"twinkle_path": "$path", "checkpoint_dir": "$path"},
        "hub_model_id": "hf://me/model",
        "hub_token": "t",
        "private": True,
    },
    "/api/v1/model/{base_model}/twinkle/{method}": {
        "adapter_name": "$adapter",
        "inputs": [{"input_ids": [1, 2], "labels": [2, -100]}, {"messages": [{"role": "user", "content": "hi"}]}],
        "advantages": [0.5, 1.0],
        "disable_lora": True,
    },
    "/api/v1/processor/twinkle/create": {
        "processor_type": "dataset",
        "class_type": "Dataset",
        "dataset_meta": {
            "dataset_id": "ms://org/name",
            "data_slice": {"_slice_type_": "range", "start": 0, "stop": 6, "step": 1},
            "data": [{"a": 1}],
        },
    },
    "/api/v1/processor/twinkle/call": {
        "processor_id": "$processor",
        "function": "map",
        "preprocess_func": "CountdownProcessor",
        "init_args": {"a": 1},
        "dataset_meta": '{"dataset_id": "org/name"}',
    },
    "/v1/completions": {"model": BASE_MODEL, "prompt": "hi", "max_tokens": 4, "n": 2, "stop": ["a"]},
}
"""A valid body of every route that takes JSON; `$name` stands for an id of the tenant that sends it."""

IGNORING = {"/api/v1/client/config", "/api/v1/client/dynamic_config", "/api/v1/telemetry"}
"""They look at no body."""
# Nobody waits for a worker that rests; the adapters of this client have a session.
ASIDE = {"prefer": "respond-async", "x-request-id": "hostile"}


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    path_names: tuple[str, ...] = ()
    query_names: tuple[str, ...] = ()
    body_types: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def _routes() -> list[Route]:
    app = create_app(Settings(redis_url="redis://nowhere"))
    return [
        Route(
            method.upper(),
            path,
            tuple(one["name"] for one in call.get("parameters", ()) if one["in"] == "path"),
            tuple(one["name"] for one in call.get("parameters", ()) if one["in"] == "query"),
            frozenset(call.get("requestBody", {}).get("content", ())),
        )
        for path, calls in app.openapi()["paths"].items()
        for method, call in calls.items()
    ]


ROUTES = [route for route in _routes() if (route.method, route.path) != REVOKE]


def _draw_url(data: st.DataObject, route: Route, victim: Victim) -> str:
    known = {
        "run_id": "$run",
        "session_id": "$session",
        "sampler_id": "$sampler",
        "request_id": "$request",
        "base_model": "$model",
        "method": "$method",
    }
    path = route.path
    for name in route.path_names:
        texts = TEXTS | NUMBERS.map(str)
        if name in known:
            texts |= st.just(victim.ids[known[name]])
        text = data.draw(texts, label=name).encode("utf-8", "surrogatepass")
        path = path.replace(f"{{{name}}}", urllib.parse.quote_from_bytes(text, safe=""))
    query = {name: data.draw(TEXTS | NUMBERS.map(str), label=name) for name in route.query_names}
    encoded = urllib.parse.urlencode({name: text.encode("utf-8", "surrogatepass") for name, text in query.items()})
    return f"{path}?{encoded}" if query else path


def _draw_body(data: st.DataObject, route: Route, victim: Victim) -> bytes | None:
    if not route.body_types:
        return None
    if JSON not in route.body_types:
        valid = passes(victim.ids["$run"], data.draw(st.integers(0, 10)))
        return data.draw(mutated(valid) | st.binary(max_size=100))
    return data.draw(hostile_json(victim.filled(BODIES[route.path])) | st.binary(max_size=20))


def attack(victim: Victim, route: Route, data: st.DataObject) -> None:
    url, body = _draw_url(data, route, victim), _draw_body(data, route, victim)
    headers = {"content-type": next(iter(route.body_types), JSON)}
    if body is not None and data.draw(st.integers(0, 5)) == 0:
        body = data.draw(st.sampled_from([body, zstandard.compress(body), zstandard.compress(body)[:-1]]))
        headers["content-encoding"] = data.draw(st.sampled_from(["zstd", "gzip", "identity", "ZSTD", "zstd, zstd"]))
    headers["x-idempotency-key"] = data.draw(st.text("aé\t", max_size=5) | st.just("k" * 2000)).strip()

    _send(victim, route.method, url, body, headers)


def send(victim: Victim, route: Route, raw: bytes, headers: dict[str, str]) -> httpx.Response:
    path = route.path
    for name in route.path_names:
        path = path.replace(f"{{{name}}}", str(victim.aimed("a", name)))
    body = raw.replace(b"$run", victim.ids["$run"].encode())
    return _send(victim, route.method, path, body, {"content-type": next(iter(route.body_types), JSON), **headers})


def _send(victim: Victim, method: str, url: str, body: bytes | None, headers: dict[str, str]) -> httpx.Response:
    started = time.monotonic()
    sent = {name: value.encode("latin-1") for name, value in (ASIDE | headers).items()}
    response = victim.client.request(method, url, content=body, headers=sent)
    assert time.monotonic() - started < ANSWER_S
    _check(response, victim)
    return response


def _check(response: httpx.Response, victim: Victim) -> None:
    assert response.status_code < 500 and response.status_code != 409, response.text
    if response.status_code >= 400 and response.request.method != "HEAD":
        refusal = response.json()
        assert int(response.headers["content-length"]) > 2
        if response.status_code != 408:
            assert refusal.get("detail") or refusal["error"]["message"]
        assert "Traceback" not in response.text and victim.home not in response.text


IDS = [str(route) for route in ROUTES]
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.mark.parametrize("route", ROUTES, ids=IDS)
@settings(max_examples=10, deadline=None, derandomize=True, database=None, suppress_health_check=CHECKS)
@given(data=st.data())
def test_no_request_gets_anything_but_an_answer_or_a_refusal(victim: Victim, route: Route, data: st.DataObject) -> None:
    attack(victim, route, data)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("route", ROUTES, ids=IDS)
@settings(max_examples=300, deadline=None, database=None, suppress_health_check=CHECKS)
@given(data=st.data())
def test_no_request_of_very_many_does(victim: Victim, route: Route, data: st.DataObject) -> None:
    attack(victim, route, data)


@pytest.mark.parametrize(
    "url",
    ["/api/v1/sessions/a%00b", "/api/v1/samplers/%00", "/api/native/v1/runs/a%00", "/api/v1/audit?event_type=%00"],
)
def test_nul_in_a_path_or_a_query_is_refused_whatever_the_database_makes_of_it(victim: Victim, url: str) -> None:
    response = victim.client.get(url)

    assert response.status_code == 400
    assert "NUL" in response.json()["detail"]


DEEP = {
    "lists": b"[" * 200_000,
    "objects": b'{"a":' * 100_000,
    "a closed list": b'{"user_metadata":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
    "a whole number": b'{"model_id":"$run","seq_id":' + b"9" * 100_000 + b"}",
    "an exponent": b'{"model_id":"$run","seq_id":1e999999999,"timeout":-1e999999999}',
    "a key": b'{"' + b"k" * 500_000 + b'":1}',
    "many keys": b"{" + b",".join(b'"%d":1' % number for number in range(50_000)) + b"}",
    "a number for everything": b"7",
    "nothing": b"",
    "not UTF-8": b'{"session_id":"\xff\xfe"}',
    "UTF-16": '{"session_id":"a"}'.encode("utf-16"),
    "a BOM": b"\xef\xbb\xbf{}",
}


@pytest.mark.parametrize("raw", DEEP.values(), ids=DEEP)
def test_what_no_parser_likes_is_refused_at_once_on_every_route(victim: Victim, raw: bytes) -> None:
    for route in ROUTES:
        if route.body_types:
            send(victim, route, raw, {})


@pytest.mark.parametrize("encoding", ["zstd", "gzip", "zstd, zstd", "identity"])
def test_a_bomb_opens_on_no_route(victim: Victim, encoding: str) -> None:
    bomb = zstandard.compress(bytes(200 << 20))
    for route in ROUTES:
        if route.body_types:
            response = send(victim, route, bomb, {"content-encoding": encoding})
            assert response.status_code >= 400 or route.path in IGNORING


LENGTHS = {
    "shorter": b"Content-Length: 1\r\n\r\n{}",
    "longer": b"Content-Length: 9\r\n\r\n{}",
    "negative": b"Content-Length: -1\r\n\r\n{}",
    "a word": b"Content-Length: two\r\n\r\n{}",
    "huge": b"Content-Length: 99999999999999999999999\r\n\r\n{}",
    "twice": b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "with chunks": b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "a broken chunk": b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "an endless chunk": b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{}",
}


@pytest.mark.parametrize("rest", LENGTHS.values(), ids=LENGTHS)
def test_a_wrong_length_harms_nobody_else(victim: Victim, rest: bytes) -> None:
    url = httpx.URL(victim.base_url)
    head = f"POST /api/v1/create_session HTTP/1.1\r\nHost: {url.host}\r\nX-API-Key: {victim.key}\r\n".encode()
    with socket.create_connection((url.host, url.port or 80), timeout=ANSWER_S) as connection:
        connection.sendall(head + rest)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))

    assert not answer.startswith(b"HTTP/1.1 5")
    assert victim.client.get("/api/v1/healthz").status_code == 200


def test_every_route_that_takes_a_body_is_attacked_with_one() -> None:
    assert {route.path for route in ROUTES if JSON in route.body_types} == set(BODIES)


@pytest.mark.parametrize("template", BODIES)
def test_the_valid_bodies_of_this_attack_are_understood(victim: Victim, template: str) -> None:
    """Else the attack would never come past the first refusal."""
    path = template
    names = {"segment": "weights", "name": "kept", "base_model": "$model", "method": "$method"}
    for name, own in {"run_id": "$run", "session_id": "$session", **names}.items():
        path = path.replace(f"{{{name}}}", victim.ids.get(own, own))

    method = next(route.method for route in ROUTES if route.path == template and route.body_types)
    response = victim.client.request(method, path, json=victim.filled(BODIES[template]), headers=ASIDE)

    # What was attacked before may have finished the session.
    assert response.status_code in (200, 202, 204, 400, 404, 408, 410), response.text
