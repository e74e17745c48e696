"""A history of what clients saw, and the judge that holds it against the journal.

The promise is that nothing accepted is lost, doubled, reordered or stuck. The judge decides each of the four from two
independent sources: the events that the clients wrote down, and the rows of the journal, whose finished operations it
executes once more, one by one, on an engine whose state is a hash chain over everything ever applied.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from twinkle.core.adapter import AdapterConfig
from twinkle.core.operation import OperationKind, Payload
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.training import OptimStepRequest
from twinkle.wire.training import decode_data
from twinkle.workers.engine import Pass
from twinkle.workers.engines.null_engine import NullEngine, NullState

Kind = Literal["invoke", "accepted", "ok", "fail", "unknown"]
ReadBlob = Callable[[str], bytes]


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something a client did or saw: ``unknown`` is a request whose answer never came, so it is sent again."""

    kind: Kind
    lane: str
    seq: int
    value: bytes = b""


@dataclass(frozen=True, kw_only=True)
class Row:
    """An operation as the journal has it."""

    lane: str
    seq: int
    kind: OperationKind
    state: str
    payload: Payload
    result: Payload
    error_code: str | None
    finished_at: float | None


@dataclass
class History:
    """Events in the order in which they were noted; written from many threads."""

    events: list[Event] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, kind: Kind, lane: str, seq: int, value: bytes = b"") -> None:
        with self._lock:
            self.events.append(Event(kind=kind, lane=lane, seq=seq, value=value))

    def count(self, kind: Kind) -> int:
        return sum(event.kind == kind for event in self.events)


@dataclass
class Verdict:
    """What broke the promise, in words; all four lists are empty when nothing did. ``failed`` is no violation."""

    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    out_of_order: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def violations(self) -> list[str]:
        return [
            f"{name}: {words}" for name in ("lost", "doubled", "out_of_order", "stuck") for words in getattr(self, name)
        ]


def judge(events: Sequence[Event], rows: Sequence[Row], read_blob: ReadBlob) -> Verdict:
    """Decide. The clients have stopped, and the service has had time to end what it had accepted."""
    verdict = Verdict()
    _judge_clients(events, {(row.lane, row.seq): row for row in rows}, verdict)
    lanes: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        lanes[row.lane].append(row)
        if row.state not in {"done", "failed"}:
            verdict.stuck.append(f"{row.lane} {row.seq} is still {row.state}")
        if row.state == "failed":
            verdict.failed.append(f"{row.lane} {row.seq} {row.error_code}")
    for lane, its_rows in lanes.items():
        _judge_order(lane, its_rows, verdict)
        if any(row.kind is OperationKind.CREATE_MODEL for row in its_rows):
            _judge_effects(lane, its_rows, read_blob, verdict)
    return verdict


def _judge_clients(events: Iterable[Event], rows: dict[tuple[str, int], Row], verdict: Verdict) -> None:
    seen: defaultdict[tuple[str, int], list[Event]] = defaultdict(list)
    for event in events:
        seen[event.lane, event.seq].append(event)
    for (lane, seq), its_events in seen.items():
        where = f"{lane} {seq}"
        kinds = {event.kind for event in its_events}
        row = rows.get((lane, seq))
        if row is None and kinds & {"accepted", "ok", "fail"}:
            verdict.lost.append(f"{where} was accepted and is not in the journal")
        if row is not None and "ok" in kinds and row.state != "done":
            verdict.lost.append(f"{where} was told done and the journal says {row.state}")
        if len({event.value for event in its_events if event.kind == "ok"}) > 1 or {"ok", "fail"} <= kinds:
            verdict.doubled.append(f"{where} was told two different outcomes")
        if len({event.value for event in its_events if event.kind == "accepted"}) > 1:
            verdict.doubled.append(f"{where} got two different futures")
        if not kinds & {"ok", "fail"}:
            verdict.stuck.append(f"{where} never ended for its client")


def _judge_order(lane: str, rows: Sequence[Row], verdict: Verdict) -> None:
    """In a lane of samples there is no order to keep."""
    if any(row.kind is OperationKind.SAMPLE for row in rows):
        return
    ordered = sorted(rows, key=lambda row: row.seq)
    numbers = [row.seq for row in ordered]
    for seq in sorted(set(numbers)):
        if numbers.count(seq) > 1:
            verdict.doubled.append(f"{lane} {seq} is in the journal {numbers.count(seq)} times")
    missing = sorted(set(range(numbers[-1] + 1)) - set(numbers))
    if missing and any(row.finished_at is not None and row.seq > missing[0] for row in ordered):
        verdict.out_of_order.append(f"{lane}: finished past {missing[0]}, which never came")
    finished = [row for row in ordered if row.finished_at is not None]
    for earlier, later in pairwise(finished):
        if (earlier.finished_at or 0.0) > (later.finished_at or 0.0):
            verdict.out_of_order.append(f"{lane}: {later.seq} finished before {earlier.seq}")


def _judge_effects(lane: str, rows: Sequence[Row], read_blob: ReadBlob, verdict: Verdict) -> None:
    """Execute what the journal calls done, one by one, and compare each step's recorded answer."""
    engine = NullEngine(base_model="null", max_rank=128)
    state: NullState | None = None
    for row in sorted(rows, key=lambda row: row.seq):
        if row.state != "done":
            continue
        if row.kind is OperationKind.CREATE_MODEL:
            state = engine.create(AdapterConfig.model_validate_json(_bytes_of(row.payload, read_blob)))
            continue
        assert state is not None, f"{lane} has no creation"
        if row.kind is OperationKind.FORWARD_BACKWARD:
            engine.run_passes([Pass(state=state, body=decode_data(_bytes_of(row.payload, read_blob)))])
        elif row.kind is OperationKind.OPTIM_STEP:
            params = parse_body(OptimStepRequest, _bytes_of(row.payload, read_blob)).adam_params
            assert params is not None
            wanted = engine.optim_step(state, params)
            told = json.loads(_bytes_of(row.result, read_blob))["metrics"]
            where = f"{lane} {row.seq}"
            if told["step"] > wanted["step"]:
                verdict.doubled.append(f"{where} is step {told['step']:g} and should be {wanted['step']:g}")
            elif told["step"] < wanted["step"]:
                verdict.lost.append(f"{where} is step {told['step']:g} and should be {wanted['step']:g}")
            elif told["state"] != wanted["state"]:
                verdict.out_of_order.append(f"{where} has a state that its predecessors in order do not give")


def _bytes_of(payload: Payload, read_blob: ReadBlob) -> bytes:
    if payload.inline is not None:
        return payload.inline
    assert payload.blob is not None
    return read_blob(payload.blob)


def read_rows(query: Callable[[str], Sequence[tuple]]) -> list[Row]:
    """The journal's operations, through whatever can ask the database."""
    rows = query(
        "SELECT lane, seq, kind, state, payload, payload_blob, result, result_blob, error_code, finished_at"
        " FROM operation ORDER BY lane, seq"
    )
    return [
        Row(
            lane=row[0],
            seq=row[1],
            kind=OperationKind(row[2]),
            state=row[3],
            payload=Payload(inline=row[4], blob=row[5]),
            result=Payload(inline=row[6], blob=row[7]),
            error_code=row[8],
            finished_at=row[9],
        )
        for row in rows
    ]
