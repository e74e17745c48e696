"""Meshes that follow load, on a journal with workers that compute nothing: to the most, and back to the least."""

from __future__ import annotations

from functools import partial

import pytest

from harness.clock import HandClock
from harness.journal import MESH, Bench, identity, submission
from harness.operations import forward_backward, optim_step, submit_run
from harness.worker import MakeWorker, WorkerRig
from twinkle.cli.embedded.replicas import Replicas
from twinkle.cli.embedded.stack import parse_meshes
from twinkle.core.errors import ConfigError
from twinkle.core.settings import Settings
from twinkle.scheduler.placement import spread

SECOND, THIRD = f"{MESH}-2", f"{MESH}-3"


def test_under_load_there_are_more_meshes_that_share_the_work_and_later_the_least_again(
    bench: Bench, clock: HandClock, make_worker: MakeWorker
) -> None:
    settings = Settings(model="m", model_name="base", replica_operations=4, replica_grow_s=30, replica_shrink_s=600)
    plans = parse_meshes([f"{MESH}=cpu,ranks=ray:2,replicas=1-3"], settings)
    replicas = Replicas(settings, plans, bench.meshes, bench.stores.moves, clock)
    new_worker = partial(make_worker, snapshot_every_ops=1000, lease_s=1e9)
    workers = [new_worker()]
    workers[0].drain()
    replicas.look()

    for adapter in "abcdef":
        submit_run(bench, forward_backward(1), optim_step(), adapter=adapter)
    replicas.look()
    assert asked_for(bench) == {}
    clock.move(30)
    replicas.look()
    assert asked_for(bench) == {name: f"{name}=cpu,ranks=ray:2,model=m,model-name=base" for name in (SECOND, THIRD)}

    workers += [start(new_worker, name) for name in (SECOND, THIRD)]
    replicas.look()
    settle(clock, *workers)
    assert all(len(bench.rows(f"SELECT id FROM lane WHERE mesh = '{name}'")) == 2 for name in (MESH, SECOND, THIRD))
    assert all(worker.engine.batch_sizes for worker in workers[1:])
    assert bench.rows("SELECT DISTINCT state FROM operation") == [("done",)]

    replicas.look()
    assert not any(mesh.is_draining for mesh in bench.meshes.all())
    clock.move(600)
    replicas.look()
    sweep(bench)
    settle(clock, *workers)
    assert bench.rows("SELECT DISTINCT mesh FROM lane") == [(MESH,)]
    for worker in workers[1:]:
        lease = worker.keeper.current()
        assert lease is not None
        bench.meshes.release(lease)
    replicas.look()
    assert [mesh.name for mesh in bench.meshes.all()] == [MESH]


def test_a_mesh_that_comes_to_life_gets_its_part_though_it_has_not_spoken_and_though_nothing_waits_at_that_moment(
    bench: Bench, clock: HandClock, make_worker: MakeWorker
) -> None:
    settings = Settings(model="m", model_name="base", replica_operations=1, replica_grow_s=0, replica_shrink_s=600)
    plans = parse_meshes([f"{MESH}=cpu,replicas=1-3"], settings)
    replicas = Replicas(settings, plans, bench.meshes, bench.stores.moves, clock)
    new_worker = partial(make_worker, snapshot_every_ops=1000, lease_s=1e9)
    first = new_worker()
    first.drain()
    replicas.look()
    for adapter in "abc":
        submit_run(bench, forward_backward(1), optim_step(), adapter=adapter)

    # Alive, and has not said yet what it serves: nothing may be sent there, and it is not forgotten.
    lease = bench.meshes.acquire(SECOND, identity("b"), lease_s=1e9)
    assert lease is not None
    replicas.look()
    assert bench.rows("SELECT id FROM lane WHERE moving_to IS NOT NULL") == []
    bench.meshes.release(lease)
    second = start(new_worker, SECOND)
    replicas.look()
    settle(clock, first, second)
    assert len(bench.rows(f"SELECT id FROM lane WHERE mesh = '{SECOND}'")) == 1

    # All runs pause just as the third comes; it gets one when they go on.
    third = start(new_worker, THIRD)
    replicas.look()
    for adapter in "abc":
        bench.append(submission(adapter, 3))
    ((elsewhere,),) = bench.rows(f"SELECT id FROM lane WHERE mesh = '{SECOND}'")
    bench.stores.moves.begin(elsewhere, MESH)
    settle(clock, first, second, third)
    for adapter in "abc":
        bench.append(submission(adapter, 4))
    replicas.look()
    settle(clock, first, second, third)
    assert len(bench.rows(f"SELECT id FROM lane WHERE mesh = '{THIRD}'")) == 1


@pytest.mark.parametrize(("flag", "says"), [("cuda", "on the same cuda;"), ("cuda:0,ranks=2", "on the same cuda:0;")])
def test_replicas_that_would_share_a_device_of_the_machine_are_refused(flag: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_meshes([f"{MESH}={flag},replicas=1-2"], Settings(model="m"))

    on_ray, *_ = parse_meshes([f"{MESH}=cuda,replicas=1-2"], Settings(model="m", ranks="ray:1"))
    assert on_ray.replicas == (1, 2)


def start(new_worker: partial[WorkerRig], mesh: str) -> WorkerRig:
    """A worker that has said what its mesh can do, before anything is on it."""
    worker = new_worker(mesh=mesh)
    worker.drain()
    return worker


def asked_for(bench: Bench) -> dict[str, str]:
    return {mesh.name: mesh.asked_for for mesh in bench.meshes.all() if mesh.asked_for}


def settle(clock: HandClock, *workers: WorkerRig) -> None:
    """Let workers look around, each some times."""
    for _ in range(3):
        clock.move(2)
        for worker in workers:
            worker.drain()


def sweep(bench: Bench) -> None:
    """What housekeeping does for meshes that are drained."""
    meshes = bench.meshes.all()
    for mesh in meshes:
        if mesh.is_draining:
            for name, lanes in spread(bench.stores.moves.staying(mesh.name), mesh, meshes).items():
                bench.stores.moves.send(lanes, name)
