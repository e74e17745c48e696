"""The one write path: shared transactions, patience with the database, and neighbours left unharmed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from twinkle.core.clock import SystemClock
from twinkle.core.errors import Conflict, Overloaded, StorageUnavailable, UserError
from twinkle.core.operation import Accepted, OperationKind, Payload, Submission
from twinkle.server.futures import Futures
from twinkle.server.submit import Submitter
from twinkle.server.threads import Threads
from twinkle.storage.blobs import FolderStore
from twinkle.storage.journal.journal import Journal
from twinkle.tasks.nudge import Nudger

Append = Callable[[Sequence[Submission]], list[Accepted | UserError]]


class ScriptedJournal:
    """Answers as the test says."""

    def __init__(self, append: Append) -> None:
        self.append = append


class Bell:
    """Hears who is nudged."""

    def __init__(self) -> None:
        self.rung: list[str] = []

    def ring(self, mesh: str) -> None:
        self.rung.append(mesh)


def _submission(seq: int, data: bytes = b"body") -> Submission:
    return Submission(
        tenant="t",
        lane="s:train:0",
        seq=seq,
        kind=OperationKind.OPTIM_STEP,
        digest=str(seq),
        payload=Payload(inline=data),
    )


def _accept(submissions: Sequence[Submission]) -> list[Accepted | UserError]:
    return [Accepted(request_id=f"r{one.seq}", mesh=f"m{one.seq % 2}", is_new=True) for one in submissions]


@asynccontextmanager
async def _submitter(
    append: Append, tmp_path: Path, bell: Bell, *, max_pending: int = 100, timeout_s: float = 5.0
) -> AsyncIterator[Submitter]:
    threads = Threads("blobs", 2)
    journal = cast(Journal, ScriptedJournal(append))
    submitter = Submitter(
        journal,
        FolderStore(tmp_path),
        cast(Nudger, bell),
        Futures(journal),
        blob_threads=threads,
        inline_bytes=16,
        max_pending=max_pending,
        timeout_s=timeout_s,
        clock=SystemClock(),
    )
    yield submitter
    await submitter.stop()
    threads.stop()


async def test_what_arrives_together_shares_a_transaction_and_one_nudge_a_mesh(tmp_path: Path) -> None:
    batches: list[int] = []
    gate, bell = threading.Event(), Bell()

    def append(submissions: Sequence[Submission]) -> list[Accepted | UserError]:
        gate.wait(10)
        batches.append(len(submissions))
        return _accept(submissions)

    async with _submitter(append, tmp_path, bell) as submitter:
        first = asyncio.create_task(submitter.submit(_submission(0)))
        await asyncio.sleep(0)
        rest = [asyncio.create_task(submitter.submit(_submission(seq))) for seq in range(1, 50)]
        await asyncio.sleep(0.05)
        gate.set()
        answers = await asyncio.gather(first, *rest)

    assert [answer.request_id for answer in answers] == [f"r{seq}" for seq in range(50)]
    assert sum(batches) == 50
    assert len(batches) <= 3
    assert len(bell.rung) <= 2 * len(batches)


async def test_a_large_payload_is_in_the_object_store_before_the_journal_hears_of_it(tmp_path: Path) -> None:
    seen: list[Payload] = []

    def append(submissions: Sequence[Submission]) -> list[Accepted | UserError]:
        for one in submissions:
            seen.append(one.payload)
            if one.payload.blob is not None:
                assert FolderStore(tmp_path).get(one.payload.blob) == b"x" * 17
        return _accept(submissions)

    async with _submitter(append, tmp_path, Bell()) as submitter:
        await submitter.submit(_submission(0, b"x" * 16))
        await submitter.submit(_submission(1, b"x" * 17))

    assert [payload.inline for payload in seen] == [b"x" * 16, None]


async def test_a_database_that_comes_back_is_waited_for(tmp_path: Path) -> None:
    attempts: list[int] = []

    def append(submissions: Sequence[Submission]) -> list[Accepted | UserError]:
        attempts.append(len(submissions))
        if len(attempts) < 3:
            raise StorageUnavailable("away")
        return _accept(submissions)

    async with _submitter(append, tmp_path, Bell()) as submitter:
        accepted = await submitter.submit(_submission(0))

    assert accepted.request_id == "r0"
    assert attempts == [1, 1, 1]


async def test_what_arrives_while_a_transaction_is_tried_again_shares_the_next_one(tmp_path: Path) -> None:
    batches: list[list[int]] = []
    is_away = threading.Event()

    def append(submissions: Sequence[Submission]) -> list[Accepted | UserError]:
        batches.append([one.seq for one in submissions])
        if len(batches) == 1:
            is_away.set()
            raise StorageUnavailable("away")
        return _accept(submissions)

    async with _submitter(append, tmp_path, Bell()) as submitter:
        first = asyncio.create_task(submitter.submit(_submission(0)))
        assert await asyncio.to_thread(is_away.wait, 10)
        rest = [asyncio.create_task(submitter.submit(_submission(seq))) for seq in (1, 2)]
        async with asyncio.timeout(10):
            answers = await asyncio.gather(first, *rest)

    assert [answer.request_id for answer in answers] == ["r0", "r1", "r2"]
    assert batches == [[0], [0], [1, 2]]


async def test_a_failure_nobody_thought_of_ends_what_it_struck_and_nothing_else(tmp_path: Path) -> None:
    def append(submissions: Sequence[Submission]) -> list[Accepted | UserError]:
        if submissions[0].seq == 0:
            raise RuntimeError("a fault of ours")
        return _accept(submissions)

    async with _submitter(append, tmp_path, Bell()) as submitter:
        async with asyncio.timeout(10):
            with pytest.raises(RuntimeError, match="of ours"):
                await submitter.submit(_submission(0))
            assert (await submitter.submit(_submission(1))).request_id == "r1"


async def test_a_database_that_stays_away_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    def append(_: Sequence[Submission]) -> list[Accepted | UserError]:
        raise StorageUnavailable("away")

    async with _submitter(append, tmp_path, Bell(), timeout_s=0.1) as submitter:
        with pytest.raises(StorageUnavailable):
            await submitter.submit(_submission(0))


async def test_one_that_cannot_be_written_does_not_harm_its_neighbours(tmp_path: Path) -> None:
    gate = threading.Event()

    def append(submissions: Sequence[Submission]) -> list[Accepted | UserError]:
        gate.wait(10)
        if any(one.seq == 2 for one in submissions):
            raise ValueError("a driver's complaint")
        return [Conflict("used") if one.seq == 3 else answer for one, answer in _pairs(submissions)]

    async with _submitter(append, tmp_path, Bell()) as submitter:
        tasks = [asyncio.create_task(submitter.submit(_submission(seq))) for seq in range(5)]
        await asyncio.sleep(0.05)
        gate.set()
        answers = await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(answer) for answer in answers] == [Accepted, Accepted, ValueError, Conflict, Accepted]


def _pairs(submissions: Sequence[Submission]) -> list[tuple[Submission, Accepted | UserError]]:
    return list(zip(submissions, _accept(submissions), strict=True))


async def test_too_many_pending_submissions_are_turned_away(tmp_path: Path) -> None:
    gate = threading.Event()

    def append(submissions: Sequence[Submission]) -> list[Accepted | UserError]:
        gate.wait(10)
        return _accept(submissions)

    async with _submitter(append, tmp_path, Bell(), max_pending=3) as submitter:
        tasks = [asyncio.create_task(submitter.submit(_submission(seq))) for seq in range(3)]
        await asyncio.sleep(0.01)
        with pytest.raises(Overloaded):
            await submitter.submit(_submission(3))
        gate.set()
        await asyncio.gather(*tasks)
        assert (await submitter.submit(_submission(4))).request_id == "r4"


async def test_a_client_that_left_does_not_disturb_the_batch(tmp_path: Path) -> None:
    gate = threading.Event()

    def append(submissions: Sequence[Submission]) -> list[Accepted | UserError]:
        gate.wait(10)
        return _accept(submissions)

    async with _submitter(append, tmp_path, Bell()) as submitter:
        left, stays = (asyncio.create_task(submitter.submit(_submission(seq))) for seq in range(2))
        await asyncio.sleep(0.01)
        left.cancel()
        gate.set()
        assert (await stays).request_id == "r1"
