"""Copies of checkpoints: contents of their own, whose files are those of their sources."""

from __future__ import annotations

from dataclasses import dataclass

from twinkle.core.adapter import Grant
from twinkle.core.clock import Clock
from twinkle.core.errors import Conflict, NotFound
from twinkle.core.ids import new_id
from twinkle.storage.database import Database, Row, Transaction
from twinkle.storage.journal.records import insert_lane

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


class Copies:
    """Makes copies."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

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
            if source is None or not _may_read(source, new, now):
                raise NotFound(f"no checkpoint {new.source!r}")
            group = source.files_group or new_id()
            transaction.execute("UPDATE checkpoint SET files_group = ? WHERE path = ?", (group, new.source))
            # Not ordered: no training operation is accepted into it.
            insert_lane(transaction, new.adapter, new.tenant, source.mesh, ordered=False)
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
        return path


def _exists(transaction: Transaction, path: str, new: NewCopy) -> bool:
    lane = transaction.execute("SELECT tenant FROM lane WHERE id = ?", (new.adapter,)).fetchone()
    if lane is None:
        return False
    copy = transaction.execute("SELECT copied_from FROM checkpoint WHERE path = ?", (path,)).fetchone()
    # Of copies from before it was kept, nobody knows what they were made from.
    if lane.tenant != new.tenant or copy is None or copy.copied_from not in (None, new.source):
        raise Conflict(f"training run {new.adapter} exists already and is no copy of {new.source}; use the next number")
    return True


def _may_read(source: Row, new: NewCopy, now: float) -> bool:
    is_granted = new.grant is not None and new.grant.content == source.content
    is_over = source.expires_at is not None and source.expires_at <= now
    return (source.tenant == new.tenant or bool(source.public) or is_granted) and not is_over
