"""Who holds a mesh: under a new epoch each time, for a while, and not a moment after the holder is known dead."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from harness.clock import HandClock
from harness.journal import MESH, Bench, identity
from twinkle.core.errors import LeaseLost, StorageUnavailable
from twinkle.core.lease import Lease, ProcessIdentity
from twinkle.core.mesh import MeshAnnouncement, MeshCapabilities
from twinkle.storage.database import Database
from twinkle.storage.journal.meshes import ANNOUNCED_S, Meshes

_CAPABILITIES = MeshCapabilities(
    base_model="base",
    architecture="null",
    vocab_size=10,
    max_context_length=10,
    max_rank=4,
    device="none",
    determinism="none",
)


def _acquire(bench: Bench, owner: ProcessIdentity) -> Lease | None:
    return bench.meshes.acquire(MESH, owner, lease_s=15)


def test_nobody_gets_a_mesh_while_anothers_lease_runs_and_anybody_after(bench: Bench, clock: HandClock) -> None:
    first = _acquire(bench, identity("a"))
    assert first is not None
    clock.move(14.9)
    assert _acquire(bench, identity("b")) is None
    clock.move(0.1)

    second = _acquire(bench, identity("b"))

    assert second is not None
    assert (first.epoch, second.epoch) == (1, 2)


def test_a_renewed_lease_runs_on_and_an_old_one_cannot_be_renewed(bench: Bench, clock: HandClock) -> None:
    first = _acquire(bench, identity("a"))
    assert first is not None
    clock.move(14)
    bench.meshes.renew(first, lease_s=15)
    clock.move(14)
    assert _acquire(bench, identity("b")) is None
    clock.move(1)
    assert _acquire(bench, identity("b")) is not None

    with pytest.raises(LeaseLost):
        bench.meshes.renew(first, lease_s=15)


def test_a_lease_that_ran_out_can_be_renewed_while_nobody_else_came(bench: Bench, clock: HandClock) -> None:
    lease = _acquire(bench, identity("a"))
    assert lease is not None
    clock.move(1000)

    bench.meshes.renew(lease, lease_s=15)

    assert _acquire(bench, identity("b")) is None


def test_a_released_mesh_is_free_at_once_and_fenced(bench: Bench) -> None:
    first = _acquire(bench, identity("a"))
    assert first is not None
    bench.meshes.release(first)

    with pytest.raises(LeaseLost):
        bench.claim(first)
    second = _acquire(bench, identity("b"))
    assert second is not None and second.epoch == 2
    bench.meshes.release(first)
    bench.claim(second)


def test_the_same_process_may_take_its_mesh_again_under_a_new_epoch(bench: Bench) -> None:
    first, second = _acquire(bench, identity("a")), _acquire(bench, identity("a"))

    assert first is not None and second is not None
    assert second.epoch == first.epoch + 1
    with pytest.raises(LeaseLost):
        bench.claim(first)


def test_capabilities_outlive_the_worker_and_only_the_holder_writes_them(bench: Bench, clock: HandClock) -> None:
    first = _acquire(bench, identity("a"))
    assert first is not None
    bench.meshes.publish(first, _CAPABILITIES)
    (alive,) = bench.meshes.all()
    clock.move(15)
    (late,) = bench.meshes.all()
    _acquire(bench, identity("b"))
    bench.meshes.publish(first, _CAPABILITIES.model_copy(update={"device": "forged"}))
    (taken,) = bench.meshes.all()

    assert (alive.alive, late.alive, taken.alive) == (True, False, True)
    assert alive.capabilities == late.capabilities == taken.capabilities == _CAPABILITIES


# -- somebody sets the clock ------------------------------------------------------------------------------------------


def _watched(bench: Bench, clock: HandClock) -> Lease:
    """A lease that was renewed under the eyes of the one that stands by."""
    lease = _acquire(bench, identity("a"))
    assert lease is not None
    assert _acquire(bench, identity("b")) is None
    clock.move(5)
    bench.meshes.renew(lease, lease_s=15)
    assert _acquire(bench, identity("b")) is None
    return lease


def test_a_clock_that_is_set_forward_ends_no_lease_that_is_renewed(bench: Bench, clock: HandClock) -> None:
    lease = _watched(bench, clock)
    clock.step(3600)
    assert _acquire(bench, identity("b")) is None

    clock.move(5)
    bench.meshes.renew(lease, lease_s=15)
    assert _acquire(bench, identity("b")) is None
    clock.move(14.9)

    assert _acquire(bench, identity("b")) is None


@pytest.mark.parametrize("step_s", [3600, -3600])
def test_a_holder_that_falls_silent_is_succeeded_in_time_whatever_the_clock_says(
    bench: Bench, clock: HandClock, step_s: float
) -> None:
    _watched(bench, clock)
    clock.step(step_s)
    clock.move(14.9)
    assert _acquire(bench, identity("b")) is None
    clock.move(0.1)

    assert _acquire(bench, identity("b")) is not None


def test_a_lease_from_a_clock_that_was_ahead_does_not_run_for_hours(bench: Bench, clock: HandClock) -> None:
    clock.step(3600)
    assert _acquire(bench, identity("a")) is not None
    clock.step(-3600)
    assert _acquire(bench, identity("b")) is None
    clock.move(15)

    assert _acquire(bench, identity("b")) is not None


# -- the holder is dead -----------------------------------------------------------------------------------------------

_PRINT_IDENTITY = (
    "from twinkle.core.lease import ProcessIdentity; print(ProcessIdentity.current(), flush=True); input()"
)


def _live_process() -> tuple[subprocess.Popen[str], ProcessIdentity]:
    process = subprocess.Popen(
        [sys.executable, "-c", _PRINT_IDENTITY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    found = ProcessIdentity.parse(process.stdout.readline().strip())
    assert found is not None
    return process, found


def test_a_dead_holder_on_this_machine_is_not_waited_for_and_a_live_one_is(bench: Bench) -> None:
    process, holder = _live_process()
    assert _acquire(bench, holder) is not None
    assert _acquire(bench, ProcessIdentity.current()) is None
    process.kill()
    process.wait()

    assert _acquire(bench, ProcessIdentity.current()) is not None


def test_a_holder_that_nobody_has_reaped_yet_is_dead(bench: Bench) -> None:
    process, holder = _live_process()
    assert _acquire(bench, holder) is not None
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    taken = _acquire(bench, ProcessIdentity.current())
    process.wait()

    assert taken is not None


def test_a_holder_whose_pid_now_belongs_to_somebody_else_is_dead(bench: Bench) -> None:
    me = ProcessIdentity.current()
    assert _acquire(bench, replace(me, start_ticks=me.start_ticks - 1)) is not None

    assert _acquire(bench, me) is not None


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"pid_namespace": "pid:[1]"}, {"pid_namespace": ""}])
def test_of_a_process_elsewhere_nobody_knows_whether_it_is_dead(change: dict[str, str]) -> None:
    me = ProcessIdentity.current()

    assert not replace(me, start_ticks=1, **change).is_known_dead()  # type: ignore[arg-type]


def test_an_identity_reads_back_as_it_was_written() -> None:
    me = ProcessIdentity.current()

    assert ProcessIdentity.parse(str(me)) == me
    assert [ProcessIdentity.parse(text) for text in ("", "a|b|c|d", "a|b|1", "host")] == [None] * 4


def test_of_many_contenders_exactly_one_gets_the_mesh(bench: Bench) -> None:
    barrier = threading.Barrier(8)
    taken: list[Lease | None] = []

    def contend(name: str) -> None:
        barrier.wait()
        taken.append(_acquire(bench, identity(name)))
        bench.database.close()

    threads = [threading.Thread(target=contend, args=(str(i),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(lease.epoch for lease in taken if lease is not None) == [1]


def test_a_process_frozen_in_a_transaction_does_not_keep_its_mesh(postgres_url: str, clock: HandClock) -> None:
    frozen, next_one = Database(postgres_url), Database(postgres_url)
    Meshes(frozen, clock).acquire(MESH, identity("frozen"), lease_s=1.0)
    clock.move(10)

    def freeze_and_wake() -> None:
        with frozen.transaction() as transaction:
            transaction.execute("UPDATE mesh SET epoch = epoch WHERE name = ?", (MESH,))
            successor = Meshes(next_one, clock).acquire(MESH, identity("next"), lease_s=1.0)
            assert successor is not None and successor.epoch == 2
            transaction.execute("UPDATE mesh SET epoch = 0 WHERE name = ?", (MESH,))

    with pytest.raises(StorageUnavailable):
        freeze_and_wake()

    assert frozen.read("SELECT epoch FROM mesh WHERE name = ?", (MESH,)) == [(2,)]
    frozen.close()
    next_one.close()


def test_what_a_mesh_will_serve_is_known_until_it_says_so_itself_or_its_worker_is_gone(bench: Bench) -> None:
    coming = MeshAnnouncement(base_model="base", serves="training")
    bench.meshes.announce("new", coming)
    bench.meshes.announce("new", coming)

    [told] = [mesh for mesh in bench.meshes.all() if mesh.name == "new"]
    assert (told.announced, told.capabilities, told.alive) == (coming, None, False)
    lease = bench.meshes.acquire("new", identity("a"), lease_s=15)
    assert lease is not None
    bench.meshes.publish(lease, _CAPABILITIES)
    [spoke] = [mesh for mesh in bench.meshes.all() if mesh.name == "new"]
    assert (spoke.announced, spoke.capabilities) == (None, _CAPABILITIES)

    # One that had a worker is remembered without the announcement, one that never had is not.
    for name in ("new", "never"):
        bench.meshes.announce(name, coming)
        bench.meshes.withdraw(name)
    assert {mesh.name: mesh.announced for mesh in bench.meshes.all() if mesh.name != MESH} == {"new": None}


def test_what_a_killed_worker_has_announced_ends_by_itself_and_one_that_starts_for_long_renews_it(
    bench: Bench, clock: HandClock
) -> None:
    coming = MeshAnnouncement(base_model="base", serves="training")

    def told() -> dict[str, MeshAnnouncement | None]:
        return {mesh.name: mesh.announced for mesh in bench.meshes.all() if mesh.name != MESH}

    bench.meshes.announce("killed", coming)
    bench.meshes.announce("slow", coming)
    clock.move(ANNOUNCED_S - 1)
    assert told() == {"killed": coming, "slow": coming}
    assert bench.meshes.renew_announcement("slow", coming)
    clock.move(2)
    assert told() == {"killed": None, "slow": coming}

    # Who speaks has nothing to renew any more, and who is started again announces anew.
    lease = bench.meshes.acquire("slow", identity("a"), lease_s=15)
    assert lease is not None
    bench.meshes.publish(lease, _CAPABILITIES)
    assert not bench.meshes.renew_announcement("slow", coming)
    bench.meshes.announce("killed", coming)
    assert told() == {"killed": coming, "slow": None}
