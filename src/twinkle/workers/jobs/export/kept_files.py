"""Exports to download: files of the tenant's, in pieces in the object store, with a price and an end like others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from twinkle.core.clock import Clock
from twinkle.core.errors import LimitReached, NotFound
from twinkle.core.ids import new_id
from twinkle.storage.blobs import FILES, BlobStore, day_of
from twinkle.storage.files.records import ContentFacts, FilePiece, NewFile
from twinkle.storage.stores import Stores

PURPOSE = "export"
PIECE_BYTES = 64 * 2**20
"""What is in memory at once."""


class KeptFiles:
    """Keeps files of any size for a tenant, each under an id that follows from its job and its name."""

    def __init__(self, stores: Stores, blobs: BlobStore, clock: Clock) -> None:
        self._files = stores.files
        self._tenants = stores.tenants
        self._blobs = blobs
        self._clock = clock

    def check_room(self, tenant: str, size_bytes: int) -> None:
        """Refuse what a tenant has no room for, before it is made.

        Raises:
            LimitReached: It says how much there is, and what to do.
        """
        limit, taken = self._limit(tenant), self._files.taken_bytes(tenant)
        if limit and taken + size_bytes > limit:
            raise LimitReached(
                f"the export will take up about {size_bytes} bytes, and of {limit} that your files may take up"
                f" {taken} are in use (max_files_bytes); delete files, or send it elsewhere with to"
            )

    def keep(self, job: str, tenant: str, name: str, source: Path, sha256: str, *, keep_s: float) -> str:
        """The id of a file with these bytes; keeping it again changes nothing.

        Raises:
            LimitReached: The tenant has no room for it.
            StorageUnavailable: It could not be stored.
        """
        size_bytes = source.stat().st_size
        new = NewFile(
            id=f"file-{hashlib.sha256(f'{job}/{name}'.encode()).hexdigest()[:32]}",
            tenant=tenant,
            purpose=PURPOSE,
            name=name,
            expires_at=self._clock.now() + keep_s,
        )
        with suppress(NotFound):
            return self._files.find(new.id, tenant).id
        adopted = self._files.adopt(new, sha256=sha256, size_bytes=size_bytes)
        if adopted is not None:
            return adopted.id
        pieces: list[FilePiece] = []
        try:
            # One by one: what was written before a fault is given up.
            pieces.extend(self._pieces(source))
        except Exception:
            self._files.give_up(pieces)
            raise
        facts = ContentFacts(sha256=sha256, size_bytes=size_bytes)
        return self._files.add(new, facts, pieces, max_bytes=self._limit(tenant)).id

    def _pieces(self, source: Path) -> Iterator[FilePiece]:
        folder = f"{FILES}{day_of(self._clock.now())}/{new_id()}"
        with source.open("rb") as file:
            number = 0
            while data := file.read(PIECE_BYTES):
                key = f"{folder}/{number}"
                self._blobs.put(key, data)
                yield FilePiece(key=key, size_bytes=len(data))
                number += 1

    def _limit(self, tenant: str) -> int:
        return self._tenants.account(tenant).limits.max_files_bytes
