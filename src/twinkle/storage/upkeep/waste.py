"""Blobs that nothing refers to any more: noted together with the loss of the last reference, deleted a while later."""

from __future__ import annotations

from collections.abc import Iterable

from twinkle.core.clock import Clock
from twinkle.storage.blobs import BlobStore
from twinkle.storage.database import Database, Transaction
from twinkle.storage.journal.lanes import placeholders

_BATCH = 500


def doom(transaction: Transaction, keys: Iterable[str], *, now: float) -> None:
    """Note that these blobs may go. The transaction is the one that takes the last reference away."""
    for key in keys:
        transaction.execute(
            "INSERT INTO doomed_blob (key, since) VALUES (?, ?) ON CONFLICT (key) DO NOTHING", (key, now)
        )


class Waste:
    """What is to be deleted from the object store."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def delete(self, blobs: BlobStore, *, older_than_s: float) -> int:
        """Delete some of the blobs that were given up so long ago: whoever was reading one has ended. How many.

        Raises:
            StorageUnavailable: The object store did not answer; what is left is deleted another time.
        """
        rows = self._database.read(
            "SELECT key FROM doomed_blob WHERE since <= ? ORDER BY since LIMIT ?",
            (self._clock.now() - older_than_s, _BATCH),
        )
        keys = [row.key for row in rows]
        for key in keys:
            blobs.delete(key)
        self.forget(keys)
        return len(keys)

    def forget(self, keys: list[str]) -> None:
        """Strike out blobs that are gone."""
        with self._database.transaction() as transaction:
            transaction.execute(f"DELETE FROM doomed_blob WHERE key IN ({placeholders(keys)})", keys)
