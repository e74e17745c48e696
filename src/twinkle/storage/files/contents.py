"""Contents and their pieces within a transaction: looked up, shared by names, given up with the last of these."""

from __future__ import annotations

from collections.abc import Sequence

from twinkle.core.errors import LimitReached, NotFound
from twinkle.core.ids import new_id
from twinkle.storage.database import Row, Transaction, placeholders
from twinkle.storage.files.records import ContentFacts, FilePiece, FileStatus, NewFile, StoredFile
from twinkle.storage.upkeep.waste import doom

FILE_COLUMNS = (
    "f.id, f.tenant, f.purpose, f.name, f.content, f.status, f.problem, f.created_at, f.expires_at,"
    " c.size_bytes, c.sha256, c.num_lines"
)
FILE_TABLES = "file f JOIN file_content c ON c.id = f.content"

ONE_FILE = f"SELECT {FILE_COLUMNS} FROM {FILE_TABLES} WHERE f.id = ? AND f.tenant = ?"
PIECES = "SELECT key, size_bytes FROM file_piece WHERE owner = ? ORDER BY number"
LIVE_CONTENT = (
    "SELECT id, size_bytes, problem, num_lines FROM file_content WHERE tenant = ? AND sha256 = ? AND ended_at IS NULL"
)
TAKEN = (
    "SELECT (SELECT COALESCE(SUM(size_bytes), 0) FROM file_content WHERE tenant = ? AND ended_at IS NULL)"
    " + (SELECT COALESCE(SUM(p.size_bytes), 0) FROM upload u JOIN upload_part p ON p.upload = u.id"
    " WHERE u.tenant = ? AND u.status = 'pending')"
    " + (SELECT COALESCE(SUM(size_bytes), 0) FROM prepared_data WHERE tenant = ?) AS size_bytes"
)
"""What a tenant's files take up: contents, parts of unfinished uploads, prepared rows."""


def lock_tenant(transaction: Transaction, tenant: str) -> None:
    """Let one transaction at a time change what a tenant has stored: each counts before it adds."""
    row = transaction.execute("SELECT id FROM tenant WHERE id = ? FOR UPDATE", (tenant,)).fetchone()
    if row is None:
        raise NotFound(f"no tenant {tenant!r}")


def check_room(transaction: Transaction, tenant: str, size_bytes: int, *, max_bytes: int) -> None:
    """Refuse what a tenant has no room for.

    Raises:
        LimitReached: It says how much there is, and what to do.
    """
    if not max_bytes:
        return
    row = transaction.execute(TAKEN, (tenant, tenant, tenant)).fetchone()
    assert row is not None, "a sum is one row"
    if int(row.size_bytes) + size_bytes > max_bytes:
        raise LimitReached(
            f"your files take up {int(row.size_bytes)} bytes, {size_bytes} more are too many: {max_bytes} may be"
            " (max_files_bytes); delete files that you no longer need"
        )


def live_content(transaction: Transaction, tenant: str, sha256: str) -> Row | None:
    """What a tenant has of these bytes."""
    return transaction.execute(LIVE_CONTENT, (tenant, sha256)).fetchone()


def insert_content(transaction: Transaction, tenant: str, facts: ContentFacts, *, now: float) -> str:
    """A content without pieces yet; its id."""
    content = f"content-{new_id()}"
    transaction.execute(
        "INSERT INTO file_content (id, tenant, sha256, size_bytes, num_lines, problem, created_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (content, tenant, facts.sha256, facts.size_bytes, facts.num_lines, facts.problem, now),
    )
    return content


def note_lines(transaction: Transaction, content: str, facts: ContentFacts) -> None:
    """What was found out about a content that nobody had looked at as lines before."""
    if facts.num_lines is not None:
        transaction.execute(
            "UPDATE file_content SET num_lines = ?, problem = ? WHERE id = ? AND num_lines IS NULL",
            (facts.num_lines, facts.problem, content),
        )


def insert_pieces(transaction: Transaction, owner: str, pieces: Sequence[FilePiece]) -> None:
    """Note where a part or a content lies."""
    for number, piece in enumerate(pieces):
        transaction.execute(
            "INSERT INTO file_piece (key, owner, number, size_bytes) VALUES (?, ?, ?, ?)",
            (piece.key, owner, number, piece.size_bytes),
        )


def pieces_of(transaction: Transaction, owner: str) -> list[FilePiece]:
    """Where a part or a content lies, in order."""
    return [piece_of(row) for row in transaction.execute(PIECES, (owner,)).fetchall()]


def piece_of(row: Row) -> FilePiece:
    """A piece of its row."""
    return FilePiece(key=row.key, size_bytes=row.size_bytes)


def give_up_pieces(transaction: Transaction, owners: Sequence[str], *, now: float) -> list[str]:
    """Strike out the pieces of parts or contents; their keys, which may go now."""
    rows = transaction.execute(
        f"DELETE FROM file_piece WHERE owner IN ({placeholders(owners)}) RETURNING key", owners
    ).fetchall()
    keys = [row.key for row in rows]
    doom(transaction, keys, now=now)
    return keys


def give_up_unused(transaction: Transaction, pieces: Sequence[FilePiece], *, now: float) -> None:
    """Have pieces deleted that were written for nothing; those that an earlier, unanswered attempt needs stay."""
    keys = [piece.key for piece in pieces]
    rows = transaction.execute(f"SELECT key FROM file_piece WHERE key IN ({placeholders(keys)})", keys).fetchall()
    doom(transaction, sorted({*keys} - {row.key for row in rows}), now=now)


def insert_file(
    transaction: Transaction, new: NewFile, content: str, *, problem: str | None, is_looked_at: bool, now: float
) -> None:
    """Give a content a name."""
    status = FileStatus.ERROR if problem else FileStatus.PROCESSED if is_looked_at else FileStatus.UPLOADED
    transaction.execute(
        "INSERT INTO file (id, tenant, content, purpose, name, status, problem, created_at, expires_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (new.id, new.tenant, content, new.purpose, new.name, status.value, problem, now, new.expires_at),
    )


def find_file(transaction: Transaction, file_id: str, tenant: str) -> StoredFile | None:
    """A tenant's file, if there is such a one."""
    row = transaction.execute(ONE_FILE, (file_id, tenant)).fetchone()
    return None if row is None else file_of(row)


def remove_files(transaction: Transaction, file_ids: Sequence[str], *, now: float) -> list[str]:
    """Take names away, and the contents that had no other; the keys of what may go now."""
    marks = placeholders(file_ids)
    rows = transaction.execute(f"SELECT content FROM file WHERE id IN ({marks})", file_ids).fetchall()
    contents = sorted({row.content for row in rows})
    transaction.execute(f"DELETE FROM file WHERE id IN ({marks})", file_ids)
    marks = placeholders(contents)
    named = transaction.execute(f"SELECT DISTINCT content FROM file WHERE content IN ({marks})", contents).fetchall()
    ended = sorted({*contents} - {row.content for row in named})
    transaction.execute(f"UPDATE file_content SET ended_at = ? WHERE id IN ({placeholders(ended)})", (now, *ended))
    return give_up_pieces(transaction, ended, now=now)


def file_of(row: Row) -> StoredFile:
    """A file of a row with ``FILE_COLUMNS``."""
    return StoredFile(
        id=row.id,
        tenant=row.tenant,
        purpose=row.purpose,
        name=row.name,
        content=row.content,
        size_bytes=row.size_bytes,
        sha256=row.sha256,
        status=FileStatus(row.status),
        problem=row.problem,
        num_lines=row.num_lines,
        created_at=row.created_at,
        expires_at=row.expires_at,
    )
