"""How much of a CPU each worker on a Ray cluster may take, so that all of them find room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_ONE_CPU = 100
"""In the parts of one that workers are given."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """What one machine of a cluster has: CPUs, and devices by the names that Ray has for them."""

    num_cpus: float
    devices: Mapping[str, float] = field(default_factory=dict)

    def room(self, hundredths: int) -> int:
        """For how many workers there is, each with so many hundredths of a CPU. A worker is on one node."""
        return round(_ONE_CPU * self.num_cpus) // hundredths


@dataclass(frozen=True, kw_only=True)
class OnDevices:
    """Workers that take so many devices of a kind each."""

    device: str
    num_workers: int
    each: int = 1

    def room(self, nodes: Sequence[Node], hundredths: int) -> int:
        """For how many of them there is: on nodes with such devices alone."""
        return sum(min(int(node.devices.get(self.device, 0)) // self.each, node.room(hundredths)) for node in nodes)


def cpus_of_a_worker(nodes: Sequence[Node], num_workers: int, on_devices: Sequence[OnDevices] = ()) -> float | None:
    """The CPUs that each of so many workers takes: one, or where some would find no room then, as many as leave it.

    What is left of a node's CPUs, too little for a worker, is of no use to one elsewhere, and a node without devices
    has no room for who needs some. Workers for which there are too few devices count for nothing: they wait.

    Returns:
        Hundredths of a CPU; none where not even one hundredth each would do.
    """
    placed = {kind: min(kind.num_workers, kind.room(nodes, 1)) for kind in on_devices}
    num_placed = num_workers - sum(kind.num_workers - number for kind, number in placed.items())
    for hundredths in range(_ONE_CPU, 0, -1):
        has_room = sum(node.room(hundredths) for node in nodes) >= num_placed
        if has_room and all(kind.room(nodes, hundredths) >= number for kind, number in placed.items()):
            return hundredths / _ONE_CPU
    return None
