"""What the clerk of a worker tells the step loop."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator

import pytest

from harness.polling import wait_until
from twinkle.workers.clerk import Clerk, OneThread


@pytest.fixture
def changed() -> threading.Event:
    return threading.Event()


@pytest.fixture
def clerk(changed: threading.Event) -> Iterator[Clerk]:
    clerk = Clerk(OneThread("clerk"), changed)
    yield clerk
    clerk.close()


def test_whoever_takes_back_learns_whether_there_was_anything(clerk: Clerk, changed: threading.Event) -> None:
    told: list[int] = []
    assert not clerk.take_back()
    clerk.hand(lambda: 7, told.append, aside=True)
    assert changed.wait(60)
    assert clerk.take_back(), "the loop would rest though what waited for this can be claimed now"
    assert told == [7]
    assert not clerk.take_back()


def test_what_comes_behind_a_task_that_failed_is_not_done(clerk: Clerk, changed: threading.Event) -> None:
    done: list[int] = []
    may_fail = threading.Event()

    def fail() -> None:
        may_fail.wait(60)
        raise OSError("the disk is gone")

    clerk.hand(fail, lambda _: None, aside=True)
    clerk.hand(lambda: done.append(1), lambda _: None, aside=True)
    may_fail.set()
    with pytest.raises(OSError, match="the disk is gone"):
        clerk.settle()
    clerk.forget()
    assert clerk.is_idle
    assert done == []


def test_the_thread_lets_go_of_what_it_has_done_and_ends_with_its_owner() -> None:
    class Request:
        pass

    thread = OneThread("beside")
    request, is_done = Request(), threading.Event()
    held = weakref.ref(request)

    def task(_: Request = request) -> None:
        is_done.set()

    thread.submit(task)
    assert is_done.wait(60)
    del request, task
    wait_until(lambda: held() is None, what="the thread holds what it has done")
    (runs,) = (one for one in threading.enumerate() if one.name == "beside")
    del thread
    runs.join(60)

    assert not runs.is_alive()
