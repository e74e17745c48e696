"""The tables of what is kept and sampled from: adapters, snapshots, checkpoints, sampling sessions, blobs to delete."""

from __future__ import annotations

from sqlalchemy import BigInteger, Float, Index, Text, false, text
from sqlmodel import Field, SQLModel


class AdapterRow(SQLModel, table=True):
    """A training run. Its lane has the same id."""

    __tablename__ = "adapter"
    __table_args__ = (
        Index("adapter_of_mesh", "mesh"),
        Index("adapter_of_tenant", "tenant", "created_at", "id"),
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


class NamedAdapterRow(SQLModel, table=True):
    """What a session's client calls one of its adapters, in the dialect that has names for them."""

    __tablename__ = "named_adapter"
    session: str = Field(primary_key=True, foreign_key="session.id")
    name: str = Field(primary_key=True)
    adapter: str = Field(foreign_key="adapter.id", unique=True)


class SamplerTemplateRow(SQLModel, table=True):
    """How conversations become prompts where a session samples from a base model, or from one of its adapters."""

    __tablename__ = "sampler_template"
    session: str = Field(primary_key=True, foreign_key="session.id")
    base_model: str = Field(primary_key=True)
    adapter_name: str = Field(primary_key=True)
    settings: str = Field(sa_type=Text)


class SnapshotRow(SQLModel, table=True):
    """A recovery point: the adapter's state after operation ``seq``, which cannot be replayed if it ``is_start``."""

    __tablename__ = "snapshot"
    __table_args__ = (
        Index("snapshot_age", "created_at"),
        Index("snapshot_blob", "blob"),
        Index("snapshot_size", "adapter", "size_bytes"),
    )
    adapter: str = Field(primary_key=True, foreign_key="adapter.id")
    seq: int = Field(primary_key=True)
    blob: str
    size_bytes: int = Field(sa_type=BigInteger)
    created_at: float = Field(sa_type=Float)
    is_start: bool = Field(default=False, sa_column_kwargs={"server_default": false()})


class SamplingSessionRow(SQLModel, table=True):
    """What a sampling client samples from: the base model, one checkpoint, or nameless weights.

    Its lane has the same id.
    """

    __tablename__ = "sampling_session"
    id: str = Field(primary_key=True, foreign_key="lane.id")
    tenant: str = Field(foreign_key="tenant.id", index=True)
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
        Index("ephemeral_weights_adapter", "adapter"),
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


class CheckpointRow(SQLModel, table=True):
    """A complete and verified checkpoint. A row is the publication: there is none before.

    ``content`` is what the path means now: new with every save that changes it, and with it the checkpoint is private
    again. ``generation`` counts how often the owner has taken back what was given out. Checkpoints with the same
    ``files_group`` share their files: one is a copy of the other.
    """

    __tablename__ = "checkpoint"
    __table_args__ = (
        Index("checkpoint_of_tenant", "tenant", "created_at", "path"),
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
    """The path it was copied from, which may mean something else by now; or the folder, with what that held then."""
    pushed: str | None = None
    """The content that was pushed by itself, where that is wanted."""


class PushRow(SQLModel, table=True):
    """That each new checkpoint of a run, or with ``run`` empty of all of a tenant's, is exported.

    ``spec`` is what such a job is told, its secrets sealed. What was saved before ``since`` has had its turn.
    """

    __tablename__ = "push"
    __table_args__ = (Index("push_of_run", "tenant", "run", unique=True),)
    id: str = Field(primary_key=True)
    tenant: str = Field(foreign_key="tenant.id")
    run: str
    spec: str = Field(sa_type=Text)
    created_at: float = Field(sa_type=Float)
    since: float = Field(sa_type=Float)
    last_job: str | None = None


class AccessTokenRow(SQLModel, table=True):
    """A weights access token, kept as its SHA-256. It opens what ``tenant`` has in run ``adapter``.

    That is every listed checkpoint, or with a ``path`` the one ``content`` that this meant when it was issued.
    """

    __tablename__ = "access_token"
    __table_args__ = (
        Index("access_token_of_tenant", "tenant", "created_at"),
        Index("access_token_end", "expires_at"),
        Index("access_token_adapter", "adapter"),
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
    """A checkpoint that was deleted or has expired: what its storage came to must still be told.

    Without a path they were nameless weights whose sampling session is forgotten.
    """

    __tablename__ = "past_checkpoint"
    __table_args__ = (
        Index("past_checkpoint_of_tenant", "tenant", "ended_at"),
        Index("past_checkpoint_of_session", "session"),
        Index("past_checkpoint_of_path", "path", "ended_at"),
        Index("past_checkpoint_end", "ended_at"),
    )
    id: int | None = Field(default=None, primary_key=True)
    path: str
    tenant: str = Field(foreign_key="tenant.id")
    adapter: str
    session: str = Field(default="", sa_column_kwargs={"server_default": text("''")})
    base_model: str = Field(default="", sa_column_kwargs={"server_default": text("''")})
    size_bytes: int = Field(sa_type=BigInteger)
    created_at: float = Field(sa_type=Float)
    ended_at: float = Field(sa_type=Float)


class DoomedBlobRow(SQLModel, table=True):
    """A blob that nothing refers to since then."""

    __tablename__ = "doomed_blob"
    __table_args__ = (Index("doomed_blob_since", "since"),)
    key: str = Field(primary_key=True)
    since: float = Field(sa_type=Float)
