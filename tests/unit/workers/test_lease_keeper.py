"""The keeper of a mesh's lease: renews what it holds, and knows when it is gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.clock import HandClock
from harness.journal import MESH, identity
from harness.polling import wait_until
from twinkle.core.errors import LeaseLost, StorageUnavailable
from twinkle.core.lease import Lease
from twinkle.core.mesh import MeshCapabilities
from twinkle.storage.database import Database
from twinkle.storage.journal.meshes import Meshes
from twinkle.workers.engines.null_engine import NullEngine
from twinkle.workers.lease_keeper import LeaseKeeper

_LEASE_S = 0.06
"""Short, since the keeper's thread waits in real time; what expires does so on the clock moved by hand."""


class WatchedMeshes(Meshes):
    """Counts renewals and lets the next ones fail."""

    def __init__(self, database: Database, clock: HandClock) -> None:
        super().__init__(database, clock)
        self.num_renewed = 0
        self.errors: list[Exception] = []
        self.unheard: list[Exception] = []

    def publish(self, lease: Lease, capabilities: MeshCapabilities) -> None:
        if self.unheard:
            raise self.unheard.pop()
        super().publish(lease, capabilities)

    def renew(self, lease: Lease, *, lease_s: float) -> None:
        if self.errors:
            raise self.errors.pop()
        super().renew(lease, lease_s=lease_s)
        self.num_renewed += 1


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def meshes(sqlite_url: str, clock: HandClock) -> WatchedMeshes:
    return WatchedMeshes(Database(sqlite_url), clock)


def _keeper(meshes: Meshes, name: str = "a") -> LeaseKeeper:
    capabilities = NullEngine(base_model="base", max_rank=8).capabilities
    return LeaseKeeper(meshes=meshes, mesh=MESH, identity=identity(name), capabilities=capabilities, lease_s=_LEASE_S)


@pytest.fixture
def keeper(meshes: WatchedMeshes) -> Iterator[LeaseKeeper]:
    keeper = _keeper(meshes)
    keeper.start()
    yield keeper
    keeper.stop()


def test_a_held_lease_is_renewed_and_what_the_mesh_can_do_is_published(
    meshes: WatchedMeshes, keeper: LeaseKeeper, clock: HandClock
) -> None:
    assert keeper.try_acquire() is not None
    clock.move(_LEASE_S / 2)
    wait_until(lambda: meshes.num_renewed >= 2, what="renewals")

    (status,) = meshes.all()
    clock.move(_LEASE_S / 2)

    assert status.alive and status.capabilities is not None and status.capabilities.base_model == "base"
    assert _keeper(meshes, "b").try_acquire() is None


def test_who_holds_the_memory_of_the_device_is_said_with_a_renewal(meshes: WatchedMeshes, keeper: LeaseKeeper) -> None:
    assert keeper.try_acquire() is not None
    for held in ({"base model": 7}, {"base model": 7, "adapters": 2}):
        keeper.note_memory(held)
        wait_until(lambda held=held: meshes.census()[0].memory_held == held, what="word of its memory")


def test_what_could_not_be_said_with_a_renewal_is_said_with_the_next(
    meshes: WatchedMeshes, keeper: LeaseKeeper
) -> None:
    assert keeper.try_acquire() is not None
    meshes.unheard.append(StorageUnavailable("away"))

    keeper.note_memory({"base model": 7})

    wait_until(lambda: meshes.census()[0].memory_held == {"base model": 7}, what="word of its memory")
    assert meshes.unheard == []


def test_who_lost_the_mesh_forgets_its_lease(meshes: WatchedMeshes, keeper: LeaseKeeper) -> None:
    assert keeper.try_acquire() is not None

    meshes.errors.append(LeaseLost("another epoch"))

    wait_until(lambda: keeper.current() is None, what="the lease is forgotten")


def test_a_database_that_is_away_for_a_moment_costs_no_lease(meshes: WatchedMeshes, keeper: LeaseKeeper) -> None:
    lease = keeper.try_acquire()
    meshes.errors += [StorageUnavailable("away"), StorageUnavailable("away")]

    wait_until(lambda: meshes.num_renewed >= 1, what="a renewal after two that failed")

    assert keeper.current() is lease


def test_a_keeper_that_stops_leaves_the_mesh_free(meshes: WatchedMeshes) -> None:
    keeper = _keeper(meshes)
    keeper.start()
    keeper.try_acquire()

    keeper.stop()

    assert _keeper(meshes, "b").try_acquire() is not None
