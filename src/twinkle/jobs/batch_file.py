"""A batch's file: judged whole before anything starts, and then read from any place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import quote

import httpx
import orjson

from twinkle.core.job import JobFailed, JsonObject
from twinkle.jobs.batch_lines import BatchReader, BatchRequest, request_of
from twinkle.jobs.context import JobContext
from twinkle.wire.bodies.jobs_batch import BatchSpec
from twinkle.wire.jsonl import BATCH_MAX_BYTES, BATCH_MAX_LINES, MAX_LINE_BYTES, BatchLine, Line, LineProblem

PASSES = frozenset({408, 429, 502, 503, 504})
"""Answers of the API after which it is asked again."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
_LINES_A_BREATH = 100


class BatchFile:
    """The lines of a batch.

    Args:
        context: Of the job.
        look: Is called again and again meanwhile, and raises when the job is to end.
    """

    def __init__(self, context: JobContext[BatchSpec], look: Callable[[], Awaitable[None]]) -> None:
        self._context = context
        self._look = look

    async def judge(self) -> BatchReader:
        """Look at every line, and at every model that one names.

        Raises:
            JobFailed: Something is wrong; it names the first of them.
        """
        reader = BatchReader(self._context.spec)
        num_bytes = 0
        await self._context.save(phase="validating", unit="requests")
        async for line in self._lines(start=0):
            num_bytes += len(line.data) + 1
            reader.look_at(line)
            if reader.found.num_lines > BATCH_MAX_LINES:
                break
            if num_bytes > BATCH_MAX_BYTES:
                message = f"the file has more than the {BATCH_MAX_BYTES} bytes that a batch may have"
                reader.found.add(LineProblem(line=None, column=None, code="file_too_large", message=message))
                break
            if reader.found.num_lines % _LINES_A_BREATH == 0:
                await asyncio.sleep(0)
                await self._look()
        for model in list(reader.models):
            await self._judge_model(reader, model)
        found = reader.finish()
        if found.num_wrong:
            errors = sorted(found.problems, key=lambda one: (one.line is not None, one.line or 0))
            raise JobFailed(
                "invalid_batch",
                f"{found.num_wrong} things are wrong in its file, and nothing was started; first: {errors[0]}",
                field="data",
                details={"errors": [_told(problem) for problem in errors], "num_wrong": found.num_wrong},
            )
        return reader

    async def requests(self, index: int) -> AsyncIterator[BatchRequest]:
        """The requests from a place on. All lines were judged before, and files do not change."""
        place = 0
        async for line in self._lines(start=0):
            if place >= index:
                value = orjson.loads(line.data)
                read = BatchLine(
                    line.number, line.start, value["custom_id"], value["method"], value["url"], value["body"]
                )
                yield request_of(self._context.spec, read, place, seed=self._context.seed_of("line", place))
            place += 1

    async def _judge_model(self, reader: BatchReader, model: str) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            response = await self._context.door.request("GET", f"/v1/models/{quote(model, safe='')}")
            if response.status_code not in PASSES:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            await self._look()
        if not response.is_success:
            reader.refuse_model(model, _message_of(response))

    async def _lines(self, *, start: int) -> AsyncIterator[Line]:
        number = start
        async for data in self._context.files.lines(self._context.spec.data, start=start):
            number += 1
            if data.strip():
                yield Line(number, 0, data, is_too_long=len(data) > MAX_LINE_BYTES)


def json_of(response: httpx.Response) -> JsonObject:
    """What the API answered, or an error around what is no JSON."""
    try:
        body = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        body = None
    return body if isinstance(body, dict) else {"error": {"message": response.text[:1000], "code": "internal"}}


def _message_of(response: httpx.Response) -> str:
    error = json_of(response).get("error")
    return str(error.get("message")) if isinstance(error, dict) else f"answered {response.status_code}"


def _told(problem: LineProblem) -> JsonObject:
    column = "" if problem.column is None else f" (column {problem.column})"
    return {
        "line": problem.line,
        "code": problem.code,
        "message": f"{problem.message}{column}",
        "param": problem.param,
    }
