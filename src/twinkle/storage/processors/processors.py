"""Processors: data sets, loaders and their like, each a lane; how many a tenant has, what is known of each, its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinkle.core.clock import Clock
from twinkle.core.errors import LimitReached, NotFound
from twinkle.core.processors import PROCESSORS_MESH
from twinkle.storage.database import Database, Row, Transaction, placeholders
from twinkle.storage.journal.records import insert_lane
from twinkle.storage.upkeep.waste import doom

_COLUMNS = "id, tenant, session, processor_type, class_type, recipe, applied_seq"
_BATCH = 200


@dataclass(frozen=True, kw_only=True)
class Processor:
    """One processor; ``recipe`` is that of its state after operation ``applied_seq``, none before the first."""

    id: str
    tenant: str
    session: str
    processor_type: str
    class_type: str
    recipe: str | None
    applied_seq: int


@dataclass(frozen=True, kw_only=True)
class ProcessorLimit:
    """How many a tenant may have in sessions that were heard of since ``live_since``."""

    max_processors: int
    live_since: float

    def check(self, transaction: Transaction, tenant: str) -> None:
        """Count them, the new one among them.

        Raises:
            LimitReached: They are too many.
        """
        # Two that are created at once wait for each other here.
        transaction.execute("UPDATE tenant SET weight = weight WHERE id = ?", (tenant,))
        row = transaction.execute(
            "SELECT COUNT(*) AS num_live FROM processor p JOIN session s ON s.id = p.session"
            " WHERE p.tenant = ? AND p.ended_at IS NULL AND s.finished_at IS NULL AND s.heartbeat_at >= ?",
            (tenant, self.live_since),
        ).fetchone()
        assert row is not None
        if row.num_live > self.max_processors:
            raise LimitReached(
                f"you have {row.num_live - 1} data sets and loaders in live sessions, and {self.max_processors} may be;"
                " close some (close()), end a session or let one lapse, or ask the operator for more"
            )


@dataclass(frozen=True, kw_only=True)
class NewProcessor:
    """A processor about to be created. It ends by itself when its session has long been silent."""

    id: str
    tenant: str
    session: str
    processor_type: str
    class_type: str
    created_at: float
    limit: ProcessorLimit | None = None

    def insert(self, transaction: Transaction) -> None:
        """Insert the lane and the processor unless they exist.

        Raises:
            LimitReached: The tenant has as many as it may have.
        """
        is_new = insert_lane(transaction, self.id, self.tenant, PROCESSORS_MESH, ordered=True, arrival_numbered=True)
        if not is_new:
            return
        transaction.execute(
            "INSERT INTO processor (id, tenant, session, processor_type, class_type, created_at, used_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                self.id,
                self.tenant,
                self.session,
                self.processor_type,
                self.class_type,
                self.created_at,
                self.created_at,
            ),
        )
        if self.limit is not None:
            self.limit.check(transaction, self.tenant)


class Processors:
    """What is known of processors. Another tenant's answers like one that does not exist."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def find(self, processor: str, tenant: str) -> Processor:
        """One that has not ended.

        Raises:
            NotFound: There is none, it has ended, or it is another tenant's.
        """
        found = self.some([processor], tenant).get(processor)
        if found is None:
            raise NotFound(f"no data set, loader or other processor {processor!r}; it may have ended with its session")
        return found

    def some(self, processors: Sequence[str], tenant: str) -> dict[str, Processor]:
        """Those of a tenant's that have not ended."""
        rows = self._database.read(
            f"SELECT {_COLUMNS} FROM processor WHERE id IN ({placeholders(processors)})"
            " AND tenant = ? AND ended_at IS NULL",
            (*processors, tenant),
        )
        return {row.id: _processor_of(row) for row in rows}

    def has_waiting(self) -> bool:
        """Whether there is something to be done for any of them."""
        return bool(
            self._database.read(
                "SELECT 1 AS waits FROM lane WHERE mesh = ? AND head_kind IS NOT NULL LIMIT 1", (PROCESSORS_MESH,)
            )
        )

    def forget(self, processor: str) -> None:
        """End one that could not be made."""
        self._end([processor])

    def end(self, processor: str, tenant: str) -> None:
        """End one now: it answers no more, and what it was made of is given up.

        Raises:
            NotFound: There is none, or it is another tenant's.
        """
        self.find(processor, tenant)
        self._end([processor])

    def expire(self, *, idle_s: float) -> int:
        """End those that nothing was asked of for so long and whose clients have been silent as long; how many."""
        since = self._clock.now() - idle_s
        rows = self._database.read(
            "SELECT p.id FROM processor p JOIN session s ON s.id = p.session"
            " WHERE p.ended_at IS NULL AND p.used_at <= ? AND (s.finished_at IS NOT NULL OR s.heartbeat_at <= ?)"
            " LIMIT ?",
            (since, since, _BATCH),
        )
        self._end([row.id for row in rows])
        return len(rows)

    def _end(self, processors: Sequence[str]) -> None:
        """Forget the recipe and what the calls brought: nothing is rebuilt of them any more."""
        now = self._clock.now()
        for processor in processors:
            with self._database.transaction() as transaction:
                transaction.execute(
                    "UPDATE processor SET ended_at = ?, recipe = NULL WHERE id = ? AND ended_at IS NULL",
                    (now, processor),
                )
                # Nothing of it is read again.
                transaction.execute(
                    "UPDATE lane SET floor_seq = max_seq, pruned_seq = max_seq, kept_bytes = 0, counted_no = max_seq"
                    " WHERE id = ?",
                    (processor,),
                )
                rows = transaction.execute(
                    "SELECT request_id, payload_blob FROM operation WHERE lane = ?"
                    " AND state IN ('done', 'failed') AND (payload IS NOT NULL OR payload_blob IS NOT NULL)",
                    (processor,),
                ).fetchall()
                for start in range(0, len(rows), _BATCH):
                    ids = [row.request_id for row in rows[start : start + _BATCH]]
                    transaction.execute(
                        "UPDATE operation SET payload = NULL, payload_blob = NULL"
                        f" WHERE request_id IN ({placeholders(ids)})",
                        ids,
                    )
                doom(transaction, [row.payload_blob for row in rows if row.payload_blob is not None], now=now)


def _processor_of(row: Row) -> Processor:
    return Processor(
        id=row.id,
        tenant=row.tenant,
        session=row.session,
        processor_type=row.processor_type,
        class_type=row.class_type,
        recipe=row.recipe,
        applied_seq=row.applied_seq,
    )
