"""From a layout to torch.distributed: the world's process group, and torch's own device mesh."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import distributed
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from twinkle.core.errors import ConfigError
from twinkle.infra.device_mesh import DeviceMesh, current_world_size
from twinkle.infra.platform import Platform, local_rank
from twinkle.infra.rank_group import RankGroup

LOOPBACK = "127.0.0.1"
GLOO_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


def join_world(platform: Platform, *, timeout_s: float) -> None:
    """Meet the other ranks at the address in the environment, as torchrun sets it. Blocks until all have come.

    Args:
        platform: Where the ranks' tensors are.
        timeout_s: How long this, and each collective later on, waits for the others.

    Raises:
        ConfigError: The machine has no device for this rank.
    """
    if not distributed.is_initialized():
        _choose_device(platform, local_rank())
        distributed.init_process_group(platform.backend, timeout=timedelta(seconds=timeout_s))


def open_store(*, size: int, timeout_s: float, host: str = LOOPBACK) -> tuple[Store, int]:
    """A place where ranks can meet, kept by rank 0 at an address of its own; and the port under which they find it."""
    # Bound here: torch would listen on every interface.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port: int = listener.getsockname()[1]
        store = TCPStore(
            host,
            port,
            size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return store, port


def find_store(port: int, *, size: int, timeout_s: float, host: str = LOOPBACK) -> Store:
    """The place that rank 0 has opened."""
    return TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=timeout_s))


def join_store(
    platform: Platform,
    store: Store,
    *,
    rank: int,
    size: int,
    timeout_s: float,
    interface: str | None = "lo",
    device_number: int | None = None,
) -> RankGroup:
    """Meet the other ranks at a store that all of them can reach. Blocks until all have come.

    Args:
        platform: Where the ranks' tensors are.
        store: Where they meet.
        rank: The number of this one.
        size: How many there are.
        timeout_s: How long this, and each collective later on, waits for the others.
        interface: The network on which gloo listens; none: where the host's name leads.
        device_number: This rank's device among those it sees; none: as the rank.

    Raises:
        ConfigError: The machine has no device for this rank.
    """
    _choose_device(platform, rank if device_number is None else device_number)
    if sys.platform == "linux" and interface is not None:
        os.environ.setdefault(GLOO_INTERFACE_VARIABLE, interface)
    distributed.init_process_group(
        platform.backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    return RankGroup(rank=rank, size=size, device_number=device_number)


def leave_world() -> None:
    """Close the connections to the other ranks."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _choose_device(platform: Platform, number: int) -> None:
    if platform.device_type == "cpu":
        return
    if number >= platform.num_devices():
        raise ConfigError(
            f"rank {number} of this machine has no device: there are {platform.num_devices()}; start fewer ranks"
        )
    torch.accelerator.set_device_index(number)


def group_of_ranks(groups: Sequence[Sequence[int]]) -> distributed.ProcessGroup:
    """The group of this rank, where every rank is in one; several may name the same. All ranks must call it together.

    Raises:
        ConfigError: The ranks have not met.
    """
    if not distributed.is_initialized():
        raise ConfigError("device_mesh: the processes have not met; call twinkle.initialize(mode='local') first")
    distinct = sorted({tuple(group) for group in groups})
    own: list[distributed.ProcessGroup] = []
    for ranks in distinct:
        group = distributed.new_group(list(ranks))
        if distributed.get_rank() in ranks:
            assert isinstance(group, distributed.ProcessGroup)
            own.append(group)
    return own[0]


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
