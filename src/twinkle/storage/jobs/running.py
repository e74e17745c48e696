"""Jobs as their runners see them: claimed under a lease, told how far they are, ended. Every write names the epoch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from twinkle.core.clock import Clock
from twinkle.core.job import (
    Job,
    JobClaim,
    JobEvent,
    JobFailure,
    JobLost,
    JobSignals,
    JobState,
    JsonObject,
)
from twinkle.core.lease import ProcessIdentity
from twinkle.storage.database import Database, Row, Transaction
from twinkle.storage.jobs.rows import COLUMNS, append_events, end_job, job_of
from twinkle.storage.jobs.waiting import is_lost

LOST = "its runner was lost"


class RunningJobs:
    """Who runs which job. Each method is one transaction."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def claim(self, job_id: str, owner: ProcessIdentity, *, lease_s: float) -> JobClaim | None:
        """Take a job up; ``None`` when it is not to be had: it has ended, rests, or somebody runs it.

        A job whose runner was lost begins another attempt, or fails when it has had as many as it may have.
        """
        now = self._clock.now()
        with self._database.transaction() as transaction:
            row = transaction.execute(f"SELECT {COLUMNS} FROM job WHERE id = ? FOR UPDATE", (job_id,)).fetchone()
            if row is None or not _is_free(row, now) or _is_suspended(transaction, row.tenant):
                return None
            was_lost = row.state == JobState.RUNNING
            if was_lost and not _note_lost(transaction, row, now):
                return None
            is_new = was_lost or row.attempt == 0 or row.state == JobState.RETRYING
            attempt = row.attempt + 1 if is_new else row.attempt
            transaction.execute(
                "UPDATE job SET state = 'running', epoch = epoch + 1, owner = ?, lease_until = ?, attempt = ?,"
                " started_at = COALESCE(started_at, ?), paused_at = NULL WHERE id = ?",
                (str(owner), now + lease_s, attempt, now, job_id),
            )
            if row.parent is not None:
                _begin_groups(transaction, row.parent, now)
            if is_new:
                transaction.execute(
                    "INSERT INTO job_attempt (job, attempt, owner, started_at) VALUES (?, ?, ?, ?)",
                    (job_id, attempt, str(owner), now),
                )
                event = JobEvent(kind="attempt", message=f"attempt {attempt} begins", data={"attempt": attempt})
                append_events(transaction, job_id, [event], now)
            claimed = _read(transaction, job_id)
        return JobClaim(job=job_of(claimed), epoch=claimed.epoch, lease_s=lease_s, saved=json.loads(claimed.saved))

    def beat(self, claim: JobClaim) -> JobSignals:
        """Keep the lease; what the job's owner wants of its runner.

        Raises:
            JobLost: Another runner holds the job, or it has ended.
        """
        with self._database.transaction() as transaction:
            row = transaction.execute(
                "UPDATE job SET lease_until = ? WHERE id = ? AND epoch = ? AND state = 'running'"
                " RETURNING tenant, cancel_requested_at, pause_requested_at",
                (self._clock.now() + claim.lease_s, claim.job.id, claim.epoch),
            ).fetchone()
            if row is None:
                raise _lost(claim)
            return _signals(transaction, row)

    def record(
        self,
        claim: JobClaim,
        *,
        phase: str | None = None,
        progress: JsonObject | None = None,
        saved: JsonObject | None = None,
        events: Sequence[JobEvent] = (),
    ) -> JobSignals:
        """Note how far a job is, what its plan goes on from and what happened; what is not given stays.

        Raises:
            JobLost: Another runner holds the job, or it has ended; nothing was written.
        """
        now = self._clock.now()
        with self._database.transaction() as transaction:
            row = _hold(transaction, claim)
            done = float((progress or {}).get("done") or 0.0)
            has_come_further = done > row.best_done
            transaction.execute(
                "UPDATE job SET phase = COALESCE(?, phase), progress = COALESCE(?, progress),"
                " saved = COALESCE(?, saved), best_done = ?, num_failures = ?, lease_until = ? WHERE id = ?",
                (
                    phase,
                    None if progress is None else json.dumps(progress),
                    None if saved is None else json.dumps(saved),
                    done if has_come_further else row.best_done,
                    0 if has_come_further else row.num_failures,
                    now + claim.lease_s,
                    claim.job.id,
                ),
            )
            append_events(transaction, claim.job.id, events, now)
            return _signals(transaction, row)

    def results_of_needs(self, job_id: str) -> dict[str, JsonObject]:
        """The results of the jobs that one came after, by their ids; those that have one."""
        rows = self._database.read(
            "SELECT d.needs, j.result FROM job_dependency d JOIN job j ON j.id = d.needs"
            " WHERE d.job = ? AND j.result IS NOT NULL",
            (job_id,),
        )
        return {row.needs: json.loads(row.result) for row in rows}

    def finish(
        self,
        claim: JobClaim,
        state: JobState,
        *,
        result: JsonObject | None = None,
        failure: JobFailure | None = None,
    ) -> Job:
        """End a job.

        Raises:
            JobLost: Another runner holds the job, or it has ended; nothing was written.
        """
        now = self._clock.now()
        with self._database.transaction() as transaction:
            row = _hold(transaction, claim)
            reason = None if failure is None else failure.message
            _end_attempt(transaction, row, state.value, reason, now)
            text = None if result is None else json.dumps(result)
            end_job(transaction, claim.job.id, state, now, result=text, failure=failure)
            return job_of(_read(transaction, claim.job.id))

    def fail_attempt(self, claim: JobClaim, failure: JobFailure, *, pause_s: Callable[[int], float]) -> Job:
        """End an attempt that failed, and with it the job, unless the reason may pass and there are attempts left.

        Args:
            claim: Of who ran it.
            failure: The reason.
            pause_s: How long to wait before the next attempt, by the number of failures in a row.

        Raises:
            JobLost: Another runner holds the job, or it has ended; nothing was written.
        """
        now = self._clock.now()
        with self._database.transaction() as transaction:
            row = _hold(transaction, claim)
            _end_attempt(transaction, row, "failed", failure.message, now)
            num_failures = row.num_failures + 1
            transaction.execute("UPDATE job SET num_failures = ? WHERE id = ?", (num_failures, claim.job.id))
            if not failure.is_transient or num_failures >= row.max_attempts:
                end_job(transaction, claim.job.id, JobState.FAILED, now, failure=failure)
                return job_of(_read(transaction, claim.job.id))
            if _is_to_pause(row):
                state, wait_s, when = JobState.PAUSED, 0.0, "when the job is resumed"
            else:
                wait_s = pause_s(num_failures)
                state, when = JobState.RETRYING, f"in {wait_s:.0f} s"
            _release(transaction, claim.job.id, state, now, not_before=now + wait_s)
            event = JobEvent(
                kind="attempt",
                message=f"attempt {row.attempt} failed: {failure.message}; the next one comes {when}",
                data={"attempt": row.attempt, "code": failure.code, "retry_in_s": wait_s},
            )
            append_events(transaction, claim.job.id, [event], now)
            return job_of(_read(transaction, claim.job.id))

    def give_back(self, claim: JobClaim, state: JobState, *, not_before: float = 0.0, reason: str) -> Job:
        """Let a job go in the middle of an attempt, which whoever takes it up next goes on with.

        One that its owner did not ask to pause, but whose tenant is suspended, waits for that to end. One that its
        owner has asked to pause, which its plan has not heard yet, is paused however it is let go.

        Args:
            claim: Of who ran it.
            state: ``paused``, or ``queued`` for the next runner.
            not_before: When that one may take it.
            reason: In words.

        Raises:
            JobLost: Another runner holds the job, or it has ended; nothing was written.
        """
        assert state in (JobState.PAUSED, JobState.QUEUED)
        now = self._clock.now()
        with self._database.transaction() as transaction:
            row = _hold(transaction, claim)
            if state is JobState.PAUSED and row.pause_requested_at is None and _is_suspended(transaction, row.tenant):
                state, reason = JobState.QUEUED, "held: the operator has suspended this tenant"
            elif _is_to_pause(row):
                state, not_before, reason = JobState.PAUSED, 0.0, "paused"
            _release(transaction, claim.job.id, state, now, not_before=not_before)
            event = JobEvent(kind="status", message=reason, data={"state": state.value})
            append_events(transaction, claim.job.id, [event], now)
            return job_of(_read(transaction, claim.job.id))


def _begin_groups(transaction: Transaction, parent: str, now: float) -> None:
    """What a job is a member of has begun with the first of them; a sweep may be one of a flow itself."""
    transaction.execute(
        "UPDATE job SET started_at = ? WHERE started_at IS NULL"
        " AND id IN (?, (SELECT p.parent FROM job p WHERE p.id = ?))",
        (now, parent, parent),
    )


def _is_free(row: Row, now: float) -> bool:
    if row.state in (JobState.QUEUED, JobState.RETRYING):
        not_before: float = row.not_before
        return not_before <= now
    if row.state != JobState.RUNNING:
        return False
    return is_lost(row, now)


def _note_lost(transaction: Transaction, row: Row, now: float) -> bool:
    """End the attempt of a runner that is gone; false if the job has failed with it."""
    _end_attempt(transaction, row, "lost", LOST, now)
    num_failures = row.num_failures + 1
    transaction.execute("UPDATE job SET num_failures = ? WHERE id = ?", (num_failures, row.id))
    if num_failures < row.max_attempts:
        event = JobEvent(kind="attempt", message=f"attempt {row.attempt}: {LOST}", data={"attempt": row.attempt})
        append_events(transaction, row.id, [event], now)
        return True
    message = f"its runner was lost {num_failures} times in a row without coming any further"
    end_job(transaction, row.id, JobState.FAILED, now, failure=JobFailure(code="lost", message=message))
    return False


def _end_attempt(transaction: Transaction, row: Row, outcome: str, reason: str | None, now: float) -> None:
    transaction.execute(
        "UPDATE job_attempt SET ended_at = ?, outcome = ?, reason = ? WHERE job = ? AND attempt = ?",
        (now, outcome, reason, row.id, row.attempt),
    )


def _release(transaction: Transaction, job_id: str, state: JobState, now: float, *, not_before: float) -> None:
    paused_at = now if state is JobState.PAUSED else None
    transaction.execute(
        "UPDATE job SET state = ?, owner = NULL, not_before = ?, nudged_at = 0, paused_at = ?,"
        " pause_requested_at = NULL WHERE id = ?",
        (state.value, not_before, paused_at, job_id),
    )


def _hold(transaction: Transaction, claim: JobClaim) -> Row:
    row = transaction.execute(
        f"SELECT {COLUMNS} FROM job WHERE id = ? AND epoch = ? AND state = 'running' FOR UPDATE",
        (claim.job.id, claim.epoch),
    ).fetchone()
    if row is None:
        raise _lost(claim)
    return row


def _signals(transaction: Transaction, row: Row) -> JobSignals:
    """What the owner wants; a suspended tenant's jobs stop where they would pause."""
    pause = row.pause_requested_at is not None or _is_suspended(transaction, row.tenant)
    return JobSignals(cancel=row.cancel_requested_at is not None, pause=pause)


def _is_to_pause(row: Row) -> bool:
    """Whether its owner has asked for a pause, and not for its end."""
    return row.pause_requested_at is not None and row.cancel_requested_at is None


def _is_suspended(transaction: Transaction, tenant: str) -> bool:
    row = transaction.execute("SELECT suspension FROM tenant WHERE id = ?", (tenant,)).fetchone()
    return row is not None and row.suspension is not None


def _lost(claim: JobClaim) -> JobLost:
    return JobLost(f"job {claim.job.id} was taken up by another runner, or has ended", job=claim.job.id)


def _read(transaction: Transaction, job_id: str) -> Row:
    row = transaction.execute(f"SELECT {COLUMNS} FROM job WHERE id = ?", (job_id,)).fetchone()
    assert row is not None, "its row is locked by this transaction"
    return row
