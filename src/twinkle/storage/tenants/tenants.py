"""Tenants: their keys, and their weights, limits and rates, as an administrator sets them and the API asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from twinkle.core.clock import Clock
from twinkle.core.errors import NotFound
from twinkle.core.ids import new_api_key, new_id
from twinkle.core.limits import NO_LIMITS, TenantLimits
from twinkle.core.scopes import ALL_SCOPES, Scope, read_scopes
from twinkle.storage.database import Database
from twinkle.storage.journal.turns import RATE_BURST_S
from twinkle.storage.tenants.audit import insert_entry
from twinkle.storage.tenants.keyring import NewKey, digest_of_key, insert_key, revoke

_USE_NOTED_S = 60.0
_LIMITS = tuple(field.name for field in fields(TenantLimits))


@dataclass(frozen=True, kw_only=True)
class ValidKey:
    """A key that was not revoked: everything but itself."""

    id: str
    tenant: str
    name: str
    scopes: frozenset[Scope] = ALL_SCOPES

    @property
    def number(self) -> int:
        """Its id as the SDK wants it."""
        return int(self.id[:12], 16)


@dataclass(frozen=True, kw_only=True)
class TenantAccount:
    """One tenant. ``own_limits`` are not the settings'; until ``paused_until`` its rate lets nothing of it run.

    ``suspension`` is why it may begin nothing new, in the operator's words; ``None``: it may.
    """

    id: str
    name: str
    weight: float
    limits: TenantLimits
    own_limits: Mapping[str, int]
    paused_until: float
    suspension: str | None = None


class Tenants:
    """Who may use the service, by which keys, and how much of it."""

    def __init__(self, database: Database, clock: Clock, *, limits: TenantLimits = NO_LIMITS) -> None:
        """Take the stores; ``limits`` are those of tenants that have none of their own."""
        self._database = database
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
            row = transaction.execute(
                f"UPDATE tenant SET {assignments} WHERE name = ? RETURNING id", (*columns.values(), name)
            ).fetchone()
            if row is None:
                raise NotFound(f"no tenant {name!r}; `twinkle tenants list` shows who there is")
            given = {column: "default" if value is None else str(value) for column, value in columns.items()}
            insert_entry(transaction, row.id, "tenant_limits_set", given, now=self._clock.now())

    def create_key(
        self,
        tenant_name: str,
        key_name: str,
        *,
        scopes: frozenset[Scope] = ALL_SCOPES,
        expires_at: float | None = None,
    ) -> str:
        """Make an API key for a tenant, creating the tenant if need be. The key is shown once and kept hashed."""
        key, key_id = new_api_key(), new_id()
        now = self._clock.now()
        with self._database.transaction() as transaction:
            transaction.execute(
                "INSERT INTO tenant (id, name, weight, created_at) VALUES (?, ?, 1, ?) ON CONFLICT (name) DO NOTHING",
                (new_id(), tenant_name, now),
            )
            tenant = transaction.execute("SELECT id FROM tenant WHERE name = ?", (tenant_name,)).fetchone()
            assert tenant is not None, "it was there, or was made just now"
            new = NewKey(digest=digest_of_key(key), tenant=tenant.id, name=key_name, scopes=scopes)
            insert_key(transaction, key_id, new, expires_at=expires_at, now=now)
        return key

    def lend_key(self, tenant: str, name: str, *, expires_at: float) -> str:
        """Make a key of a tenant's, by its id, that opens nothing from then on. Those that have expired go."""
        key = new_api_key()
        now = self._clock.now()
        with self._database.transaction() as transaction:
            transaction.execute("DELETE FROM api_key WHERE is_lent AND expires_at <= ?", (now,))
            transaction.execute(
                "INSERT INTO api_key (id, digest, tenant, name, created_at, expires_at, is_lent)"
                " VALUES (?, ?, ?, ?, ?, ?, TRUE)",
                (new_id(), digest_of_key(key), tenant, name, now, expires_at),
            )
        return key

    def renew_lent_keys(self, tenant: str, name: str, *, expires_at: float) -> None:
        """Let a lent key go on for longer, if it has not expired."""
        with self._database.transaction() as transaction:
            transaction.execute(
                "UPDATE api_key SET expires_at = ? WHERE tenant = ? AND name = ? AND is_lent AND expires_at > ?",
                (expires_at, tenant, name, self._clock.now()),
            )

    def end_lent_keys(self, tenant: str, name: str) -> None:
        """Let the keys that were lent under a name open nothing any more."""
        with self._database.transaction() as transaction:
            transaction.execute("DELETE FROM api_key WHERE tenant = ? AND name = ? AND is_lent", (tenant, name))

    def has_keys(self) -> bool:
        """Whether any key was ever made."""
        return bool(self._database.read("SELECT id FROM api_key LIMIT 1"))

    def key(self, key: str) -> ValidKey | None:
        """A key by itself; ``None`` if it is unknown or was revoked."""
        return self._valid_key("digest", digest_of_key(key))

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
        return self._valid_key("digest", digest)

    def key_with_id(self, key_id: str) -> ValidKey | None:
        """A key by its id; ``None`` if it is unknown or was revoked."""
        return self._valid_key("id", key_id)

    def _valid_key(self, condition: str, value: str) -> ValidKey | None:
        now = self._clock.now()
        rows = self._database.read(
            "SELECT id, tenant, name, scopes, last_used_at FROM api_key"
            f" WHERE {condition} = ? AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > ?)",
            (value, now),
        )
        if not rows:
            return None
        [row] = rows
        if row.last_used_at is None or now - row.last_used_at >= _USE_NOTED_S:
            with self._database.transaction() as transaction:
                transaction.execute("UPDATE api_key SET last_used_at = ? WHERE id = ?", (now, row.id))
        scopes = ALL_SCOPES if row.scopes is None else read_scopes(row.scopes.split(","))
        return ValidKey(id=row.id, tenant=row.tenant, name=row.name, scopes=scopes)

    def ended_since(self, moment: float) -> list[str]:
        """The ids of the keys that were revoked from a point in time on."""
        rows = self._database.read("SELECT id FROM api_key WHERE revoked_at >= ?", (moment,))
        return [row.id for row in rows]

    def suspend(self, name: str, reason: str) -> str:
        """Let a tenant begin nothing new until it is resumed; what it has begun goes on. Its id.

        Raises:
            NotFound: There is no tenant of that name.
        """
        return self._set_suspension(name, reason)

    def resume(self, name: str) -> str:
        """Let a suspended tenant begin again; one that is not suspended stays as it is. Its id.

        Raises:
            NotFound: There is no tenant of that name.
        """
        return self._set_suspension(name, None)

    def _set_suspension(self, name: str, reason: str | None) -> str:
        with self._database.transaction() as transaction:
            row = transaction.execute("SELECT id FROM tenant WHERE name = ? FOR UPDATE", (name,)).fetchone()
            if row is None:
                raise NotFound(f"no tenant {name!r}; `twinkle tenants list` shows who there is")
            now = self._clock.now()
            transaction.execute(
                "UPDATE tenant SET suspension = ?, suspended_at = ? WHERE id = ?",
                (reason, None if reason is None else now, row.id),
            )
            event = "tenant_resume" if reason is None else "tenant_suspend"
            insert_entry(transaction, row.id, event, {} if reason is None else {"reason": reason}, now=now)
        return str(row.id)

    def revoke_key(self, key_id: str) -> None:
        """Let a key, and what was exchanged for it, open nothing any more."""
        now = self._clock.now()
        with self._database.transaction() as transaction:
            revoke(transaction, key_id, now=now)

    def name_of(self, tenant: str) -> str:
        """A tenant's name, by its id."""
        rows = self._database.read("SELECT name FROM tenant WHERE id = ?", (tenant,))
        if not rows:
            raise NotFound(f"no tenant {tenant!r}")
        return str(rows[0].name)

    def _read(self, where: str, parameters: tuple[str, ...]) -> list[TenantAccount]:
        rows = self._database.read(
            f"SELECT id, name, weight, paid_until, suspension, {', '.join(_LIMITS)} FROM tenant WHERE {where}",
            parameters,
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
                    suspension=row.suspension,
                )
            )
        return accounts
