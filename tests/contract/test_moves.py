"""Adapters go to another mesh of their model, whatever dies on the way; their clients notice nothing but time."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial

import pytest

from harness.clock import HandClock
from harness.journal import MESH, Bench, done, new_sampler, submission
from harness.operations import (
    Request,
    create,
    forward_backward,
    optim_step,
    replayed,
    sample_body,
    save_for_sampler,
    submit_run,
)
from harness.worker import BreakableBlobs, Killed, MakeWorker, WorkerRig
from twinkle.cli.embedded.stack import parse_meshes
from twinkle.cli.operator.meshes import add_mesh, drain_mesh, list_meshes, move_run, remove_mesh
from twinkle.core.errors import ConfigError, Conflict, InvalidInput, MeshUnavailable, NotFound, TransientError
from twinkle.core.ids import request_id_of
from twinkle.core.operation import OperationKind, OperationState
from twinkle.core.settings import Settings
from twinkle.scheduler.placement import choose_mesh, spread
from twinkle.storage.database import Row, Transaction
from twinkle.storage.journal import moves
from twinkle.storage.journal.meshes import MeshStatus
from twinkle.workers.engines.null_engine import NullEngine

OTHER = "mesh1"


@pytest.fixture
def make_worker(make_worker: MakeWorker) -> MakeWorker:
    """Workers that take no snapshot of their own accord and never lose their lease."""
    return partial(make_worker, snapshot_every_ops=1000, lease_s=1e9)


@pytest.fixture
def here(make_worker: MakeWorker) -> WorkerRig:
    worker = make_worker()
    worker.drain()
    return worker


@pytest.fixture
def there(make_worker: MakeWorker) -> WorkerRig:
    worker = make_worker(mesh=OTHER)
    worker.drain()
    return worker


def settle(clock: HandClock, *workers: WorkerRig) -> None:
    """Let workers look around, each some times."""
    for _ in range(3):
        clock.move(2)
        for worker in workers:
            worker.drain()


def place_of(bench: Bench, lane: str) -> list[tuple[object, ...]]:
    """Where a lane is and is to be, where its adapter is, and where those of its operations are that have not ended."""
    return bench.rows(
        "SELECT l.mesh, l.moving_to, a.mesh, (SELECT MIN(o.mesh) FROM operation o WHERE o.lane = l.id"
        " AND o.state IN ('queued', 'running')) FROM lane l JOIN adapter a ON a.id = l.id WHERE l.id = ?",
        (lane,),
    )


def state_of(worker: WorkerRig, adapter: str, num_operations: int) -> tuple[object, ...]:
    state = worker.state_before(adapter, num_operations)
    return state.applied, state.pending, state.steps


def truth(run: list[Request | None]) -> tuple[object, ...]:
    adapter, _ = replayed(run)
    return adapter.applied, adapter.pending, adapter.steps


@pytest.mark.parametrize("window", [0, 1], ids=["between_steps", "with_open_gradients"])
def test_an_adapter_goes_on_at_another_mesh_where_it_left_off_and_nothing_is_replayed(
    bench: Bench, clock: HandClock, here: WorkerRig, there: WorkerRig, window: int
) -> None:
    requests = [forward_backward(1), optim_step(), *[forward_backward(2)] * window]
    run = submit_run(bench, *requests)
    here.drain()

    bench.stores.moves.begin("a", OTHER)
    more = [forward_backward(3), optim_step()]
    bench.append(*(request.numbered("a", len(run) + number) for number, request in enumerate(more)))
    settle(clock, here, there)

    assert place_of(bench, "a") == [(OTHER, None, OTHER, None)]
    assert [seq for (seq,) in bench.rows("SELECT seq FROM operation WHERE state = 'done' ORDER BY seq")] == list(
        range(len(run) + 2)
    )
    assert len(there.engine.batch_sizes) == 1
    assert state_of(there, "a", len(run) + 2) == truth([*run, *more])


def test_while_it_moves_nothing_of_an_adapter_is_claimed(bench: Bench, here: WorkerRig, there: WorkerRig) -> None:
    run = submit_run(bench, forward_backward(1), optim_step())
    here.drain()
    bench.stores.moves.begin("a", OTHER)
    bench.append(forward_backward(2).numbered("a", len(run)))

    for worker, mesh in ((here, MESH), (there, OTHER)):
        lease = worker.keeper.current()
        assert lease is not None and lease.mesh == mesh
        assert bench.claim(lease) == []


def test_what_runs_is_finished_before_its_adapter_goes(
    bench: Bench, clock: HandClock, here: WorkerRig, there: WorkerRig
) -> None:
    run = submit_run(bench, forward_backward(1), optim_step())

    def send() -> None:
        assert bench.stores.moves.begin("a", OTHER)
        assert not bench.stores.moves.finish("a", from_mesh=MESH)

    here.journal.after_claim = send
    settle(clock, here, there)

    assert place_of(bench, "a") == [(OTHER, None, OTHER, None)]
    assert state_of(there, "a", len(run)) == truth(run)
    assert bench.rows("SELECT DISTINCT suspicions, attempts FROM operation") == [(0, 1)]


@pytest.mark.parametrize("dies", ["while_it_works", "while_it_stores", "as_it_hands_over"])
def test_a_mesh_that_dies_in_the_middle_of_a_move_loses_nothing(
    bench: Bench, clock: HandClock, store: BreakableBlobs, make_worker: MakeWorker, dies: str
) -> None:
    here = make_worker(lease_s=15.0)
    run = submit_run(bench, forward_backward(1), optim_step(), forward_backward(2), optim_step())
    there = make_worker(mesh=OTHER)
    there.drain()
    here.drain(3)

    if dies == "while_it_works":
        here.journal.before_commit = lambda: _die(bench)
    elif dies == "while_it_stores":
        bench.stores.moves.begin("a", OTHER)
        here.residents.evict = _killed  # type: ignore[method-assign]
    else:
        bench.stores.moves.begin("a", OTHER)
        clock.move(2)
        bench.stores.moves.finish("a", from_mesh=MESH)
        here.keeper.give_up()
    with suppress(Killed):
        settle(clock, here)
    clock.move(100)
    bench.stores.moves.finish_abandoned()
    settle(clock, there)

    assert place_of(bench, "a") == [(OTHER, None, OTHER, None)]
    assert bench.rows("SELECT seq, state FROM operation ORDER BY seq") == [(seq, "done") for seq in range(len(run))]
    assert state_of(there, "a", len(run)) == truth(run)


def test_what_a_worker_that_was_taken_for_dead_brings_late_is_not_taken(
    bench: Bench, clock: HandClock, make_worker: MakeWorker
) -> None:
    """Both meshes are in their first epoch: the number alone would not tell them apart."""
    here, there = make_worker(lease_s=15.0), make_worker(mesh=OTHER)
    there.drain()
    run = submit_run(bench, forward_backward(1), optim_step())

    def taken_away() -> None:
        bench.stores.moves.begin("a", OTHER)
        clock.move(100)
        assert bench.stores.moves.finish_abandoned() == 1
        lease = there.keeper.current()
        assert lease is not None
        assert len(bench.claim(lease)) == 1

    here.journal.before_commit = taken_away
    here.drain()
    before = bench.status("a", 0).state
    there.drain()

    assert [mesh.epoch for mesh in bench.meshes.all()] == [1, 1]
    assert before is OperationState.RUNNING
    assert state_of(there, "a", len(run)) == truth(run)


def test_a_mesh_that_is_drained_sends_everything_away_and_can_then_be_removed(
    bench: Bench, clock: HandClock, here: WorkerRig, there: WorkerRig
) -> None:
    runs = {adapter: submit_run(bench, forward_backward(1), optim_step(), adapter=adapter) for adapter in "abc"}
    bench.journal.open_lane(new_sampler("s"))
    here.drain()

    bench.stores.moves.drain(MESH)
    with pytest.raises(Conflict, match="worker"):
        bench.stores.moves.remove(MESH)
    _sweep(bench)
    settle(clock, here, there)
    bench.append(submission("s", 0, OperationKind.SAMPLE, body=sample_body("s", 0)))
    settle(clock, here, there)
    here.worker.close()
    here.keeper.start()
    here.keeper.stop()
    bench.stores.moves.remove(MESH)

    assert bench.rows("SELECT DISTINCT mesh FROM lane") == [(OTHER,)]
    assert bench.status("s", 0).state is OperationState.DONE
    assert [mesh.name for mesh in bench.meshes.all()] == [OTHER]
    for adapter, run in runs.items():
        assert state_of(there, adapter, len(run)) == truth(run)


def test_a_mesh_that_is_drained_takes_nobodys_nameless_weights_away(
    bench: Bench, clock: HandClock, here: WorkerRig, there: WorkerRig
) -> None:
    bench.adapter("a")
    run: list[Request | None] = [create(), forward_backward(1), optim_step(), save_for_sampler()]
    later = [forward_backward(2), optim_step()]
    bench.append(*(one.numbered("a", seq) for seq, one in enumerate([*run, *later]) if one is not None and seq > 0))
    here.drain()
    session = f"session-t0:sample:{run.index(run[-1])}"

    bench.stores.moves.drain(MESH)
    _sweep(bench)
    settle(clock, here, there)
    here.bury()
    body = sample_body(session, 1)
    bench.append(submission(session, 1, OperationKind.SAMPLE, body=body))
    there.drain()

    assert bench.rows("SELECT DISTINCT mesh FROM lane") == [(OTHER,)]
    sampled = there.engine.sampled_from[request_id_of(session, 1)]
    assert sampled is not None and sampled.applied == replayed(run)[0].applied
    assert sampled.applied != replayed([*run, *later])[0].applied


def test_a_mesh_with_something_on_it_is_not_removed(bench: Bench, clock: HandClock, make_worker: MakeWorker) -> None:
    worker = make_worker(lease_s=15.0)
    worker.drain()
    submit_run(bench, forward_backward(1))
    clock.move(100)

    with pytest.raises(Conflict, match="1 adapters"):
        bench.stores.moves.remove(MESH)


def test_a_mesh_that_goes_while_an_adapter_is_on_its_way_to_it_leaves_the_adapter_where_it_works(
    bench: Bench, clock: HandClock, here: WorkerRig, there: WorkerRig
) -> None:
    run = submit_run(bench, forward_backward(1), optim_step())

    def send_and_remove() -> None:
        """Something of it runs all the while, so it cannot go yet."""
        here.journal.after_claim = lambda: None
        bench.stores.moves.begin("a", OTHER)
        _release(bench, there)
        with pytest.raises(Conflict, match="1 adapters and sampling sessions are on their way to it"):
            bench.stores.moves.remove(OTHER)
        bench.stores.moves.drain(OTHER)
        bench.stores.moves.remove(OTHER)

    here.journal.after_claim = send_and_remove
    settle(clock, here)

    assert place_of(bench, "a") == [(MESH, None, MESH, None)]
    assert state_of(here, "a", len(run)) == truth(run)
    assert bench.rows("SELECT DISTINCT state FROM operation") == [("done",)]


@pytest.mark.parametrize("is_gone", [False, True], ids=["drained", "gone"])
def test_nothing_is_sent_to_a_mesh_that_was_there_at_the_last_look_alone(
    bench: Bench, here: WorkerRig, there: WorkerRig, is_gone: bool
) -> None:
    submit_run(bench, forward_backward(1))
    here.drain()
    bench.stores.moves.drain(MESH)
    seen = bench.meshes.all()
    [source] = (mesh for mesh in seen if mesh.name == MESH)
    [(name, lanes)] = spread(bench.stores.moves.staying(MESH), source, seen).items()
    bench.stores.moves.drain(OTHER)
    if is_gone:
        _release(bench, there)
        bench.stores.moves.remove(OTHER)

    assert (name, lanes) == (OTHER, ["a"])
    assert bench.stores.moves.send(lanes, name) is False
    assert place_of(bench, "a") == [(MESH, None, MESH, None)]


def test_a_mesh_that_another_is_drained_to_is_not_removed(
    bench: Bench, clock: HandClock, make_worker: MakeWorker
) -> None:
    make_worker(lease_s=15.0).drain()
    make_worker(mesh=OTHER, lease_s=15.0).drain()
    clock.move(100)
    bench.stores.moves.drain(MESH, to_mesh=OTHER)

    with pytest.raises(Conflict, match=f"mesh {MESH} is drained to it"):
        bench.stores.moves.remove(OTHER)
    bench.stores.moves.restore(MESH)
    bench.stores.moves.remove(OTHER)


@pytest.mark.parametrize(("source", "target"), [(MESH, OTHER), (OTHER, MESH)])
def test_two_meshes_are_locked_in_one_order_whichever_way_something_goes(
    bench: Bench,
    clock: HandClock,
    here: WorkerRig,
    there: WorkerRig,
    monkeypatch: pytest.MonkeyPatch,
    source: str,
    target: str,
) -> None:
    """Else two that move something in opposite ways would wait for each other, where rows are locked."""
    submit_run(bench, forward_backward(1))
    bench.stores.moves.begin("a", source)
    settle(clock, here, there)
    locked: list[str] = []
    lock = moves._mesh

    def locking(transaction: Transaction, name: str) -> Row:
        locked.append(name)
        return lock(transaction, name)

    monkeypatch.setattr(moves, "_mesh", locking)

    assert bench.stores.moves.begin("a", target)
    bench.stores.moves.drain(source, to_mesh=target)

    assert locked == sorted([source, target]) * 2


def test_a_drain_that_is_taken_back_keeps_what_is_still_there(
    bench: Bench, clock: HandClock, here: WorkerRig, there: WorkerRig
) -> None:
    run = submit_run(bench, forward_backward(1), optim_step())
    here.drain()
    bench.stores.moves.drain(MESH)
    _sweep(bench)

    bench.stores.moves.restore(MESH)
    settle(clock, here, there)

    assert place_of(bench, "a") == [(MESH, None, MESH, None)]
    assert state_of(here, "a", len(run)) == truth(run)


def test_the_operator_asks_for_meshes_moves_runs_and_gives_meshes_back_at_the_command_line(
    bench: Bench, clock: HandClock, here: WorkerRig, there: WorkerRig, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(database_url=bench.url, model="m", model_name="base")
    submit_run(bench, forward_backward(1), optim_step())
    here.drain()

    add_mesh(settings, "third", device="cpu", ranks="ray:2")
    drain_mesh(settings, MESH, to=OTHER, undo=False)
    with pytest.raises(TransientError, match="on its way"):
        move_run(settings, "a", to=OTHER, timeout_s=0)
    settle(clock, here, there)
    remove_mesh(settings, MESH, timeout_s=0)
    with pytest.raises(Conflict, match="1 adapters"):
        remove_mesh(settings, OTHER, timeout_s=0)
    drain_mesh(settings, OTHER, to=None, undo=True)
    list_meshes(settings, as_json=True)

    rows = {row["mesh"]: row for row in json.loads(capsys.readouterr().out.splitlines()[-1])}
    assert {name: (row["state"], row["adapters"], row["asked_for"]) for name, row in rows.items()} == {
        OTHER: ("no worker", 1, None),
        "third": ("no worker", 0, "third=cpu,ranks=ray:2,model=m,model-name=base"),
    }


def test_what_is_asked_for_is_read_by_whoever_starts_workers(bench: Bench) -> None:
    settings = Settings(database_url=bench.url, model="m", model_name="base")

    add_mesh(settings, "third", device="cuda", ranks="ray:2")

    [mesh] = bench.meshes.all()
    [plan] = parse_meshes([mesh.asked_for or ""], settings)
    assert (plan.name, plan.device, plan.ranks, plan.model, plan.model_name) == ("third", "cuda", "ray:2", "m", "base")
    with pytest.raises(ConfigError, match="ranks"):
        add_mesh(settings, "fourth", device="cuda", ranks="slurm:2")


def test_nothing_new_comes_to_a_mesh_that_is_drained(bench: Bench, here: WorkerRig, there: WorkerRig) -> None:
    bench.stores.moves.drain(MESH)
    chosen = choose_mesh(bench.meshes.all(), "base").name
    bench.stores.moves.drain(OTHER)

    assert chosen == OTHER
    with pytest.raises(MeshUnavailable, match="drained"):
        choose_mesh(bench.meshes.all(), "base")


def test_an_adapter_is_sent_only_where_its_model_is(bench: Bench, here: WorkerRig, make_worker: MakeWorker) -> None:
    make_worker(mesh="small", engine=NullEngine(base_model="base", max_rank=4)).drain()
    make_worker(mesh="else", engine=NullEngine(base_model="another", max_rank=8)).drain()
    submit_run(bench, forward_backward(1))
    here.drain()

    for mesh, error, words in (
        ("else", InvalidInput, "base_model is another, not base"),
        ("small", InvalidInput, "rank 4"),
        ("nowhere", NotFound, "no mesh"),
    ):
        with pytest.raises(error, match=words):
            bench.stores.moves.begin("a", mesh)
    with pytest.raises(NotFound, match="no adapter"):
        bench.stores.moves.begin("nobody", "small")
    assert bench.stores.moves.begin("a", MESH) is False


def test_a_drained_mesh_is_spread_over_the_others_by_how_many_adapters_they_have() -> None:
    capabilities = NullEngine(base_model="base", max_rank=4).capabilities

    def mesh(name: str, num_live: int, **more: object) -> MeshStatus:
        known = {"capabilities": capabilities, "epoch": 1, "alive": True, "num_adapters": 0} | more
        return MeshStatus(name=name, num_live=num_live, **known)  # type: ignore[arg-type]

    source = mesh("old", 9, is_draining=True)
    others = [mesh("busy", 3), mesh("idle", 0), mesh("dead", 0, alive=False)]

    places = spread(list("abcde"), source, [source, *others])

    assert {name: len(lanes) for name, lanes in places.items()} == {"idle": 4, "busy": 1}


def test_an_outcome_from_a_mesh_that_the_operation_is_not_at_is_not_taken(
    bench: Bench, here: WorkerRig, there: WorkerRig
) -> None:
    submit_run(bench, forward_backward(1))
    lease, other = here.keeper.current(), there.keeper.current()
    assert lease is not None and other is not None
    [claim] = bench.claim(lease)
    committed = bench.journal.commit(other, [done(claim)])

    assert (committed.recorded, len(committed.not_held)) == ([], 1)


def _sweep(bench: Bench) -> None:
    """What housekeeping does for meshes that are drained."""
    meshes = bench.meshes.all()
    for mesh in meshes:
        if mesh.is_draining:
            for name, lanes in spread(bench.stores.moves.staying(mesh.name), mesh, meshes).items():
                bench.stores.moves.send(lanes, name)


def _release(bench: Bench, worker: WorkerRig) -> None:
    lease = worker.keeper.current()
    assert lease is not None
    bench.meshes.release(lease)


def _die(bench: Bench) -> None:
    bench.stores.moves.begin("a", OTHER)
    raise Killed


def _killed(*_: object) -> None:
    raise Killed
