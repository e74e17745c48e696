"""Jobs that nobody runs: which may begin now, whose needs have ended, and what time does to them."""

from __future__ import annotations

from dataclasses import dataclass

from twinkle.core.clock import Clock
from twinkle.core.job import JobFailure, JobKind, JobState
from twinkle.core.lease import ProcessIdentity
from twinkle.storage.database import Database, Row, Transaction, placeholders
from twinkle.storage.jobs.rows import end_job

_BATCH = 200
_MAX_RUNNING = 2000


@dataclass(frozen=True, kw_only=True)
class ReadyJob:
    """A job that a runner may take up now, and what Celery's monitors are to see of its next attempt."""

    id: str
    tenant: str
    kind: JobKind
    attempt: int
    reason: str


class WaitingJobs:
    """The order in which jobs are run. Each method is idempotent and does a bounded amount."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def take_ready(self, *, limit: int, again_after_s: float) -> list[ReadyJob]:
        """Some of the jobs that may begin now, to be handed out; each comes again only after a while.

        Tenants take turns: whoever has fewer jobs running or handed out comes first, then the lowest ``nice``, then
        the oldest.

        Args:
            limit: How many may be handed out and not be begun at once.
            again_after_s: When one that was handed out and not begun is handed out again: its message was lost.
        """
        now = self._clock.now()
        with self._database.transaction() as transaction:
            lost = _lost(transaction, now, again_after_s)[:limit]
            handed_out = transaction.execute(
                "SELECT COUNT(*) AS num FROM job WHERE state IN ('queued', 'retrying') AND nudged_at > ?",
                (now - again_after_s,),
            ).fetchone()
            assert handed_out is not None
            free = max(0, limit - int(handed_out.num) - len(lost))
            rows = transaction.execute(
                "SELECT id, tenant, kind, attempt, state FROM (SELECT j.id, j.tenant, j.kind, j.attempt, j.state,"
                " j.nice, j.created_at, (SELECT COUNT(*) FROM job r WHERE r.tenant = j.tenant AND"
                " (r.state = 'running' OR (r.state IN ('queued', 'retrying') AND r.nudged_at > ?)))"
                " + ROW_NUMBER() OVER (PARTITION BY j.tenant ORDER BY j.nice, j.created_at, j.id) AS turn"
                " FROM job j WHERE j.state IN ('queued', 'retrying') AND j.not_before <= ? AND j.nudged_at <= ?) AS w"
                " ORDER BY turn, nice, created_at, id LIMIT ?",
                (now - again_after_s, now, now - again_after_s, free),
            ).fetchall()
            ids = [row.id for row in rows] + [job.id for job in lost]
            transaction.execute(f"UPDATE job SET nudged_at = ? WHERE id IN ({placeholders(ids)})", (now, *ids))
        return lost + [
            ReadyJob(
                id=row.id,
                tenant=row.tenant,
                kind=JobKind(row.kind),
                attempt=row.attempt + (1 if row.state == JobState.RETRYING or row.attempt == 0 else 0),
                reason="retry" if row.state == JobState.RETRYING else "resumed" if row.attempt else "submitted",
            )
            for row in rows
        ]

    def put_back(self, jobs: list[str]) -> None:
        """These could not be handed out after all."""
        with self._database.transaction() as transaction:
            transaction.execute(f"UPDATE job SET nudged_at = 0 WHERE id IN ({placeholders(jobs)})", jobs)

    def settle(self) -> int:
        """Let jobs begin whose needs have ended, and fail those whose needs did not end well; how many."""
        num_settled = 0
        while True:
            with self._database.transaction() as transaction:
                found = self._settle_some(transaction)
            num_settled += found
            if found == 0:
                return num_settled

    def _settle_some(self, transaction: Transaction) -> int:
        now = self._clock.now()
        rows = transaction.execute(
            "SELECT id, broken_need FROM job WHERE state = 'waiting' AND (num_needs = 0 OR broken_need IS NOT NULL)"
            " ORDER BY id LIMIT ? FOR UPDATE",
            (_BATCH,),
        ).fetchall()
        for row in rows:
            if row.broken_need is None:
                transaction.execute("UPDATE job SET state = 'queued' WHERE id = ?", (row.id,))
                continue
            message = f"job {row.broken_need}, which it was to come after, did not succeed"
            end_job(
                transaction, row.id, JobState.FAILED, now, failure=JobFailure(code="dependency_failed", message=message)
            )
        return len(rows)


def is_lost(row: Row, now: float) -> bool:
    """Whether whoever runs it has let its lease run out, or is known to be dead."""
    owner = ProcessIdentity.parse(row.owner or "")
    return bool(row.lease_until <= now) or (owner is not None and owner.is_known_dead())


def _lost(transaction: Transaction, now: float, again_after_s: float) -> list[ReadyJob]:
    rows = transaction.execute(
        "SELECT id, tenant, kind, attempt, owner, lease_until FROM job WHERE state = 'running' AND nudged_at <= ?"
        " ORDER BY lease_until LIMIT ?",
        (now - again_after_s, _MAX_RUNNING),
    ).fetchall()
    return [
        ReadyJob(id=row.id, tenant=row.tenant, kind=JobKind(row.kind), attempt=row.attempt + 1, reason="lost")
        for row in rows
        if is_lost(row, now)
    ]
