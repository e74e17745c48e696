"""What owners of jobs want to be told of, by their webhooks: the events that are there, and how far they were told.

The events themselves are what is to be delivered, so nothing is lost with a process; whoever tells one holds it for a
while, and where it does not say what came of it, it is told again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from twinkle.core.clock import Clock
from twinkle.core.job import Job, JobEvent, JobState
from twinkle.storage.database import Database, Row, Transaction
from twinkle.storage.jobs.rows import COLUMNS, append_events, job_of

_TOLD_STATES = frozenset(
    {JobState.RUNNING, JobState.PAUSED, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.RETRYING}
)
_CHUNK = 200


@dataclass(frozen=True, kw_only=True)
class DueJob:
    """A job with something to tell."""

    id: str
    tenant: str


@dataclass(frozen=True, kw_only=True)
class DueHook:
    """An event to tell, and how often that was tried in vain."""

    job: Job
    event: JobEvent
    num_refusals: int


class JobHooks:
    """Jobs whose owners are to be told something. Each method is one transaction."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def due(self, *, limit: int, each: int) -> list[DueJob]:
        """Jobs that something has happened in since their owners were told, the longest due first.

        Args:
            limit: How many at most.
            each: And of one tenant, however many of its jobs have something to tell.
        """
        rows = self._database.read(
            "SELECT d.id, d.tenant FROM (SELECT id, tenant, tell_at, ROW_NUMBER() OVER (PARTITION BY tenant"
            " ORDER BY tell_at, id) AS place FROM job WHERE notify_url IS NOT NULL AND told_number < num_events"
            " AND tell_at <= ?) AS d WHERE d.place <= ? ORDER BY d.tell_at, d.id LIMIT ?",
            (self._clock.now(), each, limit),
        )
        return [DueJob(id=row.id, tenant=row.tenant) for row in rows]

    def take(self, job_id: str, *, hold_s: float) -> DueHook | None:
        """The next event to tell of a job, nobody else's for so long; none if there is none, or somebody has it."""
        now = self._clock.now()
        with self._database.transaction() as transaction:
            row = transaction.execute(
                f"SELECT {COLUMNS}, num_events, told_number, tell_at, num_refusals FROM job WHERE id = ? FOR UPDATE",
                (job_id,),
            ).fetchone()
            if row is None or row.tell_at > now or row.told_number >= row.num_events:
                return None
            event = _next_event(transaction, row)
            told = row.num_events if event is None else event.number - 1
            until = 0.0 if event is None else now + hold_s
            transaction.execute("UPDATE job SET told_number = ?, tell_at = ? WHERE id = ?", (told, until, job_id))
        return None if event is None else DueHook(job=job_of(row), event=event, num_refusals=row.num_refusals)

    def end(self, hook: DueHook, message: str) -> None:
        """The event was told, or is given up; in words for the job's owner."""
        with self._database.transaction() as transaction:
            told = transaction.execute(
                "UPDATE job SET told_number = ?, tell_at = 0, num_refusals = 0 WHERE id = ? AND told_number < ?",
                (hook.event.number, hook.job.id, hook.event.number),
            ).rowcount
            if told:
                self._note(transaction, hook, message)

    def put_off(self, hook: DueHook, message: str, *, seconds: float) -> None:
        """Tell it again later; the reason in words for the job's owner."""
        with self._database.transaction() as transaction:
            waits = transaction.execute(
                "UPDATE job SET tell_at = ?, num_refusals = num_refusals + 1 WHERE id = ? AND told_number < ?",
                (self._clock.now() + seconds, hook.job.id, hook.event.number),
            ).rowcount
            if waits:
                self._note(transaction, hook, message)

    def _note(self, transaction: Transaction, hook: DueHook, message: str) -> None:
        event = JobEvent(kind="message", message=message, data={"webhook": hook_id(hook)})
        append_events(transaction, hook.job.id, [event], self._clock.now())


def hook_id(hook: DueHook) -> str:
    """By which a receiver knows an event that it was told before."""
    return f"{hook.job.id}:{hook.event.number}"


def _next_event(transaction: Transaction, row: Row) -> JobEvent | None:
    number = row.told_number
    while True:
        events = transaction.execute(
            "SELECT number, at, kind, message, data FROM job_event WHERE job = ? AND number > ?"
            " ORDER BY number LIMIT ?",
            (row.id, number, _CHUNK),
        ).fetchall()
        for one in events:
            event = JobEvent(
                kind=one.kind, message=one.message, data=json.loads(one.data), number=one.number, at=one.at
            )
            if event.kind == "attempt" or (event.kind == "status" and event.data.get("state") in _TOLD_STATES):
                return event
        if len(events) < _CHUNK:
            return None
        number = events[-1].number
