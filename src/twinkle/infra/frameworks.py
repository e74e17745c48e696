"""What scripts ask torch about this rank, by the names they ask under: ``framework_util`` and ``torch_util``."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.platform import Platform, local_rank

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


class Framework:
    """What does not depend on the device."""

    @staticmethod
    def seed_everything(seed: int = 42, full_determinism: bool = False) -> None:
        """Seed Python, NumPy and torch; with ``full_determinism`` torch refuses what may differ between runs."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        if full_determinism:
            # Read when cuBLAS first starts.
            os.environ.setdefault(CUBLAS_VARIABLE, ":4096:8")
            torch.use_deterministic_algorithms(True)

    @staticmethod
    def gather_object(
        value: Any, device_mesh: DeviceMesh | None = None, process_group: distributed.ProcessGroup | None = None
    ) -> list[Any]:
        """What each rank passed, lists joined, in the order of ranks; all ranks must call. Alone: its own.

        Travels pickled, so between our own processes only.
        """
        values = [value]
        if device_mesh is not None and device_mesh.data_world_size > 1:
            values = [None] * distributed.get_world_size(process_group)
            distributed.all_gather_object(values, value, group=process_group)
        joined: list[Any] = []
        for found in values:
            joined.extend(found if isinstance(found, (list, tuple)) else [found])
        return joined


class Torch(Framework):
    """What does: the accelerator that torch finds, else the CPU."""

    @staticmethod
    def is_torch_available() -> bool:
        """Whether torch is installed; it is, where this can be asked."""
        return True

    @staticmethod
    def is_gpu_available() -> bool:
        """Whether there is a CUDA device."""
        return torch.cuda.is_available()

    @staticmethod
    def is_npu_available() -> bool:
        """Whether there is an Ascend device."""
        return Platform.current().device_type == "npu"

    @staticmethod
    def get_device(local_rank_number: int | None = None) -> str:
        """The device of a process of this machine, of this one if omitted."""
        return Platform.current().device_of(local_rank() if local_rank_number is None else local_rank_number)

    @staticmethod
    def get_current_device() -> int | str:
        """The number of the device in use, ``cpu`` where there is none."""
        return torch.accelerator.current_device_index() if torch.accelerator.is_available() else "cpu"

    @staticmethod
    def set_device(local_rank_number: int | None = None) -> None:
        """Use the device of a process of this machine, of this one if omitted."""
        if torch.accelerator.is_available():
            torch.accelerator.set_device_index(local_rank() if local_rank_number is None else local_rank_number)

    @staticmethod
    def empty_cache() -> None:
        """Give back memory of the device that no tensor uses."""
        if torch.accelerator.is_available():
            torch.get_device_module().empty_cache()

    @staticmethod
    def synchronize() -> None:
        """Wait until the device has done what it was given."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    @staticmethod
    def to_local_tensor(tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that may be sharded, whole; of a sharded one all ranks must ask together."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    @staticmethod
    def contains_nan(*args: object, **kwargs: object) -> bool:
        """Whether a tensor among the arguments, also within containers, holds what is no number."""
        return any(_has_nan(value) for value in (*args, *kwargs.values()))


def _has_nan(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(torch.isnan(value).any())
    if isinstance(value, Mapping):
        return any(_has_nan(item) for item in value.values())
    return isinstance(value, (list, tuple, set)) and any(_has_nan(item) for item in value)


framework_util = Framework
torch_util = Torch
