"""Why a job does not run yet, how many are before it, and when it may have ended."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice

from twinkle.core.clock import Clock
from twinkle.core.job import GROUPS, JobState
from twinkle.core.limits import NO_LIMITS, TenantLimits
from twinkle.storage.database import Database, Row, placeholders

FAR = 1000
"""Places are counted up to here: one look costs the same however many jobs wait."""
_MAX_RECENT = 200
_TENANTS_AT_ONCE = 50
_READY = "state IN ('queued', 'retrying')"
_RECENT = (
    "SELECT r.started_at, r.finished_at FROM (SELECT kind, state, started_at, finished_at FROM job"
    " WHERE finished_at IS NOT NULL ORDER BY finished_at DESC LIMIT ?) AS r"
    " WHERE r.kind = ? AND r.state = 'succeeded' AND r.started_at IS NOT NULL"
)
_RUNNING = "SELECT tenant, parent FROM job WHERE state = 'running'"
# In the order of the index, so that the first ones found are those before it and nothing behind is looked at.
_OWN_BEFORE = (
    f"SELECT COUNT(*) AS num FROM (SELECT 1 FROM job WHERE tenant = ? AND {_READY}"
    " AND (nice, created_at, id) < (?, ?, ?) ORDER BY nice, created_at LIMIT ?) AS few"
)
# One look at the index for each tenant, as those that choose take it.
_OTHERS = (
    f"WITH RECURSIVE ready (tenant) AS (SELECT MIN(tenant) FROM job WHERE {_READY} UNION ALL"
    f" SELECT (SELECT MIN(j.tenant) FROM job j WHERE j.{_READY} AND j.tenant > ready.tenant) FROM ready"
    " WHERE ready.tenant IS NOT NULL)"
    " SELECT t.id, t.weight FROM ready JOIN tenant t ON t.id = ready.tenant WHERE t.id <> ? ORDER BY t.id"
)
_READY_OF = (
    "SELECT t.id, (SELECT COUNT(*) FROM (SELECT 1 FROM job q WHERE q.tenant = t.id"
    f" AND q.{_READY} LIMIT ?) AS few) AS num FROM tenant t WHERE t.id IN ({{tenants}})"
)


class JobWaitReason(StrEnum):
    """Why a job does not run: the whole list, and its words never change."""

    DEPENDENCY = "dependency"
    """A job that it comes after, or that it is made of, has not ended."""
    AT_ONCE = "at_once"
    """As many members of its sweep run as may at the same time."""
    MAX_RUNNING_JOBS = "max_running_jobs"
    """As many jobs of its tenant run as may at the same time."""
    PAUSED = "paused"
    RETRY_BACKOFF = "retry_backoff"
    """Its last attempt failed, or it rests; it is ready again at a known time."""
    POSITION = "position"
    """It may run, and others are served first."""


@dataclass(frozen=True, kw_only=True)
class JobWait:
    """Why a job waits. Positions are those of now, were nothing to arrive any more.

    ``waits_for`` is the first job that it needs, ``until`` when it is ready again. Where places are not exact, at least
    so many are before it, and its end is not told.
    """

    reason: JobWaitReason
    waits_for: str | None = None
    until: float | None = None
    num_before: int | None = None
    num_own_before: int | None = None
    is_exact: bool = True


@dataclass(frozen=True, kw_only=True)
class JobOutlook:
    """Why a job waits, if it does, and when it may have ended, if that can be told."""

    wait: JobWait | None
    ends_at: float | None


class JobOutlooks:
    """Looks at where jobs stand; changes nothing."""

    def __init__(self, database: Database, clock: Clock, *, limits: TenantLimits = NO_LIMITS, far: int = FAR) -> None:
        """Take the stores.

        Args:
            database: Where jobs are.
            clock: What time it is.
            limits: Those of tenants that have none of their own.
            far: How many jobs before one are counted.
        """
        self._database = database
        self._clock = clock
        self._limits = limits
        self._far = far

    def of(self, job_id: str, tenant: str) -> JobOutlook:
        """One of the tenant's jobs; nothing is told of one that is not there, or has ended."""
        rows = self._database.read(
            "SELECT j.id, j.kind, j.state, j.nice, j.created_at, j.started_at, j.not_before, j.parent, j.at_once,"
            " j.num_needs, t.weight, t.max_running_jobs FROM job j JOIN tenant t ON t.id = j.tenant"
            " WHERE j.id = ? AND j.tenant = ? AND j.finished_at IS NULL",
            (job_id, tenant),
        )
        if not rows:
            return JobOutlook(wait=None, ends_at=None)
        (job,) = rows
        if job.state == JobState.RUNNING:
            return JobOutlook(wait=None, ends_at=self._end(job, in_line_s=0.0))
        running = self._database.read(_RUNNING)
        wait = self._wait(job, tenant, running)
        if wait.num_before is None or not wait.is_exact:
            return JobOutlook(wait=wait, ends_at=None)
        usual_s = self._usual_s(job)
        in_line_s = None if usual_s is None else usual_s * wait.num_before / max(len(running), 1)
        return JobOutlook(wait=wait, ends_at=None if in_line_s is None else self._end(job, in_line_s=in_line_s))

    def _wait(self, job: Row, tenant: str, running: list[Row]) -> JobWait:
        if job.state == JobState.PAUSED:
            return JobWait(reason=JobWaitReason.PAUSED)
        if job.state == JobState.WAITING:
            return JobWait(reason=JobWaitReason.DEPENDENCY, waits_for=self._first_need(job.id))
        if job.not_before > self._clock.now():
            return JobWait(reason=JobWaitReason.RETRY_BACKOFF, until=job.not_before)
        own = [row for row in running if row.tenant == tenant]
        own_before = self._num_own_before(job, tenant)
        told = JobWait(reason=JobWaitReason.POSITION, num_own_before=own_before, is_exact=own_before < self._far)
        if job.at_once is not None and sum(row.parent == job.parent for row in running) >= job.at_once:
            return replace(told, reason=JobWaitReason.AT_ONCE)
        most = self._limits.max_running_jobs if job.max_running_jobs is None else job.max_running_jobs
        if most and len(own) >= most:
            return replace(told, reason=JobWaitReason.MAX_RUNNING_JOBS)
        left = self._far - own_before
        others = self._num_others_before(
            tenant, Counter(row.tenant for row in running), due=(len(own) + own_before + 1) / job.weight, most=left
        )
        return replace(told, num_before=own_before + others, is_exact=others < left)

    def _first_need(self, job_id: str) -> str | None:
        rows = self._database.read(
            "SELECT needs FROM job_dependency WHERE job = ? AND NOT ended ORDER BY needs LIMIT 1", (job_id,)
        )
        return rows[0].needs if rows else None

    def _num_own_before(self, job: Row, tenant: str) -> int:
        at = (tenant, job.nice, job.created_at, job.id, self._far)
        return int(self._database.read(_OWN_BEFORE, at)[0].num)

    def _num_others_before(self, tenant: str, running: Counter[str], *, due: float, most: int) -> int:
        """How many of the others' turns are due before this job's, at most so many; see ``storage/jobs/turns.py``."""
        if most <= 0:
            return 0
        turns = {
            other.id: math.floor(due * other.weight) - running[other.id]
            for other in self._database.read(_OTHERS, (tenant,))
        }
        left = iter([other for other, due_turns in turns.items() if due_turns > 0])
        num = 0
        while num < most and (some := list(islice(left, _TENANTS_AT_ONCE))):
            sql = _READY_OF.format(tenants=placeholders(some))
            longest = min(most, max(turns[other] for other in some))
            for row in self._database.read(sql, (longest, *some)):
                num += min(turns[row.id], row.num)
        return min(num, most)

    def _end(self, job: Row, *, in_line_s: float) -> float | None:
        """As long as jobs of its kind took lately; a plan that knows better says so in its progress."""
        usual_s = self._usual_s(job)
        if usual_s is None:
            return None
        now = self._clock.now()
        begins = now + in_line_s if job.state != JobState.RUNNING or job.started_at is None else job.started_at
        return max(begins + usual_s, now)

    def _usual_s(self, job: Row) -> float | None:
        """The median time of the last jobs of the kind that succeeded; of groups that says nothing."""
        if job.kind in {kind.value for kind in GROUPS}:
            return None
        took = sorted(row.finished_at - row.started_at for row in self._database.read(_RECENT, (_MAX_RECENT, job.kind)))
        return took[len(took) // 2] if took else None
