"""Waiting for outcomes: no completion is missed, and an absent database is not the client's problem."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

import pytest

from harness.polling import wait_until
from twinkle.core.errors import NotFound, StatementFailed, StorageUnavailable
from twinkle.core.operation import Accepted, FutureStatus, OperationKind, OperationState, Payload, Submission
from twinkle.server.futures import Futures
from twinkle.storage.journal.answers import OwnedStatus
from twinkle.storage.journal.journal import Journal


class MemoryJournal:
    """Futures in a dictionary; counts the queries."""

    def __init__(self) -> None:
        self.rows: dict[str, OwnedStatus] = {}
        self.queries: list[int] = []
        self.is_away = False
        self.is_wrong = False

    def put(self, request_id: str, state: OperationState, tenant: str = "t", result: bytes = b"{}") -> None:
        status = FutureStatus(
            request_id=request_id,
            kind=OperationKind.OPTIM_STEP,
            state=state,
            lane="l",
            seq=1,
            attempt=1,
            result=Payload(inline=result) if state is OperationState.DONE else None,
            failure=None,
        )
        self.rows[request_id] = OwnedStatus(tenant=tenant, mesh="m", status=status)

    def statuses(self, request_ids: Sequence[str]) -> dict[str, OwnedStatus]:
        self.queries.append(len(request_ids))
        if self.is_away:
            raise StorageUnavailable("away")
        if self.is_wrong:
            raise StatementFailed("refused")
        return {request_id: self.rows[request_id] for request_id in request_ids if request_id in self.rows}


@asynccontextmanager
async def _futures(journal: MemoryJournal, sweep_s: float = 60.0) -> AsyncIterator[Futures]:
    futures = Futures(cast(Journal, journal), sweep_s=sweep_s)
    futures.start()
    yield futures
    assert futures.num_waiting == 0
    await futures.stop()


async def test_a_notice_wakes_exactly_those_who_wait_for_it() -> None:
    journal = MemoryJournal()
    for number in range(20):
        journal.put(f"r{number}", OperationState.QUEUED)
    async with _futures(journal) as futures:
        polls = [asyncio.create_task(futures.wait(f"r{number}", "t", 10)) for number in range(20)]
        await asyncio.sleep(0.05)
        journal.put("r3", OperationState.DONE)
        queries_before = len(journal.queries)
        await asyncio.to_thread(futures.notify, ["r3", "nobody's"])
        owned = await polls[3]
        others = [poll.done() for poll in polls]
        futures.release()
        await asyncio.gather(*polls)

    assert owned.status.state is OperationState.DONE
    assert sum(others) == 1
    assert journal.queries[queries_before:] == [1]
    assert len(journal.queries) <= 4


async def test_a_lost_notice_is_made_up_for_by_the_sweep() -> None:
    journal = MemoryJournal()
    journal.put("r", OperationState.QUEUED)
    async with _futures(journal, sweep_s=0.02) as futures:
        poll = asyncio.create_task(futures.wait("r", "t", 10))
        await asyncio.sleep(0.01)
        journal.put("r", OperationState.DONE)

        assert (await poll).status.state is OperationState.DONE


async def test_time_runs_out_with_the_latest_status() -> None:
    journal = MemoryJournal()
    journal.put("r", OperationState.RUNNING)
    async with _futures(journal) as futures:
        assert (await futures.wait("r", "t", 0.05)).status.state is OperationState.RUNNING


async def test_missing_and_foreign_futures_answer_alike_and_at_once() -> None:
    journal = MemoryJournal()
    journal.put("theirs", OperationState.QUEUED, tenant="u")
    async with _futures(journal) as futures:
        for request_id in ("theirs", "nobodys"):
            with pytest.raises(NotFound, match=f"no future '{request_id}'"):
                await asyncio.wait_for(futures.wait(request_id, "t", 60), 5)


async def test_an_absent_database_is_asked_again_until_it_answers() -> None:
    journal = MemoryJournal()
    journal.put("r", OperationState.DONE)
    journal.is_away = True
    async with _futures(journal, sweep_s=0.02) as futures:
        with pytest.raises(StorageUnavailable):
            await futures.wait("r", "t", 0.1)
        poll = asyncio.create_task(futures.wait("r", "t", 10))
        await asyncio.sleep(0.05)
        journal.is_away = False

        assert (await poll).status.state is OperationState.DONE


async def test_a_journal_that_can_never_be_read_ends_every_wait_at_once() -> None:
    journal = MemoryJournal()
    journal.is_wrong = True
    async with _futures(journal) as futures:
        polls = [asyncio.create_task(futures.wait(f"r{number}", "t", 60)) for number in range(3)]

        answers = await asyncio.wait_for(asyncio.gather(*polls, return_exceptions=True), 10)

    assert [type(answer) for answer in answers] == [StatementFailed] * 3


def _submission(seq: int, tenant: str = "t") -> Submission:
    return Submission(
        tenant=tenant,
        lane="l",
        seq=seq,
        kind=OperationKind.OPTIM_STEP,
        digest=str(seq),
        payload=Payload(inline=b"{}"),
    )


async def _accept(futures: Futures, journal: MemoryJournal, *, is_new: bool = True, tenant: str = "t") -> str:
    """Accept operation 1 as the submitter does; its future."""
    futures.expect(["l:req:1"])
    journal.put("l:req:1", OperationState.QUEUED, tenant=tenant)
    futures.accepted(_submission(1, tenant), Accepted(request_id="l:req:1", mesh="m", is_new=is_new))
    return "l:req:1"


async def test_a_poll_right_after_its_submission_reads_the_journal_only_for_the_outcome() -> None:
    journal = MemoryJournal()
    async with _futures(journal) as futures:
        poll = asyncio.create_task(futures.wait(await _accept(futures, journal), "t", 10))
        await asyncio.sleep(0.05)
        queries_before = list(journal.queries)
        journal.put("l:req:1", OperationState.DONE)
        await asyncio.to_thread(futures.notify, ["l:req:1"])

        assert (await poll).status.state is OperationState.DONE
    assert queries_before == []
    assert journal.queries == [1]


async def test_a_poll_whose_time_runs_out_right_after_its_submission_says_queued() -> None:
    journal = MemoryJournal()
    async with _futures(journal) as futures:
        owned = await futures.wait(await _accept(futures, journal), "t", 0.02)

    assert (owned.status.state, owned.tenant, owned.mesh) == (OperationState.QUEUED, "t", "m")


async def test_a_notice_that_overtakes_the_answer_of_its_commit_is_not_lost() -> None:
    journal = MemoryJournal()
    async with _futures(journal) as futures:
        futures.expect(["l:req:1"])
        journal.put("l:req:1", OperationState.DONE)
        futures.notify(["l:req:1"])
        await asyncio.sleep(0)
        futures.accepted(_submission(1), Accepted(request_id="l:req:1", mesh="m", is_new=True))

        assert (await futures.wait("l:req:1", "t", 10)).status.state is OperationState.DONE


async def test_what_was_sent_again_is_asked_for_since_it_may_be_done() -> None:
    journal = MemoryJournal()
    async with _futures(journal) as futures:
        await _accept(futures, journal)
        journal.put("l:req:1", OperationState.DONE)
        futures.expect(["l:req:1"])
        futures.accepted(_submission(1), Accepted(request_id="l:req:1", mesh="m", is_new=False))

        assert (await futures.wait("l:req:1", "t", 10)).status.state is OperationState.DONE


async def test_a_lost_notice_of_what_was_just_accepted_is_made_up_for_by_the_sweep() -> None:
    journal = MemoryJournal()
    async with _futures(journal, sweep_s=0.05) as futures:
        request_id = await _accept(futures, journal)
        journal.put(request_id, OperationState.DONE)

        assert (await futures.wait(request_id, "t", 10)).status.state is OperationState.DONE


async def test_what_one_tenant_has_just_submitted_is_no_future_of_another() -> None:
    journal = MemoryJournal()
    async with _futures(journal) as futures:
        request_id = await _accept(futures, journal, tenant="u")
        with pytest.raises(NotFound, match="no future 'l:req:1'"):
            await asyncio.wait_for(futures.wait(request_id, "t", 60), 5)


async def _until_kept(futures: Futures, journal: MemoryJournal, num_queries: int = 1) -> None:
    """The reader has read, and has nothing left to do: another wait's answer comes after all before it."""
    await asyncio.to_thread(wait_until, lambda: len(journal.queries) >= num_queries, what="the outcome is read")
    with pytest.raises(NotFound):
        await futures.wait("nobody's", "t", 10)


async def test_an_outcome_that_is_there_before_its_poll_is_kept_for_one() -> None:
    journal = MemoryJournal()
    async with _futures(journal) as futures:
        request_id = await _accept(futures, journal)
        journal.put(request_id, OperationState.DONE)
        futures.notify([request_id])
        await _until_kept(futures, journal)
        num_queries = len(journal.queries)

        first = await futures.wait(request_id, "t", 10)
        queries_of_first = len(journal.queries) - num_queries
        again = await futures.wait(request_id, "t", 10)

    assert first.status.state is again.status.state is OperationState.DONE
    assert (queries_of_first, len(journal.queries) - num_queries) == (0, 1)


async def test_an_outcome_that_is_kept_is_nobody_elses() -> None:
    journal = MemoryJournal()
    async with _futures(journal) as futures:
        request_id = await _accept(futures, journal, tenant="u")
        journal.put(request_id, OperationState.DONE, tenant="u")
        futures.notify([request_id])
        await _until_kept(futures, journal)

        with pytest.raises(NotFound, match="no future 'l:req:1'"):
            await asyncio.wait_for(futures.wait(request_id, "t", 60), 5)


async def test_a_notice_of_what_was_not_accepted_here_reads_nothing() -> None:
    journal = MemoryJournal()
    async with _futures(journal) as futures:
        journal.put("elsewhere", OperationState.DONE)
        futures.notify(["elsewhere"])
        with pytest.raises(NotFound):
            await futures.wait("nobody's", "t", 10)

    assert journal.queries == [1]


async def test_outcomes_that_nobody_asks_for_take_no_more_room_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle.server.futures._MAX_KEPT_BYTES", 150)
    journal = MemoryJournal()
    async with _futures(journal) as futures:
        request_ids = [f"l:req:{seq}" for seq in (1, 2, 3)]
        futures.expect(request_ids)
        for seq, request_id in enumerate(request_ids, start=1):
            journal.put(request_id, OperationState.DONE, result=b"x" * 100)
            answer = Accepted(request_id=request_id, mesh="m", is_new=True)
            futures.accepted(_submission(seq), answer)
        futures.notify(request_ids)
        await _until_kept(futures, journal)
        num_queries = len(journal.queries)

        for request_id in request_ids:
            assert (await futures.wait(request_id, "t", 10)).status.state is OperationState.DONE

    assert len(journal.queries) - num_queries == 2
