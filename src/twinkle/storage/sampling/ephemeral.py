"""Nameless weights: an adapter as it was after one operation, for one sampling session and as long as that can sample.

Nothing is stored for them at first. A worker has a copy in memory, and makes it anew from the adapter's recovery points
and the journal, which therefore keep what it takes. Those that are used for so long that this would be more than the
run keeps anyway get a recovery point of their own, which is pinned: the payloads may go then.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinkle.storage.database import Transaction

_ALL = 2**31 - 1
"""SQLite knows no OFFSET without a LIMIT."""

KEEP = "; weights that are saved under a name are kept until they are deleted"
NOTHING_WAITS = (
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
            f" AND ended_at IS NULL{NOTHING_WAITS}",
            (now, reason + KEEP, session, sampling_session, _ALL, self.max_open - 1),
        )


@dataclass(frozen=True, kw_only=True)
class EphemeralWeights:
    """Weights that were opened. ``is_current`` says that the adapter has executed nothing since."""

    adapter: str
    seq: int
    is_current: bool
    end_reason: str | None


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
