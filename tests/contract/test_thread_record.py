"""The number of threads is kept with mesh, model and kind of CPU, for whoever takes the mesh over."""

from __future__ import annotations

from harness.journal import MESH, Bench
from twinkle.core.mesh import MeshCapabilities
from twinkle.core.settings import Settings
from twinkle.workers.engines.threads import ThreadRecord

CPU = "Some CPU"


def settings_of(**change: object) -> Settings:
    return Settings.model_validate({"mesh": MESH, "model": "/models/tiny", "model_name": "tiny", **change})


def serve(bench: Bench, *, measures: int, cpu: str = CPU, limit: int = 8, **change: object) -> int:
    """A worker's start on the mesh, where measuring would give so many threads; the number it computes with."""
    settings = settings_of(**change)
    record = ThreadRecord(bench.meshes, settings, cpu=cpu)
    threads = record.settings(limit=limit).threads or measures
    capabilities = MeshCapabilities(
        base_model=settings.resolved_model_name,
        architecture="Qwen3ForCausalLM",
        vocab_size=300,
        max_context_length=512,
        max_rank=64,
        device=settings.device,
        determinism="tiled",
        threads=threads,
    )
    bench.meshes.publish(bench.lease(), record.written_into(capabilities))
    return threads


def test_whoever_takes_a_mesh_over_computes_with_the_number_of_the_first_start(bench: Bench) -> None:
    assert [serve(bench, measures=number) for number in (2, 4, 1)] == [2, 2, 2]


def test_a_worker_that_measured_beside_the_first_one_notices_before_it_takes_over(bench: Bench) -> None:
    beside = ThreadRecord(bench.meshes, settings_of(), cpu=CPU)
    capabilities = MeshCapabilities(
        base_model="tiny",
        architecture="Qwen3ForCausalLM",
        vocab_size=300,
        max_context_length=512,
        max_rank=64,
        device="cpu",
        determinism="tiled",
        threads=4,
    )
    beside.written_into(capabilities)
    assert not beside.is_outdated

    serve(bench, measures=2)
    assert beside.is_outdated
    again = ThreadRecord(bench.meshes, settings_of(), cpu=CPU)
    again.written_into(capabilities.model_copy(update={"threads": again.settings(limit=8).threads}))
    assert not again.is_outdated


def test_the_operator_may_ask_anew_or_give_a_number_for_one_start(bench: Bench) -> None:
    serve(bench, measures=2)

    assert serve(bench, measures=4, threads=1) == 1
    assert serve(bench, measures=4) == 2
    assert serve(bench, measures=4, measure_threads=True) == 4
    assert serve(bench, measures=1) == 4


def test_another_cpu_model_or_number_of_ranks_has_a_number_of_its_own(bench: Bench) -> None:
    serve(bench, measures=2)

    assert serve(bench, measures=4, cpu="Another CPU") == 4
    assert serve(bench, measures=6, model_name="other") == 6
    assert serve(bench, measures=1, ranks=2) == 1
    assert [serve(bench, measures=9), serve(bench, measures=9, cpu="Another CPU")] == [2, 4]


def test_a_machine_with_fewer_cores_than_the_number_measures_anew(bench: Bench) -> None:
    serve(bench, measures=8)

    assert serve(bench, measures=2, limit=2) == 2
    assert serve(bench, measures=8) == 2


def test_nothing_is_kept_for_a_gpu(bench: Bench) -> None:
    serve(bench, measures=2, device="cuda:0")

    (mesh,) = bench.meshes.all()
    assert mesh.capabilities is not None
    assert mesh.capabilities.threads_measured == {}
    assert serve(bench, measures=4, device="cuda:0") == 4


def test_only_so_many_numbers_are_kept(bench: Bench) -> None:
    for number in range(40):
        serve(bench, measures=1, cpu=f"CPU {number}")

    (mesh,) = bench.meshes.all()
    assert mesh.capabilities is not None
    assert len(mesh.capabilities.threads_measured) == 16
