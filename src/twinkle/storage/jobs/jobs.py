"""Jobs as their owners see them: submitted, found, listed, told to pause, to go on, to end."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence

from twinkle.core.clock import Clock
from twinkle.core.errors import NotFound
from twinkle.core.job import (
    EventKind,
    Job,
    JobAttempt,
    JobEvent,
    JobKind,
    JobMember,
    JobState,
    NewJob,
)
from twinkle.core.limits import NO_LIMITS, TenantLimits
from twinkle.core.places import PlaceInList
from twinkle.storage.database import Database, Row, Transaction, placeholders
from twinkle.storage.jobs.rows import COLUMNS, job_of, shown_in
from twinkle.storage.jobs.submitting import submit
from twinkle.storage.jobs.wishes import cancel, pause, resume, retry


class Jobs:
    """Tenants' jobs. Each method is one transaction."""

    def __init__(self, database: Database, clock: Clock, *, limits: TenantLimits = NO_LIMITS) -> None:
        """Take the stores; ``limits`` are those of tenants that have none of their own."""
        self._database = database
        self._clock = clock
        self._limits = limits

    def create(self, new: NewJob) -> Job:
        """Take a job on; the same client's id and digest get the same job; raises as :meth:`create_groups`."""
        return self.create_many([new])[0]

    def create_many(self, news: Sequence[NewJob]) -> list[Job]:
        """Take jobs on, all of them or none; raises as :meth:`create_groups`."""
        return self.create_groups([[new] for new in news])

    def create_groups(self, groups: Sequence[Sequence[NewJob]]) -> list[Job]:
        """Take jobs on, each followed by those that it is made of: all of them or none. Those at the heads.

        One may wait for any other of them.

        Raises:
            Conflict: A client's id was used for another job.
            NotFound: A job to wait for, or a parent, does not exist or is another tenant's.
            LimitReached: The tenant would have more jobs than it may.
        """
        with self._database.transaction() as transaction:
            heads = submit(transaction, groups, self._clock.now(), limits=self._limits)
            rows = transaction.execute(f"SELECT {COLUMNS} FROM job WHERE id IN ({placeholders(heads)})", heads)
            by_id = {row.id: job_of(row) for row in rows.fetchall()}
        return [by_id[job] for job in heads]

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
        after: PlaceInList | None = None,
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
        if kinds:
            where.append(f"kind IN ({placeholders(kinds)})")
            values += [one.value for one in kinds]
        if states:
            where.append(shown_in(set(states)))
        rows = self._database.read(
            f"SELECT {COLUMNS} FROM job WHERE {' AND '.join(where)} ORDER BY created_at DESC, id DESC LIMIT ?",
            (*values, limit),
        )
        return [job_of(row) for row in rows]

    def request_cancel(self, job_id: str, tenant: str) -> Job:
        """End a job; see :func:`twinkle.storage.jobs.wishes.cancel`."""
        return self._wish(cancel, job_id, tenant)

    def request_pause(self, job_id: str, tenant: str) -> Job:
        """Hold a job; see :func:`twinkle.storage.jobs.wishes.pause`."""
        return self._wish(pause, job_id, tenant)

    def request_resume(self, job_id: str, tenant: str) -> Job:
        """Let a paused job go on; see :func:`twinkle.storage.jobs.wishes.resume`."""
        return self._wish(resume, job_id, tenant)

    def request_retry(self, job_id: str, tenant: str) -> Job:
        """Give a job another attempt; see :func:`twinkle.storage.jobs.wishes.retry`."""
        return self._wish(retry, job_id, tenant)

    def _wish(self, wish: Callable[[Transaction, str, str, float], None], job_id: str, tenant: str) -> Job:
        with self._database.transaction() as transaction:
            wish(transaction, tenant, job_id, self._clock.now())
            row = transaction.execute(f"SELECT {COLUMNS} FROM job WHERE id = ?", (job_id,)).fetchone()
            assert row is not None, "its row is locked by this transaction"
            return job_of(row)

    def num_by_state(self, tenant: str) -> dict[str, int]:
        """How many of the tenant's jobs have not ended, by their states."""
        rows = self._database.read(
            "SELECT state, COUNT(*) AS num FROM job WHERE tenant = ? AND finished_at IS NULL GROUP BY state", (tenant,)
        )
        return {row.state: int(row.num) for row in rows}

    def members(self, job_id: str, tenant: str) -> list[JobMember]:
        """How the members of a sweep or a flow stand, in their order.

        Raises:
            NotFound: There is no such job, or it is another tenant's.
        """
        self.find(job_id, tenant)
        rows = self._database.read(
            "SELECT id, name, kind, state, progress, result, failure FROM job WHERE parent = ? ORDER BY created_at, id",
            (job_id,),
        )
        return [
            JobMember(
                id=row.id,
                name=row.name or row.id,
                kind=JobKind(row.kind),
                state=JobState(row.state),
                progress=json.loads(row.progress),
                result=None if row.result is None else json.loads(row.result),
                failure=None if row.failure is None else json.loads(row.failure)["message"],
            )
            for row in rows
        ]

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

    def unended(self, ids: Sequence[str]) -> set[str]:
        """Those of these jobs, whoever's, that may still be run."""
        rows = self._database.read(
            f"SELECT id FROM job WHERE id IN ({placeholders(ids)}) AND finished_at IS NULL", tuple(ids)
        )
        return {row.id for row in rows}

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


def _event(row: Row) -> JobEvent:
    return JobEvent(kind=row.kind, message=row.message, data=json.loads(row.data), number=row.number, at=row.at)
