"""Recovery points of adapters, and how far back what lies between them is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from twinkle.core.clock import Clock
from twinkle.core.errors import NotFound
from twinkle.storage.blobs import PAYLOADS
from twinkle.storage.database import Database, Row, Transaction, placeholders
from twinkle.storage.journal.lanes import lock_lanes
from twinkle.storage.sampling.ephemeral import pin, sampled_seqs, unpin
from twinkle.storage.upkeep.kept_payloads import take_off_passes
from twinkle.storage.upkeep.waste import doom

_COLUMNS = "adapter, seq, blob, size_bytes, created_at, is_start"

_BATCH = 1000
_MAX_RUNS = 200


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """An adapter's state after operation ``seq``.

    ``is_start`` says that the operation cannot be replayed (a load, a fork, a rewind): what follows it begins here.
    """

    adapter: str
    seq: int
    blob: str
    size_bytes: int
    created_at: float
    is_start: bool = False

    def insert(self, transaction: Transaction) -> bool:
        """Publish it; false when there is one of this number already."""
        inserted = transaction.execute(
            f"INSERT INTO snapshot ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (adapter, seq) DO NOTHING",
            (self.adapter, self.seq, self.blob, self.size_bytes, self.created_at, self.is_start),
        )
        return inserted.rowcount == 1


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What stays of a run: nothing before ``floor_seq`` can be rebuilt; -1 is its creation."""

    snapshots: tuple[Snapshot, ...]
    floor_seq: int


Choose: TypeAlias = Callable[[list[Snapshot], int | None, float], Kept]
"""From all snapshots of an adapter, the earliest operation that is still needed, and the time, to what is kept."""


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """What a run takes up so that it can be rebuilt: snapshots, and the payloads between and after them."""

    num_snapshots: int
    snapshot_bytes: int
    num_payloads: int
    payload_bytes: int
    floor_seq: int


class SnapshotStore:
    """The recovery points there are. The decision which to keep is somebody else's."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def nearest(self, adapter: str, *, at: int) -> Snapshot | None:
        """The newest recovery point at or before operation ``at``."""
        rows = self._database.read(
            f"SELECT {_COLUMNS} FROM snapshot WHERE adapter = ? AND seq <= ? ORDER BY seq DESC LIMIT 1", (adapter, at)
        )
        return _snapshot_of(rows[0]) if rows else None

    def all(self, adapter: str) -> list[Snapshot]:
        """An adapter's recovery points in order."""
        rows = self._database.read(f"SELECT {_COLUMNS} FROM snapshot WHERE adapter = ? ORDER BY seq", (adapter,))
        return [_snapshot_of(row) for row in rows]

    def add(self, snapshot: Snapshot) -> None:
        """Publish a recovery point. Where there is one of this number, it stays and the new bytes are given up.

        So are those of an adapter that was unloaded meanwhile, unless somebody samples from that very state.
        """
        with self._database.transaction() as transaction:
            lane = lock_lanes(transaction, [snapshot.adapter])[snapshot.adapter]
            is_wanted = not lane.is_unloaded or snapshot.seq in set().union(*sampled_seqs(transaction, lane.id))
            if not is_wanted or not snapshot.insert(transaction):
                doom(transaction, _unreferenced(transaction, [snapshot.blob]), now=self._clock.now())
            pin(transaction, snapshot.adapter, snapshot.seq)

    def cost(self, adapter: str) -> RunCost:
        """What a run takes up.

        Raises:
            NotFound: There is no such run.
        """
        rows = self._database.read(
            "SELECT l.floor_seq, (SELECT COUNT(*) FROM snapshot s WHERE s.adapter = l.id) AS num_snapshots,"
            " (SELECT COALESCE(SUM(s.size_bytes), 0) FROM snapshot s WHERE s.adapter = l.id) AS snapshot_bytes,"
            " COUNT(o.seq) AS num_payloads, COALESCE(SUM(o.payload_bytes), 0) AS payload_bytes"
            " FROM lane l LEFT JOIN operation o ON o.lane = l.id"
            " AND (o.payload IS NOT NULL OR o.payload_blob IS NOT NULL) WHERE l.id = ? GROUP BY l.id, l.floor_seq",
            (adapter,),
        )
        if not rows:
            raise NotFound(f"no training run {adapter!r}")
        row = rows[0]
        return RunCost(
            num_snapshots=int(row.num_snapshots),
            snapshot_bytes=int(row.snapshot_bytes),
            num_payloads=int(row.num_payloads),
            payload_bytes=int(row.payload_bytes),
            floor_seq=int(row.floor_seq),
        )

    # -- pruning ------------------------------------------------------------------------------------------------------

    def runs_to_prune(self, *, older_than_s: float) -> list[str]:
        """Some runs that keep what time has made superfluous."""
        rows = self._database.read(
            "SELECT id AS run FROM lane WHERE pruned_seq < floor_seq"
            " UNION SELECT adapter FROM ephemeral_weights WHERE pinned AND ended_at IS NOT NULL"
            " UNION SELECT l.id FROM lane l WHERE l.unload_seq > l.floor_seq AND l.head_seq > l.unload_seq"
            " AND NOT EXISTS (SELECT 1 FROM ephemeral_weights e"
            " WHERE e.adapter = l.id AND e.ended_at IS NULL AND NOT e.pinned)"
            " UNION SELECT s.adapter FROM snapshot s JOIN lane l ON l.id = s.adapter"
            " WHERE s.created_at <= ? AND s.seq > l.floor_seq AND NOT EXISTS (SELECT 1 FROM ephemeral_weights e"
            " WHERE e.adapter = s.adapter AND e.seq < s.seq AND e.ended_at IS NULL AND NOT e.pinned) LIMIT ?",
            (self._clock.now() - older_than_s, _MAX_RUNS),
        )
        return [row.run for row in rows]

    def prune(self, adapter: str, choose: Choose) -> None:
        """Drop the recovery points that ``choose`` does not keep, and the payloads that only they could have needed.

        A payload goes only when a recovery point at or after its operation stays, so no replay ever meets one that is
        gone.
        """
        floor_seq = self._drop_snapshots(adapter, choose)
        while self._drop_payloads(adapter, floor_seq) == _BATCH:
            pass
        with self._database.transaction() as transaction:
            transaction.execute(
                "UPDATE lane SET pruned_seq = ? WHERE id = ? AND pruned_seq < ?", (floor_seq, adapter, floor_seq)
            )

    def _drop_snapshots(self, adapter: str, choose: Choose) -> int:
        """The floor, which never comes down again."""
        with self._database.transaction() as transaction:
            lane = lock_lanes(transaction, [adapter]).get(adapter)
            if lane is None:
                raise NotFound(f"no training run {adapter!r}")
            rows = transaction.execute(
                f"SELECT {_COLUMNS}, (SELECT floor_seq FROM lane WHERE id = snapshot.adapter) AS floor_seq"
                " FROM snapshot WHERE adapter = ? ORDER BY seq",
                (adapter,),
            ).fetchall()
            pinned, sampled = sampled_seqs(transaction, adapter)
            needed_seq = min(sampled | _branched_seqs(transaction, adapter), default=None)
            if lane.is_unloaded and needed_seq is None:
                assert lane.unload_seq is not None, "what is unloaded has a last number"
                kept = Kept(snapshots=(), floor_seq=lane.unload_seq)
                # Nor is it on a device, where it would be counted.
                transaction.execute(
                    "UPDATE adapter SET parked_at = ? WHERE id = ? AND parked_at IS NULL", (self._clock.now(), adapter)
                )
            else:
                # Below the floor lies what is pinned, and what was until now.
                reached = [_snapshot_of(row) for row in rows if row.seq >= row.floor_seq]
                kept = choose(reached, needed_seq, self._clock.now())
            seqs = pinned | {snapshot.seq for snapshot in kept.snapshots}
            unpin(transaction, adapter)
            lost = [row for row in rows if row.seq not in seqs]
            if lost:
                lost_seqs = [row.seq for row in lost]
                transaction.execute(
                    f"DELETE FROM snapshot WHERE adapter = ? AND seq IN ({placeholders(lost_seqs)})",
                    (adapter, *lost_seqs),
                )
                doom(transaction, [row.blob for row in lost], now=self._clock.now())
            row = transaction.execute(
                "UPDATE lane SET floor_seq = CASE WHEN floor_seq < ? THEN ? ELSE floor_seq END WHERE id = ?"
                " RETURNING floor_seq",
                (kept.floor_seq, kept.floor_seq, adapter),
            ).fetchone()
        assert row is not None, "the lane is locked"
        return int(row.floor_seq)

    def _drop_payloads(self, adapter: str, floor_seq: int) -> int:
        """Those of passes: what the others carry is small, and tells what was done."""
        with self._database.transaction() as transaction:
            rows = transaction.execute(
                "SELECT request_id, seq, payload_blob, CASE WHEN payload IS NOT NULL THEN payload_bytes END"
                " AS inline_bytes FROM operation WHERE lane = ?"
                " AND seq > (SELECT pruned_seq FROM lane WHERE id = ?) AND seq <= ?"
                " AND kind IN ('forward', 'forward_backward') AND (payload IS NOT NULL OR payload_blob IS NOT NULL)"
                " ORDER BY seq LIMIT ?",
                (adapter, adapter, floor_seq, _BATCH),
            ).fetchall()
            take_off_passes(transaction, adapter, rows)
            request_ids = [row.request_id for row in rows]
            transaction.execute(
                "UPDATE operation SET payload = NULL, payload_blob = NULL"
                f" WHERE request_id IN ({placeholders(request_ids)})",
                request_ids,
            )
            blobs = [row.payload_blob for row in rows if row.payload_blob and row.payload_blob.startswith(PAYLOADS)]
            doom(transaction, blobs, now=self._clock.now())
        return len(rows)


def _branched_seqs(transaction: Transaction, adapter: str) -> set[int]:
    """The operations that forks and rewinds which have not ended go back to."""
    rows = transaction.execute(
        "SELECT b.at FROM branch b JOIN operation o ON o.lane = b.adapter AND o.seq = b.seq"
        " WHERE b.source = ? AND o.state IN ('queued', 'running')",
        (adapter,),
    ).fetchall()
    return {row.at for row in rows}


def _unreferenced(transaction: Transaction, blobs: list[str]) -> list[str]:
    rows = transaction.execute(f"SELECT blob FROM snapshot WHERE blob IN ({placeholders(blobs)})", blobs).fetchall()
    used = {row.blob for row in rows}
    return [blob for blob in blobs if blob not in used]


def _snapshot_of(row: Row) -> Snapshot:
    return Snapshot(
        adapter=row.adapter,
        seq=row.seq,
        blob=row.blob,
        size_bytes=row.size_bytes,
        created_at=row.created_at,
        is_start=bool(row.is_start),
    )
