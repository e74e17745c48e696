"""Jobs as their owners see them: submitted, found, listed, told to pause, to go on, to end."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from twinkle.core.clock import Clock
from twinkle.core.errors import Conflict, InvalidInput, NotFound
from twinkle.core.job import (
    FINAL_STATES,
    Dependency,
    EventKind,
    Job,
    JobAttempt,
    JobEvent,
    JobKind,
    JobPlace,
    JobState,
    NewJob,
)
from twinkle.storage.database import Database, Row, Transaction, placeholders
from twinkle.storage.jobs.rows import COLUMNS, append_events, end_job, job_of

_STEP_S = 1e-5
"""Between the members of an array, so that a list of jobs has their order."""

_SUBMITTED = JobEvent(kind="status", message="submitted", data={"state": JobState.QUEUED.value})


class Jobs:
    """Tenants' jobs. Each method is one transaction."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def create(self, new: NewJob) -> Job:
        """Take a job on; the same client's id and digest get the same job; raises as :meth:`create_many`."""
        return self.create_many([new])[0]

    def create_many(self, news: Sequence[NewJob]) -> list[Job]:
        """Take jobs on, all of them or none. One may wait for another that stands before it.

        Raises:
            Conflict: A client's id was used for another job.
            NotFound: A job to wait for, or a parent, does not exist or is another tenant's.
        """
        now = self._clock.now()
        with self._database.transaction() as transaction:
            ids = [self._create(transaction, new, now, place=place * _STEP_S) for place, new in enumerate(news)]
            rows = transaction.execute(f"SELECT {COLUMNS} FROM job WHERE id IN ({placeholders(ids)})", ids).fetchall()
        by_id = {row.id: job_of(row) for row in rows}
        return [by_id[job] for job in ids]

    def _create(self, transaction: Transaction, new: NewJob, now: float, *, place: float) -> str:
        created = transaction.execute(
            "INSERT INTO job (id, tenant, kind, spec, digest, client_id, name, parent, nice, max_attempts, notify_url,"
            " user_metadata, seed, state, progress, saved, attempt, num_failures, best_done, num_events, num_needs,"
            " epoch, lease_until, not_before, nudged_at, created_at, expires_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'queued', '{}', '{}', 0, 0, 0, 0, 0, 0, 0, 0, 0, ?, ?)"
            " ON CONFLICT DO NOTHING",
            (
                new.id,
                new.tenant,
                new.kind.value,
                json.dumps(new.spec),
                new.digest,
                new.client_id,
                new.name,
                new.parent,
                new.nice,
                new.max_attempts,
                new.notify_url,
                json.dumps(new.metadata),
                new.drawn_seed,
                now + place,
                new.expires_at,
            ),
        ).rowcount
        if not created:
            return _same_job(transaction, new)
        if new.parent is not None:
            _lock_job(transaction, new.tenant, new.parent)
        append_events(transaction, new.id, [_SUBMITTED], now)
        if new.after:
            _wait_for(transaction, new, new.after)
        return new.id

    def find(self, job_id: str, tenant: str) -> Job:
        """One of the tenant's jobs.

        Raises:
            NotFound: It does not exist or is another tenant's.
        """
        rows = self._database.read(f"SELECT {COLUMNS} FROM job WHERE id = ? AND tenant = ?", (job_id, tenant))
        if not rows:
            raise NotFound(f"no job {job_id!r}")
        return job_of(rows[0])

    def find_by_client_id(self, client_id: str, tenant: str) -> Job | None:
        """The tenant's job under an id of its own choosing."""
        rows = self._database.read(f"SELECT {COLUMNS} FROM job WHERE tenant = ? AND client_id = ?", (tenant, client_id))
        return job_of(rows[0]) if rows else None

    def page(
        self,
        tenant: str,
        *,
        limit: int,
        after: JobPlace | None = None,
        kinds: Collection[JobKind] = (),
        states: Collection[JobState] = (),
        parent: str | None = None,
    ) -> list[Job]:
        """At most ``limit`` of the tenant's jobs, newest first; those behind ``after`` if that is given.

        Args:
            tenant: Whose.
            limit: How many at most.
            after: The place of the last one of the page before.
            kinds: Of these kinds only, if any are given.
            states: In these states only, if any are given.
            parent: Members of this one only.
        """
        where, parameters = ["tenant = ?"], [tenant]
        values: list[object] = list(parameters)
        if parent is not None:
            where.append("parent = ?")
            values.append(parent)
        if after is not None:
            where.append("(created_at, id) < (?, ?)")
            values += [after.created_at, after.id]
        for column, wanted in (("kind", kinds), ("state", states)):
            if wanted:
                where.append(f"{column} IN ({placeholders(wanted)})")
                values += [one.value for one in wanted]
        rows = self._database.read(
            f"SELECT {COLUMNS} FROM job WHERE {' AND '.join(where)} ORDER BY created_at DESC, id DESC LIMIT ?",
            (*values, limit),
        )
        return [job_of(row) for row in rows]

    def request_cancel(self, job_id: str, tenant: str) -> Job:
        """End a job: at once if it never ran, else as soon as its plan has put down what there is.

        Raises:
            NotFound: It does not exist or is another tenant's.
        """
        now = self._clock.now()
        with self._database.transaction() as transaction:
            row = _lock_job(transaction, tenant, job_id)
            state = JobState(row.state)
            if state not in FINAL_STATES and row.attempt == 0:
                end_job(transaction, job_id, JobState.CANCELLED, now)
            elif state not in FINAL_STATES and row.cancel_requested_at is None:
                # Whoever runs it hears of it with the next beat; else somebody is to take it up and let it end.
                ready = "" if state is JobState.RUNNING else ", state = 'queued', not_before = 0, nudged_at = 0"
                transaction.execute(
                    f"UPDATE job SET cancel_requested_at = ?, paused_at = NULL{ready} WHERE id = ?", (now, job_id)
                )
                append_events(transaction, job_id, [_status("cancelling", state)], now)
            return _read(transaction, job_id)

    def request_pause(self, job_id: str, tenant: str) -> Job:
        """Hold a job: at once if nobody runs it, else at its plan's next safe point.

        Raises:
            NotFound: It does not exist or is another tenant's.
            Conflict: It has ended, or is being cancelled.
        """
        now = self._clock.now()
        with self._database.transaction() as transaction:
            row = _lock_job(transaction, tenant, job_id)
            state = JobState(row.state)
            if state in FINAL_STATES or row.cancel_requested_at is not None:
                word = state.value if state in FINAL_STATES else "being cancelled"
                raise Conflict(f"job {job_id} is {word}; it cannot be paused any more")
            if state is JobState.RUNNING:
                transaction.execute(
                    "UPDATE job SET pause_requested_at = COALESCE(pause_requested_at, ?) WHERE id = ?", (now, job_id)
                )
            elif state is not JobState.PAUSED:
                transaction.execute("UPDATE job SET state = 'paused', paused_at = ? WHERE id = ?", (now, job_id))
                append_events(transaction, job_id, [_status("paused", JobState.PAUSED)], now)
            return _read(transaction, job_id)

    def request_resume(self, job_id: str, tenant: str) -> Job:
        """Let a paused job go on; one that is not paused is left as it is. The pause is no part of its time.

        Raises:
            NotFound: It does not exist or is another tenant's.
            Conflict: It has ended.
        """
        now = self._clock.now()
        with self._database.transaction() as transaction:
            row = _lock_job(transaction, tenant, job_id)
            state = JobState(row.state)
            if state in FINAL_STATES:
                raise Conflict(f"job {job_id} is {state.value}; only a paused job can be resumed")
            transaction.execute("UPDATE job SET pause_requested_at = NULL WHERE id = ?", (job_id,))
            if state is JobState.PAUSED:
                follows = JobState.WAITING if row.num_needs else JobState.QUEUED
                transaction.execute(
                    "UPDATE job SET state = ?, expires_at = expires_at + (? - paused_at), paused_at = NULL,"
                    " not_before = 0, nudged_at = 0 WHERE id = ?",
                    (follows.value, now, job_id),
                )
                append_events(transaction, job_id, [_status("resumed", follows)], now)
            return _read(transaction, job_id)

    def request_retry(self, job_id: str, tenant: str) -> Job:
        """Give a job that failed or was cancelled another attempt, from what it had saved.

        Raises:
            NotFound: It does not exist or is another tenant's.
            Conflict: It has not failed.
        """
        now = self._clock.now()
        with self._database.transaction() as transaction:
            row = _lock_job(transaction, tenant, job_id)
            if row.state not in (JobState.FAILED, JobState.CANCELLED):
                raise Conflict(f"job {job_id} is {row.state}; only one that failed or was cancelled can be retried")
            transaction.execute(
                "UPDATE job SET state = 'retrying', failure = NULL, finished_at = NULL, num_failures = 0,"
                " num_needs = 0, broken_need = NULL, cancel_requested_at = NULL, pause_requested_at = NULL,"
                " not_before = 0, nudged_at = 0 WHERE id = ?",
                (job_id,),
            )
            # It waits for nobody any more.
            transaction.execute("UPDATE job_dependency SET ended = TRUE WHERE job = ?", (job_id,))
            append_events(transaction, job_id, [_status("to be retried", JobState.RETRYING)], now)
            return _read(transaction, job_id)

    def events(self, job_id: str, tenant: str, *, after: int = 0, limit: int = 100) -> list[JobEvent]:
        """What happened in a job behind event number ``after``, oldest first. Only the last 10,000 are kept.

        Raises:
            NotFound: It does not exist or is another tenant's.
        """
        self.find(job_id, tenant)
        rows = self._database.read(
            "SELECT number, at, kind, message, data FROM job_event WHERE job = ? AND number > ? ORDER BY number"
            " LIMIT ?",
            (job_id, after, limit),
        )
        return [_event(row) for row in rows]

    def latest_events(
        self,
        job_id: str,
        tenant: str,
        *,
        before: int | None = None,
        limit: int = 100,
        kinds: Collection[EventKind] = (),
    ) -> list[JobEvent]:
        """What happened in a job, newest first; before event number ``before``, of some kinds, where those are given.

        Raises:
            NotFound: It does not exist or is another tenant's.
        """
        self.find(job_id, tenant)
        where: list[str] = ["job = ?"]
        values: list[object] = [job_id]
        if before is not None:
            where.append("number < ?")
            values.append(before)
        if kinds:
            where.append(f"kind IN ({placeholders(kinds)})")
            values += kinds
        rows = self._database.read(
            f"SELECT number, at, kind, message, data FROM job_event WHERE {' AND '.join(where)}"
            " ORDER BY number DESC LIMIT ?",
            (*values, limit),
        )
        return [_event(row) for row in rows]

    def num_events(self, ids: Sequence[str]) -> dict[str, int]:
        """How many events each of some jobs has had: the number of its last one."""
        rows = self._database.read(f"SELECT id, num_events FROM job WHERE id IN ({placeholders(ids)})", ids)
        return {row.id: row.num_events for row in rows}

    def ids_of(self, tenant: str, client_ids: Sequence[str]) -> dict[str, str]:
        """The tenant's jobs by what their client calls them; what is no such name is left out."""
        rows = self._database.read(
            f"SELECT client_id, id FROM job WHERE tenant = ? AND client_id IN ({placeholders(client_ids)})",
            (tenant, *client_ids),
        )
        return {row.client_id: row.id for row in rows}

    def attempts(self, job_id: str, tenant: str) -> list[JobAttempt]:
        """The attempts at a job, first to last.

        Raises:
            NotFound: It does not exist or is another tenant's.
        """
        self.find(job_id, tenant)
        rows = self._database.read(
            "SELECT attempt, owner, started_at, ended_at, outcome, reason FROM job_attempt WHERE job = ?"
            " ORDER BY attempt",
            (job_id,),
        )
        return [
            JobAttempt(
                attempt=row.attempt,
                owner=row.owner,
                started_at=row.started_at,
                ended_at=row.ended_at,
                outcome=row.outcome,
                reason=row.reason,
            )
            for row in rows
        ]


def _same_job(transaction: Transaction, new: NewJob) -> str:
    """The job that is there already, if it is the one that is meant."""
    row = transaction.execute(
        "SELECT id, digest FROM job WHERE tenant = ? AND (client_id = ? OR id = ?)",
        (new.tenant, new.client_id, new.id),
    ).fetchone()
    if row is None or row.digest != new.digest:
        raise Conflict(f"the id {new.client_id or new.id!r} was used for another job; choose a new one")
    job_id: str = row.id
    return job_id


def _wait_for(transaction: Transaction, new: NewJob, after: Sequence[Dependency]) -> None:
    """Note what a new job waits for. What has ended by now is not waited for."""
    conditions: dict[str, str] = {}
    for dependency in after:
        if dependency.job == new.id:
            raise InvalidInput("after", f"job {new.id} cannot wait for itself")
        if conditions.get(dependency.job) != "ok":
            conditions[dependency.job] = dependency.condition
    num_needs, broken = 0, None
    for needs, condition in sorted(conditions.items()):
        state = JobState(_lock_job(transaction, new.tenant, needs).state)
        transaction.execute(
            "INSERT INTO job_dependency (job, needs, condition, ended) VALUES (?, ?, ?, ?)",
            (new.id, needs, condition, state.is_final),
        )
        if not state.is_final:
            num_needs += 1
        elif condition == "ok" and state is not JobState.SUCCEEDED:
            broken = needs
    transaction.execute(
        "UPDATE job SET state = 'waiting', num_needs = ?, broken_need = ? WHERE id = ?", (num_needs, broken, new.id)
    )


def _lock_job(transaction: Transaction, tenant: str, job_id: str) -> Row:
    row = transaction.execute(
        "SELECT state, attempt, num_needs, cancel_requested_at FROM job WHERE id = ? AND tenant = ? FOR UPDATE",
        (job_id, tenant),
    ).fetchone()
    if row is None:
        raise NotFound(f"no job {job_id!r}")
    return row


def _read(transaction: Transaction, job_id: str) -> Job:
    row = transaction.execute(f"SELECT {COLUMNS} FROM job WHERE id = ?", (job_id,)).fetchone()
    assert row is not None, "its row is locked by this transaction"
    return job_of(row)


def _event(row: Row) -> JobEvent:
    return JobEvent(kind=row.kind, message=row.message, data=json.loads(row.data), number=row.number, at=row.at)


def _status(message: str, state: JobState) -> JobEvent:
    return JobEvent(kind="status", message=message, data={"state": state.value})
