"""Tenants, keys and sessions: who is there. Plain SQLModel; none of it is on the path of an operation."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Engine
from sqlalchemy.exc import IntegrityError
from sqlmodel import Session, col, select

from twinkle.core.clock import Clock
from twinkle.core.errors import NotFound
from twinkle.core.ids import new_api_key, new_id, new_session_id
from twinkle.storage.tables import ApiKeyRow, SessionRow, TenantRow


def digest_of_key(key: str) -> str:
    """What is stored of an API key."""
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class NewSession:
    """What ``create_session`` says."""

    tags: list[str]
    user_metadata: dict[str, str] | None
    project_id: str | None
    display_name: str | None
    sdk_version: str
    idempotency_key: str | None


@dataclass(frozen=True, kw_only=True)
class KeyInfo:
    """What may be told of a key: everything but itself."""

    tenant: str
    name: str
    created_at: float
    revoked_at: float | None


@dataclass(frozen=True, kw_only=True)
class ValidKey:
    """A key that was not revoked: everything but itself."""

    id: str
    tenant: str
    name: str

    @property
    def number(self) -> int:
        """Its id as the SDK wants it."""
        return int(self.id[:12], 16)


def metadata_of(session: SessionRow) -> dict[str, str] | None:
    """What the client has told of its session."""
    return None if session.user_metadata is None else dict(json.loads(session.user_metadata))


class Directory:
    """Who is there."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    def create_key(self, tenant_name: str, key_name: str) -> str:
        """Make an API key for a tenant, creating the tenant if need be. The key is shown once and kept hashed."""
        key = new_api_key()
        now = self._clock.now()
        with Session(self._engine) as session:
            tenant = session.exec(select(TenantRow).where(TenantRow.name == tenant_name)).first()
            if tenant is None:
                tenant = TenantRow(id=new_id(), name=tenant_name, created_at=now)
                session.add(tenant)
                session.flush()
            session.add(
                ApiKeyRow(id=new_id(), digest=digest_of_key(key), tenant=tenant.id, name=key_name, created_at=now)
            )
            session.commit()
        return key

    def has_keys(self) -> bool:
        """Whether any key was ever made."""
        with Session(self._engine) as session:
            return session.exec(select(ApiKeyRow)).first() is not None

    def keys(self) -> list[KeyInfo]:
        """Every key that was made, the oldest first."""
        with Session(self._engine) as session:
            statement = select(ApiKeyRow, TenantRow.name).join(TenantRow).order_by(col(ApiKeyRow.created_at))
            return [
                KeyInfo(tenant=tenant, name=row.name, created_at=row.created_at, revoked_at=row.revoked_at)
                for row, tenant in session.exec(statement)
            ]

    def key(self, key: str) -> ValidKey | None:
        """A key by itself; ``None`` if it is unknown or was revoked."""
        return self._valid_key(ApiKeyRow.digest == digest_of_key(key))

    def key_with_id(self, key_id: str) -> ValidKey | None:
        """A key by its id; ``None`` if it is unknown or was revoked."""
        return self._valid_key(ApiKeyRow.id == key_id)

    def _valid_key(self, condition: ColumnElement[bool] | bool) -> ValidKey | None:
        with Session(self._engine) as session:
            row = session.exec(select(ApiKeyRow).where(condition, col(ApiKeyRow.revoked_at).is_(None))).first()
            return None if row is None else ValidKey(id=row.id, tenant=row.tenant, name=row.name)

    def revoke_key(self, key_id: str) -> None:
        """Let a key, and what was exchanged for it, open nothing any more."""
        with Session(self._engine) as session:
            row = session.get(ApiKeyRow, key_id)
            if row is not None and row.revoked_at is None:
                row.revoked_at = self._clock.now()
                session.add(row)
                session.commit()

    def tenant_name(self, tenant: str) -> str:
        """A tenant's name."""
        with Session(self._engine) as session:
            row = session.get(TenantRow, tenant)
            if row is None:
                raise NotFound(f"no tenant {tenant!r}")
            return row.name

    def open_session(self, tenant: str, new: NewSession) -> str:
        """Create a session; the same idempotency key gets the same session."""
        existing = self.session_under(tenant, new.idempotency_key)
        if existing is not None:
            return existing
        now = self._clock.now()
        row = SessionRow(
            id=new_session_id(),
            tenant=tenant,
            idempotency_key=new.idempotency_key,
            tags=json.dumps(new.tags),
            user_metadata=None if new.user_metadata is None else json.dumps(new.user_metadata),
            project_id=new.project_id,
            display_name=new.display_name,
            sdk_version=new.sdk_version,
            created_at=now,
            heartbeat_at=now,
        )
        session_id = row.id
        try:
            with Session(self._engine) as session:
                session.add(row)
                session.commit()
        except IntegrityError:
            winner = self.session_under(tenant, new.idempotency_key)
            if winner is None:
                raise
            return winner
        return session_id

    def session_under(self, tenant: str, idempotency_key: str | None) -> str | None:
        """The session that was opened under a key, if there is one."""
        if idempotency_key is None:
            return None
        with Session(self._engine) as session:
            statement = select(SessionRow.id).where(
                SessionRow.tenant == tenant, SessionRow.idempotency_key == idempotency_key
            )
            return session.exec(statement).first()

    def session(self, tenant: str, session_id: str) -> SessionRow:
        """One of the tenant's sessions.

        Raises:
            NotFound: It does not exist or is another tenant's.
        """
        with Session(self._engine, expire_on_commit=False) as session:
            return _session_of(session, tenant, session_id)

    def sessions(self, tenant: str, *, limit: int, offset: int) -> list[str]:
        """A page of the ids of the tenant's sessions, newest first."""
        with Session(self._engine) as session:
            statement = (
                select(SessionRow.id)
                .where(SessionRow.tenant == tenant)
                .order_by(col(SessionRow.created_at).desc(), col(SessionRow.id))
            )
            return list(session.exec(statement.limit(limit).offset(offset)).all())

    def set_project(self, tenant: str, session_id: str, project_id: str) -> None:
        """Put a session into a project.

        Raises:
            NotFound: It does not exist or is another tenant's.
        """
        with Session(self._engine) as session:
            row = _session_of(session, tenant, session_id)
            row.project_id = project_id
            session.add(row)
            session.commit()

    def heartbeat(self, tenant: str, session_id: str) -> bool:
        """Note a sign of life; false when the session was finished and its client may stop.

        Raises:
            NotFound: It does not exist or is another tenant's.
        """
        with Session(self._engine) as session:
            row = _session_of(session, tenant, session_id)
            if row.finished_at is not None:
                return False
            row.heartbeat_at = self._clock.now()
            session.add(row)
            session.commit()
            return True

    def finish_session(self, tenant: str, session_id: str, *, reason: str, detail: str | None) -> None:
        """Note how a client ended; the first report wins.

        Raises:
            NotFound: It does not exist or is another tenant's.
        """
        with Session(self._engine) as session:
            row = _session_of(session, tenant, session_id)
            if row.finished_at is None:
                row.finished_at, row.finish_reason, row.finish_detail = self._clock.now(), reason, detail
                session.add(row)
                session.commit()


def _session_of(session: Session, tenant: str, session_id: str) -> SessionRow:
    row = session.get(SessionRow, session_id)
    if row is None or row.tenant != tenant:
        raise NotFound(f"no session {session_id!r}")
    return row
