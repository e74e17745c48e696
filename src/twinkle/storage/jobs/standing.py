"""Why a job does not run yet, how many are before it, and when it may have ended."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from twinkle.core.clock import Clock
from twinkle.core.job import GROUPS, JobState
from twinkle.core.limits import NO_LIMITS, TenantLimits
from twinkle.storage.database import Database, Row

_MAX_RECENT = 200
_READY = "state IN ('queued', 'retrying')"
_RECENT = (
    "SELECT r.started_at, r.finished_at FROM (SELECT kind, state, started_at, finished_at FROM job"
    " WHERE finished_at IS NOT NULL ORDER BY finished_at DESC LIMIT ?) AS r"
    " WHERE r.kind = ? AND r.state = 'succeeded' AND r.started_at IS NOT NULL"
)
_RUNNING = "SELECT tenant, parent FROM job WHERE state = 'running'"
_OWN_BEFORE = (
    f"SELECT COUNT(*) AS num FROM job WHERE tenant = ? AND {_READY} AND (nice < ? OR (nice = ? AND"
    " (created_at < ? OR (created_at = ? AND id < ?))))"
)
# One look at the index for each tenant, as those that choose take it.
_OTHERS = (
    f"WITH RECURSIVE ready (tenant) AS (SELECT MIN(tenant) FROM job WHERE {_READY} UNION ALL"
    f" SELECT (SELECT MIN(j.tenant) FROM job j WHERE j.{_READY} AND j.tenant > ready.tenant) FROM ready"
    " WHERE ready.tenant IS NOT NULL)"
    f" SELECT t.id, t.weight, (SELECT COUNT(*) FROM job q WHERE q.tenant = t.id AND q.{_READY}) AS num"
    " FROM ready JOIN tenant t ON t.id = ready.tenant WHERE t.id <> ?"
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

    ``waits_for`` is the first job that it needs, ``until`` when it is ready again.
    """

    reason: JobWaitReason
    waits_for: str | None = None
    until: float | None = None
    num_before: int | None = None
    num_own_before: int | None = None


@dataclass(frozen=True, kw_only=True)
class JobOutlook:
    """Why a job waits, if it does, and when it may have ended, if that can be told."""

    wait: JobWait | None
    ends_at: float | None


class JobOutlooks:
    """Looks at where jobs stand; changes nothing."""

    def __init__(self, database: Database, clock: Clock, *, limits: TenantLimits = NO_LIMITS) -> None:
        """Take the stores; ``limits`` are those of tenants that have none of their own."""
        self._database = database
        self._clock = clock
        self._limits = limits

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
        if wait.num_before is None:
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
        if job.at_once is not None and sum(row.parent == job.parent for row in running) >= job.at_once:
            return JobWait(reason=JobWaitReason.AT_ONCE, num_own_before=own_before)
        most = self._limits.max_running_jobs if job.max_running_jobs is None else job.max_running_jobs
        if most and len(own) >= most:
            return JobWait(reason=JobWaitReason.MAX_RUNNING_JOBS, num_own_before=own_before)
        others = self._num_others_before(job, tenant, running, due=(len(own) + own_before + 1) / job.weight)
        return JobWait(reason=JobWaitReason.POSITION, num_before=own_before + others, num_own_before=own_before)

    def _first_need(self, job_id: str) -> str | None:
        rows = self._database.read(
            "SELECT needs FROM job_dependency WHERE job = ? AND NOT ended ORDER BY needs LIMIT 1", (job_id,)
        )
        return rows[0].needs if rows else None

    def _num_own_before(self, job: Row, tenant: str) -> int:
        at = (tenant, job.nice, job.nice, job.created_at, job.created_at, job.id)
        return int(self._database.read(_OWN_BEFORE, at)[0].num)

    def _num_others_before(self, job: Row, tenant: str, running: list[Row], *, due: float) -> int:
        """How many of the others' turns are due before this job's; see :mod:`twinkle.storage.jobs.turns`."""
        num = 0
        for other in self._database.read(_OTHERS, (tenant,)):
            under_way = sum(row.tenant == other.id for row in running)
            num += min(max(math.floor(due * other.weight) - under_way, 0), other.num)
        return num

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
