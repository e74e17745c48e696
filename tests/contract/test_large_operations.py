"""One operation, however large, lets others go first between its passes; nothing of it shows before its end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from harness.clock import HandClock
from harness.journal import Bench, new_sampler
from harness.operations import (
    create,
    forward_backward,
    optim_step,
    replayed,
    sample_body,
    submit_run,
)
from harness.worker import BrokenEngine, MakeWorker, WorkerRig
from twinkle.core.operation import OperationKind, OperationState, Payload, Submission
from twinkle.core.slices import Slices
from twinkle.workers.engine import Pass, PassAnswer, SampleOutput
from twinkle.workers.engines.null_engine import NullState

SLICE_TOKENS = 10
SLICE_S = 1.0


class SlicedEngine(BrokenEngine):
    """Passes take a second for every ten tokens; what a test has for it happens before a slice."""

    def __init__(self, clock: HandClock) -> None:
        super().__init__()
        self._clock = clock
        self.num_slices = 0
        self.before: dict[int, Callable[[], None]] = {}
        self.sizes: list[int] = []

    def start_passes(self, passes: Sequence[Pass[NullState]]) -> Slices[list[PassAnswer]]:
        num_tokens = sum(len(datum.tokens) for item in passes for datum in item.body.data)  # type: ignore[union-attr]
        for number in range(-(-num_tokens // SLICE_TOKENS)):
            if number:
                yield
            self.before.get(self.num_slices, lambda: None)()
            self.num_slices += 1
            self.sizes.append(num_tokens)
            self._clock.move(SLICE_S)
        return self.run_passes(passes)


@pytest.fixture
def bench(sqlite_url: str, clock: HandClock) -> Iterator[Bench]:
    """One database is enough here: the contract of both is tested next door."""
    bench = Bench(sqlite_url, clock)
    yield bench
    bench.close()


@pytest.fixture
def engine(clock: HandClock) -> SlicedEngine:
    return SlicedEngine(clock)


@pytest.fixture
def worker(make_worker: MakeWorker, engine: SlicedEngine) -> WorkerRig:
    return make_worker(engine=engine, max_tokens=100)


def large(num_slices: int = 30) -> Any:
    return forward_backward(*[1] * (num_slices * SLICE_TOKENS))


def submit(bench: Bench, adapter: str, *requests: Any, tenant: str = "t1") -> None:
    """A run of somebody else's."""
    bench.adapter(adapter, tenant=tenant)
    run = [create(), *requests]
    bench.append(*(request.numbered(adapter, seq, tenant=tenant) for seq, request in enumerate(run) if seq > 0))


def place(worker: WorkerRig, request_id: str) -> int:
    return worker.publisher.published.index(request_id)


def test_anothers_small_step_ends_while_a_large_operation_is_under_way(
    bench: Bench, worker: WorkerRig, engine: SlicedEngine
) -> None:
    run = submit_run(bench, large(), optim_step())
    seen: list[OperationState] = []
    engine.before[5] = lambda: submit(bench, "b", forward_backward(1), optim_step())
    engine.before[12] = lambda: seen.extend((bench.status("b", 2).state, bench.status("a", 1).state))

    worker.drain()

    assert seen == [OperationState.DONE, OperationState.RUNNING]
    assert place(worker, "b:req:2") < place(worker, "a:req:1")
    truth, _ = replayed(run)
    assert worker.state_before("a", len(run)).applied == truth.applied


def test_anothers_sample_joins_while_a_large_operation_is_under_way(
    bench: Bench, worker: WorkerRig, engine: SlicedEngine
) -> None:
    submit_run(bench, large())
    bench.journal.open_lane(new_sampler("s", tenant="t1"))
    payload = Payload(inline=sample_body("s", 1))
    sample = Submission(tenant="t1", lane="s", seq=1, kind=OperationKind.SAMPLE, digest="d", payload=payload)
    engine.before[5] = lambda: (bench.append(sample), None)[1]

    worker.drain()

    assert place(worker, "s:req:1") < place(worker, "a:req:1")


def test_a_stream_of_small_steps_does_not_hold_up_a_large_operation(
    bench: Bench, worker: WorkerRig, engine: SlicedEngine
) -> None:
    """It has at least every other slice."""
    submit_run(bench, large(20))
    submit(bench, "b", *[forward_backward(1) for _ in range(60)])

    worker.drain()

    assert place(worker, "a:req:1") < place(worker, "b:req:30")


def test_of_three_tenants_large_operations_two_are_under_way_at_once_and_small_ones_still_go_between(
    bench: Bench, worker: WorkerRig, engine: SlicedEngine
) -> None:
    submit_run(bench, large(30))
    engine.before[3] = lambda: submit(bench, "b", large(31))
    bench.add_tenant("t2")
    bench.add_tenant("t3")
    engine.before[6] = lambda: submit(bench, "c", large(32), tenant="t2")
    engine.before[9] = lambda: submit(bench, "d", forward_backward(1), tenant="t3")

    worker.drain()

    first_of_third, last_of_first = engine.sizes.index(320), len(engine.sizes) - engine.sizes[::-1].index(300)
    assert engine.sizes.index(310) < 8
    assert first_of_third >= last_of_first
    assert place(worker, "d:req:1") < place(worker, "a:req:1")


def test_what_is_half_through_the_model_when_the_lease_is_lost_is_done_again_from_its_beginning(
    bench: Bench, worker: WorkerRig, engine: SlicedEngine, make_worker: MakeWorker, clock: HandClock
) -> None:
    run = submit_run(bench, forward_backward(1), large(), optim_step())
    engine.before[12] = lambda: clock.move(1000.0)
    worker.drain(8)
    successor = make_worker(engine=SlicedEngine(clock))

    successor.drain()

    truth, _ = replayed(run)
    assert successor.state_before("a", len(run)).applied == truth.applied
    assert bench.status("a", 3).state is OperationState.DONE


def test_a_replay_of_a_large_operation_lets_others_go_first_too(
    bench: Bench, worker: WorkerRig, engine: SlicedEngine, make_worker: MakeWorker, clock: HandClock
) -> None:
    submit_run(bench, large(), optim_step())
    worker.drain()
    bench.append(forward_backward(1).numbered("a", 3))
    clock.move(1000.0)
    second = SlicedEngine(clock)
    second.before[5] = lambda: submit(bench, "b", forward_backward(1))
    successor = make_worker(engine=second)

    successor.drain()

    assert place(successor, "b:req:1") < place(successor, "a:req:3")


class SlowSamples(BrokenEngine):
    """Samples of many sequences end after a hundred steps, all others at once."""

    def __init__(self, clock: HandClock) -> None:
        super().__init__()
        self._clock = clock
        self.num_steps = 0
        self.before: dict[int, Callable[[], None]] = {}

    def step_samples(self) -> list[SampleOutput]:
        self.before.get(self.num_steps, lambda: None)()
        self.num_steps += 1
        self._clock.move(SLICE_S)
        is_over = self.num_steps > 100
        large = [] if is_over else [one for one in self._samples if one[1].num_samples > 1]
        self._samples = [one for one in self._samples if one not in large]
        ended = super().step_samples()
        self._samples = large
        return ended


def test_a_sample_of_another_tenant_joins_one_that_takes_all_the_room(
    bench: Bench, make_worker: MakeWorker, clock: HandClock
) -> None:
    engine = SlowSamples(clock)
    worker = make_worker(engine=engine, sample_slots=4)
    for lane, tenant in (("s", "t0"), ("u", "t1")):
        bench.journal.open_lane(new_sampler(lane, tenant=tenant))

    def submit_sample(lane: str, tenant: str, num_sequences: int) -> None:
        body = {**json.loads(sample_body(lane, 1)), "num_samples": num_sequences}
        payload = Payload(inline=json.dumps(body).encode())
        bench.append(
            Submission(
                tenant=tenant,
                lane=lane,
                seq=1,
                kind=OperationKind.SAMPLE,
                digest="d",
                payload=payload,
                num_sequences=num_sequences,
            )
        )

    submit_sample("s", "t0", 32)
    engine.before[10] = lambda: submit_sample("u", "t1", 1)
    seen: list[OperationState] = []
    engine.before[15] = lambda: seen.append(bench.status("u", 1).state)

    worker.drain()

    assert seen == [OperationState.DONE]
    assert place(worker, "u:req:1") < place(worker, "s:req:1")


class SharedDevice(BrokenEngine):
    """A pass takes 0.1 s, a step of sampling 0.025 s, and samples never end; it notes who was at it, in order."""

    def __init__(self, clock: HandClock) -> None:
        super().__init__()
        self._clock = clock
        self.drawn_before_pass: list[int] = []
        self.num_drawn = 0

    def run_passes(self, passes: Sequence[Pass[NullState]]) -> list[PassAnswer]:  # type: ignore[override]
        self._clock.move(0.1)
        self.drawn_before_pass.append(self.num_drawn)
        return super().run_passes(passes)  # type: ignore[no-any-return]

    def step_samples(self) -> list[SampleOutput]:
        self._clock.move(0.025)
        self.num_drawn += 1
        return []


@pytest.mark.parametrize(("weight", "steps_a_pass"), [(0.125, 0.5), (1.0, 4.0), (2.5, 10.0)])
def test_sampling_has_its_weight_of_the_device_beside_training(
    bench: Bench, make_worker: MakeWorker, clock: HandClock, weight: float, steps_a_pass: float
) -> None:
    engine = SharedDevice(clock)
    worker = make_worker(engine=engine, sampling_weight=weight)
    bench.journal.open_lane(new_sampler("s", tenant="t1"))
    bench.append(
        Submission(
            tenant="t1",
            lane="s",
            seq=1,
            kind=OperationKind.SAMPLE,
            digest="d",
            payload=Payload(inline=sample_body("s", 1)),
        )
    )
    submit_run(bench, *[forward_backward(1)] * 48)

    worker.drain(2000)

    # Passes in the middle: the sample is under way by then, and training goes on.
    first, last = 8, 40
    drawn = engine.drawn_before_pass[last] - engine.drawn_before_pass[first]
    assert drawn / (last - first) == pytest.approx(steps_a_pass, rel=0.15)
