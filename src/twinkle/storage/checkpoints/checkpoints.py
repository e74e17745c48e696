"""Checkpoints, tenant by tenant. A copy is a content of its own, whose files are those of its source."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from twinkle.core.adapter import AdapterConfig, Checkpoint, CheckpointKind, Grant, StoredFile
from twinkle.core.clock import Clock
from twinkle.core.errors import Conflict, NotFound
from twinkle.core.ids import new_id
from twinkle.core.places import PlaceInList
from twinkle.storage.checkpoints.contents import remove_checkpoints
from twinkle.storage.database import Database, Row, Transaction, placeholders
from twinkle.storage.journal.records import insert_lane
from twinkle.storage.sampling.sampling_sessions import SamplingSession
from twinkle.storage.tenants.audit import insert_entry

_COLUMNS = (
    "path, tenant, adapter, kind, name, seq, config, files, created_at, expires_at, public, user_metadata, listed,"
    " content, generation"
)
_COPIED = "kind, name, seq, config, files, size_bytes, user_metadata"


@dataclass(frozen=True, kw_only=True)
class NewCopy:
    """A copy about to be made. Its ``adapter`` is a training run of its own, which cannot be trained.

    ``grant`` lets the ``tenant`` read a ``source`` that is neither its own nor public, as long as that is the content
    it was given for.
    """

    source: str
    tenant: str
    session: str
    adapter: str
    expires_at: float | None
    grant: Grant | None = None


class Checkpoints:
    """What is kept under a name: found, listed, copied, published and deleted."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def find(self, path: str, *, tenant: str | None = None, grant: Grant | None = None) -> Checkpoint:
        """What a path means now, unless it has expired. Another tenant's is found only if it is public, or granted.

        Whatever goes on after the request that asked keeps the answer's ``content``, and asks for that from then on.

        Raises:
            NotFound: There is none, it has expired, or it is another tenant's.
        """
        row = self._row("path", path)
        if row is None or not _may_read(row, tenant, grant):
            raise NotFound(f"no checkpoint {path!r}")
        return _checkpoint_of(row)

    def content(self, content: str) -> Checkpoint:
        """A content that has neither expired nor been deleted or replaced. Who may read it was decided before.

        Raises:
            NotFound: It is not there any more.
        """
        row = self._row("content", content)
        if row is None:
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
        row = self._row("content", sampling_session.content)
        if row is None or not _may_sample(row, sampling_session):
            raise NotFound(
                f"{sampling_session.checkpoint}, as it was when sampling session {sampling_session.id} was opened,"
                " is not there any more: it was deleted, replaced or unpublished, or has expired; open a new"
                " session on what is there now"
            )
        return _checkpoint_of(row)

    def page(
        self,
        tenant: str,
        *,
        limit: int,
        offset: int,
        adapter_id: str | None = None,
        kinds: Collection[CheckpointKind] | None = None,
    ) -> tuple[list[Checkpoint], int]:
        """A page of the tenant's listed checkpoints, of some kinds or all, newest first, and how many there are.

        Of all of them a page walks an index; what is passed over is as much as a tenant may have at the most.
        """
        mine = "tenant = ? AND listed AND (expires_at IS NULL OR expires_at > ?)"
        asked: tuple[object, ...] = (tenant, self._clock.now())
        if adapter_id is not None:
            mine, asked = f"{mine} AND adapter = ?", (*asked, adapter_id)
        if kinds is not None:
            mine = f"{mine} AND kind IN ({placeholders(list(kinds))})"
            asked = (*asked, *[kind.value for kind in kinds])
        (counted,) = self._database.read(f"SELECT COUNT(*) AS number FROM checkpoint WHERE {mine}", asked)
        rows = self._database.read(
            f"SELECT {_COLUMNS} FROM checkpoint WHERE {mine} ORDER BY created_at DESC, path DESC LIMIT ? OFFSET ?",
            (*asked, limit, offset),
        )
        return [_checkpoint_of(row) for row in rows], int(counted.number)

    def newest_of(self, tenant: str, *, limit: int, after: PlaceInList | None = None) -> list[Checkpoint]:
        """Some of a tenant's listed checkpoints, newest first: those behind a place, if one is given. One query."""
        behind = "" if after is None else " AND (created_at, path) < (?, ?)"
        rows = self._database.read(
            f"SELECT {_COLUMNS} FROM checkpoint WHERE tenant = ?{behind} AND listed"
            " AND (expires_at IS NULL OR expires_at > ?) ORDER BY created_at DESC, path DESC LIMIT ?",
            (tenant, *(() if after is None else (after.created_at, after.id)), self._clock.now(), limit),
        )
        return [_checkpoint_of(row) for row in rows]

    def latest(self, adapter_ids: Sequence[str]) -> dict[tuple[str, CheckpointKind], Checkpoint]:
        """The newest listed checkpoint of each kind that each of these adapters has, of those that have not expired.

        One query, however many they are.
        """
        rows = self._database.read(
            f"SELECT {_COLUMNS} FROM (SELECT {_COLUMNS}, ROW_NUMBER() OVER"
            " (PARTITION BY adapter, kind ORDER BY created_at DESC, path) AS place FROM checkpoint"
            f" WHERE adapter IN ({placeholders(adapter_ids)}) AND listed AND (expires_at IS NULL OR expires_at > ?)"
            ") AS ranked WHERE place = 1",
            (*adapter_ids, self._clock.now()),
        )
        return {(row.adapter, CheckpointKind(row.kind)): _checkpoint_of(row) for row in rows}

    def set_expiry(self, tenant: str, path: str, expires_at: float | None) -> None:
        """Change when a checkpoint ends; ``None`` keeps it for ever.

        Raises:
            NotFound: It does not exist, has expired, or is another tenant's.
        """
        ttl = "None" if expires_at is None else f"{expires_at - self._clock.now():.0f}"
        self._change(tenant, path, "expires_at = ?", expires_at, event="checkpoint_ttl_set", ttl_seconds=ttl)

    def set_public(self, tenant: str, path: str, *, public: bool) -> None:
        """Let every tenant read what a path means now, or no longer. Doing it twice is harmless.

        No longer is at once: URLs that were given out, the owner's too, and the sessions of strangers end.

        Raises:
            NotFound: It does not exist, has expired, or is another tenant's.
        """
        if public:
            self._change(tenant, path, "public = ?", True, event="checkpoint_publish")
        else:
            self._change(tenant, path, "public = ?, generation = generation + 1", False, event="checkpoint_unpublish")

    def delete(self, tenant: str, path: str) -> list[str]:
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
            insert_entry(transaction, tenant, "checkpoint_delete", {"tinker_path": path}, now=self._clock.now())
        return keys

    def copy(self, new: NewCopy) -> str:
        """The copy's path. The files are those of the source; doing it again answers the same, whatever that is now.

        Raises:
            NotFound: There is no such checkpoint, or it is another tenant's, not public and not granted.
            Conflict: The training run's id is in use for something else.
        """
        now = self._clock.now()
        segment_and_name = new.source.partition("://")[2].partition("/")[2]
        path = f"tinker://{new.adapter}/{segment_and_name}"
        with self._database.transaction() as transaction:
            if _exists(transaction, path, new):
                return path
            source = transaction.execute(
                "SELECT c.tenant, c.public, c.expires_at, c.files_group, c.content, a.mesh, a.optimizer, a.config"
                " FROM checkpoint c JOIN adapter a ON a.id = c.adapter WHERE c.path = ? FOR UPDATE",
                (new.source,),
            ).fetchone()
            if source is None or not _may_copy(source, new, now):
                raise NotFound(f"no checkpoint {new.source!r}")
            group = source.files_group or new_id()
            transaction.execute("UPDATE checkpoint SET files_group = ? WHERE path = ?", (group, new.source))
            # Not ordered: no training operation is accepted into it.
            insert_lane(transaction, new.adapter, new.tenant, source.mesh, ordered=False, requested_at=now)
            transaction.execute(
                "INSERT INTO adapter (id, tenant, session, mesh, config, optimizer, created_at)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (new.adapter, new.tenant, new.session, source.mesh, source.config, source.optimizer, now),
            )
            transaction.execute(
                f"INSERT INTO checkpoint (path, tenant, adapter, {_COPIED}, public, listed, created_at, expires_at,"
                f" files_group, content, copied_from) SELECT ?, ?, ?, {_COPIED}, FALSE, TRUE,"
                " CAST(? AS DOUBLE PRECISION), CAST(? AS DOUBLE PRECISION), files_group, ?, path FROM checkpoint"
                " WHERE path = ?",
                (path, new.tenant, new.adapter, now, new.expires_at, new_id(), new.source),
            )
            details = {"tinker_path": path, "source": new.source}
            details |= {} if new.grant is None else {"token_id": new.grant.token}
            insert_entry(transaction, new.tenant, "checkpoint_copy", details, now=now)
        return path

    def _change(self, tenant: str, path: str, assignment: str, value: object, *, event: str, **details: str) -> None:
        """Change a tenant's own checkpoint, and have it in the audit log."""
        now = self._clock.now()
        with self._database.transaction() as transaction:
            changed = transaction.execute(
                f"UPDATE checkpoint SET {assignment} WHERE path = ? AND tenant = ?"
                " AND (expires_at IS NULL OR expires_at > ?)",
                (value, path, tenant, now),
            ).rowcount
            if changed != 1:
                raise NotFound(f"no checkpoint {path!r}")
            insert_entry(transaction, tenant, event, {"tinker_path": path, **details}, now=now)

    def _row(self, column: str, value: str | None) -> Row | None:
        """The checkpoint that a column of its own value finds, unless it has expired."""
        rows = self._database.read(
            f"SELECT {_COLUMNS} FROM checkpoint WHERE {column} = ? AND (expires_at IS NULL OR expires_at > ?)",
            (value, self._clock.now()),
        )
        return rows[0] if rows else None


def _may_read(row: Row, tenant: str | None, grant: Grant | None) -> bool:
    if tenant is None or row.tenant == tenant or row.public:
        return True
    return grant is not None and grant.content == row.content


def _exists(transaction: Transaction, path: str, new: NewCopy) -> bool:
    lane = transaction.execute("SELECT tenant FROM lane WHERE id = ?", (new.adapter,)).fetchone()
    if lane is None:
        return False
    copy = transaction.execute("SELECT copied_from FROM checkpoint WHERE path = ?", (path,)).fetchone()
    # Of copies from before it was kept, nobody knows what they were made from.
    if lane.tenant != new.tenant or copy is None or copy.copied_from not in (None, new.source):
        raise Conflict(f"training run {new.adapter} exists already and is no copy of {new.source}; use the next number")
    return True


def _may_copy(source: Row, new: NewCopy, now: float) -> bool:
    is_granted = new.grant is not None and new.grant.content == source.content
    is_over = source.expires_at is not None and source.expires_at <= now
    return (source.tenant == new.tenant or bool(source.public) or is_granted) and not is_over


def _may_sample(row: Row, sampling_session: SamplingSession) -> bool:
    if row.tenant == sampling_session.tenant:
        return True
    return bool(row.public) and row.generation == sampling_session.generation


def _checkpoint_of(row: Row) -> Checkpoint:
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
        public=bool(row.public),
        user_metadata=None if row.user_metadata is None else json.loads(row.user_metadata),
        listed=bool(row.listed),
        content=row.content,
        generation=row.generation,
    )
