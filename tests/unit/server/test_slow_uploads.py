"""Attacks with bodies that never end: what is held of them is counted against their tenant, on every kind of route."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from harness.polling import wait_for

if TYPE_CHECKING:
    from conftest import Api, ServeApi

HELD = 120_000
ROUTES = (
    "/api/v1/forward_backward",
    "/api/v1/asample",
    "/api/v1/optim_step",
    "/v1/chat/completions",
    "/v1/completions",
    "/api/native/v1/count_tokens",
    "/api/native/v1/jobs/many",
    "/api/v1/processor/twinkle/create",
)


@pytest.fixture(scope="module")
def narrow(serve_api: ServeApi, make_database_url: Callable[[str], str]) -> Iterator[Api]:
    """A served app in which one tenant may have one body on its way, and all together ten."""
    limits = {"tenant_max_body_bytes": 200_000, "max_body_bytes": 200_000, "max_body_bytes_in_flight": 2_000_000}
    with serve_api(make_database_url("sqlite"), **limits) as served:
        yield served


@contextmanager
def stuck(api: Api, key: str, path: str) -> Iterator[None]:
    """A request whose body stops in the middle, for the length of the block."""
    address = urlsplit(api.url)
    assert address.hostname is not None
    budget = api.state().common.bodies.budget
    before = budget.held_bytes
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=20)
    connection.putrequest("POST", path)
    connection.putheader("Content-Length", str(HELD + 50_000))
    connection.putheader("Authorization", f"Bearer {key}")
    connection.putheader("X-API-Key", key)
    connection.endheaders(b" " * HELD)
    try:
        wait_for(lambda: budget.held_bytes == before + HELD, what="the bytes to be held")
        yield
    finally:
        connection.close()
        wait_for(lambda: budget.held_bytes == before, what="the bytes to be let go")


@pytest.mark.parametrize("path", ROUTES)
def test_slow_uploads_fill_their_tenants_room_and_nobody_elses(narrow: Api, path: str) -> None:
    slow, other = narrow.new_key(), narrow.new_key()
    body = b'"' + b"a" * 100_000 + b'"'

    with stuck(narrow, slow, path), narrow.http(slow) as own, narrow.http(other) as others:
        refused = own.post("/asample", content=body)
        answered = others.post("/asample", content=body)

    assert (refused.status_code, refused.json()["code"]) == (429, "overloaded")
    assert "(yours)" in refused.json()["detail"]
    assert answered.status_code == 400, answered.text


def test_no_tenant_can_take_all_room_there_is_whatever_its_limit(
    serve_api: ServeApi, make_database_url: Callable[[str], str]
) -> None:
    limits = {"tenant_max_body_bytes": 0, "max_body_bytes": 200_000, "max_body_bytes_in_flight": 400_000}
    with serve_api(make_database_url("sqlite"), **limits) as api:
        greedy, other = api.new_key(), api.new_key()
        with stuck(api, greedy, ROUTES[0]), stuck(api, greedy, ROUTES[1]):
            with api.http(greedy) as own:
                refused = own.post("/asample", content=b"a" * 100_000)
            with api.http(other) as others:
                answered = others.post("/asample", content=b"a" * 100_000)

    assert refused.status_code == 429 and "300000 may be" in refused.json()["detail"]
    assert answered.status_code == 400


def test_what_is_dropped_takes_no_room(narrow: Api) -> None:
    budget = narrow.state().common.bodies.budget
    with narrow.http(narrow.new_key()) as client:
        taken = client.post("/telemetry", content=b" " * 150_000)
        refused = client.post("/telemetry", content=b" " * 250_000)

    assert (taken.status_code, refused.status_code) == (200, 413)
    assert budget.held_bytes == 0
