"""Whom a call in process acts for, and that nobody outside can be taken for it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from harness.fake_worker import FakeWorker
from twinkle.core.settings import Settings
from twinkle.server.access.acting import Acting, acting_for, allow_acting
from twinkle.server.app import create_app

_ASKED = {"/api/v1/sessions": "x-api-key", "/v1/models": "authorization"}


async def _ask(app: Any, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://in-process") as client:
        return await client.get(path, headers=headers)


@pytest.mark.parametrize("path", _ASKED)
def test_a_job_calls_as_its_tenant_only_where_that_is_allowed(
    settings: Settings, worker: FakeWorker, path: str
) -> None:
    acting = Acting(tenant="somebody", job="job-1")

    async def ask_all() -> list[int]:
        listening, inner = create_app(settings), create_app(settings)
        allow_acting(inner)
        statuses = []
        for app in (inner, listening):
            async with app.router.lifespan_context(app):
                answers = [await _ask(asked, path) for asked in (acting_for(app, acting), app)]
                statuses += [answer.status_code for answer in answers]
        return statuses

    assert asyncio.run(ask_all()) == [200, 401, 401, 401]


def test_nothing_that_comes_over_a_connection_is_taken_for_it(settings: Settings) -> None:
    """Even where the scope could be filled from outside, only an object of this process counts."""

    async def ask_all() -> list[int]:
        app = create_app(settings)
        allow_acting(app)
        statuses = []
        async with app.router.lifespan_context(app):
            for forged in ("somebody", {"tenant": "somebody", "job": "job-1"}, ("somebody", "job-1"), b"somebody"):

                async def call(scope: Scope, receive: Receive, send: Send, forged: object = forged) -> None:
                    await app({**scope, "twinkle.acting": forged}, receive, send)

                statuses.append((await _ask(call, "/api/v1/sessions")).status_code)
            headers = {"twinkle.acting": "somebody", "x-api-key": "job:job-1"}
            statuses.append((await _ask(app, "/api/v1/sessions", headers)).status_code)
            statuses.append((await _ask(app, "/api/v1/sessions?twinkle.acting=somebody")).status_code)
        return statuses

    assert set(asyncio.run(ask_all())) == {401}


def test_a_job_has_no_key_that_could_be_exchanged_or_revoked(settings: Settings) -> None:
    async def ask_all() -> list[int]:
        app = create_app(settings)
        allow_acting(app)
        async with app.router.lifespan_context(app):
            carrier = httpx.ASGITransport(app=acting_for(app, Acting(tenant="somebody", job="job-1")))
            async with httpx.AsyncClient(transport=carrier, base_url="http://in-process") as client:
                exchanged = await client.post("/api/v1/auth/token")
                revoked = await client.delete("/api/v1/auth/apikey/me")
        return [exchanged.status_code, revoked.status_code]

    assert asyncio.run(ask_all()) == [401, 401]
