"""What time does to the journal: gaps close, deadlines pass, results and checkpoints expire, each once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from harness.clock import HandClock
from harness.journal import CONFIG, Bench, done, new_sampler, submission
from twinkle.core.adapter import Checkpoint, CheckpointKind, StoredFile
from twinkle.core.errors import NotFound
from twinkle.core.lease import Lease
from twinkle.core.operation import Accepted, FailureCategory, OperationKind, OperationState, Outcome, Payload
from twinkle.storage.database import Row
from twinkle.storage.journal.records import Records


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


def test_overdue_operations_fail_in_order_in_one_sweep(bench: Bench, lease: Lease, clock: HandClock) -> None:
    bench.created(lease, "a")
    bench.journal.open_lane(new_sampler("s"))
    bench.append(*(submission("a", seq) for seq in (1, 2)), submission("s", 0, OperationKind.SAMPLE))
    clock.move(3000)
    bench.append(submission("a", 3))
    clock.move(600)

    first, second = (bench.upkeep.expire_overdue(deadline_s=3600) for _ in range(2))

    assert (sorted(first), second) == (["a:req:1", "a:req:2", "s:req:0"], [])
    assert bench.status("a", 1).failure.code == "deadline"
    assert bench.lane("a").head_seq == 3
    assert bench.run(lease) == [("a", 3)]


def test_a_kind_may_have_a_deadline_of_its_own(bench: Bench, lease: Lease, clock: HandClock) -> None:
    bench.created(lease, "a")
    bench.journal.open_lane(new_sampler("s"))
    bench.append(submission("a", 1), submission("a", 2, OperationKind.OPTIM_STEP))
    bench.append(submission("s", 0, OperationKind.SAMPLE))
    clock.move(60)
    own = {OperationKind.SAMPLE: 60.0, OperationKind.OPTIM_STEP: 10.0}

    samples = bench.upkeep.expire_overdue(deadline_s=3600, deadline_s_of=own)
    bench.run(lease)
    clock.move(3600)

    assert samples == ["s:req:0"]
    assert "within its deadline of 60 s" in bench.status("s", 0).failure.message
    assert bench.status("a", 2).state is OperationState.DONE


def test_what_a_live_worker_runs_is_not_overdue_and_who_was_given_it_back_is(
    bench: Bench, lease: Lease, clock: HandClock
) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 1))
    clock.move(3590)
    (claim,) = bench.claim(lease)
    clock.move(10)
    bench.meshes.renew(lease, lease_s=15)
    while_running = bench.upkeep.expire_overdue(deadline_s=3600)
    bench.journal.give_back(lease, [claim.request_id])
    after = bench.upkeep.expire_overdue(deadline_s=3600)

    assert (while_running, after) == ([], ["a:req:1"])
    assert bench.journal.commit(lease, [done(claim)]).recorded == []
    assert bench.status("a", 1).state is OperationState.FAILED


@pytest.mark.parametrize(("is_alive", "running_s"), [(False, 20), (True, 700)], ids=["its_worker_died", "it_hangs"])
def test_an_overdue_operation_ends_though_a_worker_took_it(
    bench: Bench, lease: Lease, clock: HandClock, is_alive: bool, running_s: float
) -> None:
    bench.created(lease, "a")
    bench.journal.open_lane(new_sampler("s"))
    bench.append(submission("a", 1), submission("a", 2), submission("s", 0, OperationKind.SAMPLE))
    clock.move(3600)
    claims = bench.claim(lease) + bench.claim_samples(lease, 8)
    clock.move(running_s)
    if is_alive:
        bench.meshes.renew(lease, lease_s=15)

    ended = bench.upkeep.expire_overdue(deadline_s=3600)

    assert sorted(ended) == ["a:req:1", "a:req:2", "s:req:0"]
    assert "did not end within" in bench.status("a", 1).failure.message
    committed = bench.journal.commit(lease, [done(claim) for claim in claims])
    assert committed.recorded == [] and len(committed.ended_before) == len(claims)


def test_what_housekeeping_fails_has_its_line_in_the_log(bench: Bench, lease: Lease, clock: HandClock) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 2))
    clock.move(100)
    with capture_logs() as lines:
        bench.upkeep.close_gaps(older_than_s=60)
        bench.upkeep.expire_overdue(deadline_s=60)

    failed = [line for line in lines if line["event"] == "operation.failed"]
    assert [(line["tenant"], line["op"], line["kind"], line["reason"]) for line in failed] == [
        ("t0", "a:req:1", "gap", "gap"),
        ("t0", "a:req:2", "forward_backward", "deadline"),
    ]


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
    assert (status.state, status.expired) == (OperationState.DONE, True)
    assert status.result is not None and status.result.is_gone
    assert [operation.payload.is_gone for operation in bench.journal.history("b", after_seq=0, before_seq=9)] == [False]


def test_an_expired_samples_payload_goes_with_its_result(bench: Bench, lease: Lease, clock: HandClock) -> None:
    bench.journal.open_lane(new_sampler("s"))
    sample = replace(submission("s", 0, OperationKind.SAMPLE), payload=Payload(blob="payloads/s", blob_bytes=9))
    bench.append(sample)
    bench.journal.commit(lease, [done(claim) for claim in bench.claim_samples(lease, 8)])
    clock.move(100)

    assert bench.upkeep.expire_results(older_than_s=100) == ["payloads/s"]
    assert bench.rows("SELECT payload, payload_blob, payload_bytes FROM operation") == [(None, None, 9)]


def test_checkpoints_expire_once_and_say_which_files_to_delete(bench: Bench, lease: Lease, clock: HandClock) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 1, OperationKind.SAVE_WEIGHTS))
    (claim,) = bench.claim(lease)
    kept = _checkpoint("kept", expires_at=None, key="k/kept")
    brief = _checkpoint("brief", expires_at=clock.now() + 60, key="k/brief")
    bench.journal.commit(lease, [done(claim)], {claim.request_id: Records(checkpoints=[kept, brief])})

    assert bench.upkeep.expire_checkpoints() == []
    clock.move(60)
    with pytest.raises(NotFound):
        bench.checkpoints.find(brief.path)
    assert bench.upkeep.expire_checkpoints() == ["k/brief"]
    assert bench.upkeep.expire_checkpoints() == []
    assert bench.checkpoints.find(kept.path).files == kept.files


def test_a_gap_that_opened_after_the_sweep_had_looked_is_measured_by_its_own_age(
    bench: Bench, lease: Lease, clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 2))
    clock.move(130)
    read = bench.database.read

    def read_then_fill(sql: str, parameters: Sequence[object] = ()) -> list[Row]:
        found = read(sql, parameters)
        monkeypatch.setattr(bench.database, "read", read)
        bench.append(submission("a", 1), submission("a", 4))
        bench.run(lease)
        return found

    monkeypatch.setattr(bench.database, "read", read_then_fill)

    assert bench.upkeep.close_gaps(older_than_s=120) == []
    assert bench.lane("a").head_seq == 3
    clock.move(121)
    assert bench.upkeep.close_gaps(older_than_s=120) == ["a:req:3"]
