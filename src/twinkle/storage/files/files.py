"""Files as their tenants see them: names, each for a content that several may share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from twinkle.core.clock import Clock
from twinkle.core.errors import NotFound, UserError
from twinkle.storage.database import Database
from twinkle.storage.files.contents import (
    FILE_COLUMNS,
    FILE_TABLES,
    LIVE_CONTENT,
    ONE_FILE,
    PIECES,
    TAKEN,
    check_room,
    file_of,
    find_file,
    give_up_unused,
    insert_content,
    insert_file,
    insert_pieces,
    live_content,
    lock_tenant,
    note_lines,
    piece_of,
    remove_files,
)
from twinkle.storage.files.records import ContentFacts, FilePiece, NewFile, StoredFile
from twinkle.storage.tenants.audit import insert_entry

_BATCH = 500


class Files:
    """Names, lists, reads and ends files. Another tenant's answers like one that does not exist."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def find(self, file_id: str, tenant: str) -> StoredFile:
        """One file.

        Raises:
            NotFound: There is none, it has ended, or it is another tenant's.
        """
        rows = self._database.read(ONE_FILE, (file_id, tenant))
        found = file_of(rows[0]) if rows else None
        if found is None or (found.expires_at is not None and found.expires_at <= self._clock.now()):
            raise NotFound(f"no file {file_id!r}")
        return found

    def pieces(self, file: StoredFile) -> list[FilePiece]:
        """Where a file lies, in order."""
        return [piece_of(row) for row in self._database.read(PIECES, (file.content,))]

    def page(
        self,
        tenant: str,
        *,
        limit: int,
        after: str | None = None,
        purpose: str | None = None,
        order: Literal["asc", "desc"] = "desc",
    ) -> list[StoredFile]:
        """Some of a tenant's files by their age, those behind the file ``after``.

        Raises:
            NotFound: There is no file ``after``.
        """
        where, parameters = ["f.tenant = ?", "(f.expires_at IS NULL OR f.expires_at > ?)"], [tenant, self._clock.now()]
        if purpose is not None:
            where.append("f.purpose = ?")
            parameters.append(purpose)
        if after is not None:
            last = self.find(after, tenant)
            where.append("(f.created_at, f.id) < (?, ?)" if order == "desc" else "(f.created_at, f.id) > (?, ?)")
            parameters += [last.created_at, last.id]
        rows = self._database.read(
            f"SELECT {FILE_COLUMNS} FROM {FILE_TABLES} WHERE {' AND '.join(where)}"
            f" ORDER BY f.created_at {order}, f.id {order} LIMIT ?",
            (*parameters, limit),
        )
        return [file_of(row) for row in rows]

    def known(self, tenant: str, sha256: str) -> ContentFacts | None:
        """What a tenant has of these bytes."""
        rows = self._database.read(LIVE_CONTENT, (tenant, sha256))
        if not rows:
            return None
        (content,) = rows
        return ContentFacts(
            sha256=sha256, size_bytes=content.size_bytes, num_lines=content.num_lines, problem=content.problem
        )

    def adopt(self, new: NewFile, *, sha256: str, size_bytes: int) -> StoredFile | None:
        """Name a content that this tenant has already, so that it need not be sent; None if it has not."""
        now = self._clock.now()
        with self._database.transaction() as transaction:
            lock_tenant(transaction, new.tenant)
            content = live_content(transaction, new.tenant, sha256)
            if content is None or content.size_bytes != size_bytes:
                return None
            insert_file(
                transaction,
                new,
                content.id,
                problem=content.problem,
                is_looked_at=content.num_lines is not None,
                now=now,
            )
            return find_file(transaction, new.id, new.tenant)

    def add(self, new: NewFile, facts: ContentFacts, pieces: Sequence[FilePiece], *, max_bytes: int = 0) -> StoredFile:
        """Name bytes that lie in the object store; a file of this id that is there already is left as it is.

        The pieces go if they are not needed: the tenant has these bytes, or the file.

        Raises:
            LimitReached: The tenant has no room for them; the pieces go.
        """
        now = self._clock.now()
        try:
            with self._database.transaction() as transaction:
                lock_tenant(transaction, new.tenant)
                found = find_file(transaction, new.id, new.tenant)
                live = live_content(transaction, new.tenant, facts.sha256)
                if found is not None or live is not None:
                    give_up_unused(transaction, pieces, now=now)
                if found is not None:
                    return found
                if live is not None:
                    note_lines(transaction, live.id, facts)
                if live is None:
                    check_room(transaction, new.tenant, facts.size_bytes, max_bytes=max_bytes)
                    content = insert_content(transaction, new.tenant, facts, now=now)
                    insert_pieces(transaction, content, pieces)
                else:
                    content = live.id
                is_looked_at = facts.num_lines is not None
                insert_file(transaction, new, content, problem=facts.problem, is_looked_at=is_looked_at, now=now)
                made = find_file(transaction, new.id, new.tenant)
        except UserError:
            # Nothing was written. Of other faults nobody knows that.
            self.give_up(pieces)
            raise
        assert made is not None, "it was written just now"
        return made

    def give_up(self, pieces: Sequence[FilePiece]) -> None:
        """Have pieces deleted that were written for nothing."""
        with self._database.transaction() as transaction:
            give_up_unused(transaction, pieces, now=self._clock.now())

    def delete(self, file_id: str, tenant: str) -> None:
        """End a file; its bytes go with their last name.

        Raises:
            NotFound: There is none, or it is another tenant's.
        """
        with self._database.transaction() as transaction:
            lock_tenant(transaction, tenant)
            if find_file(transaction, file_id, tenant) is None:
                raise NotFound(f"no file {file_id!r}")
            remove_files(transaction, [file_id], now=self._clock.now())
            insert_entry(transaction, tenant, "file_delete", {"file": file_id}, now=self._clock.now())

    def expire(self) -> int:
        """End files whose time has come; how many."""
        now = self._clock.now()
        rows = self._database.read(
            "SELECT id, tenant FROM file WHERE expires_at IS NOT NULL AND expires_at <= ? LIMIT ?", (now, _BATCH)
        )
        for tenant in sorted({row.tenant for row in rows}):
            with self._database.transaction() as transaction:
                lock_tenant(transaction, tenant)
                remove_files(transaction, [row.id for row in rows if row.tenant == tenant], now=now)
        return len(rows)

    def taken_bytes(self, tenant: str) -> int:
        """What a tenant's files take up, with unfinished uploads and prepared rows."""
        (row,) = self._database.read(TAKEN, (tenant, tenant, tenant))
        return int(row.size_bytes)
