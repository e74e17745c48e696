"""Weights that were saved without a name: sampled from as they were, whatever dies, paid for, and ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from harness.clock import HandClock
from harness.journal import Bench, digest, new_sampler
from harness.operations import (
    Request,
    create,
    forward_backward,
    load,
    optim_step,
    replayed,
    sample_body,
    save,
    save_for_sampler,
)
from harness.worker import KEEP_NOTHING, BreakableBlobs, Killed, MakeWorker, WorkerRig
from twinkle.core.ids import request_id_of
from twinkle.core.operation import OperationKind, OperationState, Payload, Submission
from twinkle.storage.sampling.ephemeral import NewEphemeralWeights
from twinkle.storage.sampling.sampling_sessions import Patience, SamplingSessions

PATIENCE = Patience(idle_s=86_400.0, silent_s=3900.0)


class Run:
    """One adapter's operations as they are sent, and the samples from what was saved of it."""

    def __init__(self, bench: Bench, adapter: str = "a") -> None:
        self._bench = bench
        self.adapter = adapter
        self.requests: list[Request | None] = [create()]
        self._num_samples = 0
        bench.adapter(adapter)

    def send(self, *requests: Request) -> None:
        first = len(self.requests)
        self.requests += requests
        self._bench.append(*(one.numbered(self.adapter, first + place) for place, one in enumerate(requests)))

    def train(self, num_steps: int) -> None:
        for step in range(num_steps):
            self.send(forward_backward(step, len(self.requests)), optim_step())

    def save(self, *, ttl_s: int | None = None) -> str:
        """The sampling session of weights saved now."""
        self.send(save_for_sampler(ttl_s=ttl_s))
        return f"session-t0:sample:{len(self.requests) - 1}"

    def sample(self, session: str) -> str:
        """The future of a sample."""
        body = sample_body(session, self._num_samples)
        self._num_samples += 1
        submission = Submission(
            tenant="t0",
            lane=session,
            seq=self._num_samples,
            kind=OperationKind.SAMPLE,
            digest=digest(body),
            payload=Payload(inline=body),
            num_tokens=5,
        )
        (accepted,) = self._bench.append(submission)
        return accepted.request_id  # type: ignore[union-attr]

    def truth(self, session: str) -> str:
        """What the weights were when they were saved."""
        adapter, _ = replayed(self.requests[: int(session.rpartition(":")[2]) + 1])
        return adapter.applied


@pytest.fixture
def run(bench: Bench) -> Run:
    return Run(bench)


@pytest.fixture
def ephemeral(bench: Bench, clock: HandClock) -> SamplingSessions:
    return bench.sampling_sessions


def heard_of(bench: Bench, session: str = "session-t0") -> None:
    with bench.database.transaction() as transaction:
        transaction.execute("UPDATE session SET heartbeat_at = ? WHERE id = ?", (bench.clock.now(), session))


def finish(bench: Bench, session: str = "session-t0") -> None:
    with bench.database.transaction() as transaction:
        transaction.execute("UPDATE session SET finished_at = ? WHERE id = ?", (bench.clock.now(), session))


def sampled_from(worker: WorkerRig, request_id: str) -> str:
    state = worker.engine.sampled_from[request_id]
    assert state is not None, "sampled from the base model"
    return state.applied


def error_of(bench: Bench, request_id: str) -> str:
    status = bench.journal.statuses([request_id])[request_id].status
    assert status.failure is not None, status.state
    assert status.failure.category == "user"
    return status.failure.message


def still_open(bench: Bench) -> list[object]:
    rows = bench.rows("SELECT sampling_session FROM ephemeral_weights WHERE ended_at IS NULL ORDER BY seq")
    return [row[0] for row in rows]


def stored(tmp_path: Path, folder: str) -> Sequence[Path]:
    return [path for path in (tmp_path / "objects" / folder).rglob("*") if path.is_file()]


# -- as they were -----------------------------------------------------------------------------------------------------


def test_weights_are_sampled_from_as_they_were_when_saved_and_nothing_is_stored(
    bench: Bench, run: Run, make_worker: MakeWorker, tmp_path: Path
) -> None:
    worker = make_worker(snapshot_every_ops=1000)
    run.train(1)
    first = run.save()
    run.train(1)
    second = run.save()
    run.send(forward_backward(9))
    worker.drain()
    samples = {session: run.sample(session) for session in (first, second)}
    worker.drain()

    for session, request_id in samples.items():
        assert sampled_from(worker, request_id) == run.truth(session)
    assert run.truth(first) != run.truth(second)
    assert bench.rows("SELECT path FROM checkpoint") == []
    assert not stored(tmp_path, "checkpoints")
    assert not stored(tmp_path, "snapshots")


@pytest.mark.parametrize("steps_after", [0, 3], ids=["the_present_state", "a_past_state"])
@pytest.mark.parametrize("snapshot_every_ops", [5, 1000], ids=["from_a_recovery_point", "from_its_creation"])
def test_a_worker_that_died_after_the_save_has_an_heir_that_samples_from_the_same_weights(
    bench: Bench, run: Run, make_worker: MakeWorker, steps_after: int, snapshot_every_ops: int
) -> None:
    worker = make_worker(snapshot_every_ops=snapshot_every_ops)
    run.train(4)
    run.send(save("x"), load("x"), forward_backward(1), optim_step())
    session = run.save()
    run.train(steps_after)
    worker.drain()
    sample = run.sample(session)
    heir = make_worker(snapshot_every_ops=snapshot_every_ops)
    heir.drain()

    assert sampled_from(heir, sample) == run.truth(session)
    run.train(1)
    heir.drain()
    truth, _ = replayed(run.requests)
    assert heir.state_before("a", len(run.requests)).applied == truth.applied


def test_a_worker_that_dies_before_the_save_is_committed_leaves_it_to_its_heir(
    bench: Bench, run: Run, make_worker: MakeWorker
) -> None:
    worker = make_worker()
    run.train(1)
    worker.drain()
    session = run.save()

    def die() -> None:
        raise Killed

    worker.journal.before_commit = die
    with pytest.raises(Killed):
        worker.drain()
    assert still_open(bench) == []
    heir = make_worker()
    heir.drain()
    sample = run.sample(session)
    heir.drain()

    assert sampled_from(heir, sample) == run.truth(session)


def test_a_copy_that_had_to_leave_memory_is_made_anew(bench: Bench, run: Run, make_worker: MakeWorker) -> None:
    worker = make_worker(max_weights=1, max_resident=1)
    run.train(1)
    sessions = [run.save()]
    run.train(2)
    sessions.append(run.save())
    other = Run(bench, "b")
    other.train(1)
    worker.drain()
    samples = [(session, run.sample(session)) for session in (*sessions, *sessions)]
    worker.drain()

    for session, request_id in samples:
        assert sampled_from(worker, request_id) == run.truth(session)
    assert worker.residents.used(within_s=1e12) == ["a"]


def test_an_adapter_that_was_parked_with_its_silent_session_is_sampled_from_all_the_same(
    bench: Bench, run: Run, make_worker: MakeWorker, clock: HandClock
) -> None:
    worker = make_worker(session_timeout_s=300.0, max_weights=1, snapshot_every_ops=1000, lease_s=1e9)
    run.train(2)
    session = run.save()
    other = Run(bench, "b")
    other.save()
    heard_of(bench)
    worker.drain()
    clock.move(301)
    worker.drain()
    parked = bench.rows("SELECT id FROM adapter WHERE parked_at IS NOT NULL ORDER BY id")
    sample = run.sample(session)
    worker.drain()

    assert parked == [("a",), ("b",)]
    assert sampled_from(worker, sample) == run.truth(session)


@pytest.mark.parametrize("then", ["rewound", "unloaded"])
def test_a_run_that_goes_back_or_ends_leaves_its_weights_as_they_were_saved(
    bench: Bench, run: Run, make_worker: MakeWorker, clock: HandClock, then: str
) -> None:
    """Also for the heir, once time has taken what the run itself needs no more."""
    worker = make_worker(retention=KEEP_NOTHING)
    run.train(3)
    session = run.save()
    run.train(1)
    worker.drain()
    if then == "rewound":
        bench.branches.rewind("a", "t0", at=4, request_key=None)
    else:
        bench.adapters.unload("a", "t0")
    worker.drain()
    worker.settle()
    clock.move(60)
    for name in bench.snapshots.runs_to_prune(older_than_s=0):
        bench.snapshots.prune(name, KEEP_NOTHING.choose)
    heir = make_worker(retention=KEEP_NOTHING)
    sample = run.sample(session)
    heir.drain()

    assert sampled_from(heir, sample) == run.truth(session)


def test_what_weights_are_made_of_is_kept_while_they_are_open_and_no_longer(
    bench: Bench, run: Run, ephemeral: SamplingSessions, make_worker: MakeWorker
) -> None:
    worker = make_worker(retention=KEEP_NOTHING)
    run.train(2)
    session = run.save()
    run.train(20)
    worker.drain()
    worker.settle()
    held = bench.snapshots.cost("a")
    heir = make_worker(retention=KEEP_NOTHING)
    sample = run.sample(session)
    heir.drain()
    finish(bench)
    ephemeral.end_unreachable(PATIENCE)
    for name in bench.snapshots.runs_to_prune(older_than_s=0):
        bench.snapshots.prune(name, KEEP_NOTHING.choose)
    after = bench.snapshots.cost("a")

    assert sampled_from(heir, sample) == run.truth(session)
    assert held.floor_seq <= 5 < 40 < after.floor_seq
    assert after.num_payloads < held.num_payloads
    assert after.num_snapshots == 1


def test_weights_that_are_used_for_long_get_a_recovery_point_of_their_own_and_let_payloads_go(
    bench: Bench, run: Run, ephemeral: SamplingSessions, make_worker: MakeWorker, clock: HandClock
) -> None:
    def prune() -> None:
        for name in bench.snapshots.runs_to_prune(older_than_s=0):
            bench.snapshots.prune(name, KEEP_NOTHING.choose)

    worker = make_worker(retention=KEEP_NOTHING, pin_after_s=7200.0)
    run.train(2)
    session = run.save()
    run.train(20)
    worker.drain()
    clock.move(7200)
    worker.drain()
    worker.settle()
    prune()
    pinned = [one.seq for one in bench.snapshots.all("a")]
    kept = bench.snapshots.cost("a")
    to_prune = bench.snapshots.runs_to_prune(older_than_s=0)
    heir = make_worker(retention=KEEP_NOTHING)
    sample = run.sample(session)
    heir.drain()
    finish(bench)
    ephemeral.end_unreachable(PATIENCE)
    prune()

    assert (pinned[0], len(pinned)) == (5, 2)
    assert kept.floor_seq == pinned[1] > 40
    assert to_prune == []
    assert sampled_from(heir, sample) == run.truth(session)
    assert [one.seq for one in bench.snapshots.all("a")] == pinned[1:]
    assert bench.snapshots.runs_to_prune(older_than_s=0) == []


def test_a_number_that_another_sampling_session_has_is_refused(bench: Bench, run: Run, make_worker: MakeWorker) -> None:
    worker = make_worker()
    run.save()
    worker.drain()
    other = Run(bench, "b")
    other.save()
    worker.drain()

    assert "already samples from something else" in error_of(bench, request_id_of("b", 1))


def test_a_session_that_exists_goes_on_with_what_it_had(bench: Bench, run: Run, clock: HandClock) -> None:
    weights = NewEphemeralWeights(adapter="a", seq=0, size_bytes=1, opened_at=0.0, expires_at=None, max_open=1)
    bench.journal.open_lane(new_sampler("taken"))
    bench.journal.open_lane(replace(new_sampler("taken"), weights=weights))

    assert bench.sampling_sessions.find("taken").weights is None
    assert still_open(bench) == []


# -- their ends -------------------------------------------------------------------------------------------------------


def test_weights_end_with_their_clients_session(
    bench: Bench, run: Run, ephemeral: SamplingSessions, make_worker: MakeWorker
) -> None:
    worker = make_worker()
    session = run.save()
    worker.drain()
    heard_of(bench)
    before = ephemeral.end_unreachable(PATIENCE)
    finish(bench)
    ended = ephemeral.end_unreachable(PATIENCE)
    again = ephemeral.end_unreachable(PATIENCE)
    sample = run.sample(session)
    worker.drain()

    assert (before, ended, again) == (0, 1, 0)
    assert error_of(bench, sample) == (f"sampling_session_id: {session} has ended: its client's session was finished")


def test_weights_end_a_while_after_their_clients_session_has_lapsed(
    bench: Bench, run: Run, ephemeral: SamplingSessions, make_worker: MakeWorker, clock: HandClock
) -> None:
    worker = make_worker()
    session = run.save()
    worker.drain()
    heard_of(bench)
    clock.move(PATIENCE.silent_s - 1)
    ephemeral.end_unreachable(PATIENCE)
    before = still_open(bench)
    clock.move(1)
    ephemeral.end_unreachable(PATIENCE)
    sample = run.sample(session)
    worker.drain()

    assert (before, still_open(bench)) == ([session], [])
    assert "had not been heard of for 3900 s" in error_of(bench, sample)


def test_weights_end_when_nobody_samples_from_them_for_long_and_the_error_says_what_to_do(
    bench: Bench, run: Run, ephemeral: SamplingSessions, make_worker: MakeWorker, clock: HandClock
) -> None:
    worker = make_worker()
    used, unused = run.save(), run.save()
    worker.drain()
    clock.move(PATIENCE.idle_s / 2)
    run.sample(used)
    worker.drain()
    clock.move(PATIENCE.idle_s / 2)
    heard_of(bench)
    worker.drain()
    ephemeral.end_unreachable(PATIENCE)
    sample = run.sample(unused)
    worker.drain()

    assert still_open(bench) == [used]
    assert error_of(bench, sample) == (
        f"sampling_session_id: {unused} has ended: nobody had sampled from it for 86400 s;"
        " weights that are saved under a name are kept until they are deleted"
    )


def test_weights_with_a_time_to_live_end_when_it_is_over_though_they_are_used(
    bench: Bench, run: Run, ephemeral: SamplingSessions, make_worker: MakeWorker, clock: HandClock
) -> None:
    worker = make_worker(lease_s=1e9)
    short, lasting = run.save(ttl_s=600), run.save()
    worker.drain()
    heard_of(bench)
    clock.move(590)
    before = ephemeral.end_unreachable(PATIENCE)
    run.sample(short)
    worker.drain()
    clock.move(10)
    ended = ephemeral.end_unreachable(PATIENCE)
    sample = run.sample(short)
    worker.drain()

    assert (before, ended, still_open(bench)) == (0, 1, [lasting])
    assert error_of(bench, sample) == f"sampling_session_id: {short} has ended: its time to live was over"


@pytest.mark.parametrize("pause_s", [10, 0.01], ids=["slow_steps", "quick_steps"])
def test_of_one_session_so_many_stay_open_and_the_longest_unused_end_first(
    bench: Bench, run: Run, make_worker: MakeWorker, clock: HandClock, pause_s: float
) -> None:
    worker = make_worker(max_ephemeral=3)
    reference = run.save()
    later = []
    for _ in range(6):
        run.train(1)
        later.append(run.save())
        worker.drain()
        clock.move(pause_s)
        run.sample(reference)
        worker.drain()
        clock.move(pause_s)
        worker.drain()
    sample = run.sample(later[0])
    worker.drain()

    assert still_open(bench) == [reference, *later[-2:]]
    assert "its session has 3 others" in error_of(bench, sample)


def test_weights_for_which_a_sample_waits_do_not_end(
    bench: Bench, run: Run, ephemeral: SamplingSessions, make_worker: MakeWorker, clock: HandClock
) -> None:
    worker = make_worker(max_ephemeral=1)
    session = run.save()
    worker.drain()
    sample = run.sample(session)
    finish(bench)
    clock.move(2 * PATIENCE.idle_s)
    ephemeral.end_unreachable(PATIENCE)
    waiting = still_open(bench)
    heir = make_worker()
    heir.drain()
    ephemeral.end_unreachable(PATIENCE)

    assert (waiting, still_open(bench)) == ([session], [])
    assert bench.journal.statuses([sample])[sample].status.state is OperationState.DONE


def test_copies_of_weights_that_have_ended_leave_memory(
    bench: Bench, run: Run, ephemeral: SamplingSessions, make_worker: MakeWorker, clock: HandClock
) -> None:
    worker = make_worker(max_weights=8, max_ephemeral=8)
    for _ in range(3):
        run.save()
    worker.drain()
    before = worker.sampler_weights.num_copies
    finish(bench)
    ephemeral.end_unreachable(PATIENCE)
    clock.move(60)
    worker.drain()

    assert (before, worker.sampler_weights.num_copies) == (3, 0)


def test_weights_that_could_not_be_made_anew_and_have_ended_are_forgotten(
    bench: Bench,
    run: Run,
    ephemeral: SamplingSessions,
    store: BreakableBlobs,
    make_worker: MakeWorker,
    clock: HandClock,
) -> None:
    worker = make_worker(snapshot_every_ops=2)
    run.train(2)
    session = run.save()
    worker.drain()
    worker.settle()
    sample = run.sample(session)
    heir = make_worker(max_attempts=1, lease_s=1e9)
    store.refuse("get", "snapshots", 1)
    heir.drain()
    store.heal()
    failure = bench.journal.statuses([sample])[sample].status.failure
    finish(bench)
    ephemeral.end_unreachable(PATIENCE)
    clock.move(60)
    heir.drain()

    assert failure is not None and failure.category == "server"
    assert "was finished" in error_of(bench, _sampled_by(heir, run, session))


def _sampled_by(worker: WorkerRig, run: Run, session: str) -> str:
    sample = run.sample(session)
    worker.drain()
    return sample


# -- their price ------------------------------------------------------------------------------------------------------


def test_weights_count_as_stored_until_they_end(
    bench: Bench, run: Run, ephemeral: SamplingSessions, make_worker: MakeWorker, clock: HandClock
) -> None:
    usage = bench.stores.accounting
    worker = make_worker()
    run.save()
    run.save()
    worker.drain()
    (size_bytes,) = {row[0] for row in bench.rows("SELECT size_bytes FROM ephemeral_weights")}
    began = clock.now()
    meanwhile = usage.stored("t0")
    by_tenant = usage.stored_by_tenant()
    clock.move(3600)
    finish(bench)
    ephemeral.end_unreachable(PATIENCE)
    after = usage.stored("t0")
    clock.move(3600)
    hours = usage.gigabyte_hours("t0", start=0, end=int(clock.now()) + 3600)
    others = usage.gigabyte_hours("t1", start=0, end=int(clock.now()) + 3600)

    assert [(one.num_ephemeral, one.ephemeral_bytes) for one in meanwhile] == [(2, 2 * size_bytes)]
    assert by_tenant["t0"].ephemeral_bytes == 2 * size_bytes
    assert after == []
    assert sum(hours.values()) == pytest.approx(2 * size_bytes / 1e9, rel=0.01), began
    assert {place.session for place in hours} == {"session-t0"}
    assert others == {}
