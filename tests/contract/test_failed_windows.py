"""The window of failed gradients: from a failed forward_backward to whatever empties the gradients."""

from __future__ import annotations

import pytest

from harness.clock import HandClock
from harness.journal import Bench, done, failed, submission
from twinkle.core.lease import Lease
from twinkle.core.operation import OperationKind


def _end(bench: Bench, lease: Lease, kind: OperationKind, *, code: str | None) -> int | None:
    """Submit the next operation of ``a`` and end it; the window as the operation found it."""
    seq = bench.lane("a").head_seq
    bench.append(submission("a", seq, kind))
    (claim,) = bench.claim(lease)
    bench.journal.commit(lease, [done(claim) if code is None else failed(claim, code)])
    return claim.failed_window_seq


@pytest.fixture
def window(bench: Bench, lease: Lease) -> int:
    """Number 1 of ``a`` has failed: the window is open."""
    bench.created(lease, "a")
    _end(bench, lease, OperationKind.FORWARD_BACKWARD, code="invalid_input")
    assert bench.lane("a").failed_window_seq == 1
    return 1


def test_the_optim_step_is_told_the_first_failure_of_its_window(bench: Bench, lease: Lease, window: int) -> None:
    _end(bench, lease, OperationKind.FORWARD_BACKWARD, code=None)
    _end(bench, lease, OperationKind.FORWARD_BACKWARD, code="internal")

    assert _end(bench, lease, OperationKind.OPTIM_STEP, code="window_failed") == window
    assert bench.lane("a").failed_window_seq is None


@pytest.mark.parametrize(
    ("kind", "code", "closes"),
    [
        (OperationKind.OPTIM_STEP, None, True),
        (OperationKind.OPTIM_STEP, "window_failed", True),
        (OperationKind.OPTIM_STEP, "invalid_input", False),
        (OperationKind.OPTIM_STEP, "internal", False),
        (OperationKind.OPTIM_STEP, "poison", False),
        (OperationKind.LOAD_WEIGHTS, None, True),
        (OperationKind.LOAD_WEIGHTS, "invalid_input", False),
        (OperationKind.FORWARD_BACKWARD, None, False),
        (OperationKind.FORWARD, None, False),
        (OperationKind.SAVE_WEIGHTS, None, False),
    ],
)
def test_the_window_closes_exactly_when_the_gradients_are_empty(
    bench: Bench, lease: Lease, window: int, kind: OperationKind, code: str | None, closes: bool
) -> None:
    _end(bench, lease, kind, code=code)

    assert bench.lane("a").failed_window_seq == (None if closes else window)


@pytest.mark.parametrize(
    "kind", [OperationKind.FORWARD, OperationKind.SAVE_WEIGHTS, OperationKind.OPTIM_STEP, OperationKind.LOAD_WEIGHTS]
)
def test_a_failure_that_touches_no_gradients_opens_no_window(bench: Bench, lease: Lease, kind: OperationKind) -> None:
    bench.created(lease, "a")

    _end(bench, lease, kind, code="invalid_input")

    assert bench.lane("a").failed_window_seq is None


def test_a_missing_number_opens_the_window_since_it_may_have_been_a_gradient(
    bench: Bench, lease: Lease, clock: HandClock
) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 2, OperationKind.OPTIM_STEP))
    clock.move(200)
    bench.upkeep.close_gaps(older_than_s=120)

    (claim,) = bench.claim(lease)

    assert claim.failed_window_seq == 1


def test_an_overdue_forward_backward_opens_the_window(bench: Bench, lease: Lease, clock: HandClock) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 1))
    clock.move(100)
    bench.upkeep.expire_overdue(deadline_s=50)

    assert bench.lane("a").failed_window_seq == 1


def test_the_window_outlives_the_worker(bench: Bench, lease: Lease, window: int) -> None:
    successor = bench.lease("successor")
    bench.append(submission("a", 2, OperationKind.OPTIM_STEP))

    (claim,) = bench.claim(successor)

    assert claim.failed_window_seq == window
