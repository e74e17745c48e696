"""What a script says once about the processes it runs in, and what components ask about it later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from twinkle.core.errors import ConfigError
from twinkle.core.events import event_log
from twinkle.infra.device_group import DeviceGroup, check_groups
from twinkle.infra.device_mesh import DeviceMesh, current_rank, current_world_size
from twinkle.infra.frameworks import Framework
from twinkle.infra.platform import Platform
from twinkle.infra.process_group import join_world
from twinkle.infra.rank_end import Notifier, watch_end
from twinkle.infra.rank_log import quieten_rank

COLLECTIVE_TIMEOUT_S = 600.0

log = event_log()


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The answers of ``initialize``."""

    mode: Literal["local"] = "local"
    seed: int = 42
    groups: tuple[DeviceGroup, ...] = ()
    device_mesh: DeviceMesh | None = None
    name: str | None = None
    notifier: Notifier | None = None


class Process:
    """What one process was told by ``initialize``. Each process has one, whose methods are this module's functions."""

    def __init__(self) -> None:
        self._runtime = Runtime()

    def initialize(
        self,
        mode: str = "local",
        nproc_per_node: int | None = None,
        ncpu_proc_per_node: int | None = None,
        seed: int = 42,
        full_determinism: bool = False,
        groups: Sequence[DeviceGroup] | None = None,
        global_device_mesh: DeviceMesh | None = None,
        lazy_collect: bool = True,
        name: str | None = None,
        notifier: Notifier | None = None,
    ) -> None:
        """Set up this process for a script. Under torchrun it also meets the other ranks: it waits for them all.

        Args:
            mode: ``local``: components run in this process, under torchrun in step with the same process of every rank.
            nproc_per_node: Of the mode ``ray``; here the launcher says how many there are.
            ncpu_proc_per_node: Of the mode ``ray``.
            seed: Of Python's, NumPy's and torch's random numbers.
            full_determinism: Refuse torch operations whose results may differ between runs.
            groups: The devices that components may name.
            global_device_mesh: The layout of components that bring none; if omitted, all ranks on the axis ``dp``.
            lazy_collect: Of the mode ``ray``; here every call returns its result.
            name: What this run is called where it is told of.
            notifier: Is called with a sentence when an exception ends this process.

        Raises:
            ConfigError: The mode is unknown or not offered, or the mesh does not fit the processes that were started.
        """
        if mode == "ray":
            raise ConfigError(
                "mode: 'ray' is not offered yet; it will come as the extra twinkle-queue[ray]. Use mode='local', under"
                " torchrun for several devices"
            )
        if mode != "local":
            raise ConfigError(f"mode: {mode!r} is unknown; use 'local'")
        check_groups(groups or ())
        rank, world_size = current_rank(), current_world_size()
        if global_device_mesh is None and world_size > 1:
            # Else each rank would train a model of its own, and nothing would show it.
            global_device_mesh = DeviceMesh.from_sizes(dp_size=world_size)
        if global_device_mesh is not None and global_device_mesh.world_size != world_size:
            raise ConfigError(
                f"global_device_mesh: has {global_device_mesh.world_size} ranks ({global_device_mesh}),"
                f" but {world_size} processes were started; run"
                f" torchrun --nproc_per_node={global_device_mesh.world_size}"
            )
        if rank > 0:
            quieten_rank()
        watch_end(rank=rank, world_size=world_size, name=name, notifier=notifier)
        Framework.seed_everything(seed, full_determinism)
        if world_size > 1:
            wanted = None if global_device_mesh is None else global_device_mesh.device_type
            platform = Platform.current() if wanted is None else Platform.named(wanted)
            join_world(platform, timeout_s=COLLECTIVE_TIMEOUT_S)
        self._runtime = Runtime(
            seed=seed, groups=tuple(groups or ()), device_mesh=global_device_mesh, name=name, notifier=notifier
        )
        log.info("runtime.initialized", mode=mode, world_size=world_size, rank=rank, seed=seed)

    def runtime(self) -> Runtime:
        """What ``initialize`` was told; its defaults before that."""
        return self._runtime

    def mesh_of(self, device_mesh: DeviceMesh | None) -> DeviceMesh | None:
        """The layout of a component: the one it was given, else the global one, which a process alone may not have."""
        return self._runtime.device_mesh if device_mesh is None else device_mesh


_this_process = Process()
initialize = _this_process.initialize
runtime = _this_process.runtime
mesh_of = _this_process.mesh_of


def is_master() -> bool:
    """Whether this process is the one that prints and saves: rank 0, or alone."""
    return current_rank() == 0
