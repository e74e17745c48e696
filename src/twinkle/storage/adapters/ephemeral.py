"""Nameless weights: an adapter as it was after one operation, for one sampling session and as long as that can sample.

Nothing is stored for them at first. A worker has a copy in memory, and makes it anew from the adapter's recovery points
and the journal, which therefore keep what it takes. Those that are used for so long that this would be more than the
run keeps anyway get a recovery point of their own, which is pinned: the payloads may go then.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from twinkle.core.clock import Clock
from twinkle.storage.database import Database, Transaction
from twinkle.storage.journal.lanes import placeholders

_ALL = 2**31 - 1
"""SQLite knows no OFFSET without a LIMIT."""

_MAX_TO_PIN = 16
_KEEP = "; save_weights_for_sampler under a name keeps weights until they are deleted"
_NOTHING_WAITS = (
    " AND NOT EXISTS (SELECT 1 FROM lane l JOIN operation o ON o.mesh = l.mesh AND o.lane = l.id"
    " WHERE l.id = ephemeral_weights.sampling_session AND o.kind = 'sample' AND o.state IN ('queued', 'running'))"
)


@dataclass(frozen=True, kw_only=True)
class NewEphemeralWeights:
    """Weights about to be opened. Of a client's session at most ``max_open`` stay open, the longest unused end."""

    adapter: str
    seq: int
    size_bytes: int
    opened_at: float
    expires_at: float | None
    max_open: int

    def insert(self, transaction: Transaction, sampling_session: str, *, tenant: str, session: str) -> None:
        """Insert them unless they exist, and end those that are one too many."""
        now = self.opened_at
        transaction.execute(
            "INSERT INTO ephemeral_weights (sampling_session, tenant, session, adapter, seq, size_bytes, opened_at,"
            " used_at, expires_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (sampling_session) DO NOTHING",
            (sampling_session, tenant, session, self.adapter, self.seq, self.size_bytes, now, now, self.expires_at),
        )
        reason = f"its session has {self.max_open} others that were used or opened since, which is as many as it may"
        transaction.execute(
            "UPDATE ephemeral_weights SET ended_at = ?, end_reason = ? WHERE sampling_session IN"
            " (SELECT sampling_session FROM ephemeral_weights WHERE session = ? AND ended_at IS NULL"
            " AND sampling_session <> ? ORDER BY used_at DESC, opened_at DESC, seq DESC LIMIT ? OFFSET ?)"
            f" AND ended_at IS NULL{_NOTHING_WAITS}",
            (now, reason + _KEEP, session, sampling_session, _ALL, self.max_open - 1),
        )


@dataclass(frozen=True, kw_only=True)
class EphemeralWeights:
    """Weights that were opened. ``is_current`` says that the adapter has executed nothing since."""

    adapter: str
    seq: int
    is_current: bool
    end_reason: str | None


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long weights stay open: after their last sample, and after their client was last heard of."""

    idle_s: float
    silent_s: float


class EphemeralStore:
    """The nameless weights there are, and their ends."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def to_pin(self, mesh: str, *, older_than_s: float) -> list[tuple[str, int]]:
        """Some of those that are open for so long and without a recovery point of their own, the oldest first."""
        rows = self._database.read(
            "SELECT e.adapter, e.seq FROM ephemeral_weights e JOIN lane l ON l.id = e.adapter"
            " WHERE e.ended_at IS NULL AND NOT e.pinned AND e.opened_at <= ? AND l.mesh = ?"
            " ORDER BY e.opened_at, e.adapter LIMIT ?",
            (self._clock.now() - older_than_s, mesh, _MAX_TO_PIN),
        )
        return [(row.adapter, row.seq) for row in rows]

    def open_among(self, sampling_sessions: Collection[str]) -> set[tuple[str, int]]:
        """What those of these sessions that may go on sample from: adapter and operation."""
        rows = self._database.read(
            "SELECT adapter, seq FROM ephemeral_weights"
            f" WHERE sampling_session IN ({placeholders(sampling_sessions)}) AND ended_at IS NULL",
            tuple(sampling_sessions),
        )
        return {(row.adapter, row.seq) for row in rows}

    def note_use(self, sampling_sessions: Collection[str]) -> None:
        """Note that these were sampled from just now."""
        if not sampling_sessions:
            return
        marks = placeholders(sampling_sessions)
        with self._database.transaction() as transaction:
            transaction.execute(
                f"UPDATE ephemeral_weights SET used_at = ? WHERE sampling_session IN ({marks})",
                (self._clock.now(), *sorted(sampling_sessions)),
            )

    def end_unreachable(self, patience: Patience) -> int:
        """End those that nobody can or does sample from any more, and for which no sample waits; how many."""
        now = self._clock.now()
        causes: list[tuple[str, str, tuple[object, ...]]] = [
            (
                "its client's session was finished",
                "EXISTS (SELECT 1 FROM session s WHERE s.id = ephemeral_weights.session AND s.finished_at IS NOT NULL)",
                (),
            ),
            (
                f"its client's session had not been heard of for {patience.silent_s:.0f} s",
                "EXISTS (SELECT 1 FROM session s WHERE s.id = ephemeral_weights.session AND s.heartbeat_at <= ?)",
                (now - patience.silent_s,),
            ),
            (
                f"nobody had sampled from it for {patience.idle_s:.0f} s{_KEEP}",
                "used_at <= ?",
                (now - patience.idle_s,),
            ),
            ("its time to live was over", "expires_at <= ?", (now,)),
        ]
        num_ended = 0
        for reason, condition, parameters in causes:
            with self._database.transaction() as transaction:
                num_ended += transaction.execute(
                    "UPDATE ephemeral_weights SET ended_at = ?, end_reason = ?"
                    f" WHERE ended_at IS NULL AND {condition}{_NOTHING_WAITS}",
                    (now, reason, *parameters),
                ).rowcount
        return num_ended


def pin(transaction: Transaction, adapter: str, seq: int) -> None:
    """Let the recovery point of an operation, just published, stay for those who sample from it."""
    transaction.execute(
        "UPDATE ephemeral_weights SET pinned = TRUE WHERE adapter = ? AND seq = ? AND ended_at IS NULL", (adapter, seq)
    )


def unpin(transaction: Transaction, adapter: str) -> None:
    """Note that an adapter keeps nothing any more for weights that have ended."""
    transaction.execute(
        "UPDATE ephemeral_weights SET pinned = FALSE WHERE adapter = ? AND pinned AND ended_at IS NOT NULL", (adapter,)
    )


def sampled_seqs(transaction: Transaction, adapter: str) -> tuple[set[int], set[int]]:
    """The operations after which somebody may still sample from an adapter: pinned ones, and others."""
    rows = transaction.execute(
        "SELECT seq, pinned FROM ephemeral_weights WHERE adapter = ? AND ended_at IS NULL", (adapter,)
    ).fetchall()
    pinned = {row.seq for row in rows if row.pinned}
    return pinned, {row.seq for row in rows} - pinned
