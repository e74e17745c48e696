"""Whatever is sent to whichever route: a clear refusal or an answer, soon, and never an error of ours.

The routes are those of the app's own OpenAPI document. It has no schemas of bodies, which are read by hand and within
bounds, so what is sent is a valid body with hostile changes.
"""

from __future__ import annotations

import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import httpx
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.calls import PROTOBUF, passes, retrieve
from harness.fake_worker import BASE_MODEL
from harness.hostile import NUMBERS, TEXTS, Json, hostile_json, mutated
from twinkle.core.settings import Settings
from twinkle.server.app import create_app

if TYPE_CHECKING:
    from conftest import ServeApi

ANSWER_S = 5.0
# It would end the key with which everything else is sent.
REVOKE = ("DELETE", "/api/v1/auth/apikey/me")
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
    "/api/v1/get_info": {"model_id": "$run"},
    "/api/v1/weights_info": {"tinker_path": "$path"},
    "/api/v1/training_runs/{run_id}/checkpoints/{segment}/{name}/publish": {},
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
    "/v1/chat/completions": {"model": BASE_MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/completions": {"model": BASE_MODEL, "prompt": "hi", "max_tokens": 4, "n": 2, "stop": ["a"]},
}
"""A valid body of every route that reads JSON; `$name` stands for an id of the tenant that sends it."""


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    path_names: tuple[str, ...] = ()
    query_names: tuple[str, ...] = ()

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
        )
        for path, calls in app.openapi()["paths"].items()
        for method, call in calls.items()
    ]


ROUTES = [route for route in _routes() if (route.method, route.path) != REVOKE]


@dataclass(frozen=True)
class Victim:
    """A served app whose worker rests, and a tenant that owns one of everything."""

    client: httpx.Client
    home: str
    ids: dict[str, str] = field(default_factory=dict)

    def filled(self, template: Json) -> Json:
        if isinstance(template, dict):
            return {key: self.filled(value) for key, value in template.items()}
        if isinstance(template, list):
            return [self.filled(value) for value in template]
        return self.ids.get(template, template) if isinstance(template, str) else template


def _own_everything(client: httpx.Client) -> dict[str, str]:
    session = client.post("/api/v1/create_session", json={}).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 8}}
    run = client.post("/api/v1/create_model", json=body).json()["model_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    sampler = client.post("/api/v1/create_sampling_session", json=body).json()["sampling_session_id"]
    saved = client.post("/api/v1/save_weights", json={"model_id": run, "seq_id": 1, "path": "kept"}).json()[
        "request_id"
    ]
    tinker = httpx.Client(base_url=f"{client.base_url}/api/v1", headers=client.headers)
    with tinker:
        path = retrieve(tinker, saved).json()["path"]
    return {"$session": session, "$run": run, "$sampler": sampler, "$request": saved, "$path": path}


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def victim(
    request: pytest.FixtureRequest, serve_api: ServeApi, make_database_url: Callable[[str], str]
) -> Iterator[Victim]:
    url = make_database_url(request.param)
    with serve_api(url, long_poll_s=0.01, max_outstanding_samples=1_000_000) as api:
        api.worker.start()
        with httpx.Client(base_url=api.url, headers={"X-API-Key": api.new_key()}, timeout=ANSWER_S) as client:
            ids = _own_everything(client)
            with api.worker.paused():
                yield Victim(client, str(api.settings.home), ids)
        api.worker.stop()


def _draw_url(data: st.DataObject, route: Route, victim: Victim) -> str:
    known = {"run_id": "$run", "session_id": "$session", "sampler_id": "$sampler", "request_id": "$request"}
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
    if route.method not in ("POST", "PUT"):
        return None
    if route.path.endswith("/forward_backward"):
        valid = passes(victim.ids["$run"], data.draw(st.integers(0, 10)))
        return data.draw(mutated(valid) | st.binary(max_size=100))
    return data.draw(hostile_json(victim.filled(BODIES[route.path])) | st.binary(max_size=20))


def attack(victim: Victim, route: Route, data: st.DataObject) -> None:
    url, body = _draw_url(data, route, victim), _draw_body(data, route, victim)
    headers = dict(PROTOBUF) if route.path.endswith("/forward_backward") else {"content-type": "application/json"}
    if body is not None and data.draw(st.integers(0, 5)) == 0:
        body = data.draw(st.sampled_from([body, zstandard.compress(body), zstandard.compress(body)[:-1]]))
        headers["content-encoding"] = data.draw(st.sampled_from(["zstd", "gzip", "identity", "ZSTD", "zstd, zstd"]))
    headers["x-idempotency-key"] = data.draw(st.text("aé\t", max_size=5) | st.just("k" * 2000)).strip()

    started = time.monotonic()
    sent = {name: value.encode("latin-1") for name, value in headers.items()}
    response = victim.client.request(route.method, url, content=body, headers=sent)
    assert time.monotonic() - started < ANSWER_S
    _check(response, victim)


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


def test_every_route_that_takes_a_body_is_attacked_with_one() -> None:
    taking = {route.path for route in ROUTES if route.method in ("POST", "PUT")}

    assert taking == {*BODIES, "/api/v1/forward_backward"}


@pytest.mark.parametrize("template", BODIES)
def test_the_valid_bodies_of_this_attack_are_understood(victim: Victim, template: str) -> None:
    """Else the attack would never come past the first refusal."""
    path = template
    for name, own in (("run_id", "$run"), ("session_id", "$session"), ("segment", "weights"), ("name", "kept")):
        path = path.replace(f"{{{name}}}", victim.ids.get(own, own))

    method = next(route.method for route in ROUTES if route.path == template and route.method in ("POST", "PUT"))
    response = victim.client.request(method, path, json=victim.filled(BODIES[template]))

    assert response.status_code in (200, 204, 400, 404, 408), response.text
