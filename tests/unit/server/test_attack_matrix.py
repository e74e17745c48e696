"""The attack matrix: every route of the OpenAPI document x every kind of caller x another tenant's ids.

What is somebody else's answers like what does not exist, whoever asks; who is nobody is told so before anything is
looked at; and no caller makes an error of ours. A route that is added is attacked without being named here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from harness.attacked_routes import ROUTES, Route, ids_of_nothing, send
from harness.victim import ANSWER_S, Victim
from twinkle.core.settings import Settings
from twinkle.server.app import create_app

_DOCUMENT = create_app(Settings(redis_url="redis://nowhere")).openapi()["paths"]
_VOLATILE = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{16,}|eyJ[\w.-]+|\d+(\.\d+)?")
STRANGERS = {
    "no key": {},
    "an empty key": {"X-API-Key": ""},
    "a word": {"X-API-Key": "nonsense"},
    "an unknown key": {"X-API-Key": "tml-" + "x" * 43, "Authorization": "Bearer tml-" + "x" * 43},
    "a foreign token": {"X-API-Key": "eyJhbGciOiJub25lIn0.eyJzdWIiOiJ0bWw6YXBpa2V5OjEifQ."},
    "an administrator's guess": {"X-Admin-Key": "guessed"},
}
IDS = [str(route) for route in ROUTES]


@pytest.fixture(scope="module")
def stranger(victim: Victim) -> Iterator[httpx.Client]:
    """A client of another tenant, which owns nothing."""
    with httpx.Client(base_url=victim.base_url, timeout=ANSWER_S) as client:
        yield client


@pytest.fixture(scope="module")
def nobodys(victim: Victim) -> dict[str, str]:
    """Ids of the same form as the victim's, of nothing that exists."""
    return ids_of_nothing(victim)


def _security(route: Route) -> list[dict[str, list[str]]]:
    security: list[dict[str, list[str]]] = _DOCUMENT[route.path][route.method.lower()].get("security", [])
    return security


def _seen(response: httpx.Response, ids: dict[str, str]) -> tuple[int, str]:
    """What an answer tells, without what was asked for and what differs from one answer to the next."""
    text = response.text
    for value in sorted(ids.values(), key=len, reverse=True):
        text = text.replace(value, "ID")
    return response.status_code, _VOLATILE.sub("#", text)


# They are refused before anything is read but the key: the other database has its turn in soak.
@pytest.mark.parametrize("victim", [pytest.param("sqlite", marks=pytest.mark.soak), "postgres"], indirect=True)
@pytest.mark.parametrize("route", ROUTES, ids=IDS)
def test_who_is_nobody_learns_nothing_on_any_route(stranger: httpx.Client, victim: Victim, route: Route) -> None:
    security = _security(route)
    for kind, headers in STRANGERS.items():
        stranger.headers = httpx.Headers(headers)
        answer = send(stranger, route, victim.ids, victim, None)
        if not security:
            assert answer.status_code not in (401, 500), kind
        elif security == [{"adminKey": []}]:
            assert answer.status_code in (401, 404), (kind, answer.text)
        else:
            assert answer.status_code == 401, (kind, answer.text)
        if answer.status_code == 401:
            assert victim.ids["$session"] not in answer.text
    stranger.headers = httpx.Headers()


@pytest.mark.parametrize("route", ROUTES, ids=IDS)
def test_what_is_another_tenants_answers_like_what_is_not_there(
    stranger: httpx.Client, victim: Victim, nobodys: dict[str, str], strange_key: str, route: Route
) -> None:
    theirs = send(stranger, route, victim.ids, victim, strange_key)
    nothing = send(stranger, route, nobodys, victim, strange_key)

    assert theirs.status_code < 500, theirs.text
    assert _seen(theirs, victim.ids) == _seen(nothing, nobodys)


@pytest.fixture(scope="module")
def strange_key(victim: Victim) -> str:
    """The key of a tenant that owns nothing; made by who made the victim's."""
    return victim.new_key()


def test_the_victim_still_owns_everything(victim: Victim) -> None:
    shown = victim.client.get(f"/api/v1/sessions/{victim.ids['$session']}")

    assert shown.status_code == 200
    assert victim.ids["$run"] in shown.json()["training_run_ids"]
