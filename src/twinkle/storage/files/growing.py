"""Files that jobs write a stretch at a time: stretches stay until they are joined, or the job has ended for good."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from twinkle.core.clock import Clock
from twinkle.core.errors import Conflict, NotFound
from twinkle.storage.database import Database, Transaction
from twinkle.storage.files.contents import (
    find_file,
    give_up_pieces,
    give_up_unused,
    insert_content,
    insert_file,
    insert_pieces,
    live_content,
    lock_tenant,
    pieces_of,
)
from twinkle.storage.files.records import ContentFacts, FilePiece, NewFile, StoredFile, UploadStatus
from twinkle.storage.files.uploads import move_pieces, parts_of


def id_of_job_s_file(job: str, name: str) -> str:
    """The file that a job calls so: the same whoever writes it."""
    return f"file-{_digest(job, name)}"


class GrowingFiles:
    """What jobs have written so far. It counts as their tenants' storage, and is never refused for that."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def keep(self, job: str, tenant: str, name: str, part: str, pieces: Sequence[FilePiece], *, digest: str) -> None:
        """Keep a stretch. One that is there already stays, and these pieces go.

        Raises:
            Conflict: It is there with other bytes.
        """
        now = self._clock.now()
        upload, part_id = f"upload_{_digest(job, name)}", f"part_{_digest(job, name, part)}"
        with self._database.transaction() as transaction:
            lock_tenant(transaction, tenant)
            transaction.execute(
                "INSERT INTO upload (id, tenant, purpose, name, size_bytes, job, status, created_at, expires_at)"
                " VALUES (?, ?, '', ?, 0, ?, 'pending', ?, ?) ON CONFLICT (id) DO NOTHING",
                (upload, tenant, name, job, now, now),
            )
            row = transaction.execute("SELECT status FROM upload WHERE id = ?", (upload,)).fetchone()
            if row is None or row.status != UploadStatus.PENDING:
                # Whoever writes has lost the job: another runner has joined the file, or the job has ended.
                give_up_unused(transaction, pieces, now=now)
                return
            there = transaction.execute("SELECT sha256 FROM upload_part WHERE id = ?", (part_id,)).fetchone()
            if there is not None:
                give_up_unused(transaction, pieces, now=now)
                is_the_same = there.sha256 == digest
            else:
                is_the_same = True
                transaction.execute(
                    "INSERT INTO upload_part (id, upload, size_bytes, sha256, created_at) VALUES (?, ?, ?, ?, ?)",
                    (part_id, upload, sum(piece.size_bytes for piece in pieces), digest, now),
                )
                insert_pieces(transaction, part_id, pieces)
        if not is_the_same:
            raise Conflict(f"part {part} of {name} is there already and has other bytes")

    def pieces(self, job: str, name: str, parts: Sequence[str]) -> list[FilePiece]:
        """Where stretches lie, in this order.

        Raises:
            NotFound: One is not there.
        """
        with self._database.transaction() as transaction:
            return [piece for part in parts for piece in _pieces(transaction, job, name, part)]

    def join(self, job: str, new: NewFile, parts: Sequence[str], facts: ContentFacts) -> StoredFile:
        """Make a file of stretches, whose bytes were looked at; others of this name go. Again, it is the same file.

        Raises:
            NotFound: A stretch is not there.
        """
        now = self._clock.now()
        upload = f"upload_{_digest(job, new.name)}"
        with self._database.transaction() as transaction:
            lock_tenant(transaction, new.tenant)
            found = find_file(transaction, new.id, new.tenant)
            if found is not None:
                return found
            owners = [part.id for part in parts_of(transaction, upload)]
            wanted = [f"part_{_digest(job, new.name, part)}" for part in parts]
            if not {*wanted} <= {*owners}:
                raise NotFound(f"a part of {new.name} of job {job} is not there any more")
            live = live_content(transaction, new.tenant, facts.sha256)
            content = insert_content(transaction, new.tenant, facts, now=now) if live is None else live.id
            if live is None:
                move_pieces(transaction, wanted, content)
            give_up_pieces(transaction, owners, now=now)
            transaction.execute("DELETE FROM upload_part WHERE upload = ?", (upload,))
            transaction.execute("UPDATE upload SET status = 'completed', file = ? WHERE id = ?", (new.id, upload))
            insert_file(transaction, new, content, problem=None, is_looked_at=True, now=now)
            made = find_file(transaction, new.id, new.tenant)
        assert made is not None, "it was written just now"
        return made


def _pieces(transaction: Transaction, job: str, name: str, part: str) -> list[FilePiece]:
    part_id = f"part_{_digest(job, name, part)}"
    if transaction.execute("SELECT id FROM upload_part WHERE id = ?", (part_id,)).fetchone() is None:
        raise NotFound(f"part {part} of {name} of job {job} is not there")
    return pieces_of(transaction, part_id)


def _digest(*names: str) -> str:
    return sha256("\0".join(names).encode()).hexdigest()[:32]
