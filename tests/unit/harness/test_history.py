"""The judge of histories: it passes what kept the promise and catches each way of breaking it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.history import Event, Row, judge
from harness.journal import CONFIG
from harness.operations import Request, create, forward_backward, optim_step, replayed
from twinkle.core.operation import OperationKind, Payload
from twinkle.wire.bodies.training import OptimStepResponse

LANE = "s:train:0"
REQUESTS = [create(), forward_backward(1), optim_step(0.1), forward_backward(2), optim_step(0.2), optim_step(0.3)]


def _rows(requests: list[Request] = REQUESTS) -> list[Row]:
    rows = []
    for seq, (request, (_, metrics)) in enumerate(zip(requests, replayed(requests)[1], strict=True)):
        result = b"{}" if metrics is None else OptimStepResponse(metrics=metrics).to_json()
        rows.append(
            Row(
                lane=LANE,
                seq=seq,
                kind=request.kind,
                state="done",
                payload=request.numbered(LANE, seq).payload,
                result=Payload(inline=result),
                error_code=None,
                finished_at=float(seq),
            )
        )
    return rows


def _events(rows: list[Row]) -> list[Event]:
    events = []
    for row in rows:
        events += [
            Event(kind="invoke", lane=row.lane, seq=row.seq),
            Event(kind="unknown", lane=row.lane, seq=row.seq),
            Event(kind="invoke", lane=row.lane, seq=row.seq),
            Event(kind="accepted", lane=row.lane, seq=row.seq, value=b"ticket"),
            Event(kind="ok", lane=row.lane, seq=row.seq, value=b"answer"),
        ]
    return events


def _no_blobs(key: str) -> bytes:
    raise AssertionError(key)


def test_a_history_that_kept_the_promise_has_no_violations() -> None:
    assert CONFIG.base_model
    verdict = judge(_events(_rows()), _rows(), _no_blobs)

    assert verdict.violations == []
    assert verdict.failed == []


def test_a_failure_is_told_and_is_no_violation() -> None:
    rows = _rows()[:2]
    rows[1] = replace(rows[1], state="failed", error_code="user")
    events = [event if (event.kind, event.seq) != ("ok", 1) else replace(event, kind="fail") for event in _events(rows)]

    verdict = judge(events, rows, _no_blobs)

    assert verdict.violations == []
    assert verdict.failed == [f"{LANE} 1 user"]


def test_an_accepted_operation_that_is_not_in_the_journal_is_lost() -> None:
    verdict = judge(_events(_rows()), _rows()[:-1], _no_blobs)

    assert verdict.lost == [f"{LANE} 5 was accepted and is not in the journal"]


def test_an_operation_told_done_that_the_journal_calls_failed_is_lost() -> None:
    rows = _rows()

    verdict = judge(_events(rows), [*rows[:-1], replace(rows[-1], state="failed", error_code="poison")], _no_blobs)

    assert verdict.lost == [f"{LANE} 5 was told done and the journal says failed"]


@pytest.mark.parametrize(
    ("applied", "name"),
    [
        ([0, 1, 2, 2, 3, 4, 5], "doubled"),
        ([0, 1, 3, 4, 5], "lost"),
        ([0, 3, 2, 1, 4, 5], "out_of_order"),
        ([0, 1, 1, 2, 3, 4, 5], "out_of_order"),
    ],
)
def test_an_effect_that_the_order_does_not_give_is_caught(applied: list[int], name: str) -> None:
    """The rows answer as an engine that applied other operations than the journal says, or in another order."""
    rows = _rows()
    wrong = replayed([REQUESTS[seq] for seq in applied])[1]
    told = {seq: metrics for seq, (_, metrics) in zip(applied, wrong, strict=True) if metrics is not None}
    rows = [
        replace(row, result=Payload(inline=OptimStepResponse(metrics=told[row.seq]).to_json()))
        if row.seq in told
        else row
        for row in rows
    ]

    verdict = judge(_events(rows), rows, _no_blobs)

    assert getattr(verdict, name)


def test_a_number_twice_in_the_journal_is_doubled() -> None:
    rows = _rows()

    assert judge(_events(rows), [*rows, replace(rows[1], state="failed")], _no_blobs).doubled


def test_two_outcomes_of_one_future_are_doubled() -> None:
    rows = _rows()
    events = _events(rows)

    other = judge([*events, Event(kind="ok", lane=LANE, seq=2, value=b"another")], rows, _no_blobs)
    both = judge([*events, Event(kind="fail", lane=LANE, seq=2)], rows, _no_blobs)

    assert other.doubled == both.doubled == [f"{LANE} 2 was told two different outcomes"]


def test_two_futures_for_one_number_are_doubled() -> None:
    events = [*_events(_rows()), Event(kind="accepted", lane=LANE, seq=2, value=b"another")]

    assert judge(events, _rows(), _no_blobs).doubled == [f"{LANE} 2 got two different futures"]


def test_an_operation_that_finished_before_its_predecessor_is_out_of_order() -> None:
    rows = _rows()
    rows[3] = replace(rows[3], finished_at=9.0)

    assert judge(_events(rows), rows, _no_blobs).out_of_order == [f"{LANE}: 4 finished before 3"]


def test_an_operation_that_finished_past_a_hole_is_out_of_order() -> None:
    rows = _rows()
    del rows[3]
    events = [event for event in _events(_rows()) if event.seq != 3]

    assert f"{LANE}: finished past 3, which never came" in judge(events, rows, _no_blobs).out_of_order


@pytest.mark.parametrize("state", ["queued", "running"])
def test_an_operation_without_an_end_is_stuck(state: str) -> None:
    rows = _rows()
    rows[-1] = replace(rows[-1], state=state, finished_at=None)
    events = [event for event in _events(rows) if (event.kind, event.seq) != ("ok", 5)]

    assert judge(events, rows, _no_blobs).stuck == [
        f"{LANE} 5 never ended for its client",
        f"{LANE} 5 is still {state}",
    ]


def test_a_request_nobody_ever_answered_is_stuck() -> None:
    events = [*_events(_rows()), Event(kind="invoke", lane=LANE, seq=6), Event(kind="unknown", lane=LANE, seq=6)]

    assert judge(events, _rows(), _no_blobs).stuck == [f"{LANE} 6 never ended for its client"]


def test_samples_have_no_order_to_keep() -> None:
    rows = [replace(row, lane="s:sample:0", kind=OperationKind.SAMPLE, finished_at=float(-row.seq)) for row in _rows()]

    assert judge(_events(rows), rows, _no_blobs).violations == []
