"""Batches of samples: every line of a file is asked of the route that it names, in process and in windows.

A line goes out under a key that follows from the job and its place, so whoever asks again gets the same samples.
Answers are written in the order of the lines, part by part: of a file of any length only a window is ever in memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx
import orjson
from pydantic import BaseModel

from twinkle.core.job import JobCancelled, JobFailed, JobKind, JsonObject
from twinkle.jobs.batch_file import FIRST_PAUSE_S, LONGEST_PAUSE_S, PASSES, BatchFile, json_of
from twinkle.jobs.batch_lines import (
    BatchAnswer,
    BatchReader,
    BatchRequest,
    answer_line,
    expired_line,
)
from twinkle.jobs.batch_reckoning import work_of_batch
from twinkle.jobs.batch_state import MAX_PART_BYTES, MAX_PART_LINES, BatchCursor, Ending, GrowingFile
from twinkle.jobs.context import JobContext
from twinkle.jobs.estimate import Work
from twinkle.wire.bodies.jobs_batch import BatchSpec

_LOOK_S = 1.0
"""How often it is looked whether the owner wants something, and whether the time is over."""
_WRITE_S = 5.0
_SHARE_OF_TIME = 0.01
"""Answers are written when these have waited for so long, or for so much of the time that it took so far."""
_CRASHES = 3
"""How often a line is asked that the API answers with a crash."""
_ENDING_PATIENCE_S = 60.0
_CANCELLED = "cancelled"


class BatchPlan:
    """See :class:`twinkle.jobs.plans.Plan`."""

    kind: ClassVar[JobKind] = JobKind.BATCH
    spec_class: ClassVar[type[BaseModel]] = BatchSpec

    async def run(self, context: JobContext[BatchSpec]) -> JsonObject:
        """Judge all lines, ask them, write the answers."""
        batch = _Batch(context)
        try:
            return await batch.run()
        finally:
            await batch.let_go()

    async def reckon(self, context: JobContext[BatchSpec]) -> Work:
        """Every prompt to the token; of the answers how many there are, and how long they may get."""
        return await _Batch(context).reckon()


class _Expired(Exception):
    """The batch's time is over."""


@dataclass(frozen=True)
class _Asked:
    """A line that is under way."""

    request: BatchRequest
    task: asyncio.Task[BatchAnswer]


class _Batch:
    """One attempt at a batch."""

    def __init__(self, context: JobContext[BatchSpec]) -> None:
        self._context = context
        self._spec = context.spec
        self._file = BatchFile(context, self._look)
        self._cursor = cursor = BatchCursor.read(context.saved)
        self._answers = GrowingFile(context.files, f"{context.job.id}_output.jsonl", cursor.answers)
        self._errors = GrowingFile(context.files, f"{context.job.id}_error.jsonl", cursor.errors)
        self._sent_before = cursor.sent
        self._window: deque[_Asked] = deque()
        self._num_under_way = 0
        self._room = self._spec.window
        self._requests: AsyncIterator[BatchRequest] | None = None
        self._next: BatchRequest | None = None
        self._loop = asyncio.get_running_loop()
        self._began_at = self._written_at = self._looked_at = self._loop.time()
        self._gives_up_at: float | None = None

    async def run(self) -> JsonObject:
        ending = self._cursor.ending
        was_cancelled_before = ending == "cancelled" and not self._context.job.cancel_requested
        if ending is None:
            try:
                if not self._cursor.total:
                    await self._begin(await self._file.judge())
                await self._ask_all()
            except JobCancelled:
                ending = "cancelled"
            except _Expired:
                ending = "expired"
        if ending is not None:
            await self._end_early(ending)
        result = await self._finish(ending)
        if ending == "cancelled" and was_cancelled_before:
            raise JobFailed(
                "cancelled", "it was cancelled; submit the lines that have no answer as a new batch", details=result
            )
        if ending == "cancelled":
            raise JobCancelled("cancelled; the answers so far are kept", result=result)
        if ending == "expired":
            raise JobFailed("expired", "its completion window is over; the answers so far are kept", details=result)
        return result

    async def reckon(self) -> Work:
        """What it would take, after all lines were judged."""
        await self._file.judge()
        return await work_of_batch(self._context, self._file.requests(0))

    async def let_go(self) -> None:
        """Wait for no answer any more. What was asked stays in the journal, for whoever asks again."""
        for asked in self._window:
            asked.task.cancel()
        await asyncio.gather(*(asked.task for asked in self._window), return_exceptions=True)

    async def _begin(self, reader: BatchReader) -> None:
        self._cursor.total = reader.found.num_lines
        self._cursor.in_progress_at = self._context.now()
        only_model = next(iter(reader.models)) if len(reader.models) == 1 else None
        await self._save("in_progress", in_progress_at=self._cursor.in_progress_at, model=only_model)

    # -- asking --------------------------------------------------------------------------------------------------------

    async def _ask_all(self) -> None:
        while True:
            await self._fill()
            if not self._window:
                break
            await asyncio.wait([self._window[0].task], timeout=_LOOK_S)
            while self._window and self._window[0].task.done():
                self._take(self._window.popleft())
                if self._is_part_full():
                    await self._save("in_progress")
            if self._has_waited():
                await self._save("in_progress")
            await self._look()
        await self._save("in_progress")

    async def _fill(self) -> None:
        """Ask as many more lines as there is room for; one alone always may be asked."""
        while (request := await self._upcoming()) is not None:
            if self._window and self._num_under_way + request.num_sequences > self._room:
                return
            if request.index >= self._cursor.sent:
                # Known before it happens: whoever ends this batch must look for what came of these.
                self._cursor.sent = request.index + self._spec.window
                await self._context.save({**self._context.saved, "sent": self._cursor.sent})
            self._send(request)

    async def _upcoming(self) -> BatchRequest | None:
        if self._requests is None:
            self._requests = self._file.requests(self._cursor.next + len(self._window))
        if self._next is None:
            self._next = await anext(self._requests, None)
        return self._next

    def _send(self, request: BatchRequest) -> None:
        self._next = None
        self._num_under_way += request.num_sequences
        self._window.append(_Asked(request, asyncio.create_task(self._ask(request))))

    async def _ask(self, request: BatchRequest) -> BatchAnswer:
        context, crashes, pause_s = self._context, 0, FIRST_PAUSE_S
        content = orjson.dumps(request.body)
        headers = {
            "Content-Type": "application/json",
            "Idempotency-Key": f"{context.job.id}:{request.index}",
            "X-Session-Id": await context.door.session(),
        }
        while True:
            response = await context.door.request("POST", self._spec.endpoint, content=content, headers=headers)
            status = response.status_code
            crashes += status == httpx.codes.INTERNAL_SERVER_ERROR
            is_final = status not in PASSES and (status != httpx.codes.INTERNAL_SERVER_ERROR or crashes >= _CRASHES)
            if is_final or self._is_given_up(status):
                return BatchAnswer(status=status, body=json_of(response))
            if status == httpx.codes.TOO_MANY_REQUESTS:
                self._room = max(self._num_under_way - request.num_sequences, 1)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _is_given_up(self, status: int) -> bool:
        if self._gives_up_at is None:
            return False
        return status == httpx.codes.TOO_MANY_REQUESTS or self._loop.time() > self._gives_up_at

    def _take(self, asked: _Asked) -> None:
        """Write an answer behind those of the lines before it."""
        cursor, request, answer = self._cursor, asked.request, asked.task.result()
        self._num_under_way -= request.num_sequences
        self._room = min(self._room + 1, self._spec.window)
        job = self._context.job
        line = answer_line(self._spec, job.id, int(job.created_at), request, answer)
        if answer.is_ok:
            self._answers.add(line)
            cursor.completed += 1
            cursor.input_tokens += answer.tokens("prompt_tokens")
            cursor.output_tokens += answer.tokens("completion_tokens")
        else:
            self._errors.add(line)
            cursor.failed += 1
        cursor.next = request.index + 1

    # -- ending --------------------------------------------------------------------------------------------------------

    async def _end_early(self, ending: Ending) -> None:
        """Cancel what waits, write what has ended and, where the time was over, name all lines that have no answer."""
        cursor = self._cursor
        if cursor.ending is None and cursor.total:
            await self._gather(ending)
            cursor.ending = ending
            cursor.sent = cursor.next
            await self._save_quietly()
        if ending == "cancelled":
            return
        async for request in self._file.requests(cursor.next):
            self._note_expired(request)
            if self._is_part_full():
                await self._save_quietly()
        await self._save_quietly()

    async def _gather(self, ending: Ending) -> None:
        """What came of all lines that were ever asked."""
        self._gives_up_at = self._loop.time() + _ENDING_PATIENCE_S
        while (request := await self._upcoming()) is not None and request.index < self._sent_before:
            self._send(request)
        self._requests = self._next = None
        if self._window:
            await self._cancel_samples()
        while pending := [asked.task for asked in self._window if not asked.task.done()]:
            await asyncio.wait(pending, timeout=_LOOK_S)
            await self._cancel_samples()
        while self._window:
            asked = self._window.popleft()
            if _has_ended(asked.task.result()):
                self._take(asked)
            elif ending == "expired":
                self._note_expired(asked.request)
            self._cursor.next = asked.request.index + 1

    async def _cancel_samples(self) -> None:
        session = await self._context.door.session()
        await self._context.door.request("POST", f"/api/native/v1/sessions/{session}/cancel_samples")

    def _note_expired(self, request: BatchRequest) -> None:
        self._errors.add(expired_line(self._context.job.id, request.index, request.custom_id))
        self._cursor.failed += 1
        self._cursor.next = request.index + 1

    async def _finish(self, ending: Ending | None) -> JsonObject:
        cursor = self._cursor
        if cursor.finalizing_at is None:
            cursor.finalizing_at = self._context.now()
        with suppress(JobCancelled):
            await self._save("finalizing", finalizing_at=cursor.finalizing_at)
        keep_s = self._spec.output_expires_after_s
        return {
            "outcome": ending or "completed",
            "output_file_id": await self._answers.join(keep_s=keep_s),
            "error_file_id": await self._errors.join(keep_s=keep_s),
            "total": cursor.total,
            "completed": cursor.completed,
            "failed": cursor.failed,
            "input_tokens": cursor.input_tokens,
            "output_tokens": cursor.output_tokens,
        }

    # -- saving --------------------------------------------------------------------------------------------------------

    def _is_part_full(self) -> bool:
        num_lines = self._answers.num_lines + self._errors.num_lines
        return num_lines >= MAX_PART_LINES or self._answers.num_bytes + self._errors.num_bytes >= MAX_PART_BYTES

    def _has_waited(self) -> bool:
        now = self._loop.time()
        patience_s = max(_WRITE_S, _SHARE_OF_TIME * (now - self._began_at))
        return now - self._written_at > patience_s and bool(self._answers.num_lines + self._errors.num_lines)

    async def _save(self, phase: str, **progress: Any) -> None:
        """Write what waits, then note that it is written."""
        await self._answers.write()
        await self._errors.write()
        self._written_at = self._loop.time()
        cursor = self._cursor
        await self._context.save(
            cursor.to_json(),
            phase=phase,
            done=cursor.completed + cursor.failed,
            total=cursor.total,
            unit="requests",
            completed=cursor.completed,
            failed=cursor.failed,
            input_tokens=cursor.input_tokens,
            output_tokens=cursor.output_tokens,
            **progress,
        )

    async def _save_quietly(self) -> None:
        """Also when the owner wants it to end, which it does already."""
        with suppress(JobCancelled):
            await self._save("in_progress")

    async def _look(self) -> None:
        """A safe point without news, now and then."""
        if self._loop.time() - self._looked_at < _LOOK_S:
            return
        self._looked_at = self._loop.time()
        await self._context.save()
        if self._context.has_expired:
            raise _Expired


def _has_ended(answer: BatchAnswer) -> bool:
    """Whether this is what a line comes to, rather than that nobody waited for it."""
    error = answer.body.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return answer.status not in PASSES and code != _CANCELLED
