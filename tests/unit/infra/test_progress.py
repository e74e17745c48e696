"""What long phases show."""

from __future__ import annotations

import io
import time

import pytest

from twinkle.infra.progress import LINE_EVERY_S, track


class Records:
    def __init__(self) -> None:
        self.records: list[tuple[str, dict[str, object]]] = []

    def info(self, event: str, **facts: object) -> None:
        self.records.append((event, facts))

    warning = info


class Hand:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_where_there_is_no_terminal_a_line_comes_now_and_then_with_rate_and_time_left() -> None:
    clock, log = Hand(), Records()
    with track("encode", total=100, stream=io.StringIO(), clock=clock, log=log) as progress:
        for _ in range(50):
            clock.now += LINE_EVERY_S / 10
            progress.advance()
    assert [event for event, _ in log.records] == ["progress"] * 5 + ["progress.done"]
    assert log.records[0][1] == {
        "phase": "encode",
        "done": 10,
        "unit": "rows",
        "total": 100,
        "per_s": 1.0,
        "left_s": 90,
        "passed_s": 10,
    }


def test_what_is_quick_says_nothing() -> None:
    log = Records()
    with track("encode", total=3, stream=io.StringIO(), clock=Hand(), log=log) as progress:
        progress.advance(3)
    assert log.records == []
    terminal = Terminal()
    with track("encode", total=3, stream=terminal) as progress:
        progress.advance(3)
    assert "encode" not in terminal.getvalue()


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle.infra.progress.QUICK_S", 0.0)
    terminal = Terminal()
    with track("pack", total=4, stream=terminal, clock=time.monotonic) as progress:
        progress.advance(4)
    assert "pack" in terminal.getvalue() and "4/4" in terminal.getvalue()


def test_only_the_first_rank_shows_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    clock, log = Hand(), Records()
    with track("encode", stream=io.StringIO(), clock=clock, log=log) as progress:
        clock.now += 60
        progress.advance()
    assert log.records == []


def test_a_phase_that_fails_still_says_how_far_it_came() -> None:
    clock, log = Hand(), Records()

    def fails() -> None:
        with track("map", stream=io.StringIO(), clock=clock, log=log) as progress:
            progress.advance(7)
            clock.now += 11
            raise ValueError("row 8")

    with pytest.raises(ValueError, match="row 8"):
        fails()
    assert log.records[-1][0] == "progress.done" and log.records[-1][1]["done"] == 7
