"""Attacks by reading: lists of everything cost one query a page, searches look at no more than they may, and end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from harness.journal import Bench
from twinkle.core.errors import StorageUnavailable
from twinkle.server.threads import Listings, Threads
from twinkle.storage.database import Database
from twinkle.storage.tenants.sessions import FoundSession

NUM_SESSIONS = 12_000
ENDLESS = (
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2000000000) SELECT COUNT(*) AS c FROM n"
)


def _crowd(bench: Bench) -> str:
    with bench.database.transaction() as transaction:
        numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {NUM_SESSIONS})"
        row = transaction.execute("SELECT id FROM tenant LIMIT 1").fetchone()
        assert row is not None
        transaction.execute(
            f"{numbers} INSERT INTO session (id, tenant, tags, sdk_version, created_at, heartbeat_at)"
            " SELECT 'crowd-' || i, ?, '[]', '', i, i FROM n",
            (row.id,),
        )
    return str(row.id)


def test_a_search_looks_at_a_bounded_number_of_sessions_and_goes_on_where_it_ended(bench: Bench) -> None:
    tenant = _crowd(bench)
    looked_at = 0

    def is_the_oldest(session: FoundSession) -> bool:
        nonlocal looked_at
        looked_at += 1
        return session.id == "crowd-1"

    found, place, pages = [], None, 0
    while True:
        before = looked_at
        page = bench.stores.sessions.search(tenant, is_the_oldest, limit=10, after=place)
        assert looked_at - before <= 5001
        found += page.sessions
        pages, place = pages + 1, page.goes_on_behind
        if place is None:
            break

    assert [session.id for session in found] == ["crowd-1"]
    assert pages == 3


def test_a_page_that_is_full_goes_on_behind_its_last_session_and_none_is_told_twice(bench: Bench) -> None:
    tenant = _crowd(bench)
    first = bench.stores.sessions.search(tenant, lambda _: True, limit=3, after=None)
    second = bench.stores.sessions.search(tenant, lambda _: True, limit=3, after=first.goes_on_behind)

    told = [session.id for session in first.sessions + second.sessions if session.id.startswith("crowd-")]
    assert len(told) == len(set(told)) >= 5


def test_what_runs_have_saved_last_is_one_query_for_all_of_them(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    read = bench.database.read
    monkeypatch.setattr(bench.database, "read", lambda sql, values=(): (asked.append(sql), read(sql, values))[1])
    ids = [f"run-{number}" for number in range(1000)]

    assert bench.stores.adapters.last_requests_at(ids) == {}
    assert bench.stores.checkpoints.latest(ids) == {}
    assert len(asked) == 2


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_statement_that_takes_too_long_is_ended_and_the_next_one_is_not(
    kind: str, make_database_url: Callable[[str], str]
) -> None:
    url = make_database_url(kind)
    database = Database(url, statement_timeout_s=0.2)

    with pytest.raises(StorageUnavailable):
        database.read(ENDLESS)
    with pytest.raises(StorageUnavailable), database.transaction() as transaction:
        transaction.execute(ENDLESS).fetchone()
    answer = database.read("SELECT 1 AS one")
    database.close()

    assert answer[0].one == 1


async def test_one_tenants_lists_wait_for_each_other_and_anothers_do_not() -> None:
    threads = Threads("listings", 2)
    listings = Listings(threads)
    stop = threading.Event()
    running: list[str] = []

    def slow() -> None:
        running.append("slow")
        assert stop.wait(20)

    tasks = [asyncio.create_task(listings.run("greedy", slow)) for _ in range(5)]
    answer = await listings.run("other", lambda: "told")
    num_running = len(running)
    stop.set()
    await asyncio.gather(*tasks)
    threads.stop()

    assert answer == "told"
    assert num_running <= 1
