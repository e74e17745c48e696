"""Where a new adapter goes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twinkle.core.errors import InvalidInput, MeshUnavailable
from twinkle.core.mesh import MeshAnnouncement, MeshCapabilities
from twinkle.scheduler.placement import choose_mesh
from twinkle.storage.journal.meshes import MeshStatus


def _mesh(
    name: str,
    base_model: str | None = "a",
    *,
    alive: bool = True,
    num_live: int = 0,
    recent_tokens: int = 0,
    num_served: int = 0,
) -> MeshStatus:
    capabilities = None
    if base_model is not None:
        capabilities = MeshCapabilities(
            base_model=base_model,
            architecture="x",
            vocab_size=10,
            max_context_length=10,
            max_rank=8,
            device="cpu",
            determinism="none",
        )
    return MeshStatus(
        name=name,
        capabilities=capabilities,
        epoch=1,
        alive=alive,
        num_adapters=5000,
        num_live=num_live,
        recent_tokens=recent_tokens,
        num_served=num_served,
    )


def test_a_run_of_the_whole_model_goes_to_a_mesh_for_that_alone_and_nothing_else_does() -> None:
    shared, whole = _mesh("m0", num_live=9), _mesh("m1")
    assert whole.capabilities is not None
    whole = replace(whole, capabilities=whole.capabilities.model_copy(update={"serves": "whole-model"}))

    assert choose_mesh([shared, whole], "a").name == "m0"
    assert choose_mesh([shared, whole], "a", to_sample=True).name == "m0"
    assert choose_mesh([shared, whole], "a", whole_model=True).name == "m1"
    assert choose_mesh([whole], "a", whole_model=None).name == "m1"
    with pytest.raises(InvalidInput, match="needs a mesh for one tenant alone"):
        choose_mesh([shared], "a", whole_model=True)
    for sampling in (False, True):
        with pytest.raises(InvalidInput, match="served here to train all of its weights, of one run at a time"):
            choose_mesh([whole], "a", to_sample=sampling)


def test_the_emptiest_mesh_of_the_model_is_chosen() -> None:
    meshes = [_mesh("m0", num_live=3), _mesh("m1", num_live=1), _mesh("m2", "b"), _mesh("m3", None)]

    assert choose_mesh(meshes, "a").name == "m1"


def test_few_adapters_that_work_hard_weigh_more_than_many_that_do_little() -> None:
    meshes = [
        _mesh("m0", num_live=2, recent_tokens=90_000, num_served=2),
        _mesh("m1", num_live=10, recent_tokens=3_000, num_served=10),
    ]

    assert choose_mesh(meshes, "a").name == "m1"


def test_adapters_that_have_just_come_weigh_what_others_bring() -> None:
    meshes = [
        _mesh("m0", num_live=4, recent_tokens=4_000, num_served=4),
        _mesh("m1", num_live=6, recent_tokens=3_000, num_served=3),
    ]

    assert choose_mesh(meshes, "a").name == "m0"


def test_many_that_come_at_once_are_spread_though_another_works_already() -> None:
    num_live = {"m0": 0, "m1": 1}
    for _ in range(15):
        busy = {"recent_tokens": 5_000, "num_served": 1}
        meshes = [_mesh("m0", num_live=num_live["m0"]), _mesh("m1", num_live=num_live["m1"], **busy)]
        num_live[choose_mesh(meshes, "a").name] += 1

    assert num_live == {"m0": 8, "m1": 8}


def test_a_live_mesh_comes_before_an_empty_one() -> None:
    assert choose_mesh([_mesh("m0", alive=False), _mesh("m1", num_live=9)], "a").name == "m1"


def test_a_dead_mesh_is_better_than_none() -> None:
    assert choose_mesh([_mesh("m0", alive=False)], "a").name == "m0"


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match=r"base_model: 'c' is not served here; this server serves: a, b"):
        choose_mesh([_mesh("m0", "b"), _mesh("m1"), _mesh("m2")], "c")


def test_before_the_first_worker_has_started_the_caller_shall_wait() -> None:
    with pytest.raises(MeshUnavailable):
        choose_mesh([_mesh("m0", None)], "a")


@pytest.mark.parametrize(
    ("serves", "train", "sample", "whole"),
    [
        ("training", True, False, False),
        ("samples", False, True, False),
        ("everything", True, True, False),
        ("whole-model", False, False, True),
    ],
)
def test_who_asks_for_what_a_starting_mesh_will_serve_shall_wait_and_nobody_else(
    serves: str, train: bool, sample: bool, whole: bool
) -> None:
    other = _mesh("m0", "b")
    coming = replace(_mesh("m1", None, alive=False), announced=MeshAnnouncement(base_model="a", serves=serves))

    for is_awaited, asked in (
        (train, {}),
        (sample, {"to_sample": True}),
        (whole, {"whole_model": True}),
        (True, {"whole_model": None}),
    ):
        with pytest.raises(MeshUnavailable if is_awaited else InvalidInput, match="starting" if is_awaited else "a"):
            choose_mesh([other, coming], "a", **asked)
    with pytest.raises(InvalidInput, match="is not served here"):
        choose_mesh([other, coming], "c")
    assert choose_mesh([other, coming], "b").name == "m0"


def test_a_run_waits_for_the_mesh_that_will_train_beside_the_one_that_samples_already() -> None:
    samples = _mesh("m0")
    assert samples.capabilities is not None
    samples = replace(samples, capabilities=samples.capabilities.model_copy(update={"serves": "samples"}))
    announced = MeshAnnouncement.of(model_name="a", engine="megatron", serves="everything")
    coming = replace(_mesh("m1", None, alive=False), announced=announced)

    with pytest.raises(MeshUnavailable, match="the worker that trains 'a' is starting"):
        choose_mesh([samples, coming], "a")
    with pytest.raises(InvalidInput, match="to sample from, not to train"):
        choose_mesh([samples, replace(coming, is_draining=True)], "a")
    assert choose_mesh([samples, coming], "a", to_sample=True).name == "m0"
