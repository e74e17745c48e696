"""Which groups get which devices of which nodes: one bundle of a placement group for each worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from twinkle.core.errors import ConfigError
from twinkle.core.process.cluster_room import Node, OnDevices, cpus_of_a_worker
from twinkle.core.process.events import event_log
from twinkle.infra.device_group import DeviceGroup

PLACEMENT_TIMEOUT_S = 60.0
RESOURCES = {"cuda": "GPU", "npu": "NPU", "xpu": "GPU"}
"""What Ray calls the devices of a type; of the others it has processors only."""
CPU = "CPU"

log = event_log()


@dataclass(frozen=True)
class Seat:
    """What one worker needs: ``count`` devices of a resource, the same for whoever names the same numbers."""

    device_type: str
    numbers: tuple[int, ...]
    resource: str

    @property
    def count(self) -> int:
        """How many devices."""
        return len(self.numbers)


@dataclass(frozen=True)
class Placed:
    """Where the workers of all groups go."""

    group: PlacementGroup | None
    bundles: dict[Seat, int]
    nodes: dict[int, str]
    """By bundle, the node."""
    on_cpu: frozenset[str]
    """The groups of accelerators that run on processors here."""

    def seats(self, group: DeviceGroup) -> list[Seat]:
        """Of a group's workers, in the order of ranks."""
        return _seats(group, is_on_cpu=group.name in self.on_cpu)

    def remove(self) -> None:
        """Give the devices back."""
        if self.group is not None:
            remove_placement_group(self.group)


def place_groups(groups: Sequence[DeviceGroup], timeout_s: float = PLACEMENT_TIMEOUT_S) -> Placed:
    """Take the devices of all groups, consecutive ranks on the same node as far as it has room. Blocks until they are.

    Raises:
        ConfigError: The cluster has too few, others hold them, or groups share devices but not worker by worker.
    """
    total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    on_cpu = frozenset(group.name for group in groups if _falls_back(group, total))
    if on_cpu:
        log.warning(
            "ray.groups.on_cpu", groups=sorted(on_cpu), next="the cluster has no such device; they run on processors"
        )
    seats: dict[Seat, None] = {}
    for group in groups:
        seats |= dict.fromkeys(_seats(group, is_on_cpu=group.name in on_cpu))
    if not seats:
        return Placed(None, {}, {}, on_cpu)
    _check_overlap(list(seats))
    wanted = {name: sum(seat.count for seat in seats if seat.resource == name) for name in RESOURCES.values()}
    for name, count in wanted.items():
        if count > total.get(name, 0):
            raise ConfigError(
                f"groups: want {count} {name}s, and the cluster has {total.get(name, 0):g}; lower DeviceGroup.ranks or"
                " add nodes"
            )
    # Where there are fewer processors than workers, these share them.
    share = cpus_of_a_worker(_nodes(), len(seats), _on_devices(list(seats)))
    if share is None:
        raise ConfigError(f"groups: {len(seats)} workers on a cluster of {total.get(CPU, 0):g} processors; add nodes")
    bundles = [{CPU: share} | ({} if seat.resource == CPU else {seat.resource: seat.count}) for seat in seats]
    group = placement_group(bundles, strategy="PACK")
    if not group.wait(timeout_s):
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        remove_placement_group(group)
        raise ConfigError(
            f"groups: {len(seats)} workers found no room within {timeout_s:g} s; free are"
            f" {free.get(CPU, 0):g} processors, {free.get('GPU', 0):g} GPUs: somebody else holds the rest"
        )
    nodes = dict(placement_group_table(group)["bundles_to_node_id"])
    return Placed(group, _numbered(list(seats), nodes), nodes, on_cpu)


def _nodes() -> list[Node]:
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return [Node(num_cpus=has.get(CPU, 0.0), devices=has) for has in alive]


def _on_devices(seats: Sequence[Seat]) -> list[OnDevices]:
    kinds = Counter((seat.resource, seat.count) for seat in seats if seat.resource != CPU)
    return [OnDevices(device=resource, num_workers=number, each=count) for (resource, count), number in kinds.items()]


def _falls_back(group: DeviceGroup, total: dict[str, float]) -> bool:
    resource = RESOURCES.get(group.device_type)
    return resource is not None and not total.get(resource)


def _seats(group: DeviceGroup, *, is_on_cpu: bool) -> list[Seat]:
    numbers, each = group.rank_numbers, group.gpus_per_worker
    resource = CPU if is_on_cpu else RESOURCES.get(group.device_type, CPU)
    return [
        Seat(group.device_type, tuple(numbers[first : first + each]), resource)
        for first in range(0, len(numbers), each)
    ]


def _check_overlap(seats: list[Seat]) -> None:
    for index, seat in enumerate(seats):
        for other in seats[index + 1 :]:
            shared = set(seat.numbers) & set(other.numbers)
            if seat.device_type == other.device_type and shared:
                raise ConfigError(
                    f"groups: device {min(shared)} is of a worker with {list(seat.numbers)} and of another with"
                    f" {list(other.numbers)}; groups that share devices must share them worker by worker"
                )


def _numbered(seats: list[Seat], nodes: dict[int, str]) -> dict[Seat, int]:
    """Which bundle each seat gets: consecutive ones lie on the same node, of those that are alike."""
    order = {node: place for place, node in enumerate(dict.fromkeys(nodes.values()))}
    chosen: dict[Seat, int] = {}
    kinds = {(seat.resource, seat.count) for seat in seats}
    for resource, count in kinds:
        alike = [index for index, seat in enumerate(seats) if (seat.resource, seat.count) == (resource, count)]
        by_node = sorted(alike, key=lambda bundle: order[nodes[bundle]])
        chosen |= {seats[index]: bundle for index, bundle in zip(alike, by_node, strict=True)}
    return chosen
