"""The tables of jobs: themselves, what happened in them, the attempts at them, and which has to end before which."""

from __future__ import annotations

from sqlalchemy import BigInteger, Float, Index, Text, UniqueConstraint, text
from sqlmodel import Field, SQLModel

_IS_READY = text("state IN ('queued', 'retrying')")
_IS_RUNNING = text("state = 'running'")
_IS_SETTLED = text("state = 'waiting' AND (num_needs = 0 OR broken_need IS NOT NULL)")
_HAS_ENDED = text("finished_at IS NOT NULL")
_IS_OPEN = text("finished_at IS NULL")
_IS_HANDED_OUT = text("state IN ('queued', 'retrying') AND nudged_at > 0")
_HOLDS = text("holds AND finished_at IS NOT NULL")
_HAS_PARENT = text("parent IS NOT NULL")
_IS_UNTOLD = text("notify_url IS NOT NULL AND told_number < num_events")
_IS_PAUSED = text("state = 'paused'")


class JobRow(SQLModel, table=True):
    """A job. ``epoch`` counts its claims: every write of a runner names the one it holds."""

    __tablename__ = "job"
    __table_args__ = (
        UniqueConstraint("tenant", "client_id"),
        Index("job_of_tenant", "tenant", "created_at", "id"),
        Index("job_of_parent", "parent", "created_at", "id", sqlite_where=_HAS_PARENT, postgresql_where=_HAS_PARENT),
        Index("job_ready", "tenant", "nice", "created_at", sqlite_where=_IS_READY, postgresql_where=_IS_READY),
        Index("job_running", "lease_until", sqlite_where=_IS_RUNNING, postgresql_where=_IS_RUNNING),
        Index("job_settled", "id", sqlite_where=_IS_SETTLED, postgresql_where=_IS_SETTLED),
        Index("job_paused", "paused_at", sqlite_where=_IS_PAUSED, postgresql_where=_IS_PAUSED),
        Index("job_open", "tenant", sqlite_where=_IS_OPEN, postgresql_where=_IS_OPEN),
        Index("job_handed_out", "nudged_at", sqlite_where=_IS_HANDED_OUT, postgresql_where=_IS_HANDED_OUT),
        Index("job_untold", "tell_at", sqlite_where=_IS_UNTOLD, postgresql_where=_IS_UNTOLD),
        Index("job_ended", "finished_at", sqlite_where=_HAS_ENDED, postgresql_where=_HAS_ENDED),
        Index("job_holds", "id", sqlite_where=_HOLDS, postgresql_where=_HOLDS),
    )
    id: str = Field(primary_key=True)
    tenant: str = Field(foreign_key="tenant.id")
    kind: str
    spec: str = Field(sa_type=Text)
    digest: str
    client_id: str | None = None
    name: str | None = None
    parent: str | None = None
    at_once: int | None = None
    """How many members of its parent may run at the same time; all if there is none."""
    nice: int
    max_attempts: int
    notify_url: str | None = Field(default=None, sa_type=Text)
    user_metadata: str = Field(sa_type=Text)
    seed: int = Field(sa_type=BigInteger)
    state: str
    phase: str | None = None
    progress: str = Field(sa_type=Text)
    saved: str = Field(sa_type=Text)
    result: str | None = Field(default=None, sa_type=Text)
    failure: str | None = Field(default=None, sa_type=Text)
    attempt: int = 0
    num_failures: int = 0
    best_done: float = Field(default=0.0, sa_type=Float)
    """The furthest it has been: an attempt that comes further is no failure in a row."""
    num_events: int = 0
    told_number: int = Field(default=0, sa_column_kwargs={"server_default": "0"})
    """The last event that its webhook was told of, or that is none to tell."""
    tell_at: float = Field(default=0.0, sa_type=Float, sa_column_kwargs={"server_default": "0"})
    """When the next one may be told: after a pause, or when whoever tells it now has died."""
    num_refusals: int = Field(default=0, sa_column_kwargs={"server_default": "0"})
    """How often the next one was told in vain."""
    num_needs: int = 0
    """Jobs that have to end before it may begin."""
    broken_need: str | None = None
    """One of them that had to succeed and did not."""
    holds: bool = False
    """Whether results are kept for it although their time is over."""
    epoch: int = Field(default=0, sa_type=BigInteger)
    owner: str | None = None
    lease_until: float = Field(default=0.0, sa_type=Float)
    not_before: float = Field(default=0.0, sa_type=Float)
    nudged_at: float = Field(default=0.0, sa_type=Float)
    created_at: float = Field(sa_type=Float)
    started_at: float | None = Field(default=None, sa_type=Float)
    finished_at: float | None = Field(default=None, sa_type=Float)
    expires_at: float | None = Field(default=None, sa_type=Float)
    paused_at: float | None = Field(default=None, sa_type=Float)
    cancel_requested_at: float | None = Field(default=None, sa_type=Float)
    pause_requested_at: float | None = Field(default=None, sa_type=Float)


class JobEventRow(SQLModel, table=True):
    """Something that happened in a job, numbered within it. Only the last so many are kept."""

    __tablename__ = "job_event"
    job: str = Field(primary_key=True, foreign_key="job.id")
    number: int = Field(primary_key=True)
    at: float = Field(sa_type=Float)
    kind: str
    message: str = Field(sa_type=Text)
    data: str = Field(sa_type=Text)


class JobAttemptRow(SQLModel, table=True):
    """One attempt at a job."""

    __tablename__ = "job_attempt"
    job: str = Field(primary_key=True, foreign_key="job.id")
    attempt: int = Field(primary_key=True)
    owner: str
    started_at: float = Field(sa_type=Float)
    ended_at: float | None = Field(default=None, sa_type=Float)
    outcome: str | None = None
    reason: str | None = Field(default=None, sa_type=Text)


class JobDependencyRow(SQLModel, table=True):
    """``job`` may begin when ``needs`` has ended: successfully if the condition is ``ok``, else in whatever way."""

    __tablename__ = "job_dependency"
    job: str = Field(primary_key=True, foreign_key="job.id")
    needs: str = Field(primary_key=True, index=True)
    condition: str
    ended: bool = False
