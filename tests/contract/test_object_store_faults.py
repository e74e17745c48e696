"""A bucket that refuses, dawdles and tears: snapshots and checkpoints come through whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.clock import HandClock
from harness.faulty_s3 import FaultyS3
from harness.journal import Bench
from harness.operations import Request, create, forward_backward, load, optim_step, replayed, save
from harness.worker import WorkerRig
from twinkle.storage.blobs import ObjectStore


@pytest.fixture
def bench(sqlite_url: str, clock: HandClock) -> Iterator[Bench]:
    bench = Bench(sqlite_url, clock)
    yield bench
    bench.close()


@pytest.fixture
def bucket(s3_endpoint: str, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """Between us and an empty folder of the S3 server, from now on."""
    faulty = FaultyS3(s3_endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", faulty.url)
    yield faulty
    faulty.close()


@pytest.mark.parametrize("fault", ["refuses", "dawdles", "tears"])
def test_a_run_over_a_faulty_bucket_ends_as_one_by_one(
    bench: Bench, bucket: FaultyS3, s3_url: str, clock: HandClock, fault: str
) -> None:
    run: list[Request | None] = [create(), forward_backward(1), optim_step(), save("x"), forward_backward(2)]
    run += [optim_step(), load("x", with_optimizer=True), forward_backward(3), optim_step()]
    bench.adapter("a")
    bench.append(*(request.numbered("a", seq) for seq, request in enumerate(run) if seq > 0 and request is not None))
    rounds = 0
    while bench.lane("a").head_kind is not None:
        rounds += 1
        assert rounds < 50, "it does not come to an end"
        clock.move(1000)
        # Each round a worker that knows nothing yet: what the last one left in the bucket is all there is.
        worker = WorkerRig(
            f"worker{rounds}",
            stores=bench.stores,
            blobs=ObjectStore(s3_url),
            clock=clock,
            snapshot_every_ops=1,
            max_attempts=10,
        )
        bucket.refusals = 1 if fault == "refuses" else 0
        bucket.delay_s = 0.05 if fault == "dawdles" else 0.0
        # Every second round, or nothing would ever be whole.
        bucket.torn_writes = rounds % 2 if fault == "tears" else 0
        worker.drain(2)
        worker.bury()

    truth, outcomes = replayed(run)
    for seq, (code, _) in enumerate(outcomes):
        failure = bench.status("a", seq).failure
        assert (failure.code if failure else "done") == code, (seq, failure)
    state = worker.state_before("a", len(run))
    assert (state.applied, state.pending, state.steps) == (truth.applied, truth.pending, truth.steps)
