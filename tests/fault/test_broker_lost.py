"""The broker emptied, killed, frozen: it carries nothing that matters, and nobody waits for it."""

from __future__ import annotations

import threading

import redis

from harness.polling import busyness
from harness.recovery import finished_again_s, now, tell
from harness.struck import Struck

GOES_ON_WITHIN_S = 10.0
FROZEN_S = 6.0


def _broker_url(struck: Struck) -> str:
    return (struck.served.home / "broker-url").read_text().strip()


def test_an_emptied_broker_delays_nothing_for_long(struck: Struck) -> None:
    seconds: list[float] = []

    def empty() -> None:
        for _ in range(5):
            finished_again_s(struck.served.query, now(), count=5)
            with redis.Redis.from_url(_broker_url(struck)) as client:
                client.flushall()
            seconds.append(finished_again_s(struck.served.query, now(), count=10))

    verdict = struck.work_through(empty)

    tell("the broker emptied, until ten more operations have ended", seconds)
    assert verdict.violations == verdict.failed == []
    assert max(seconds) < GOES_ON_WITHIN_S * busyness()


def test_a_broker_that_answers_nobody_stops_nobody(struck: Struck) -> None:
    """Frozen, it holds its connections open: every wait for it runs into its timeout instead of an error."""
    ended: list[int] = []

    def freeze() -> None:
        finished_again_s(struck.served.query, now(), count=5)
        broker = struck.served.part("the broker")
        broker.suspend()
        since = now()
        try:
            threading.Event().wait(FROZEN_S)
            ended.append(struck.served.query("SELECT COUNT(*) FROM operation WHERE finished_at > ?", since)[0][0])
        finally:
            broker.resume()

    verdict = struck.work_through(freeze)

    print(f"\n{ended[0]} operations ended in {FROZEN_S} s without a broker")
    assert verdict.violations == verdict.failed == []
    assert ended[0] >= FROZEN_S  # at least one a second: the sweeps alone
