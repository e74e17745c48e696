"""Whatever arrives, in whatever order, and whatever dies: every adapter ends as if its operations ran one by one."""

from __future__ import annotations

import json
import math
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from harness.clock import HandClock
from harness.journal import Bench, new_sampler
from harness.operations import (
    Request,
    create,
    forward,
    forward_backward,
    load,
    optim_step,
    replayed,
    sample_body,
    save,
    save_for_sampler,
)
from harness.worker import BreakableBlobs, Killed, WorkerRig
from twinkle.core.errors import Conflict, StorageUnavailable
from twinkle.core.ids import request_id_of
from twinkle.core.operation import Accepted, OperationKind, OperationState, Payload, Submission
from twinkle.storage.blobs import FolderStore
from twinkle.storage.payloads import read_payload

_ADAPTERS = ("a", "b")
_INLINE_BYTES = 40
"""So small that most results are blobs, whose writing can fail."""
_PARKED_BYTES = 200
"""Room for two adapters or three: some are parked, some have to leave."""

_adapters = st.sampled_from(_ADAPTERS)
_tokens = st.lists(st.integers(0, 99), min_size=1, max_size=4).map(tuple)
_names = st.sampled_from(["x", "y"])
_requests = st.one_of(
    _tokens.map(lambda tokens: forward_backward(*tokens)),
    _tokens.map(lambda tokens: forward_backward(*tokens)),
    st.sampled_from([0.1, 0.2, math.nan]).map(optim_step),
    st.just(optim_step(0.3)),
    _tokens.map(lambda tokens: forward_backward(*tokens, is_bad=True)),
    st.just(forward_backward(rejection="data: too many tokens")),
    _tokens.map(lambda tokens: forward(*tokens)),
    _names.map(save),
    st.builds(load, _names, with_optimizer=st.booleans()),
    st.just(save_for_sampler()),
)


_runs = st.one_of(
    st.lists(_requests, min_size=1, max_size=4),
    st.builds(lambda passes, step: [*passes, step], st.lists(_requests, max_size=2), st.just(optim_step(0.4))),
)


class OneByOne(RuleBasedStateMachine):
    """The journal and mesh workers that die, against a list of requests per adapter."""

    migrated: Path

    def __init__(self) -> None:
        super().__init__()
        self._folder = Path(tempfile.mkdtemp(prefix="one-by-one-"))
        shutil.copy(self.migrated, self._folder / "journal.db")
        self._clock = HandClock()
        self._bench = Bench(f"sqlite:///{self._folder / 'journal.db'}", self._clock)
        self._blobs = BreakableBlobs(FolderStore(self._folder / "objects"))
        self._num_workers = 0
        self._worker = self._new_worker()
        self._zombies: list[WorkerRig] = []
        self._arrived: dict[str, dict[int, Request | None]] = {adapter: {} for adapter in _ADAPTERS}
        self._samples: set[str] = set()
        self._finals: dict[str, tuple[object, ...]] = {}

    def teardown(self) -> None:
        try:
            self._finish_everything()
            self._compare_with_one_by_one()
        finally:
            for worker in (*self._zombies, self._worker):
                worker.bury()
            self._bench.close()
            shutil.rmtree(self._folder)

    # -- arrivals -----------------------------------------------------------------------------------------------------

    @initialize()
    def create_adapters(self) -> None:
        for adapter in _ADAPTERS:
            self._bench.adapter(adapter)
            self._arrived[adapter][0] = create()
        self._bench.journal.open_lane(new_sampler("base-session"))

    @rule(adapter=_adapters, requests=_runs, order=st.randoms(use_true_random=False))
    def submit(self, adapter: str, requests: list[Request], order: random.Random) -> None:
        """The next few requests of an adapter arrive in any order."""
        numbered = list(enumerate(requests, max(self._arrived[adapter]) + 1))
        order.shuffle(numbered)
        for seq, request in numbered:
            self._arrive(adapter, seq, request)

    def _submit_in_order(self, requests: list[Request]) -> None:
        """Something for a fault to hit: the same requests for every adapter."""
        for adapter in _ADAPTERS:
            for seq, request in enumerate(requests, max(self._arrived[adapter]) + 1):
                self._arrive(adapter, seq, request)

    @rule(adapter=_adapters, request=_requests, distance=st.integers(2, 4))
    def submit_beyond_a_gap(self, adapter: str, request: Request, distance: int) -> None:
        self._arrive(adapter, max(self._arrived[adapter]) + distance, request)

    @rule(adapter=_adapters, request=_requests)
    def fill_a_gap(self, adapter: str, request: Request) -> None:
        arrived = self._arrived[adapter]
        missing = [seq for seq in range(max(arrived)) if seq not in arrived]
        if missing:
            self._arrive(adapter, missing[0], request)

    @rule(adapter=_adapters, data=st.data())
    def resend(self, adapter: str, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self._arrived[adapter])))
        request = self._arrived[adapter][seq]
        (answer,) = self._bench.append((request or forward_backward(7)).numbered(adapter, seq))
        assert answer == Accepted(request_id=request_id_of(adapter, seq), mesh="mesh0", is_new=False)

    @rule(adapter=_adapters, data=st.data())
    def send_something_else_under_a_used_number(self, adapter: str, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self._arrived[adapter])))
        (answer,) = self._bench.append(forward_backward(12345).numbered(adapter, seq))
        assert isinstance(answer, Conflict) or self._arrived[adapter][seq] is None

    @rule(number=st.integers(0, 30))
    def sample(self, number: int) -> None:
        body = sample_body("base-session", number)
        submission = Submission(
            tenant="t0",
            lane="base-session",
            seq=number,
            kind=OperationKind.SAMPLE,
            digest="same",
            payload=Payload(inline=body),
        )
        (answer,) = self._bench.append(submission)
        assert isinstance(answer, Accepted)
        self._samples.add(answer.request_id)

    def _arrive(self, adapter: str, seq: int, request: Request) -> None:
        # Adapters of one session share the numbers of its sampling sessions.
        request = replace(request, sampler_number=10_000 * ord(adapter) + seq)
        (answer,) = self._bench.append(request.numbered(adapter, seq))
        assert answer == Accepted(request_id=request_id_of(adapter, seq), mesh="mesh0", is_new=True)
        self._arrived[adapter][seq] = request

    # -- work and what disturbs it ------------------------------------------------------------------------------------

    @rule(batches=st.integers(1, 6))
    def work_a_little(self, batches: int) -> None:
        self._worker.drain(batches)

    @rule(seconds=st.sampled_from([0.5, 5.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self._clock.move(seconds)

    @rule(when=st.sampled_from(["after_claim", "before_commit", "after_commit"]), requests=_runs)
    def the_worker_is_killed(self, when: str, requests: list[Request]) -> None:
        self._submit_in_order(requests)
        setattr(self._worker.journal, when, _die)
        try:
            self._worker.drain()
        except Killed:
            self._succeed_the_worker()
        setattr(self._worker.journal, when, None)

    @rule(requests=_runs)
    def another_worker_takes_over_in_mid_batch(self, requests: list[Request]) -> None:
        self._submit_in_order(requests)
        zombie, successor = self._worker, self._new_worker()

        def take_over() -> None:
            self._clock.move(1000)
            assert successor.keeper.try_acquire() is not None
            successor.drain(2)

        zombie.journal.before_commit = take_over
        zombie.drain()
        if zombie.journal.before_commit is None:
            self._worker = successor
            self._zombies.append(zombie)
        else:
            zombie.journal.before_commit = None
            successor.bury()

    @rule(data=st.data())
    def a_zombie_wakes_up(self, data: st.DataObject) -> None:
        if self._zombies and self._worker.keeper.current() is not None:
            data.draw(st.sampled_from(self._zombies)).worker.drain(budget_s=1)

    @rule(when=st.sampled_from(["after_claim", "before_commit", "after_commit", "before_give_back"]), requests=_runs)
    def the_database_does_not_answer(self, when: str, requests: list[Request]) -> None:
        """Before: nothing was written. After: it was, but nobody heard."""
        self._submit_in_order(requests)
        setattr(self._worker.journal, when, _stay_silent)
        self._worker.drain(3)
        setattr(self._worker.journal, when, None)

    @rule(
        verb=st.sampled_from(["put", "get"]),
        folder=st.sampled_from(["results", "snapshots", "checkpoints"]),
        times=st.integers(1, 3),
        requests=_runs,
    )
    def the_object_store_does_not_answer(self, verb: str, folder: str, times: int, requests: list[Request]) -> None:
        self._submit_in_order(requests)
        self._blobs.refuse(verb, folder, times)
        self._worker.drain(4)

    @rule(is_step=st.booleans(), requests=_runs)
    def the_device_fails(self, is_step: bool, requests: list[Request]) -> None:
        self._submit_in_order(requests)
        errors = self._worker.engine.step_errors if is_step else self._worker.engine.pass_errors
        errors.append(RuntimeError("device lost"))
        self._worker.drain(4)

    @rule()
    def the_worker_restarts_in_good_order(self) -> None:
        self._worker.worker.close()
        self._succeed_the_worker()

    @rule()
    def gaps_are_closed(self) -> None:
        self._clock.move(200)
        self._close_gaps()

    def _close_gaps(self) -> None:
        for request_id in self._bench.upkeep.close_gaps(older_than_s=120):
            adapter, _, seq = request_id.partition(":req:")
            assert int(seq) not in self._arrived[adapter]
            self._arrived[adapter][int(seq)] = None

    def _succeed_the_worker(self) -> None:
        self._worker.bury()
        self._worker = self._new_worker()
        self._clock.move(1000)

    def _new_worker(self) -> WorkerRig:
        self._num_workers += 1
        return WorkerRig(
            f"worker{self._num_workers}",
            stores=self._bench.stores,
            blobs=self._blobs,
            clock=self._clock,
            max_resident=2,
            parked_bytes=_PARKED_BYTES,
            max_attempts=10_000,
            inline_bytes=_INLINE_BYTES,
            snapshot_every_ops=3,
        )

    # -- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def outcomes_never_change_and_stand_in_order(self) -> None:
        rows = self._bench.rows(
            "SELECT request_id, lane, seq, state, result, result_blob, error_code, error FROM operation"
        )
        finals = {row[0]: row[3:] for row in rows if row[3] in ("done", "failed")}
        for request_id, final in self._finals.items():
            assert finals[request_id] == final, request_id
        self._finals = finals
        for adapter in _ADAPTERS:
            head = self._bench.lane(adapter).head_seq
            mine = [row for row in rows if row[1] == adapter]
            assert all((row[2] < head) == (row[3] in ("done", "failed")) for row in mine), (adapter, head)

    def _finish_everything(self) -> None:
        self._blobs.heal()
        for _ in range(100):
            self._clock.move(1000)
            self._close_gaps()
            self._worker.drain()
            states = self._bench.rows("SELECT DISTINCT state FROM operation")
            if {state for (state,) in states} <= {"done", "failed"} and not self._has_gap():
                return
        raise AssertionError(f"still open: {self._bench.rows('SELECT request_id, state FROM operation')}")

    def _has_gap(self) -> bool:
        return any(self._bench.lane(adapter).gap_since is not None for adapter in _ADAPTERS)

    def _compare_with_one_by_one(self) -> None:
        self._succeed_the_worker()
        for adapter, arrived in self._arrived.items():
            assert sorted(arrived) == list(range(len(arrived)))
            truth, outcomes = replayed([arrived[seq] for seq in range(len(arrived))])
            for seq, (code, metrics) in enumerate(outcomes):
                status = self._bench.status(adapter, seq)
                assert (status.failure.code if status.failure else "done") == code, (adapter, seq)
                if code == "window_failed":
                    assert f"operation {self._window_of(arrived, seq)} of its" in status.failure.message
                if metrics is not None:
                    assert json.loads(read_payload(self._blobs, status.result))["metrics"] == metrics, (adapter, seq)
            state = self._worker.state_before(adapter, len(arrived))
            assert (state.applied, state.pending, state.steps) == (truth.applied, truth.pending, truth.steps)
            assert self._bench.lane(adapter).failed_window_seq == truth.window
        for request_id in self._samples:
            assert self._bench.journal.statuses([request_id])[request_id].status.state is OperationState.DONE

    @staticmethod
    def _window_of(arrived: dict[int, Request | None], seq: int) -> int | None:
        return replayed([arrived[earlier] for earlier in range(seq)])[0].window


def _die() -> None:
    raise Killed


def _stay_silent() -> None:
    raise StorageUnavailable("the journal's database did not answer")


def test_every_adapter_ends_as_if_its_operations_ran_one_by_one(make_migrated_url: Callable[[str], str]) -> None:
    class Machine(OneByOne):
        migrated = Path(make_migrated_url("sqlite").removeprefix("sqlite:///"))

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            # Shrinking takes minutes; whoever hunts a failure turns it on.
            phases=[Phase.generate],
            database=None,
        ),
    )
