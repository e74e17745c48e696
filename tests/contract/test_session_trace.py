"""A session's trace against the journal's rows, read by Perfetto's own message classes."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from harness.clock import HandClock
from harness.journal import Bench, done, failed, new_sampler, submission
from twinkle.core.errors import NotFound
from twinkle.core.ids import request_id_of
from twinkle.core.lease import Lease
from twinkle.core.operation import OperationKind
from twinkle.server.answering.session_trace import trace_of
from twinkle.storage.database import Database

SESSION = "session-t0"


@dataclass
class Slice:
    """A slice of a decoded trace, or an instant if it begins and ends at once. Times are Unix seconds."""

    lane: str
    row: str
    name: str
    begins: float
    ends: float | None = None
    facts: dict[str, object] = field(default_factory=dict)
    flows: list[int] = field(default_factory=list)


def read(pieces: Iterable[bytes]) -> list[Slice]:
    """The slices of a trace, checked to be nested in nothing and closed in order, track by track."""
    names: dict[int, str] = {}
    parents: dict[int, int] = {}
    events = []
    for packet in Trace.FromString(b"".join(pieces)).packet:
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            names[track.uuid] = track.name or track.process.process_name
            parents[track.uuid] = track.parent_uuid
        elif packet.HasField("track_event"):
            events.append((packet.timestamp / 1e9, packet.track_event))
    slices: list[Slice] = []
    open_slice: dict[int, Slice] = {}
    latest: defaultdict[int, float] = defaultdict(float)
    for at, event in events:
        track = event.track_uuid
        assert at >= latest[track], "the events of a track go forward"
        latest[track] = at
        if event.type == TrackEvent.TYPE_SLICE_END:
            open_slice.pop(track).ends = at
            continue
        is_instant = event.type == TrackEvent.TYPE_INSTANT
        assert is_instant or track not in open_slice, "slices of a track do not overlap"
        lane = names[parents[track]] if names[track] in ("waiting", "running") else names[track]
        told = Slice(lane, names[track], event.name, at, flows=[*event.flow_ids, *event.terminating_flow_ids])
        told.facts = {fact.name: getattr(fact, fact.WhichOneof("value")) for fact in event.debug_annotations}
        slices.append(told)
        if not is_instant:
            open_slice[track] = told
    return slices


def trace(bench: Bench, session: str = SESSION) -> list[Slice]:
    return read(trace_of(bench.stores.timeline, session, now=bench.clock.now()))


def of(slices: list[Slice], lane: str, row: str, seq: int) -> list[Slice]:
    return [one for one in slices if (one.lane, one.row, one.facts.get("seq")) == (lane, row, seq)]


def waits(slices: list[Slice], lane: str, seq: int) -> list[tuple[str, float, float | None]]:
    return [(one.name, one.begins, one.ends) for one in of(slices, lane, "waiting", seq)]


def test_every_operation_that_ended_is_where_its_row_says(bench: Bench, lease: Lease, clock: HandClock) -> None:
    bench.created(lease, "a", "b")
    bench.journal.open_lane(new_sampler("s"))
    for seq in range(1, 40):
        clock.move(0.125)
        bench.append(submission("a", seq, num_tokens=seq))
        bench.append(submission("b", seq), submission("s", seq, OperationKind.SAMPLE))
        clock.move(0.25)
        claims = bench.claim(lease) + bench.claim_samples(lease, 2)
        clock.move(0.5)
        outcomes = [failed(claim) if claim.seq % 7 == 0 else done(claim, num_tokens=claim.seq) for claim in claims]
        bench.journal.commit(lease, outcomes)
    slices = trace(bench)

    rows = bench.rows(
        "SELECT request_id, lane, seq, kind, state, mesh, attempts, error_category, error_code, num_tokens, device_s,"
        " payload_bytes, accepted_at, started_at, finished_at FROM operation WHERE tenant = 't0' AND state <> 'queued'"
    )
    assert len(rows) > 100
    for request_id, lane, seq, kind, state, mesh, attempts, category, code, *numbers in rows:
        num_tokens, device_s, payload_bytes, accepted_at, started_at, finished_at = numbers
        (ran,) = of(slices, lane, "running", seq)
        facts = {
            "request_id": request_id,
            "kind": kind,
            "seq": seq,
            "state": state,
            "mesh": mesh,
            "attempt": attempts,
            "tokens": num_tokens,
            "payload_bytes": payload_bytes,
        }
        facts |= {"code": code, "category": category} if state == "failed" else {"device_s": device_s}
        assert (ran.name, ran.begins, ran.ends) == (kind, started_at, finished_at)
        assert ran.facts == facts
        waited = of(slices, lane, "waiting", seq)
        assert (waited[0].begins, waited[-1].ends) == (accepted_at, started_at)
        assert [one.ends for one in waited[:-1]] == [one.begins for one in waited[1:]]
        assert waited[-1].flows == ran.flows != []
    assert len([one for one in slices if one.row == "running"]) == len(rows)
    assert not [one for one in slices if "failed" in str(one.facts.get("reason"))], "a text that may quote a request"


def test_waiting_tells_whom_an_operation_waited_for(bench: Bench, lease: Lease, clock: HandClock) -> None:
    bench.created(lease, "a")
    began = clock.now()
    bench.append(submission("a", 1), submission("a", 2))
    clock.move(1)
    claims = bench.claim(lease)
    clock.move(1)
    bench.journal.commit(lease, [done(claim) for claim in claims])
    clock.move(1)
    bench.claim(lease)
    bench.append(submission("a", 3), submission("a", 5))
    clock.move(1)
    slices = trace(bench)

    assert waits(slices, "a", 1) == [("queued", began, began + 1)]
    assert waits(slices, "a", 2) == [("waiting_for_predecessor", began, began + 2), ("queued", began + 2, began + 3)]
    assert waits(slices, "a", 3) == [("waiting_for_predecessor", began + 3, None)]
    assert waits(slices, "a", 5) == [("waiting_for_gap", began + 3, None)]
    (running,) = of(slices, "a", "running", 2)
    assert (running.begins, running.ends, running.facts["state"]) == (began + 3, None, "running")


def test_an_attempt_that_failed_is_told_with_its_reason(bench: Bench, lease: Lease, clock: HandClock) -> None:
    bench.created(lease, "a")
    began = clock.now()
    bench.append(submission("a", 1))
    clock.move(1)
    bench.claim(lease)
    clock.move(1)
    bench.journal.give_back(lease, [request_id_of("a", 1)], delay_s=8.0, reason="out of memory")
    waiting = trace(bench)
    clock.move(8)
    claims = bench.claim(lease)
    clock.move(1)
    bench.journal.commit(lease, [done(claim) for claim in claims])
    ended = trace(bench)

    assert waits(waiting, "a", 1) == [("queued", began, began + 1), ("retry_backoff", began + 1, None)]
    told = of(waiting, "a", "waiting", 1)[-1].facts
    assert (told["reason"], told["attempt"], told["next_try_at"]) == ("out of memory", 1, began + 10)
    assert of(waiting, "a", "running", 1) == []
    assert waits(ended, "a", 1) == [("queued", began, began + 10)]
    (ran,) = of(ended, "a", "running", 1)
    assert (ran.begins, ran.ends, ran.facts["attempt"]) == (began + 10, began + 11, 2)


def test_what_ended_without_running_and_what_never_came(bench: Bench, lease: Lease, clock: HandClock) -> None:
    bench.created(lease, "a")
    bench.journal.open_lane(new_sampler("s"))
    began = clock.now()
    bench.append(submission("a", 2), submission("s", 0, OperationKind.SAMPLE))
    clock.move(1)
    assert bench.sampling_sessions.cancel(request_id_of("s", 0), "t0")
    clock.move(600)
    assert bench.upkeep.close_gaps(older_than_s=600) == [request_id_of("a", 1)]
    clock.move(1)
    bench.claim(lease)
    slices = trace(bench)

    assert waits(slices, "s", 0) == [("queued", began, began + 1)]
    (cancelled,) = of(slices, "s", "waiting", 0)
    assert (cancelled.facts["state"], cancelled.facts["code"]) == ("failed", "cancelled")
    (gap,) = (one for one in slices if one.name == "gap")
    assert (gap.lane, gap.begins, gap.facts["seq"]) == ("a", began + 601, 1)
    assert waits(slices, "a", 2) == [("waiting_for_gap", began, began + 601), ("queued", began + 601, began + 602)]


def test_a_session_has_its_own_lanes_and_no_data(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a")
    bench.created(lease, "x", tenant="t1")
    bench.append(submission("a", 1, body=b"a secret prompt"), submission("a", 2, rejection="a secret token"))
    bench.run(lease)
    pieces = b"".join(trace_of(bench.stores.timeline, SESSION, now=bench.clock.now()))

    lanes = {one.lane for one in read([pieces])}
    assert lanes == {"session", "a"}
    assert {one.lane for one in trace(bench, "session-t1")} == {"session", "x"}
    assert b"secret" not in pieces
    assert b"base" in pieces
    with pytest.raises(NotFound):
        trace(bench, "nobody")


def test_a_long_session_is_read_page_by_page(bench: Bench, lease: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.created(lease, "a")
    with bench.database.transaction() as transaction:
        transaction.execute(
            "INSERT INTO operation (request_id, tenant, lane, mesh, seq, kind, digest, state, attempts, claim_epoch,"
            " num_tokens, device_s, expired, accepted_at, not_before, started_at, finished_at)"
            " WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5000)"
            " SELECT 'a:req:' || CAST(i AS TEXT), 't0', 'a', 'mesh0', i, 'forward', '', 'done', 1, 1, 5, 0, FALSE,"
            " i, 0, i + 0.25, i + 0.5 FROM n"
        )
    page_sizes: list[int] = []
    read_rows = Database.read

    def note(self: Database, sql: str, parameters: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
        rows = read_rows(self, sql, parameters)
        page_sizes.append(len(rows))
        return rows

    monkeypatch.setattr(Database, "read", note)
    pieces = trace_of(bench.stores.timeline, SESSION, now=bench.clock.now())
    first = next(pieces)

    assert sum(page_sizes) < 1000
    rest = list(pieces)
    assert max(page_sizes) <= 256
    assert max(len(piece) for piece in (first, *rest)) < 1_000_000
    assert len([one for one in read([first, *rest]) if one.row == "running"]) == 5001
    assert json.dumps(page_sizes).count("256") >= 5000 // 256
