"""What the scale benchmark compares differs in one thing, and what it measures is work that was really done."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from twinkle.core.operation import OperationKind
from twinkle.storage.database import Database
from twinkle.storage.journal.journal import Journal


@pytest.fixture
def world() -> ModuleType:
    return importlib.import_module("scale_world")


@pytest.fixture
def database(world: ModuleType, tmp_path: Path) -> Iterator[Database]:
    with world.new_database(tmp_path, None) as url:
        database = Database(url)
        yield database
        database.close()


@pytest.mark.parametrize("what", ["rows", "adapters", "meshes"])
@pytest.mark.parametrize("full", [False, True])
def test_the_sizes_of_a_series_grow_in_one_thing_alone(what: str, full: bool) -> None:
    sizes = importlib.import_module("scale").series_of(short=False, full=full)[what]

    values = [getattr(size, what) for size in sizes]
    assert values == sorted(set(values))
    others = {"rows", "adapters", "meshes"} - {what}
    assert all(getattr(size, other) == getattr(sizes[0], other) for size in sizes for other in others)


def test_the_full_run_has_a_million_operations_of_ten_thousand_adapters_on_64_meshes() -> None:
    (_, largest) = importlib.import_module("scale").series_of(short=False, full=True)["all"]

    assert (largest.rows, largest.adapters, largest.meshes) == (1_000_000, 10_000, 64)


def test_a_filled_journal_is_one_in_which_work_goes_on(world: ModuleType, database: Database) -> None:
    size = world.Size(rows=103, adapters=25, meshes=4)
    world.fill(database, size)

    lanes = database.read("SELECT id, tenant, mesh, head_seq FROM lane ORDER BY id")
    assert lanes == [
        (size.lane(number), size.tenant_of(number), size.mesh_of(number), size.num_rows_of(number))
        for number in range(25)
    ]
    counted = database.read("SELECT lane, COUNT(*), MIN(seq), MAX(seq) + 1 FROM operation GROUP BY lane ORDER BY lane")
    assert counted == [(lane, head_seq, 0, head_seq) for lane, _, _, head_seq in lanes]
    assert sum(head_seq for *_, head_seq in lanes) == 103


def test_workers_that_die_do_nothing_twice_and_leave_nothing_out(world: ModuleType, database: Database) -> None:
    size = world.Size(rows=10, adapters=10, meshes=1)
    world.fill(database, size)
    mesh = world.SimulatedMesh(database, world.mesh_name(0), world.SimulatedEngine(steps_per_crash=2))
    wanted = [
        world.submission(size, number, seq, OperationKind.FORWARD_BACKWARD)
        for seq in range(1, 9)
        for number in range(10)
    ]
    journal: Journal = mesh.journal
    journal.append(wanted)

    ended = mesh.drain()

    assert mesh.num_crashes > 0
    assert sorted(ended) == sorted(f"{one.lane}:req:{one.seq}" for one in wanted)
    assert {owned.status.state for owned in journal.statuses(ended).values()} == {"done"}
