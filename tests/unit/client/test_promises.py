"""Promises and futures: waited for in threads and in event loops, singly and together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from twinkle.client import Future, Promise, as_completed, gather
from twinkle.client.errors import Cancelled
from twinkle.wire.bodies.native import StandingResponse


@pytest.fixture
def other_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """The loop of a client that runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def nobody(future: Future[int]) -> Promise[StandingResponse]:
    raise AssertionError("asked")


def promises(loop: asyncio.AbstractEventLoop, count: int) -> list[Promise[int]]:
    return [Promise(loop) for _ in range(count)]


def test_result_waits_for_another_thread(other_loop: asyncio.AbstractEventLoop) -> None:
    promise: Promise[int] = Promise(other_loop)
    with pytest.raises(TimeoutError):
        promise.result(timeout=0.01)

    other_loop.call_soon_threadsafe(promise.set_result, 7)

    assert promise.result(timeout=5) == 7
    assert promise.done()


def test_the_first_outcome_counts(other_loop: asyncio.AbstractEventLoop) -> None:
    promise: Promise[int] = Promise(other_loop)
    promise.set_result(1)
    promise.set_result(2)
    promise.set_exception(Cancelled("late"))

    assert promise.result() == 1


async def test_it_can_be_awaited_in_any_loop(other_loop: asyncio.AbstractEventLoop) -> None:
    promise: Promise[int] = Promise(other_loop)
    other_loop.call_soon_threadsafe(promise.set_result, 7)

    assert await asyncio.wait_for(asyncio.gather(promise, promise), 5) == [7, 7]


async def test_giving_up_the_wait_gives_up_nothing_else(other_loop: asyncio.AbstractEventLoop) -> None:
    promise: Promise[int] = Promise(other_loop)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(promise, 0.01)

    promise.set_result(7)

    assert await promise == 7


async def test_blocking_where_the_value_comes_from_is_refused() -> None:
    promise: Promise[int] = Promise(asyncio.get_running_loop())

    with pytest.raises(RuntimeError, match="await"):
        promise.result()
    with pytest.raises(RuntimeError, match="await"):
        next(iter(as_completed([promise])))


def test_a_callback_gets_the_promise_itself(other_loop: asyncio.AbstractEventLoop) -> None:
    called: list[Promise[int]] = []
    promise: Promise[int] = Promise(other_loop)
    promise.add_done_callback(called.append)
    promise.set_result(1)
    promise.add_done_callback(called.append)

    assert called == [promise, promise]


def test_gather_keeps_the_order_and_fails_with_the_first(other_loop: asyncio.AbstractEventLoop) -> None:
    first, second = promises(other_loop, 2)
    together = gather(first, second)
    second.set_result(2)
    assert not together.done()
    first.set_result(1)
    assert together.result(5) == [1, 2]

    open_one, broken = promises(other_loop, 2)
    broken.set_exception(Cancelled("no longer wanted"))
    with pytest.raises(Cancelled):
        gather(open_one, broken).result(5)
    with pytest.raises(ValueError, match="at least one"):
        gather()


def test_as_completed_goes_by_when_they_end(other_loop: asyncio.AbstractEventLoop) -> None:
    waited_for = promises(other_loop, 3)
    for index in (2, 0):
        waited_for[index].set_result(index)
    seen = iter(as_completed(waited_for, timeout=0.05))

    assert {next(seen).result(), next(seen).result()} == {0, 2}
    with pytest.raises(TimeoutError, match="1 of 3"):
        next(seen)


async def test_as_completed_in_a_loop(other_loop: asyncio.AbstractEventLoop) -> None:
    waited_for = promises(other_loop, 3)
    order = [1, 2, 0]
    waited_for[order[0]].set_result(order[0])
    seen = []

    async for promise in as_completed(waited_for, timeout=5):
        seen.append(await promise)
        for index in order[len(seen) : len(seen) + 1]:
            other_loop.call_soon_threadsafe(waited_for[index].set_result, index)

    assert seen == order

    with pytest.raises(TimeoutError, match="1 of 1"):
        async for _ in as_completed(promises(other_loop, 1), timeout=0.01):
            pass


def test_an_unsent_operation_is_cancelled_at_once(other_loop: asyncio.AbstractEventLoop) -> None:
    future: Future[int] = Future(other_loop, ask_status=nobody)

    assert future.cancel()
    assert not future.begin()
    for promise in (future, future.accepted()):
        with pytest.raises(Cancelled):
            promise.result(1)
    assert future.request_id is None


def test_an_accepted_training_operation_stays(other_loop: asyncio.AbstractEventLoop) -> None:
    future: Future[int] = Future(other_loop, ask_status=nobody)
    assert future.begin()
    future.set_accepted("run:req:1")

    assert not future.cancel()
    assert (future.done(), future.request_id) == (False, "run:req:1")


def test_for_a_sample_that_was_sent_the_server_is_asked(other_loop: asyncio.AbstractEventLoop) -> None:
    asked: list[Future[int]] = []
    future: Future[int] = Future(other_loop, ask_status=nobody, ask_to_cancel=asked.append)
    future.begin()

    assert future.cancel()
    assert (asked, future.done()) == ([future], False)
    future.set_result(1)
    assert not future.cancel()
