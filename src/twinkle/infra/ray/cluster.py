"""Connects to Ray or starts it, and makes the workers of groups when a component is first placed there."""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import os
import sys
import traceback
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from twinkle.core.errors import ConfigError
from twinkle.core.process.events import event_log
from twinkle.core.process.ray_token import TOKEN_HINT
from twinkle.infra.device_group import DeviceGroup
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.platform import Platform
from twinkle.infra.ray.calls import Workers
from twinkle.infra.ray.component import RemoteEnd, make_end
from twinkle.infra.ray.placement import CPU, Placed, Seat, place_groups
from twinkle.infra.ray.tensors import send_tensors_by_memory
from twinkle.infra.ray.worker import Worker, WorkerPlace
from twinkle.infra.remote import END
from twinkle.infra.runtime import Runtime
from twinkle.infra.spread import Layout

ADDRESS_VARIABLE = "RAY_ADDRESS"
SHARED_GPU = 0.01
"""What a worker asks Ray of the one GPU of its bundle: workers of several objects may share it."""
LOOPBACK = "127.0.0.1"
ENVIRONMENT = ("TWINKLE_", "HF_", "MODELSCOPE_", "TOKENIZERS_", "LOG_LEVEL")
"""What of the script's environment a worker of an existing cluster needs too."""
MEETS_OTHERS = "meets_other_ranks"
"""A class that says ``meets_other_ranks = False`` needs no world of its group's ranks."""
INTERRUPTED_EXIT = 1

log = event_log()


@dataclass(eq=False)
class Crew:
    """The workers that the objects of one group and instance share."""

    workers: Workers
    mesh: DeviceMesh
    facts: list[tuple[str, int, str]]
    """By rank: address of the node, process, devices."""
    has_met: bool = False


def start_cluster(told: Runtime) -> RayCluster:
    """Connect to the cluster that ``RAY_ADDRESS`` names, or start one of this machine; then take the groups' devices.

    Raises:
        ConfigError: There is no cluster at the address, or it has not the devices.
    """
    owns = not ray.is_initialized()
    if owns:
        _connect(told)
    try:
        send_tensors_by_memory()
        return RayCluster(told, place_groups(told.groups), owns=owns)
    except BaseException:
        if owns:
            ray.shutdown()
        raise


def _connect(told: Runtime) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get(ADDRESS_VARIABLE)
    try:
        if address:
            ray.init(address=address, log_to_driver=True, logging_level=logging.WARNING)
            return
        # Ranks beyond the processors take turns; one more is for what is not of a group.
        wanted = sum(group.num_workers for group in told.groups) + 1
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, wanted),
            include_dashboard=False,
            log_to_driver=True,
            logging_level=logging.WARNING,
        )
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        where = f"at {ADDRESS_VARIABLE}={address}" if address else "of this machine"
        hint = f"; {TOKEN_HINT}" if address else ""
        raise ConfigError(f"mode: no Ray cluster {where} could be reached or started: {error}{hint}") from error


class RayCluster:
    """The workers of a script's groups."""

    def __init__(self, told: Runtime, placed: Placed, *, owns: bool) -> None:
        self._told = told
        self._placed = placed
        self._owns = owns
        self._crews: dict[tuple[str, str], Crew] = {}
        self._taken: set[Seat] = set()
        self._components: dict[str, list[str]] = {}
        self._ends: weakref.WeakSet[RemoteEnd] = weakref.WeakSet()
        self._is_stopped = False
        atexit.register(self._at_exit)

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
        """See ``runtime.Cluster``.

        Raises:
            ConfigError: The component's mesh has another size than the group.
            Exception: What the constructor raised.
        """
        crew = self._crew(group, instance_id)
        is_alone = execute == "first"
        args, kwargs, mesh = self._fitting(kind, args, kwargs, group, crew)
        if not is_alone and getattr(kind, MEETS_OTHERS, True):
            self._meet(group, crew)
        layout = Layout(1) if is_alone else Layout(crew.workers.size, mesh)
        component = make_end(
            kind, crew.workers, layout, args, kwargs, is_alone=is_alone, is_lazy=self._told.lazy_collect
        )
        self._ends.add(vars(component)[END])
        self._components.setdefault(group, []).append(kind.__name__)
        return component

    def describe(self) -> list[str]:
        """See ``runtime.Cluster``."""
        lines = []
        for group in self._told.groups:
            kind = "cpu (for want of others)" if group.name in self._placed.on_cpu else group.device_type
            holds = ", ".join(self._components.get(group.name, ())) or "nothing yet"
            lines.append(f"group {group.name}: {group.num_workers} workers on {kind}; holds {holds}")
            for (name, instance), crew in self._crews.items():
                if name == group.name:
                    lines += [
                        f"  rank {rank}{f' of {instance}' if instance else ''}: node {address}, process {process},"
                        f" {devices}"
                        for rank, (address, process, devices) in enumerate(crew.facts)
                    ]
        return lines

    def stop(self) -> None:
        """See ``runtime.Cluster``."""
        if self._is_stopped:
            return
        self._is_stopped = True
        atexit.unregister(self._at_exit)
        if not ray.is_initialized():
            return
        for crew in self._crews.values():
            if crew.workers.lost is None:
                crew.workers.lost = "the script has stopped the workers"
                for handle in crew.workers.handles:
                    ray.kill(handle)
        self._placed.remove()
        if self._owns:
            ray.shutdown()

    def _at_exit(self) -> None:
        """Of a script that ends well, the calls that it has not waited for are; then all workers end."""
        failed = False
        if "last_type" not in vars(sys):
            try:
                left_behind = [backlog for crew in self._crews.values() for backlog in crew.workers.left_behind]
                for backlog in (*left_behind, *(end.backlog for end in self._ends)):
                    backlog.wait()
            except Exception:  # noqa: BLE001 - nobody is left to raise it to
                traceback.print_exc()
                failed = True
        self.stop()
        if failed:
            # An exit code is all that can be said now: what is raised here is printed and forgotten.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED_EXIT)

    # Workers.

    def _crew(self, name: str, instance_id: str) -> Crew:
        found = self._crews.get((name, instance_id))
        if found is None:
            group = next(group for group in self._told.groups if group.name == name)
            found = self._crews[name, instance_id] = self._start(group)
        found.workers.require("a component")
        return found

    def _start(self, group: DeviceGroup) -> Crew:
        mesh = self._mesh_of_group(group)
        told = replace(self._told, device_mesh=mesh, own_group=group.name, cluster=None, notifier=None)
        seats = self._placed.seats(group)
        if any(seat in self._taken and seat.count > 1 and seat.resource != CPU for seat in seats):
            raise ConfigError(
                f"remote_group: {group.name!r} has workers already, of {group.gpus_per_worker} devices each, which Ray"
                " lends one process alone; give the component a group of its own"
            )
        self._taken.update(seats)
        visible = _visible_devices(group, is_on_cpu=group.name in self._placed.on_cpu)
        handles = [
            self._start_worker(
                seat,
                WorkerPlace(
                    group=group.name,
                    rank=rank,
                    size=len(seats),
                    told=told,
                    folder=os.getcwd(),
                    import_path=tuple(sys.path),
                    environment={name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)},
                    visible_devices=visible[rank],
                ),
                has_own_devices=visible[rank] is not None,
            )
            for rank, seat in enumerate(seats)
        ]
        workers = Workers(group.name, handles)
        facts = workers.gathered("start", [handle.describe.remote() for handle in handles])
        return Crew(workers, mesh, facts)

    def _start_worker(self, seat: Seat, place: WorkerPlace, *, has_own_devices: bool) -> Any:
        devices: dict[str, Any] = {}
        if seat.resource == "GPU" and not has_own_devices:
            devices["num_gpus"] = SHARED_GPU if seat.count == 1 else seat.count
        elif seat.resource != CPU and not has_own_devices:
            devices["resources"] = {seat.resource: SHARED_GPU if seat.count == 1 else seat.count}
        assert self._placed.group is not None, "there are groups"
        actor = ray.remote(Worker).options(
            num_cpus=0,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._placed.group, placement_group_bundle_index=self._placed.bundles[seat]
            ),
            **devices,
        )
        return actor.remote(place)

    def _mesh_of_group(self, group: DeviceGroup) -> DeviceMesh:
        mesh = self._told.device_mesh
        if mesh is None:
            return DeviceMesh.from_sizes(dp_size=group.num_workers)
        if mesh.world_size != group.num_workers:
            # Of its components each must bring one, and the data ranks of a mesh that fits nothing are no default.
            return DeviceMesh.from_sizes(dp_size=group.num_workers)
        return self._on_what_is_there(mesh, group.name)

    def _on_what_is_there(self, mesh: DeviceMesh, group: str) -> DeviceMesh:
        return replace(mesh, device_type=CPU.lower()) if group in self._placed.on_cpu and mesh.device_type else mesh

    def _fitting(
        self, kind: type, args: tuple[Any, ...], kwargs: Mapping[str, Any], group: str, crew: Crew
    ) -> tuple[tuple[Any, ...], dict[str, Any], DeviceMesh]:
        """The constructor's arguments as the workers get them, and the component's mesh."""
        signature = inspect.signature(kind.__init__)  # type: ignore[misc]
        bound = signature.bind_partial(None, *args, **kwargs).arguments
        mesh = kwargs.get("device_mesh", bound.get("device_mesh"))
        if not isinstance(mesh, DeviceMesh):
            told = self._told.device_mesh
            if told is not None and told.world_size != crew.workers.size and getattr(kind, "_places_on", "") != "first":
                raise ConfigError(
                    f"device_mesh: {kind.__name__} on group {group!r} brings none, and that of initialize has"
                    f" {told.world_size} ranks ({told}) for its {crew.workers.size} workers; give it one"
                )
            return args, dict(kwargs), crew.mesh
        if mesh.world_size != crew.workers.size:
            raise ConfigError(
                f"device_mesh: of {kind.__name__} has {mesh.world_size} ranks ({mesh}), but group {group!r} has"
                f" {crew.workers.size} workers; make them equal"
            )
        there = self._on_what_is_there(mesh, group)
        swapped = functools.partial(_swapped, old=mesh, new=there)
        return tuple(map(swapped, args)), {name: swapped(value) for name, value in kwargs.items()}, there

    def _meet(self, name: str, crew: Crew) -> None:
        """Let the ranks of a crew be one world; once, before the first component that needs it."""
        if crew.has_met or crew.workers.size == 1:
            return
        group = next(group for group in self._told.groups if group.name == name)
        device_type = CPU.lower() if name in self._placed.on_cpu else group.device_type
        addresses = [address for address, _, _ in crew.facts]
        is_one_machine = len(set(addresses)) == 1
        workers, what = crew.workers, "the meeting of ranks"
        host = LOOPBACK if is_one_machine else addresses[0]
        [(host, port)] = workers.gathered(what, [workers.handles[0].open_meeting.remote(host)])
        workers.gathered(
            what,
            [
                handle.meet.remote(
                    host,
                    port,
                    Platform.named(device_type).device_type,
                    addresses[:rank].count(addresses[rank]),
                    addresses.count(addresses[rank]),
                )
                for rank, handle in enumerate(workers.handles)
            ],
        )
        crew.has_met = True


def _swapped(value: Any, *, old: DeviceMesh, new: DeviceMesh) -> Any:
    return new if value is old else value


def _visible_devices(group: DeviceGroup, *, is_on_cpu: bool) -> list[tuple[str, str] | None]:
    """For each worker the variable and its value, where the group says which physical devices it means."""
    variable = Platform.named(group.device_type).visible_devices_variable
    if group.visible_devices is None or is_on_cpu or variable is None:
        return [None] * group.num_workers
    devices = [device.strip() for device in group.visible_devices.split(",")]
    if len(devices) != len(group.rank_numbers):
        raise ConfigError(
            f"DeviceGroup.visible_devices: {group.visible_devices} are {len(devices)} devices for the"
            f" {len(group.rank_numbers)} ranks of group {group.name}; name one for each"
        )
    each = group.gpus_per_worker
    return [(variable, ",".join(devices[first : first + each])) for first in range(0, len(devices), each)]
