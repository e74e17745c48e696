"""Adapters, sampling sessions and checkpoints: what there is, tenant by tenant."""

from __future__ import annotations

import json
from dataclasses import dataclass

from sqlalchemy import Engine
from sqlmodel import Session, and_, col, func, or_, select

from twinkle.core.adapter import AdapterConfig, Checkpoint, CheckpointKind, Grant, StoredFile
from twinkle.core.clock import Clock
from twinkle.core.errors import NotFound
from twinkle.storage.adapters.ephemeral import EphemeralWeights
from twinkle.storage.checkpoints.contents import remove_checkpoints
from twinkle.storage.database import Database, Row
from twinkle.storage.tables import (
    AdapterRow,
    CheckpointRow,
    LaneRow,
    OperationRow,
    SamplingSessionRow,
    SessionRow,
)

NO_PROJECT = "default"
"""The project of sessions that were put into none: the SDK wants a name."""

CHECKPOINTS = "checkpoints/"

# Asked for every sample: not through the ORM.
_SAMPLING_SESSION = (
    "SELECT s.id, s.tenant, s.session, s.base_model, s.model_path, s.checkpoint, s.content, s.generation, e.adapter,"
    " e.seq, e.end_reason, l.head_seq FROM sampling_session s"
    " LEFT JOIN ephemeral_weights e ON e.sampling_session = s.id LEFT JOIN lane l ON l.id = e.adapter WHERE s.id = ?"
)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A training run."""

    id: str
    tenant: str
    session: str
    mesh: str
    config: AdapterConfig
    optimizer: dict[str, object]
    user_metadata: dict[str, str] | None
    created_at: float
    parked_at: float | None
    pinned_at: float | None


@dataclass(frozen=True, kw_only=True)
class SamplingSession:
    """What a sampling client samples from: the base model, one ``content``, or ``weights`` without a name.

    The content is what ``checkpoint`` meant at its opening, readable in a stranger's session as long as it is of the
    same ``generation``.
    """

    id: str
    tenant: str
    session: str
    base_model: str
    model_path: str | None
    checkpoint: str | None
    content: str | None
    generation: int | None
    weights: EphemeralWeights | None = None


class Catalog:
    """What there is."""

    def __init__(self, database: Database, engine: Engine, clock: Clock) -> None:
        self._database = database
        self._engine = engine
        self._clock = clock

    def adapter(self, adapter_id: str, *, tenant: str | None = None) -> Adapter:
        """One training run; ``tenant=None`` is for workers, who serve all.

        Raises:
            NotFound: It does not exist or is another tenant's.
        """
        with Session(self._engine) as session:
            row = session.get(AdapterRow, adapter_id)
            if row is None or (tenant is not None and row.tenant != tenant):
                raise NotFound(f"no training run {adapter_id!r}")
            return _adapter_of(row)

    def adapters(
        self, tenant: str, *, limit: int, offset: int, session_id: str | None = None, project_id: str | None = None
    ) -> tuple[list[Adapter], int]:
        """A page of the tenant's training runs, the one with the latest request first, and how many there are."""
        with Session(self._engine) as session:
            mine = select(AdapterRow).where(AdapterRow.tenant == tenant)
            if session_id is not None:
                mine = mine.where(AdapterRow.session == session_id)
            if project_id is not None:
                project = func.coalesce(SessionRow.project_id, NO_PROJECT)
                mine = mine.join(SessionRow, col(SessionRow.id) == AdapterRow.session).where(project == project_id)
            total = session.exec(select(func.count()).select_from(mine.subquery())).one()
            latest = and_(col(OperationRow.lane) == LaneRow.id, col(OperationRow.seq) == LaneRow.max_seq)
            requested_at = func.coalesce(OperationRow.accepted_at, AdapterRow.created_at)
            page = (
                mine.join(LaneRow, col(LaneRow.id) == AdapterRow.id)
                .outerjoin(OperationRow, latest)
                .order_by(requested_at.desc(), col(AdapterRow.id).desc())
            )
            return [_adapter_of(row) for row in session.exec(page.limit(limit).offset(offset)).all()], total

    def newest_adapters(self, *, limit: int) -> list[Adapter]:
        """The newest training runs of every tenant."""
        with Session(self._engine) as session:
            newest = select(AdapterRow).order_by(col(AdapterRow.created_at).desc(), col(AdapterRow.id))
            return [_adapter_of(row) for row in session.exec(newest.limit(limit)).all()]

    def last_request_at(self, adapter_id: str) -> float | None:
        """When the adapter's latest operation was accepted."""
        rows = self._database.read(
            "SELECT o.accepted_at FROM lane l JOIN operation o ON o.lane = l.id AND o.seq = l.max_seq WHERE l.id = ?",
            (adapter_id,),
        )
        return rows[0].accepted_at if rows else None

    def next_seq(self, adapter_id: str) -> int:
        """The number after the highest one that the adapter has seen."""
        rows = self._database.read("SELECT max_seq + 1 - num_rewinds AS seq FROM lane WHERE id = ?", (adapter_id,))
        return int(rows[0].seq)

    def sampling_session(self, sampling_session_id: str, *, tenant: str | None = None) -> SamplingSession:
        """One sampling session; ``tenant=None`` is for workers.

        Raises:
            NotFound: It does not exist or is another tenant's.
        """
        rows = self._database.read(_SAMPLING_SESSION, (sampling_session_id,))
        if not rows or (tenant is not None and rows[0].tenant != tenant):
            raise NotFound(f"no sampling session {sampling_session_id!r}")
        return _sampling_session_of(rows[0])

    def sampled_before(self, session_id: str, *, checkpoint: str, seq: int) -> str | None:
        """The sampling session on a path, whatever that meant then, in which a sample of this number was accepted."""
        rows = self._database.read(
            "SELECT s.id FROM sampling_session s JOIN operation o ON o.lane = s.id"
            " WHERE s.session = ? AND s.checkpoint = ? AND o.seq = ? LIMIT 1",
            (session_id, checkpoint, seq),
        )
        return str(rows[0].id) if rows else None

    def sampling_sessions_of(self, session_id: str) -> list[str]:
        """The ids of a session's sampling sessions."""
        with Session(self._engine) as session:
            statement = select(SamplingSessionRow.id).where(SamplingSessionRow.session == session_id)
            return list(session.exec(statement).all())

    def checkpoint(self, path: str, *, tenant: str | None = None, grant: Grant | None = None) -> Checkpoint:
        """What a path means now, unless it has expired. Another tenant's is found only if it is public, or granted.

        Whatever goes on after the request that asked keeps the answer's ``content``, and asks for that from then on.

        Raises:
            NotFound: There is none, it has expired, or it is another tenant's.
        """
        with Session(self._engine) as session:
            row = session.get(CheckpointRow, path)
            if row is None or self._is_over(row) or not _may_read(row, tenant, grant):
                raise NotFound(f"no checkpoint {path!r}")
            return _checkpoint_of(row)

    def content(self, content: str) -> Checkpoint:
        """A content that has neither expired nor been deleted or replaced. Who may read it was decided before.

        Raises:
            NotFound: It is not there any more.
        """
        with Session(self._engine) as session:
            row = session.exec(select(CheckpointRow).where(CheckpointRow.content == content)).first()
            if row is None or self._is_over(row):
                raise NotFound("this content is not there any more: it was replaced or deleted, or has expired")
            return _checkpoint_of(row)

    def sampled(self, sampling_session: SamplingSession) -> Checkpoint | None:
        """What a sampling session may read now; ``None`` is the base model.

        The answer to a stranger is the same for whatever may have become of it.

        Raises:
            NotFound: The content is not there any more, or was taken back from strangers.
        """
        if sampling_session.checkpoint is None:
            return None
        with Session(self._engine) as session:
            wanted = select(CheckpointRow).where(CheckpointRow.content == sampling_session.content)
            row = session.exec(wanted).first()
            if row is None or self._is_over(row) or not _may_sample(row, sampling_session):
                raise NotFound(
                    f"{sampling_session.checkpoint}, as it was when sampling session {sampling_session.id} was opened,"
                    " is not there any more: it was deleted, replaced or unpublished, or has expired; open a new"
                    " session on what is there now"
                )
            return _checkpoint_of(row)

    def checkpoints(
        self, tenant: str, *, limit: int, offset: int, adapter_id: str | None = None
    ) -> tuple[list[Checkpoint], int]:
        """A page of the tenant's listed checkpoints, newest first, and how many there are."""
        with Session(self._engine) as session:
            mine = select(CheckpointRow).where(
                CheckpointRow.tenant == tenant,
                col(CheckpointRow.listed).is_(True),
                or_(col(CheckpointRow.expires_at).is_(None), col(CheckpointRow.expires_at) > self._clock.now()),
            )
            if adapter_id is not None:
                mine = mine.where(CheckpointRow.adapter == adapter_id)
            total = session.exec(select(func.count()).select_from(mine.subquery())).one()
            newest = mine.order_by(col(CheckpointRow.created_at).desc(), col(CheckpointRow.path))
            return [_checkpoint_of(row) for row in session.exec(newest.limit(limit).offset(offset)).all()], total

    def latest_checkpoint(self, adapter_id: str, kind: CheckpointKind) -> Checkpoint | None:
        """An adapter's newest listed checkpoint of a kind."""
        with Session(self._engine) as session:
            statement = (
                select(CheckpointRow)
                .where(CheckpointRow.adapter == adapter_id, CheckpointRow.kind == kind.value)
                .where(col(CheckpointRow.listed).is_(True))
                .order_by(col(CheckpointRow.created_at).desc())
            )
            row = session.exec(statement).first()
            return None if row is None or self._is_over(row) else _checkpoint_of(row)

    def set_expiry(self, tenant: str, path: str, expires_at: float | None) -> None:
        """Change when a checkpoint ends; ``None`` keeps it for ever.

        Raises:
            NotFound: It does not exist, has expired, or is another tenant's.
        """
        with Session(self._engine) as session:
            row = self._own_checkpoint(session, tenant, path)
            row.expires_at = expires_at
            session.add(row)
            session.commit()

    def set_public(self, tenant: str, path: str, *, public: bool) -> None:
        """Let every tenant read what a path means now, or no longer. Doing it twice is harmless.

        No longer is at once: URLs that were given out, the owner's too, and the sessions of strangers end.

        Raises:
            NotFound: It does not exist, has expired, or is another tenant's.
        """
        with Session(self._engine) as session:
            row = self._own_checkpoint(session, tenant, path)
            row.public = public
            if not public:
                row.generation += 1
            session.add(row)
            session.commit()

    def delete_checkpoint(self, tenant: str, path: str) -> list[str]:
        """Unlist a checkpoint for ever; the answer is the keys of its files, which nothing refers to any more.

        Raises:
            NotFound: It does not exist or is another tenant's.
        """
        with self._database.transaction() as transaction:
            removed, keys = remove_checkpoints(
                transaction, "path = ? AND tenant = ?", (path, tenant), now=self._clock.now()
            )
        if not removed:
            raise NotFound(f"no checkpoint {path!r}")
        return keys

    def _own_checkpoint(self, session: Session, tenant: str, path: str) -> CheckpointRow:
        row = session.get(CheckpointRow, path)
        if row is None or row.tenant != tenant or self._is_over(row):
            raise NotFound(f"no checkpoint {path!r}")
        return row

    def _is_over(self, row: CheckpointRow) -> bool:
        return row.expires_at is not None and row.expires_at <= self._clock.now()


def _may_read(row: CheckpointRow, tenant: str | None, grant: Grant | None) -> bool:
    if tenant is None or row.tenant == tenant or row.public:
        return True
    return grant is not None and grant.content == row.content


def _may_sample(row: CheckpointRow, sampling_session: SamplingSession) -> bool:
    if row.tenant == sampling_session.tenant:
        return True
    return row.public and row.generation == sampling_session.generation


def _sampling_session_of(row: Row) -> SamplingSession:
    weights = None
    if row.adapter is not None:
        weights = EphemeralWeights(
            adapter=row.adapter, seq=row.seq, is_current=row.head_seq == row.seq + 1, end_reason=row.end_reason
        )
    return SamplingSession(
        id=row.id,
        tenant=row.tenant,
        session=row.session,
        base_model=row.base_model,
        model_path=row.model_path,
        checkpoint=row.checkpoint,
        content=row.content,
        generation=row.generation,
        weights=weights,
    )


def _adapter_of(row: AdapterRow) -> Adapter:
    return Adapter(
        id=row.id,
        tenant=row.tenant,
        session=row.session,
        mesh=row.mesh,
        config=AdapterConfig.model_validate_json(row.config),
        optimizer=json.loads(row.optimizer),
        user_metadata=None if row.user_metadata is None else json.loads(row.user_metadata),
        created_at=row.created_at,
        parked_at=row.parked_at,
        pinned_at=row.pinned_at,
    )


def _checkpoint_of(row: CheckpointRow) -> Checkpoint:
    return Checkpoint(
        path=row.path,
        tenant=row.tenant,
        adapter=row.adapter,
        kind=CheckpointKind(row.kind),
        name=row.name,
        seq=row.seq,
        config=AdapterConfig.model_validate_json(row.config),
        files={name: StoredFile.model_validate(file) for name, file in json.loads(row.files).items()},
        created_at=row.created_at,
        expires_at=row.expires_at,
        public=row.public,
        user_metadata=None if row.user_metadata is None else json.loads(row.user_metadata),
        listed=row.listed,
        content=row.content,
        generation=row.generation,
    )
