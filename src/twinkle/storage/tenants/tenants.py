"""Tenants: their keys, and their weights, limits and rates, as an administrator sets them and the API asks for them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields

from sqlalchemy import ColumnElement, Engine
from sqlmodel import Session, col, or_, select

from twinkle.core.clock import Clock
from twinkle.core.errors import NotFound
from twinkle.core.ids import new_api_key, new_id
from twinkle.core.limits import NO_LIMITS, TenantLimits
from twinkle.storage.database import Database
from twinkle.storage.journal.turns import RATE_BURST_S
from twinkle.storage.tables import ApiKeyRow, TenantRow

_LIMITS = tuple(field.name for field in fields(TenantLimits))


def digest_of_key(key: str) -> str:
    """What is stored of an API key."""
    return hashlib.sha256(key.encode()).hexdigest()


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


@dataclass(frozen=True, kw_only=True)
class TenantAccount:
    """One tenant. ``own_limits`` are not the settings'; until ``paused_until`` its rate lets nothing of it run."""

    id: str
    name: str
    weight: float
    limits: TenantLimits
    own_limits: Mapping[str, int]
    paused_until: float


class Tenants:
    """Who may use the service, by which keys, and how much of it."""

    def __init__(self, database: Database, engine: Engine, clock: Clock, *, limits: TenantLimits = NO_LIMITS) -> None:
        """Take the stores; ``limits`` are those of tenants that have none of their own."""
        self._database = database
        self._engine = engine
        self._clock = clock
        self._defaults = limits

    def all(self) -> list[TenantAccount]:
        """Every tenant, by name."""
        return self._read("TRUE ORDER BY name", ())

    def account(self, tenant: str) -> TenantAccount:
        """One tenant, by its id.

        Raises:
            NotFound: There is none.
        """
        found = self._read("id = ?", (tenant,))
        if not found:
            raise NotFound(f"no tenant {tenant!r}")
        return found[0]

    def set(self, name: str, *, weight: float | None = None, limits: Mapping[str, int | None]) -> None:
        """Change a tenant's weight, and those of its limits that are given; ``None`` makes one the settings' again.

        Raises:
            NotFound: There is no tenant of that name.
        """
        columns: dict[str, float | None] = {limit: limits[limit] for limit in _LIMITS if limit in limits}
        if weight is not None:
            columns["weight"] = weight
        assignments = ", ".join(f"{column} = ?" for column in columns) or "weight = weight"
        with self._database.transaction() as transaction:
            changed = transaction.execute(
                f"UPDATE tenant SET {assignments} WHERE name = ?", (*columns.values(), name)
            ).rowcount
        if changed != 1:
            raise NotFound(f"no tenant {name!r}; `twinkle tenants list` shows who there is")

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

    def lend_key(self, tenant: str, name: str, *, expires_at: float) -> str:
        """Make a key of a tenant's, by its id, that opens nothing from then on. Those that have expired go."""
        key = new_api_key()
        now = self._clock.now()
        with self._database.transaction() as transaction:
            transaction.execute("DELETE FROM api_key WHERE expires_at <= ?", (now,))
            transaction.execute(
                "INSERT INTO api_key (id, digest, tenant, name, created_at, expires_at) VALUES (?, ?, ?, ?, ?, ?)",
                (new_id(), digest_of_key(key), tenant, name, now, expires_at),
            )
        return key

    def renew_lent_keys(self, tenant: str, name: str, *, expires_at: float) -> None:
        """Let a lent key go on for longer, if it has not expired."""
        with self._database.transaction() as transaction:
            transaction.execute(
                "UPDATE api_key SET expires_at = ? WHERE tenant = ? AND name = ? AND expires_at > ?",
                (expires_at, tenant, name, self._clock.now()),
            )

    def end_lent_keys(self, tenant: str, name: str) -> None:
        """Let the keys that were lent under a name open nothing any more."""
        with self._database.transaction() as transaction:
            transaction.execute(
                "DELETE FROM api_key WHERE tenant = ? AND name = ? AND expires_at IS NOT NULL", (tenant, name)
            )

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

    def any_key(self, credential: str) -> ValidKey | None:
        """What stands for all who come with a text that is no key; made when it is first needed, ``None`` once revoked.

        Nobody can open it with that text where keys are asked for: what is kept is no digest of a key.
        """
        digest = digest_of_key(f"any key:{credential}")
        with self._database.transaction() as transaction:
            tenant, now = f"anyone-{digest[:12]}", self._clock.now()
            transaction.execute(
                "INSERT INTO tenant (id, name, weight, created_at) VALUES (?, ?, 1, ?) ON CONFLICT DO NOTHING",
                (new_id(), tenant, now),
            )
            transaction.execute(
                "INSERT INTO api_key (id, digest, tenant, name, created_at)"
                " SELECT ?, ?, id, 'any key', ? FROM tenant WHERE name = ? ON CONFLICT DO NOTHING",
                (new_id(), digest, now, tenant),
            )
        return self._valid_key(ApiKeyRow.digest == digest)

    def key_with_id(self, key_id: str) -> ValidKey | None:
        """A key by its id; ``None`` if it is unknown or was revoked."""
        return self._valid_key(ApiKeyRow.id == key_id)

    def _valid_key(self, condition: ColumnElement[bool] | bool) -> ValidKey | None:
        with Session(self._engine) as session:
            is_live = or_(col(ApiKeyRow.expires_at).is_(None), col(ApiKeyRow.expires_at) > self._clock.now())
            row = session.exec(select(ApiKeyRow).where(condition, col(ApiKeyRow.revoked_at).is_(None), is_live)).first()
            return None if row is None else ValidKey(id=row.id, tenant=row.tenant, name=row.name)

    def revoke_key(self, key_id: str) -> None:
        """Let a key, and what was exchanged for it, open nothing any more."""
        with Session(self._engine) as session:
            row = session.get(ApiKeyRow, key_id)
            if row is not None and row.revoked_at is None:
                row.revoked_at = self._clock.now()
                session.add(row)
                session.commit()

    def name_of(self, tenant: str) -> str:
        """A tenant's name, by its id."""
        with Session(self._engine) as session:
            row = session.get(TenantRow, tenant)
            if row is None:
                raise NotFound(f"no tenant {tenant!r}")
            return row.name

    def _read(self, where: str, parameters: tuple[str, ...]) -> list[TenantAccount]:
        rows = self._database.read(
            f"SELECT id, name, weight, paid_until, {', '.join(_LIMITS)} FROM tenant WHERE {where}", parameters
        )
        accounts = []
        for row in rows:
            set_here = {name: getattr(row, name) for name in _LIMITS}
            own = {name: value for name, value in set_here.items() if value is not None}
            settings = {name: getattr(self._defaults, name) for name in _LIMITS}
            accounts.append(
                TenantAccount(
                    id=row.id,
                    name=row.name,
                    weight=row.weight,
                    limits=TenantLimits(**settings | own),
                    own_limits=own,
                    paused_until=row.paid_until - RATE_BURST_S,
                )
            )
        return accounts
