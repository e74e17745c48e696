"""The schema. SQLModel owns it, Alembic changes it; ``journal.py`` speaks to the hot tables in plain SQL.

Times are Unix seconds (float). Structured columns are JSON text, written and read through pydantic models.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Float, Index, LargeBinary, Text, UniqueConstraint, false, text
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
    tokens_per_minute: int | None = Field(default=None, sa_type=BigInteger)
    paid_until: float = Field(default=0.0, sa_type=Float, sa_column_kwargs={"server_default": text("0")})


class ApiKeyRow(SQLModel, table=True):
    """A key, kept as its SHA-256: 256 random bits need no salt nor stretching."""

    __tablename__ = "api_key"
    id: str = Field(primary_key=True)
    digest: str = Field(unique=True)
    tenant: str = Field(foreign_key="tenant.id", index=True)
    name: str
    created_at: float = Field(sa_type=Float)
    revoked_at: float | None = Field(default=None, sa_type=Float)


class SessionRow(SQLModel, table=True):
    """One client's presence."""

    __tablename__ = "session"
    __table_args__ = (UniqueConstraint("tenant", "idempotency_key"),)
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


class MeshRow(SQLModel, table=True):
    """A mesh and its lease."""

    __tablename__ = "mesh"
    name: str = Field(primary_key=True)
    capabilities: str | None = Field(default=None, sa_type=Text)
    owner: str | None = None
    epoch: int = 0
    expires_at: float = Field(default=0.0, sa_type=Float)
    vtime: float = Field(default=0.0, sa_type=Float, sa_column_kwargs={"server_default": text("0")})


class ShareRow(SQLModel, table=True):
    """What a tenant was served on a mesh, in virtual time; ``lane_vtime`` is where its idle lanes begin."""

    __tablename__ = "share"
    mesh: str = Field(primary_key=True)
    tenant: str = Field(primary_key=True, foreign_key="tenant.id")
    vtime: float = Field(default=0.0, sa_type=Float, sa_column_kwargs={"server_default": text("0")})
    lane_vtime: float = Field(default=0.0, sa_type=Float, sa_column_kwargs={"server_default": text("0")})


class LaneRow(SQLModel, table=True):
    """The order of one adapter's operations (or the numbering of one sampling session's samples, or of custom losses).

    ``head_seq`` is the next number to execute; ``head_kind`` is set exactly while that operation is in the journal,
    so the partial index below holds the lanes that can run and nothing else. ``num_ended`` counts the samples of an
    unordered lane that have ended, and numbers them. ``nice`` orders a tenant's lanes, the lowest first.
    """

    __tablename__ = "lane"
    __table_args__ = (
        Index(
            "lane_ready",
            "mesh",
            "tenant",
            "nice",
            "vtime",
            "id",
            sqlite_where=text("head_kind IS NOT NULL"),
            postgresql_where=text("head_kind IS NOT NULL"),
        ),
        Index(
            "lane_gap",
            "gap_since",
            sqlite_where=text("gap_since IS NOT NULL"),
            postgresql_where=text("gap_since IS NOT NULL"),
        ),
        Index(
            "lane_prunable",
            "id",
            sqlite_where=text("pruned_seq < floor_seq"),
            postgresql_where=text("pruned_seq < floor_seq"),
        ),
        Index(
            "lane_unloaded",
            "id",
            sqlite_where=text("unload_seq > floor_seq"),
            postgresql_where=text("unload_seq > floor_seq"),
        ),
    )
    id: str = Field(primary_key=True)
    tenant: str = Field(foreign_key="tenant.id")
    mesh: str
    ordered: bool
    head_seq: int = 0
    head_kind: str | None = None
    max_seq: int = -1
    gap_since: float | None = Field(default=None, sa_type=Float)
    failed_window_seq: int | None = None
    not_before: float = Field(default=0.0, sa_type=Float)
    vtime: float = Field(default=0.0, sa_type=Float)
    nice: int = Field(default=0, sa_column_kwargs={"server_default": text("0")})
    num_ended: int = Field(default=0, sa_type=BigInteger, sa_column_kwargs={"server_default": text("0")})
    floor_seq: int = Field(default=-1, sa_type=BigInteger, sa_column_kwargs={"server_default": text("-1")})
    """Nothing before this operation can be rebuilt any more."""
    pruned_seq: int = Field(default=-1, sa_type=BigInteger, sa_column_kwargs={"server_default": text("-1")})
    """Up to this operation the payloads of passes are gone; never above ``floor_seq``."""
    num_rewinds: int = Field(default=0, sa_column_kwargs={"server_default": text("0")})
    unload_seq: int | None = Field(default=None, sa_type=BigInteger)
    """The operation that ends the adapter, accepted or done; nothing comes after it."""


class AdapterRow(SQLModel, table=True):
    """A training run. Its lane has the same id."""

    __tablename__ = "adapter"
    __table_args__ = (
        Index("adapter_of_mesh", "mesh"),
        Index(
            "adapter_present",
            "mesh",
            sqlite_where=text("parked_at IS NULL"),
            postgresql_where=text("parked_at IS NULL"),
        ),
    )
    id: str = Field(primary_key=True, foreign_key="lane.id")
    tenant: str = Field(foreign_key="tenant.id", index=True)
    session: str = Field(foreign_key="session.id", index=True)
    mesh: str
    config: str = Field(sa_type=Text)
    optimizer: str = Field(sa_type=Text)
    user_metadata: str | None = Field(default=None, sa_type=Text)
    created_at: float = Field(sa_type=Float)
    parked_at: float | None = Field(default=None, sa_type=Float)
    """Since when it lies in the object store only, because its client has gone."""
    pinned_at: float | None = Field(default=None, sa_type=Float)
    """Since when it is to stay on its device, whoever else needs the room."""


class BranchRow(SQLModel, table=True):
    """A past state taken up: operation ``seq`` of ``adapter`` goes on as ``source`` was after operation ``at``.

    ``source`` is the run itself for a rewind, another one for a fork. ``request_key`` tells a resend.
    """

    __tablename__ = "branch"
    __table_args__ = (UniqueConstraint("source", "request_key"),)
    adapter: str = Field(primary_key=True, foreign_key="adapter.id")
    seq: int = Field(primary_key=True, sa_type=BigInteger)
    source: str = Field(foreign_key="adapter.id")
    at: int = Field(sa_type=BigInteger)
    request_key: str | None = None
    created_at: float = Field(sa_type=Float)


class SamplingSessionRow(SQLModel, table=True):
    """What a sampling client samples from: the base model, one checkpoint, or nameless weights.

    Its lane has the same id.
    """

    __tablename__ = "sampling_session"
    id: str = Field(primary_key=True, foreign_key="lane.id")
    tenant: str = Field(foreign_key="tenant.id")
    session: str = Field(foreign_key="session.id", index=True)
    base_model: str
    model_path: str | None = None
    checkpoint: str | None = None
    content: str | None = None
    """What ``checkpoint`` meant when the session was opened: it never reads another content of this name."""
    generation: int | None = None
    """The content's when the session was opened; another one ends it, unless the content is its own tenant's."""
    num_clients: int = Field(default=1, sa_column_kwargs={"server_default": text("1")})


class EphemeralWeightsRow(SQLModel, table=True):
    """Nameless weights: ``adapter`` as it was after operation ``seq``, open for one sampling session until they end.

    ``size_bytes`` is what they are charged for, wherever a copy of them lies.
    """

    __tablename__ = "ephemeral_weights"
    __table_args__ = (
        Index(
            "ephemeral_of_adapter",
            "adapter",
            "seq",
            sqlite_where=text("ended_at IS NULL"),
            postgresql_where=text("ended_at IS NULL"),
        ),
        Index(
            "ephemeral_of_session",
            "session",
            sqlite_where=text("ended_at IS NULL"),
            postgresql_where=text("ended_at IS NULL"),
        ),
        Index("ephemeral_pinned", "adapter", sqlite_where=text("pinned"), postgresql_where=text("pinned")),
        Index("ephemeral_of_tenant", "tenant", "opened_at"),
    )
    sampling_session: str = Field(primary_key=True, foreign_key="sampling_session.id")
    tenant: str = Field(foreign_key="tenant.id")
    session: str = Field(foreign_key="session.id")
    adapter: str = Field(foreign_key="adapter.id")
    seq: int = Field(sa_type=BigInteger)
    size_bytes: int = Field(sa_type=BigInteger)
    opened_at: float = Field(sa_type=Float)
    used_at: float = Field(sa_type=Float)
    expires_at: float | None = Field(default=None, sa_type=Float)
    ended_at: float | None = Field(default=None, sa_type=Float)
    end_reason: str | None = Field(default=None, sa_type=Text)
    pinned: bool = Field(default=False, sa_column_kwargs={"server_default": false()})
    """Whether there is a recovery point of just this operation, which stays for them."""


class OperationRow(SQLModel, table=True):
    """One operation and its outcome."""

    __tablename__ = "operation"
    __table_args__ = (
        UniqueConstraint("lane", "seq"),
        Index(
            "sample_waiting",
            "mesh",
            "lane",
            "accepted_at",
            sqlite_where=text("kind = 'sample' AND state IN ('queued', 'running')"),
            postgresql_where=text("kind = 'sample' AND state IN ('queued', 'running')"),
        ),
        Index(
            "operation_open",
            "accepted_at",
            sqlite_where=text("state IN ('queued', 'running')"),
            postgresql_where=text("state IN ('queued', 'running')"),
        ),
        Index(
            "operation_kept",
            "finished_at",
            sqlite_where=text("finished_at IS NOT NULL AND NOT expired"),
            postgresql_where=text("finished_at IS NOT NULL AND NOT expired"),
        ),
        Index(
            "sample_ended",
            "lane",
            "ended_no",
            sqlite_where=text("ended_no IS NOT NULL"),
            postgresql_where=text("ended_no IS NOT NULL"),
        ),
        Index(
            "operation_used",
            "tenant",
            "finished_at",
            sqlite_where=text("state = 'done'"),
            postgresql_where=text("state = 'done'"),
        ),
        Index(
            "operation_payload_blob",
            "payload_blob",
            sqlite_where=text("payload_blob IS NOT NULL"),
            postgresql_where=text("payload_blob IS NOT NULL"),
        ),
        Index(
            "operation_result_blob",
            "result_blob",
            sqlite_where=text("result_blob IS NOT NULL"),
            postgresql_where=text("result_blob IS NOT NULL"),
        ),
    )
    request_id: str = Field(primary_key=True)
    tenant: str
    lane: str = Field(foreign_key="lane.id")
    mesh: str
    seq: int = Field(sa_type=BigInteger)
    kind: str
    digest: str
    state: str
    attempts: int = 0
    suspicions: int = Field(default=0, sa_column_kwargs={"server_default": text("0")})
    """At how many of them its worker died or the device failed, so that the operation may be to blame."""
    claim_epoch: int = 0
    not_before: float = Field(default=0.0, sa_type=Float)
    payload: bytes | None = Field(default=None, sa_column=Column(LargeBinary))
    payload_blob: str | None = None
    payload_bytes: int = Field(default=0, sa_type=BigInteger, sa_column_kwargs={"server_default": text("0")})
    result: bytes | None = Field(default=None, sa_column=Column(LargeBinary))
    result_blob: str | None = None
    result_bytes: int | None = Field(default=None, sa_type=BigInteger)
    """Absent for results from before it was kept."""
    error: str | None = Field(default=None, sa_type=Text)
    error_category: str | None = None
    error_code: str | None = None
    rejection: str | None = Field(default=None, sa_type=Text)
    num_tokens: int = Field(default=0, sa_type=BigInteger)
    num_prompt_tokens: int = Field(default=0, sa_type=BigInteger, sa_column_kwargs={"server_default": text("0")})
    num_sequences: int = Field(default=1, sa_column_kwargs={"server_default": text("1")})
    """How many a sample draws at once."""
    device_s: float = Field(default=0.0, sa_type=Float)
    expired: bool = False
    accepted_at: float = Field(sa_type=Float)
    started_at: float | None = Field(default=None, sa_type=Float)
    finished_at: float | None = Field(default=None, sa_type=Float)
    ended_no: int | None = Field(default=None, sa_type=BigInteger)
    """A sample's place among those of its lane that have ended: given under the lane's lock, so none is seen late."""


class CheckpointRow(SQLModel, table=True):
    """A complete and verified checkpoint. A row is the publication: there is none before.

    ``content`` is what the path means now: new with every save that changes it, and with it the checkpoint is private
    again. ``generation`` counts how often the owner has taken back what was given out. Checkpoints with the same
    ``files_group`` share their files: one is a copy of the other.
    """

    __tablename__ = "checkpoint"
    __table_args__ = (
        Index("checkpoint_of_tenant", "tenant", "created_at"),
        Index("checkpoint_content", "content", unique=True),
        Index(
            "checkpoint_end",
            "expires_at",
            sqlite_where=text("expires_at IS NOT NULL"),
            postgresql_where=text("expires_at IS NOT NULL"),
        ),
    )
    path: str = Field(primary_key=True)
    tenant: str = Field(foreign_key="tenant.id")
    adapter: str = Field(foreign_key="adapter.id", index=True)
    kind: str
    name: str
    seq: int
    config: str = Field(sa_type=Text)
    files: str = Field(sa_type=Text)
    size_bytes: int = Field(sa_type=BigInteger)
    user_metadata: str | None = Field(default=None, sa_type=Text)
    public: bool = False
    listed: bool = True
    created_at: float = Field(sa_type=Float)
    expires_at: float | None = Field(default=None, sa_type=Float)
    files_group: str | None = Field(default=None, index=True)
    content: str
    generation: int = Field(default=0, sa_column_kwargs={"server_default": text("0")})
    copied_from: str | None = None
    """The path it was copied from, which may mean something else by now."""


class AccessTokenRow(SQLModel, table=True):
    """A weights access token, kept as its SHA-256. It opens what ``tenant`` has in run ``adapter``.

    That is every listed checkpoint, or with a ``path`` the one ``content`` that this meant when it was issued.
    """

    __tablename__ = "access_token"
    __table_args__ = (
        Index("access_token_of_tenant", "tenant", "created_at"),
        Index("access_token_end", "expires_at"),
    )
    id: str = Field(primary_key=True)
    digest: str = Field(unique=True)
    tenant: str = Field(foreign_key="tenant.id")
    adapter: str = Field(foreign_key="adapter.id")
    path: str | None = None
    content: str | None = None
    name: str
    created_at: float = Field(sa_type=Float)
    expires_at: float = Field(sa_type=Float)
    revoked_at: float | None = Field(default=None, sa_type=Float)
    last_used_at: float | None = Field(default=None, sa_type=Float)


class PastCheckpointRow(SQLModel, table=True):
    """A checkpoint that was deleted or has expired: what its storage came to must still be told."""

    __tablename__ = "past_checkpoint"
    __table_args__ = (Index("past_checkpoint_of_tenant", "tenant", "ended_at"),)
    id: int | None = Field(default=None, primary_key=True)
    path: str
    tenant: str = Field(foreign_key="tenant.id")
    adapter: str
    size_bytes: int = Field(sa_type=BigInteger)
    created_at: float = Field(sa_type=Float)
    ended_at: float = Field(sa_type=Float)


class AuditRow(SQLModel, table=True):
    """Something a tenant did that others may have to answer for. Details are JSON, never data nor keys."""

    __tablename__ = "audit"
    __table_args__ = (Index("audit_of_tenant", "tenant", "at"),)
    id: int | None = Field(default=None, primary_key=True)
    tenant: str = Field(foreign_key="tenant.id")
    at: float = Field(sa_type=Float)
    event: str
    details: str = Field(sa_type=Text)


class SnapshotRow(SQLModel, table=True):
    """A recovery point: the adapter's state after operation ``seq``, which cannot be replayed if it ``is_start``."""

    __tablename__ = "snapshot"
    __table_args__ = (Index("snapshot_age", "created_at"), Index("snapshot_blob", "blob"))
    adapter: str = Field(primary_key=True, foreign_key="adapter.id")
    seq: int = Field(primary_key=True)
    blob: str
    size_bytes: int = Field(sa_type=BigInteger)
    created_at: float = Field(sa_type=Float)
    is_start: bool = Field(default=False, sa_column_kwargs={"server_default": false()})


class DoomedBlobRow(SQLModel, table=True):
    """A blob that nothing refers to since then."""

    __tablename__ = "doomed_blob"
    __table_args__ = (Index("doomed_blob_since", "since"),)
    key: str = Field(primary_key=True)
    since: float = Field(sa_type=Float)
