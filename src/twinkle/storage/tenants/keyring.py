"""API keys as the operator sees them: by id, whoever they belong to."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from twinkle.core.clock import Clock
from twinkle.core.errors import Conflict, NotFound
from twinkle.core.ids import new_api_key, new_id
from twinkle.core.scopes import ALL_SCOPES, Scope, read_scopes
from twinkle.storage.database import Database, Row, Transaction
from twinkle.storage.tenants.audit import insert_entry

_COLUMNS = (
    "k.id, k.tenant, t.name AS tenant_name, k.name, k.scopes, k.digest, k.created_at, k.expires_at, k.revoked_at,"
    " k.last_used_at FROM api_key k JOIN tenant t ON t.id = k.tenant WHERE NOT k.is_lent"
)


@dataclass(frozen=True, kw_only=True)
class KeyInfo:
    """What may be told of a key: everything but itself. ``tenant`` is the name of whose it is."""

    id: str
    tenant: str
    name: str
    scopes: tuple[Scope, ...]
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None
    """To the minute."""


@dataclass(frozen=True, kw_only=True)
class NewKey:
    """A key about to be made, for a tenant by its id."""

    digest: str
    tenant: str
    name: str
    scopes: frozenset[Scope] = ALL_SCOPES


def digest_of_key(key: str) -> str:
    """What is stored of an API key."""
    return hashlib.sha256(key.encode()).hexdigest()


def insert_key(transaction: Transaction, key_id: str, new: NewKey, *, expires_at: float | None, now: float) -> None:
    """Insert a key, and that it was made."""
    scopes = None if new.scopes == ALL_SCOPES else ",".join(sorted(new.scopes))
    transaction.execute(
        "INSERT INTO api_key (id, digest, tenant, name, created_at, expires_at, scopes) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (key_id, new.digest, new.tenant, new.name, now, expires_at, scopes),
    )
    insert_entry(transaction, new.tenant, "apikey_create", {"key": key_id, "name": new.name}, now=now)


def revoke(transaction: Transaction, key_id: str, *, now: float) -> None:
    """Let a key open nothing any more; one that was revoked before, or is not there, is left as it is."""
    row = transaction.execute(
        "UPDATE api_key SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL RETURNING tenant, name", (now, key_id)
    ).fetchone()
    if row is not None:
        insert_entry(transaction, row.tenant, "apikey_delete", {"key": key_id, "name": row.name}, now=now)


class Keyring:
    """Every key but those that are lent to jobs. What is done here is written into the audit log."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def all(self, *, tenant: str | None = None) -> list[KeyInfo]:
        """Every key that was made, the oldest first; of one tenant, by its name, or of all."""
        where, parameters = ("", ()) if tenant is None else (" AND t.name = ?", (tenant,))
        rows = self._database.read(f"SELECT {_COLUMNS}{where} ORDER BY k.created_at, k.id", parameters)
        return [_info(row) for row in rows]

    def find(self, key_id: str) -> KeyInfo:
        """The key whose id begins so; also the key itself finds it.

        Raises:
            NotFound: There is none.
            Conflict: Several ids begin so.
        """
        return _info(self._row(key_id))

    def revoke(self, key_id: str) -> KeyInfo:
        """Let a key, and what was exchanged for it, open nothing any more; raises as :meth:`find` does."""
        row = self._row(key_id)
        with self._database.transaction() as transaction:
            revoke(transaction, row.id, now=self._clock.now())
        return self.find(row.id)

    def rotate(self, key_id: str, *, grace_s: float = 0.0) -> tuple[KeyInfo, str]:
        """Make a key like another one, which ends after a while; the new one's facts, and itself, shown once.

        Raises:
            NotFound: There is none of that id.
            Conflict: Several ids begin so, or it has ended already.
        """
        row = self._row(key_id)
        now = self._clock.now()
        if row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= now):
            raise Conflict(f"key {row.id} has ended; make a new one with `twinkle keys create`")
        key, new_key_id = new_api_key(), new_id()
        new = NewKey(digest=digest_of_key(key), tenant=row.tenant, name=row.name, scopes=_scopes(row))
        with self._database.transaction() as transaction:
            insert_key(transaction, new_key_id, new, expires_at=row.expires_at, now=now)
            if grace_s <= 0:
                revoke(transaction, row.id, now=now)
            else:
                ends_at = now + grace_s if row.expires_at is None else min(now + grace_s, row.expires_at)
                transaction.execute("UPDATE api_key SET expires_at = ? WHERE id = ?", (ends_at, row.id))
            details = {"key": row.id, "by": new_key_id}
            insert_entry(transaction, row.tenant, "apikey_rotate", details, now=now)
        return self.find(new_key_id), key

    def _row(self, key_id: str) -> Row:
        rows = self._database.read(
            f"SELECT {_COLUMNS} AND (k.digest = ? OR SUBSTR(k.id, 1, ?) = ?) LIMIT 2",
            (digest_of_key(key_id), len(key_id), key_id),
        )
        if not rows or not key_id:
            raise NotFound(f"no key {key_id!r}; `twinkle keys list` shows their ids")
        if len(rows) > 1:
            raise Conflict(f"several keys' ids begin with {key_id!r}; give more of it")
        return rows[0]


def _scopes(row: Row) -> frozenset[Scope]:
    return ALL_SCOPES if row.scopes is None else read_scopes(row.scopes.split(","))


def _info(row: Row) -> KeyInfo:
    return KeyInfo(
        id=row.id,
        tenant=row.tenant_name,
        name=row.name,
        scopes=tuple(sorted(_scopes(row))),
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        last_used_at=row.last_used_at,
    )
