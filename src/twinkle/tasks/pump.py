"""The task behind a nudge: it wakes the mesh worker, which looks into the journal."""

from __future__ import annotations

from collections.abc import Callable

from celery import Celery

from twinkle.tasks.nudge import PUMP


def register_pump(app: Celery, pump: Callable[[], None]) -> None:
    """Make ``pump`` what the application does when it is nudged.

    The message is acknowledged before the work (it says nothing that the journal does not), carries no payload and
    leaves no result. It is not shown as a task: the operations are, and there would be as many nudges among them.
    """
    app.task(name=PUMP, shared=False, acks_late=False, ignore_result=True, send_events=False)(pump)
