"""What a starting worker says its mesh will serve holds for as long as that worker lives, and no longer."""

from __future__ import annotations

from harness.clock import HandClock
from harness.polling import wait_until
from twinkle.core.clock import SystemClock
from twinkle.core.settings import Settings
from twinkle.storage.database import Database
from twinkle.storage.journal.meshes import ANNOUNCED_S, Meshes
from twinkle.storage.schema import upgrade
from twinkle.workers.announcing import announced


def test_a_worker_renews_what_it_announced_while_it_starts_and_takes_it_back(sqlite_url: str) -> None:
    upgrade(sqlite_url)
    database = Database(sqlite_url)
    clock = SystemClock()

    with announced(Settings(database_url=sqlite_url, engine="null", mesh="slow"), renew_every_s=0.01):
        # As who looks when the first word alone would have ended sees it.
        later = Meshes(database, HandClock(clock.now() + ANNOUNCED_S))
        wait_until(lambda: later.all()[0].announced is not None, what="the announcement to be renewed")

    assert later.all() == []
    database.close()
