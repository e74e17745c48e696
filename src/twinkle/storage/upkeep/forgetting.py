"""Rows of operations that ended long ago go, a few at a time. What was used is added up and the audit written before.

Of a run only what lies below its floor goes: no restore, fork or rewind ever reads it again. What stays is the
operation at the floor, the first and the last one of a lane, and the rewinds, which say what was undone.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from twinkle.core.clock import Clock
from twinkle.core.operation import OperationKind, OperationState
from twinkle.storage.blobs import PAYLOADS
from twinkle.storage.database import Database, Row, Transaction, placeholders
from twinkle.storage.journal.forgotten import number_of_key, number_of_sample
from twinkle.storage.journal.lanes import LockedLane, lock_lanes
from twinkle.storage.tenants.audit import TOLD_BY_OPERATIONS, keep
from twinkle.storage.upkeep.waste import doom

HOUR_S = 3600

_BATCH = 500
_LANES_A_LOOK = 1000
_STORED_ONCE = ("past_checkpoint", "file_content")
"""Tables that tell until when something was stored."""
FORGOTTEN_COLUMNS = (
    "request_id, tenant, lane, seq, kind, state, expired, held_by, finished_at, payload_blob, result_blob, request_key,"
    " num_tokens, num_prompt_tokens, device_s,"
    f" CASE WHEN kind IN ({', '.join(repr(kind.value) for kind in TOLD_BY_OPERATIONS)}) THEN payload END AS payload"
)


@dataclass
class _Used:
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    device_s: float = 0.0
    num_operations: int = 0


class Forgetting:
    """Forgets operations, the audit log, and what was used, each when its own time has come."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._looked_up_to = ""

    def forget_operations(self, *, older_than_s: float, max_batches: int) -> int:
        """Delete rows of operations that ended so long ago and whose results have expired; how many.

        Each batch is one short transaction, which also writes down what is to be known of them afterwards. Lanes are
        looked at in turns: where this ends before all were, the next call goes on.
        """
        before = self._clock.now() - older_than_s
        num_forgotten, num_batches = 0, 0
        while num_batches < max_batches:
            num, num_found = self._forget_samples(before)
            num_forgotten, num_batches = num_forgotten + num, num_batches + 1
            if num_found < _BATCH:
                break
        rows = self._lanes_to_look_at()
        for row in rows:
            if num_batches >= max_batches:
                return num_forgotten
            # Before it is done: a lane that cannot be forgotten must not keep those behind it.
            self._looked_up_to = row.id
            if row.first_ended_at is None or row.first_ended_at > before:
                continue
            while num_batches < max_batches:
                num, has_more = self._forget_some_of(row.id, before)
                num_forgotten, num_batches = num_forgotten + num, num_batches + 1
                if not has_more:
                    break
        if len(rows) < _LANES_A_LOOK:
            self._looked_up_to = ""
        return num_forgotten

    def forget_usage(self, *, older_than_s: float) -> int:
        """Delete some of what is known of operations, checkpoints and files that ended so long ago; how many rows."""
        hour = int((self._clock.now() - older_than_s) // HOUR_S)
        with self._database.transaction() as transaction:
            hours = transaction.execute(
                "SELECT DISTINCT hour FROM past_work WHERE hour < ? ORDER BY hour LIMIT 24", (hour,)
            ).fetchall()
            marks = placeholders(hours)
            num_hours = transaction.execute(
                f"DELETE FROM past_work WHERE hour IN ({marks})", [row.hour for row in hours]
            ).rowcount
            num_ended = sum(
                transaction.execute(
                    f"DELETE FROM {table} WHERE id IN"
                    f" (SELECT id FROM {table} WHERE ended_at < ? ORDER BY ended_at LIMIT ?)",
                    (hour * HOUR_S, _BATCH),
                ).rowcount
                for table in _STORED_ONCE
            )
        return num_hours + num_ended

    def _lanes_to_look_at(self) -> list[Row]:
        return self._database.read(
            "SELECT l.id, (SELECT o.finished_at FROM operation o WHERE o.lane = l.id AND o.seq > l.gone_seq"
            " ORDER BY o.seq LIMIT 1) AS first_ended_at FROM lane l"
            " WHERE l.pruned_seq > l.gone_seq + 1 AND l.id > ? ORDER BY l.id LIMIT ?",
            (self._looked_up_to, _LANES_A_LOOK),
        )

    def _forget_some_of(self, lane_id: str, before: float) -> tuple[int, bool]:
        """Forget the oldest operations of an ordered lane; how many, and whether there may be more."""
        with self._database.transaction() as transaction:
            lane = lock_lanes(transaction, [lane_id])[lane_id]
            rows = transaction.execute(
                f"SELECT {FORGOTTEN_COLUMNS} FROM operation WHERE lane = ? AND seq > ? AND seq < ?"
                " AND seq < (SELECT pruned_seq FROM lane WHERE id = ?) ORDER BY seq LIMIT ?",
                (lane_id, lane.gone_seq, lane.max_seq, lane_id, _BATCH),
            ).fetchall()
            passed = list(takewhile(lambda row: _may_go(row, before), rows))
            if not passed:
                return 0, False
            going = [row for row in passed if row.seq > 0 and row.kind != OperationKind.REWIND]
            self._note(transaction, going)
            _note_steps(transaction, lane_id, going)
            _remember(
                transaction,
                [(lane_id, number_of_key(row.request_key), row.seq) for row in going if row.request_key is not None],
            )
            delete_operations(transaction, going, now=self._clock.now())
            transaction.execute("UPDATE lane SET gone_seq = ? WHERE id = ?", (passed[-1].seq, lane_id))
            if lane.is_unloaded:
                # Whatever comes for it is refused as such, by whatever name.
                transaction.execute("DELETE FROM forgotten WHERE lane = ?", (lane_id,))
        return len(going), len(passed) == _BATCH

    def _forget_samples(self, before: float) -> tuple[int, int]:
        """Forget the samples that ended first; how many, and how many were found."""
        with self._database.transaction() as transaction:
            rows = transaction.execute(
                f"SELECT {FORGOTTEN_COLUMNS} FROM operation WHERE kind = 'sample' AND expired AND finished_at <= ?"
                " ORDER BY finished_at LIMIT ?",
                (before, _BATCH),
            ).fetchall()
            lanes = lock_lanes(transaction, (row.lane for row in rows))
            self._note(transaction, rows)
            _remember(transaction, [(row.lane, number_of_sample(row.seq), row.seq) for row in rows])
            delete_operations(transaction, rows, now=self._clock.now())
            _raise_floors(transaction, lanes.values(), rows)
        return len(rows), len(rows)

    def _note(self, transaction: Transaction, going: Sequence[Row]) -> None:
        """Add up what was used, and write down what belongs in the audit log."""
        well = [row for row in going if row.state == OperationState.DONE]
        note_usage(transaction, well)
        told = frozenset(TOLD_BY_OPERATIONS)
        keep(transaction, [row for row in well if OperationKind(row.kind) in told])


def _may_go(row: Row, before: float) -> bool:
    """Whether its time is over, and that of its result: no job holds it, no one reads it."""
    return (
        row.state in (OperationState.DONE, OperationState.FAILED)
        and bool(row.expired)
        and row.held_by is None
        and row.finished_at <= before
    )


def note_usage(transaction: Transaction, rows: Sequence[Row]) -> None:
    """Add up what operations came to that ended well and are about to go."""
    names = sorted({row.lane for row in rows})
    marks = placeholders(names)
    places = {
        row.lane: (row.session, row.base_model if row.config is None else str(json.loads(row.config)["base_model"]))
        for row in transaction.execute(
            f"SELECT id AS lane, session, config, NULL AS base_model FROM adapter WHERE id IN ({marks})"
            f" UNION ALL SELECT id, session, NULL, base_model FROM sampling_session WHERE id IN ({marks})",
            (*names, *names),
        ).fetchall()
    }
    used: defaultdict[tuple[object, ...], _Used] = defaultdict(_Used)
    for row in rows:
        if row.lane in places:
            one = used[(row.tenant, int(row.finished_at // HOUR_S), *places[row.lane], row.kind)]
            one.num_tokens += row.num_tokens
            one.num_prompt_tokens += row.num_prompt_tokens
            one.device_s += row.device_s
            one.num_operations += 1
    for key, sums in sorted(used.items(), key=lambda item: str(item[0])):
        transaction.execute(
            "INSERT INTO past_work (tenant, hour, session, base_model, kind, num_tokens, num_prompt_tokens, device_s,"
            " num_operations) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (tenant, hour, session, base_model, kind) DO UPDATE SET"
            " num_tokens = past_work.num_tokens + excluded.num_tokens,"
            " num_prompt_tokens = past_work.num_prompt_tokens + excluded.num_prompt_tokens,"
            " device_s = past_work.device_s + excluded.device_s,"
            " num_operations = past_work.num_operations + excluded.num_operations",
            (*key, sums.num_tokens, sums.num_prompt_tokens, sums.device_s, sums.num_operations),
        )


def _note_steps(transaction: Transaction, lane: str, going: Iterable[Row]) -> None:
    """Count the steps that were applied, stretch by stretch: a rewind cuts out whole ones."""
    steps = [row.seq for row in going if row.kind == OperationKind.OPTIM_STEP and row.state == OperationState.DONE]
    if not steps:
        return
    ends = sorted(
        {
            bound
            for row in transaction.execute(
                "SELECT seq, at FROM branch WHERE adapter = ? AND source = ?", (lane, lane)
            ).fetchall()
            for bound in (row.at, row.seq - 1)
        }
    )
    counted = transaction.execute("SELECT seq, num_steps FROM past_steps WHERE lane = ?", (lane,)).fetchall()
    stretches: dict[int | None, tuple[int, int]] = {}
    for seq, num in sorted([*((row.seq, row.num_steps) for row in counted), *((seq, 1) for seq in steps)]):
        end = next((bound for bound in ends if bound >= seq), None)
        stretches[end] = (seq, stretches.get(end, (0, 0))[1] + num)
    transaction.execute("DELETE FROM past_steps WHERE lane = ?", (lane,))
    for seq, num in stretches.values():
        transaction.execute("INSERT INTO past_steps (lane, seq, num_steps) VALUES (?, ?, ?)", (lane, seq, num))


def _remember(transaction: Transaction, forgotten: Iterable[tuple[str, int, int]]) -> None:
    highest: dict[tuple[str, int], int] = {}
    for lane, number, seq in forgotten:
        highest[lane, number] = max(seq, highest.get((lane, number), -1))
    for (lane, number), seq in sorted(highest.items()):
        transaction.execute(
            "INSERT INTO forgotten (lane, number, last_seq) VALUES (?, ?, ?) ON CONFLICT (lane, number) DO UPDATE"
            " SET last_seq = CASE WHEN forgotten.last_seq < excluded.last_seq THEN excluded.last_seq"
            " ELSE forgotten.last_seq END",
            (lane, number, seq),
        )


def delete_operations(transaction: Transaction, going: Sequence[Row], *, now: float) -> None:
    """Delete rows with ``FORGOTTEN_COLUMNS``, and give up what of them lies in the object store."""
    request_ids = [row.request_id for row in going]
    transaction.execute(f"DELETE FROM operation WHERE request_id IN ({placeholders(request_ids)})", request_ids)
    blobs = [row.payload_blob for row in going if row.payload_blob and row.payload_blob.startswith(PAYLOADS)]
    doom(transaction, [*blobs, *(row.result_blob for row in going if row.result_blob)], now=now)


def _raise_floors(transaction: Transaction, lanes: Iterable[LockedLane], gone: Sequence[Row]) -> None:
    for lane in lanes:
        highest = max(row.seq for row in gone if row.lane == lane.id)
        if highest > lane.gone_seq:
            transaction.execute("UPDATE lane SET gone_seq = ? WHERE id = ?", (highest, lane.id))
