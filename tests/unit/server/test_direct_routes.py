"""The way past the framework answers like the declared one: the same status, headers and bytes, whatever is sent.

A request with a query goes the declared way, since no such route has one: each is sent without and with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import httpx
import pytest
import zstandard
from fastapi import FastAPI
from fastapi.testclient import TestClient

from harness.calls import optim_step, passes, retrieve
from harness.fake_worker import BASE_MODEL
from twinkle.core import errors
from twinkle.server.app import create_app
from twinkle.server.connections.direct import DirectRoutes
from twinkle.server.errors import install_error_answers
from twinkle.server.openapi import Api as App
from twinkle.server.tinker.routes import direct

if TYPE_CHECKING:
    from conftest import Api, ServeApi

HOT = {
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "load_weights",
    "retrieve_future",
    "retrieve_futures",
    "asample",
    "session_heartbeat",
}
UNTIMELY = {"date"}
JSON = "application/json"


@dataclass(frozen=True)
class Sent:
    """A request to one of the routes."""

    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    method: str = "POST"


@dataclass(frozen=True)
class Seen:
    """What matters of an answer."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


def sent_json(path: str, /, **body: object) -> Sent:
    return Sent(path, json.dumps(body).encode(), {"content-type": JSON})


def good_ones(model_id: str, session_id: str, sampler_id: str) -> list[Sent]:
    prompt = {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]}
    sample = {"sampling_session_id": sampler_id, "seq_id": 0, "num_samples": 2, "prompt": prompt}
    return [
        Sent("forward_backward", passes(model_id, 1)),
        Sent("forward_backward", zstandard.compress(passes(model_id, 2)), {"content-encoding": "zstd"}),
        sent_json("optim_step", **optim_step(model_id, 3)),
        sent_json("save_weights", model_id=model_id, seq_id=4, path="a"),
        sent_json("save_weights_for_sampler", model_id=model_id, seq_id=5, path="a"),
        sent_json("asample", **sample, sampling_params={"max_tokens": 3, "seed": 1}),
        sent_json("session_heartbeat", session_id=session_id),
        sent_json("get_info", model_id=model_id),
        sent_json("create_model", session_id=session_id, model_seq_id=1, base_model=BASE_MODEL),
        Sent("client/config", b""),
        Sent("telemetry", b"anything"),
        Sent("get_server_capabilities", b"", method="GET"),
    ]


def bad_ones(model_id: str) -> list[Sent]:
    """Bodies, media types, encodings, methods and paths that are wrong, on every hot route."""
    nonsense = [b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"model_id": "\\u0000"}', b"[" * 5000, b"0" * 300_000]
    return [
        *(Sent(path, body) for path in sorted(HOT) for body in nonsense),
        *(Sent(path, b"{}", {"content-encoding": encoding}) for path in sorted(HOT) for encoding in ("gzip", "zstd")),
        *(Sent(path, b"{}", method=method) for path in sorted(HOT) for method in ("GET", "PUT", "HEAD", "OPTIONS")),
        *(Sent(f"{path}{end}", b"{}") for path in sorted(HOT) for end in ("/", "x", "/%00", "%2F", "//")),
        *(Sent(path, b"{}", {"x-api-key": key}) for path in sorted(HOT) for key in ("", "x", "tml-no", "eyJ.a.b")),
        Sent("forward_backward", passes(model_id, 1, length=50_000)),
        sent_json("optim_step", model_id=model_id, seq_id=1, adam_params={"learning_rate": "x"}),
        sent_json("optim_step", **optim_step("nobody:train:0", 1)),
        sent_json("optim_step", **optim_step(model_id, 2_000_000)),
        sent_json("retrieve_future", request_id="nobody"),
        Sent("retrieve_future", b'{"request_id": "nobody"}', {"x-tinker-request-type": "Sample"}),
        sent_json("session_heartbeat", session_id="nobody"),
        sent_json("asample", sampling_session_id="nobody", seq_id=0, num_samples=2000),
        sent_json("get_info", model_id="nobody"),
    ]


def ask(http: httpx.Client, sent: Sent, *, query: str) -> Seen:
    answer = http.request(sent.method, f"/{sent.path}{query}", content=sent.body, headers=sent.headers)
    headers = tuple(sorted((name, value) for name, value in answer.headers.items() if name not in UNTIMELY))
    return Seen(answer.status_code, headers, answer.content)


def both(http: httpx.Client, sent: Sent) -> tuple[Seen, Seen]:
    return ask(http, sent, query=""), ask(http, sent, query="?declared")


@pytest.fixture
def sampler_id(http: httpx.Client, session_id: str) -> str:
    body = {"session_id": session_id, "sampling_session_seq_id": 9, "base_model": BASE_MODEL}
    return str(http.post("/create_sampling_session", json=body).json()["sampling_session_id"])


def test_what_is_asked_by_the_thousand_has_a_direct_way() -> None:
    assert {f"/api/v1/{path}" for path in HOT} <= direct.paths


def test_good_requests_and_their_outcomes_are_answered_alike(
    http: httpx.Client, model_id: str, session_id: str, sampler_id: str
) -> None:
    for sent in good_ones(model_id, session_id, sampler_id):
        direct_way, declared = both(http, sent)
        assert direct_way == declared, sent.path
        assert direct_way.status == 200, (sent.path, direct_way.body)
        request_id = json.loads(direct_way.body).get("request_id")
        if request_id is not None:
            retrieve(http, request_id)
            outcomes = both(http, sent_json("retrieve_future", request_id=request_id))
            assert outcomes[0] == outcomes[1]
            assert outcomes[0].status == 200


def test_bad_and_hostile_requests_are_refused_alike(http: httpx.Client, model_id: str) -> None:
    statuses = set()
    for sent in bad_ones(model_id):
        direct_way, declared = both(http, sent)
        assert direct_way == declared, (sent.method, sent.path, sent.body[:60], sent.headers)
        statuses.add(direct_way.status)

    assert {400, 401, 404, 405, 410, 413} <= statuses


def test_a_poll_that_is_not_over_answers_alike(api: Api, http: httpx.Client, model_id: str) -> None:
    with api.worker.paused():
        ticket = http.post("/optim_step", json=optim_step(model_id, 1)).json()
        direct_way, declared = both(http, sent_json("retrieve_future", request_id=ticket["request_id"]))

    assert direct_way == declared
    assert direct_way.status == 408


def test_a_query_with_nul_is_refused_as_everywhere(http: httpx.Client) -> None:
    assert http.post("/optim_step?a=%00", content=b"{}").status_code == 400


def test_what_is_too_much_at_once_is_refused_alike(
    serve_api: ServeApi, make_database_url: Callable[[str], str]
) -> None:
    with serve_api(make_database_url("sqlite"), max_pending_submissions=1) as api:
        api.worker.start()
        api.state().queue.submitter.take_place()
        with api.http(api.new_key()) as http:
            answers = both(http, sent_json("optim_step", **optim_step("nobody:train:0", 1)))
        api.worker.stop()

    assert answers[0] == answers[1]
    assert answers[0].status == 429
    assert "retry-after" in dict(answers[0].headers)


@contextmanager
def failing(error: Exception) -> Iterator[TestClient]:
    """A route that fails, both ways."""
    app = App(openapi_url=None)
    install_error_answers(app)

    @app.router.post("/fail")
    async def fail() -> None:
        raise error

    app.direct = DirectRoutes("", [app.router])
    yield TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize(
    "error",
    [
        errors.Overloaded("full"),
        errors.MeshUnavailable("away"),
        errors.StorageUnavailable("cannot open /srv/secret"),
        errors.InvalidToken("old"),
        errors.Forbidden("no"),
        errors.TransientError("later"),
    ],
)
def test_errors_of_every_status_are_answered_alike(error: errors.TwinkleError) -> None:
    with failing(error) as client:
        direct_way, declared = ask(client, Sent("fail", b""), query=""), ask(client, Sent("fail", b""), query="?x")

    assert direct_way == declared
    assert direct_way.status >= 400
    assert b"secret" not in direct_way.body


def test_a_crash_is_answered_with_an_id_and_goes_on_to_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    with failing(RuntimeError("the password is hush")) as client:
        answers = [client.post(f"/fail{query}") for query in ("", "?x")]
        with pytest.raises(RuntimeError):
            TestClient(client.app).post("/fail")

    assert [answer.status_code for answer in answers] == [500, 500]
    assert "hush" not in "".join(answer.text for answer in answers)
    assert {tuple(answer.json()) for answer in answers} == {("detail", "code")}


def test_the_document_does_not_know_of_it(api: Api) -> None:
    assert isinstance(api.app, FastAPI)
    with_direct, without = create_app(api.settings), create_app(api.settings)
    assert isinstance(without, App)
    without.direct = None

    assert with_direct.openapi() == without.openapi()
