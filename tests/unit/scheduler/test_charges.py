"""What an operation is charged for."""

from __future__ import annotations

import pytest

from twinkle.scheduler.fairness import PassRate, charge_of_time, charge_of_tokens


def test_what_shares_the_device_is_charged_its_tokens() -> None:
    assert [charge_of_tokens(number) for number in (0, 1, 500)] == [1, 1, 500]


def test_what_has_the_device_to_itself_is_charged_what_others_would_have_got_meanwhile() -> None:
    assert charge_of_time(0.5, tokens_per_s=2000.0) == 1000
    assert charge_of_time(0.0, tokens_per_s=2000.0) == 1
    assert charge_of_time(0.5, tokens_per_s=0.0) == 1, "nothing was measured yet"


def test_a_replay_is_charged_its_tokens_at_least() -> None:
    assert charge_of_time(0.0, tokens_per_s=0.0, num_replayed=30_000) == 30_000
    assert charge_of_time(20.0, tokens_per_s=2000.0, num_replayed=30_000) == 40_000


def test_the_rate_is_that_of_the_last_passes() -> None:
    rate = PassRate()
    assert rate.tokens_per_s == 0.0
    for _ in range(200):
        rate.note(100, 1.0)
    assert rate.tokens_per_s == pytest.approx(100)

    for _ in range(200):
        rate.note(1000, 1.0)

    assert rate.tokens_per_s == pytest.approx(1000, rel=0.01)
