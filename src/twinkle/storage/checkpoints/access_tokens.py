"""Weights access tokens: with one, a key reads a checkpoint of another tenant's, which need not be public for it.

A token is shown once and kept as its SHA-256: 256 random bits need no salt nor stretching.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from twinkle.core.adapter import Grant
from twinkle.core.clock import Clock
from twinkle.core.errors import LimitReached, NotFound
from twinkle.core.ids import new_access_token, new_id
from twinkle.storage.database import Database, Row, Transaction
from twinkle.storage.tenants.audit import insert_entry

MAX_TOKENS = 1000
"""How many of a tenant's may be good at a time."""

_COLUMNS = (
    "t.id, o.name AS owner, t.adapter AS run, t.path, t.name, t.created_at, t.expires_at, t.revoked_at, t.last_used_at"
)
_TABLES = "access_token t JOIN tenant o ON o.id = t.tenant"


@dataclass(frozen=True, kw_only=True)
class AccessToken:
    """What may be told of a token: everything but itself. Without a ``path`` it opens all checkpoints of its run.

    ``owner`` is the name of the tenant whose run that is.
    """

    id: str
    owner: str
    run: str
    path: str | None
    name: str
    created_at: float
    expires_at: float
    revoked_at: float | None
    last_used_at: float | None


@dataclass(frozen=True)
class IssuedToken:
    """A token at the only moment at which it can be seen."""

    secret: str
    token: AccessToken


class AccessTokens:
    """Issues, lists and revokes tokens, and judges those that others bring.

    A ``tenant`` of ``None`` is the operator, who may do so for everybody.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def issue_for_run(self, run: str, *, tenant: str | None, name: str, ttl_s: float) -> IssuedToken:
        """A token for every checkpoint that a run lists, now and later.

        Raises:
            NotFound: There is no such run, or it is another tenant's.
            LimitReached: The tenant has as many tokens as it may have.
        """
        with self._database.transaction() as transaction:
            found = transaction.execute("SELECT tenant FROM adapter WHERE id = ?", (run,)).fetchone()
            if found is None or tenant not in (None, found.tenant):
                raise NotFound(f"no training run {run!r}")
            return self._issue(transaction, found.tenant, run, path=None, content=None, name=name, ttl_s=ttl_s)

    def issue_for_checkpoint(self, path: str, *, tenant: str | None, name: str, ttl_s: float) -> IssuedToken:
        """A token for what a path means now: another content that takes its name later is not opened.

        Raises:
            NotFound: There is no such checkpoint, or it is another tenant's.
            LimitReached: The tenant has as many tokens as it may have.
        """
        with self._database.transaction() as transaction:
            found = transaction.execute(
                "SELECT tenant, adapter, content FROM checkpoint WHERE path = ? AND listed"
                " AND (expires_at IS NULL OR expires_at > ?)",
                (path, self._clock.now()),
            ).fetchone()
            if found is None or tenant not in (None, found.tenant):
                raise NotFound(f"no checkpoint {path!r}")
            return self._issue(
                transaction, found.tenant, found.adapter, path=path, content=found.content, name=name, ttl_s=ttl_s
            )

    def grant(self, secret: str, path: str, *, reader: str, purpose: str) -> Grant | None:
        """What a token allows its bearer to read now; noted in its owner's audit log, without the token.

        Args:
            secret: What the bearer brought.
            path: The checkpoint it is to open. Leave is given for what that means now, and for nothing else.
            reader: The bearer's tenant. Owners need no tokens: they get none granted.
            purpose: ``load`` or ``copy``.

        Returns:
            ``None`` when it is no token, is over or revoked, is for something else, or there is no such checkpoint.
        """
        now = self._clock.now()
        with self._database.transaction() as transaction:
            found = transaction.execute(
                "SELECT t.id, t.tenant, t.adapter, c.content FROM access_token t JOIN checkpoint c ON c.path = ?"
                " WHERE t.digest = ? AND t.revoked_at IS NULL AND t.expires_at > ? AND t.tenant <> ?"
                " AND (t.path IS NULL OR t.path = c.path) AND (t.content IS NULL OR t.content = c.content)"
                " AND c.adapter = t.adapter AND c.listed AND (c.expires_at IS NULL OR c.expires_at > ?) FOR UPDATE",
                (path, _digest_of(secret), now, reader, now),
            ).fetchone()
            if found is None:
                return None
            transaction.execute("UPDATE access_token SET last_used_at = ? WHERE id = ?", (now, found.id))
            grant = Grant(token=found.id, owner=found.tenant, run=found.adapter, content=found.content)
            by = transaction.execute("SELECT name FROM tenant WHERE id = ?", (reader,)).fetchone()
            assert by is not None, "a reader is a tenant"
            details = {"tinker_path": path, "training_run": grant.run, "token_id": grant.token}
            details |= {"reader": by.name, "purpose": purpose}
            insert_entry(transaction, grant.owner, "checkpoint_token_use", details, now=now)
            return grant

    def all(self, *, tenant: str | None, run: str | None = None) -> list[AccessToken]:
        """The tokens whose time is not over, revoked ones too, the newest first."""
        where = "t.expires_at > ?"
        parameters: list[object] = [self._clock.now()]
        for column, wanted in (("t.tenant", tenant), ("t.adapter", run)):
            if wanted is not None:
                where += f" AND {column} = ?"
                parameters.append(wanted)
        rows = self._database.read(
            f"SELECT {_COLUMNS} FROM {_TABLES} WHERE {where} ORDER BY t.created_at DESC, t.id", parameters
        )
        return [_token_of(row) for row in rows]

    def revoke(self, token_id: str, *, tenant: str | None) -> AccessToken:
        """Let a token open nothing any more. What was accepted with it goes on; twice is harmless.

        Raises:
            NotFound: There is no such token, or it is another tenant's.
        """
        now = self._clock.now()
        with self._database.transaction() as transaction:
            row = transaction.execute(
                f"SELECT t.tenant, {_COLUMNS} FROM {_TABLES} WHERE t.id = ?", (token_id,)
            ).fetchone()
            if row is None or tenant not in (None, row.tenant):
                raise NotFound(f"no weights access token {token_id!r}")
            token = _token_of(row)
            if token.revoked_at is not None:
                return token
            transaction.execute("UPDATE access_token SET revoked_at = ? WHERE id = ?", (now, token_id))
            insert_entry(transaction, row.tenant, "checkpoint_token_revoke", _details_of(token), now=now)
        return replace(token, revoked_at=now)

    def _issue(
        self,
        transaction: Transaction,
        tenant: str,
        run: str,
        *,
        path: str | None,
        content: str | None,
        name: str,
        ttl_s: float,
    ) -> IssuedToken:
        now = self._clock.now()
        # Two that are issued at once wait for each other here.
        transaction.execute("UPDATE tenant SET weight = weight WHERE id = ?", (tenant,))
        good = transaction.execute(
            "SELECT COUNT(*) AS num FROM access_token WHERE tenant = ? AND revoked_at IS NULL AND expires_at > ?",
            (tenant, now),
        ).fetchone()
        assert good is not None
        if good.num >= MAX_TOKENS:
            raise LimitReached(f"you have {good.num} weights access tokens, and {MAX_TOKENS} may be; revoke some")
        secret, token_id = new_access_token(), new_id()
        transaction.execute(
            "INSERT INTO access_token (id, digest, tenant, adapter, path, content, name, created_at, expires_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (token_id, _digest_of(secret), tenant, run, path, content, name, now, now + ttl_s),
        )
        row = transaction.execute(f"SELECT {_COLUMNS} FROM {_TABLES} WHERE t.id = ?", (token_id,)).fetchone()
        assert row is not None
        token = _token_of(row)
        details = {**_details_of(token), "ttl_seconds": f"{ttl_s:.0f}"}
        insert_entry(transaction, tenant, "checkpoint_token_create", details, now=now)
        return IssuedToken(secret, token)


def _token_of(row: Row) -> AccessToken:
    return AccessToken(
        id=row.id,
        owner=row.owner,
        run=row.run,
        path=row.path,
        name=row.name,
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        last_used_at=row.last_used_at,
    )


def _details_of(token: AccessToken) -> dict[str, str]:
    details = {"training_run": token.run, "token_id": token.id}
    return details if token.path is None else {"tinker_path": token.path, **details}


def _digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
