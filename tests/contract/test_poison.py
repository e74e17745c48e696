"""Who was under way when a worker died runs together once more; what kills its worker ends, and harms nobody else."""

from __future__ import annotations

from contextlib import suppress

import pytest

from harness.journal import Bench, new_sampler, submission
from harness.operations import Request, forward_backward, optim_step, sample_body, submit_run
from harness.worker import BreakableBlobs, Killed, MakeWorker, WorkerRig
from twinkle.core.errors import InvalidInput
from twinkle.core.operation import OperationKind, OperationState

SAMPLER = "session-t0:sample:0"
NUM_PASSES = 64
NUM_SAMPLES = 32
POISON = 7


def _passes(bench: Bench, request: Request) -> list[str]:
    adapters = [f"adapter{number:02d}" for number in range(NUM_PASSES)]
    for adapter in adapters:
        submit_run(bench, request, adapter=adapter)
    return adapters


def _samples(bench: Bench) -> None:
    bench.journal.open_lane(new_sampler(SAMPLER))
    bench.append(
        *(submission(SAMPLER, n, OperationKind.SAMPLE, body=sample_body(SAMPLER, n)) for n in range(NUM_SAMPLES))
    )


def _worker(make_worker: MakeWorker) -> WorkerRig:
    """As it is shipped: with three attempts."""
    return make_worker(max_adapters=NUM_PASSES, sample_slots=NUM_SAMPLES, max_resident=NUM_PASSES)


def _poison_pass(worker: WorkerRig, adapter: str) -> list[int]:
    """Let the worker die of the adapter's passes; how many operations ran together, step by step."""
    run_passes = worker.engine.run_passes

    def die_of_it(passes):  # type: ignore[no-untyped-def]
        if any(item.body.model_id == adapter for item in passes):
            worker.engine.batch_sizes.append(len(passes))
            raise Killed
        return run_passes(passes)

    worker.engine.run_passes = die_of_it  # type: ignore[method-assign]
    return worker.engine.batch_sizes


def _poison_sample(worker: WorkerRig, request_id: str) -> None:
    step_samples = worker.engine.step_samples

    def die_of_it():  # type: ignore[no-untyped-def]
        if request_id in worker.samples.under_way:
            raise Killed
        return step_samples()

    worker.engine.step_samples = die_of_it  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", ["passes", "steps"])
def test_what_was_under_way_when_its_worker_was_killed_runs_together_again(
    bench: Bench, make_worker: MakeWorker, kind: str
) -> None:
    adapters = _passes(bench, forward_backward(1) if kind == "passes" else optim_step())
    _worker(make_worker).drain(1)
    victim = _worker(make_worker)
    victim.journal.before_commit = _die
    with suppress(Killed):
        victim.drain()

    successor = _worker(make_worker)
    successor.drain(1)

    assert all(bench.status(adapter, 1).state is OperationState.DONE for adapter in adapters)
    if kind == "passes":
        assert successor.engine.batch_sizes == [NUM_PASSES]


def test_samples_under_way_when_their_worker_was_killed_run_together_again(
    bench: Bench, make_worker: MakeWorker
) -> None:
    _samples(bench)
    victim = _worker(make_worker)
    victim.engine.sample_errors = [Killed()]
    with suppress(Killed):
        victim.drain()

    successor = _worker(make_worker)
    successor.engine.sample_errors = [Killed()]
    with suppress(Killed):
        successor.drain()

    assert len(successor.samples.under_way) == NUM_SAMPLES


def test_a_poison_among_sixty_four_operations_ends_and_its_neighbours_are_unharmed(
    bench: Bench, make_worker: MakeWorker
) -> None:
    adapters = _passes(bench, forward_backward(1))
    _worker(make_worker).drain(1)
    died_in = []
    for _ in range(5):
        worker = _worker(make_worker)
        sizes = _poison_pass(worker, adapters[POISON])
        try:
            worker.drain()
        except Killed:
            died_in.append(sizes[-1])

    assert died_in == [NUM_PASSES, NUM_PASSES, 1]
    ends = {adapter: bench.status(adapter, 1) for adapter in adapters}
    failure = ends.pop(adapters[POISON]).failure
    assert failure is not None and failure.code == "poison"
    assert all(status.state is OperationState.DONE for status in ends.values())
    assert max(status.attempt for status in ends.values()) <= 3


def test_a_poison_among_thirty_two_samples_ends_and_its_neighbours_are_unharmed(
    bench: Bench, make_worker: MakeWorker
) -> None:
    _samples(bench)
    died_with = []
    for _ in range(5):
        worker = _worker(make_worker)
        _poison_sample(worker, f"{SAMPLER}:req:{POISON}")
        try:
            worker.drain()
        except Killed:
            died_with.append(len(worker.samples.under_way))

    assert died_with == [NUM_SAMPLES, NUM_SAMPLES, 1]
    ends = {number: bench.status(SAMPLER, number) for number in range(NUM_SAMPLES)}
    failure = ends.pop(POISON).failure
    assert failure is not None and failure.code == "poison"
    assert all(status.state is OperationState.DONE for status in ends.values())
    assert max(status.attempt for status in ends.values()) <= 3


def test_a_poisonous_pass_does_no_harm_to_the_sample_that_was_under_way_each_time(
    bench: Bench, make_worker: MakeWorker
) -> None:
    """At the last attempt of both, one of them is in the worker's hands and not the other."""
    submit_run(bench, forward_backward(1), adapter="a")
    _worker(make_worker).drain(1)
    bench.journal.open_lane(new_sampler(SAMPLER))
    bench.append(submission(SAMPLER, 0, OperationKind.SAMPLE, body=sample_body(SAMPLER, 0)))
    deaths = 0
    for _ in range(8):
        worker = _worker(make_worker)
        _poison_pass(worker, "a")
        worker.keeper.try_acquire()
        lease = worker.keeper.current()
        assert lease is not None
        worker.worker._enter(lease)
        run_slice = worker.samples.run_slice
        worker.samples.run_slice = lambda execution, **_: None  # type: ignore[method-assign]
        worker.worker._sampling.work_once(lease, is_training=False)
        worker.samples.run_slice = run_slice  # type: ignore[method-assign]
        try:
            worker.drain()
        except Killed:
            deaths += 1

    assert deaths == 3
    failure = bench.status("a", 1).failure
    assert failure is not None and failure.code == "poison"
    assert bench.status(SAMPLER, 0).state is OperationState.DONE


def test_a_store_that_does_not_answer_makes_nobody_run_alone(
    bench: Bench, make_worker: MakeWorker, store: BreakableBlobs
) -> None:
    _passes(bench, forward_backward(1))
    worker = make_worker(max_adapters=NUM_PASSES, max_resident=NUM_PASSES, inline_bytes=1)
    worker.drain(1)
    for _ in range(2):
        store.refuse("put", "results", NUM_PASSES)
        worker.drain()
        worker.clock.move(60)

    worker.drain(1)

    assert worker.engine.batch_sizes == [NUM_PASSES] * 3


def test_a_device_that_fails_a_whole_batch_twice_tries_each_alone_at_its_last_attempt(
    bench: Bench, make_worker: MakeWorker
) -> None:
    adapters = _passes(bench, forward_backward(1))
    worker = _worker(make_worker)
    worker.drain(1)
    run_passes = worker.engine.run_passes

    def fail_of_it(passes):  # type: ignore[no-untyped-def]
        answers = run_passes(passes)
        if any(item.body.model_id == adapters[POISON] for item in passes):
            raise RuntimeError("device lost")
        return answers

    worker.engine.run_passes = fail_of_it  # type: ignore[method-assign]
    for _ in range(4):
        worker.drain()
        worker.clock.move(60)

    failed = [adapter for adapter in adapters if bench.status(adapter, 1).failure]
    assert failed == [adapters[POISON]]
    assert worker.engine.batch_sizes == [NUM_PASSES, NUM_PASSES] + [1] * NUM_PASSES


def test_a_sampler_that_fails_of_one_request_twice_draws_each_alone_at_its_last_attempt(
    bench: Bench, make_worker: MakeWorker
) -> None:
    _samples(bench)
    worker = _worker(make_worker)
    step_samples = worker.engine.step_samples
    failed_with: list[int] = []

    def fail_of_it():  # type: ignore[no-untyped-def]
        if f"{SAMPLER}:req:{POISON}" in worker.samples.under_way:
            failed_with.append(len(worker.samples.under_way))
            raise RuntimeError("device lost")
        return step_samples()

    worker.engine.step_samples = fail_of_it  # type: ignore[method-assign]
    for _ in range(4):
        worker.drain()
        worker.clock.move(60)

    assert failed_with == [NUM_SAMPLES, NUM_SAMPLES, 1]
    ends = {number: bench.status(SAMPLER, number) for number in range(NUM_SAMPLES)}
    failure = ends.pop(POISON).failure
    assert failure is not None and (failure.category, failure.code) == ("server", "internal")
    assert all(status.state is OperationState.DONE for status in ends.values())


@pytest.mark.parametrize("kind", ["passes", "samples"])
def test_a_clients_mistake_that_ends_a_whole_batch_is_told_to_that_client_alone(
    bench: Bench, make_worker: MakeWorker, kind: str
) -> None:
    """An engine should tell of each its own; where one does not, nobody is blamed for what another has sent."""
    mistake = InvalidInput("data[0]", "quotes what one client sent")
    worker = _worker(make_worker)
    if kind == "passes":
        places = [(adapter, 1) for adapter in _passes(bench, forward_backward(1))]
        run_passes = worker.engine.run_passes

        def refuse_passes(passes):  # type: ignore[no-untyped-def]
            if any(item.body.model_id == places[POISON][0] for item in passes):
                raise mistake
            return run_passes(passes)

        worker.engine.run_passes = refuse_passes  # type: ignore[method-assign]
    else:
        _samples(bench)
        places = [(SAMPLER, number) for number in range(NUM_SAMPLES)]
        step_samples = worker.engine.step_samples

        def refuse_samples():  # type: ignore[no-untyped-def]
            if f"{SAMPLER}:req:{POISON}" in worker.samples.under_way:
                raise mistake
            return step_samples()

        worker.engine.step_samples = refuse_samples  # type: ignore[method-assign]

    for _ in range(5):
        worker.drain()
        worker.clock.move(60)

    ends = [bench.status(*place) for place in places]
    blamed = ends.pop(POISON).failure
    assert blamed is not None and (blamed.category, blamed.message) == ("user", mistake.message)
    assert all(status.state is OperationState.DONE for status in ends)


def _die() -> None:
    raise Killed
