"""Megatron's core without CUDA, and which layouts it takes."""

import importlib
from typing import Any

import pytest
import torch

from twinkle.core.errors import ConfigError
from twinkle.infra import DeviceMesh
from twinkle.model.megatron.layout import Layout


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA nothing is changed")
def test_megatrons_modules_see_the_cpu_as_cudas_device_and_torch_is_as_it_was() -> None:
    schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    random = importlib.import_module("megatron.core.tensor_parallel.random")

    inside: Any = vars(schedules)["torch"]

    assert inside.cuda.current_device() == torch.device("cpu")
    assert inside.zeros(2, device="cuda").device.type == "cpu"
    assert inside.Tensor is torch.Tensor
    assert random.torch is inside
    assert not isinstance(torch.cuda.current_device, type(inside.cuda.current_device))
    assert torch.compile.__module__ == "torch"


@pytest.mark.parametrize(
    ("sizes", "field"),
    [
        ({"fsdp_size": 2}, "fsdp_size: is 2, which MegatronModel has not"),
        ({"dp_size": 2, "ulysses_size": 2}, "ulysses_size: is 2"),
        ({"dp_size": 2, "vpp_size": 2}, "vpp_size: is 2 with pp_size 1"),
        ({"dp_size": 2, "tp_size": 2, "ep_size": 2, "etp_size": 2}, "etp_size: is 2 beside ep_size 2"),
    ],
)
def test_a_layout_that_megatron_has_not_is_refused_with_those_it_has(sizes: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Layout(DeviceMesh.from_sizes(**sizes, device_type="cpu"), torch.device("cpu"), seed=0)


def test_several_ranks_must_have_met() -> None:
    mesh = DeviceMesh.from_sizes(tp_size=2, device_type="cpu")
    with pytest.raises(ConfigError, match=r"twinkle\.initialize"):
        Layout(mesh, torch.device("cpu"), seed=0)
