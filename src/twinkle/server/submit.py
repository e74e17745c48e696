"""The one write path: large payload into the object store, operation into the journal, then the mesh is nudged.

Whatever arrives while a transaction runs shares the next one. An answer is given after the commit, never before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, TypeVar

import structlog

from twinkle.core.clock import Clock
from twinkle.core.errors import Overloaded, StorageUnavailable, UserError
from twinkle.core.ids import new_id, request_id_of
from twinkle.core.operation import Accepted, Submission, Unnumbered
from twinkle.core.process.background import say_if_it_ends
from twinkle.core.process.crash import crash_point
from twinkle.server.futures import Futures
from twinkle.server.threads import Threads
from twinkle.storage.blobs import BlobStore
from twinkle.storage.journal.journal import Journal
from twinkle.storage.journal.records import NewLane
from twinkle.storage.payloads import write_payload
from twinkle.tasks.nudge import Nudger

_MAX_BATCH = 256
_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 2.0

T = TypeVar("T")
SubmissionT = TypeVar("SubmissionT", bound=Submission | Unnumbered)

Admit: TypeAlias = Callable[[Submission | Unnumbered], Awaitable[None]]
"""Refuses what its tenant has no room for."""

_log = structlog.get_logger()


async def _admit_all(_: Submission | Unnumbered) -> None:
    pass


@dataclass(frozen=True)
class _Waiting:
    submission: Submission | Unnumbered
    answer: asyncio.Future[Accepted]
    deadline: float


class Submitter:
    """Brings operations into the journal. Lives on one event loop and writes from one thread."""

    def __init__(
        self,
        journal: Journal,
        blobs: BlobStore,
        nudger: Nudger,
        futures: Futures,
        *,
        blob_threads: Threads,
        inline_bytes: int,
        max_pending: int,
        timeout_s: float,
        clock: Clock,
        admit: Admit = _admit_all,
    ) -> None:
        self._journal = journal
        self._blobs = blobs
        self._nudger = nudger
        self._futures = futures
        self._blob_threads = blob_threads
        self._clock = clock
        self._inline_bytes = inline_bytes
        self._max_pending = max_pending
        self._admit = admit
        self._timeout_s = timeout_s
        self._writer = Threads("append", 1)
        self._waiting: deque[_Waiting] = deque()
        self._is_writing = False
        """Whether a transaction runs, is about to, or is tried again: whoever comes then shares the next one."""
        self._is_stopping = False
        self._num_pending = 0
        self._trying_again: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        """Finish the running transaction and end."""
        self._is_stopping = True
        if self._trying_again is not None:
            self._trying_again.cancel()
            await asyncio.wait([self._trying_again])
        await asyncio.to_thread(self._writer.stop)

    async def submit(self, submission: Submission | Unnumbered) -> Accepted:
        """Accept an operation; its payload is given inline, whatever its size. Returns after the commit.

        Those that are not numbered share the transactions of all others.

        Raises:
            NotFound: There is no such lane, or it is another tenant's.
            Conflict: The number, or the key, was used for a different request.
            InvalidInput: The run is trained through the other dialect, or the number is out of all proportion.
            Overloaded: Too many submissions wait already.
            StorageUnavailable: The journal or the object store did not answer in time; nothing was accepted.
        """
        await self._admit(submission)
        with _Place(self):
            stored = await self._store_payload(submission)
            loop = asyncio.get_running_loop()
            answer: asyncio.Future[Accepted] = loop.create_future()
            self._waiting.append(_Waiting(stored, answer, loop.time() + self._timeout_s))
            if not self._is_writing:
                # Not at once: what has come by the same round of the loop goes together.
                self._is_writing = True
                loop.call_soon(self._write_next)
            return await answer

    async def open_lane(self, lane: NewLane, submission: Submission | None = None) -> Accepted | None:
        """Create an adapter or a sampling session with its first operation; raises as :meth:`submit` does."""
        with _Place(self):
            stored = None if submission is None else await self._store_payload(submission)
            deadline = asyncio.get_running_loop().time() + self._timeout_s
            accepted = await self._write_until(partial(self._journal.open_lane, lane, stored), deadline)
        crash_point("api.lane_opened")
        if accepted is not None and accepted.is_new:
            self._nudger.ring(accepted.mesh)
        return accepted

    async def write(self, accept: Callable[[], Accepted]) -> Accepted:
        """Accept an operation by a transaction of the caller's; raises as it does, and as :meth:`submit` does."""
        with _Place(self):
            deadline = asyncio.get_running_loop().time() + self._timeout_s
            accepted = await self._write_until(accept, deadline)
        if accepted.is_new:
            self._nudger.ring(accepted.mesh)
        return accepted

    def take_place(self) -> None:
        """Count one more pending submission; ``Overloaded`` when there are too many."""
        if self._num_pending >= self._max_pending:
            raise Overloaded(f"{self._num_pending} operations wait for the journal already; send it again in a moment")
        self._num_pending += 1

    def leave_place(self) -> None:
        """Count one pending submission less."""
        self._num_pending -= 1

    async def _store_payload(self, submission: SubmissionT) -> SubmissionT:
        data = submission.payload.inline
        if data is None or len(data) <= self._inline_bytes:
            return submission
        payload = await self._blob_threads.run(
            write_payload,
            self._blobs,
            _owner_of(submission),
            data,
            inline_bytes=self._inline_bytes,
            now=self._clock.now(),
        )
        crash_point("api.payload_stored")
        return replace(submission, payload=payload)

    def _write_next(self) -> None:
        """Have what waits written, on the writer's thread, and be told what came of it."""
        self._is_writing = bool(self._waiting) and not self._is_stopping
        if self._is_writing:
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), _MAX_BATCH))]
            self._writer.post(partial(self._append_and_ring, self._expected(batch)), partial(self._note_written, batch))

    def _note_written(self, batch: list[_Waiting], answers: list[Accepted | UserError] | Exception) -> None:
        if isinstance(answers, Exception):
            self._trying_again = asyncio.create_task(self._append_again(batch, answers), name="submit")
            say_if_it_ends(self._trying_again)
            return
        try:
            self._answer(batch, answers)
        finally:
            self._write_next()

    async def _append_again(self, batch: list[_Waiting], error: Exception) -> None:
        """Go on where a first attempt has ended with ``error``."""
        try:
            if isinstance(error, StorageUnavailable):
                await self._append(batch, error)
            else:
                await self._refuse(batch, error)
        finally:
            self._trying_again = None
            self._write_next()

    def _expected(self, batch: list[_Waiting]) -> list[Submission | Unnumbered]:
        """What is in a batch; whoever waits for outcomes is told that it is about to be accepted."""
        submissions = [waiting.submission for waiting in batch]
        self._futures.expect(
            request_id_of(submission.lane, submission.seq)
            for submission in submissions
            if isinstance(submission, Submission)
        )
        return submissions

    async def _append(self, batch: list[_Waiting], error: StorageUnavailable | None = None) -> None:
        """Write a batch with patience; ``error`` is what a first attempt has ended with."""
        submissions = self._expected(batch)
        deadline = min(waiting.deadline for waiting in batch)
        try:
            answers = await self._write_until(partial(self._append_and_ring, submissions), deadline, error)
        except Exception as failure:  # noqa: BLE001 - the border: whoever waits is told, whatever it is
            await self._refuse(batch, failure)
        else:
            self._answer(batch, answers)

    async def _refuse(self, batch: list[_Waiting], failure: Exception) -> None:
        """Tell whoever waits why it was not written."""
        if len(batch) > 1 and not isinstance(failure, StorageUnavailable):
            # One of them cannot be written at all: its neighbours must not suffer for it.
            for waiting in batch:
                await self._append([waiting])
            return
        for waiting in batch:
            if not waiting.answer.done():
                waiting.answer.set_exception(failure)

    def _append_and_ring(self, submissions: list[Submission | Unnumbered]) -> list[Accepted | UserError]:
        """On the writer's thread: the worker need not wait until the event loop comes round."""
        answers = self._journal.append(submissions)
        crash_point("api.committed")
        for mesh in {answer.mesh for answer in answers if isinstance(answer, Accepted) and answer.is_new}:
            self._nudger.ring(mesh)
        crash_point("api.nudged")
        return answers

    def _answer(self, batch: list[_Waiting], answers: list[Accepted | UserError]) -> None:
        for waiting, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Accepted) and isinstance(waiting.submission, Submission):
                self._futures.accepted(waiting.submission, answer)
            if waiting.answer.done():
                continue
            if isinstance(answer, UserError):
                waiting.answer.set_exception(answer)
            else:
                waiting.answer.set_result(answer)

    async def _write_until(self, write: Callable[[], T], deadline: float, error: StorageUnavailable | None = None) -> T:
        """Try a transaction again while the database does not answer, until the deadline on the loop's clock.

        ``error`` is what a first attempt has ended with.
        """
        delay_s = _FIRST_RETRY_S
        while True:
            if error is None:
                try:
                    return await self._writer.run(write)
                except StorageUnavailable as unavailable:
                    error = unavailable
            if asyncio.get_running_loop().time() + delay_s > deadline:
                raise error
            _log.warning("submit.storage_unavailable", error=error.message, retry_s=delay_s)
            await asyncio.sleep(delay_s)
            delay_s, error = min(2 * delay_s, _LAST_RETRY_S), None


def _owner_of(submission: Submission | Unnumbered) -> str:
    """Whose blob a large payload is: a resend's is the first one's."""
    if isinstance(submission, Submission):
        return request_id_of(submission.lane, submission.seq)
    return f"{submission.lane}:key:{submission.request_key or new_id()}"


class _Place:
    """One pending submission, counted for as long as the block runs."""

    def __init__(self, submitter: Submitter) -> None:
        self._submitter = submitter

    def __enter__(self) -> None:
        self._submitter.take_place()

    def __exit__(self, *_: object) -> None:
        self._submitter.leave_place()
