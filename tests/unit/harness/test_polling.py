"""Whoever waits leaves the core to what is waited for."""

from __future__ import annotations

import pytest

from harness import polling
from harness.clock import HandClock
from harness.polling import wait_for


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    clock = HandClock()
    monkeypatch.setattr(polling, "time", clock)
    return clock


def num_looks(clock: HandClock, *, look_s: float, wait_s: float) -> int:
    looks = 0
    ends_at = clock.now() + wait_s

    def look() -> bool:
        nonlocal looks
        looks += 1
        clock.move(look_s)
        return clock.now() > ends_at

    assert wait_for(look, what="the end of a wait")
    return looks


def test_what_comes_at_once_is_seen_at_once(clock: HandClock) -> None:
    before = clock.now()

    num_looks(clock, look_s=0.0, wait_s=0.1)

    assert clock.now() - before == pytest.approx(0.1, abs=0.006)


def test_looks_are_a_small_part_of_a_wait(clock: HandClock) -> None:
    assert num_looks(clock, look_s=0.01, wait_s=10.0) * 0.01 < 2.1
    assert num_looks(clock, look_s=0.0, wait_s=20.0) < 1000


def test_what_never_comes_fails_with_its_name_in_time(clock: HandClock) -> None:
    before = clock.now()

    with pytest.raises(AssertionError, match=r"not within 3\.0 s: the impossible"):
        wait_for(lambda: None, what="the impossible", deadline_s=3.0)

    assert clock.now() - before == pytest.approx(3.0, abs=0.05)
