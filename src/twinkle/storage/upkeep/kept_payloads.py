"""What payloads in the journal come to once nobody waits for their operations, counted lane by lane.

No request adds it up: housekeeping reads each operation once, after its end, and whoever drops payloads takes off what
was counted of them. Large payloads, which lie in the object store, have an index of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from twinkle.core.operation import OperationKind
from twinkle.core.processors import PROCESSORS_MESH
from twinkle.storage.database import Database, Row, Transaction, placeholders

_LANES_A_LOOK = 1000
_LOOKS = 20
_OPERATIONS_A_STEP = 5000
_STEPS = 20
_PASSES = (OperationKind.FORWARD, OperationKind.FORWARD_BACKWARD)


class KeptPayloads:
    """Counts what has ended since it was last asked. What is small whoever sends it is left out."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._looked_up_to = ""

    def count(self, *, max_looks: int = _LOOKS) -> int:
        """Add up what has ended; in how many lanes something had.

        Looks at so many thousand lanes, and the next call at those behind them.
        """
        num_lanes = 0
        for _ in range(max_looks):
            rows = self._database.read(
                "SELECT id, ordered, head_seq, num_ended, counted_no FROM lane WHERE id > ? ORDER BY id LIMIT ?",
                (self._looked_up_to, _LANES_A_LOOK),
            )
            for row in rows:
                if _last_ended(row) > row.counted_no:
                    self._count(row.id)
                    num_lanes += 1
            self._looked_up_to = rows[-1].id if len(rows) == _LANES_A_LOOK else ""
            if not self._looked_up_to:
                break
        return num_lanes

    def _count(self, lane: str) -> None:
        for _ in range(_STEPS):
            if self._count_some(lane) < _OPERATIONS_A_STEP:
                return

    def _count_some(self, lane: str) -> int:
        """Count some operations of a lane; how many."""
        with self._database.transaction() as transaction:
            row = transaction.execute(
                "SELECT mesh, ordered, head_seq, num_ended, pruned_seq, counted_no FROM lane WHERE id = ? FOR UPDATE",
                (lane,),
            ).fetchone()
            if row is None:
                return 0
            number = "seq" if row.ordered else "ended_no"
            # Below what is pruned there are none.
            counted_no = max(row.counted_no, row.pruned_seq) if row.ordered else row.counted_no
            kinds = _kinds_of(row)
            found = transaction.execute(
                "SELECT COUNT(*) AS num, MAX(number) AS counted_no, COALESCE(SUM(num_bytes), 0) AS num_bytes FROM"
                f" (SELECT {number} AS number, CASE WHEN payload IS NOT NULL AND kind IN ({placeholders(kinds)})"
                f" THEN payload_bytes END AS num_bytes FROM operation WHERE lane = ? AND {number} > ?"
                f" AND {number} <= ? ORDER BY {number} LIMIT ?) AS found",
                (*kinds, lane, counted_no, _last_ended(row), _OPERATIONS_A_STEP),
            ).fetchone()
            assert found is not None, "sums have a row"
            is_all = found.num < _OPERATIONS_A_STEP
            transaction.execute(
                "UPDATE lane SET kept_bytes = kept_bytes + ?, counted_no = ? WHERE id = ?",
                (int(found.num_bytes), _last_ended(row) if is_all else found.counted_no, lane),
            )
        return int(found.num)


def take_off_passes(transaction: Transaction, run: str, going: Sequence[Row]) -> None:
    """Count a run's passes no more whose payloads are about to go: rows with ``seq`` and ``inline_bytes``."""
    lane = transaction.execute("SELECT counted_no FROM lane WHERE id = ? FOR UPDATE", (run,)).fetchone()
    if lane is None:
        return
    num_bytes = sum(row.inline_bytes or 0 for row in going if row.seq <= lane.counted_no)
    if num_bytes:
        transaction.execute("UPDATE lane SET kept_bytes = kept_bytes - ? WHERE id = ?", (num_bytes, run))


def take_off_samples(transaction: Transaction, request_ids: Sequence[str]) -> None:
    """The same of samples, whose lanes the transaction has locked."""
    transaction.execute(
        "UPDATE lane SET kept_bytes = kept_bytes - going.num_bytes FROM"
        " (SELECT o.lane, SUM(o.payload_bytes) AS num_bytes FROM operation o JOIN lane l ON l.id = o.lane"
        f" WHERE o.request_id IN ({placeholders(request_ids)}) AND o.kind = 'sample' AND o.payload IS NOT NULL"
        " AND o.ended_no <= l.counted_no GROUP BY o.lane) AS going WHERE lane.id = going.lane",
        request_ids,
    )


def _last_ended(lane: Row) -> int:
    """Up to which of its numbers all operations have ended: those of samples are given at their ends."""
    return int(lane.head_seq - 1 if lane.ordered else lane.num_ended)


def _kinds_of(lane: Row) -> list[str]:
    if not lane.ordered:
        return [OperationKind.SAMPLE.value]
    return [OperationKind.CALL.value] if lane.mesh == PROCESSORS_MESH else [kind.value for kind in _PASSES]
