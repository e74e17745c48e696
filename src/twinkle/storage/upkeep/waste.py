"""Blobs that nothing refers to: noted together with the loss of the last reference, and deleted a while later.

Orphans never had a reference: their writer died, or was refused, before the journal knew of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta

from twinkle.core.clock import Clock
from twinkle.core.errors import StorageUnavailable
from twinkle.storage.blobs import (
    CHECKPOINTS,
    FILES,
    PAYLOADS,
    PREPARED,
    RESULTS,
    SNAPSHOTS,
    BlobStore,
    StoredBlob,
    lasting_reason,
)
from twinkle.storage.database import Database, Transaction, placeholders

_BATCH = 500
_PAGE = 1000
_MOST_REFUSED = 20
"""Blobs that the store will not delete, after which a call ends: each is a line in the log."""


def doom(transaction: Transaction, keys: Iterable[str], *, now: float) -> None:
    """Note that these blobs may go. The transaction is the one that takes the last reference away."""
    for key in keys:
        transaction.execute(
            "INSERT INTO doomed_blob (key, since) VALUES (?, ?) ON CONFLICT (key) DO NOTHING", (key, now)
        )


class Waste:
    """What the object store holds and the journal has no use for."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def delete(self, blobs: BlobStore, *, older_than_s: float) -> int:
        """Delete some of the blobs that were given up so long ago: whoever was reading one has ended. How many.

        Raises:
            StorageUnavailable: The object store did not answer, or refused some; what is left is deleted another time,
                and what was refused behind it, so that one blob never keeps all others.
        """
        until = self._clock.now() - older_than_s
        rows = self._database.read(
            "SELECT key FROM doomed_blob WHERE since <= ? ORDER BY since LIMIT ?", (until, _BATCH)
        )
        gone: list[str] = []
        refused: dict[str, StorageUnavailable] = {}
        for row in rows:
            try:
                blobs.delete(row.key)
                gone.append(row.key)
            except StorageUnavailable as error:
                refused[row.key] = error
                if lasting_reason(error) is None or len(refused) == _MOST_REFUSED:
                    break
        self.forget(gone)
        if refused:
            with self._database.transaction() as transaction:
                transaction.execute(
                    f"UPDATE doomed_blob SET since = ? WHERE key IN ({placeholders(refused)})", (until, *refused)
                )
            raise next(iter(refused.values()))
        return len(gone)

    def forget(self, keys: list[str]) -> None:
        """Strike out blobs that are gone."""
        with self._database.transaction() as transaction:
            transaction.execute(f"DELETE FROM doomed_blob WHERE key IN ({placeholders(keys)})", keys)

    def orphans(self, blobs: BlobStore, *, older_than_days: int) -> Iterator[list[StoredBlob]]:
        """What nothing refers to, a page of the store at a time.

        A blob's key holds the day on which it was written. Two days later everything written then is referred to or
        never will be: an attempt is over after minutes, and whoever tries again writes under another day.

        Raises:
            StorageUnavailable: A store did not answer.
        """
        today = datetime.fromtimestamp(self._clock.now(), UTC).date()
        last_day = (today - timedelta(days=older_than_days)).isoformat()
        page = blobs.scan(after="", limit=_PAGE)
        while page:
            old = {blob.key: blob for blob in page if _is_of_ours(blob.key) and blob.key.split("/")[1] <= last_day}
            with self._database.transaction() as transaction:
                needed = _referred_to(transaction, list(old))
            yield [blob for key, blob in old.items() if key not in needed]
            page = blobs.scan(after=page[-1].key, limit=_PAGE)

    def give_up(self, orphans: Iterable[StoredBlob]) -> None:
        """Have housekeeping delete them with everything else that was given up."""
        with self._database.transaction() as transaction:
            doom(transaction, [blob.key for blob in orphans], now=self._clock.now())


def _is_of_ours(key: str) -> bool:
    kind, _, rest = key.partition("/")
    return f"{kind}/" in (CHECKPOINTS, FILES, PAYLOADS, PREPARED, RESULTS, SNAPSHOTS) and "/" in rest


def _referred_to(transaction: Transaction, keys: list[str]) -> set[str]:
    """Those that something needs, and those that are given up already."""

    def found(column: str, table: str, prefix: str = "") -> set[str]:
        asked = [key for key in keys if key.startswith(prefix)]
        statement = f"SELECT {column} AS key FROM {table} WHERE {column} IN ({placeholders(asked)})"
        return {row.key for row in transaction.execute(statement, asked).fetchall()}

    return (
        found("payload_blob", "operation", PAYLOADS)
        | found("result_blob", "operation", RESULTS)
        | found("blob", "snapshot", SNAPSHOTS)
        | found("key", "file_piece", FILES)
        | found("key", "doomed_blob")
        | _shards(transaction, [key for key in keys if key.startswith(PREPARED)])
        | _files(transaction, {_path_of(key) for key in keys if key.startswith(CHECKPOINTS)})
    )


def _shards(transaction: Transaction, keys: list[str]) -> set[str]:
    """Those among the keys of shards that belong to rows which lie ready."""
    folders = sorted({key.rpartition("/")[0] for key in keys})
    rows = transaction.execute(
        f"SELECT folder FROM prepared_data WHERE folder IN ({placeholders(folders)})", folders
    ).fetchall()
    ready = {row.folder for row in rows}
    return {key for key in keys if key.rpartition("/")[0] in ready}


def _files(transaction: Transaction, paths: set[str]) -> set[str]:
    """The keys of these checkpoints' files, and of all those that several checkpoints share."""
    if not paths:
        return set()
    rows = transaction.execute(
        f"SELECT files FROM checkpoint WHERE path IN ({placeholders(paths)})"
        " UNION ALL SELECT files FROM checkpoint WHERE files_group IS NOT NULL",
        sorted(paths),
    ).fetchall()
    return {file["key"] for row in rows for file in json.loads(row.files).values()}


def _path_of(key: str) -> str:
    """``checkpoints/<day>/<adapter>/<segment>/<name>/<seq>/<content>/<file>``, with slashes in the adapter's id."""
    *adapter, segment, name, _, _, _ = key.split("/")[2:]
    return f"tinker://{':'.join(adapter)}/{segment}/{name}"
