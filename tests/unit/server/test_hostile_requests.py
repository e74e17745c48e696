"""Whatever is sent to whichever route: a clear refusal or an answer, soon, and never an error of ours.

The routes are those of the app's own OpenAPI document. What is sent is a valid body with changes that its schema knows
nothing of: broken bytes, halves of surrogate pairs, NUL, depth, huge numbers, frames that open to too much.
"""

from __future__ import annotations

import socket
import time
import urllib.parse

import httpx
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.attacked_routes import ASIDE, BODIES, IGNORING, ROUTES, Route
from harness.calls import passes
from harness.hostile import NUMBERS, TEXTS, hostile_json, mutated
from harness.victim import ANSWER_S, Victim
from twinkle.server.errors import JSON


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
    if response.request.url.path.endswith("/readyz") and response.status_code == 503:
        # The answer about a mesh that is not there.
        assert response.json()["status"] == "waiting" and response.json()["reasons"]
        return
    assert response.status_code < 500 and response.status_code != 409, response.text
    if response.status_code >= 400 and response.request.method != "HEAD":
        refusal = response.json()
        assert int(response.headers["content-length"]) > 2
        if response.status_code != 408:
            assert refusal.get("detail") or refusal["error"]["message"]
        assert "Traceback" not in response.text and victim.home not in response.text


IDS = [str(route) for route in ROUTES]
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]


# The database that refuses more; the other one has its turn in soak.
@pytest.mark.parametrize("victim", [pytest.param("sqlite", marks=pytest.mark.soak), "postgres"], indirect=True)
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
