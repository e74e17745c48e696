"""What the device did for an operation is what its tenant is charged, in its share and in its account."""

from __future__ import annotations

from functools import partial

import pytest

from harness.clock import HandClock
from harness.journal import Bench, new_adapter, submission
from harness.operations import forward_backward, optim_step, sample_body, save, save_for_sampler, submit_run
from harness.worker import MakeWorker, WorkerRig
from twinkle.core.operation import OperationKind, OperationState
from twinkle.scheduler.retention import Retention

_TOKENS = tuple(range(1, 101))


@pytest.fixture
def make_worker(make_worker: MakeWorker) -> MakeWorker:
    """Workers that keep every payload and take no snapshot, so that a fork replays everything."""
    return partial(
        make_worker, retention=Retention(keep_s=1e12, every_ops=100, max_snapshots=100), snapshot_every_ops=1000
    )


def _share(bench: Bench, tenant: str = "t0") -> float:
    return float(bench.database.read("SELECT vtime FROM share WHERE tenant = ?", (tenant,))[0].vtime)


def _fork(bench: Bench, worker: WorkerRig, name: str, *, at: int) -> float:
    """What it moved its tenant's share by."""
    before = _share(bench)
    bench.branches.fork(new_adapter(name), source="a", at=at)
    worker.drain()
    return _share(bench) - before


def test_a_loss_that_compares_datums_is_charged_for_both_its_passes_and_its_tokens_count_once(
    bench: Bench, make_worker: MakeWorker
) -> None:
    submit_run(bench, forward_backward(*_TOKENS))
    worker = make_worker()
    worker.drain()
    once = _share(bench)

    submit_run(bench, forward_backward(*_TOKENS, loss_fn="DPOLoss"), adapter="b")
    worker.drain()

    assert _share(bench) - once == pytest.approx(200, abs=2)
    done = bench.stores.accounting.work("t0", start=0, end=2e9)
    assert sum(work.num_trained for work in done.values()) == 200


def test_a_fork_is_charged_the_tokens_it_replays(bench: Bench, make_worker: MakeWorker) -> None:
    steps = [request for _ in range(3) for request in (forward_backward(*_TOKENS), optim_step())]
    submit_run(bench, *steps)
    worker = make_worker()
    worker.drain()

    assert _fork(bench, worker, "late", at=6) == 300
    assert _fork(bench, worker, "early", at=2) == 100
    assert _fork(bench, worker, "start", at=0) == 1


def test_a_rewind_is_charged_the_tokens_it_replays_and_both_stand_in_the_account(
    bench: Bench, make_worker: MakeWorker
) -> None:
    submit_run(bench, forward_backward(*_TOKENS), optim_step(), forward_backward(*_TOKENS), optim_step())
    worker = make_worker()
    worker.drain()
    usage = bench.stores.accounting
    before, share = usage.work("t0", start=0, end=2e9), _share(bench)

    bench.branches.rewind("a", "t0", at=2, request_key=None)
    worker.drain()
    _fork(bench, worker, "b", at=2)

    after = usage.work("t0", start=0, end=2e9)
    trained = [sum(work.num_trained for work in found.values()) for found in (before, after)]
    assert trained == [200, 400]
    assert _share(bench) - share == 200


def test_what_has_the_device_to_itself_is_charged_its_time_at_the_rate_of_passes(
    bench: Bench, make_worker: MakeWorker, clock: HandClock
) -> None:
    submit_run(bench, forward_backward(*_TOKENS))
    worker = make_worker()
    _slow_down(worker, "run_passes", 0.1)
    worker.drain()
    _slow_down(worker, "optim_step", 0.05)
    _slow_down(worker, "export", 0.5)
    charges = []
    for seq, request in enumerate((optim_step(), save("x")), start=2):
        before = _share(bench)
        bench.append(request.numbered("a", seq))
        worker.drain()
        charges.append(_share(bench) - before)

    assert charges == [50, 500], "a hundred tokens took a tenth of a second"


def test_a_recovery_is_charged_to_nobody(bench: Bench, make_worker: MakeWorker) -> None:
    submit_run(bench, forward_backward(*_TOKENS), optim_step())
    make_worker().drain()
    heir = make_worker()
    _slow_down(heir, "run_passes", 0.1)
    _slow_down(heir, "optim_step", 0.05)
    for seq, request in ((3, forward_backward(1)), (4, optim_step())):
        bench.append(request.numbered("a", seq))
        before = _share(bench)
        heir.drain()

    assert _share(bench) - before == 1, "five hundredths of a second at ten tokens a second"


SAMPLER = "session-t0:sample:3"
"""What the third operation of the run below opens."""


def _run_with_a_sampler(bench: Bench, make_worker: MakeWorker) -> None:
    """A run that has gone on since its nameless weights were saved, by a worker that is gone."""
    submit_run(bench, forward_backward(*_TOKENS), optim_step(), save_for_sampler(), forward_backward(1), optim_step())
    make_worker().drain()


def _send_sample(bench: Bench, seq: int) -> None:
    body = sample_body(SAMPLER, seq)
    bench.append(submission(SAMPLER, seq, OperationKind.SAMPLE, body=body, num_tokens=5))


def test_weights_that_are_made_anew_are_charged_to_whom_they_are_made_for_and_only_once(
    bench: Bench, make_worker: MakeWorker
) -> None:
    _run_with_a_sampler(bench, make_worker)
    heir = make_worker()
    charges = []
    for seqs in ((0, 1, 2), (3,)):
        for seq in seqs:
            _send_sample(bench, seq)
        before = _share(bench)
        heir.drain()
        charges.append(_share(bench) - before)

    assert charges == [3 * 5 + 100, 5]
    assert bench.rows("SELECT num_tokens FROM operation WHERE kind = 'sample'") == [(2,)] * 4


def test_making_weights_anew_is_charged_the_devices_time_where_that_is_more(
    bench: Bench, make_worker: MakeWorker
) -> None:
    _run_with_a_sampler(bench, make_worker)
    heir = make_worker()
    _slow_down(heir, "run_passes", 0.1)
    submit_run(bench, forward_backward(*_TOKENS), adapter="measured")
    heir.drain()
    _slow_down(heir, "optim_step", 0.4)
    _send_sample(bench, 0)
    before = _share(bench)
    heir.drain()

    assert _share(bench) - before == pytest.approx(5 + 500), "half a second at a thousand tokens a second"


def test_weights_are_charged_although_the_sample_they_were_made_for_is_refused(
    bench: Bench, make_worker: MakeWorker
) -> None:
    _run_with_a_sampler(bench, make_worker)
    heir = make_worker()
    heir.engine.refuse_samples = True
    _send_sample(bench, 0)
    before = _share(bench)
    heir.drain()

    assert bench.status(SAMPLER, 0).state is OperationState.FAILED
    assert _share(bench) - before == 100


def test_an_adapter_that_comes_back_to_be_sampled_from_as_it_is_is_charged_to_nobody(
    bench: Bench, make_worker: MakeWorker
) -> None:
    submit_run(bench, forward_backward(*_TOKENS), optim_step(), save_for_sampler())
    make_worker().drain()
    heir = make_worker()
    _send_sample(bench, 0)
    before = _share(bench)
    heir.drain()

    assert _share(bench) - before == 5


def _slow_down(worker: WorkerRig, name: str, seconds: float) -> None:
    """Let the engine take its time, on the clock moved by hand."""
    plain = getattr(worker.engine, name)

    def slowly(*args: object, **options: object) -> object:
        worker.clock.move(seconds)
        return plain(*args, **options)

    setattr(worker.engine, name, slowly)
