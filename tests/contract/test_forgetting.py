"""Rows of operations go when their time is over: what was used and done is still told, and nothing is done again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import pytest

from harness.clock import HandClock
from harness.journal import Bench, done, failed, new_adapter, new_sampler, submission
from harness.operations import Request, create, forward_backward, optim_step, replayed, save
from harness.worker import MakeWorker, WorkerRig
from twinkle.core.adapter import AdapterConfig, Dialect
from twinkle.core.errors import Expired, InvalidInput, NotFound
from twinkle.core.ids import request_id_of
from twinkle.core.lease import Lease
from twinkle.core.operation import Accepted, OperationKind, OperationState, Payload, Unnumbered
from twinkle.scheduler.retention import Retention
from twinkle.storage.blobs import FolderStore
from twinkle.storage.journal.answers import OwnedStatus
from twinkle.storage.journal.forgotten import SEQS_PER_CLIENT
from twinkle.storage.processors.processors import NewProcessor
from twinkle.storage.sampling.sampling_sessions import SamplingSessions
from twinkle.storage.tenants.accounting import UsagePlace, Work
from twinkle.storage.upkeep import forgetting

DAY_S = 24 * 3600.0
WEEK_S = 7 * DAY_S
MONTH_S = 30 * DAY_S
FOR_EVER = 2.0**40
KEEP_A_WEEK = Retention(keep_s=WEEK_S, every_ops=4, max_snapshots=8)
DRAWN = 3 * 2**60
LEASE_S = 1e9


@pytest.fixture
def make_worker(make_worker: MakeWorker) -> MakeWorker:
    return partial(make_worker, retention=KEEP_A_WEEK, snapshot_every_ops=4, lease_s=LEASE_S)


def _forget(bench: Bench, *, after_s: float = MONTH_S, max_batches: int = 200) -> int:
    """As housekeeping does in its turn, when so much time has passed."""
    bench.clock.move(after_s)
    bench.stores.job_keeping.release()
    bench.upkeep.expire_results(older_than_s=DAY_S)
    for run in bench.snapshots.runs_to_prune(older_than_s=WEEK_S):
        bench.snapshots.prune(run, KEEP_A_WEEK.choose)
    return bench.stores.forgetting.forget_operations(older_than_s=MONTH_S, max_batches=max_batches)


def _seqs(bench: Bench, lane: str) -> list[int]:
    return [row[0] for row in bench.rows("SELECT seq FROM operation WHERE lane = ? ORDER BY seq", (lane,))]


def _submit(bench: Bench, *requests: Request, begin: int = 1) -> list[object]:
    return list(bench.append(*(request.numbered("a", begin + place) for place, request in enumerate(requests))))


def _steps(*rates: float) -> list[Request]:
    return [request for rate in rates for request in (forward_backward(int(rate)), optim_step(float(rate)))]


@dataclass
class Told:
    """What is told of what a tenant did."""

    used: dict[UsagePlace, Work]
    audit: list[object]
    num_steps: int


def _told(bench: Bench) -> Told:
    used = bench.stores.accounting.work("t0", start=0, end=FOR_EVER)
    # Seconds are added up in another order.
    return Told(
        used={place: replace(work, training_device_s=round(work.training_device_s, 6)) for place, work in used.items()},
        audit=list(bench.stores.audit.entries("t0", start=0, end=FOR_EVER)),
        num_steps=bench.branches.num_steps("a"),
    )


def _trained(bench: Bench, worker: WorkerRig) -> list[Request]:
    """A run of ten steps with a recovery point at its end; and an eleventh a week later, of what it was before."""
    run = [create(), *_steps(*range(5)), save("kept"), *_steps(*range(5, 10))]
    bench.adapter("a")
    _submit(bench, *run[1:])
    worker.drain()
    worker.save_all()
    bench.clock.move(WEEK_S + 1)
    tail = _steps(77)
    _submit(bench, *tail, begin=len(run))
    worker.drain()
    return [*run, *tail]


# -- training runs ----------------------------------------------------------------------------------------------------


def test_a_run_whose_old_rows_are_gone_is_rebuilt_to_the_same_bits_after_its_worker_is_killed(
    bench: Bench, make_worker: MakeWorker
) -> None:
    run = _trained(bench, make_worker())
    before = _told(bench)

    num_forgotten = _forget(bench)
    seqs, after = _seqs(bench, "a"), _told(bench)
    bench.clock.move(LEASE_S)
    heir = make_worker()
    late = _steps(5, 6)
    _submit(bench, *late, begin=len(run))
    heir.drain()
    truth, _ = replayed([*run, *late])
    present = heir.state_before("a", len(run) + len(late))

    assert num_forgotten == 20 and seqs == [0, 21, 22, 23]
    assert before == after and after.num_steps == 11 and len(after.audit) == 1
    assert (present.applied, present.pending) == (truth.applied, truth.pending)
    assert [step.number for step in bench.branches.steps("a", limit=50)] == [10, 11, 12, 13]
    assert bench.branches.seq_of("a", step=12) == 25
    with pytest.raises(InvalidInput, match="its first 9 steps are forgotten"):
        bench.branches.seq_of("a", step=9)
    with pytest.raises(InvalidInput, match="go back to 21"):
        bench.branches.rewind("a", "t0", at=4, request_key=None)


def test_a_fork_that_was_asked_for_by_a_step_is_answered_again_when_that_step_is_forgotten(
    bench: Bench, make_worker: MakeWorker
) -> None:
    worker = make_worker()
    _trained(bench, worker)
    branches = bench.branches

    def fork(step: int) -> Accepted:
        at = branches.seq_of_fork("b", source="a", step=step)
        return branches.fork(new_adapter("b"), source="a", at=at, step=step)

    first = fork(10)
    worker.drain()
    _submit(bench, *_steps(*range(20, 30)), begin=24)
    worker.drain()
    worker.save_all()
    bench.clock.move(WEEK_S + 1)
    _submit(bench, *_steps(88), begin=44)
    worker.drain()
    _forget(bench)
    again = fork(10)

    with pytest.raises(InvalidInput, match="are forgotten"):
        branches.seq_of("a", step=10)
    assert (first.is_new, again.is_new, again.request_id) == (True, False, first.request_id)
    with pytest.raises(InvalidInput, match="are forgotten"):
        fork(9)


def test_lanes_are_forgotten_in_turns_wherever_the_time_for_it_ends(
    bench: Bench, lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes = ["a", "b", "c", "d"]
    monkeypatch.setattr(forgetting, "_LANES_A_LOOK", 3)
    for lane in lanes:
        bench.created(lease, lane)
        bench.append(submission(lane, 1), submission(lane, 2))
    bench.run(lease)
    with bench.database.transaction() as transaction:
        transaction.execute("UPDATE lane SET floor_seq = 2, pruned_seq = 2 WHERE ordered")

    # One look for samples, and one at a lane.
    gone = [(_forget(bench, max_batches=2), [lane for lane in lanes if 1 not in _seqs(bench, lane)]) for _ in lanes]

    assert gone == [(1, lanes[: place + 1]) for place in range(4)]


def test_what_is_sent_again_below_the_floor_is_refused_as_gone_and_never_done_again(
    bench: Bench, make_worker: MakeWorker
) -> None:
    run = _trained(bench, make_worker())
    first = bench.adapter("b")
    _forget(bench)

    again = _submit(bench, *run[1:])
    others_body = bench.append(submission("a", 3))
    created = bench.append(create().numbered("a", 0), first)
    statuses = bench.journal.statuses([request_id_of("a", seq) for seq in (3, 21, 99)])

    below, kept = again[:20], again[20:]
    assert all(isinstance(one, Expired) for one in (*below, *others_body))
    assert "a:req:1 ended so long ago that it was forgotten" in str(below[0])
    assert all(isinstance(one, Accepted) and not one.is_new for one in (*kept, *created))
    assert [(one.split(":")[-1], owned.tenant, owned.status.expired) for one, owned in statuses.items()] == [
        ("21", "t0", True),
        ("3", "t0", True),
    ]
    assert "a:req:3" in statuses["a:req:3"].status.why_expired(0.0)
    with pytest.raises(Expired, match="a:req:3"):
        bench.stores.operations.find("a:req:3")


def test_nothing_goes_before_its_time_nor_above_the_floor_nor_what_a_job_holds(
    bench: Bench, make_worker: MakeWorker
) -> None:
    worker = make_worker(snapshot_every_ops=1000)
    bench.adapter("a")
    _submit(bench, *_steps(*range(10)))
    worker.drain()

    without_recovery_point_above_them = _forget(bench)
    worker.save_all()
    with bench.database.transaction() as transaction:
        transaction.execute("UPDATE operation SET held_by = 'job' WHERE lane = 'a' AND seq = 5")
    held = _forget(bench)
    seqs = _seqs(bench, "a")
    with bench.database.transaction() as transaction:
        transaction.execute("UPDATE operation SET held_by = NULL WHERE lane = 'a'")
    too_early = bench.stores.forgetting.forget_operations(older_than_s=1e9, max_batches=9)
    released = _forget(bench)

    assert without_recovery_point_above_them + held == 4 and seqs == [0, *range(5, 21)]
    assert too_early == 0 and released == 15 and _seqs(bench, "a") == [0, 20]


def test_steps_are_counted_the_same_when_they_and_the_rewinds_that_undid_some_are_forgotten(
    bench: Bench, make_worker: MakeWorker
) -> None:
    worker = make_worker(retention=Retention(keep_s=1e12, every_ops=1, max_snapshots=100), snapshot_every_ops=1)
    bench.adapter("a")
    _submit(bench, *_steps(1, 2, 3, 4))  # 1 to 8
    worker.drain()
    bench.branches.rewind("a", "t0", at=4, request_key="back")  # 9
    _submit(bench, *_steps(5, 6), begin=9)  # 10 to 13
    worker.drain()
    worker.save_all()
    before = bench.branches.num_steps("a"), [step.seq for step in bench.branches.steps("a", limit=50)]

    _forget(bench)
    forgotten, seqs = bench.branches.num_steps("a"), _seqs(bench, "a")
    _submit(bench, *_steps(7), begin=13)
    worker.drain()

    assert before == (4, [2, 4, 11, 13])
    assert forgotten == 4 and seqs == [0, 9, 13]
    assert [(step.number, step.seq) for step in bench.branches.steps("a", limit=50)] == [(4, 13), (5, 15)]
    assert not bench.branches.rewind("a", "t0", at=4, request_key="back").is_new


def test_an_unloaded_run_leaves_two_rows_and_refuses_whatever_comes_as_unloaded(
    bench: Bench, make_worker: MakeWorker
) -> None:
    worker = make_worker()
    bench.adapter("a")
    _submit(bench, *_steps(1, 2))
    bench.adapters.unload("a", "t0")
    worker.drain()

    _forget(bench)

    assert _seqs(bench, "a") == [0, 5]
    assert isinstance(_submit(bench, *_steps(9), begin=6)[0], InvalidInput)
    assert bench.adapters.unload("a", "t0").is_new is False


def test_a_pass_takes_a_bounded_number_of_rows_and_the_next_one_goes_on(bench: Bench, lease: Lease) -> None:
    bench.created(lease, *(f"a{number}" for number in range(3)))
    with bench.database.transaction() as transaction:
        numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 700)"
        for lane in ("a0", "a1", "a2"):
            transaction.execute(
                "INSERT INTO operation (request_id, tenant, lane, mesh, seq, kind, digest, state, attempts,"
                " claim_epoch, num_tokens, device_s, expired, accepted_at, not_before, finished_at)"
                f" {numbers} SELECT '{lane}:req:' || CAST(i AS TEXT), 't0', '{lane}', 'mesh0', i, 'optim_step', '',"
                " 'done', 1, 1, 1, 0.5, FALSE, 0, 0, 0 FROM n"
            )
        transaction.execute("UPDATE lane SET head_seq = 701, max_seq = 700, floor_seq = 700, pruned_seq = 700")

    passes = [_forget(bench, after_s=MONTH_S, max_batches=3), *(_forget(bench, after_s=0) for _ in range(2))]

    assert passes == [699, 2 * 699, 0]
    assert [bench.branches.num_steps(lane) for lane in ("a0", "a1", "a2")] == [700, 700, 700]
    (work,) = bench.stores.accounting.work("t0", start=0, end=3600).values()
    assert (work.num_trained, work.training_device_s) == (2100, 1050.0)


# -- samples, names, losses, data sets --------------------------------------------------------------------------------


def _sample(bench: Bench, lease: Lease, *seqs: int) -> None:
    bench.append(*(submission("s", seq, OperationKind.SAMPLE) for seq in seqs))
    while claims := bench.claim_samples(lease, 400):
        bench.journal.commit(lease, [failed(claim) if claim.seq == 0 else done(claim) for claim in claims])


def test_each_client_of_a_sampling_session_has_its_own_floor_and_drawn_numbers_have_none(
    bench: Bench, lease: Lease
) -> None:
    bench.journal.open_lane(new_sampler("s"))
    other = 7 * SEQS_PER_CLIENT
    _sample(bench, lease, 0, 1, 2, other, other + 1, DRAWN)
    used = bench.stores.accounting.work("t0", start=0, end=FOR_EVER)
    num_forgotten = _forget(bench)
    lease = bench.lease()

    again = bench.append(*(submission("s", seq, OperationKind.SAMPLE) for seq in (1, other, DRAWN)))
    new = bench.append(*(submission("s", seq, OperationKind.SAMPLE) for seq in (3, other + 2, DRAWN - 1, DRAWN + 1)))
    statuses = bench.journal.statuses([request_id_of("s", seq) for seq in (2, 4, other + 1, other + 9, DRAWN)])

    assert num_forgotten == 6
    assert [type(one) for one in again] == [Expired] * 3
    assert [isinstance(one, Accepted) and one.is_new for one in new] == [True] * 4
    assert sorted(int(one.split(":")[-1]) for one in statuses) == [2, other + 1, DRAWN]
    assert bench.stores.accounting.work("t0", start=0, end=FOR_EVER) == used
    assert bench.sampling_sessions.cancel(request_id_of("s", DRAWN), "t0") is False


def test_a_sample_that_is_asked_for_again_by_its_key_finds_where_it_was_accepted(bench: Bench, lease: Lease) -> None:
    with bench.database.transaction() as transaction:
        transaction.execute(
            "INSERT INTO lane (id, tenant, mesh, ordered, not_before, vtime, head_seq, max_seq)"
            " VALUES ('s', 't0', 'mesh0', FALSE, 0, 0, 0, -1)"
        )
        transaction.execute(
            "INSERT INTO sampling_session (id, tenant, session, base_model, checkpoint)"
            " VALUES ('s', 't0', 'session-t0', 'base', 'tinker://r/weights/x')"
        )
    _sample(bench, lease, DRAWN)
    where: SamplingSessions = bench.sampling_sessions

    _forget(bench)

    assert where.sampled_before("session-t0", checkpoint="tinker://r/weights/x", seq=DRAWN) == "s"
    assert where.sampled_before("session-t0", checkpoint="tinker://r/weights/x", seq=DRAWN + 1) is None
    assert where.run_sampled_before("session-t0", run="r", seq=DRAWN) == "tinker://r/weights/x"


def _call(key: str, body: bytes = b"call") -> Unnumbered:
    return Unnumbered(
        tenant="t0",
        lane="a",
        kind=OperationKind.CALL,
        digest=body.decode(),
        payload=Payload(inline=body),
        request_key=key,
    )


def test_a_call_that_is_sent_again_under_its_key_is_refused_as_gone(bench: Bench, lease: Lease) -> None:
    config = AdapterConfig(base_model="base", rank=4, seed=1, dialect=Dialect.TWINKLE)
    bench.journal.open_lane(new_adapter("a", config=config))
    for number in range(4):
        bench.journal.append([_call(f"k{number}")])
    while claims := bench.claim(lease):
        bench.journal.commit(lease, [done(claim) for claim in claims])
    with bench.database.transaction() as transaction:
        transaction.execute("UPDATE lane SET floor_seq = 3, pruned_seq = 3 WHERE id = 'a'")

    num_forgotten = _forget(bench)
    answers = [bench.journal.append([_call(key, body)])[0] for key, body in (("k1", b"call"), ("k2", b"else"))]
    (kept,), (new,) = bench.journal.append([_call("k3")]), bench.journal.append([_call("k4")])

    assert num_forgotten == 2 and _seqs(bench, "a")[:2] == [0, 3]
    assert [type(answer) for answer in answers] == [Expired, Expired] and "a:req:1" in str(answers[0])
    assert isinstance(kept, Accepted) and not kept.is_new and kept.request_id == "a:req:3"
    assert isinstance(new, Accepted) and new.is_new and new.request_id == "a:req:4"


def test_custom_losses_stay_for_whoever_replays_what_names_them(bench: Bench) -> None:
    loss = submission("session-t0:loss", 0, OperationKind.CREATE_CUSTOM_LOSS, body=b"graph")
    bench.journal.record_loss(loss, result=b"{}")

    _forget(bench, after_s=10 * MONTH_S)

    assert bench.journal.loss_definition("session-t0:loss", 0) == b"graph"
    assert not bench.journal.record_loss(loss, result=b"{}").is_new


def test_the_calls_of_a_data_set_that_has_ended_go(bench: Bench, lease: Lease) -> None:
    new = NewProcessor(
        id="p", tenant="t0", session="session-t0", processor_type="dataset", class_type="Dataset", created_at=0.0
    )
    bench.journal.open_lane(new)
    with bench.database.transaction() as transaction:
        transaction.execute(
            "INSERT INTO operation (request_id, tenant, lane, mesh, seq, kind, digest, state, attempts, claim_epoch,"
            " num_tokens, device_s, expired, accepted_at, not_before, finished_at)"
            " WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 9)"
            " SELECT 'p:req:' || CAST(i AS TEXT), 't0', 'p', '', i, 'call', '', 'done', 1, 1, 0, 0, TRUE, 0, 0, 0"
            " FROM n"
        )
        transaction.execute("UPDATE lane SET head_seq = 10, max_seq = 9 WHERE id = 'p'")

    alive = _forget(bench)
    bench.stores.processors.end("p", "t0")
    ended = _forget(bench)

    assert (alive, ended) == (0, 8) and _seqs(bench, "p") == [0, 9]


# -- what was used and done -------------------------------------------------------------------------------------------


def test_usage_and_audit_have_periods_of_their_own(bench: Bench, make_worker: MakeWorker, clock: HandClock) -> None:
    _trained(bench, make_worker())
    _forget(bench)
    forgetting, audit = bench.stores.forgetting, bench.stores.audit

    kept = forgetting.forget_usage(older_than_s=100 * DAY_S), audit.forget(older_than_s=100 * DAY_S)
    clock.move(100 * DAY_S)
    gone = forgetting.forget_usage(older_than_s=100 * DAY_S), audit.forget(older_than_s=100 * DAY_S)

    assert kept == (0, 0) and gone[0] > 0 and gone[1] == 1
    assert _told(bench).audit == [] and bench.rows("SELECT COUNT(*) FROM past_work") == [(0,)]


def test_a_blob_that_a_forgotten_operation_was_sent_with_is_given_up(
    bench: Bench, lease: Lease, store: FolderStore
) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 1), submission("a", 2))
    bench.run(lease)
    with bench.database.transaction() as transaction:
        transaction.execute(
            "UPDATE operation SET kind = 'call', payload = NULL, payload_blob = 'payloads/x'"
            " WHERE lane = 'a' AND seq = 1"
        )
        transaction.execute("UPDATE lane SET floor_seq = 2, pruned_seq = 2 WHERE id = 'a'")

    _forget(bench)

    assert _seqs(bench, "a") == [0, 2]
    assert bench.rows("SELECT key FROM doomed_blob") == [("payloads/x",)]
    assert bench.status("a", 2).state is OperationState.DONE


# -- whole runs, data sets and sampling sessions -----------------------------------------------------------------------


def _forget_lanes(bench: Bench, *, after_s: float = 2 * MONTH_S) -> int:
    """As housekeeping does, once the operations have had their time."""
    _forget(bench, after_s=after_s)
    return bench.stores.gone_lanes.forget(older_than_s=MONTH_S)


def _lanes(bench: Bench) -> list[object]:
    return [row[0] for row in bench.rows("SELECT id FROM lane ORDER BY id")]


def test_an_unloaded_run_goes_with_its_last_checkpoint_and_whatever_comes_for_it_is_gone(
    bench: Bench, make_worker: MakeWorker
) -> None:
    worker = make_worker()
    first = bench.adapter("a")
    _submit(bench, *_steps(1, 2), save("kept"))
    bench.adapters.unload("a", "t0")
    bench.adapter("living")
    worker.drain()
    told = _told(bench)
    (path,) = (row[0] for row in bench.rows("SELECT path FROM checkpoint"))

    with_its_checkpoint = _forget_lanes(bench)
    bench.stores.checkpoints.delete("t0", str(path))
    soon_after = _forget_lanes(bench, after_s=DAY_S)
    held = bench.stores.holdings.of("t0").num_runs
    later = _forget_lanes(bench)

    assert (with_its_checkpoint, soon_after, later) == (0, 0, 1) and _lanes(bench) == ["living"]
    assert (held, bench.stores.holdings.of("t0").num_runs) == (2, 1)
    assert _told(bench).used.items() >= told.used.items() and len(_told(bench).audit) >= len(told.audit)
    for table in ("snapshot", "branch", "past_steps", "forgotten"):
        assert bench.rows(f"SELECT COUNT(*) FROM {table}") == [(0,)], table
    again = bench.append(first, submission("a", 1), submission("a", 99), submission("never", 1))
    assert [type(one) for one in again] == [Expired, Expired, Expired, NotFound]
    assert "TWINKLE_RUN_RETENTION_S" in str(again[0])
    assert bench.append(replace(submission("a", 1), tenant="t1"))[0].code == NotFound.code
    with pytest.raises(Expired):
        bench.journal.open_lane(new_adapter("a"))
    (status,) = bench.journal.statuses([request_id_of("a", 3)]).values()
    assert status.tenant == "t0" and status.status.expired


def test_a_run_that_another_began_from_stays_and_so_do_its_sessions_losses(
    bench: Bench, make_worker: MakeWorker
) -> None:
    worker = make_worker()
    bench.adapter("a")
    loss = submission("session-t0:loss", 0, OperationKind.CREATE_CUSTOM_LOSS, body=b"graph")
    bench.journal.record_loss(loss, result=b"{}")
    _submit(bench, *_steps(1))
    worker.drain()
    bench.branches.fork(new_adapter("b"), source="a", at=2)
    worker.drain()
    bench.adapters.unload("a", "t0")
    worker.drain()

    with_a_fork = _forget_lanes(bench)
    bench.adapters.unload("b", "t0")
    worker.drain()
    passes = [_forget_lanes(bench) for _ in range(4)]

    assert with_a_fork == 0 and sum(passes) == 3 and _lanes(bench) == []
    assert isinstance(bench.journal.statuses(["session-t0:loss:req:0"])["session-t0:loss:req:0"], OwnedStatus)
    with pytest.raises(Expired):
        bench.journal.record_loss(loss, result=b"{}")


def test_a_sampling_session_goes_when_its_client_is_gone_and_a_shared_one_when_its_checkpoint_is(
    bench: Bench, lease: Lease
) -> None:
    bench.journal.open_lane(new_sampler("s"))
    with bench.database.transaction() as transaction:
        transaction.execute("UPDATE session SET idempotency_key = 'openai' WHERE id = 'session-t0'")
    _sample(bench, lease, 1, DRAWN)
    used = bench.stores.accounting.work("t0", start=0, end=FOR_EVER)

    shared = _forget_lanes(bench)
    with bench.database.transaction() as transaction:
        transaction.execute("UPDATE sampling_session SET checkpoint = 'tinker://r/weights/x'")
        transaction.execute(
            "INSERT INTO past_checkpoint (path, tenant, adapter, session, base_model, size_bytes, created_at, ended_at)"
            " VALUES ('tinker://r/weights/x', 't0', 'r', 'session-t0', 'base', 1, 0, 1)"
        )
    without_its_checkpoint = _forget_lanes(bench)

    assert (shared, without_its_checkpoint) == (0, 1) and _lanes(bench) == []
    assert bench.stores.accounting.work("t0", start=0, end=FOR_EVER) == used
    assert [type(one) for one in bench.append(submission("s", DRAWN, OperationKind.SAMPLE))] == [Expired]
    with pytest.raises(Expired):
        bench.journal.open_lane(new_sampler("s"))


def test_of_a_client_that_still_speaks_nothing_goes_and_a_session_outlives_what_is_told_of_it(
    bench: Bench, lease: Lease
) -> None:
    bench.journal.open_lane(new_sampler("s"))
    _sample(bench, lease, 1)
    bench.clock.move(3 * MONTH_S)
    bench.stores.sessions.heartbeat("t0", "session-t0")
    speaking = _forget_lanes(bench, after_s=DAY_S), _forget_lanes(bench, after_s=DAY_S)
    silent = _forget_lanes(bench)

    def forget_sessions() -> bool:
        bench.stores.sessions.forget(older_than_s=MONTH_S)
        return not bench.rows("SELECT id FROM session WHERE id = 'session-t0'")

    while_usage_names_it = forget_sessions()
    bench.clock.move(3 * MONTH_S)
    bench.stores.forgetting.forget_usage(older_than_s=MONTH_S)

    assert speaking == (0, 0) and silent == 1 and not while_usage_names_it
    assert forget_sessions() and bench.rows("SELECT COUNT(*) FROM gone_lane") == [(0,)]
    assert [type(one) for one in bench.append(submission("s", 1, OperationKind.SAMPLE))] == [NotFound]


def test_a_data_set_that_has_ended_goes_and_one_that_is_named_anew_takes_another_number(bench: Bench) -> None:
    new = NewProcessor(
        id="p", tenant="t0", session="session-t0", processor_type="dataset", class_type="Dataset", created_at=0.0
    )
    bench.journal.open_lane(new)
    alive = _forget_lanes(bench)
    bench.stores.processors.end("p", "t0")

    assert (alive, _forget_lanes(bench)) == (0, 1) and _lanes(bench) == []
    with pytest.raises(Expired):
        bench.journal.open_lane(new)


def test_what_checkpoints_took_up_is_told_without_their_run_and_for_its_time(
    bench: Bench, make_worker: MakeWorker
) -> None:
    worker = make_worker()
    bench.adapter("a")
    _submit(bench, save("kept"))
    bench.adapters.unload("a", "t0")
    worker.drain()
    bench.clock.move(DAY_S)
    (path,) = (row[0] for row in bench.rows("SELECT path FROM checkpoint"))
    bench.stores.checkpoints.delete("t0", str(path))
    accounting, end = bench.stores.accounting, int(bench.clock.now()) + 1
    stored = accounting.gigabyte_hours("t0", start=0, end=end)

    _forget_lanes(bench)
    kept = accounting.gigabyte_hours("t0", start=0, end=end)
    bench.stores.forgetting.forget_usage(older_than_s=MONTH_S)

    assert stored and kept == stored and _lanes(bench) == []
    assert bench.rows("SELECT COUNT(*) FROM past_checkpoint") == [(0,)]
    assert accounting.gigabyte_hours("t0", start=0, end=end) == {}
