"""Files on their way: begun, sent in parts that stay when the sender breaks off, completed once."""

from __future__ import annotations

from collections.abc import Sequence

from twinkle.core.clock import Clock
from twinkle.core.errors import Conflict, InvalidInput, NotFound, UserError
from twinkle.core.job import FINAL_STATES
from twinkle.storage.database import Database, Row, Transaction, placeholders
from twinkle.storage.files.contents import (
    check_room,
    find_file,
    give_up_pieces,
    give_up_unused,
    insert_content,
    insert_file,
    insert_pieces,
    live_content,
    lock_tenant,
    note_lines,
    pieces_of,
)
from twinkle.storage.files.records import (
    ContentFacts,
    FilePiece,
    NewFile,
    NewPart,
    NewUpload,
    StoredFile,
    Upload,
    UploadPart,
    UploadStatus,
)

_BATCH = 100
_MAX_PARTS = 10_000
_MAX_PENDING = 1_000
_FORGET_AFTER_S = 7 * 24 * 3600.0
_COLUMNS = "id, tenant, purpose, name, size_bytes, sha256, keep_s, status, file, created_at, expires_at"
_PART_COLUMNS = "id, upload, number, size_bytes, sha256, created_at"


class Uploads:
    """Keeps what has come of files. Another tenant's answers like one that does not exist."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def begin(self, new: NewUpload, *, ttl_s: float, max_bytes: int = 0) -> Upload:
        """Expect a file; it has ``ttl_s`` from each of its parts to the next.

        Raises:
            LimitReached: The tenant has no room for it.
            InvalidInput: The tenant has very many unfinished ones.
        """
        now = self._clock.now()
        with self._database.transaction() as transaction:
            lock_tenant(transaction, new.tenant)
            check_room(transaction, new.tenant, new.size_bytes, max_bytes=max_bytes)
            row = transaction.execute(
                "SELECT COUNT(*) AS num_pending FROM upload WHERE tenant = ? AND status = 'pending'", (new.tenant,)
            ).fetchone()
            assert row is not None, "a count is one row"
            if row.num_pending >= _MAX_PENDING:
                raise InvalidInput("upload", f"{row.num_pending} are unfinished; complete or cancel some")
            transaction.execute(
                "INSERT INTO upload (id, tenant, purpose, name, size_bytes, sha256, keep_s, status, created_at,"
                " expires_at) VALUES (?, ?, ?, ?, ?, ?, ?, 'pending', ?, ?)",
                (
                    new.id,
                    new.tenant,
                    new.purpose,
                    new.name,
                    new.size_bytes,
                    new.sha256,
                    new.keep_s,
                    now,
                    now + ttl_s,
                ),
            )
            return _find(transaction, new.id, new.tenant)

    def resumable(self, like: NewUpload) -> Upload | None:
        """The newest unfinished upload of the same bytes for the same use, if its sender said what they are."""
        rows = self._database.read(
            f"SELECT {_COLUMNS} FROM upload WHERE tenant = ? AND status = 'pending' AND sha256 = ? AND size_bytes = ?"
            " AND purpose = ? AND name = ? AND expires_at > ? ORDER BY created_at DESC LIMIT 1",
            (like.tenant, like.sha256, like.size_bytes, like.purpose, like.name, self._clock.now()),
        )
        return _upload_of(rows[0]) if rows else None

    def find(self, upload_id: str, tenant: str) -> Upload:
        """One upload.

        Raises:
            NotFound: There is none, or it is another tenant's.
        """
        with self._database.transaction() as transaction:
            return _find(transaction, upload_id, tenant)

    def parts(self, upload_id: str) -> list[UploadPart]:
        """What has come of an unfinished one: by number, those without one in the order in which they came."""
        with self._database.transaction() as transaction:
            return parts_of(transaction, upload_id)

    def add_part(self, upload_id: str, tenant: str, part: NewPart, *, ttl_s: float, max_bytes: int = 0) -> UploadPart:
        """Keep a part. One of the same number and bytes is kept as it is, and the pieces of this one go.

        Raises:
            NotFound: There is no such upload.
            Conflict: It is over, or has other bytes under this number.
            InvalidInput: There would be more bytes than were announced.
            LimitReached: The tenant has no room for them.
        """
        now = self._clock.now()
        try:
            with self._database.transaction() as transaction:
                lock_tenant(transaction, tenant)
                upload = _pending(transaction, upload_id, tenant, now=now)
                parts = parts_of(transaction, upload_id)
                there = next((one for one in parts if part.number is not None and one.number == part.number), None)
                if there is not None:
                    if there.sha256 != part.sha256:
                        raise Conflict(f"part {part.number} of {upload_id} is there already and has other bytes")
                    give_up_unused(transaction, part.pieces, now=now)
                    return there
                _check_fits(upload, parts, part)
                check_room(transaction, tenant, part.size_bytes, max_bytes=max_bytes)
                transaction.execute(
                    f"INSERT INTO upload_part ({_PART_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)",
                    (part.id, upload_id, part.number, part.size_bytes, part.sha256, now),
                )
                insert_pieces(transaction, part.id, part.pieces)
                transaction.execute("UPDATE upload SET expires_at = ? WHERE id = ?", (now + ttl_s, upload_id))
        except UserError:
            # Nothing was written. Of other faults nobody knows that.
            self.give_up(part.pieces)
            raise
        return UploadPart(
            id=part.id,
            upload=upload_id,
            number=part.number,
            size_bytes=part.size_bytes,
            sha256=part.sha256,
            created_at=now,
        )

    def give_up(self, pieces: Sequence[FilePiece]) -> None:
        """Have pieces deleted that were written for nothing."""
        with self._database.transaction() as transaction:
            give_up_unused(transaction, pieces, now=self._clock.now())

    def pieces(self, upload: Upload, part_ids: Sequence[str]) -> list[FilePiece]:
        """What the file is to be made of.

        Raises:
            InvalidInput: A part is none of this upload, or is named twice; or the bytes are not as many as announced.
        """
        with self._database.transaction() as transaction:
            size_of = {part.id: part.size_bytes for part in parts_of(transaction, upload.id)}
            unknown = [part for part in part_ids if part not in size_of]
            if unknown or len(set(part_ids)) < len(part_ids):
                raise InvalidInput(
                    "part_ids", f"names {unknown[0] if unknown else 'a part twice'!r}; name each part once"
                )
            total = sum(size_of[part] for part in part_ids)
            if total != upload.size_bytes:
                raise InvalidInput("part_ids", f"are {total} bytes together, {upload.size_bytes} were announced")
            return [piece for part in part_ids for piece in pieces_of(transaction, part)]

    def complete(
        self,
        upload_id: str,
        tenant: str,
        part_ids: Sequence[str],
        facts: ContentFacts,
        *,
        named: NewFile | None = None,
    ) -> StoredFile:
        """Make a file of some parts, whose bytes were looked at; the other parts go. Again, it is the same file.

        It is called what the upload says, unless it is ``named``.

        Raises:
            NotFound: There is no such upload, or its file was deleted.
            Conflict: It was cancelled or has ended, or its parts are not those that were looked at.
        """
        now = self._clock.now()
        with self._database.transaction() as transaction:
            lock_tenant(transaction, tenant)
            upload = _find(transaction, upload_id, tenant)
            if upload.file is not None:
                return _file(transaction, upload.file, tenant)
            upload = _pending(transaction, upload_id, tenant, now=now)
            owners = [part.id for part in parts_of(transaction, upload_id)]
            if not {*part_ids} <= {*owners}:
                raise Conflict(f"parts of upload {upload_id} have gone; send them again")
            live = live_content(transaction, tenant, facts.sha256)
            content = insert_content(transaction, tenant, facts, now=now) if live is None else live.id
            if live is None:
                move_pieces(transaction, part_ids, content)
            else:
                note_lines(transaction, content, facts)
            give_up_pieces(transaction, owners, now=now)
            transaction.execute("DELETE FROM upload_part WHERE upload = ?", (upload_id,))
            new = named or upload.named(now=now)
            is_looked_at = facts.num_lines is not None
            insert_file(transaction, new, content, problem=facts.problem, is_looked_at=is_looked_at, now=now)
            transaction.execute("UPDATE upload SET status = 'completed', file = ? WHERE id = ?", (new.id, upload_id))
            return _file(transaction, new.id, tenant)

    def cancel(self, upload_id: str, tenant: str) -> Upload:
        """Give an upload up. Twice is harmless.

        Raises:
            NotFound: There is none, or it is another tenant's.
            Conflict: It was completed.
        """
        now = self._clock.now()
        with self._database.transaction() as transaction:
            lock_tenant(transaction, tenant)
            upload = _find(transaction, upload_id, tenant)
            if upload.status is UploadStatus.COMPLETED:
                raise Conflict(f"upload {upload_id} is complete; delete file {upload.file} instead")
            if upload.status is UploadStatus.PENDING:
                _end(transaction, [upload_id], UploadStatus.CANCELLED, now=now)
            return _find(transaction, upload_id, tenant)

    def expire(self) -> int:
        """End what nobody goes on with, and forget what ended long ago; how many ended."""
        now = self._clock.now()
        rows = self._database.read(
            "SELECT id, tenant FROM upload WHERE status = 'pending' AND job IS NULL AND expires_at <= ?"
            " UNION ALL SELECT u.id, u.tenant FROM upload u LEFT JOIN job j ON j.id = u.job WHERE u.status = 'pending'"
            f" AND u.job IS NOT NULL AND COALESCE(j.state, 'failed') IN ({placeholders(FINAL_STATES)}) LIMIT ?",
            (now, *sorted(FINAL_STATES), _BATCH),
        )
        num_ended = 0
        for row in rows:
            with self._database.transaction() as transaction:
                lock_tenant(transaction, row.tenant)
                # Somebody may have sent a part of it or completed it in between.
                left = transaction.execute(
                    "SELECT 1 AS one FROM upload WHERE id = ? AND status = 'pending'"
                    " AND (job IS NOT NULL OR expires_at <= ?)",
                    (row.id, now),
                ).fetchone()
                if left is not None:
                    _end(transaction, [row.id], UploadStatus.EXPIRED, now=now)
                    num_ended += 1
        with self._database.transaction() as transaction:
            transaction.execute(
                "DELETE FROM upload WHERE status IN ('completed', 'cancelled', 'expired') AND expires_at <= ?",
                (now - _FORGET_AFTER_S,),
            )
        return num_ended


def _find(transaction: Transaction, upload_id: str, tenant: str) -> Upload:
    row = transaction.execute(
        f"SELECT {_COLUMNS} FROM upload WHERE id = ? AND tenant = ? FOR UPDATE", (upload_id, tenant)
    ).fetchone()
    if row is None:
        raise NotFound(f"no upload {upload_id!r}")
    return _upload_of(row)


def _pending(transaction: Transaction, upload_id: str, tenant: str, *, now: float) -> Upload:
    upload = _find(transaction, upload_id, tenant)
    if upload.status is not UploadStatus.PENDING or upload.expires_at <= now:
        state = UploadStatus.EXPIRED if upload.status is UploadStatus.PENDING else upload.status
        raise Conflict(f"upload {upload_id} is {state.value}; begin a new one")
    return upload


def _file(transaction: Transaction, file_id: str, tenant: str) -> StoredFile:
    found = find_file(transaction, file_id, tenant)
    if found is None:
        raise NotFound(f"no file {file_id!r}: it was deleted")
    return found


def parts_of(transaction: Transaction, upload_id: str) -> list[UploadPart]:
    """What has come of an unfinished upload."""
    rows = transaction.execute(
        f"SELECT {_PART_COLUMNS} FROM upload_part WHERE upload = ? ORDER BY number, created_at, id", (upload_id,)
    ).fetchall()
    return [
        UploadPart(
            id=row.id,
            upload=row.upload,
            number=row.number,
            size_bytes=row.size_bytes,
            sha256=row.sha256,
            created_at=row.created_at,
        )
        for row in rows
    ]


def _check_fits(upload: Upload, parts: Sequence[UploadPart], part: NewPart) -> None:
    # Parts without a number may be sent twice, of which the sender names one in the end.
    numbered = sum(one.size_bytes for one in parts if one.number is not None)
    total = (numbered if part.number is not None else 0) + part.size_bytes
    if total > upload.size_bytes:
        raise InvalidInput("part", f"makes the upload {total} bytes long, {upload.size_bytes} were announced")
    if len(parts) >= _MAX_PARTS:
        raise InvalidInput("part", f"is one more than the {_MAX_PARTS} that an upload may have; send larger ones")


def move_pieces(transaction: Transaction, part_ids: Sequence[str], content: str) -> None:
    """Make a content of the pieces of some parts."""
    before = 0
    for part in part_ids:
        moved = transaction.execute(
            "UPDATE file_piece SET owner = ?, number = number + ? WHERE owner = ?", (content, before, part)
        ).rowcount
        before += moved


def _end(transaction: Transaction, upload_ids: Sequence[str], status: UploadStatus, *, now: float) -> None:
    marks = placeholders(upload_ids)
    owners = [
        row.id
        for row in transaction.execute(f"SELECT id FROM upload_part WHERE upload IN ({marks})", upload_ids).fetchall()
    ]
    give_up_pieces(transaction, owners, now=now)
    transaction.execute(f"DELETE FROM upload_part WHERE upload IN ({marks})", upload_ids)
    transaction.execute(
        f"UPDATE upload SET status = ? WHERE id IN ({marks}) AND status = 'pending'", (status.value, *upload_ids)
    )


def _upload_of(row: Row) -> Upload:
    return Upload(
        id=row.id,
        tenant=row.tenant,
        purpose=row.purpose,
        name=row.name,
        size_bytes=row.size_bytes,
        sha256=row.sha256,
        keep_s=row.keep_s,
        status=UploadStatus(row.status),
        file=row.file,
        created_at=row.created_at,
        expires_at=row.expires_at,
    )
