"""Rows that were made of files and data sets: found again by what they were made of, ended when nobody asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinkle.core.clock import Clock
from twinkle.core.errors import LimitReached
from twinkle.storage.database import Database
from twinkle.storage.files.contents import check_room, lock_tenant
from twinkle.storage.upkeep.waste import doom

_BATCH = 20


@dataclass(frozen=True, kw_only=True)
class NewPreparedData:
    """Rows whose shards are durable. ``description`` is JSON, for those who made them."""

    tenant: str
    digest: str
    folder: str
    num_shards: int
    size_bytes: int
    description: str


def shard_key(folder: str, number: int) -> str:
    """Where a shard lies."""
    return f"{folder}/{number:06d}"


class PreparedRows:
    """Which rows lie ready."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def find(self, tenant: str, digest: str) -> str | None:
        """The description of rows that lie ready, which are kept for longer with that; None if there are none."""
        with self._database.transaction() as transaction:
            transaction.execute(
                "UPDATE prepared_data SET used_at = ? WHERE tenant = ? AND digest = ?",
                (self._clock.now(), tenant, digest),
            )
            row = transaction.execute(
                "SELECT description FROM prepared_data WHERE tenant = ? AND digest = ?", (tenant, digest)
            ).fetchone()
        return None if row is None else str(row.description)

    def add(self, new: NewPreparedData, *, max_bytes: int = 0) -> str:
        """Note rows; the description of those that were there first, if somebody was quicker: then these shards go.

        Raises:
            LimitReached: The tenant has no room for them; the shards go.
        """
        now = self._clock.now()
        keys = [shard_key(new.folder, number) for number in range(new.num_shards)]
        try:
            with self._database.transaction() as transaction:
                lock_tenant(transaction, new.tenant)
                there = transaction.execute(
                    "SELECT description FROM prepared_data WHERE tenant = ? AND digest = ?", (new.tenant, new.digest)
                ).fetchone()
                if there is not None:
                    doom(transaction, keys, now=now)
                    return str(there.description)
                check_room(transaction, new.tenant, new.size_bytes, max_bytes=max_bytes)
                transaction.execute(
                    "INSERT INTO prepared_data (tenant, digest, folder, num_shards, size_bytes, description,"
                    " created_at, used_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        new.tenant,
                        new.digest,
                        new.folder,
                        new.num_shards,
                        new.size_bytes,
                        new.description,
                        now,
                        now,
                    ),
                )
        except LimitReached:
            self.give_up(keys)
            raise
        return new.description

    def give_up(self, keys: Sequence[str]) -> None:
        """Have shards deleted that were written for nothing."""
        with self._database.transaction() as transaction:
            doom(transaction, keys, now=self._clock.now())

    def expire(self, *, idle_s: float) -> int:
        """End rows that nobody has asked for in so long; how many."""
        now = self._clock.now()
        rows = self._database.read(
            "SELECT tenant, digest, folder, num_shards FROM prepared_data WHERE used_at <= ? ORDER BY used_at LIMIT ?",
            (now - idle_s, _BATCH),
        )
        num_ended = 0
        for row in rows:
            with self._database.transaction() as transaction:
                # Somebody may have asked in between.
                ended = transaction.execute(
                    "DELETE FROM prepared_data WHERE tenant = ? AND digest = ? AND folder = ? AND used_at <= ?",
                    (row.tenant, row.digest, row.folder, now - idle_s),
                ).rowcount
                if ended:
                    doom(transaction, [shard_key(row.folder, number) for number in range(row.num_shards)], now=now)
                num_ended += ended
        return num_ended
