"""What the device did for an operation is what its tenant is charged, in its share and in its account."""

from __future__ import annotations

from functools import partial

import pytest

from harness.clock import HandClock
from harness.journal import Bench, new_adapter
from harness.operations import forward_backward, optim_step, save, submit_run
from harness.worker import MakeWorker, WorkerRig
from twinkle.scheduler.retention import Retention
from twinkle.storage.tenants.usage import Usage

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
    usage = Usage(bench.database, bench.clock)
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


def _slow_down(worker: WorkerRig, name: str, seconds: float) -> None:
    """Let the engine take its time, on the clock moved by hand."""
    plain = getattr(worker.engine, name)

    def slowly(*args: object, **options: object) -> object:
        worker.clock.move(seconds)
        return plain(*args, **options)

    setattr(worker.engine, name, slowly)
