"""What time does to the journal: gaps close, deadlines pass, results and checkpoints expire, each once."""

from __future__ import annotations

import pytest

from harness.clock import HandClock
from harness.journal import CONFIG, Bench, done, new_sampler, submission
from twinkle.core.adapter import Checkpoint, CheckpointKind, StoredFile
from twinkle.core.errors import LeaseLost, NotFound
from twinkle.core.lease import Lease
from twinkle.core.operation import Accepted, FailureCategory, OperationKind, OperationState, Outcome, Payload
from twinkle.storage.records import Records


def _checkpoint(name: str, *, expires_at: float | None, key: str) -> Checkpoint:
    return Checkpoint(
        path=f"tinker://a/weights/{name}",
        tenant="t0",
        adapter="a",
        kind=CheckpointKind.TRAINING,
        name=name,
        seq=1,
        config=CONFIG,
        files={"state.json": StoredFile(key=key, size_bytes=1, sha256="0")},
        created_at=0.0,
        expires_at=expires_at,
    )


def test_missing_numbers_end_as_failed_futures_and_the_run_goes_on(
    bench: Bench, lease: Lease, clock: HandClock
) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 4), submission("a", 6))
    clock.move(121)

    closed = bench.upkeep.close_gaps(older_than_s=120)

    assert closed == ["a:req:1", "a:req:2", "a:req:3"]
    failure = bench.status("a", 2).failure
    assert failure is not None
    assert (failure.code, failure.category) == ("gap", FailureCategory.SERVER)
    assert "operation 2 of a never arrived" in failure.message
    assert bench.run(lease) == [("a", 4)]
    assert bench.lane("a").gap_since == clock.now()


def test_a_gap_is_closed_once_and_not_before_its_time(bench: Bench, lease: Lease, clock: HandClock) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 2))
    clock.move(119)
    too_early = bench.upkeep.close_gaps(older_than_s=120)
    clock.move(1)

    assert too_early == []
    assert bench.upkeep.close_gaps(older_than_s=120) == ["a:req:1"]
    assert bench.upkeep.close_gaps(older_than_s=120) == []


def test_who_arrives_after_the_tombstone_finds_a_failed_future(bench: Bench, lease: Lease, clock: HandClock) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 2))
    clock.move(121)
    bench.upkeep.close_gaps(older_than_s=120)

    (answer,) = bench.append(submission("a", 1, body=b"late"))

    assert answer == Accepted(request_id="a:req:1", mesh="mesh0", is_new=False)
    assert bench.status("a", 1).state is OperationState.FAILED
    assert bench.run(lease) == [("a", 2)]


def test_a_gap_that_was_filled_and_a_younger_one_that_opened_keeps_its_own_time(
    bench: Bench, lease: Lease, clock: HandClock
) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 2))
    clock.move(100)
    bench.append(submission("a", 1), submission("a", 4))
    bench.run(lease)
    clock.move(100)

    assert bench.upkeep.close_gaps(older_than_s=120) == []
    clock.move(20)
    assert bench.upkeep.close_gaps(older_than_s=120) == ["a:req:3"]


def test_overdue_heads_fail_in_order_and_their_successors_in_later_sweeps(
    bench: Bench, lease: Lease, clock: HandClock
) -> None:
    bench.created(lease, "a")
    bench.journal.open_lane(new_sampler("s"))
    bench.append(*(submission("a", seq) for seq in (1, 2)), submission("s", 0, OperationKind.SAMPLE))
    clock.move(3600)

    first, second, third = (bench.upkeep.expire_overdue(deadline_s=3600) for _ in range(3))

    assert (sorted(first), second, third) == (["a:req:1", "s:req:0"], ["a:req:2"], [])
    assert bench.status("a", 1).failure.code == "deadline"
    assert bench.lane("a").head_seq == 3


def test_what_runs_is_not_overdue_and_who_was_given_it_back_is(bench: Bench, lease: Lease, clock: HandClock) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 1))
    (claim,) = bench.claim(lease)
    clock.move(3600)
    while_running = bench.upkeep.expire_overdue(deadline_s=3600)
    bench.journal.give_back(lease, [claim.request_id])
    after = bench.upkeep.expire_overdue(deadline_s=3600)

    assert (while_running, after) == ([], ["a:req:1"])
    with pytest.raises(LeaseLost):
        bench.journal.commit(lease, [done(claim)])
    assert bench.status("a", 1).state is OperationState.FAILED


def test_results_expire_once_and_leave_their_rows(bench: Bench, lease: Lease, clock: HandClock) -> None:
    bench.created(lease, "a", "b")
    bench.append(submission("a", 1), submission("b", 1))
    claims = {claim.lane: claim for claim in bench.claim(lease)}
    blob = Outcome(
        request_id="a:req:1",
        lane="a",
        seq=1,
        kind=OperationKind.FORWARD_BACKWARD,
        result=Payload(blob="results/a/1"),
    )
    bench.journal.commit(lease, [blob, done(claims["b"])])
    clock.move(86_400)

    assert bench.upkeep.expire_results(older_than_s=86_400) == ["results/a/1"]
    assert bench.upkeep.expire_results(older_than_s=86_400) == []
    status = bench.status("b", 1)
    assert (status.state, status.expired, status.result) == (OperationState.DONE, True, Payload())
    assert [operation.seq for operation in bench.journal.history("b", after_seq=0, before_seq=9)] == [1]


def test_checkpoints_expire_once_and_say_which_files_to_delete(bench: Bench, lease: Lease, clock: HandClock) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 1, OperationKind.SAVE_WEIGHTS))
    (claim,) = bench.claim(lease)
    kept = _checkpoint("kept", expires_at=None, key="k/kept")
    brief = _checkpoint("brief", expires_at=clock.now() + 60, key="k/brief")
    bench.journal.commit(lease, [done(claim)], Records(checkpoints=[kept, brief]))

    assert bench.upkeep.expire_checkpoints() == []
    clock.move(60)
    with pytest.raises(NotFound):
        bench.catalog.checkpoint(brief.path)
    assert bench.upkeep.expire_checkpoints() == ["k/brief"]
    assert bench.upkeep.expire_checkpoints() == []
    assert bench.catalog.checkpoint(kept.path).files == kept.files
