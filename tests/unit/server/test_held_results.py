"""Results that nobody reads: held of a tenant, and of all together, up to a budget; the next is asked for again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fastapi import Request, Response

from harness.calls import passes, retrieve, send_passes
from harness.fake_worker import BASE_MODEL
from harness.polling import wait_until
from twinkle.core.errors import Overloaded
from twinkle.server.answering.held_results import HeldResults, Hold
from twinkle.server.answering.turns import PIECE_BYTES, Turns
from twinkle.server.openapi import Api as App
from twinkle.server.receiving.body import ByteBudget, charge_to
from twinkle.server.receiving.in_progress import RequestsInProgress

if TYPE_CHECKING:
    from conftest import Api

ALLOWED = 4 * PIECE_BYTES
RESULT = 100 * PIECE_BYTES


class Service:
    """An app whose one route answers with a result, and tenants with their budgets."""

    def __init__(self, everybodys_bytes: int) -> None:
        self.results = HeldResults(everybodys_bytes)
        self.tenants: dict[str, ByteBudget] = {}
        self.app = App()
        self.app.results = self.results
        self.app.turns = Turns()
        self.app.in_progress = RequestsInProgress(per_tenant=0, per_key=0)
        self.app.get("/result")(self._result)

    async def _result(self, request: Request) -> Response:
        tenant = request.headers["tenant"]
        charge_to(self.tenants.setdefault(tenant, ByteBudget(ALLOWED, of="yours")), request)
        try:
            self.results.hold_streamed(request, RESULT)
        except Overloaded:
            return Response(status_code=429)
        return Response("a result")

    async def ask(
        self, tenant: str, *, is_read: asyncio.Event | None = None, begun: asyncio.Event | None = None
    ) -> int:
        """The status of an answer, which is read when somebody says so."""
        status = 0

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            if begun is not None:
                begun.set()
            if is_read is not None:
                await is_read.wait()

        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        scope = {
            "type": "http",
            "method": "GET",
            "path": "/result",
            "raw_path": b"/result",
            "query_string": b"",
            "headers": [(b"tenant", tenant.encode())],
        }
        await self.app(scope, receive, send)
        return status

    @asynccontextmanager
    async def unread(self, tenant: str, times: int) -> AsyncIterator[None]:
        """So many answers that have begun and are not read, for the length of the block."""
        is_read = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _ in range(times):
                begun = asyncio.Event()
                group.create_task(self.ask(tenant, is_read=is_read, begun=begun))
                await begun.wait()
            yield
            is_read.set()


async def test_unread_results_fill_their_tenants_room_and_nobody_elses() -> None:
    service = Service(100 * ALLOWED)
    async with service.unread("slow", 2):
        assert await service.ask("slow") == 429
        assert await service.ask("other") == 200
    assert await service.ask("slow") == 200
    assert service.results.budget.held_bytes == service.tenants["slow"].held_bytes == 0


async def test_all_together_hold_no_more_than_the_process_may_but_one_alone_always_does() -> None:
    service = Service(PIECE_BYTES)
    async with service.unread("one", 1):
        assert await service.ask("another") == 429
        assert service.tenants["another"].held_bytes == 0
    assert await service.ask("another") == 200


async def test_a_result_that_is_read_whole_waits_for_room() -> None:
    results, budget = HeldResults(2**40), ByteBudget(1000, of="yours")

    def request() -> tuple[Request, list[Hold]]:
        asked = Request({"type": "http", "headers": []})
        holds = results.watch(asked.scope)
        charge_to(budget, asked)
        return asked, holds

    (first, holds), (second, its_holds) = request(), request()
    await results.hold_whole(first, 500, patience_s=0)
    with pytest.raises(Overloaded, match=r"results \(yours\)"):
        await results.hold_whole(second, 500, patience_s=0)

    waiting = asyncio.create_task(results.hold_whole(second, 500, patience_s=60))
    await asyncio.sleep(0)
    results.release(holds)
    await waiting

    results.release(its_holds)
    assert budget.held_bytes == results.budget.held_bytes == 0


async def test_a_result_that_is_written_sequence_by_sequence_is_held_for_less_once_its_sequences_are_known() -> None:
    results, budget = HeldResults(2**40), ByteBudget(2**40, of="yours")
    asked = Request({"type": "http", "headers": []})
    holds = results.watch(asked.scope)
    charge_to(budget, asked)

    hold = await results.hold_whole(asked, 3200, patience_s=0)
    whole = budget.held_bytes
    hold.write_in_parts(3200, 100)
    in_parts = budget.held_bytes
    hold.write_in_parts(3200, 3200)

    assert whole == 32 * 3200 and in_parts == 3 * 3200 + 32 * 100
    assert budget.held_bytes == results.budget.held_bytes == in_parts
    results.release(holds)
    assert budget.held_bytes == results.budget.held_bytes == 0


def test_what_finds_no_room_gets_429_and_its_result_when_there_is_some(
    api: Api, http: httpx.Client, key: str, model_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = api.state().common.results.budget
    ticket = send_passes(http, passes(model_id, 1, length=3000)).json()["request_id"]
    assert retrieve(http, ticket).status_code == 200
    drawn = {"model": BASE_MODEL, "prompt": [1, 2, 3], "max_tokens": 64}

    with httpx.Client(base_url=f"{api.url}/v1", headers={"Authorization": f"Bearer {key}"}, timeout=30) as openai:
        with monkeypatch.context() as tight:
            tight.setattr(budget, "limit_bytes", 1)
            tight.setattr(budget, "_held_bytes", 1)
            polled = http.post("/retrieve_future", json={"request_id": ticket})
            asked = openai.post("/completions", json=drawn)
        assert (polled.status_code, asked.status_code) == (429, 429), (polled.text, asked.text)
        assert polled.json()["code"] == "overloaded"

        assert retrieve(http, ticket).status_code == 200
        assert openai.post("/completions", json=drawn).status_code == 200
    wait_until(lambda: budget.held_bytes == 0, what="the answers to have left")
