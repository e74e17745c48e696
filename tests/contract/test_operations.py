"""Single operations, as the operator lists, finds and cancels them, on both databases."""

from __future__ import annotations

import pytest

from harness.journal import Bench, done, failed, new_sampler, submission
from twinkle.core.errors import Conflict, NotFound
from twinkle.core.ids import request_id_of
from twinkle.core.lease import Lease
from twinkle.core.operation import OperationKind, OperationState
from twinkle.workers.endings import refuse_rejected

WAITING = [OperationState.QUEUED]
OPEN_OR_FAILED = [OperationState.QUEUED, OperationState.RUNNING, OperationState.FAILED]


def _send(bench: Bench, lane: str, *kinds: OperationKind) -> list[str]:
    first = bench.lane(lane).max_seq + 1
    for number, kind in enumerate(kinds, start=first):
        bench.append(submission(lane, number, kind))
    return [request_id_of(lane, first + place) for place in range(len(kinds))]


def test_what_waits_comes_by_its_age_and_what_failed_by_its_end_with_whose_it_is_and_why(
    bench: Bench, lease: Lease
) -> None:
    bench.created(lease, "a", "b")
    broken, stuck = _send(bench, "a", OperationKind.FORWARD_BACKWARD, OperationKind.OPTIM_STEP)
    (claim,) = bench.claim(lease)
    bench.journal.commit(lease, [failed(claim, "invalid_input")])
    bench.clock.move(5)
    (other,) = _send(bench, "b", OperationKind.FORWARD)

    found = bench.stores.operations.page(OPEN_OR_FAILED, limit=10)

    assert [one.request_id for one in found] == [stuck, other, broken]
    assert found[2].state is OperationState.FAILED and found[2].code == "invalid_input" and found[2].message
    assert {one.tenant_id for one in found} == {"t0"}
    assert [one.request_id for one in bench.stores.operations.page(WAITING, mesh="another", limit=10)] == []
    assert [one.request_id for one in bench.stores.operations.page(WAITING, limit=1)] == [stuck]


def test_an_operation_that_waits_is_cancelled_in_its_turn_and_its_window_fails_as_with_any_failure(
    bench: Bench, lease: Lease
) -> None:
    bench.created(lease, "a")
    passed, step, later = _send(
        bench, "a", OperationKind.FORWARD_BACKWARD, OperationKind.OPTIM_STEP, OperationKind.FORWARD_BACKWARD
    )

    told = bench.stores.operations.cancel(passed, reason="too large")

    assert told.is_cancelled and told.state is OperationState.QUEUED
    (claim,) = bench.claim(lease)
    with pytest.raises(Exception, match="cancelled by the operator: too large") as refused:
        refuse_rejected(claim)
    assert refused.value.code == "cancelled"  # type: ignore[attr-defined]
    bench.journal.commit(lease, [failed(claim, "cancelled")])
    (claim,) = bench.claim(lease)
    assert (claim.request_id, claim.failed_window_seq) == (step, 1)
    bench.journal.commit(lease, [failed(claim, "window_failed")])
    (claim,) = bench.claim(lease)
    assert (claim.request_id, claim.failed_window_seq) == (later, None)
    bench.journal.commit(lease, [done(claim)])


def test_what_runs_has_ended_or_begins_a_run_is_not_cancelled(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a")
    (running,) = _send(bench, "a", OperationKind.FORWARD_BACKWARD)
    (claim,) = bench.claim(lease)

    with pytest.raises(Conflict, match="is running"):
        bench.stores.operations.cancel(running, reason="late")
    bench.journal.commit(lease, [done(claim)])
    with pytest.raises(Conflict, match="is done"):
        bench.stores.operations.cancel(running, reason="late")
    with pytest.raises(Conflict, match="begins its run"):
        bench.stores.operations.cancel(request_id_of("a", 0), reason="no")
    with pytest.raises(NotFound, match="ops list"):
        bench.stores.operations.cancel("nobody:req:1", reason="no")


def test_cancelling_twice_is_cancelling_once_and_is_written_down(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a")
    (waiting,) = _send(bench, "a", OperationKind.FORWARD_BACKWARD)
    for _ in range(2):
        bench.stores.operations.cancel(waiting, reason="asked to")

    entries = bench.stores.audit.entries("t0", start=0, end=bench.clock.now() + 1)

    assert [entry.event for entry in entries].count("operation_cancel") == 1


def test_samples_are_not_ended_in_a_turn_they_do_not_wait_for(bench: Bench, lease: Lease) -> None:
    bench.journal.open_lane(new_sampler("s"))
    bench.append(submission("s", 1, OperationKind.SAMPLE))

    with pytest.raises(Conflict, match="waits for no turn"):
        bench.stores.operations.cancel(request_id_of("s", 1), reason="no")
