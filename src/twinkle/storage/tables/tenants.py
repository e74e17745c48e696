"""The tables of who uses the service: tenants, keys, sessions, the audit log."""

from __future__ import annotations

from sqlalchemy import BigInteger, Float, Index, Text, UniqueConstraint, false, text
from sqlmodel import Field, SQLModel


class TenantRow(SQLModel, table=True):
    """Who is accountable. A limit that is NULL is the settings'.

    ``paid_until`` is the time up to which the tenant's rate covers the tokens it was served.
    """

    __tablename__ = "tenant"
    id: str = Field(primary_key=True)
    name: str = Field(unique=True)
    weight: float = 1.0
    created_at: float = Field(sa_type=Float)
    max_adapters: int | None = None
    max_running: int | None = None
    max_samples: int | None = None
    max_body_bytes: int | None = Field(default=None, sa_type=BigInteger)
    max_files_bytes: int | None = Field(default=None, sa_type=BigInteger)
    max_jobs: int | None = None
    max_running_jobs: int | None = None
    tokens_per_minute: int | None = Field(default=None, sa_type=BigInteger)
    max_sessions: int | None = None
    max_runs: int | None = None
    max_sampling_sessions: int | None = None
    max_queued: int | None = None
    max_queued_bytes: int | None = Field(default=None, sa_type=BigInteger)
    max_checkpoints: int | None = None
    max_checkpoint_bytes: int | None = Field(default=None, sa_type=BigInteger)
    max_kept_bytes: int | None = Field(default=None, sa_type=BigInteger)
    paid_until: float = Field(default=0.0, sa_type=Float, sa_column_kwargs={"server_default": text("0")})
    suspended_at: float | None = Field(default=None, sa_type=Float)
    suspension: str | None = None
    """Why, in the operator's words, which the tenant reads."""


class ApiKeyRow(SQLModel, table=True):
    """A key, kept as its SHA-256: 256 random bits need no salt nor stretching. One that is lent goes when it ends."""

    __tablename__ = "api_key"
    id: str = Field(primary_key=True)
    digest: str = Field(unique=True)
    tenant: str = Field(foreign_key="tenant.id", index=True)
    name: str
    created_at: float = Field(sa_type=Float)
    revoked_at: float | None = Field(default=None, sa_type=Float, index=True)
    expires_at: float | None = Field(default=None, sa_type=Float)
    is_lent: bool = Field(default=False, sa_column_kwargs={"server_default": false()})
    scopes: str | None = None
    """Words with commas between them; ``None``: everything."""
    last_used_at: float | None = Field(default=None, sa_type=Float)


class SessionRow(SQLModel, table=True):
    """One client's presence."""

    __tablename__ = "session"
    __table_args__ = (
        UniqueConstraint("tenant", "idempotency_key"),
        Index("session_of_tenant", "tenant", "created_at", "id"),
    )
    id: str = Field(primary_key=True)
    tenant: str = Field(foreign_key="tenant.id", index=True)
    idempotency_key: str | None = None
    tags: str = Field(sa_type=Text)
    user_metadata: str | None = Field(default=None, sa_type=Text)
    project_id: str | None = None
    display_name: str | None = None
    sdk_version: str = ""
    created_at: float = Field(sa_type=Float)
    heartbeat_at: float = Field(sa_type=Float)
    finished_at: float | None = Field(default=None, sa_type=Float)
    finish_reason: str | None = None
    finish_detail: str | None = None
    job: str | None = Field(default=None, unique=True, index=True)
    """The job that works in it: what it has submitted is kept while that has not ended."""


class AuditRow(SQLModel, table=True):
    """Something that somebody may have to answer for. Details are JSON, never data nor keys.

    Triggers keep it from being changed, and from being deleted at or above the floor. ``tenant`` is whose it is, and
    none where it is the service's; ``actor`` is who did it (:mod:`twinkle.core.actor`).
    """

    __tablename__ = "audit"
    __table_args__ = (Index("audit_of_tenant", "tenant", "at"), Index("audit_by_time", "at"))
    id: int | None = Field(default=None, primary_key=True)
    tenant: str | None = Field(default=None, foreign_key="tenant.id")
    at: float = Field(sa_type=Float)
    actor: str = Field(default="tenant", sa_column_kwargs={"server_default": text("'tenant'")})
    event: str
    details: str = Field(sa_type=Text)


class AuditFloorRow(SQLModel, table=True):
    """The one row that says since when the audit log is kept. It only rises."""

    __tablename__ = "audit_floor"
    id: int | None = Field(default=None, primary_key=True)
    at: float = Field(sa_type=Float)


class SharedSecretRow(SQLModel, table=True):
    """What processes that run have in common, by its fingerprint, and when one of them was last heard of."""

    __tablename__ = "shared_secret"
    name: str = Field(primary_key=True)
    fingerprint: str
    seen_at: float = Field(sa_type=Float)


class PastWorkRow(SQLModel, table=True):
    """What a tenant's operations came to that ended well in an hour (from the epoch) and whose rows are gone."""

    __tablename__ = "past_work"
    __table_args__ = (Index("past_work_by_hour", "hour"), Index("past_work_of_session", "session"))
    tenant: str = Field(primary_key=True, foreign_key="tenant.id")
    hour: int = Field(primary_key=True, sa_column_kwargs={"autoincrement": False})
    session: str = Field(primary_key=True)
    base_model: str = Field(primary_key=True)
    kind: str = Field(primary_key=True)
    num_tokens: int = Field(sa_type=BigInteger)
    num_prompt_tokens: int = Field(sa_type=BigInteger)
    device_s: float = Field(sa_type=Float)
    num_operations: int = Field(sa_type=BigInteger)
