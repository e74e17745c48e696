"""An adapter that its client unloads ends in its turn, and with it all that it would be rebuilt from."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from harness.clock import HandClock
from harness.journal import Bench, new_adapter, submission
from harness.operations import Request, forward_backward, optim_step, save, submit_run
from harness.worker import BreakableBlobs, Killed, MakeWorker, WorkerRig
from twinkle.cli.operator.runs import list_runs
from twinkle.core.errors import InvalidInput, LimitReached, NotFound
from twinkle.core.lease import Lease
from twinkle.core.operation import OperationKind, OperationState
from twinkle.core.settings import Settings
from twinkle.scheduler.retention import Retention
from twinkle.storage.journal.records import AdapterLimit

KEEP_ALL = Retention(keep_s=1e12, every_ops=4, max_snapshots=100)
SILENT_S = 300.0
STEPS: tuple[Request, ...] = (forward_backward(1), optim_step(1), save("kept"), forward_backward(2), optim_step(2))


@pytest.fixture
def make_worker(make_worker: MakeWorker) -> MakeWorker:
    """Workers that keep everything, and snapshot after every operation that leaves no gradients."""
    return partial(make_worker, retention=KEEP_ALL, snapshot_every_ops=1, lease_s=1e9)


def _is_in_memory(worker: WorkerRig, adapter: str) -> bool:
    return adapter in worker.residents.used(within_s=1e12)


def _prune(bench: Bench) -> None:
    for run in bench.snapshots.runs_to_prune(older_than_s=1e9):
        bench.snapshots.prune(run, KEEP_ALL.choose)


def test_an_adapter_is_unloaded_once_behind_everything_that_was_accepted_before(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a")
    bench.append(submission("a", 2))

    first, again = (bench.adapters.unload("a", "t0") for _ in range(2))
    bench.append(submission("a", 1))
    done = bench.run(lease)
    later = bench.adapters.unload("a", "t0")

    assert [first.request_id, again.request_id, later.request_id] == ["a:req:3"] * 3
    assert [first.is_new, again.is_new, later.is_new] == [True, False, False]
    assert done == [("a", 1), ("a", 2), ("a", 3)]
    assert bench.status("a", 3).kind is OperationKind.UNLOAD_MODEL


def test_nothing_new_is_accepted_behind_it_but_what_was_sent_before_is_found_again(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a")
    sent = submission("a", 1)
    bench.append(sent)
    bench.adapters.unload("a", "t0")

    new, resent = bench.append(submission("a", 2), sent)
    bench.run(lease)
    after = bench.append(submission("a", 2))[0]

    for refused in (new, after):
        assert isinstance(refused, InvalidInput)
        assert refused.field == "model_id"
        assert "a was unloaded" in refused.message
    assert (resent.request_id, resent.is_new) == ("a:req:1", False)
    with pytest.raises(InvalidInput, match="a was unloaded"):
        bench.branches.rewind("a", "t0", at=0, request_key=None)
    with pytest.raises(InvalidInput, match="a was unloaded"):
        bench.branches.fork(new_adapter("b"), source="a", at=0)
    with pytest.raises(InvalidInput, match="a was unloaded"):
        bench.adapters.refuse_unloaded("a")


def test_an_unloaded_run_is_shown_as_unloaded_and_not_as_parked(
    bench: Bench, make_worker: MakeWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    for adapter in ("a", "b"):
        submit_run(bench, optim_step(), adapter=adapter)
    bench.adapters.pin("a", is_pinned=True)
    bench.adapters.unload("a", "t0")
    states = []
    for _ in range(2):
        list_runs(Settings(database_url=bench.url), limit=10, as_json=True)
        states.append({row["run"]: row["state"] for row in json.loads(capsys.readouterr().out)})
        make_worker().drain()
        capsys.readouterr()

    assert states == [{"a": "unloaded", "b": "active"}] * 2


def test_who_does_not_own_it_cannot_unload_it_nor_what_is_no_adapter(bench: Bench, lease: Lease) -> None:
    bench.created(lease, "a")

    for adapter, tenant in (("a", "t1"), ("nothing", "t0")):
        with pytest.raises(NotFound):
            bench.adapters.unload(adapter, tenant)
    bench.adapters.refuse_unloaded("a")


def test_an_unloaded_adapter_leaves_the_device_and_its_snapshots_and_payloads_go_but_its_checkpoints_stay(
    bench: Bench, make_worker: MakeWorker, store: BreakableBlobs, clock: HandClock, tmp_path: Path
) -> None:
    submit_run(bench, *STEPS)
    worker = make_worker()
    worker.drain()
    worker.settle()
    stored = tmp_path / "objects" / "snapshots"
    assert list(stored.rglob("*.safetensors"))
    had = bench.snapshots.cost("a")
    accepted = bench.adapters.unload("a", "t0")
    worker.drain()
    worker.settle()
    was_in_memory = _is_in_memory(worker, "a")

    _prune(bench)
    status = bench.status("a", 6)

    assert (had.num_snapshots > 0, had.num_payloads > 0) == (True, True)
    assert accepted.request_id == status.request_id
    assert status.result is not None
    assert json.loads(status.result.inline or b"") == {"model_id": "a", "type": "unload_model"}
    assert not was_in_memory
    assert bench.snapshots.cost("a").num_snapshots == 0
    assert bench.rows("SELECT 1 FROM operation WHERE kind = 'forward_backward' AND payload IS NOT NULL") == []
    assert bench.checkpoints.find("tinker://a/weights/kept", tenant="t0").size_bytes > 0
    assert bench.snapshots.runs_to_prune(older_than_s=1e9) == []
    clock.move(1e6)
    bench.stores.waste.delete(store, older_than_s=0)
    assert list(stored.rglob("*.safetensors")) == []


@pytest.mark.parametrize("when", ["before_commit", "after_commit"])
def test_a_worker_killed_while_it_unloads_leaves_it_to_the_next(
    bench: Bench, make_worker: MakeWorker, when: str
) -> None:
    submit_run(bench, *STEPS)
    worker = make_worker(lease_s=15.0)
    worker.drain()
    bench.adapters.unload("a", "t0")

    def die() -> None:
        raise Killed

    setattr(worker.journal, when, die)
    with pytest.raises(Killed):
        worker.drain()
    second = make_worker(lease_s=15.0)
    second.drain()

    assert bench.status("a", 6).state is OperationState.DONE
    assert not _is_in_memory(second, "a")


def test_nobody_restores_or_stores_an_unloaded_adapter_of_a_session_that_ended(
    bench: Bench, make_worker: MakeWorker, clock: HandClock
) -> None:
    submit_run(bench, *STEPS)
    worker = make_worker(session_timeout_s=SILENT_S)
    bench.adapters.unload("a", "t0")
    worker.drain()
    _prune(bench)

    clock.move(SILENT_S + 1)
    worker.drain()
    worker.drain()
    worker.worker.close()

    assert bench.snapshots.cost("a").num_snapshots == 0
    assert bench.rows("SELECT 1 FROM adapter WHERE parked_at IS NULL") == []


def test_a_snapshot_that_comes_late_is_given_up(bench: Bench, make_worker: MakeWorker) -> None:
    submit_run(bench, *STEPS)
    worker = make_worker()
    worker.drain()
    worker.settle()
    late = bench.snapshots.all("a")[-1]
    bench.adapters.unload("a", "t0")
    worker.drain()
    _prune(bench)

    bench.snapshots.add(late)

    assert bench.snapshots.all("a") == []
    assert (late.blob,) in bench.rows("SELECT key FROM doomed_blob")


def test_an_adapter_about_to_be_unloaded_counts_no_longer_against_its_tenants_limit(bench: Bench, lease: Lease) -> None:
    limit = AdapterLimit(max_adapters=1, live_since=-1.0)
    bench.created(lease, "a")
    with pytest.raises(LimitReached):
        limit_of_one(bench, "b", limit)

    bench.adapters.unload("a", "t0")

    limit_of_one(bench, "c", limit)


def limit_of_one(bench: Bench, adapter: str, limit: AdapterLimit) -> None:
    with bench.database.transaction() as transaction:
        new_adapter(adapter).insert(transaction)
        limit.check(transaction, "t0")
