"""Whether work moves: told from work that waits for nothing but a worker, and from nothing else."""

from __future__ import annotations

import pytest

from harness.clock import HandClock
from harness.journal import MESH, Bench, done, submission
from twinkle.core.lease import Lease
from twinkle.storage.journal.queues import Queues

LIMIT_S = 600.0


@pytest.fixture
def progress(bench: Bench, clock: HandClock) -> Queues:
    return bench.stores.queues


def test_nothing_to_do_is_no_stall(bench: Bench, lease: Lease, clock: HandClock, progress: Queues) -> None:
    bench.created(lease, "a")
    clock.move(10 * LIMIT_S)

    assert progress.stalls(after_s=LIMIT_S) == []


def test_work_that_waits_while_nobody_moves_is_a_stall(bench: Bench, clock: HandClock, progress: Queues) -> None:
    bench.adapter("a")
    clock.move(LIMIT_S - 1)
    assert progress.stalls(after_s=LIMIT_S) == []
    clock.move(1)

    (stall,) = progress.stalls(after_s=LIMIT_S)

    assert (stall.mesh, stall.waits_s) == (MESH, LIMIT_S)


def test_a_long_queue_that_moves_is_no_stall(bench: Bench, lease: Lease, clock: HandClock, progress: Queues) -> None:
    bench.created(lease, "a")
    bench.append(*(submission("a", seq) for seq in range(1, 5)))
    for _ in range(3):
        clock.move(LIMIT_S - 1)
        bench.journal.commit(lease, [done(claim) for claim in bench.claim(lease)])
        assert progress.stalls(after_s=LIMIT_S) == []


def test_a_worker_that_hangs_in_an_operation_is_a_stall_although_it_renews_its_lease(
    bench: Bench, lease: Lease, clock: HandClock, progress: Queues
) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 1))
    bench.claim(lease)
    clock.move(LIMIT_S)
    bench.meshes.renew(lease, lease_s=15)

    assert [stall.mesh for stall in progress.stalls(after_s=LIMIT_S)] == [MESH]


def test_waiting_for_a_missing_number_or_for_the_next_attempt_is_no_stall(
    bench: Bench, lease: Lease, clock: HandClock, progress: Queues
) -> None:
    bench.created(lease, "a", "b")
    bench.append(submission("a", 2), submission("b", 1))
    (claim,) = bench.claim(lease)
    bench.journal.give_back(lease, [claim.request_id], delay_s=3 * LIMIT_S)
    clock.move(2 * LIMIT_S)

    assert progress.stalls(after_s=LIMIT_S) == []
