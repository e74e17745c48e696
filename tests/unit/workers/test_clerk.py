"""What the clerk of a worker tells the step loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from twinkle.workers.clerk import Clerk


@pytest.fixture
def changed() -> threading.Event:
    return threading.Event()


@pytest.fixture
def clerk(changed: threading.Event) -> Iterator[Clerk]:
    clerk = Clerk(ThreadPoolExecutor(1), changed)
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
