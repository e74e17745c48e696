"""How much a tenant has of what it may only have so much of."""

from __future__ import annotations

from dataclasses import dataclass

from twinkle.core.clock import Clock
from twinkle.storage.database import Database


@dataclass(kw_only=True)
class Held:
    """What a tenant has now. Sessions, runs and sampling sessions count as long as their rows are kept."""

    num_sessions: int
    num_runs: int
    num_sampling_sessions: int
    num_open: int
    open_bytes: int
    num_checkpoints: int
    checkpoint_bytes: int
    kept_bytes: int
    """Of recovery points, of payloads in the object store, and of those in the journal that nobody waits for."""


class Holdings:
    """Counts what tenants have."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def of(self, tenant: str) -> Held:
        """One tenant's, by its id."""
        (row,) = self._database.read(
            "SELECT (SELECT COUNT(*) FROM session WHERE tenant = ?) AS num_sessions,"
            " (SELECT COUNT(*) FROM adapter WHERE tenant = ?) AS num_runs,"
            " (SELECT COUNT(*) FROM sampling_session WHERE tenant = ?) AS num_sampling_sessions,"
            " (SELECT COALESCE(SUM(s.size_bytes), 0) FROM adapter a JOIN snapshot s ON s.adapter = a.id"
            " WHERE a.tenant = ?) AS snapshot_bytes,"
            " (SELECT COALESCE(SUM(payload_bytes), 0) FROM operation WHERE payload_blob IS NOT NULL AND tenant = ?)"
            " AS payload_bytes,"
            " (SELECT COALESCE(SUM(kept_bytes), 0) FROM lane WHERE tenant = ? AND kept_bytes > 0) AS inline_bytes,"
            " o.num_open, o.open_bytes, c.num_checkpoints, c.checkpoint_bytes"
            " FROM (SELECT COUNT(*) AS num_open, COALESCE(SUM(payload_bytes), 0) AS open_bytes FROM operation"
            " WHERE state IN ('queued', 'running') AND tenant = ?) o,"
            " (SELECT COUNT(*) AS num_checkpoints, COALESCE(SUM(size_bytes), 0) AS checkpoint_bytes FROM checkpoint"
            " WHERE tenant = ? AND (expires_at IS NULL OR expires_at > ?)) c",
            (*(tenant,) * 8, self._clock.now()),
        )
        return Held(
            num_sessions=int(row.num_sessions),
            num_runs=int(row.num_runs),
            num_sampling_sessions=int(row.num_sampling_sessions),
            num_open=int(row.num_open),
            open_bytes=int(row.open_bytes),
            num_checkpoints=int(row.num_checkpoints),
            checkpoint_bytes=int(row.checkpoint_bytes),
            kept_bytes=int(row.snapshot_bytes) + int(row.payload_bytes) + int(row.inline_bytes),
        )
