"""Cancelling against a worker that is at work on the sample."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.clock import HandClock
from harness.journal import Bench, new_sampler, submission
from harness.operations import sample_body
from harness.worker import WorkerRig
from twinkle.core.errors import InvalidInput, NotFound
from twinkle.core.ids import request_id_of
from twinkle.core.operation import OperationKind, OperationState
from twinkle.scheduler.token_stream import TokenPiece
from twinkle.storage.blobs import FolderStore
from twinkle.storage.sampling.sampling_sessions import SamplingSessions

SAMPLER = "session-t0:sample:0"


@pytest.fixture
def samples(bench: Bench) -> SamplingSessions:
    return bench.sampling_sessions


@pytest.fixture
def rig(bench: Bench, clock: HandClock, tmp_path: Path):  # type: ignore[no-untyped-def]
    rig = WorkerRig("a", stores=bench.stores, blobs=FolderStore(tmp_path), clock=clock)
    yield rig
    rig.bury()


def _queue(bench: Bench, count: int) -> list[str]:
    bench.journal.open_lane(new_sampler(SAMPLER))
    bench.append(*(submission(SAMPLER, n, OperationKind.SAMPLE, body=sample_body(SAMPLER, n)) for n in range(count)))
    return [request_id_of(SAMPLER, seq) for seq in range(count)]


def _never_finish(rig: WorkerRig) -> None:
    def step() -> list[object]:
        rig.clock.move(1.0)
        return []

    rig.engine.step_samples = step  # type: ignore[method-assign]


def test_a_running_sample_is_dropped_at_the_workers_next_look(
    bench: Bench, rig: WorkerRig, samples: SamplingSessions
) -> None:
    unwanted, wanted = _queue(bench, 2)
    finish = rig.engine.step_samples
    _never_finish(rig)
    rig.drain(1)
    assert bench.status(SAMPLER, 0).state is OperationState.RUNNING

    assert samples.cancel(unwanted, "t0")
    assert not samples.cancel(unwanted, "t0")
    rig.drain(1)

    assert rig.samples.under_way == [wanted]
    assert rig.engine.num_samples_under_way == 1
    assert ("failed", unwanted) in rig.reporter.events
    rig.engine.step_samples = finish  # type: ignore[method-assign]
    rig.drain()
    failure = bench.status(SAMPLER, 0).failure
    assert failure is not None
    assert failure.code == "cancelled"
    assert bench.status(SAMPLER, 1).state is OperationState.DONE


def test_what_was_drawn_of_a_cancelled_sample_is_paid_for(
    bench: Bench, rig: WorkerRig, samples: SamplingSessions
) -> None:
    (unwanted,) = _queue(bench, 1)
    _never_finish(rig)
    rig.engine.drawn_so_far = lambda request_id, known: [  # type: ignore[method-assign]
        TokenPiece(request_id=request_id, sample=0, start=0, tokens=[5] * 40, logprobs=[-1.0] * 40, topk=None)
    ]
    rig.drain(1)
    before = _share(bench)

    samples.cancel(unwanted, "t0")
    rig.drain(2)

    # The prompt has three tokens.
    assert _share(bench) - before == 43
    assert rig.engine.num_samples_under_way == 0


def _share(bench: Bench) -> float:
    return float(bench.database.read("SELECT vtime FROM share WHERE tenant = 't0'", ())[0].vtime)


def test_an_overdue_sample_is_dropped_like_a_cancelled_one_and_nothing_else_is_disturbed(
    bench: Bench, rig: WorkerRig
) -> None:
    (overdue,) = _queue(bench, 1)
    finish = rig.engine.step_samples
    _never_finish(rig)
    rig.drain(1)
    bench.adapter("a")
    rig.clock.move(601.0)
    rig.drain(1)
    assert rig.samples.under_way == [overdue]
    resident = rig.state_before("a", 1)

    assert bench.upkeep.expire_overdue(deadline_s=60.0) == [overdue]
    bench.append(submission(SAMPLER, 1, OperationKind.SAMPLE, body=sample_body(SAMPLER, 1)))
    rig.drain(1)

    assert rig.samples.under_way == [request_id_of(SAMPLER, 1)]
    assert rig.engine.num_samples_under_way == 1
    assert ("failed", overdue) in rig.reporter.events
    rig.engine.step_samples = finish  # type: ignore[method-assign]
    rig.drain()
    failure = bench.status(SAMPLER, 0).failure
    assert failure is not None and failure.code == "deadline"
    assert bench.status(SAMPLER, 1).state is OperationState.DONE
    assert bench.status(SAMPLER, 1).attempt == 1
    assert rig.state_before("a", 1) is resident


@pytest.mark.parametrize("how", ["cancelled", "overdue"])
def test_a_sample_that_ended_just_before_its_commit_costs_nobody_else_anything(
    bench: Bench, rig: WorkerRig, samples: SamplingSessions, how: str
) -> None:
    """Neither the adapters in memory nor the samples beside it: the lease holds."""
    bench.adapter("a")
    rig.drain(1)
    resident = rig.state_before("a", 1)
    ended = _queue(bench, 2)[0]

    def end() -> None:
        if how == "cancelled":
            samples.cancel(ended, "t0")
            return
        with bench.database.transaction() as transaction:
            transaction.execute("UPDATE operation SET accepted_at = accepted_at - 9000 WHERE request_id = ?", (ended,))
        rig.clock.move(601.0)
        assert bench.upkeep.expire_overdue(deadline_s=3600.0) == [ended]

    rig.journal.before_commit = end
    rig.drain()

    failure = bench.status(SAMPLER, 0).failure
    assert failure is not None and failure.code == ("cancelled" if how == "cancelled" else "deadline")
    assert bench.status(SAMPLER, 1).state is OperationState.DONE
    assert bench.status(SAMPLER, 1).attempt == 1
    assert rig.keeper.current() is not None
    assert rig.state_before("a", 1) is resident


def test_a_sample_cancelled_just_before_its_commit_stays_cancelled(
    bench: Bench, rig: WorkerRig, samples: SamplingSessions
) -> None:
    unwanted, wanted = _queue(bench, 2)
    rig.journal.before_commit = lambda: samples.cancel(unwanted, "t0")

    rig.drain()

    failure = bench.status(SAMPLER, 0).failure
    assert failure is not None
    assert failure.code == "cancelled"
    assert bench.status(SAMPLER, 1).state is OperationState.DONE
    ended = samples.ended(SAMPLER, client=0, after=0, limit=10)
    assert [(sample.request_id, sample.ended_no, sample.failed) for sample in ended] == [
        (unwanted, 1, True),
        (wanted, 2, False),
    ]


def test_a_sample_whose_worker_died_is_not_handed_out_again_once_cancelled(
    bench: Bench, rig: WorkerRig, samples: SamplingSessions
) -> None:
    (unwanted,) = _queue(bench, 1)
    _never_finish(rig)
    rig.drain(1)
    samples.cancel(unwanted, "t0")

    lease = bench.lease("b")

    assert bench.claim_samples(lease, 4, under_way=()) == []
    assert bench.journal.num_open_samples("t0") == 0


def test_what_cannot_be_cancelled(bench: Bench, samples: SamplingSessions) -> None:
    bench.adapter("a")
    (sample,) = _queue(bench, 1)

    with pytest.raises(InvalidInput, match="cannot be cancelled"):
        samples.cancel(request_id_of("a", 0), "t0")
    with pytest.raises(NotFound):
        samples.cancel(sample, "t1")
    assert bench.status(SAMPLER, 0).state is OperationState.QUEUED


def test_an_overdue_sample_is_among_those_that_ended(bench: Bench, samples: SamplingSessions) -> None:
    (overdue,) = _queue(bench, 1)
    bench.clock.move(100.0)

    bench.upkeep.expire_overdue(deadline_s=10.0)

    assert [sample.request_id for sample in samples.ended(SAMPLER, client=0, after=0, limit=10)] == [overdue]


def test_all_samples_of_a_session_are_cancelled_at_once_and_no_others(bench: Bench, samples: SamplingSessions) -> None:
    _queue(bench, 3)
    others = "session-t1:sample:0"
    bench.journal.open_lane(new_sampler(others, tenant="t1"))
    bench.append(submission(others, 0, OperationKind.SAMPLE, tenant="t1", body=sample_body(others, 0)))
    session = samples.find(SAMPLER).session

    assert samples.cancel_all(session, "t1") == []
    assert samples.cancel_all(session, "t0") == [request_id_of(SAMPLER, seq) for seq in range(3)]
    assert samples.cancel_all(session, "t0") == []

    assert [bench.status(SAMPLER, seq).state for seq in range(3)] == [OperationState.FAILED] * 3
    assert bench.status(others, 0).state is OperationState.QUEUED
