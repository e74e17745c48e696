"""Checkpoints that share their files: copies, and removals that spare what a copy still needs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from twinkle.core.adapter import Grant
from twinkle.core.clock import Clock
from twinkle.core.errors import Conflict, NotFound
from twinkle.core.ids import new_id
from twinkle.storage.database import Database, Row, Transaction
from twinkle.storage.journal.lanes import placeholders
from twinkle.storage.journal.records import insert_lane
from twinkle.storage.upkeep.waste import doom

_COPIED = "kind, name, seq, config, files, size_bytes, user_metadata"


@dataclass(frozen=True, kw_only=True)
class NewCopy:
    """A copy about to be made. Its ``adapter`` is a training run of its own, which cannot be trained.

    ``grant`` lets the ``tenant`` read a ``source`` that is neither its own nor public.
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
        """The copy's path. The files are those of the source; doing it again answers the same.

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
                "SELECT c.tenant, c.public, c.expires_at, c.files_group, a.mesh, a.optimizer, a.config, c.adapter,"
                " c.seq FROM checkpoint c JOIN adapter a ON a.id = c.adapter WHERE c.path = ? FOR UPDATE",
                (new.source,),
            ).fetchone()
            if source is None or not _may_read(source, new, now):
                raise NotFound(f"no checkpoint {new.source!r}")
            group = source[3] or new_id()
            transaction.execute("UPDATE checkpoint SET files_group = ? WHERE path = ?", (group, new.source))
            # Not ordered: no training operation is accepted into it.
            insert_lane(transaction, new.adapter, new.tenant, source[4], ordered=False)
            transaction.execute(
                "INSERT INTO adapter (id, tenant, session, mesh, config, optimizer, created_at)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (new.adapter, new.tenant, new.session, source[4], source[6], source[5], now),
            )
            transaction.execute(
                f"INSERT INTO checkpoint (path, tenant, adapter, {_COPIED}, public, listed, created_at, expires_at,"
                f" files_group) SELECT ?, ?, ?, {_COPIED}, FALSE, TRUE, CAST(? AS DOUBLE PRECISION),"
                " CAST(? AS DOUBLE PRECISION), files_group FROM checkpoint WHERE path = ?",
                (path, new.tenant, new.adapter, now, new.expires_at, new.source),
            )
        return path


def _exists(transaction: Transaction, path: str, new: NewCopy) -> bool:
    lane = transaction.execute("SELECT tenant FROM lane WHERE id = ?", (new.adapter,)).fetchone()
    if lane is None:
        return False
    rows = transaction.execute(
        "SELECT path, files_group FROM checkpoint WHERE path IN (?, ?)", (path, new.source)
    ).fetchall()
    groups = {row[0]: row[1] for row in rows}
    if lane[0] != new.tenant or path not in groups or groups.get(new.source, groups[path]) != groups[path]:
        raise Conflict(f"training run {new.adapter} exists already and is no copy of {new.source}; use the next number")
    return True


def _may_read(source: Row, new: NewCopy, now: float) -> bool:
    owner, is_public, expires_at = source[:3]
    run, seq = source[7:]
    is_granted = new.grant is not None and new.grant.covers(run, seq)
    return (owner == new.tenant or bool(is_public) or is_granted) and (expires_at is None or expires_at > now)


def remove_checkpoints(
    transaction: Transaction, where: str, parameters: Sequence[object], *, now: float
) -> tuple[int, list[str]]:
    """Delete the rows of checkpoints, give up their files, and keep in mind what they took up.

    Returns:
        How many there were, and the keys of those files that nothing refers to any more.
    """
    rows = transaction.execute(
        f"DELETE FROM checkpoint WHERE {where} RETURNING files_group, files, listed, path, tenant, adapter, size_bytes,"
        " created_at",
        parameters,
    ).fetchall()
    for row in rows:
        if row[2]:
            transaction.execute(
                "INSERT INTO past_checkpoint (path, tenant, adapter, size_bytes, created_at, ended_at)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (*row[3:], now),
            )
    groups = {row[0] for row in rows if row[0] is not None}
    shared = transaction.execute(
        f"SELECT DISTINCT files_group FROM checkpoint WHERE files_group IN ({placeholders(groups)})", sorted(groups)
    ).fetchall()
    kept = {row[0] for row in shared}
    files = {file["key"] for row in rows if row[0] not in kept for file in json.loads(row[1]).values()}
    doom(transaction, files, now=now)
    return len(rows), sorted(files)
