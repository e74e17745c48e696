"""Where new adapters go beside those whose clients have long gone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from harness.clock import HandClock
from harness.journal import CONFIG, Bench, done, identity, new_adapter, submission
from twinkle.core.errors import Conflict, InvalidInput, NotFound
from twinkle.core.mesh import MeshCapabilities
from twinkle.core.operation import OperationKind
from twinkle.scheduler.placement import choose_mesh
from twinkle.storage.journal.meshes import MeshStatus

_CAPABILITIES = MeshCapabilities(
    base_model="base",
    architecture="null",
    vocab_size=10,
    max_context_length=10,
    max_rank=4,
    device="none",
    determinism="none",
)


@pytest.fixture
def bench(bench: Bench, clock: HandClock) -> Bench:
    """Two meshes; on the first one 2,000 adapters of sessions that have ended or fallen silent, most of them parked."""
    for mesh in ("mesh0", "mesh1"):
        lease = bench.meshes.acquire(mesh, identity("a"), lease_s=1e6)
        assert lease is not None
        bench.meshes.publish(lease, _CAPABILITIES)
    with bench.database.transaction() as transaction:
        for number, finished_at in enumerate((1.0, None)):
            transaction.execute(
                "INSERT INTO session (id, tenant, tags, sdk_version, created_at, heartbeat_at, finished_at)"
                " VALUES (?, 't0', '[]', '', 0, 0, ?)",
                (f"gone{number}", finished_at),
            )
        numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 2000)"
        transaction.execute(
            "INSERT INTO lane (id, tenant, mesh, ordered, head_seq, max_seq, not_before, vtime)"
            f" {numbers} SELECT CAST(i AS TEXT), 't0', 'mesh0', TRUE, 1, 0, 0, 0 FROM n"
        )
        transaction.execute(
            "INSERT INTO adapter (id, tenant, session, mesh, config, optimizer, created_at, parked_at)"
            f" {numbers} SELECT CAST(i AS TEXT), 't0', 'gone' || CASE WHEN i > 1000 THEN '1' ELSE '0' END, 'mesh0',"
            " '', '', 0, CASE WHEN i > 100 THEN 1 END FROM n"
        )
    return bench


def test_who_only_samples_goes_to_a_mesh_that_does_nothing_else_and_no_run_does(bench: Bench) -> None:
    lease = bench.meshes.acquire("mesh2", identity("b"), lease_s=1e6)
    assert lease is not None
    bench.meshes.publish(lease, _CAPABILITIES.model_copy(update={"serves": "samples"}))

    trains, samples = (choose_mesh(bench.meshes.all(), "base", to_sample=sampling).name for sampling in (False, True))
    bench.meshes.release(lease)
    without = choose_mesh(bench.meshes.all(), "base", to_sample=True).name

    assert (trains, samples) == ("mesh1", "mesh2") or (trains, samples) == ("mesh0", "mesh2")
    assert without == trains
    assert _CAPABILITIES.why_not_on(_CAPABILITIES.model_copy(update={"serves": "samples"})) is not None


def test_a_model_that_is_only_sampled_from_is_not_trained() -> None:
    only = MeshStatus(
        name="m",
        capabilities=_CAPABILITIES.model_copy(update={"serves": "samples"}),
        epoch=1,
        alive=True,
        num_adapters=0,
    )

    with pytest.raises(InvalidInput, match="not to train"):
        choose_mesh([only], "base")
    assert choose_mesh([only], "base", to_sample=True).name == "m"


def _place(bench: Bench, adapter: str) -> str:
    with bench.database.transaction() as transaction:
        transaction.execute("UPDATE session SET heartbeat_at = ? WHERE id = 'session-t0'", (bench.clock.now(),))
    mesh = choose_mesh(bench.meshes.all(silent_s=300), "base").name
    bench.journal.open_lane(
        replace(new_adapter(adapter), mesh=mesh), submission(adapter, 0, OperationKind.CREATE_MODEL)
    )
    return mesh


def test_a_mesh_full_of_parked_adapters_gets_its_part_of_the_new_ones(bench: Bench) -> None:
    placed = Counter(_place(bench, f"new{number}") for number in range(10))

    assert placed == {"mesh0": 5, "mesh1": 5}
    assert [(mesh.num_live, mesh.num_parked) for mesh in bench.meshes.all(silent_s=300)] == [(5, 1900), (5, 0)]


def test_the_mesh_that_was_served_more_lately_gets_fewer_new_ones(bench: Bench) -> None:
    homes = {_place(bench, adapter): adapter for adapter in ("a", "b")}
    for mesh, num_tokens in (("mesh0", 100), ("mesh1", 5000)):
        lease = bench.meshes.acquire(mesh, identity("a"), lease_s=1e6)
        assert lease is not None
        bench.append(submission(homes[mesh], 1))
        for tokens in (0, num_tokens):
            bench.journal.commit(lease, [done(claim, num_tokens=tokens) for claim in bench.claim(lease)])

    placed = [_place(bench, f"new{number}") for number in range(2)]

    assert placed == ["mesh0", "mesh0"]


def mesh_that_serves(name: str, serves: str) -> MeshStatus:
    capabilities = _CAPABILITIES.model_copy(update={"serves": serves})
    return MeshStatus(name=name, capabilities=capabilities, epoch=1, alive=True, num_adapters=0)


def test_a_mesh_that_only_trains_is_sampled_on_by_nobody() -> None:
    trains, samples = mesh_that_serves("trains", "training"), mesh_that_serves("samples", "samples")

    assert choose_mesh([trains, samples], "base").name == "trains"
    assert choose_mesh([trains, samples], "base", to_sample=True).name == "samples"
    with pytest.raises(InvalidInput, match="not to sample from"):
        choose_mesh([trains], "base", to_sample=True)


def test_a_run_of_a_mesh_that_only_trains_may_go_on_where_more_is_done_and_not_the_other_way() -> None:
    training, everything = (_CAPABILITIES.model_copy(update={"serves": each}) for each in ("training", "everything"))

    assert training.why_not_on(everything) is None
    assert everything.why_not_on(training) is not None


def test_a_mesh_for_whole_models_has_one_run_until_it_is_unloaded_or_parked_or_its_session_ends(
    bench: Bench,
) -> None:
    whole = CONFIG.model_copy(update={"rank": 0})

    def begin(run: str, *, tenant: str = "t1") -> None:
        first = submission(run, 0, OperationKind.CREATE_MODEL, tenant=tenant)
        bench.journal.open_lane(new_adapter(run, tenant=tenant, mesh="mesh1", config=whole), first)

    begin("one")
    begin("one")
    with pytest.raises(Conflict, match="trains all weights of one run at a time, and is taken"):
        begin("two")
    with pytest.raises(NotFound):
        bench.stores.adapters.find("two")
    bench.stores.adapters.unload("one", "t1")
    begin("two")
    with bench.database.transaction() as transaction:
        transaction.execute("UPDATE adapter SET parked_at = 1 WHERE id = 'two'")
    begin("three")
    with bench.database.transaction() as transaction:
        transaction.execute("UPDATE session SET finished_at = 1 WHERE id = 'session-t1'")
    begin("four", tenant="t0")
