"""Outcomes on their way to whoever waits: whatever goes wrong in between, they hear of it."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import cast

import httpx
import pytest

from twinkle.client.backoff import RetryPolicy
from twinkle.client.collector import Collector
from twinkle.client.connection import Connection
from twinkle.client.endpoint import find_endpoint
from twinkle.client.errors import RunClosed
from twinkle.client.facade import LoopThread
from twinkle.client.future import Future
from twinkle.client.operations import OperationQueue
from twinkle.client.promise import Promise
from twinkle.client.sampler import Sampler
from twinkle.client.transport import Request, Transport
from twinkle.core.operation import OperationKind
from twinkle.wire.bodies.native import CollectedFuture, CollectResponse, StandingResponse

PATIENCE_S = 60.0


class _Broken:
    """A way to the server on which something goes wrong that nobody has thought of."""

    def __init__(self, *answers: bytes | Exception) -> None:
        self._answers = list(answers)
        self.num_asked = 0

    async def send(self, request: Request, *, gives_up: bool = True) -> bytes:
        self.num_asked += 1
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _nobody(future: Future[object]) -> Promise[StandingResponse]:
    raise AssertionError("asked")


def _ended(request_id: str, result: bytes | None) -> bytes:
    ended = CollectedFuture(request_id=request_id, state="done", kind=OperationKind.OPTIM_STEP, result=result)
    return CollectResponse(ended=[ended]).model_dump_json().encode()


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        pytest.param([RuntimeError("no buffer")], RuntimeError, id="held"),
        pytest.param([_ended("run:req:1", b"{")], ValueError, id="unreadable"),
        pytest.param([_ended("run:req:1", None), RuntimeError("no buffer")], RuntimeError, id="fetched"),
    ],
)
async def test_an_error_nobody_thought_of_is_told_to_whoever_waits_and_is_not_asked_again_for_ever(
    answers: list[bytes | Exception], error: type[Exception]
) -> None:
    way = _Broken(*answers)
    collector = Collector(cast(Transport, way))
    future: Future[object] = Future(asyncio.get_running_loop(), ask_status=_nobody)
    collector.add("run:req:1", future)
    with pytest.raises(error):
        await asyncio.wait_for(future, PATIENCE_S)
    await collector.close()

    assert (way.num_asked, collector.num_polls) == (len(answers), 0)


class _Refusing(httpx.AsyncBaseTransport):
    """A network on which something goes wrong that is no error of the network."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        raise RuntimeError("no buffer")


async def test_what_cannot_be_sent_for_a_reason_nobody_thought_of_fails_and_keeps_a_runs_order() -> None:
    connection = Connection(find_endpoint("http://127.0.0.1:1", "tml-test"), RetryPolicy(), carrier=_Refusing())
    run = OperationQueue(connection, "run", next_seq=1)
    sample = Sampler(connection, "sampler").sample([1, 2, 3], max_tokens=1)
    first, second = (run.put(lambda seq: Request(path=f"/{seq}")) for _ in range(2))
    standing = connection.follow("run:req:0").status()
    for future in (sample, first, standing):
        with pytest.raises(RuntimeError, match="no buffer"):
            await asyncio.wait_for(future, PATIENCE_S)
    with pytest.raises(RunClosed, match="no buffer"):
        await asyncio.wait_for(second, PATIENCE_S)
    await connection.close()


def test_what_is_begun_on_the_loop_and_fails_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    has_run = threading.Event()

    async def fail() -> None:
        has_run.set()
        raise RuntimeError("no thread left")

    thread = LoopThread("begun")
    with caplog.at_level(logging.ERROR):
        thread.begin(fail())
        assert has_run.wait(PATIENCE_S)
        thread.run(asyncio.sleep(0))
        thread.stop()

    assert [record.getMessage() for record in caplog.records] == ["what went on by itself has failed: no thread left"]
