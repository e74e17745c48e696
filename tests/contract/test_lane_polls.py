"""Polls that wait for any sample of a client: woken by a message, found by one query for all when it was lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from harness.journal import Bench, done, new_sampler, submission
from twinkle.core.lease import Lease
from twinkle.core.operation import OperationKind
from twinkle.server.answering.lane_polls import LanePolls
from twinkle.server.threads import Threads
from twinkle.storage.database import Database, Row
from twinkle.storage.journal.forgotten import SEQS_PER_CLIENT
from twinkle.storage.sampling.sampling_sessions import EndedSample

_NEVER_S = 3600.0


@asynccontextmanager
async def _polls(bench: Bench, *, sweep_s: float = _NEVER_S) -> AsyncIterator[LanePolls]:
    threads = Threads("sql", 1)
    polls = LanePolls(bench.sampling_sessions, threads, sweep_s=sweep_s)
    polls.start()
    yield polls
    polls.release()
    await polls.stop()
    await threads.run(bench.database.close)
    threads.stop()


def _open(bench: Bench, *lanes: str) -> None:
    for lane in lanes:
        bench.journal.open_lane(new_sampler(lane))
        bench.append(submission(lane, 0, OperationKind.SAMPLE))


def _end_all(bench: Bench, lease: Lease) -> None:
    bench.journal.commit(lease, [done(claim) for claim in bench.claim_samples(lease, 100)])


def _hold(polls: LanePolls, *lanes: str) -> list[asyncio.Task[list[EndedSample]]]:
    return [asyncio.create_task(polls.wait(lane, client=0, after=0, timeout_s=60)) for lane in lanes]


class _Statements:
    """Every query that is read from one database, as it comes."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        read = Database.read

        def noted(database: Database, sql: str, parameters: Sequence[object] = ()) -> list[Row]:
            rows = read(database, sql, parameters)
            if database is bench.database:
                self._loop.call_soon_threadsafe(self._note, sql)
            return rows

        monkeypatch.setattr(Database, "read", noted)

    def _note(self, sql: str) -> None:
        self.seen.append(sql)
        self._changed.set()

    async def next(self, number: int) -> list[str]:
        """So many more, from now on."""
        start = len(self.seen)
        async with asyncio.timeout(30):
            while len(self.seen) < start + number:
                self._changed.clear()
                await self._changed.wait()
        return self.seen[start:]


async def test_a_look_for_lost_messages_is_one_query_however_many_polls_are_held(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = [f"s{number}" for number in range(40)]
    _open(bench, *lanes)
    statements = _Statements(bench, monkeypatch)
    async with _polls(bench, sweep_s=0.02) as polls:
        held = _hold(polls, *lanes)
        while sum("ORDER BY ended_no" in sql for sql in statements.seen) < len(lanes):
            await statements.next(1)

        swept = await statements.next(5)

        assert all("WITH wanted" in sql for sql in swept)
        assert not any(poll.done() for poll in held)


async def test_a_poll_whose_message_was_lost_is_answered_and_its_neighbours_wait_on(
    bench: Bench, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    _open(bench, "a", "b")
    _end_all(bench, lease)
    _open(bench, "c")
    async with _polls(bench, sweep_s=0.02) as polls:
        late = asyncio.create_task(polls.wait("a", client=0, after=1, timeout_s=60))
        other_client = asyncio.create_task(polls.wait("a", client=1, after=0, timeout_s=60))
        waiting = asyncio.create_task(polls.wait("c", client=0, after=0, timeout_s=60))
        statements = _Statements(bench, monkeypatch)
        await statements.next(6)
        assert not (late.done() or other_client.done() or waiting.done())

        await asyncio.to_thread(_end_all, bench, lease)
        ended = await asyncio.wait_for(waiting, 30)
        await asyncio.to_thread(bench.database.close)

        assert [sample.request_id for sample in ended] == ["c:req:0"]
        assert not (late.done() or other_client.done())


async def test_a_message_wakes_the_polls_of_its_lane_without_any_look(bench: Bench, lease: Lease) -> None:
    _open(bench, "a", "b")
    async with _polls(bench) as polls:
        held = _hold(polls, "a", "b")
        await asyncio.sleep(0)
        await asyncio.to_thread(_end_all, bench, lease)

        await asyncio.to_thread(polls.notify, ["a:req:0"])
        ended = await asyncio.wait_for(held[0], 30)
        await asyncio.to_thread(bench.database.close)

        assert [sample.request_id for sample in ended] == ["a:req:0"]


async def test_a_message_wakes_the_polls_of_its_client_and_of_no_other_of_the_session(
    bench: Bench, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a session that many processes share would ask once for each of them at each sample's end."""
    num_clients = 20
    bench.journal.open_lane(new_sampler("a"))
    seqs = [client * SEQS_PER_CLIENT for client in range(num_clients)]
    bench.append(*(submission("a", seq, OperationKind.SAMPLE) for seq in seqs))
    statements = _Statements(bench, monkeypatch)

    def num_reads() -> int:
        return sum("ORDER BY ended_no" in sql for sql in statements.seen)

    async with _polls(bench) as polls:
        held = [asyncio.create_task(polls.wait("a", client=n, after=0, timeout_s=60)) for n in range(num_clients)]
        while num_reads() < num_clients:
            await statements.next(1)
        await asyncio.to_thread(_end_all, bench, lease)
        before = num_reads()

        for client in (7, 3):
            polls.notify(["unlike:any", f"a:req:{seqs[client]}"])
            ended = await asyncio.wait_for(held[client], 30)
            assert [sample.request_id for sample in ended] == [f"a:req:{seqs[client]}"]

        assert num_reads() == before + 2
        await asyncio.to_thread(bench.database.close)


async def test_a_poll_ends_empty_when_its_time_is_up(bench: Bench) -> None:
    _open(bench, "a")
    async with _polls(bench) as polls:
        assert await polls.wait("a", client=0, after=0, timeout_s=0.05) == []
