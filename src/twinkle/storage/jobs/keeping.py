"""How long what belongs to jobs is kept: results until their job has ended, then the jobs themselves for a while."""

from __future__ import annotations

from collections.abc import Sequence

from twinkle.core.clock import Clock
from twinkle.core.job import JobEvent, JobState
from twinkle.storage.database import Database, Transaction, placeholders
from twinkle.storage.jobs.rows import append_events, end_job

IS_HELD = "EXISTS (SELECT 1 FROM session s JOIN job j ON j.id = s.job WHERE s.id = {session} AND j.finished_at IS NULL)"
"""Whether a session is that of a job that has not ended; ``session`` is the column that names it."""

_BATCH = 500
_MAX_BATCHES = 200


def held_by(transaction: Transaction, lanes: Sequence[str]) -> dict[str, str]:
    """The jobs that have not ended and may ask for the results of these lanes again, by lane."""
    marks = placeholders(lanes)
    rows = transaction.execute(
        "SELECT l.lane, j.id AS job FROM (SELECT id AS lane, session FROM adapter WHERE id IN"
        f" ({marks}) UNION ALL SELECT id AS lane, session FROM sampling_session WHERE id IN ({marks})) AS l"
        " JOIN session s ON s.id = l.session JOIN job j ON j.id = s.job WHERE j.finished_at IS NULL",
        (*lanes, *lanes),
    ).fetchall()
    return {row.lane: row.job for row in rows}


def hold(transaction: Transaction, job: str, request_ids: Sequence[str]) -> None:
    """Keep these results until the job has ended, out of the way of those that look for what is to be forgotten."""
    marks = placeholders(request_ids)
    transaction.execute(f"UPDATE operation SET held_by = ? WHERE request_id IN ({marks})", (job, *request_ids))
    transaction.execute("UPDATE job SET holds = TRUE WHERE id = ?", (job,))


class JobKeeping:
    """The sweeps over jobs. Each method is idempotent and does a bounded amount."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def release(self) -> int:
        """Let go of the results of jobs that have ended: they end as others do; how many."""
        num_released = 0
        for _ in range(_MAX_BATCHES):
            jobs = self._database.read("SELECT id FROM job WHERE holds AND finished_at IS NOT NULL ORDER BY id LIMIT 1")
            if not jobs:
                break
            with self._database.transaction() as transaction:
                num = transaction.execute(
                    "UPDATE operation SET held_by = NULL WHERE request_id IN"
                    " (SELECT request_id FROM operation WHERE held_by = ? LIMIT ?)",
                    (jobs[0].id, _BATCH),
                ).rowcount
                if num < _BATCH:
                    transaction.execute(
                        "UPDATE job SET holds = FALSE WHERE id = ? AND finished_at IS NOT NULL", (jobs[0].id,)
                    )
            num_released += num
        return num_released

    def end_paused(self, *, older_than_s: float) -> int:
        """Cancel the jobs that were paused so long ago, and let those go on whose own time is over; how many."""
        now = self._clock.now()
        with self._database.transaction() as transaction:
            rows = transaction.execute(
                "SELECT id, attempt, expires_at FROM job WHERE state = 'paused' AND (paused_at <= ? OR expires_at <= ?)"
                " ORDER BY paused_at LIMIT ? FOR UPDATE",
                (now - older_than_s, now, _BATCH),
            ).fetchall()
            for row in rows:
                if row.attempt == 0:
                    end_job(transaction, row.id, JobState.CANCELLED, now)
                    continue
                is_over = row.expires_at is not None and row.expires_at <= now
                transaction.execute(
                    "UPDATE job SET state = 'queued', paused_at = NULL, not_before = 0, nudged_at = 0,"
                    " cancel_requested_at = ? WHERE id = ?",
                    (None if is_over else now, row.id),
                )
                why = "its time is over" if is_over else f"paused for {older_than_s / 86400:.0f} days; cancelling"
                append_events(transaction, row.id, [JobEvent(kind="status", message=why)], now)
        return len(rows)

    def forget(self, *, older_than_s: float) -> int:
        """Forget jobs that ended so long ago, with all that is told of them; how many."""
        num_forgotten = 0
        for _ in range(_MAX_BATCHES):
            with self._database.transaction() as transaction:
                rows = transaction.execute(
                    "SELECT id FROM job WHERE finished_at IS NOT NULL AND finished_at <= ? AND NOT holds"
                    " ORDER BY finished_at LIMIT ? FOR UPDATE",
                    (self._clock.now() - older_than_s, _BATCH),
                ).fetchall()
                ids = [row.id for row in rows]
                marks = placeholders(ids)
                transaction.execute(f"UPDATE session SET job = NULL WHERE job IN ({marks})", ids)
                for table in ("job_event", "job_attempt", "job_dependency"):
                    transaction.execute(f"DELETE FROM {table} WHERE job IN ({marks})", ids)
                transaction.execute(f"DELETE FROM job WHERE id IN ({marks})", ids)
            num_forgotten += len(ids)
            if len(ids) < _BATCH:
                break
        return num_forgotten
