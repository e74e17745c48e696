"""What beat sends is what the sweeps take: nothing."""

from __future__ import annotations

import pytest
from celery import Celery

from twinkle.tasks.housekeeping import Housekeeping, register


class Recording(Housekeeping):
    """Notes which sweep ran instead of sweeping."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def nudge(self) -> None:
        self.ran.append("nudge")

    def sweep(self) -> None:
        self.ran.append("sweep")

    def expire(self) -> None:
        self.ran.append("expire")


@pytest.mark.parametrize("name", ["nudge", "sweep", "expire"])
def test_each_sweep_is_on_the_beat_and_runs_without_arguments(name: str) -> None:
    app, housekeeping = Celery("test", broker="memory://", set_as_current=False), Recording()
    register(app, housekeeping)
    entry = app.conf.beat_schedule[f"housekeeping.{name}"]
    task = app.tasks[entry["task"]]

    task.apply_async(**entry["options"])  # raises when the message would lack an argument
    task()

    assert housekeeping.ran == [name]
