"""What a script says once about the processes it runs in, and what components ask about it later."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal, Protocol

from twinkle.core.errors import ConfigError
from twinkle.core.process.events import event_log
from twinkle.core.process.ray_token import take_token
from twinkle.infra.device_group import DeviceGroup, check_groups
from twinkle.infra.device_mesh import DeviceMesh, current_rank, current_world_size
from twinkle.infra.frameworks import Framework
from twinkle.infra.platform import Platform
from twinkle.infra.process_group import join_world
from twinkle.infra.rank_end import Notifier, watch_end
from twinkle.infra.rank_log import quieten_rank

COLLECTIVE_TIMEOUT_S = 600.0

log = event_log()


class Cluster(Protocol):
    """Workers elsewhere, as the script sees them."""

    def place(
        self,
        kind: type,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        group: str,
        execute: Literal["first", "peer", "all"],
        instance_id: str,
    ) -> object:
        """Make an object on the workers of a group; the script's end of it."""
        ...

    def describe(self) -> list[str]:
        """Who runs where, a line each."""
        ...

    def stop(self) -> None:
        """End the workers."""
        ...


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The answers of ``initialize``.

    ``cluster`` is there in a script that has workers elsewhere, ``own_group`` in these workers.
    ``is_for_group`` while a worker makes an object that serves the whole group.
    """

    mode: Literal["local", "ray"] = "local"
    seed: int = 42
    full_determinism: bool = False
    groups: tuple[DeviceGroup, ...] = ()
    device_mesh: DeviceMesh | None = None
    name: str | None = None
    notifier: Notifier | None = None
    lazy_collect: bool = True
    cluster: Cluster | None = None
    own_group: str | None = None
    is_for_group: bool = False


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
                ``ray``: those that name a ``remote_group`` run on the workers of that group; the script is one process.
                ``RAY_ADDRESS`` names the cluster; without it one of this machine starts, and ends with the script.
            nproc_per_node: Taken for the sake of scripts: a launcher, or Ray's nodes, say how many there are.
            ncpu_proc_per_node: As ``nproc_per_node``.
            seed: Of Python's, NumPy's and torch's random numbers, here and in every worker.
            full_determinism: Refuse torch operations whose results may differ between runs.
            groups: The devices that components may name.
            global_device_mesh: The layout of components that bring none; if omitted, all ranks on the axis ``dp``.
            lazy_collect: With ``ray``, whether calls give back a function that waits for the result, unless their mark
                says otherwise; in one process every call returns its result.
            name: What this run is called where it is told of.
            notifier: Is called with a sentence when an exception ends this process.

        Raises:
            ConfigError: The mode is unknown, Ray is not installed or has not the devices, or the mesh does not fit the
                processes that were started.
        """
        if mode not in ("local", "ray"):
            raise ConfigError(f"mode: {mode!r} is unknown; use 'local' or 'ray'")
        check_groups(groups or ())
        self.forget()
        told = Runtime(
            mode="ray" if mode == "ray" else "local",
            seed=seed,
            full_determinism=full_determinism,
            groups=tuple(groups or ()),
            device_mesh=global_device_mesh,
            name=name,
            notifier=notifier,
            lazy_collect=lazy_collect,
        )
        self._runtime = self._as_driver(told) if told.mode == "ray" else self._as_rank(told)

    def forget(self) -> None:
        """End what an earlier ``initialize`` has started, and forget what it was told."""
        if self._runtime.cluster is not None:
            self._runtime.cluster.stop()
        self._runtime = Runtime()

    def _as_rank(self, told: Runtime) -> Runtime:
        rank, world_size = current_rank(), current_world_size()
        mesh = told.device_mesh
        if mesh is None and world_size > 1:
            # Else each rank would train a model of its own, and nothing would show it.
            mesh = DeviceMesh.from_sizes(dp_size=world_size)
        if mesh is not None and mesh.world_size != world_size:
            raise ConfigError(
                f"global_device_mesh: has {mesh.world_size} ranks ({mesh}),"
                f" but {world_size} processes were started; run"
                f" torchrun --nproc_per_node={mesh.world_size}"
            )
        if rank > 0:
            quieten_rank()
        watch_end(rank=rank, world_size=world_size, name=told.name, notifier=told.notifier)
        Framework.seed_everything(told.seed, told.full_determinism)
        if world_size > 1:
            wanted = None if mesh is None else mesh.device_type
            platform = Platform.current() if wanted is None else Platform.named(wanted)
            join_world(platform, timeout_s=COLLECTIVE_TIMEOUT_S)
        log.info("runtime.initialized", mode="local", world_size=world_size, rank=rank, seed=told.seed)
        return replace(told, device_mesh=mesh)

    @staticmethod
    def _as_driver(told: Runtime) -> Runtime:
        if current_world_size() > 1:
            raise ConfigError(
                f"mode: 'ray' is one process that reaches the workers, but {current_world_size()} were started; run the"
                " script with python, or use mode='local' under torchrun"
            )
        if find_spec("ray") is None:
            raise ConfigError("mode: 'ray' needs Ray; pip install 'twinkle-queue[ray]', or use mode='local'")
        take_token(os.environ.get("RAY_ADDRESS"))
        from twinkle.infra.ray.cluster import start_cluster  # noqa: PLC0415 - scripts without it never load Ray

        watch_end(rank=0, world_size=1, name=told.name, notifier=told.notifier)
        Framework.seed_everything(told.seed, told.full_determinism)
        cluster = start_cluster(told)
        log.info("runtime.initialized", mode="ray", groups=[group.name for group in told.groups], seed=told.seed)
        return replace(told, cluster=cluster)

    def become_worker(self, told: Runtime) -> None:
        """Be a worker of a group: seeded as a rank of torchrun is, and quiet unless the first."""
        if current_rank() > 0:
            quieten_rank()
        Framework.seed_everything(told.seed, told.full_determinism)
        self._runtime = told

    @contextmanager
    def serving_group(self) -> Iterator[None]:
        """While it lasts, what is made here is made for the whole group."""
        before = self._runtime
        self._runtime = replace(before, is_for_group=True)
        try:
            yield
        finally:
            self._runtime = before

    def runtime(self) -> Runtime:
        """What ``initialize`` was told; its defaults before that."""
        return self._runtime

    def mesh_of(self, device_mesh: DeviceMesh | None) -> DeviceMesh | None:
        """The layout of a component: the one it was given, else the global one, which a process alone may not have."""
        return self._runtime.device_mesh if device_mesh is None else device_mesh

    def serves_all_ranks(self) -> bool:
        """Whether this process has the data of all ranks: the script with workers elsewhere, or the worker it asks."""
        return self._runtime.cluster is not None or self._runtime.is_for_group


_this_process = Process()
initialize = _this_process.initialize
runtime = _this_process.runtime
mesh_of = _this_process.mesh_of
serves_all_ranks = _this_process.serves_all_ranks
become_worker = _this_process.become_worker
serving_group = _this_process.serving_group
forget = _this_process.forget


def is_master() -> bool:
    """Whether this process is the one that prints and saves: rank 0, or alone."""
    return current_rank() == 0
