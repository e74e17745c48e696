"""A mesh worker when something breaks: what ends how, what is tried again, and what never happens twice."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from structlog.testing import capture_logs

from harness.clock import HandClock
from harness.journal import Bench, new_sampler
from harness.operations import (
    Request,
    create,
    forward_backward,
    load,
    optim_step,
    replayed,
    sample_body,
    save,
    submit_run,
)
from harness.worker import BreakableBlobs, Killed, MakeWorker, WorkerRig
from twinkle.core.errors import OutOfMemory, StatementFailed, StorageUnavailable
from twinkle.core.operation import OperationKind, OperationState, Payload, Submission
from twinkle.storage.journal.records import PastOperation
from twinkle.workers.adapters.parked import Resident
from twinkle.workers.engines.null_engine import NullState


@pytest.fixture
def bench(sqlite_url: str, clock: HandClock) -> Iterator[Bench]:
    """One database is enough here: the contract of both is tested next door."""
    bench = Bench(sqlite_url, clock)
    yield bench
    bench.close()


def _submit_sample(bench: Bench, *numbers: int) -> None:
    bench.journal.open_lane(new_sampler("s"))
    for number in numbers:
        payload = Payload(inline=sample_body("s", number))
        kind = OperationKind.SAMPLE
        bench.append(Submission(tenant="t0", lane="s", seq=number, kind=kind, digest="d", payload=payload))


def _drain_with_pauses(worker: WorkerRig) -> None:
    for _ in range(20):
        worker.drain()
        worker.clock.move(60)


def _assert_as_one_by_one(worker: WorkerRig, bench: Bench, run: list[Request | None], adapter: str = "a") -> None:
    truth, outcomes = replayed(run)
    for seq, (code, _) in enumerate(outcomes):
        status = bench.status(adapter, seq)
        assert status.state.is_final, seq
        assert (status.failure.code if status.failure else "done") == code, seq
    state = worker.state_before(adapter, len(run))
    assert (state.applied, state.pending, state.steps) == (truth.applied, truth.pending, truth.steps)


def test_a_run_without_trouble_ends_as_one_by_one(bench: Bench, make_worker: MakeWorker) -> None:
    run = submit_run(bench, forward_backward(1), optim_step(), save("x"), forward_backward(2), load("x"), optim_step())
    worker = make_worker()

    worker.drain()

    _assert_as_one_by_one(worker, bench, run)
    assert sorted(worker.publisher.published) == [f"a:req:{seq}" for seq in range(len(run))]


@pytest.mark.parametrize("when", ["after_claim", "before_commit", "after_commit"])
def test_a_worker_killed_at_any_moment_leaves_nothing_applied_twice(
    bench: Bench, make_worker: MakeWorker, when: str
) -> None:
    run = submit_run(bench, forward_backward(1), optim_step(), forward_backward(2), forward_backward(3), optim_step())
    for batches in range(len(run)):
        worker = make_worker(max_attempts=100)
        worker.drain(batches)
        setattr(worker.journal, when, _die)
        with suppress(Killed):
            worker.drain()

    last = make_worker()
    _drain_with_pauses(last)

    _assert_as_one_by_one(last, bench, run)


def test_a_result_that_cannot_be_stored_is_computed_again_and_applied_once(
    bench: Bench, make_worker: MakeWorker, store: BreakableBlobs
) -> None:
    run = submit_run(bench, forward_backward(1), optim_step(), forward_backward(2), optim_step())
    worker = make_worker(inline_bytes=1)
    worker.drain(1)
    for _ in run[1:]:
        store.refuse("put", "results", 1)
        worker.drain(1)
        worker.clock.move(60)
        worker.drain(1)

    _assert_as_one_by_one(worker, bench, run)


@pytest.mark.parametrize("error", [RuntimeError("device lost"), OutOfMemory("device is full")])
def test_a_device_that_fails_for_a_moment_costs_a_retry_and_nothing_else(
    bench: Bench, make_worker: MakeWorker, error: Exception
) -> None:
    run = submit_run(bench, forward_backward(1), forward_backward(2), optim_step(), optim_step())
    worker = make_worker()
    worker.engine.pass_errors = [error]
    worker.engine.step_errors = [error]

    _drain_with_pauses(worker)

    _assert_as_one_by_one(worker, bench, run)
    assert [name for name, _ in worker.reporter.events].count("retried") == 2


def test_a_device_that_keeps_failing_ends_the_operation_and_leaves_the_adapter_as_it_was(
    bench: Bench, make_worker: MakeWorker
) -> None:
    submit_run(bench, forward_backward(1), optim_step(), optim_step(0.7))
    worker = make_worker(max_attempts=2)
    worker.engine.step_errors = [RuntimeError("secret detail"), RuntimeError("secret detail")]

    _drain_with_pauses(worker)

    failure = bench.status("a", 2).failure
    assert failure is not None and failure.code == "internal" and "attempt 2 of 2" in failure.message
    assert "secret" not in failure.message
    truth, _ = replayed([create(), forward_backward(1), optim_step(0.7)])
    assert worker.state_before("a", 4).applied == truth.applied


def test_an_optim_step_after_a_failed_pass_is_refused_names_it_and_empties_the_gradients(
    bench: Bench, make_worker: MakeWorker
) -> None:
    run = submit_run(
        bench, forward_backward(1), forward_backward(is_bad=True), optim_step(), forward_backward(2), optim_step()
    )
    worker = make_worker()

    worker.drain()

    failure = bench.status("a", 3).failure
    assert failure is not None and "operation 2 of its accumulation window" in failure.message
    _assert_as_one_by_one(worker, bench, run)


def test_a_replay_empties_the_gradients_where_the_window_had_failed(bench: Bench, make_worker: MakeWorker) -> None:
    run = submit_run(
        bench, forward_backward(1), forward_backward(is_bad=True), optim_step(), forward_backward(2), optim_step()
    )
    make_worker().drain(5)

    successor = make_worker()
    successor.drain()

    _assert_as_one_by_one(successor, bench, run)


@pytest.mark.parametrize("rate", [float("nan"), float("inf")])
def test_a_bad_optim_step_leaves_the_adapter_unchanged_and_the_next_is_served(
    bench: Bench, make_worker: MakeWorker, rate: float
) -> None:
    submit_run(bench, forward_backward(1))
    broken = b'{"model_id":"a","seq_id":2,"adam_params":{"learning_rate":%s}}' % (b"null" if rate != rate else b"1e999")
    payload = Payload(inline=broken)
    kind = OperationKind.OPTIM_STEP
    bench.append(Submission(tenant="t0", lane="a", seq=2, kind=kind, digest="d", payload=payload))
    bench.append(optim_step().numbered("a", 3))
    worker = make_worker()

    worker.drain()

    failure = bench.status("a", 2).failure
    assert failure is not None and failure.category == "user" and "learning_rate" in failure.message
    truth, _ = replayed([create(), forward_backward(1), optim_step()])
    assert worker.state_before("a", 4).applied == truth.applied


def test_an_operation_that_kills_its_worker_ends_and_its_neighbours_are_unharmed(
    bench: Bench, make_worker: MakeWorker
) -> None:
    poison = submit_run(bench, forward_backward(1), adapter="a")
    healthy = submit_run(bench, forward_backward(2), adapter="b")
    make_worker().drain(1)
    deaths = 0
    for _ in range(10):
        worker = make_worker(max_attempts=3)
        run_passes = worker.engine.run_passes

        def die_of_it(passes, run_passes=run_passes):  # type: ignore[no-untyped-def]
            if any(item.body.model_id == "a" for item in passes):
                raise Killed
            return run_passes(passes)

        worker.engine.run_passes = die_of_it  # type: ignore[method-assign]
        try:
            worker.drain()
        except Killed:
            deaths += 1

    assert deaths == 3
    failure = bench.status("a", len(poison) - 1).failure
    assert failure is not None and failure.code == "poison"
    assert bench.status("b", len(healthy) - 1).state is OperationState.DONE


def test_passes_of_several_adapters_share_a_step(bench: Bench, make_worker: MakeWorker) -> None:
    for adapter in "abc":
        submit_run(bench, forward_backward(1), adapter=adapter)
    worker = make_worker()

    worker.drain()

    assert worker.engine.batch_sizes == [3]


def test_what_a_fenced_worker_computed_is_forgotten_also_by_itself(bench: Bench, make_worker: MakeWorker) -> None:
    run = submit_run(bench, forward_backward(1), optim_step(), forward_backward(2), optim_step())
    zombie, thief = make_worker(), make_worker()
    zombie.drain(2)

    def steal() -> None:
        thief.clock.move(1000)
        thief.drain(1)

    zombie.journal.before_commit = steal
    zombie.drain()
    assert zombie.keeper.current() is None

    zombie.clock.move(1000)
    _drain_with_pauses(zombie)

    _assert_as_one_by_one(zombie, bench, run)
    assert set(zombie.publisher.published).isdisjoint(thief.publisher.published)


def test_a_commit_whose_answer_was_lost_stands_and_is_not_repeated(bench: Bench, make_worker: MakeWorker) -> None:
    run = submit_run(bench, forward_backward(1), optim_step(), forward_backward(2), optim_step())
    worker = make_worker()
    worker.drain(2)
    worker.journal.after_commit = _stay_silent

    _drain_with_pauses(worker)

    _assert_as_one_by_one(worker, bench, run)


def test_an_operation_that_ended_under_the_workers_hands_costs_its_own_adapter_a_replay_and_no_other(
    bench: Bench, make_worker: MakeWorker
) -> None:
    """Housekeeping failed a pass that had taken too long: what the worker made of it must not stay in memory."""
    runs = {adapter: submit_run(bench, forward_backward(1), adapter=adapter) for adapter in "ab"}
    worker = make_worker()
    worker.drain(1)
    neighbour = worker.state_before("b", 1)

    def expire() -> None:
        with bench.database.transaction() as transaction:
            transaction.execute("UPDATE operation SET accepted_at = accepted_at - 9000 WHERE request_id = 'a:req:1'")
        worker.clock.move(601.0)
        assert bench.upkeep.expire_overdue(deadline_s=3600.0) == ["a:req:1"]

    worker.journal.before_commit = expire
    worker.drain()
    bench.append(*(optim_step().numbered(adapter, 2) for adapter in "ab"))
    worker.drain()

    assert worker.keeper.current() is not None
    assert worker.state_before("b", 3) is neighbour
    _assert_as_one_by_one(worker, bench, [*runs["b"], optim_step()], "b")
    codes = [failure.code if (failure := bench.status("a", seq).failure) else "done" for seq in range(3)]
    assert codes == ["done", "deadline", "window_failed"]
    truth, _ = replayed([create()])
    assert worker.state_before("a", 3).applied == truth.applied


def test_what_is_not_in_the_workers_hands_any_more_is_forgotten_alone_and_claimed_again(
    bench: Bench, make_worker: MakeWorker
) -> None:
    runs = {adapter: submit_run(bench, forward_backward(1), optim_step(), adapter=adapter) for adapter in "ab"}
    worker = make_worker()
    worker.drain(1)
    neighbour = worker.state_before("b", 1)
    lease = worker.keeper.current()
    assert lease is not None
    worker.journal.before_commit = lambda: bench.journal.give_back(lease, ["a:req:1"])

    worker.drain()

    assert worker.keeper.current() == lease
    assert worker.state_before("b", 3) is neighbour
    for adapter, run in runs.items():
        _assert_as_one_by_one(worker, bench, run, adapter)
    assert bench.status("a", 1).attempt == 2


def test_every_failed_operation_has_one_line_in_the_log_and_nothing_of_what_was_sent(
    bench: Bench, make_worker: MakeWorker
) -> None:
    secret = 987_654_321
    submit_run(
        bench,
        forward_backward(secret, is_bad=True),
        optim_step(),
        forward_backward(secret, rejection=f"tokens: {secret} is too large"),
        load(f"secret{secret}"),
        forward_backward(secret),
    )
    _submit_sample(bench, 0)
    worker = make_worker(max_attempts=1)
    with capture_logs() as lines:
        worker.drain(5)
        worker.engine.pass_errors = [RuntimeError("device lost")]
        worker.drain()

    failed = [line for line in lines if line["event"] == "operation.failed"]
    assert [(line["log_level"], line["op"], line["kind"], line["reason"], line["category"]) for line in failed] == [
        ("warning", "a:req:1", "forward_backward", "invalid_input", "user"),
        ("warning", "a:req:2", "optim_step", "window_failed", "user"),
        ("warning", "a:req:3", "forward_backward", "user", "user"),
        ("warning", "a:req:4", "load_weights", "invalid_input", "user"),
        ("warning", "a:req:5", "forward_backward", "internal", "server"),
    ]
    assert all((line["tenant"], line["adapter"]) == ("t0", "a") for line in failed)
    assert str(secret) not in str(lines)


def test_no_error_of_a_snapshot_is_lost_and_a_later_one_covers_it(
    bench: Bench, make_worker: MakeWorker, store: BreakableBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that nobody thought of: the adapter does not count as covered."""
    run = submit_run(bench, forward_backward(1), optim_step())
    worker = make_worker(snapshot_every_ops=3)
    put = store.put

    def fill_up(key: str, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "put", fill_up)
    with capture_logs() as lines:
        worker.drain()
        worker.settle()
    assert [(line["log_level"], line["adapter"], line["seq"]) for line in lines if line["event"] == "snapshot.failed"]
    assert bench.snapshots.nearest("a", at=len(run)) is None
    monkeypatch.setattr(store, "put", put)

    worker.worker.close()

    snapshot = bench.snapshots.nearest("a", at=len(run))
    assert snapshot is not None and snapshot.seq == len(run) - 1


def test_an_error_nobody_expected_leaves_memory_no_further_than_the_journal(
    bench: Bench, make_worker: MakeWorker
) -> None:
    run = submit_run(bench, forward_backward(1), optim_step())
    worker = make_worker()
    for _ in run:
        worker.journal.before_commit = _go_wrong
        with pytest.raises(ZeroDivisionError):
            worker.drain()
        worker.drain(1)

    _assert_as_one_by_one(worker, bench, run)


@pytest.mark.parametrize("parked_bytes", [0, 200, 1 << 20])
def test_adapters_that_had_to_leave_the_device_come_back_as_they_were(
    bench: Bench, make_worker: MakeWorker, parked_bytes: int
) -> None:
    requests = [forward_backward(1), optim_step(), forward_backward(2), forward_backward(3), optim_step()]
    runs = {adapter: submit_run(bench, *requests, adapter=adapter) for adapter in "abcde"}
    worker = make_worker(max_resident=1, parked_bytes=parked_bytes)

    worker.drain()

    for adapter, run in runs.items():
        _assert_as_one_by_one(worker, bench, run, adapter)


def test_a_parked_adapter_goes_on_without_a_replay_open_gradients_included(
    bench: Bench, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {adapter: submit_run(bench, forward_backward(1), forward_backward(2), adapter=adapter) for adapter in "abc"}
    worker = make_worker(max_resident=1, parked_bytes=1 << 20)
    worker.drain()
    replays: list[str] = []
    history = worker.journal.history

    def counted(adapter: str, **bounds: int) -> list[PastOperation]:
        replays.append(adapter)
        return history(adapter, **bounds)

    monkeypatch.setattr(worker.journal, "history", counted)
    for adapter, run in runs.items():
        bench.append(optim_step().numbered(adapter, len(run)))
        run.append(optim_step())

    worker.drain()

    assert replays == []
    for adapter, run in runs.items():
        _assert_as_one_by_one(worker, bench, run, adapter)


def test_the_adapter_needed_last_leaves_the_device_not_the_longest_unused(
    bench: Bench, make_worker: MakeWorker
) -> None:
    for adapter in "abc":
        submit_run(bench, adapter=adapter)
    worker = make_worker(max_resident=2, parked_bytes=1 << 20)
    worker.drain()
    for adapter in "abc":
        bench.append(forward_backward(1).numbered(adapter, 1))
    bench.append(*(forward_backward(seq).numbered("a", seq) for seq in (2, 3)))

    worker.drain(1)

    assert "a" in worker.residents.used(within_s=1e9)
    parked = {adapter for adapter, _ in worker.residents._parked.items()}
    assert parked in ({"b"}, {"c"})


def test_a_pinned_adapter_stays_on_the_device_but_pins_never_take_more_than_half(
    bench: Bench, make_worker: MakeWorker, clock: HandClock
) -> None:
    parking = bench.adapters
    for adapter in "abcd":
        submit_run(bench, adapter=adapter)
    for adapter in "ab":
        assert parking.pin(adapter, is_pinned=True)
        clock.move(1)
    worker = make_worker(max_resident=2, parked_bytes=1 << 20)
    worker.drain()
    for adapter, seq in (("c", 1), ("d", 1), ("c", 2), ("d", 2)):
        bench.append(forward_backward(1).numbered(adapter, seq))
        worker.drain()

    parked = {adapter for adapter, _ in worker.residents._parked.items()}
    assert "a" not in parked and "b" in parked
    assert not parking.pin("nobody", is_pinned=True)


class _Watched(OrderedDict[str, Resident[NullState]]):
    """Residents, and how many there ever were at once."""

    most = 0

    def __setitem__(self, adapter: str, resident: Resident[NullState]) -> None:
        super().__setitem__(adapter, resident)
        self.most = max(self.most, len(self))


@pytest.mark.parametrize("num_pinned", [0, 3])
def test_there_are_never_more_adapters_on_the_device_than_it_holds(
    bench: Bench, make_worker: MakeWorker, clock: HandClock, num_pinned: int
) -> None:
    adapters = [f"a{number}" for number in range(8)]
    runs = {
        adapter: submit_run(
            bench, forward_backward(1), optim_step(), forward_backward(2), optim_step(), adapter=adapter
        )
        for adapter in adapters
    }
    for adapter in adapters[:num_pinned]:
        clock.move(1)
        bench.adapters.pin(adapter, is_pinned=True)
    worker = make_worker(max_resident=3, parked_bytes=1 << 20)
    watched = worker.residents._residents = _Watched()

    worker.drain()

    assert watched.most == 3
    assert max(worker.engine.batch_sizes) == (2 if num_pinned else 3), "a batch leaves room for what is pinned"
    for adapter, run in runs.items():
        _assert_as_one_by_one(worker, bench, run, adapter)


def test_a_closing_worker_snapshots_what_is_parked(bench: Bench, make_worker: MakeWorker) -> None:
    runs = {adapter: submit_run(bench, forward_backward(1), optim_step(), adapter=adapter) for adapter in "ab"}
    worker = make_worker(max_resident=1, parked_bytes=1 << 20)
    worker.drain()

    worker.worker.close()

    for adapter, run in runs.items():
        snapshot = bench.snapshots.nearest(adapter, at=len(run))
        assert snapshot is not None and snapshot.seq == len(run) - 1


def test_samples_given_up_by_a_closing_worker_are_not_blamed(bench: Bench, make_worker: MakeWorker) -> None:
    _submit_sample(bench, 0, 1)
    worker = make_worker()
    worker.samples.run_slice = lambda execution, **_: None  # type: ignore[method-assign]
    worker.keeper.try_acquire()
    worker.worker._sampling.work_once(worker.keeper.current(), is_training=False)

    worker.worker.close()

    attempts = bench.rows("SELECT state, attempts FROM operation WHERE kind = 'sample'")
    assert attempts == [("queued", 0), ("queued", 0)]


def test_the_sampler_takes_no_more_requests_than_their_sequences_have_room(
    bench: Bench, make_worker: MakeWorker
) -> None:
    _submit_sample(bench)
    for number in range(3):
        payload = Payload(inline=sample_body("s", number))
        sample = Submission(
            tenant="t0", lane="s", seq=number, kind=OperationKind.SAMPLE, digest="d", payload=payload, num_sequences=3
        )
        bench.append(sample)
    worker = make_worker()
    worker.samples.run_slice = lambda execution, **_: None  # type: ignore[method-assign]
    worker.keeper.try_acquire()

    for _ in range(3):
        worker.worker._sampling.work_once(worker.keeper.current(), is_training=False)

    assert worker.samples.under_way == ["s:req:0"]
    assert worker.samples.room == 1


def test_a_sample_that_could_not_be_given_back_is_tried_again_all_the_same(
    bench: Bench, make_worker: MakeWorker
) -> None:
    _submit_sample(bench, 0)
    worker = make_worker()
    worker.engine.sample_errors = [RuntimeError("device lost")]
    worker.journal.before_give_back = _stay_silent

    _drain_with_pauses(worker)

    assert bench.status("s", 0).state is OperationState.DONE


def test_a_name_may_use_all_the_characters_it_is_allowed(bench: Bench, make_worker: MakeWorker) -> None:
    run = submit_run(bench, save("n" * 255), load("n" * 255))
    worker = make_worker()

    _drain_with_pauses(worker)

    _assert_as_one_by_one(worker, bench, run)


def test_the_same_bytes_of_two_results_expire_each_in_its_own_time(
    bench: Bench, make_worker: MakeWorker, store: BreakableBlobs, clock: HandClock
) -> None:
    submit_run(bench, forward_backward(1), adapter="a")
    worker = make_worker(inline_bytes=1)
    worker.drain()
    clock.move(5000)
    submit_run(bench, forward_backward(1), adapter="b")
    worker.drain()
    clock.move(5000)

    for key in bench.upkeep.expire_results(older_than_s=6000):
        store.delete(key)

    assert bench.status("a", 1).expired
    result = bench.status("b", 1).result
    assert result is not None and result.blob is not None
    assert store.get(result.blob)


def test_outcomes_that_the_journal_will_never_take_end_their_operations_at_the_first_attempt(
    bench: Bench, make_worker: MakeWorker
) -> None:
    submit_run(bench, forward_backward(1), optim_step())
    worker = make_worker()
    worker.drain(batches=1)
    worker.journal.before_commit = lambda: bench.rows("SELECT hat FROM operation")

    with capture_logs() as lines:
        _drain_with_pauses(worker)

    (told, *_) = [line for line in lines if line["event"] == "operation.failed"]
    assert (told["op"], told["tenant"], told["attempt"]) == ("a:req:1", "t0", 1)
    assert (told["reason"], told["category"]) == (StatementFailed.code, "server")
    failure = bench.status("a", 1).failure
    assert failure is not None and failure.code == StatementFailed.code
    assert "incident" in failure.message and "SELECT" not in failure.message
    assert bench.rows("SELECT attempts FROM operation WHERE lane = 'a' AND seq = 1") == [(1,)]
    step = bench.status("a", 2).failure
    assert step is not None and step.code == "window_failed"
    assert worker.state_before("a", 3).pending == ""


def test_a_worker_whose_journal_takes_nothing_at_all_says_so_and_does_not_go_round(
    bench: Bench, make_worker: MakeWorker
) -> None:
    submit_run(bench, forward_backward(1))
    worker = make_worker()
    _refuse_commits(worker, lambda: bench.rows("SELECT hat FROM operation"))

    with pytest.raises(StatementFailed):
        worker.drain()


def test_a_worker_that_is_to_end_waits_for_no_database(bench: Bench, make_worker: MakeWorker) -> None:
    run = submit_run(bench, forward_backward(1), optim_step())
    worker = make_worker()
    is_waiting = threading.Event()

    def stay_away() -> None:
        is_waiting.set()
        _stay_silent()

    _refuse_commits(worker, stay_away)
    worker.keeper.try_acquire()
    thread = threading.Thread(target=worker.drain, daemon=True)
    thread.start()
    assert is_waiting.wait(10)

    worker.worker.close()
    thread.join(10)

    assert not thread.is_alive()
    bench.database.close()
    successor = make_worker()
    _drain_with_pauses(successor)
    _assert_as_one_by_one(successor, bench, run)


def test_a_worker_that_has_lost_its_mesh_waits_for_no_database(bench: Bench, make_worker: MakeWorker) -> None:
    run = submit_run(bench, forward_backward(1), optim_step())
    worker = make_worker()

    def lose_the_mesh() -> None:
        worker.keeper.give_up()
        _stay_silent()

    _refuse_commits(worker, lose_the_mesh)

    worker.drain()

    successor = make_worker()
    _drain_with_pauses(successor)
    _assert_as_one_by_one(successor, bench, run)


def _refuse_commits(worker: WorkerRig, refuse: Callable[[], object]) -> None:
    """Let no commit through any more."""

    def again() -> None:
        worker.journal.before_commit = again
        refuse()

    worker.journal.before_commit = again


def _die() -> None:
    raise Killed


def _stay_silent() -> None:
    raise StorageUnavailable("the journal's database did not answer")


def _go_wrong() -> None:
    raise ZeroDivisionError
