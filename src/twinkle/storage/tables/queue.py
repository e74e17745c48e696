"""The tables of the queue: meshes and their shares, lanes, operations, and the branches of runs."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Float, Index, LargeBinary, Text, UniqueConstraint, false, text
from sqlmodel import Field, SQLModel


class MeshRow(SQLModel, table=True):
    """A mesh and its lease."""

    __tablename__ = "mesh"
    name: str = Field(primary_key=True)
    capabilities: str | None = Field(default=None, sa_type=Text)
    owner: str | None = None
    epoch: int = 0
    expires_at: float = Field(default=0.0, sa_type=Float)
    vtime: float = Field(default=0.0, sa_type=Float, sa_column_kwargs={"server_default": text("0")})
    draining_at: float | None = Field(default=None, sa_type=Float)
    """Since when nothing new comes to it, and all that is on it leaves."""
    drains_to: str | None = None
    """Where to; none: to whichever mesh of its model has the least to do."""
    trouble: str | None = Field(default=None, sa_type=Text)
    """Why its last worker did not start; none: it did."""
    trouble_at: float | None = Field(default=None, sa_type=Float)
    asked_for: str | None = Field(default=None, sa_type=Text)
    """What a worker is to be started with, for whoever starts workers; none: nobody has asked."""
    announced: str | None = Field(default=None, sa_type=Text)
    """What it will serve, and until when that holds, while a worker starts; none: it has said it, or none starts."""


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
            "lane_forgettable",
            "id",
            sqlite_where=text("pruned_seq > gone_seq + 1"),
            postgresql_where=text("pruned_seq > gone_seq + 1"),
        ),
        Index(
            "lane_moving",
            "mesh",
            "id",
            sqlite_where=text("moving_to IS NOT NULL"),
            postgresql_where=text("moving_to IS NOT NULL"),
        ),
        Index(
            "lane_requested",
            "tenant",
            "requested_at",
            "id",
            sqlite_where=text("requested_at IS NOT NULL"),
            postgresql_where=text("requested_at IS NOT NULL"),
        ),
        Index(
            "lane_unloaded",
            "id",
            sqlite_where=text("unload_seq > floor_seq"),
            postgresql_where=text("unload_seq > floor_seq"),
        ),
        Index(
            "lane_keeping",
            "tenant",
            "kept_bytes",
            sqlite_where=text("kept_bytes > 0"),
            postgresql_where=text("kept_bytes > 0"),
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
    arrival_numbered: bool = Field(default=False, sa_column_kwargs={"server_default": false()})
    """Whether the journal numbers its operations, as they arrive; else their client does."""
    moving_to: str | None = None
    """The mesh it is on its way to; meanwhile its operations are offered to nobody."""
    gone_seq: int = Field(default=-1, sa_type=BigInteger, sa_column_kwargs={"server_default": text("-1")})
    """Up to this number operations are forgotten: all of an ordered lane, of another those in ``forgotten``."""
    requested_at: float | None = Field(default=None, sa_type=Float)
    """Of training runs and copies alone: when the latest operation was accepted, or else the run was made."""
    kept_bytes: int = Field(default=0, sa_type=BigInteger, sa_column_kwargs={"server_default": text("0")})
    """Of payloads that lie in the journal after the end of their operations, as far as they are counted."""
    counted_no: int = Field(default=-1, sa_type=BigInteger, sa_column_kwargs={"server_default": text("-1")})
    """They are counted up to this operation, of an unordered lane up to the one that ended as this one."""


class BranchRow(SQLModel, table=True):
    """A past state taken up: operation ``seq`` of ``adapter`` goes on as ``source`` was after operation ``at``.

    ``source`` is the run itself for a rewind, another one for a fork. ``request_key`` tells a resend. ``step`` is
    that of the optimizer by which the operation was asked for, if it was.
    """

    __tablename__ = "branch"
    __table_args__ = (UniqueConstraint("source", "request_key"),)
    adapter: str = Field(primary_key=True, foreign_key="adapter.id")
    seq: int = Field(primary_key=True, sa_type=BigInteger)
    source: str = Field(foreign_key="adapter.id")
    at: int = Field(sa_type=BigInteger)
    step: int | None = Field(default=None, sa_type=BigInteger)
    request_key: str | None = None
    created_at: float = Field(sa_type=Float)


class OperationRow(SQLModel, table=True):
    """One operation and its outcome."""

    __tablename__ = "operation"
    __table_args__ = (
        UniqueConstraint("lane", "seq"),
        Index(
            "operation_named",
            "lane",
            "request_key",
            unique=True,
            sqlite_where=text("request_key IS NOT NULL"),
            postgresql_where=text("request_key IS NOT NULL"),
        ),
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
            sqlite_where=text("finished_at IS NOT NULL AND NOT expired AND held_by IS NULL"),
            postgresql_where=text("finished_at IS NOT NULL AND NOT expired AND held_by IS NULL"),
        ),
        Index(
            "sample_ended",
            "lane",
            "ended_no",
            sqlite_where=text("ended_no IS NOT NULL"),
            postgresql_where=text("ended_no IS NOT NULL"),
        ),
        Index(
            "sample_forgettable",
            "finished_at",
            sqlite_where=text("kind = 'sample' AND expired"),
            postgresql_where=text("kind = 'sample' AND expired"),
        ),
        Index(
            "operation_held",
            "held_by",
            sqlite_where=text("held_by IS NOT NULL"),
            postgresql_where=text("held_by IS NOT NULL"),
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
            "operation_payload_size",
            "tenant",
            "payload_bytes",
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
    held_by: str | None = None
    """The job that has not ended yet, which may ask for the result again although its time is over."""
    ended_no: int | None = Field(default=None, sa_type=BigInteger)
    """A sample's place among those of its lane that have ended: given under the lane's lock, so none is seen late."""
    request_key: str | None = None
    """What its client calls it, where the journal numbers: a second one of the name is a resend."""


class ForgottenRow(SQLModel, table=True):
    """What tells a resend of an operation whose row is gone, where its number alone does not.

    ``number`` is that of a request key, or of a client of a sampling session (``journal/forgotten.py``), ``last_seq``
    the operation's, of a client the highest one.
    """

    __tablename__ = "forgotten"
    lane: str = Field(primary_key=True, foreign_key="lane.id")
    number: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    last_seq: int = Field(sa_type=BigInteger)


class GoneLaneRow(SQLModel, table=True):
    """A run, a data set or a sampling session that is forgotten; its id stays as long as its client's session."""

    __tablename__ = "gone_lane"
    __table_args__ = (Index("gone_lane_of_session", "session"),)
    id: str = Field(primary_key=True)
    tenant: str = Field(foreign_key="tenant.id")
    session: str


class PastStepsRow(SQLModel, table=True):
    """How many steps were applied in a stretch of a run whose operations are gone; it ends with number ``seq``.

    No rewind begins or leads into the middle of one.
    """

    __tablename__ = "past_steps"
    lane: str = Field(primary_key=True, foreign_key="lane.id")
    seq: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    num_steps: int = Field(sa_type=BigInteger)
