"""The device's memory for adapters: a bound in bytes that holds at every moment, whatever sizes they have."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

import pytest

from harness.clock import HandClock
from harness.journal import CONFIG, Bench, digest, new_adapter, submission
from harness.operations import Request, create, forward_backward, optim_step, replayed, sample_body, save_for_sampler
from harness.worker import BrokenEngine, MakeWorker, WorkerRig
from twinkle.core.adapter_sizes import AdapterSizes
from twinkle.core.mesh import MeshCapabilities
from twinkle.core.operation import OperationKind, OperationState, Payload, Submission
from twinkle.workers.adapters.parked import Resident
from twinkle.workers.engines.null_engine import NullState

RANK_BYTES = 16
"""What the engine below says a rank takes while it trains; a copy to sample from takes a quarter of it."""
SLICE_S = 0.5
A_WHILE = 2000
"""Batches that would have been claimed in some slices."""


@pytest.fixture
def bench(sqlite_url: str, clock: HandClock) -> Iterator[Bench]:
    bench = Bench(sqlite_url, clock)
    yield bench
    bench.close()


class SizedEngine(BrokenEngine):
    """An engine whose adapters have a size. While it ``holds`` no sample ends, and each slice takes its time."""

    def __init__(self, clock: HandClock, *, adapter_bytes: int, serves: str = "everything") -> None:
        super().__init__()
        self._clock = clock
        self._bound = {"adapter_bytes": adapter_bytes, "serves": serves}
        self.holds = False
        self.most_drawn_from = 0

    @property
    def capabilities(self) -> MeshCapabilities:
        sizes = AdapterSizes(attn=1, mlp=0, unembed=0)
        return super().capabilities.model_copy(update={"adapter_sizes": sizes, **self._bound})

    def step_samples(self):  # type: ignore[no-untyped-def]
        states = (self.sampled_from[key] for key, _ in self._samples)
        self.most_drawn_from = max(self.most_drawn_from, len({id(state) for state in states if state}))
        if not self.holds:
            return super().step_samples()
        self._clock.move(SLICE_S)
        return []


class Watched(OrderedDict[str, Resident[NullState]]):
    """Residents, and the most ranks that were ever there at once."""

    def __init__(self, ranks: dict[str, int]) -> None:
        super().__init__()
        self._ranks = ranks
        self.most_ranks = 0
        self.most_together = 0

    def __setitem__(self, adapter: str, resident: Resident[NullState]) -> None:
        super().__setitem__(adapter, resident)
        self.most_together = max(self.most_together, len(self))
        self.most_ranks = max(self.most_ranks, sum(self._ranks[adapter] for adapter in self))


def _submit(bench: Bench, ranks: dict[str, int], *requests: Request) -> None:
    for adapter, rank in ranks.items():
        # Of its rank nothing hangs in the engine's state, which is compared with that of an adapter by itself.
        first = submission(adapter, 0, OperationKind.CREATE_MODEL, body=CONFIG.model_dump_json().encode())
        bench.journal.open_lane(new_adapter(adapter, config=CONFIG.model_copy(update={"rank": rank})), first)
        bench.append(*(request.numbered(adapter, seq) for seq, request in enumerate(requests, 1)))


def _watched(worker: WorkerRig, ranks: dict[str, int]) -> Watched:
    watched = worker.residents._residents = Watched(ranks)
    return watched


STEPS = (forward_backward(1), optim_step(), forward_backward(2), optim_step())


@pytest.mark.parametrize(
    ("ranks", "most_together"),
    [
        ({"a": 4, "b": 4, "c": 4, "d": 4}, 3),
        ({"a": 8, "b": 2, "c": 4, "d": 8, "e": 2}, 3),
        ({"a": 12, "b": 12}, 1),
    ],
)
def test_adapters_on_the_device_never_take_more_than_its_memory(
    bench: Bench, make_worker: MakeWorker, clock: HandClock, ranks: dict[str, int], most_together: int
) -> None:
    _submit(bench, ranks, *STEPS)
    worker = make_worker(engine=SizedEngine(clock, adapter_bytes=16 * RANK_BYTES), parked_bytes=1 << 20)
    watched = _watched(worker, ranks)

    worker.drain()

    assert watched.most_ranks <= 12, "three quarters of it are for adapters that train"
    assert watched.most_together == most_together
    for adapter in ranks:
        assert _is_as_alone(worker, bench, adapter)


def test_without_a_bound_they_are_there_together(bench: Bench, make_worker: MakeWorker, clock: HandClock) -> None:
    ranks = dict.fromkeys("abcd", 8)
    _submit(bench, ranks, *STEPS)
    worker = make_worker(engine=SizedEngine(clock, adapter_bytes=0))
    watched = _watched(worker, ranks)

    worker.drain()

    assert watched.most_together == 4


def test_one_that_is_larger_than_the_memory_for_all_is_there_alone(
    bench: Bench, make_worker: MakeWorker, clock: HandClock
) -> None:
    ranks = {"a": 2, "b": 64, "c": 2}
    _submit(bench, ranks, *STEPS)
    worker = make_worker(engine=SizedEngine(clock, adapter_bytes=16 * RANK_BYTES), parked_bytes=1 << 20)
    watched = _watched(worker, ranks)

    worker.drain()

    assert watched.most_ranks == 64, "nobody beside it"
    for adapter in ranks:
        assert _is_as_alone(worker, bench, adapter)


def test_pinned_ones_take_half_of_the_memory_and_leave_for_one_that_does_not_fit_beside_them(
    bench: Bench, make_worker: MakeWorker, clock: HandClock
) -> None:
    ranks = {"a": 4, "b": 4, "c": 4}
    _submit(bench, ranks)
    for adapter in ranks:
        clock.move(1)
        bench.adapters.pin(adapter, is_pinned=True)
    worker = make_worker(engine=SizedEngine(clock, adapter_bytes=16 * RANK_BYTES), parked_bytes=1 << 20)
    watched = _watched(worker, ranks)
    worker.drain()
    small, large = {"d": 4}, {"e": 10}
    ranks |= small | large

    _submit(bench, small, *STEPS)
    worker.drain()
    assert "a" in watched and not {"b", "c"} <= watched.keys()

    _submit(bench, large, *STEPS)
    worker.drain()
    assert list(watched) == ["e"]
    assert watched.most_ranks <= 12


def _is_as_alone(worker: WorkerRig, bench: Bench, adapter: str) -> bool:
    """Whether every operation is done, and the state is what they make of an adapter that never leaves."""
    assert all(bench.status(adapter, seq).state is OperationState.DONE for seq in range(len(STEPS) + 1))
    alone, _ = replayed([create(), *STEPS])
    return worker.state_before(adapter, len(STEPS) + 1).applied == alone.applied


# -- copies to sample from --------------------------------------------------------------------------------------------


def _sample(bench: Bench, session: str, number: int) -> str:
    body = sample_body(session, number)
    (accepted,) = bench.append(
        Submission(
            tenant="t0",
            lane=session,
            seq=number + 1,
            kind=OperationKind.SAMPLE,
            digest=digest(body),
            payload=Payload(inline=body),
            num_tokens=5,
        )
    )
    return accepted.request_id  # type: ignore[union-attr]


def _saved(bench: Bench, adapters: dict[str, int], worker: WorkerRig) -> dict[str, str]:
    """An adapter's weights without a name, by adapter."""
    sessions: dict[str, str] = {}
    for number, (adapter, rank) in enumerate(adapters.items()):
        _submit(bench, {adapter: rank}, *STEPS)
        worker.drain()
        before = {row[0] for row in bench.rows("SELECT sampling_session FROM ephemeral_weights")}
        bench.append(replace(save_for_sampler(), sampler_number=100 + number).numbered(adapter, len(STEPS) + 1))
        worker.drain()
        (sessions[adapter],) = {row[0] for row in bench.rows("SELECT sampling_session FROM ephemeral_weights")} - before
    return sessions


@pytest.mark.parametrize("serves", ["everything", "samples"])
def test_no_more_copies_are_drawn_from_at_once_than_fit_and_all_come_to_their_turn(
    bench: Bench, make_worker: MakeWorker, clock: HandClock, serves: str
) -> None:
    engine = SizedEngine(clock, adapter_bytes=16 * RANK_BYTES)
    worker = make_worker(engine=engine, max_ephemeral=64, max_weights=64, sample_slots=64)
    sessions = _saved(bench, {f"a{number}": 8 for number in range(5)}, worker)
    if serves == "samples":
        worker.worker.close()
        engine = SizedEngine(clock, adapter_bytes=8 * RANK_BYTES, serves=serves)
        worker = make_worker(engine=engine, max_ephemeral=64, max_weights=64, sample_slots=64)
    engine.holds = True
    samples = [_sample(bench, session, number) for number in range(3) for session in sessions.values()]

    worker.drain(A_WHILE)
    assert 0 < engine.num_samples_under_way < len(samples), "some wait for memory"
    engine.holds = False
    worker.drain()

    # A rank of 8 is 32 bytes in a copy: a quarter of 256 holds two of them, all of 128 four.
    assert engine.most_drawn_from == (2 if serves == "everything" else 4)
    assert {bench.journal.statuses([one])[one].status.state for one in samples} == {OperationState.DONE}


def test_a_copy_for_which_there_is_no_room_is_made_when_it_is_asked_for(
    bench: Bench, make_worker: MakeWorker, clock: HandClock
) -> None:
    engine = SizedEngine(clock, adapter_bytes=16 * RANK_BYTES)
    worker = make_worker(engine=engine, max_ephemeral=64, max_weights=64)
    sessions = _saved(bench, {"a": 8, "b": 8}, worker)
    engine.holds = True
    drawn = [_sample(bench, session, 0) for session in sessions.values()]
    worker.drain(A_WHILE)
    num_in_use = worker.sampler_weights.num_copies

    _submit(bench, {"c": 8}, *STEPS)
    bench.append(replace(save_for_sampler(), sampler_number=99).numbered("c", len(STEPS) + 1))
    worker.drain(A_WHILE)
    assert worker.sampler_weights.num_copies == num_in_use == 2

    engine.holds = False
    (third,) = {row[0] for row in bench.rows("SELECT sampling_session FROM ephemeral_weights")} - {*sessions.values()}
    last = _sample(bench, third, 0)
    worker.drain()
    assert {bench.journal.statuses([one])[one].status.state for one in (*drawn, last)} == {OperationState.DONE}
    assert engine.sampled_from[last] is not None
