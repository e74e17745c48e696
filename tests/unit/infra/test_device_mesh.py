"""Layouts of ranks, and what scripts say about them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import twinkle
from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.infra import DeviceGroup, DeviceMesh, Platform
from twinkle.infra.runtime import initialize


def test_a_mesh_is_as_large_as_its_sizes_say() -> None:
    mesh = DeviceMesh.from_sizes(fsdp_size=4, dp_size=2)

    assert mesh.world_size == 8
    assert str(mesh) == "dp 2 x fsdp 4"
    assert mesh.data_world_size == 8
    assert mesh.size("tp") == 1


def test_every_rank_has_a_place_of_its_own() -> None:
    mesh = DeviceMesh.from_sizes(pp_size=2, dp_size=3, tp_size=2)

    places = [tuple(mesh.coordinates(rank).values()) for rank in range(12)]

    assert len(set(places)) == 12
    assert mesh.coordinates(0) == {"pp": 0, "dp": 0, "tp": 0}
    assert mesh.coordinates(7) == {"pp": 1, "dp": 0, "tp": 1}
    assert mesh.ranks_along("tp", 6) == [6, 7]
    assert mesh.ranks_along("dp", 7) == [7, 9, 11]
    assert mesh.ranks_along("fsdp", 5) == [5]


def test_a_mesh_can_be_any_grid_of_ranks() -> None:
    mesh = DeviceMesh(mesh=np.array([[0, 2], [1, 3]]), mesh_dim_names=("dp", "tp"))

    assert mesh.coordinates(2) == {"dp": 0, "tp": 1}
    assert mesh.ranks_along("dp", 2) == [2, 3]
    assert [mesh.data_part(rank) for rank in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize(("world", "num_items"), [(1, 1), (2, 5), (3, 3), (8, 100)])
def test_the_parts_of_a_batch_are_the_batch(world: int, num_items: int) -> None:
    mesh = DeviceMesh.from_sizes(dp_size=world)
    items = list(range(num_items))

    parts = [mesh.slice_data(items, rank) for rank in range(world)]

    assert [item for part in parts for item in part] == items
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_ranks_that_share_a_datum_get_the_same_part() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2, tp_size=2)

    assert mesh.slice_data("abcd", 0) == mesh.slice_data("abcd", 1) == ["a", "b"]
    assert mesh.slice_data("abcd", 3) == ["c", "d"]


def test_a_batch_too_small_for_its_ranks_is_refused() -> None:
    with pytest.raises(InvalidInput, match="3 rows cannot be spread over 4"):
        DeviceMesh.from_sizes(dp_size=4).data_slice(3, 0)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world_size": 8, "dp_size": 2, "fsdp_size": 2}, "world_size: is 8, but dp_size 2 .* = 4"),
        ({"dp_size": 0}, "dp_size: is 0"),
        ({"dp_size": 4, "ulysses_size": 3}, "ulysses_size: 3 must divide"),
        ({"dp_size": 2, "ep_size": 4}, "ep_size: 4 must divide"),
        (
            {"tp_size": 2, "pp_size": 2, "ep_size": 2, "etp_size": 2},
            "ep_size: 2 times etp_size 2 must divide the 2 ranks",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeviceMesh.from_sizes(**sizes)


@pytest.mark.parametrize(
    ("grid", "names"),
    [
        ([0, 1], ("dp", "tp")),
        ([[0, 1]], ("dp", "dp")),
        ([0, 1], ("rows",)),
        ([0, 0], ("dp",)),
        ([1, 2], ("dp",)),
        ([], ("dp",)),
    ],
)
def test_a_grid_that_is_none_is_refused(grid: list[object], names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        DeviceMesh(mesh=np.array(grid), mesh_dim_names=names)


@pytest.mark.parametrize("size", ["tp_size", "pp_size", "cp_size", "ep_size", "ulysses_size", "etp_size", "vpp_size"])
def test_what_cannot_be_run_yet_is_refused_where_it_is_used(size: str) -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2, **{size: 2})

    with pytest.raises(ConfigError, match=f"{size}: is 2, but TransformersModel runs"):
        mesh.require_data_axes("TransformersModel")
    DeviceMesh.from_sizes(dp_size=2, fsdp_size=2).require_data_axes("TransformersModel")


def test_a_rank_outside_the_mesh_has_no_place() -> None:
    with pytest.raises(ConfigError, match="rank: 2 is not in this mesh of 2"):
        DeviceMesh.from_sizes(dp_size=2).coordinates(2)


def test_a_group_counts_its_devices() -> None:
    assert DeviceGroup("model", 4, "GPU", gpus_per_worker=2).num_workers == 2
    assert DeviceGroup("model", [2, 5], "cpu").rank_numbers == (2, 5)
    assert DeviceGroup("model", 1, "GPU").device_type == "cuda"


@pytest.mark.parametrize(
    ("group", "field"),
    [
        ({"name": "", "ranks": 1, "device_type": "cpu"}, "name"),
        ({"name": "a", "ranks": 0, "device_type": "cpu"}, "ranks"),
        ({"name": "a", "ranks": [1, 1], "device_type": "cpu"}, "ranks"),
        ({"name": "a", "ranks": 3, "device_type": "cpu", "gpus_per_worker": 2}, "gpus_per_worker"),
        ({"name": "a", "ranks": 1, "device_type": "TPU"}, "device_type"),
    ],
)
def test_an_impossible_group_is_refused_by_field(group: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        DeviceGroup(**group)


def test_a_platform_says_how_its_ranks_talk() -> None:
    assert Platform.named("CPU").backend == "gloo"
    assert Platform.named("gpu").device_of(1) == "cuda:1"
    assert Platform.current().num_devices() >= 1


def test_a_script_says_its_groups_and_its_mesh_and_sees_them_drawn() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=1, fsdp_size=1)

    initialize("local", seed=7, groups=[DeviceGroup("model", 2, "cpu")], global_device_mesh=mesh)
    drawn = twinkle.get_device_placement()

    assert twinkle.is_master()
    assert "seed 7" in drawn
    assert "group model: cpu 0, 1 (2 workers)" in drawn
    assert "rank 0: dp 0, fsdp 0; data part 0 of 1" in drawn
    assert len({len(line) for line in drawn.splitlines()}) == 1


def test_a_seed_makes_random_numbers_repeat() -> None:
    draws = []
    for _ in range(2):
        twinkle.initialize(seed=3)
        draws.append(np.random.random())

    assert draws[0] == draws[1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mode": "cloud"}, "'cloud' is unknown"),
        ({"groups": [DeviceGroup("a", 1, "cpu"), DeviceGroup("a", 2, "cpu")]}, "one group only"),
        ({"global_device_mesh": DeviceMesh.from_sizes(dp_size=2)}, "torchrun --nproc_per_node=2"),
    ],
)
def test_what_cannot_be_set_up_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        twinkle.initialize(**wrong)


def test_the_package_and_a_layout_need_no_torch() -> None:
    code = (
        "import sys, twinkle; twinkle.DeviceMesh.from_sizes(dp_size=2); twinkle.DeviceGroup('a', 1, 'cpu');"
        "assert not {'torch', 'sqlalchemy', 'celery'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = twinkle.nonsense


def test_a_mesh_answers_by_the_names_of_its_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    mesh = DeviceMesh.from_sizes(dp_size=2, fsdp_size=4, ulysses_size=2, ep_size=4)

    assert (mesh.dp_rank, mesh.fsdp_rank, mesh.tp_rank, mesh.pp_rank, mesh.cp_rank) == (1, 1, 0, 0, 0)
    assert (mesh.dp_world_size, mesh.fsdp_world_size, mesh.tp_world_size) == (2, 4, 1)
    assert (mesh.ulysses_rank, mesh.ulysses_world_size) == (1, 2)
    assert (mesh.ep_rank, mesh.ep_world_size, mesh.etp_world_size) == (1, 4, 1)
    assert mesh.sequence_ranks() == [4, 5]
    assert mesh.expert_ranks() == [4, 5, 6, 7]


def test_ranks_that_share_tensors_or_sequences_may_share_experts_too() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=1, tp_size=2, pp_size=2, cp_size=2, ep_size=2)
    pairs = DeviceMesh.from_sizes(dp_size=2, tp_size=2, ep_size=2, etp_size=2)

    assert [mesh.expert_ranks(rank) for rank in (0, 3, 5)] == [[0, 1], [2, 3], [4, 5]]
    assert [pairs.expert_ranks(rank) for rank in (0, 1)] == [[0, 2], [1, 3]]


def test_ranks_that_share_their_sequences_get_the_same_rows() -> None:
    mesh = DeviceMesh.from_sizes(dp_size=2, fsdp_size=2, ulysses_size=2)

    assert mesh.data_world_size == 2
    assert [mesh.data_part(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert mesh.data_rank == 0
    assert mesh.get_slice(5) == slice(0, 3)
    assert mesh.get_slice(5, 1) == slice(3, 5)


def test_every_size_is_taken_and_those_that_contradict_are_refused() -> None:
    mesh = DeviceMesh.from_sizes(world_size=8, dp_size=2, tp_size=2, pp_size=2, ep_size=2, etp_size=2, vpp_size=2)

    assert mesh.world_size == 8
    with pytest.raises(ConfigError, match="ep_fsdp_size: is 3, but 4 ranks hold each expert 2 times"):
        DeviceMesh.from_sizes(fsdp_size=4, ep_size=2, ep_fsdp_size=3)
