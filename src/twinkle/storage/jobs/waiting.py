"""Jobs that nobody runs: which may begin now, whose needs have ended, and what time does to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from twinkle.core.clock import Clock
from twinkle.core.job import JobFailure, JobKind, JobState
from twinkle.core.lease import ProcessIdentity
from twinkle.core.limits import NO_LIMITS, TenantLimits
from twinkle.storage.database import Database, Row, Transaction, placeholders
from twinkle.storage.jobs.rows import end_job
from twinkle.storage.jobs.turns import Candidate, JobTurn, ReadyJob, choose

RUNNER_LOST = "lost"
"""Why a job is handed out that somebody was running."""

_BATCH = 200
_MAX_RUNNING = 2000


_READY = "state IN ('queued', 'retrying')"
# The tenants that have any, by one look at the index for each: there may be ten thousand jobs of one of them.
_TENANTS = (
    f"WITH RECURSIVE ready (tenant) AS (SELECT MIN(tenant) FROM job WHERE {_READY} UNION ALL"
    f" SELECT (SELECT MIN(j.tenant) FROM job j WHERE j.{_READY} AND j.tenant > ready.tenant) FROM ready"
    " WHERE ready.tenant IS NOT NULL)"
    " SELECT t.id, t.weight, t.max_running_jobs FROM ready JOIN tenant t ON t.id = ready.tenant"
    " WHERE t.suspension IS NULL"
)
_HANDED_OUT = f"SELECT tenant, parent FROM job WHERE {_READY} AND nudged_at > 0 AND nudged_at > ?"
_RUNNING = "SELECT tenant, parent FROM job WHERE state = 'running'"
_CANDIDATES = (
    f"SELECT id, kind, state, attempt, parent, at_once, created_at FROM job WHERE tenant = ? AND {_READY}"
    " AND not_before <= ? AND nudged_at <= ? AND (parent IS NULL OR parent NOT IN ({parents}))"
    " ORDER BY nice, created_at, id LIMIT ?"
)


class WaitingJobs:
    """The order in which jobs are run. Each method is idempotent and does a bounded amount."""

    def __init__(self, database: Database, clock: Clock, *, limits: TenantLimits = NO_LIMITS) -> None:
        """Take the stores; ``limits`` are those of tenants that have none of their own."""
        self._database = database
        self._clock = clock
        self._limits = limits

    def take_ready(self, *, limit: int, again_after_s: float) -> list[ReadyJob]:
        """Some of the jobs that may begin now, to be handed out; each comes again only after a while.

        Tenants take turns (:mod:`twinkle.storage.jobs.turns`), within what each of them may run at once.

        Args:
            limit: How many may be handed out and not be begun at once.
            again_after_s: When one that was handed out and not begun is handed out again: its message was lost.
        """
        now = self._clock.now()
        with self._database.transaction() as transaction:
            lost = _lost(transaction, now, again_after_s)[:limit]
            handed_out = transaction.execute(_HANDED_OUT, (now - again_after_s,)).fetchall()
            under_way = [*transaction.execute(_RUNNING).fetchall(), *handed_out]

            def offer(turn: JobTurn, parents: frozenset[str], size: int) -> list[Candidate]:
                sql = _CANDIDATES.format(parents=placeholders(parents) if parents else "''")
                values = (turn.tenant, now, now - again_after_s, *sorted(parents), size)
                return [_candidate(row) for row in transaction.execute(sql, values).fetchall()]

            ready = choose(
                self._turns(transaction, under_way), offer, num_free=max(0, limit - len(handed_out) - len(lost))
            )
            ids = [job.id for job in (*ready, *lost)]
            transaction.execute(f"UPDATE job SET nudged_at = ? WHERE id IN ({placeholders(ids)})", (now, *ids))
        return lost + ready

    def _turns(self, transaction: Transaction, under_way: Sequence[Row]) -> list[JobTurn]:
        """The tenants that have ready jobs, with what they have under way."""
        running = Counter[str](row.tenant for row in under_way)
        members = Counter[str](row.parent for row in under_way if row.parent is not None)
        return [
            JobTurn(
                tenant=row.id,
                weight=row.weight,
                max_running=self._limits.max_running_jobs if row.max_running_jobs is None else row.max_running_jobs,
                num_running=running[row.id],
                members=members,
            )
            for row in transaction.execute(_TENANTS).fetchall()
        ]

    def put_back(self, jobs: list[str]) -> None:
        """These could not be handed out after all."""
        with self._database.transaction() as transaction:
            transaction.execute(f"UPDATE job SET nudged_at = 0 WHERE id IN ({placeholders(jobs)})", jobs)

    def settle(self) -> int:
        """Let jobs begin whose needs have ended, and cancel those whose needs did not end well; how many."""
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
                transaction, row.id, JobState.CANCELLED, now, failure=JobFailure(code="dependency", message=message)
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
        ReadyJob(id=row.id, tenant=row.tenant, kind=JobKind(row.kind), attempt=row.attempt + 1, reason=RUNNER_LOST)
        for row in rows
        if is_lost(row, now)
    ]


def _candidate(row: Row) -> Candidate:
    return Candidate(
        id=row.id,
        kind=JobKind(row.kind),
        state=JobState(row.state),
        attempt=row.attempt,
        parent=row.parent,
        at_once=row.at_once,
        created_at=row.created_at,
    )
