"""From a layout to torch.distributed: the world's process group, and torch's own device mesh."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from twinkle.core.errors import ConfigError
from twinkle.infra.device_mesh import DeviceMesh, current_rank, current_world_size
from twinkle.infra.platform import Platform, local_rank


def join_world(platform: Platform, *, timeout_s: float) -> None:
    """Meet the other ranks at the address in the environment, as torchrun sets it. Blocks until all have come.

    Args:
        platform: Where the ranks' tensors are.
        timeout_s: How long this, and each collective later on, waits for the others.

    Raises:
        ConfigError: The machine has no device for this rank.
    """
    if distributed.is_initialized():
        return
    if platform.device_type == "cuda":
        if local_rank() >= platform.num_devices():
            raise ConfigError(f"rank {current_rank()} finds {platform.num_devices()} CUDA devices and needs one more")
        torch.cuda.set_device(local_rank())
    distributed.init_process_group(platform.backend, timeout=timedelta(seconds=timeout_s))


def torch_mesh(mesh: DeviceMesh) -> TorchDeviceMesh:
    """Torch's device mesh of a layout; its submeshes by axis name carry the process groups. All ranks must call it.

    Raises:
        ConfigError: The world has another size.
    """
    world_size = distributed.get_world_size() if distributed.is_initialized() else current_world_size()
    if world_size != mesh.world_size:
        raise ConfigError(f"device_mesh: has {mesh.world_size} ranks ({mesh}), but {world_size} processes were started")
    device_type = mesh.device_type or Platform.current().device_type
    return TorchDeviceMesh(
        Platform.named(device_type).device_type,
        torch.from_numpy(mesh.mesh),
        mesh_dim_names=mesh.mesh_dim_names,
    )
